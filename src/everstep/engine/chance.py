"""Randomness of the machine, drawn in blocks: each draw by itself is a system call that lets go of Python's lock."""

import os
import random
import struct
from typing import Any, Final

BLOCK_BYTES: Final = 4096


class MachineRandom(random.Random):
    """`random.SystemRandom`, with a block of bytes in hand. A forked child draws a block of its own."""

    def __init__(self) -> None:
        self._block = b""
        self._used = 0
        self._process = 0
        super().__init__()

    def getrandbits(self, k: int) -> int:
        """Return an integer of `k` random bits."""
        count = (k + 7) // 8
        return int.from_bytes(self._take(count), "big") >> (count * 8 - k)

    def randbytes(self, n: int) -> bytes:
        """Return `n` random bytes."""
        return self._take(n)

    def random(self) -> float:
        """Return a number from 0.0 up to, but not including, 1.0."""
        return self.getrandbits(53) / (1 << 53)

    def seed(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the machine is not seeded."""

    def _take(self, count: int) -> bytes:
        process = os.getpid()
        if self._used + count > len(self._block) or process != self._process:
            self._block = os.urandom(max(BLOCK_BYTES, count))
            self._used, self._process = 0, process
        taken = self._block[self._used : self._used + count]
        self._used += count
        return taken


_STATE: Final = struct.Struct("<625I")
"""The state of a `random.Random`."""


def packed_state(source: random.Random) -> tuple[bytes, float | None]:
    """Return where a source of randomness has come to, as a checkpoint keeps it."""
    _, words, gauss = source.getstate()
    return _STATE.pack(*words), gauss


def from_packed_state(packed: bytes, gauss: float | None) -> random.Random:
    """Return a source of randomness that goes on from there."""
    source = random.Random(0)
    source.setstate((3, _STATE.unpack(packed), gauss))
    return source
