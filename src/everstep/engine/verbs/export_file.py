"""Moving runs between stores by a file: JSON lines, each of them `["kind", content]`.

The first line says what the file is, and the last has a digest over all before it. Between them each run has a line
`run`, then its events, payloads, checkpoints and so on, in the order of `PARTS`. A payload is written once for all
runs of the file: later ones have only its digest. Bytes are Base64. After the runs come threads of frameworks, each
with its states, parts and writes, then items and schedules.

Families are moved whole, for a parent waits for its children. A file is written beside its name and takes that name
when it is complete and the runs that were exported with `hold` are held where they were.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from hashlib import blake2b
from typing import Any, BinaryIO, Final, Literal, NamedTuple, cast

import msgspec

from everstep.engine.code.recovery_point import verify_checkpoints, verify_whole
from everstep.engine.history.restored import Note, newest_note
from everstep.engine.history.verify import Recorded, refs_of, verified, verify_payloads
from everstep.errors import Damaged, Misuse
from everstep.model.chains import ChainKeys
from everstep.model.events import BODIES, EventRow, decode_body
from everstep.model.secrets import has_secrets, is_left_out, without_secrets
from everstep.model.status import ENDED
from everstep.stores.protocol import LAST, CheckpointRow, Delivery, HoldRow, RunRow, Store
from everstep.stores.rows.answers_and_streams import AnswerRow, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import EffectRow
from everstep.stores.rows.saved import SavedItem, SavedPart, SavedState, SavedWrite, ThreadDump, labels_of, namespace_of
from everstep.stores.rows.schedules import ScheduleRow
from everstep.stores.rows.transfer import Arrival, MarkerRow, RunDump, arrived

FORMAT: Final = 2
"""What this release reads. Files with nothing but runs in them, none of which may lack what it did after a backup, have
format 1, which older releases read as well."""
DIGEST_BYTES: Final = 32
Mode = Literal["hold", "leave", "ended"]
"""What became of unfinished runs where they were: held, or left to go on. `ended`: there were none."""

PARTS: Final[dict[str, Any]] = {
    "event": tuple[int, EventRow],
    "payload": tuple[str, bytes | None],
    "checkpoint": CheckpointRow,
    "delivery": Delivery,
    "follower": tuple[str, int],
    "hold": HoldRow,
    "effect": EffectRow,
    "wait": tuple[str, int],
    "archived": ArchiveRow,
    "marker": MarkerRow,
    "answer": AnswerRow,
    "entry": EntryRow,
    "arrival": Arrival,
}
"""The kinds of lines that follow a run's own, and what is in them."""
FIELDS: Final = ("events", "payloads", "checkpoints", "deliveries", "followers", "holds", "effects", "waits", "archive")
_FIELD_OF: Final = dict(zip(PARTS, (*FIELDS, "markers", "answers", "entries", "arrivals"), strict=True))
OF_THREADS: Final[dict[str, tuple[str, Any]]] = {
    "state": ("states", SavedState),
    "part": ("parts", SavedPart),
    "write": ("writes", SavedWrite),
}
"""The kinds of lines that follow that of a thread, their field, and what is in them."""
_encode: Final = msgspec.json.Encoder().encode
_line: Final = msgspec.json.Decoder(tuple[str, msgspec.Raw])


class Item(NamedTuple):
    """An item as it is in a file: its namespace as the application gave it, however a store writes that."""

    namespace: list[str]
    key: str
    value: bytes
    created_at: int
    updated_at: int
    expires_at: int | None = None
    seconds: float | None = None


class Header(msgspec.Struct, kw_only=True):
    """The first line."""

    format: int = 1
    mode: Mode
    at: int
    entropy: str
    """That of the store which the runs were in: the keys of shared actions derive from it."""
    runs: int


class Trailer(msgspec.Struct):
    """The last line."""

    lines: int
    digest: str


