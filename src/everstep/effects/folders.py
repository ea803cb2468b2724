"""The lock of a folder, and the proof under it that an attempt may still act.

    lock the folder  →  is it still the folder of that path?  →  is the attempt still the run's newest?  →  act

A worker that takes a run over raises its epoch in the store first, and locks the same folder before it changes anything
there. So an attempt that has lost its run either acted before its successor did, or it finds the newer epoch and
changes nothing. The kernel keeps the lock of a process that is stopped: its successor waits, and finally asks a person;
it never writes while another process has the lock. Everything is done relative to the locked folder, not to its path: a
folder that replaced it is another one, with another lock.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final, NewType

from everstep.effects.body import StepBody
from everstep.effects.surroundings import require
from everstep.errors import Damaged, FolderBusy, Misuse, StoreError, StoreFailed, StoreUnusable

PATIENCE_SECONDS: Final = 60.0
"""How long a file effect waits for other writers in its folder before a person is asked, in seconds."""
FIRST_PAUSE_SECONDS: Final = 0.0005
MOST_PAUSE_SECONDS: Final = 0.02
OUTAGE_PAUSE_SECONDS: Final = 0.2
"""How long to wait, without the lock, before retrying a store that cannot be read, in seconds."""

_NOT_HERE: Final = frozenset({errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""The errors of `flock` on file systems that cannot lock a folder."""

Folder = NewType("Folder", int)
"""The descriptor of a locked folder."""


def _attempt() -> StepBody:
    attempt: StepBody = require("everstep.files", StepBody)
    return attempt


def refuse_given_up() -> None:
    """Raise `NotDone` if the attempt has timed out, was cancelled, or its run has left this process."""
    _attempt().refuse_given_up()


@contextlib.contextmanager
def fenced(*paths: Path) -> Generator[list[Folder]]:
    """Lock folders, and enter the block only if the attempt may still act. Gives a descriptor for each of them."""
    attempt = _attempt()
    while True:
        with contextlib.ExitStack() as locks:
            folders = _lock(attempt, paths, locks)
            try:
                attempt.refuse_overtaken()
            except (Damaged, StoreUnusable, StoreFailed):
                raise
            except StoreError:
                pass  # an outage is waited out, as by everything that writes
            else:
                yield folders
                return
        time.sleep(OUTAGE_PAUSE_SECONDS)


def _lock(attempt: StepBody, paths: tuple[Path, ...], locks: contextlib.ExitStack) -> list[Folder]:
    """Lock the folders of these paths, in the order that every attempt uses."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        opened: dict[tuple[int, int], Folder] = {}
        for path in paths:
            descriptor = Folder(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            if opened.setdefault(_identity(os.fstat(descriptor)), descriptor) != descriptor:
                os.close(descriptor)  # two names of one folder
            else:
                locks.callback(_let_go, descriptor)
        for identity in sorted(opened):
            _wait_for(attempt, opened[identity], paths, until)
        try:
            return [opened[_identity(os.stat(path))] for path in paths]
        except (KeyError, FileNotFoundError):
            locks.close()  # another folder, with another lock, is in its place now


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _let_go(descriptor: int) -> None:
    """Unlock and close. Closing alone would leave the lock to a process that was forked meanwhile."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _wait_for(attempt: StepBody, descriptor: int, paths: tuple[Path, ...], until: float) -> None:
    """Wait for a lock. An attempt that was given up meanwhile stops waiting."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            attempt.refuse_given_up()
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            raise Misuse(
                f"{' and '.join(map(str, paths))} cannot be locked ({error.strerror}), so two processes could write "
                "there at once. Use everstep.files in folders on a disk of this machine, and a step of your own for "
                "others."
            ) from error
        if time.monotonic() > until:
            raise FolderBusy(
                f"{' and '.join(map(str, paths))} has been locked for {PATIENCE_SECONDS:g} s by "
                f"{_holders(descriptor)}. Nothing was changed. The holder may still write there: let it "
                "continue or end it, then retry."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, MOST_PAUSE_SECONDS)


def _holders(descriptor: int) -> str:
    """Return which processes hold the lock of a folder, as far as this system shows it."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        lines = []  # not Linux
    parts = [line.split() for line in lines]
    holders = [one[4] for one in parts if len(one) > 5 and one[1] == "FLOCK" and one[5] == place]
    return " and ".join(map(_described, holders)) or "another process that cannot be seen from here"


def _described(pid: str) -> str:
    try:
        name, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")[::2]
    except OSError:
        return f"process {pid}, which has ended, or a process that it forked"
    return f"process {pid} ({name}{', which is stopped' if state.split()[0] in 'Tt' else ''})"
