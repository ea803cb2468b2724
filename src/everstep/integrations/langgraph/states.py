"""States as they are stored: the content of a row, the places of its values, and the digests that reveal damage.

The row of a state has LangGraph's checkpoint without its values, and for each channel the place of its value: in the
row itself if it is small, else in parts. A list that has grown at its end is stored as what was appended: the bytes of
a MessagePack array are a header and then its elements, so those of the longer list begin with those of the shorter.
"""

from collections import OrderedDict
from threading import Lock
from typing import Any, Final

from everstep.adapters import Body, body_of

__all__ = ["Body", "body_of"]
"""Names that other modules import from here, although they are defined elsewhere."""

INLINE_BYTES_MAX: Final = 64
"""The maximum size of a value that is stored in the row of each state that has it."""


def is_array(data: bytes) -> bool:
    """Return True if the bytes of a value are a MessagePack array."""
    return 0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD)


def elements(data: bytes) -> tuple[int, int]:
    """Return the number of elements of a MessagePack array, and where the first of them begins."""
    first = data[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, 1
    if first == 0xDC:
        return int.from_bytes(data[1:3], "big"), 3
    assert first == 0xDD, "a list is an array"
    return int.from_bytes(data[1:5], "big"), 5


def array(count: int, elements_: bytes) -> bytes:
    """Return a MessagePack array with this number of elements."""
    if count < 16:
        return bytes([0x90 | count]) + elements_
    if count < 65536:
        return b"\xdc" + count.to_bytes(2, "big") + elements_
    return b"\xdd" + count.to_bytes(4, "big") + elements_


class Recent:
    """A cache of recent values, up to a number of bytes: for a value that grows, its last form."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._values: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any) -> Any:
        """Return a cached value, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Any, value: Any, size: int) -> None:
        """Cache a value."""
        with self._lock:
            if key in self._values:
                self._bytes -= self._values.pop(key)[1]
            self._values[key] = value, size
            self._bytes += size
            while self._bytes > self._bytes_max and len(self._values) > 1:
                self._bytes -= self._values.popitem(last=False)[1][1]

    def drop(self, key: Any) -> None:
        """Drop a value that is no longer useful."""
        with self._lock:
            if key in self._values:
                self._bytes -= self._values.pop(key)[1]