class Writing:
    """Writes a file of runs, line by line."""

    def __init__(self, stream: BinaryIO, header: Header) -> None:
        self._stream = stream
        self._digest = blake2b(digest_size=DIGEST_BYTES, person=b"everstep/file")
        self._lines = 0
        self._payloads: set[str] = set()
        self._write("everstep", header)

    def family(self, dumps: Sequence[RunDump]) -> None:
        """Write runs that are imported together."""
        self._write("family", len(dumps))
        for dump in dumps:
            self._run(dump)

    def _run(self, dump: RunDump) -> None:
        self._write("run", dump.row)
        for kind, field in _FIELD_OF.items():
            for part in getattr(dump, field):
                self._write(kind, self._once(*part) if kind == "payload" else part)

    def _once(self, digest: str, value: bytes) -> tuple[str, bytes | None]:
        is_new = digest not in self._payloads
        self._payloads.add(digest)
        return digest, value if is_new else None

    def thread(self, dump: ThreadDump) -> None:
        """Write a thread of a framework."""
        self._write("thread", (dump.thread, dump.born))
        for kind, (field, _) in OF_THREADS.items():
            for part in getattr(dump, field):
                self._write(kind, part)

    def item(self, item: SavedItem) -> None:
        """Write an item."""
        self._write("item", Item(labels_of(item.namespace), *item[1:]))

    def schedule(self, row: ScheduleRow) -> None:
        """Write a schedule."""
        self._write("schedule", row)

    def end(self) -> None:
        """Write the last line, and have all of it on the disk."""
        last = Trailer(self._lines, self._digest.hexdigest())
        self._stream.write(_encode(("end", last)) + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _write(self, kind: str, content: Any) -> None:
        line = _encode((kind, content)) + b"\n"
        self._digest.update(line)
        self._lines += 1
        self._stream.write(line)


def read_header(stream: BinaryIO) -> Header:
    """Check a whole file against its digest, and return its first line. Nothing of it was used before."""
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"everstep/file")
    lines, last, first = 0, b"", b""
    stream.seek(0)
    for line in stream:
        if last:
            digest.update(last)
            lines += 1
        first, last = first or line, line
    name = getattr(stream, "name", "This")
    header: Header = _decoded(first, "everstep", Header, f"{name} is not a file of exported runs.")
    if header.format > FORMAT:
        raise Misuse(f"{name} has format {header.format}; this version knows {FORMAT}. Use a newer version.")
    trailer: Trailer = _decoded(last, "end", Trailer, f"The last line of {name} is missing: it is not complete.")
    if (trailer.lines, trailer.digest) != (lines, digest.hexdigest()):
        raise Damaged(f"{name} does not match its digest: it was damaged or changed. Export the runs again.")
    return header


