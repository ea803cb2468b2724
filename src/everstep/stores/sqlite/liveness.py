"""Liveness locks: how one process knows at once that another one has died.

Beside the store is the file `<store>-live`. Each worker holds a lock on the byte at its place in it, which the kernel
frees when the process is gone, however it ended. A stopped process keeps its lock.

On Linux these are open-file-description locks: they belong to the open file and not to the process, so that two stores
in one process see each other as alive, and closing one file frees only its own lock. A forked child would share the
open file and so keep the lock alive; it closes the file first thing.

A free lock proves that its owner is gone only if it is the owner's lock: if the file was deleted, the next process made
another one with all its places free. So a file has a random name in its first bytes. A worker's row names the file of
its lock (`identity`: that name, and the inode, which differs in a copy), and a lock on any other file says nothing
about it.

Elsewhere there are only the locks of POSIX, which belong to the process: a process cannot see its own, and closing
*any* descriptor of the file frees all of them. So there one descriptor for each file is opened and never closed, and a
list keeps the places that this process holds. Code outside Everstep that opens and closes the file would still free the
locks; live workers are then removed by mistake, and only the epochs keep the runs safe. Where there is no `fcntl` at
all, no worker is ever found dead, and only leases lapse.
"""

import errno
import os
import stat
import struct
import sys
import threading
import time
import weakref
from typing import Final

from everstep.errors import StoreUnusable
from everstep.model.own_files import NO_LINK, planted
from everstep.stores.brief import refuse_when_brief

_HAS_FCNTL: Final[bool] = os.name == "posix"
if _HAS_FCNTL:
    import fcntl

_HAS_OFD: Final[bool] = sys.platform == "linux" and struct.calcsize("P") == 8 and hasattr(fcntl, "F_OFD_SETLK")
_FLOCK: Final = "hhqqi4x"
"""`struct flock` of 64-bit Linux: type, whence, start, length, process."""
NAME_BYTES: Final = 16
"""Length of the random name at the beginning of the file."""
NAMING: Final = 0
"""The byte that is locked while a new file gets its name. Workers' places begin at 1."""

_open_files: "weakref.WeakSet[LiveLock]" = weakref.WeakSet()


class LiveLock:
    """A held lock on a place. `release` frees it; the end of the process does as well."""

    def __init__(self, locks: "LiveLocks", place: int, descriptor: int, identity: str) -> None:
        self.place = place
        self.identity = identity
        """The file that has the lock."""
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
    """The file of liveness locks of one store."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._probe = -1

    def take(self, place: int) -> LiveLock | None:
        """Take the lock on a place, or return None if it is held."""
        refuse_when_brief()
        if not _HAS_OFD:
            descriptor, _ = self._shared()
            return LiveLock(self, place, -1, _identity(descriptor)) if self._take_in_process(place) else None
        while True:
            descriptor = self._open()
            try:
                if not _lock(descriptor, place):
                    os.close(descriptor)
                    return None
                if self._is_at_path(descriptor):
                    return LiveLock(self, place, descriptor, _identity(descriptor))
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the file was deleted or replaced meanwhile

    def identity(self) -> str:
        """Return the identity of the file that is at the path now."""
        refuse_when_brief()
        return _identity(self._looking()) if _HAS_OFD else _identity(self._shared()[0])

    def is_held(self, place: int) -> bool:
        """Tell whether any process, this one included, holds the lock on a place."""
        refuse_when_brief()
        if not _HAS_OFD:
            return self._is_held_by_process(place)
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        answer = fcntl.fcntl(self._looking(), fcntl.F_OFD_GETLK, asked)
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Close the descriptor for looking. Held locks stay until they are released."""
        if self._probe >= 0:
            os.close(self._probe)
            self._probe = -1

    def _looking(self) -> int:
        """Return a descriptor of the file that is at the path now."""
        if self._probe >= 0 and not self._is_at_path(self._probe):
            self.close()
        if self._probe < 0:
            self._probe = self._open()
        return self._probe

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_LINK, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise StoreUnusable(f"{self.path} is a link, so it cannot have the locks of a store.") from error
        try:
            if why := planted(self.path):
                raise StoreUnusable(why)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StoreUnusable(f"{self.path} is not an ordinary file, so it cannot have the locks of a store.")
            if found.st_size < NAME_BYTES:
                _give_name(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

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
            if self.path not in _shared_files:
                _shared_files[self.path] = (self._open(), set())
            return _shared_files[self.path]


def _lock(descriptor: int, place: int) -> bool:
    """Lock a byte for this open file; False if another one has locked it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _give_name(descriptor: int) -> None:
    """Write a random name into a new file. If another process does the same, one of the two succeeds."""
    while _HAS_OFD and not _lock(descriptor, NAMING):
        time.sleep(0.001)
    if os.fstat(descriptor).st_size < NAME_BYTES:
        os.pwrite(descriptor, os.urandom(NAME_BYTES), 0)
        os.fsync(descriptor)  # after a loss of power, the file must keep its name
    if _HAS_OFD:
        unlocked = struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, NAMING, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, unlocked)


def _identity(descriptor: int) -> str:
    """Return the identity of this file: its name and its inode."""
    return f"{os.pread(descriptor, NAME_BYTES, 0).hex()}:{os.fstat(descriptor).st_ino}"


_shared_lock: Final = threading.Lock()
_shared_files: Final[dict[str, tuple[int, set[int]]]] = {}


def _after_fork_in_child() -> None:
    for lock in list(_open_files):
        lock.close_in_child()
    _shared_files.clear()  # POSIX locks are not inherited, so the child holds none.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
