"""Stored streams: read from a position on, verified, and copied into a fork."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from everstep.engine.history.verify import Recorded, key_of
from everstep.errors import Damaged, Misuse
from everstep.model import events as ev
from everstep.model.digests import entry_digest, stream_start
from everstep.stores.protocol import RunRow, Store
from everstep.stores.rows.answers_and_streams import EntryRow

PAGE: Final = 500
"""The number of entries that are read at once."""
HISTORY_POSITIONS: Final = 1_000_000_000
"""The number of positions of each stream in one history of a run: those of its next generation come after them."""


class Reader:
    """Reads a stream of one history from a position on, and returns only entries that match their digests."""

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
        """Return the next entries, at most a page."""
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
    """Return the entries that some events mention, with new digests for a run that begins with these events.

    The bodies of the events are replaced by ones with the new digests. Entries of an unfinished attempt are not copied,
    because no event mentions them.
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
    """Raise `Damaged` unless every entry matches its digest, and all entries that the history mentions exist."""
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
