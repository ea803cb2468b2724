"""Streams as users meet them: appending inside a run, and reading outside."""

import itertools
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from everstep.codec import ANY
from everstep.effects.body import StepBody
from everstep.effects.surroundings import CURRENT, persons_line
from everstep.engine.history import Recorded, key_of, refuse_deleted
from everstep.engine.journal import unpacked
from everstep.engine.streaming import AppendEntry, check_size
from everstep.errors import Damaged, Misuse, SecretsLeftOut, UnknownRun
from everstep.model import events as ev
from everstep.model.digests import entry_digest, stream_start
from everstep.model.ids import checked_name, checked_run_id
from everstep.model.secrets import HIDDEN
from everstep.model.status import ENDED
from everstep.model.untrusted import text_of
from everstep.stores.beside import EntryRow
from everstep.stores.protocol import RunRow, Store

if TYPE_CHECKING:
    from everstep.engine.app import App
    from everstep.engine.blocking_app import BlockingApp

PAGE: Final = 500
"""So many entries are read at once."""
HISTORY_POSITIONS: Final = 1_000_000_000
"""Positions that each history of a run has for one stream: those of its next generation begin behind them."""


class Stream:
    """Append-only output of a run that others read while it runs."""

    def __init__(self, name: str) -> None:
        self.name = checked_name(name, "stream")

    def append(self, value: Any) -> None:
        """Append an entry. It does not wait: readers get it when it is durable."""
        from everstep.engine.execution import Execution

        current = CURRENT.get()
        if isinstance(current, StepBody):
            current.take_entry(self.name, value)
        elif isinstance(current, Execution):
            current.require_live()
            payload = current.codec.encode(value, ANY, f"an entry of the stream {self.name!r}")
            check_size(self.name, payload)
            current.issue(AppendEntry(current.next_call(), self.name, payload, persons_line(sys._getframe(1))))
        else:
            raise Misuse("everstep.stream() is for code inside a run; it was called outside of one.")

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


def stream(name: str) -> Stream:
    """Return a stream of the run, to append to: `everstep.stream("tokens").append(token)`.

    In the body of a step, on any thread that has its context, entries are written in small batches and the body never
    waits for them; they carry the step's attempt. In workflow code each is an event, and is not written again in a
    replay. `run.stream(name)` reads them.
    """
    return Stream(name)


class Entry(NamedTuple):
    """An entry of a stream."""

    position: int
    """Its place in the stream, from 1. Later entries have greater ones, also after a `continue_as` or a restart, where
    they begin anew at the next 1,000,000,001."""
    value: Any
    step: str = ""
    """The step whose body wrote it; nothing if workflow code did."""
    attempt: int = 0
    first: bool = False
    """Whether its attempt begins here: what you have of the same step and generation is from an earlier attempt."""
    secret: bool = False
    """Whether a secret step wrote it: then do not show it."""
    at: int = 0
    """When it was appended, in microseconds since 1970."""
    generation: int = 1
    """The history of the run that it belongs to: `continue_as` and a restart begin the next one."""

    def __repr__(self) -> str:
        value = HIDDEN if self.secret else text_of(self.value, by=repr)
        by = f" by {self.step}, attempt {self.attempt}" if self.step else ""
        return f"<entry {self.position}{by}: {value}>"


async def read_stream(app: "App", run: str, name: str, after: int) -> AsyncIterator[Entry]:
    """Give the entries of a stream as they become durable, verified, until the run has ended."""
    checked_name(name, "stream")
    row = await app.read(_row, app, run)
    reader = await app.read(_reader_after, app.store, row, name, after)
    nudged = False
    while True:
        app.refuse_when_failed()
        row = await app.read(_row, app, run)  # before the entries: what is there when it ends is read
        try:
            page = await app.read(reader.page)
        except Damaged:
            await app.read(_row, app, run)  # it may be that it is being deleted
            raise
        for entry in page:
            yield _entry(app, entry)
        if page:
            continue
        if row.generation > reader.generation:  # this history has ended, and all of it is read
            reader = await app.read(_next_reader, app.store, row, name, reader)
            continue
        if row.status in ENDED:
            await app.read(_row, app, run)  # what is being deleted has no end that could be trusted
            return
        if not nudged:
            nudged = True
            app.pump.start()
            app.pump.nudge()
        await app.watchers.watch(run)


def entries_now(app: "App", run: str, name: str, after: int = 0) -> Iterator[Entry]:
    """Give the entries that a stream has now, verified."""
    row = _row(app, run)
    reader = _reader_after(app.store, row, checked_name(name, "stream"), after)
    while True:
        for entry in reader.entries():
            yield _entry(app, entry)
        if row.generation <= reader.generation:
            return
        reader = _next_reader(app.store, row, name, reader)


def _reader_after(store: Store, row: RunRow, name: str, after: int) -> "Reader":
    """Return what reads behind a position; from the beginning, it begins with the history that began the others."""
    generation, place = after // HISTORY_POSITIONS + 1, after % HISTORY_POSITIONS
    if after == 0:
        generation = row.generation
        while generation > 1 and _was_continued(store, row.id, generation - 1):
            generation -= 1
    elif generation > row.generation:
        raise Misuse(f"The stream {name!r} of run {row.id} has no entry {after}, so none behind it.")
    return Reader(store, msgspec.structs.replace(row, generation=generation), name, place)


def _next_reader(store: Store, row: RunRow, name: str, reader: "Reader") -> "Reader":
    return Reader(store, msgspec.structs.replace(row, generation=reader.generation + 1), name)


