"""States as they are stored: what is in a row, where its values are, and the digests that make damage visible.

The row of a state has LangGraph's checkpoint without its values, and for each channel where its value is: in the row
itself if it is small, else in parts. A list that has grown at its end is stored as what was appended: the bytes of a
MessagePack array are a header and then its elements, so those of the longer list begin with those of the shorter.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec

from everstep.adapters import SavedPart, SavedState, SavedWrite, digest_of
from everstep.errors import Damaged

INLINE_BYTES_MAX: Final = 64
"""A value that is no larger is in the row of each state that has it."""
WHOLE: Final = -1
"""What stands for the number of elements of a value that is not a growing list."""


class Ref(NamedTuple):
    """Where the value of a channel is."""

    version: Any
    kind: str
    inline: bytes | None = None
    series: str = ""
    number: int = 0
    length: int = WHOLE
    digest: bytes = b""


class Body(NamedTuple):
    """What is in the row of a state."""

    checkpoint: tuple[str, bytes]
    metadata: tuple[str, bytes]
    refs: dict[str, Ref]
    branch: str = ""
    """In which branch of its thread it is: see `branches`."""
    skipped: int = 0
    """How many numbers of supersteps before it stand for copies of checkpoints."""
    source: str = ""
    """What LangGraph says that it came from: an input, a superstep, a change by a person, or another one."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_body: Final = msgspec.msgpack.Decoder(Body).decode
_decode_value: Final = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


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
    """Return what is in a row, if that is what was written."""
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
    """Return what was written, if it is what was written."""
    if _digest(thread, *row[:-1]) != row.digest:
        raise Damaged(
            f"A write of call {row.call} in state {row.state} of thread {thread!r} does not match its digest."
        )
    return _decode_value(row.body)


# -- values in parts ----------------------------------------------------------------------------------------------
def first_digest(namespace: str, channel: str, series: str) -> bytes:
    """Return what stands before the first part of a series."""
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


def is_array(data: bytes) -> bool:
    """Tell whether the bytes of a value are a MessagePack array."""
    return 0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD)


def elements(data: bytes) -> tuple[int, int]:
    """Return how many elements a MessagePack array has, and where the first of them begins."""
    first = data[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, 1
    if first == 0xDC:
        return int.from_bytes(data[1:3], "big"), 3
    assert first == 0xDD, "a list is an array"
    return int.from_bytes(data[1:5], "big"), 5


def array(count: int, elements_: bytes) -> bytes:
    """Return a MessagePack array of so many elements."""
    if count < 16:
        return bytes([0x90 | count]) + elements_
    if count < 65536:
        return b"\xdc" + count.to_bytes(2, "big") + elements_
    return b"\xdd" + count.to_bytes(4, "big") + elements_


class Recent:
    """What was used last, up to a number of bytes: of a value that grows, what it was before."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._values: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any) -> Any:
        """Return it, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Any, value: Any, size: int) -> None:
        """Keep it for a while."""
        with self._lock:
            if key in self._values:
                self._bytes -= self._values.pop(key)[1]
            self._values[key] = value, size
            self._bytes += size
            while self._bytes > self._bytes_max and len(self._values) > 1:
                self._bytes -= self._values.popitem(last=False)[1][1]

    def drop(self, key: Any) -> None:
        """It is of no use any more."""
        with self._lock:
            if key in self._values:
                self._bytes -= self._values.pop(key)[1]
