"""Reading a stream from outside of its run."""

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from everstep.engine.history.journal import unpacked
from everstep.engine.history.streams import HISTORY_POSITIONS, Reader
from everstep.engine.history.verify import refuse_deleted, refuse_unreadable, unknown_run
from everstep.engine.process.host import Host
from everstep.errors import Damaged, Misuse, SecretsLeftOut
from everstep.model import events as ev
from everstep.model.ids import checked_name, checked_run_id
from everstep.model.secrets import HIDDEN
from everstep.model.status import ENDED
from everstep.model.untrusted import text_of
from everstep.stores.protocol import RunRow, Store
from everstep.stores.rows.answers_and_streams import EntryRow

if TYPE_CHECKING:
    pass


class Entry(NamedTuple):
    """An entry of a stream."""

    position: int
    """Its place in the stream, from 1. Later entries have greater ones, also after a `continue_as` or a restart, where
    they begin anew at the next 1,000,000,001."""
    value: Any
    step: str = ""
    """The step whose body wrote it; empty if workflow code did."""
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


async def read_stream(app: Host, run: str, name: str, after: int) -> AsyncIterator[Entry]:
    """Give the entries of a stream as they become durable, verified, until the run has ended."""
    checked_name(name, "stream")
    row = await app.read(_row, app, run)
    reader = await app.read(_reader_after, app.store, row, name, after)
    nudged = False
    while True:
        app.refuse_when_failed()
        with app.watchers.watching(run) as news:
            row = await app.read(_row, app, run)  # before the entries: those from before the end are read
            try:
                page = await app.read(reader.page)
            except Damaged:
                await app.read(_row, app, run)  # the run may be in deletion
                raise
            if not page and row.generation > reader.generation:  # this history has ended, and all of it is read
                reader = await app.read(_next_reader, app.store, row, name, reader)
            elif not page and row.status in ENDED:
                await app.read(_row, app, run)  # a run in deletion has no end that could be trusted
                return
            elif not page:
                if not nudged:
                    nudged = True
                    app.pump.start()
                    app.pump.nudge()
                await news
        for entry in page:
            yield _entry(app, entry)


def entries_now(app: Host, run: str, name: str, after: int = 0) -> Iterator[Entry]:
    """Give the present entries of a stream, verified."""
    row = _row(app, run)
    reader = _reader_after(app.store, row, checked_name(name, "stream"), after)
    while True:
        for entry in reader.entries():
            yield _entry(app, entry)
        if row.generation <= reader.generation:
            return
        reader = _next_reader(app.store, row, name, reader)


def _reader_after(store: Store, row: RunRow, name: str, after: int) -> "Reader":
    """Return a reader after a position; for the beginning, it begins with the first continued history."""
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
    """Return True if the code itself continued with a fresh history after this generation; else the run was
    restarted.
    """
    started = store.events(run, generation + 1, only=[1])
    return bool(started) and ev.decode_body("run_started", started[0].body).carried is not None


def _entry(app: Host, row: EntryRow) -> Entry:
    if row.secret and not row.value:
        raise SecretsLeftOut(
            f"Entry {row.position} of stream {row.name!r} of run {row.run} is secret, and was left out when the run "
            "was exported. Export it again with secrets=True (--with-secrets)."
        )
    value = app.codec.decode(unpacked(row.value, f"entry {row.position} of stream {row.name}"))
    position = (row.generation - 1) * HISTORY_POSITIONS + row.position
    who = (row.step, row.attempt, bool(row.first), bool(row.secret))
    return Entry(position, value, *who, row.at, row.generation)


def _row(app: Host, run: str) -> RunRow:
    row = app.store.run(checked_run_id(run))
    if row is None:
        raise unknown_run(app.store, run)
    refuse_deleted(app.store, row)
    refuse_unreadable(row)  # it would never appear to end
    return row
