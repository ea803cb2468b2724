"""The rows of saved threads and items: where values are, and the digests that reveal damage.

The row of a state says for each value where it is: in the row itself if it is small, else in parts. This module also
reads and verifies a whole thread, whichever framework saved it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from everstep.errors import Damaged
from everstep.model.digests import digest_of
from everstep.stores.rows.saved import SavedItem, SavedPart, SavedReads, SavedState, SavedWrite, ThreadDump

PAGE: Final = 200
LAST: Final = 2**62
"""Greater than the number of any part."""
WHOLE: Final = -1
"""Replaces the number of elements for a value that is not a growing list."""


class Ref(NamedTuple):
    """The place of a channel's value."""

    version: Any
    kind: str
    inline: bytes | None = None
    series: str = ""
    number: int = 0
    length: int = WHOLE
    digest: bytes = b""


class Body(NamedTuple):
    """The content of a state's row."""

    checkpoint: tuple[str, bytes]
    metadata: tuple[str, bytes]
    refs: dict[str, Ref]
    branch: str = ""
    """The branch of its thread: see `branches`."""
    skipped: int = 0
    """How many numbers of supersteps before it belong to copies of checkpoints."""
    source: str = ""
    """Its origin according to LangGraph: an input, a superstep, a change by a person, or another one."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_body: Final = msgspec.msgpack.Decoder(Body).decode
_decode_value: Final = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_decode_item: Final = msgspec.msgpack.Decoder(tuple[str, bytes, dict[str, list[float]]]).decode


# -- rows and their digests ---------------------------------------------------------------------------------------
def _digest(*parts: str | int | bytes) -> bytes:
    return digest_of(_encode(parts))


def state_row(thread: str, namespace: str, id: str, parent: str, origin: str, body: Body, at: int) -> SavedState:
    """Return the row of a state."""
    encoded = _encode(body)
    return SavedState(namespace, id, parent, origin, encoded, _digest(thread, namespace, id, parent, encoded), at)


def moved(thread: str, row: SavedState) -> SavedState:
    """Return the same row for another thread."""
    return row._replace(digest=_digest(thread, row.namespace, row.id, row.parent, row.body))


def body_of(thread: str, row: SavedState) -> Body:
    """Return the content of a row. Raises `Damaged` if it does not match its digest."""
    if _digest(thread, row.namespace, row.id, row.parent, row.body) != row.digest:
        raise Damaged(f"The saved state {row.id} of thread {thread!r} does not match its digest.")
    try:
        return _decode_body(row.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"The saved state {row.id} of thread {thread!r} cannot be read.") from error


def write_row(
    thread: str, namespace: str, state: str, call: str, place: int, path: str, channel: str, value: tuple[str, bytes]
) -> SavedWrite:
    """Return the row of a write."""
    body = _encode(value)
    digest = _digest(thread, namespace, state, call, place, path, channel, body)
    return SavedWrite(namespace, state, call, place, path, channel, body, digest)


def moved_write(thread: str, row: SavedWrite) -> SavedWrite:
    """Return the same row for another thread."""
    return row._replace(digest=_digest(thread, *row[:-1]))


def value_of_write(thread: str, row: SavedWrite) -> tuple[str, bytes]:
    """Return a written value. Raises `Damaged` if it does not match its digest."""
    if _digest(thread, *row[:-1]) != row.digest:
        raise Damaged(
            f"A write of call {row.call} in state {row.state} of thread {thread!r} does not match its digest."
        )
    return _decode_value(row.body)


# -- values in parts ----------------------------------------------------------------------------------------------
def first_digest(namespace: str, channel: str, series: str) -> bytes:
    """Return the digest that precedes the first part of a series."""
    return _digest(namespace, channel, series)


def next_digest(previous: bytes, value: bytes) -> bytes:
    """Return the digest of a part: it covers all parts before it."""
    return digest_of(previous + digest_of(value))


def joined(namespace: str, channel: str, ref: Ref, parts: Sequence[SavedPart]) -> bytes:
    """Return the bytes of a value that is in parts."""
    digest = first_digest(namespace, channel, ref.series)
    if len(parts) == ref.number + 1:
        for part in parts:
            digest = next_digest(digest, part.value)
        if digest == ref.digest:
            return b"".join(part.value for part in parts)
    raise Damaged(f"The saved value of channel {channel!r} does not match its digest.")


# -- whole threads ------------------------------------------------------------------------------------------------
def dump_thread(saved: SavedReads, thread: str) -> ThreadDump:
    """Read the whole content of a thread. It must not be written to meanwhile."""
    states: list[SavedState] = []
    while page := saved.states(thread, None, (states[-1].id, states[-1].namespace) if states else None, PAGE):
        states += page
    parts = [part for place in saved.series(thread) for part in saved.parts(thread, *place, LAST)]
    ids: dict[str, list[str]] = {}
    for state in states:
        ids.setdefault(state.namespace, []).append(state.id)
    writes = [write for namespace, some in ids.items() for write in saved.writes(thread, namespace, some)]
    owner = saved.owner(thread)
    return ThreadDump(thread, owner.born if owner is not None else 0, states, parts, writes)


def verify_thread(dump: ThreadDump) -> None:
    """Raise `Damaged` unless the whole content of a thread matches its digests, and all values that it names exist."""
    series: dict[tuple[str, str, str], list[SavedPart]] = {}
    for part in dump.parts:
        series.setdefault((part.namespace, part.channel, part.series), []).append(part)
    for place, parts in series.items():
        digest = first_digest(*place)
        for number, part in enumerate(parts):
            digest = next_digest(digest, part.value)
            if part.number != number or part.digest != digest:
                raise Damaged(
                    f"Part {number} of a value of channel {part.channel!r} of thread {dump.thread!r} is damaged."
                )
    for state in dump.states:
        for channel, ref in body_of(dump.thread, state).refs.items():
            if ref.inline is None:
                parts = series.get((state.namespace, channel, ref.series), [])
                try:
                    joined(state.namespace, channel, ref, parts[: ref.number + 1])
                except Damaged as damage:
                    raise Damaged(f"State {state.id} of thread {dump.thread!r}: {damage}") from None
    for write in dump.writes:
        value_of_write(dump.thread, write)


def every_thread(saved: SavedReads) -> Iterator[str]:
    """Give all threads."""
    last = ""
    while found := saved.threads(last):
        yield from found
        last = found[-1]


def every_item(saved: SavedReads, at: int) -> Iterator[SavedItem]:
    """Give all items that have not expired at a time."""
    last = ("", "")
    while page := saved.items("", at, last, PAGE):
        yield from page
        last = page[-1][:2]


def verify_item(item: SavedItem) -> None:
    """Raise `Damaged` unless an item can be read."""
    try:
        _decode_item(item.value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Damaged(f"The saved item {item.key!r} cannot be read.") from None
