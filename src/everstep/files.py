"""File effects for workflows: `await everstep.files.write("report.md", text)`.

Each is a step with the contract `repeat`: atomic, synced to the disk, skipped when the content is already right, one at
a time for each folder, and refused when its run has been taken over meanwhile. The run remembers the content as a
witness (unless `witness=False`), so that it is held when the file is changed from outside before it resumes. In a `def`
workflow say `everstep.blocking.files.write(…)`.
"""

import os
import sys
from typing import Any, Final

from everstep.effects import files as bodies
from everstep.effects.step import Step
from everstep.effects.surroundings import persons_line
from everstep.effects.witnesses import FOLDER, file, file_fact
from everstep.engine.code.execution import current_execution
from everstep.engine.code.witnesses import change_file, release_witness, take_witness
from everstep.model.options import checked_path

__all__ = ["append", "delete", "make_folder", "move", "write"]

_WRITE: Final = Step(bodies.write, name="files.write")
_APPEND: Final = Step(bodies.append, name="files.append")
_FORGET: Final = Step(bodies.forget, name="files.forget")
_OBSERVE: Final = Step(bodies.observe, name="files.observe", effect="read")
_MOVE: Final = Step(bodies.move, name="files.move")
_DELETE: Final = Step(bodies.delete, name="files.delete")
_MAKE_FOLDER: Final = Step(bodies.make_folder, name="files.make_folder")

UNCHECKED: Final = "\0unchecked"
Path = str | os.PathLike[str]


async def _do(what: str, step: Step, *args: Any) -> Any:
    execution = current_execution(f"everstep.files.{what}()")
    return await execution.issue_step(step, args, {}, persons_line(sys._getframe(1)))


def _remember(path: str, fact: dict[str, Any], witness: bool) -> None:
    """The run's own change of a file replaces what it remembered of it, and of the folders that it lies in."""
    execution = current_execution("everstep.files")
    seen = file(path)
    if witness:
        take_witness(execution, seen, fact, "hold", persons_line(sys._getframe(1)))
    elif seen.subject in execution.witnesses:
        release_witness(execution, seen.subject, persons_line(sys._getframe(1)))
    change_file(execution, path, fact.get("digest"), persons_line(sys._getframe(1)))


async def write(
    path: Path, content: str | bytes, *, expected: str | bytes | None = UNCHECKED, witness: bool = True
) -> None:
    """Give a file this content.

    expected: refuse with `FileChanged` to overwrite anything else than this content (None: anything at all).
    witness: remember the content and compare it before the run resumes after a stop.
    """
    name, checked = checked_path("path", path), expected != UNCHECKED
    fact = await _do("write", _WRITE, name, content, expected if checked else None, checked)
    _remember(name, fact, witness)


async def append(path: Path, content: str | bytes, *, witness: bool = True) -> None:
    """Append to a file, once, however often the process dies in between."""
    name = checked_path("path", path)
    fact, mark = await _do("append", _APPEND, name, content)
    _remember(name, fact, witness)
    await _do("append", _FORGET, name, mark)


async def move(source: Path, target: Path, *, overwrite: bool = False, witness: bool = True) -> None:
    """Move a file."""
    origin, goal = checked_path("source", source), checked_path("target", target)
    digest = await _do("move", _OBSERVE, origin)
    fact = await _do("move", _MOVE, origin, goal, overwrite, digest)
    _remember(origin, file_fact(None), witness)
    _remember(goal, fact, witness)


async def delete(path: Path, *, witness: bool = True) -> None:
    """Delete a file; one that is not there is deleted already."""
    name = checked_path("path", path)
    await _do("delete", _DELETE, name)
    _remember(name, file_fact(None), witness)


async def make_folder(path: Path) -> None:
    """Make a folder and those above it, as far as they are missing."""
    name = checked_path("path", path)
    await _do("make_folder", _MAKE_FOLDER, name)
    change_file(current_execution("everstep.files"), name, FOLDER, persons_line(sys._getframe(1)))
