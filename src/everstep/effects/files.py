"""File effects, as bodies of steps: atomic, synced to the disk, and skipped when the content is already right.

A crash at any system call leaves the old content or the new: the new one is written beside it, synced, and renamed over
it, and then the folder is synced. The file beside it is named by the step's key, so an attempt that was cut off leaves
nothing that the next one does not clean up.

Content alone cannot tell whether an append has happened: another run may have appended the same line. So an append
leaves an empty mark beside the file, made after the new content and before the rename. Mark and no content beside it:
it has happened. A step of its own takes the mark away, when the outcome is recorded.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from everstep.effects.body import key
from everstep.effects.witnesses import file_fact, read_file
from everstep.errors import FileChanged


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[int]:
    """Let one writer at a time work in a folder, of all processes and threads."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _behind_links(path: str) -> Path:
    """Return the file that is meant: a link is followed, for to rename over it would part it from its file."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


def _beside(target: Path, of: str) -> Path:
    """Return the name of a file of ours beside a target; `of` is the key of the step that makes it."""
    digest = hashlib.sha256(target.name.encode(errors="surrogateescape")).hexdigest()[:8]
    return target.with_name(f".{digest}.{of[:16]}.everstep")


def _replace(target: Path, data: bytes, folder: int, mark: Path | None = None) -> None:
    """Put new content in a file's place, all of it or nothing."""
    beside = _beside(target, key())
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            if target.exists():
                os.fchmod(descriptor, target.stat().st_mode & 0o7777)
            with open(descriptor, "wb", closefd=False) as stream:
                stream.write(data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if mark is not None:
            mark.touch()
            os.fsync(folder)
        os.replace(beside, target)
    except BaseException:  # a full disk for instance: the old content stands, and nothing of ours lies about
        for ours in (mark, beside):
            if ours is not None:
                ours.unlink(missing_ok=True)
        raise
    os.fsync(folder)


def as_bytes(content: str | bytes) -> bytes:
    """Return text as UTF-8."""
    return content.encode() if isinstance(content, str) else bytes(content)


def write(path: str, content: str | bytes, expected: str | bytes | None, checked: bool) -> dict[str, Any]:
    """Give a file this content. With `checked`, only if it has the expected content (None: if it is not there)."""
    target, data = _behind_links(path), as_bytes(content)
    with _locked(target.parent) as folder:
        _beside(target, key()).unlink(missing_ok=True)  # of an attempt that was cut off
        now = read_file(path)
        if now != data:
            if checked and now != (None if expected is None else as_bytes(expected)):
                raise FileChanged(f"{path} is not as the workflow expects it; it was left alone.", path)
            _replace(target, data, folder)
    return file_fact(data)


def append(path: str, content: str | bytes) -> tuple[dict[str, Any], str]:
    """Append to a file, once. Returns what it is then, and the key of the mark that is to be taken away."""
    target, data = _behind_links(path), as_bytes(content)
    beside, mark = _beside(target, key()), _beside(target, f"mark{key()}")
    with _locked(target.parent) as folder:
        now = read_file(path) or b""
        if not mark.exists() or beside.exists():
            now += data
            _replace(target, now, folder, mark)
    return file_fact(now), key()


def forget(path: str, of: str) -> None:
    """Take away the mark of an append whose outcome is recorded."""
    _beside(_behind_links(path), f"mark{of}").unlink(missing_ok=True)


def observe(path: str) -> str:
    """Return a file's digest, before it is moved."""
    data = read_file(path)
    if data is None:
        raise FileNotFoundError(f"{path} is not there.")
    return hashlib.sha256(data).hexdigest()


def move(source: str, target: str, overwrite: bool, digest: str) -> dict[str, Any]:
    """Move a file. If the source is gone and the target has its content, that has happened already."""
    origin, goal = Path(source), Path(target)
    with contextlib.ExitStack() as locks:
        for folder in sorted({os.path.realpath(origin.parent), os.path.realpath(goal.parent)}):
            locks.enter_context(_locked(Path(folder)))
        now, there = read_file(source), read_file(target)
        if there is not None and hashlib.sha256(there).hexdigest() == digest and now is None:
            return file_fact(there)
        if now is None:
            raise FileNotFoundError(f"{source} is no longer there; nothing was moved.")
        if there is not None and not overwrite:
            raise FileChanged(f"{target} is there already; nothing was moved.", target)
        os.replace(origin, goal)
        _sync_folder(goal.parent)
        _sync_folder(origin.parent)
        return file_fact(now)


def delete(path: str) -> None:
    """Delete a file. One that is not there is deleted already."""
    target = Path(path)
    if target.parent.is_dir():
        with _locked(target.parent) as folder:
            target.unlink(missing_ok=True)
            os.fsync(folder)


def make_folder(path: str) -> None:
    """Make a folder and those above it, as far as they are missing."""
    target = Path(path).absolute()
    missing = [one for one in (target, *target.parents) if not one.exists()]
    target.mkdir(parents=True, exist_ok=True)
    for one in missing:
        _sync_folder(one.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
