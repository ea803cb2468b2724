"""File effects, as bodies of steps: atomic, synced to the disk, and skipped when the content is already right.

A crash at any system call leaves the old content or the new: the new one is written beside it, synced, and renamed over
it, and then the folder is synced. The file beside it is named by the step's key, so the next attempt cleans up what an
attempt that was cut off has left.

Everything happens under the lock of the folder, and there each attempt first proves that it may act (see
`everstep.effects.folders`): a process that was stopped and has lost its run changes nothing when it wakes.

Content alone cannot tell whether an append has happened: another run may have appended the same line. So an append
leaves an empty mark beside the file, made after the new content and before the rename. A mark without new content
beside it proves that the append has happened. A separate step removes the mark, when the outcome is recorded.
"""

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from everstep.effects.body import key
from everstep.effects.folders import Folder, fenced, refuse_given_up
from everstep.effects.witnesses import file_fact, read_file
from everstep.errors import FileChanged
from everstep.model.own_files import NEW, NO_LINK, behind_links, refuse_planted


def _behind_links(path: str) -> Path:
    """Return the file behind a link, because renaming over the link would separate it from its file."""
    return Path(behind_links(path))


def _beside(target: Path, of: str) -> Path:
    """Return the name of a file of ours beside a target; `of` is the key of the step that makes it."""
    digest = hashlib.sha256(target.name.encode(errors="surrogateescape")).hexdigest()[:8]
    return target.with_name(f".{digest}.{of[:16]}.everstep")