def _was_continued(store: Store, run: str, generation: int) -> bool:
    """Tell whether the code itself went on with a fresh history after this generation; else the run was restarted."""
    started = store.events(run, generation + 1, only=[1])
    return bool(started) and ev.decode_body("run_started", started[0].body).carried is not None


def stream_of(blocking: "BlockingApp", run: str, name: str) -> list[Entry]:
    """Return all entries that a stream has now, verified, and none if there is no such run."""
    app = blocking.inner

    def read() -> list[Entry]:
        return list(entries_now(app, run, name)) if app.store.run(checked_run_id(run)) is not None else []

    return blocking.wait(app.read(read))


def _entry(app: "App", row: EntryRow) -> Entry:
    if row.secret and not row.value:
        raise SecretsLeftOut(
            f"Entry {row.position} of stream {row.name!r} of run {row.run} is secret, and was left out when the run "
            "was exported. Export it again with secrets=True (--with-secrets)."
        )
    value = app.codec.decode(unpacked(row.value, f"entry {row.position} of stream {row.name}"))
    position = (row.generation - 1) * HISTORY_POSITIONS + row.position
    who = (row.step, row.attempt, bool(row.first), bool(row.secret))
    return Entry(position, value, *who, row.at, row.generation)


def _row(app: "App", run: str) -> RunRow:
    row = app.store.run(checked_run_id(run))
    if row is None:
        raise UnknownRun(f"There is no run {run!r} in {app.store.url}. `everstep ls` lists the runs there.")
    refuse_deleted(app.store, row)
    return row


class Reader:
    """Reads a stream of one history from a place on, and believes nothing that does not match its digest."""

    def __init__(self, store: Store, row: RunRow, name: str, after: int = 0) -> None:
        self.generation = row.generation
        self._store = store
        self._run = row.id
        self._name = name
        self._position = after
        self._key = key_of(store.events(row.id, row.generation, only=[1]), row, store.chain)
        self._digest = self._digest_at(after)

    def _digest_at(self, position: int) -> bytes:
        if position < 0:
            raise Misuse(f"after={position!r}: it is the position of an entry, or 0 for the beginning.")
        if position == 0:
            return stream_start(self._run, self.generation, self._name)
        found = self._store.stream(self._run, self.generation, self._name, position - 1, 1)
        if not found or found[0].position != position:
            raise Misuse(f"The stream {self._name!r} of run {self._run} has no entry {position}, so none behind it.")
        return found[0].digest

    def page(self) -> Sequence[EntryRow]:
        """Return the next entries, as many as there are, up to a page."""
        rows = self._store.stream(self._run, self.generation, self._name, self._position, PAGE)
        for row in rows:
            if row.position != self._position + 1:
                raise Damaged(f"Entry {self._position + 1} of stream {self._name!r} of run {self._run} is missing.")
            is_left_out = row.secret and not row.value
            if not is_left_out and entry_digest(self._digest, *row[3:11], key=self._key) != row.digest:
                raise Damaged(
                    f"Entry {row.position} of stream {self._name!r} of run {self._run} does not match its digest."
                )
            self._position, self._digest = row.position, row.digest
        return rows

    def entries(self) -> Iterator[EntryRow]:
        """Give all entries, verified."""
        while page := self.page():
            yield from page


def copied_streams(store: Store, row: RunRow, generation: int, run: str, bodies: list[ev.Body]) -> list[EntryRow]:
    """Return the entries that some events tell of, linked anew for a run that begins with these events.

    The bodies of the events are exchanged for ones with the new digests. What an attempt under way has written is not
    copied: no event tells of it.
    """
    ends: dict[str, int] = {}
    for body in bodies:
        if isinstance(body, (ev.StreamAppended, ev.StreamNoted)):
            ends[body.name] = max(ends.get(body.name, 0), body.position)
    copied: list[EntryRow] = []
    digests: dict[tuple[str, int], str] = {}
    source, key = msgspec.structs.replace(row, generation=generation), store.chain.writing.key
    for name, end in ends.items():
        reader, digest = Reader(store, source, name), stream_start(run, 1, name)
        for entry in itertools.islice(reader.entries(), end):
            digest = entry_digest(digest, *entry[3:11], key=key)
            digests[name, entry.position] = digest.hex()
            copied.append(entry._replace(run=run, generation=1, digest=digest))
    for place, body in enumerate(bodies):
        if isinstance(body, (ev.StreamAppended, ev.StreamNoted)):
            if (body.name, body.position) not in digests:
                raise Damaged(f"Entry {body.position} of stream {body.name!r} of run {row.id} is missing.")
            bodies[place] = msgspec.structs.replace(body, digest=digests[body.name, body.position])
    return copied


def verify_streams(store: Store, row: RunRow, history: Sequence[Recorded]) -> None:
    """Raise `Damaged` unless every entry matches its digest, and all that the history tells of are there."""
    noted: dict[str, dict[int, str]] = {}
    for event in history:
        if event.kind in ("stream_appended", "stream_noted"):
            noted.setdefault(event.body.name, {})[event.body.position] = event.body.digest
    names = {name for name, _ in store.streams(row.id, row.generation)}
    for name in sorted(names | noted.keys()):
        expected = noted.get(name, {})
        for position, digest in ((one.position, one.digest) for one in Reader(store, row, name).entries()):
            if expected.pop(position, digest.hex()) != digest.hex():
                raise Damaged(
                    f"Entry {position} of stream {name!r} of run {row.id} is another than its history tells of.",
                    row.head_seq,
                )
        if expected:
            raise Damaged(
                f"Entry {min(expected)} of stream {name!r} of run {row.id} is missing, and its history tells of it.",
                row.head_seq,
            )
