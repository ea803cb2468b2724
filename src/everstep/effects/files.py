"""File effects, as bodies of steps: atomic, synced to the disk, and skipped when the content is already right.

A crash at any system call leaves the old content or the new: the new one is written beside it, synced, and renamed over
it, and then the folder is synced. The file beside it is named by the step's key, so an attempt that was cut off leaves
nothing that the next one does not clean up.
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


def _replace(target: Path, data: bytes, folder: int) -> None:
    """Put new content in a file's place, all of it or nothing."""
    beside = target.with_name(f".{target.name[:100]}.{key()[:16]}.everstep")
    mode = target.stat().st_mode & 0o7777 if target.exists() else 0o666
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(beside, target)
    os.fsync(folder)


def as_bytes(content: str | bytes) -> bytes:
    """Return text as UTF-8."""
    return content.encode() if isinstance(content, str) else bytes(content)


def write(path: str, content: str | bytes, expected: str | bytes | None, checked: bool) -> dict[str, Any]:
    """Give a file this content. With `checked`, only if it has the expected content (None: if it is not there)."""
    target, data = Path(path), as_bytes(content)
    with _locked(target.parent) as folder:
        now = read_file(path)
        if now != data:
            if checked and now != (None if expected is None else as_bytes(expected)):
                raise FileChanged(f"{path} is not as the workflow expects it; it was left alone.", path)
            _replace(target, data, folder)
    return file_fact(data)


def observe(path: str) -> tuple[int, str]:
    """Return a file's size and digest, before something is appended to it."""
    data = read_file(path) or b""
    return len(data), hashlib.sha256(data).hexdigest()


def append(path: str, content: str | bytes, size: int, digest: str) -> dict[str, Any]:
    """Append to a file that had this size and digest, once: if it is there already, it is not appended again."""
    target, data = Path(path), as_bytes(content)
    with _locked(target.parent) as folder:
        now = read_file(path) or b""
        if hashlib.sha256(now[:size]).hexdigest() != digest:
            raise FileChanged(f"{path} was changed while something was to be appended to it.", path)
        if now[size : size + len(data)] != data:
            if len(now) != size:
                raise FileChanged(f"Somebody else appended to {path} first.", path)
            now += data
            _replace(target, now, folder)
    return file_fact(now)


def move(source: str, target: str, overwrite: bool) -> dict[str, Any]:
    """Move a file. If the source is gone and the target is there, that has happened already."""
    origin, goal = Path(source), Path(target)
    with _locked(goal.parent) as folder:
        if origin.exists():
            if goal.exists() and not overwrite:
                raise FileChanged(f"{target} is there already; nothing was moved.", target)
            os.replace(origin, goal)
            os.fsync(folder)
            _sync_folder(origin.parent)
        elif not goal.exists():
            raise FileNotFoundError(f"Neither {source} nor {target} is there.")
    return file_fact(read_file(target))


def delete(path: str) -> None:
    """Delete a file. One that is not there is deleted already."""
    target = Path(path)
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
