"""Files of ours, also in folders where others may write: each is new, or verified to be ours, before it is written.

In a folder such as /tmp anyone can put something under a name before we use it: a link to a file of ours, a pipe, a
file of theirs that they can read. So a new file is created, never opened (`O_EXCL`); a file to append to is checked
through its descriptor first; and links and files of strangers are refused there. That is the kernel's own rule
(`fs.protected_symlinks`, `fs.protected_regular`). It is repeated here because it is off on some machines, and because
SQLite and we resolve links by ourselves, which the kernel does not see.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Generator
from typing import BinaryIO, Final

from everstep.errors import Misuse

NO_LINK: Final[int] = getattr(os, "O_NOFOLLOW", 0)
NEW: Final[int] = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_CLOEXEC", 0)
_APPEND: Final[int] = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK | getattr(os, "O_CLOEXEC", 0)
LINKS_MAX: Final = 40
"""The maximum number of links that are followed from one name, as in Linux."""
_numbers: Final = itertools.count(1)


def create(path: str) -> int:
    """Return the descriptor of a new file that only its owner may read. A leftover of a killed process is replaced."""
    try:
        return os.open(path, NEW, 0o600)
    except FileExistsError:
        if not _is_own(os.lstat(path)):
            raise Misuse(
                f"{path} is there already, and is not a file of ours. Nothing was written. Remove it, or use a folder "
                "in which only you can write."
            ) from None
        os.unlink(path)
        return os.open(path, NEW, 0o600)


@contextlib.contextmanager
def naming(path: str) -> Generator[None]:
    """Turn the machine's refusal to write a file into a message that says which file and why."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise Misuse(f"{path} cannot be written: {error.strerror}. Nothing is left of it.") from error


@contextlib.contextmanager
def part_file(path: str) -> Generator[tuple[str, BinaryIO]]:
    """Give the name of a new file beside a path, and an object that writes to it. The file is removed if the block
    raises.
    """
    part = f"{path}.{os.getpid()}-{next(_numbers)}.part"
    with naming(path):
        descriptor = create(part)
    with open(descriptor, "wb") as stream:
        try:
            yield part, stream
        except BaseException:
            os.unlink(part)
            with contextlib.suppress(OSError):  # a full disk refuses once more what is still in memory
                stream.close()
            raise


def append_to(path: str | os.PathLike[str]) -> int:
    """Return a descriptor that appends to a file of ours, which is created if it does not exist."""
    try:
        descriptor = os.open(path, _APPEND | getattr(os, "O_NONBLOCK", 0), 0o600)
    except OSError as error:  # a link, or a pipe without a reader
        raise Misuse(f"{os.fspath(path)} cannot be written: {error.strerror}.") from error
    if not _is_own(os.fstat(descriptor)):
        os.close(descriptor)
        raise Misuse(f"{os.fspath(path)} is not an ordinary file of yours with one name. Nothing was written.")
    return descriptor


def refuse_unwritable(path: str | os.PathLike[str]) -> None:
    """Raise `Misuse` unless the path is free or an ordinary file, in a folder that can be written."""
    name = os.fspath(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(name).st_mode):
            raise Misuse(f"{name} is a link, a folder or a device. Name an ordinary file.")
    folder = os.path.dirname(name) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Misuse(f"{name} cannot be written: {folder} is not there, or not yours to write in.")


def replace(path: str | os.PathLike[str], data: bytes) -> None:
    """Give a file new content, readable by its owner only. The old one stays until the new one is complete."""
    refuse_unwritable(path)
    with part_file(os.fspath(path)) as (part, stream), naming(os.fspath(path)):
        stream.write(data)
        stream.flush()
        os.replace(part, path)


def name_new(part: str, path: str) -> None:
    """Give a complete file its name, durably. Raises `FileExistsError` if the name is in use by now."""
    os.close(os.open(path, NEW, 0o600))  # the name is ours from here on
    os.replace(part, path)
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- what strangers may have put there ---------------------------------------------------------------------------------
def behind_links(path: str) -> str:
    """Return the file that a path leads to through links. A stranger's link in a shared folder is refused."""
    for _ in range(LINKS_MAX):
        if not os.path.islink(path):
            return path
        if why := planted(path):
            raise Misuse(why)
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise Misuse(f"{path} is one of a circle of links.")


def planted(path: str) -> str:
    """Return why a file at a path is not used: a stranger may have put it there. An empty text if that is impossible.

    In a folder where all can write, the file must belong to this user or to the owner of the folder, and have one name.
    """
    folder = os.path.dirname(path) or "."
    if os.name != "posix":
        return ""  # there folders have lists of who may write
    try:
        shared, found = os.stat(folder), os.lstat(path)
    except FileNotFoundError:
        return ""
    return _why_planted(path, folder, shared, found)


def refuse_planted(path: str, folder: int, name: str) -> None:
    """Raise `Misuse` if a stranger may have put a file of this name into an open folder, where they could read it."""
    if os.name != "posix":
        return
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if why := _why_planted(path, os.path.dirname(path) or ".", os.fstat(folder), found):
        raise Misuse(why)


def _why_planted(path: str, folder: str, shared: os.stat_result, found: os.stat_result) -> str:
    if not _is_shared(shared.st_mode) or (found.st_uid in (os.geteuid(), shared.st_uid) and found.st_nlink == 1):
        return ""
    return (
        f"{path} belongs to another user, or has a second name, and every user can write in {folder}: it may have been "
        "put there to be used by mistake. Nothing was changed. Use a folder in which only you can write, or work as "
        "the user who owns it."
    )


def _is_shared(mode: int) -> bool:
    """Return True if strangers can make files in a folder: every user can, or a group in a folder with the
    sticky bit.
    """
    return bool(mode & stat.S_IWOTH or (mode & stat.S_ISVTX and mode & stat.S_IWGRP))


def _is_own(found: os.stat_result) -> bool:
    is_mine = os.name != "posix" or (found.st_uid == os.geteuid() and found.st_nlink == 1)
    return stat.S_ISREG(found.st_mode) and is_mine
