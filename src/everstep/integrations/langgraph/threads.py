"""Threads of LangGraph in a store: how a checkpoint is saved, found, loaded, copied and forgotten.

Everything here blocks. The saver calls it on the caller's own thread, or away from a loop when it is slow.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from langgraph.checkpoint.serde.base import SerializerProtocol

from everstep.adapters import (
    WHOLE,
    Body,
    ChangeThread,
    Ground,
    Ref,
    SavedPart,
    SavedState,
    SavedWrite,
    body_of,
    first_digest,
    joined,
    moved,
    moved_write,
    next_digest,
    state_row,
    value_of_write,
    write_row,
)
from everstep.errors import Damaged
from everstep.integrations.langgraph.states import INLINE_BYTES_MAX, Recent, array, elements, is_array

log = logging.getLogger("everstep.langgraph")

PAGE: Final = 50
LINGER_SECONDS: Final = 0.002
RECENT_BYTES_MAX: Final = 64 * 2**20
RECENT_REFS_BYTES_MAX: Final = 8 * 2**20

HIDDEN: Final = "\0hidden"
"""The origin of a state that was deleted while others were made from it: no read returns it any more."""

Place = tuple[str, str, str]
"""A state: its thread, namespace and id."""
Dump = Callable[[Any], tuple[str, bytes]]


class Loaded:
    """A state that was found, with the values that LangGraph asks for."""

    def __init__(self, row: SavedState, body: Body, values: dict[str, tuple[str, bytes]]) -> None:
        self.row = row
        self.body = body
        self.values = values


class Threads:
    """What the savers of one store share: the store, and recently seen values."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self._values = Recent(RECENT_BYTES_MAX)
        self._refs = Recent(RECENT_REFS_BYTES_MAX)

    # -- saving ---------------------------------------------------------------------------------------------------
    def change(self, thread: str, linger_seconds: float = 0.0, at: int = 0, **changes: Any) -> bool:
        """Write to a thread; False if a series of parts continued differently, or the thread changed. Raises
        `ThreadActive`.
        """
        ground = self.ground
        epoch, why = ground.epoch_of(thread), "fenced"
        while why == "fenced":
            change = ChangeThread(thread, at or ground.now(), ground.app.worker, epoch, **changes)
            verdict = ground.commit(change, linger_seconds)
            why = getattr(verdict, "why", "")
            if why == "fenced":
                before, epoch = epoch, ground.epoch_of(thread)
                if epoch == before:  # otherwise another call here began or ended running the thread meanwhile
                    break
        if why in ("fenced", "taken"):
            raise ground.active(thread, verdict)  # type: ignore[arg-type]  # it is a refusal
        return why not in ("key", "changed")

    def save(
        self,
        place: Place,
        parent: str,
        origin: str,
        checkpoint: tuple[str, bytes],
        metadata: tuple[str, bytes],
        versions: Mapping[str, Any],
        new: Mapping[str, Any],
        values: Mapping[str, Any],
        dump: Dump,
        standing: "tuple[str, int]" = ("", 0),
        source: str = "",
    ) -> None:
        """Save a state, and those of its values that are new."""
        thread, namespace, id = place
        before = self._refs_of((thread, namespace, parent)) if parent else {}
        for is_first in (True, False):
            series = id if is_first else f"{id}.{self.ground.random_bits(64):016x}"
            parts: list[SavedPart] = []
            grown: list[tuple[Any, bytes]] = []
            refs: dict[str, Ref] = {}
            for channel, version in versions.items():
                old = before.get(channel)
                if old is not None and old.version == version and channel not in new:
                    refs[channel] = old
                elif channel in values:
                    kind, data = dump(values[channel])
                    if len(data) <= INLINE_BYTES_MAX:
                        refs[channel] = Ref(version, kind, bytes(data))
                    else:
                        whose = thread, namespace, channel
                        refs[channel] = self._stored(whose, series, version, kind, data, old, parts, grown)
            body = Body(checkpoint, metadata, refs, *standing, source)
            at = self.ground.now()
            row = state_row(thread, namespace, id, parent, origin, body, at)
            if self.change(thread, at=at, states=[row], parts=parts):
                self._refs.put(place, refs, 200 * (len(refs) + 1))
                for key, data in grown:
                    self._values.put(key, data, len(data))
                return
            before = {}  # another state continued the same value: this one gets separate values
        raise Damaged(f"The thread {thread!r} has parts of values that are not its own.")

    def _stored(
        self,
        whose: Place,
        series: str,
        version: Any,
        kind: str,
        data: bytes,
        old: Ref | None,
        parts: list[SavedPart],
        grown: list[tuple[Any, bytes]],
    ) -> Ref:
        """Return the place of a value outside the row itself, after adding the parts that it needs."""
        _, namespace, channel = whose
        if kind != "msgpack" or not is_array(data):
            start = first_digest(namespace, channel, old.series) if old is not None and old.length == WHOLE else b""
            if old is not None and start and old.kind == kind and next_digest(start, data) == old.digest:
                return old._replace(version=version)
            digest = next_digest(first_digest(namespace, channel, series), data)
            parts.append(SavedPart(namespace, channel, series, 0, bytes(data), digest))
            return Ref(version, kind, None, series, 0, WHOLE, digest)
        length, begin = elements(data)
        known = self._bytes_before(whose, old)
        if old is not None and known is not None and data.startswith(known, begin):
            tail = data[begin + len(known) :]
            if not tail:
                return old._replace(version=version)
            ref = Ref(version, kind, None, old.series, old.number + 1, length, next_digest(old.digest, tail))
        else:
            tail = data[begin:]
            digest = next_digest(first_digest(namespace, channel, series), tail)
            ref = Ref(version, kind, None, series, 0, length, digest)
        parts.append(SavedPart(namespace, channel, ref.series, ref.number, tail, ref.digest))
        grown.append(((*whose, ref.series, ref.number), data[begin:]))
        return ref

    def _bytes_before(self, whose: Place, ref: Ref | None) -> bytes | None:
        """Return the elements of a list before its growth, or None if there was no list."""
        if ref is None or ref.inline is not None or ref.length == WHOLE:
            return None
        try:
            return self._in_parts(whose, ref)
        except Damaged as error:
            log.warning("%s It is stored anew.", error)
            return None

    def _in_parts(self, whose: Place, ref: Ref) -> bytes:
        key = (*whose, ref.series, ref.number)
        known: bytes | None = self._values.get(key)
        if known is None:
            thread, namespace, channel = whose
            parts = self.ground.saved.parts(thread, namespace, channel, ref.series, ref.number)
            known = joined(namespace, channel, ref, parts)
            if ref.length != WHOLE:
                self._values.put(key, known, len(known))
        return known

    def _refs_of(self, place: Place) -> dict[str, Ref]:
        known: dict[str, Ref] | None = self._refs.get(place)
        if known is None:
            row = self.ground.saved.state(*place)
            if row is None:
                return {}
            try:
                known = body_of(place[0], row).refs
            except Damaged as error:
                log.warning("%s The values of the state after it are stored anew.", error)
                return {}
            self._refs.put(place, known, 200 * (len(known) + 1))
        return known

    def write(self, place: Place, call: str, path: str, writes: Sequence[tuple[int, str, tuple[str, bytes]]]) -> None:
        """Save the results of a call: at a place below 0 the last one stays, at others the first."""
        thread, namespace, state = place
        rows = [write_row(thread, namespace, state, call, at, path, channel, value) for at, channel, value in writes]
        first, last = [row for row in rows if row.place >= 0], [row for row in rows if row.place < 0]
        # LangGraph saves the state soon after what its nodes wrote: they share a commit.
        self.change(thread, LINGER_SECONDS, writes=first, rewrites=last)

    # -- loading --------------------------------------------------------------------------------------------------
    def load(self, thread: str, row: SavedState) -> Loaded:
        """Return a state with its values. Raises `Damaged`."""
        body = body_of(thread, row)
        values: dict[str, tuple[str, bytes]] = {}
        for channel, ref in body.refs.items():
            if ref.inline is not None:
                values[channel] = ref.kind, ref.inline
                continue
            data = self._in_parts((thread, row.namespace, channel), ref)
            values[channel] = ref.kind, data if ref.length == WHOLE else array(ref.length, data)
        self._refs.put((thread, row.namespace, row.id), body.refs, 200 * (len(body.refs) + 1))
        return Loaded(row, body, values)

    def find(self, thread: str, namespace: str, id: str) -> Loaded | None:
        """Return a state by its id, or without one the newest undamaged one."""
        if id:
            row = self.ground.saved.state(thread, namespace, id)
            return self.load(thread, row) if row is not None and row.origin != HIDDEN else None
        for row in self.rows(thread, namespace, page=1):
            try:
                return self.load(thread, row)
            except Damaged as error:
                log.error("%s The state before it is used.", error)
        return None

    def rows(
        self, thread: str, namespace: str | None, before: str = "", page: int = PAGE, *, hidden: bool = False
    ) -> Iterator[SavedState]:
        """Give the states of a thread, the newest first; with `hidden` also deleted ones that are still needed.

        Other processes may write meanwhile.
        """
        last = (before, "") if before else None
        while rows := self.ground.saved.states(thread, namespace, last, page):
            yield from (row for row in rows if hidden or row.origin != HIDDEN)
            if len(rows) < page:
                return
            last = rows[-1].id, rows[-1].namespace
            page = PAGE

    def threads(self) -> Iterator[str]:
        """Give all threads."""
        last = ""
        while found := self.ground.saved.threads(last):
            yield from found
            last = found[-1]

    def writes(self, thread: str, namespace: str, states: Sequence[str], *, strict: bool = False) -> list[SavedWrite]:
        """Return the undamaged writes of states.

        If one write of a call is damaged, all of its writes are left out: repeating the call is better than believing
        half of it.
        """
        rows = self.ground.saved.writes(thread, namespace, states)
        damaged: set[tuple[str, str]] = set()
        for row in rows:
            try:
                value_of_write(thread, row)
            except Damaged as error:
                if strict:
                    raise
                log.error("%s The writes of that call are ignored.", error)
                damaged.add((row.state, row.call))
        return [row for row in rows if (row.state, row.call) not in damaged] if damaged else rows

    def value(self, thread: str, row: SavedWrite, serde: SerializerProtocol) -> Any:
        """Return a written value."""
        return serde.loads_typed(value_of_write(thread, row))

    # -- forgetting and copying -----------------------------------------------------------------------------------
    def forget_thread(self, thread: str, unchanged_since: int | None = None) -> bool:
        """Delete the whole content of a thread, unless it was changed or run since a time. Returns True if it was
        deleted.
        """
        return self.change(thread, everything=True, unchanged_since=unchanged_since)

    def forget_states(self, thread: str, states: Sequence[tuple[str, str]], hidden: Sequence[SavedState] = ()) -> None:
        """Delete states with their writes, and the values that no other state has; and hide others."""
        if not states and not hidden:
            return
        gone = set(states)
        needed: set[tuple[str, str, str]] = set()
        for row in self.rows(thread, None, hidden=True):
            if (row.namespace, row.id) not in gone:
                try:
                    refs = body_of(thread, row).refs
                except Damaged:
                    continue
                needed |= {(row.namespace, channel, ref.series) for channel, ref in refs.items() if ref.inline is None}
        unneeded = [series for series in self.ground.saved.series(thread) if series not in needed]
        for namespace, id in states:
            self._refs.drop((thread, namespace, id))
        self.change(thread, forgotten=list(states), unneeded=unneeded, states=hidden)

    def copy(self, source: str, target: str) -> None:
        """Replace a thread's content by a copy of another thread's."""
        states = list(self.rows(source, None, hidden=True))
        for row in states:
            body_of(source, row)
        saved = self.ground.saved
        parts = [part for place in saved.series(source) for part in saved.parts(source, *place, 2**62)]
        namespaces: dict[str, list[str]] = {}
        for row in states:
            namespaces.setdefault(row.namespace, []).append(row.id)
        writes = [
            moved_write(target, row)
            for namespace, ids in namespaces.items()
            for row in self.writes(source, namespace, ids)
        ]
        copies = [moved(target, row) for row in states]
        self.change(target, everything=True, states=copies, parts=parts, writes=writes)
