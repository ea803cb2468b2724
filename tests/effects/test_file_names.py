"""File effects by unusual names: two of one file, and such as no history can keep."""

import os
from pathlib import Path

import pytest

from everstep import files, workflow
from everstep.errors import Misuse
from tests.engine.resume_helpers import Machine


async def test_a_file_that_is_moved_to_another_name_of_itself_has_only_that_one(machine: Machine) -> None:
    source, target = machine.folder / "a", machine.folder / "b"
    source.write_text("text")
    os.link(source, target)

    @workflow
    async def moves() -> None:
        await files.move(source, target, overwrite=True)

    app = await machine.boot()
    await app.run(moves, id="r")
    assert not source.exists()
    assert target.read_text() == "text"


async def test_a_file_that_is_moved_to_where_it_is_stays(machine: Machine) -> None:
    source = machine.folder / "a"
    source.write_text("text")

    @workflow
    async def moves() -> None:
        await files.move(source, machine.folder / "." / "a", overwrite=True, witness=False)

    app = await machine.boot()
    await app.run(moves, id="r")
    assert source.read_text() == "text"


async def test_a_name_that_cannot_be_stored_is_refused_before_anything_is_done(machine: Machine) -> None:
    path = Path(os.fsdecode(os.fsencode(machine.folder) + b"/caf\xe9"))

    @workflow
    async def writes() -> None:
        await files.write(path, "text")

    app = await machine.boot()
    with pytest.raises(Misuse, match="path"):
        await app.run(writes, id="r")
    assert not path.exists()