def _decoded(line: bytes, kind: str, type: Any, why: str) -> Any:
    try:
        found, content = _line.decode(line)
        if found == kind:
            return msgspec.json.decode(content, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    raise Damaged(why)


def read_families(stream: BinaryIO) -> Iterator[list[RunDump]]:
    """Return the families of a file that was checked. One of them is in memory at a time."""
    stream.seek(0)
    places: dict[str, int] = {}
    at = 0
    family: list[RunDump] = []
    for line in iter(stream.readline, b""):
        kind, content = _line.decode(line)
        if kind in ("family", "end") and family:
            yield [_with_payloads(dump, stream, places) for dump in family]
            stream.seek(at + len(line))
            family = []
        if kind == "run":
            family.append(RunDump(msgspec.json.decode(content, type=RunRow)))
        elif kind in PARTS:
            part = msgspec.json.decode(content, type=PARTS[kind])
            if kind == "payload" and part[1] is not None:
                places[part[0]] = at
            getattr(family[-1], _FIELD_OF[kind]).append(part)
        at += len(line)


def read_others(stream: BinaryIO) -> Iterator[ThreadDump | SavedItem | ScheduleRow]:
    """Return what a file that was checked has beside runs. One of them is in memory at a time."""
    stream.seek(0)
    thread: ThreadDump | None = None
    for line in iter(stream.readline, b""):
        kind, content = _line.decode(line)
        if kind in OF_THREADS:
            if thread is None:
                raise Damaged("The file has a part of a thread, and no thread that it belongs to.")
            field, type = OF_THREADS[kind]
            getattr(thread, field).append(msgspec.json.decode(content, type=type))
            continue
        if thread is not None:
            yield thread
        thread = None
        if kind == "thread":
            thread = ThreadDump(*msgspec.json.decode(content, type=tuple[str, int]))
        elif kind == "item":
            item = msgspec.json.decode(content, type=Item)
            yield SavedItem(namespace_of(item.namespace), *item[1:])
        elif kind == "schedule":
            yield msgspec.json.decode(content, type=ScheduleRow)


def _with_payloads(dump: RunDump, stream: BinaryIO, places: dict[str, int]) -> RunDump:
    """Put in the payloads that were written before, for another run."""
    for number, (digest, value) in enumerate(list[tuple[str, bytes | None]](dump.payloads)):
        if value is None:
            stream.seek(places[digest])
            _, content = _line.decode(stream.readline())
            dump.payloads[number] = msgspec.json.decode(content, type=tuple[str, bytes])
    return dump


# -- verifying ----------------------------------------------------------------------------------------------------
class DumpedRun:
    """A run of a file, read as one of a store, so that it is the same check as for any run."""

    url = "the file"

    def __init__(self, dump: RunDump, chain: ChainKeys) -> None:
        self.chain = chain
        self._dump = dump
        self._row = arrived(dump)
        self._payloads = dict(reversed(dump.payloads))
        self._events: dict[int, list[EventRow]] = {}
        for generation, event in dump.events:
            self._events.setdefault(generation, []).append(event)
        self._streams: dict[tuple[int, str], list[EntryRow]] = {}
        for entry in sorted(dump.entries):
            self._streams.setdefault((entry.generation, entry.name), []).append(entry)

    def as_store(self) -> Store:
        """Return itself, as what is verified."""
        return cast(Store, self)

    def run(self, id: str) -> RunRow:
        """Return its row, as it will be in the store."""
        return self._row

    def generations(self, run: str) -> list[int]:
        """Return the generations of which there are events."""
        return sorted(self._events)

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        """Return a history, or a part of it."""
        events = [event for event in self._events.get(generation, ()) if first <= event.seq <= last]
        return [event for event in events if event.seq in only] if only else events

    def payload(self, run: str, digest: str) -> bytes | None:
        """Return a payload that is beside the history."""
        return self._payloads.get(digest)

    def checkpoint(self, run: str, generation: int, before: int = LAST) -> CheckpointRow | None:
        """Return the newest checkpoint before an event."""
        found = [row for row in self._dump.checkpoints if row.generation == generation and row.seq < before]
        return max(found, default=None, key=lambda row: row.seq)

    def streams(self, run: str, generation: int) -> list[tuple[str, int]]:
        """Return the names of its streams, and the position of the newest entry of each."""
        return [(name, found[-1].position) for (number, name), found in self._streams.items() if number == generation]

    def stream(self, run: str, generation: int, name: str, after: int = 0, limit: int = 1000) -> list[EntryRow]:
        """Return entries of a stream after a position, in order."""
        entries = self._streams.get((generation, name), [])
        first = bisect_right(entries, after, key=lambda entry: entry.position)
        return entries[first : first + limit]

    def holds(self, *, run: str) -> list[HoldRow]:
        """Return its open holds."""
        return [hold for hold in self._dump.holds if hold.resolved_at is None]

    def is_being_deleted(self, run: str) -> bool:
        """Return False: nothing in a file is deleted."""
        return False


def check_sound(dumps: Iterable[RunDump], chain: ChainKeys) -> None:
    """Raise `Damaged` unless the histories of all generations match their digests, and all that they name is there."""
    for dump in dumps:
        if dump.row.damage:
            raise Damaged(f"The run {dump.row.id} cannot be read: {dump.row.damage}")
        store = DumpedRun(dump, chain).as_store()
        row, there = arrived(dump), store.generations(dump.row.id)
        if len(there) != row.generation or there != list(range(1, len(there) + 1)):  # it may say any number
            raise Damaged(f"The run {row.id} should have {row.generation} generations; there are {there}.")
        verify_whole(store, row.id)
        for generation in there[:-1]:
            _check_older(store, row, generation)


def _check_older(store: Store, row: RunRow, generation: int) -> None:
    events = store.events(row.id, generation)
    head = {"head_seq": events[-1].seq, "head_digest": events[-1].digest, "generation": generation}
    older = msgspec.structs.replace(row, **head)
    recorded = verified(events, older, store.chain, looking=True)
    verify_payloads(store, row, recorded, is_newest=False)
    if not getattr(recorded, "left_out", 0):
        verify_checkpoints(store, older, recorded)


def note_of(dump: RunDump) -> Note:
    """Return which life of its store a run's newest history knows of."""
    noting = [event for generation, event in dump.events if generation == dump.row.generation]
    return newest_note(
        [
            Recorded(seq, kind, step, at, decode_body(kind, body))
            for seq, kind, step, at, body, _ in noting
            if kind in ("run_started", "run_restored")
        ]
    )


def unfinished_of(dumps: Sequence[RunDump]) -> list[str]:
    """Return the ids of runs that have not ended."""
    return [dump.row.id for dump in dumps if dump.row.status not in ENDED]


NO_OUTCOME: Final = b'{"status":"failed","outcome":null}'
"""What is delivered of the end of another run, without its error."""


def secretive(dumps: Sequence[RunDump], hidden: Set[str]) -> list[str]:
    """Return the ids of those runs of a family that have something secret, or have it from another one.

    hidden: what `failed_in_secret` says.
    """
    return [dump.row.id for dump in dumps if _is_secretive(dump, hidden)]


def lacking(dumps: Sequence[RunDump]) -> list[str]:
    """Return the ids of those runs whose secrets were left out."""
    return [dump.row.id for dump in dumps if any(is_left_out(event.body) for _, event in dump.events)]


def without(dumps: Sequence[RunDump], hidden: Set[str]) -> list[RunDump]:
    """Return a family with nothing in it that is secret. hidden: what `failed_in_secret` says."""
    return [_without(dump, hidden) if _is_secretive(dump, hidden) else dump for dump in dumps]


def failed_in_secret(store: Store, dumps: Sequence[RunDump]) -> set[str]:
    """Return the runs that have failed with a secret error, perhaps before a retry: those that follow one were told it.

    A run that is followed need not be in the family, for several may follow it; then its own history says it, or what a
    follower noted of its end.
    """
    failed = {dump.row.id for dump in dumps for _, event in dump.events if _is_secret_failure(event)}
    for dump in dumps:
        failed |= {body.run for _, event in dump.events if (body := _secret_end_of_child(event)) is not None}
    others = {one.name for dump in dumps for one in dump.deliveries if _tells_of_failure(one)}
    for run in others - failed - {dump.row.id for dump in dumps}:
        failed |= {run for one in store.generations(run) if any(map(_is_secret_failure, store.events(run, one)))}
    return failed


def _is_secret_failure(event: EventRow) -> bool:
    return event.kind == "run_failed" and has_secrets(event.body)


def _secret_end_of_child(event: EventRow) -> Any:
    """Return the body of an event that says that a child failed with a secret error."""
    return decode_body(event.kind, event.body) if event.kind == "child_ended" and has_secrets(event.body) else None


class _Told(msgspec.Struct):
    status: str


def _tells_of_failure(one: Delivery) -> bool:
    """Tell whether a delivery may say how another run failed. What cannot be read may."""
    if one.kind != "child":
        return False
    try:
        return msgspec.json.decode(one.value, type=_Told).status == "failed"
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True


def _is_secretive(dump: RunDump, hidden: Set[str]) -> bool:
    return (
        any(has_secrets(event.body) for _, event in dump.events)
        or any(b'"secret":true' in row.row for row in dump.archive)
        or any(entry.secret and entry.value for entry in dump.entries)
        or any(effect.secret and effect.outcome is not None for effect in dump.effects)
        or any(_is_told(one, hidden) for one in dump.deliveries)
    )


def _is_told(one: Delivery, hidden: Set[str]) -> bool:
    return one.name in hidden and _tells_of_failure(one)


def _without(dump: RunDump, hidden: Set[str]) -> RunDump:
    events = [(generation, event._replace(body=without_secrets(event.body))) for generation, event in dump.events]
    needed = {ref for _, event in events for ref in _refs(event)}
    row, last = dump.row, events[-1][1]
    if row.status == "failed" and _is_secret_failure(dump.events[-1][1]):
        row = msgspec.structs.replace(row, outcome=bytes(decode_body(last.kind, last.body).error))
    return RunDump(
        row,
        events,
        [payload for payload in dump.payloads if payload[0] in needed],
        [],
        [msgspec.structs.replace(one, value=NO_OUTCOME) if _is_told(one, hidden) else one for one in dump.deliveries],
        dump.followers,
        dump.holds,
        [msgspec.structs.replace(one, outcome=None, digest="") if one.secret else one for one in dump.effects],
        dump.waits,
        answers=dump.answers,
        entries=[one._replace(value=b"") if one.secret else one for one in dump.entries],
    )


def _refs(event: EventRow) -> list[str]:
    return refs_of(decode_body(event.kind, event.body)) if event.kind in BODIES else []
