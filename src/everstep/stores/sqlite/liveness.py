"""Liveness locks: how one process knows at once that another one has died.

Beside the store lies the file `<store>-live`. Each worker holds a lock on the byte at its place in it, which the
kernel frees when the process is gone, however it went. A stopped process keeps its lock.

On Linux these are open-file-description locks: they belong to the open file and not to the process, so that two stores
in one process see each other as alive, and closing one file frees only its own lock. A forked child would share the
open file and so keep the lock alive; it closes the file first thing.

Elsewhere there are only the locks of POSIX, which belong to the process: a process cannot see its own, and closing
*any* descriptor of the file frees all of them. So there one descriptor for each file is opened, never closed, and the
places that this process holds are remembered beside it. Code outside Everstep that opens and closes the file would
still free the locks; live workers are then buried by mistake, and only the epochs keep the runs safe. Where there is
no `fcntl` at all, nobody is ever found dead, and only leases lapse.
"""

import os
import struct
import sys
import threading
import weakref
from typing import Final

_HAS_FCNTL: Final[bool] = os.name == "posix"
if _HAS_FCNTL:
    import fcntl

_HAS_OFD: Final[bool] = sys.platform == "linux" and struct.calcsize("P") == 8 and hasattr(fcntl, "F_OFD_SETLK")
_FLOCK: Final = "hhqqi4x"
"""`struct flock` of 64-bit Linux: type, whence, start, length, process."""

_open_files: "weakref.WeakSet[LiveLock]" = weakref.WeakSet()


class LiveLock:
    """A held lock on a place. `release` frees it; the end of the process does as well."""

    def __init__(self, locks: "LiveLocks", place: int, descriptor: int) -> None:
        self.place = place
        self._locks = locks
        self._descriptor = descriptor
        if descriptor >= 0:
            _open_files.add(self)

    def release(self) -> None:
        """Free the place."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        else:
            self._locks.free_in_process(self.place)

    def close_in_child(self) -> None:
        """Close the file in a forked child, so that the lock ends with the parent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LiveLocks:
    """The file of liveness locks beside one store."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._probe = -1

    def take(self, place: int) -> LiveLock | None:
        """Take the lock on a place, or return None if somebody has it."""
        if not _HAS_OFD:
            return LiveLock(self, place, -1) if self._take_in_process(place) else None
        descriptor = self._open()
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
        except OSError:
            os.close(descriptor)
            return None
        return LiveLock(self, place, descriptor)

    def is_held(self, place: int) -> bool:
        """Tell whether anybody, this process included, holds the lock on a place."""
        if not _HAS_OFD:
            return self._is_held_by_process(place)
        if self._probe < 0:
            self._probe = self._open()
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        answer = fcntl.fcntl(self._probe, fcntl.F_OFD_GETLK, asked)
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Stop looking. Held locks stay until they are released."""
        if self._probe >= 0:
            os.close(self._probe)
            self._probe = -1

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    # -- where locks belong to the process --------------------------------------------------------------------------
    def _take_in_process(self, place: int) -> bool:
        descriptor, held = self._shared()
        with _shared_lock:
            if place in held:
                return False
            try:
                if _HAS_FCNTL:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError:
                return False
            held.add(place)
            return True

    def _is_held_by_process(self, place: int) -> bool:
        descriptor, held = self._shared()
        if not _HAS_FCNTL:
            return True
        with _shared_lock:
            if place in held:
                return True
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError:
                return True
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)
            return False

    def free_in_process(self, place: int) -> None:
        """Free a place where locks belong to the process."""
        descriptor, held = self._shared()
        with _shared_lock:
            held.discard(place)
            if _HAS_FCNTL:
                fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)

    def _shared(self) -> tuple[int, set[int]]:
        with _shared_lock:
            if self._path not in _shared_files:
                _shared_files[self._path] = (self._open(), set())
            return _shared_files[self._path]


_shared_lock: Final = threading.Lock()
_shared_files: Final[dict[str, tuple[int, set[int]]]] = {}


def _after_fork_in_child() -> None:
    for lock in list(_open_files):
        lock.close_in_child()
    _shared_files.clear()  # POSIX locks are not inherited, so the child holds none.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
