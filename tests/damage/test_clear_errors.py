"""What is damaged beside histories, or refused by the machine: an error that says what it is, never one of Python's."""

import asyncio
import random
import resource
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from everstep import step, workflow
from everstep.cli import main
from everstep.errors import Damaged, Misuse, RunHeld, StoreUnusable
from tests.engine.resume_helpers import Machine


@workflow(name="errors_of_everything")
async def everything(size: int) -> str:
    return random.Random(size).randbytes(size).hex()


@step(effect="once")
async def pay() -> None:
    raise ConnectionError("?")


@workflow(name="errors_of_a_hold")
async def paying() -> None:
    await pay()


async def told(*words: str) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, main, list(words))
    assert "not expected" not in done.output, done.output
    return done.output


META = ["'x'", "x'00ff'", "1.5", "-1"]


@pytest.mark.parametrize("name", ["schema_version", "works_with", "entropy", "latest_time", "restores"])
@pytest.mark.parametrize("value", META)
async def test_a_damaged_line_about_the_store_itself_makes_it_unusable(machine: Machine, name: str, value: str) -> None:
    app = await machine.boot()
    await app.run(everything, 1, id="r")
    await machine.stop(app)
    if name == "works_with":  # it is asked for when a newer release made the store
        machine.sql("UPDATE meta SET value = value + 1 WHERE name = 'schema_version'")
    machine.sql("INSERT OR IGNORE INTO meta (name, value) VALUES (?, 0)", name)
    machine.sql(f"UPDATE meta SET value = {value} WHERE name = ?", name)
    url = str(machine.path)
    is_of_its_type = (name, value) in (("entropy", "'x'"), ("latest_time", "-1"), ("restores", "-1"))
    if is_of_its_type:
        return
    doctor = await told("doctor", "--url", url)
    assert "damaged" in doctor or name == "restores", doctor  # that is only asked by those that drive runs
    if name != "restores":
        with pytest.raises(StoreUnusable, match="damaged"):
            machine.open_store()
        assert "damaged" in await told("ls", "--url", url)


async def test_all_of_it_damaged_does_not_migrate_anew(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(everything, 1, id="r")
    await machine.stop(app)
    machine.sql("UPDATE meta SET value = -1")
    before = machine.dump()
    with pytest.raises(StoreUnusable, match="damaged"):
        machine.open_store()
    assert machine.dump() == before


REPORTS: list[Any] = [{}, {"call": "x", "attempts": 1}, {"call": 1}, {"consequences": 5, "call": [1]}, [], 5]


@pytest.mark.parametrize("report", REPORTS)
async def test_a_damaged_report_of_a_hold_is_no_error_of_pythons_own(machine: Machine, report: Any) -> None:
    app, _ = await machine.start(paying, id="r")
    await machine.until_status("r", "held")
    machine.sql("UPDATE holds SET report = ?", msgspec.json.encode(report))
    before = machine.row("r")
    with pytest.raises(Damaged, match="report of hold"):
        await app.resolve("r", "done", value=1)
    after = machine.row("r")
    assert (after.status, after.owner, after.head_seq) == ("held", None, before.head_seq), "it can be resolved later"
    for words in (["holds"], ["show", "r"], ["resolve", "r", "--done", "1"], ["holds", "--json"]):
        assert "held" in await told(*words, "--url", str(machine.path)) or words[0] != "show"


async def test_a_hold_that_has_lost_its_resolutions_is_no_error_of_pythons_own(machine: Machine) -> None:
    _, run = await machine.start(paying, id="r")
    await machine.until_status("r", "held")
    machine.sql("UPDATE holds SET resolutions = '[]'")
    with pytest.raises(RunHeld, match=r"See `everstep holds`\.$"):
        await run.result()


async def test_a_damaged_row_of_a_hold_is_named_with_its_run(machine: Machine) -> None:
    app, run = await machine.start(paying, id="r")
    await machine.until_status("r", "held")
    (hold,) = await app.holds()
    machine.sql("UPDATE holds SET resolutions = '{'")
    with pytest.raises(Damaged, match=f"the row of hold {hold.id} of run r is damaged"):
        await run.result()
    assert hold.id in await told("holds", "--url", str(machine.path))


@pytest.mark.parametrize("generation", [2, 200_000_000, 2**62])
async def test_an_export_of_a_run_with_an_absurd_generation_says_that_it_is_damaged(
    machine: Machine, generation: int
) -> None:
    app = await machine.boot()
    await app.run(everything, 1, id="r")
    machine.sql("UPDATE runs SET generation = ?", generation)
    with pytest.raises(Damaged, match="generations"):
        await app.export(["r"], str(machine.folder / "file"))
    assert not list(machine.folder.glob("file*"))


def limited(size: int) -> Any:
    """Let this process write no file beyond a size: as on a full disk, what is still in memory is refused as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    return before


async def test_an_export_onto_a_full_disk_names_the_file_and_leaves_nothing(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(everything, 200_000, id="r")
    path = machine.folder / "file"
    before = limited(50_000)
    try:
        with pytest.raises(Misuse, match=f"{path} cannot be written: File too large"):
            await app.export(["r"], str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(machine.folder.glob("file*"))
    assert (await app.export(["r"], str(path))).runs == ["r"]


async def test_an_export_into_a_folder_that_is_not_there_names_the_file(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(everything, 1, id="r")
    path = machine.folder / "nowhere" / "file"
    with pytest.raises(Misuse, match=f"{path} cannot be written: No such file or directory"):
        await app.export(["r"], str(path))