def _replace(folder: Folder, target: Path, data: bytes, mark: Path | None = None) -> None:
    """Replace a file's content, completely or not at all. A new file has the default mode of new files here."""
    refuse_planted(str(target), folder, target.name)  # its mode would be kept
    beside = _beside(target, key())
    if mark is not None and _is_there(folder, mark):
        _unlink(folder, mark)  # first: without the content beside it, it would say that the append has happened
        os.fsync(folder)
    _unlink(folder, beside)  # left by an attempt that was cut off
    try:
        mode = _mode_of(folder, target)
        descriptor = os.open(beside.name, NEW, 0o666 if mode is None else 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb", closefd=False) as stream:
                stream.write(data)
            if mode is not None:
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        refuse_given_up()  # the disk may have taken its time
        if mark is not None:
            os.close(os.open(mark.name, NEW, 0o600, dir_fd=folder))
            os.fsync(folder)
        os.replace(beside.name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # a full disk for instance: the old content stays, and nothing of ours lies about
        for ours in (mark, beside):
            if ours is not None:
                _unlink(folder, ours)
        raise
    os.fsync(folder)


def _mode_of(folder: Folder, target: Path) -> int | None:
    try:
        return stat.S_IMODE(os.stat(target.name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _unlink(folder: Folder, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target.name, dir_fd=folder)


def _is_there(folder: Folder, target: Path) -> bool:
    try:
        os.stat(target.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _read(folder: Folder, target: Path, more: int = 0) -> bytes | None:
    """Return a file's content, or None if it does not exist. A pipe is refused, because others wait for the folder."""
    try:
        descriptor = os.open(target.name, os.O_RDONLY | os.O_NONBLOCK | more, dir_fd=folder)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileChanged(f"{target} is not an ordinary file; it was left alone.", str(target))
    with open(descriptor, "rb") as stream:
        return stream.read()


def as_bytes(content: str | bytes) -> bytes:
    """Return text as UTF-8."""
    return content.encode() if isinstance(content, str) else bytes(content)


def write(path: str, content: str | bytes, expected: str | bytes | None, checked: bool) -> dict[str, Any]:
    """Give a file this content. With `checked`, only if it has the expected content (None: if it does not exist)."""
    target, data = _behind_links(path), as_bytes(content)
    with fenced(target.parent) as (folder,):
        _unlink(folder, _beside(target, key()))  # left by an attempt that was cut off
        now = _read(folder, target, NO_LINK)
        if now != data:
            if checked and now != (None if expected is None else as_bytes(expected)):
                raise FileChanged(f"{path} is not as the workflow expects it; it was left alone.", path)
            _replace(folder, target, data)
    return file_fact(data)


def append(path: str, content: str | bytes) -> tuple[dict[str, Any], str]:
    """Append to a file, once. Returns the file's new state, and the key of the mark to remove later."""
    target, data = _behind_links(path), as_bytes(content)
    beside, mark = _beside(target, key()), _beside(target, f"mark{key()}")
    with fenced(target.parent) as (folder,):
        now = _read(folder, target, NO_LINK) or b""
        if not _is_there(folder, mark) or _is_there(folder, beside):
            now += data
            _replace(folder, target, now, mark)
    return file_fact(now), key()


def forget(path: str, of: str) -> None:
    """Remove the mark of an append whose outcome is recorded."""
    target = _behind_links(path)
    if target.parent.is_dir():
        with fenced(target.parent) as (folder,):
            _unlink(folder, _beside(target, f"mark{of}"))


def observe(path: str) -> str:
    """Return a file's digest, before it is moved."""
    data = read_file(path)
    if data is None:
        raise FileNotFoundError(f"{path} is not there.")
    return hashlib.sha256(data).hexdigest()


def move(source: str, target: str, overwrite: bool, digest: str) -> dict[str, Any]:
    """Move a file. If the source is gone and the target has its content, that has happened already."""
    origin, goal = Path(source), Path(target)
    with fenced(origin.parent, goal.parent) as (from_folder, to_folder):
        now, there = _read(from_folder, origin), _read(to_folder, goal)
        if there is not None and hashlib.sha256(there).hexdigest() == digest and now is None:
            return file_fact(there)
        if now is None:
            raise FileNotFoundError(f"{source} is no longer there; nothing was moved.")
        if there is not None and not overwrite:
            raise FileChanged(f"{target} is there already; nothing was moved.", target)
        refuse_given_up()
        if _is_one_file(from_folder, origin, to_folder, goal):
            _unlink(from_folder, origin)  # two names of one file: renaming it to the other does nothing
        else:
            os.replace(origin.name, goal.name, src_dir_fd=from_folder, dst_dir_fd=to_folder)
        os.fsync(to_folder)
        os.fsync(from_folder)
        return file_fact(now)


def _is_one_file(from_folder: Folder, origin: Path, to_folder: Folder, goal: Path) -> bool:
    """Return True if two paths are different names of one file (hard links)."""
    names = {(os.fstat(from_folder).st_ino, origin.name), (os.fstat(to_folder).st_ino, goal.name)}
    try:
        found = os.stat(goal.name, dir_fd=to_folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.stat(origin.name, dir_fd=from_folder, follow_symlinks=False)
    return len(names) == 2 and (here.st_dev, here.st_ino) == (found.st_dev, found.st_ino)


def delete(path: str) -> None:
    """Delete a file. A missing one counts as deleted."""
    target = Path(path)
    if target.is_dir() and not target.is_symlink():
        raise FileChanged(f"{path} is a folder, and no file; it was left alone.", path)
    if target.parent.is_dir():
        with fenced(target.parent) as (folder,):
            _unlink(folder, target)
            os.fsync(folder)


def make_folder(path: str) -> None:
    """Make a folder and its missing parents."""
    target = Path(path).absolute()
    if target.is_dir():
        return
    if os.path.lexists(target):
        raise FileExistsError(f"{path} is there already, and is not a folder.")
    missing = [target, *(one for one in target.parents if not one.exists())]
    for one in reversed(
        missing
    ):  # each under the lock of the one above: a successor locks the same, wherever it begins
        with fenced(one.parent) as (folder,):
            with contextlib.suppress(FileExistsError):  # another writer has made it meanwhile
                os.mkdir(one.name, dir_fd=folder)
            os.fsync(folder)
