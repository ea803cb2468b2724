"""A run that writes into a folder that it remembers: its own changes are no drift, anybody else's are."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep import blocking, files, witness, workflow
from everstep.cli import main as cli
from everstep.effects.witnesses import FOLDER, Covered, name_within, with_changes
from everstep.effects.witnesses import directory as make_directory
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine, run_program


@pytest.fixture(autouse=True)
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d/sub").mkdir(parents=True)
    Path("d/kept.txt").write_text("kept")
    Path("d/old.txt").write_text("old")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@workflow
async def tidying() -> str:
    await everstep.expect(witness.directory("d"))
    await everstep.expect(witness.directory(os.path.abspath("d"), "*.txt"))
    await files.write("d/new.txt", "new")
    await files.write("./d/sub/deep.txt", "deep", witness=False)
    await files.append("d/kept.txt", " and more")
    await files.move("d/old.txt", "d/moved.txt")
    await files.write("elsewhere.txt", "not in the folder")
    await files.delete("d/never.txt")
    await files.make_folder("d/empty")
    return await everstep.receive("word", str)


async def stopped(machine: Machine, flow: Any = tidying) -> None:
    app, _ = await machine.start(flow, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    await machine.kill(app)


async def test_a_run_s_own_changes_in_a_folder_that_it_remembers_are_no_drift(machine: Machine) -> None:
    await stopped(machine)
    app = await machine.worker()
    run = app.get("r")
    assert (await run.verify(outside=True)).drift == []
    done = CliRunner().invoke(cli, ["verify", "r", "--outside", "--url", str(machine.path)])
    assert done.exit_code == 0, done.stdout
    await run.signal("word", "a")
    assert await run.result(timeout=60) == "a"
    assert not machine.replay("r").differences
    assert list(check(export_histories(machine.store))) == []
    changed = [(body.path, bool(body.digest)) for body in machine.bodies("r", "witness_changed")]
    assert changed == [
        ("d/new.txt", True),
        ("./d/sub/deep.txt", True),
        ("d/kept.txt", True),
        ("d/old.txt", False),
        ("d/moved.txt", True),
        ("elsewhere.txt", True),
        ("d/never.txt", False),
        ("d/empty", True),
    ]


STRANGERS = {
    "a file of the run's": lambda: Path("d/new.txt").write_text("theirs"),
    "a file of the run's without a witness": lambda: Path("d/sub/deep.txt").write_text("theirs"),
    "a file that was there before": lambda: Path("d/kept.txt").write_text("kept"),
    "a new file": lambda: Path("d/theirs.txt").write_text("theirs"),
    "what was moved away is back": lambda: Path("d/old.txt").write_text("old"),
    "a file of the run's is gone": lambda: Path("d/moved.txt").unlink(),
}


@pytest.mark.parametrize("what", STRANGERS)
async def test_what_anybody_else_changes_there_is(machine: Machine, what: str) -> None:
    await stopped(machine)
    STRANGERS[what]()
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    await machine.until_status("r", "held")
    subjects = [one["subject"] for one in machine.report("r")["drift"]]
    assert "directory:d:**/*" in subjects
    assert CliRunner().invoke(cli, ["verify", "r", "--outside", "--url", str(machine.path)]).exit_code == 1
    await app.resolve("r", "accept")
    assert await app.get("r").result(timeout=60) == "a", "and what is accepted has the run's own changes in it"
    assert not machine.replay("r").differences


async def test_a_folder_that_the_run_makes_is_its_own_change(machine: Machine) -> None:
    @workflow
    async def making() -> str:
        await everstep.expect(witness.directory("out"))
        await files.make_folder("out/a")
        await files.write("out/a/x.txt", "x")
        await files.delete("out/a/x.txt")
        return await everstep.receive("word", str)

    await stopped(machine, making)
    app = await machine.worker()
    assert (await app.get("r").verify(outside=True)).drift == []
    os.rmdir("out/a")
    os.rmdir("out")
    assert len((await app.get("r").verify(outside=True)).drift) == 1


async def test_a_def_workflow_s_changes_count_too(machine: Machine) -> None:
    @workflow
    def writing() -> str:
        blocking.expect(witness.directory("d"))
        blocking.files.write("d/new.txt", "new")
        return blocking.receive("word", str)

    await stopped(machine, writing)
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    assert await app.get("r").result(timeout=60) == "a"


async def test_without_a_folder_to_remember_nothing_is_recorded(machine: Machine) -> None:
    @workflow
    async def plain() -> str:
        await files.write("d/new.txt", "new")
        return await everstep.receive("word", str)

    await stopped(machine, plain)
    assert machine.kinds("r", "witness_") == ["witness_taken"]


CUT_OFF = """
    @workflow
    async def flow():
        await everstep.expect(everstep.witness.directory("d"))
        {effect}
        return "done"

    print(everstep.run(flow, id="r", url=URL))
"""
EFFECTS = {
    "write": 'await everstep.files.write("d/old.txt", "mine")',
    "write anew": 'await everstep.files.write("d/new.txt", "mine")',
    "append": 'await everstep.files.append("d/old.txt", "+")',
    "delete": 'await everstep.files.delete("d/old.txt")',
    "move": 'await everstep.files.move("d/old.txt", "d/new.txt")',
    "make folder": 'await everstep.files.make_folder("d/x/y")',
}


@pytest.mark.parametrize("point", ["body.before", "body.after", "outcome.recorded", "outcome.applied"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_kill_around_the_run_s_own_change_is_no_drift_of_its_folder(tmp_path: Path, effect: str, point: str) -> None:
    number = 3 if effect == "move" else 2  # after that of `expect`, and of what `move` looks at first
    program = CUT_OFF.format(effect=EFFECTS[effect])
    status, _ = run_program(tmp_path, program, environment={"EVERSTEP_CRASH_AT": f"{point}:{number}"})
    assert status == -9
    assert run_program(tmp_path, program) == (0, "done\n")


def test_a_kill_around_its_own_change_does_not_excuse_a_stranger_s(tmp_path: Path) -> None:
    program = CUT_OFF.format(effect=EFFECTS["write"])
    status, _ = run_program(tmp_path, program, environment={"EVERSTEP_CRASH_AT": "body.after:2"})
    assert status == -9
    Path("d/kept.txt").write_text("theirs")
    from tests.engine.resume_helpers import Program

    status, _, err = Program(tmp_path, program).end()
    assert status == 1
    assert "RunHeld" in err
    assert "drift" in err


# -- names and patterns ------------------------------------------------------------------------------------------------
PATTERNS = ["**/*", "*", "*.txt", "**/*.txt", "sub/*", "sub/**/*", "**/a*", "./*.txt", "s?b/[ab].txt", "**/sub/*"]
NAMES = ["a.txt", "b.md", "sub/a.txt", "sub/b.txt", "sub/deep/a.txt", "sab/a.txt", ".hidden", "x/sub/b"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_to_the_folder_s_witness(tmp_path: Path, pattern: str) -> None:
    for name in NAMES:
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    observed = make_directory(tmp_path / "p", pattern).observe()
    covered = Covered(str(tmp_path / "p"), pattern)
    changes = {str(tmp_path / "p" / name): digest(name) for name in NAMES}
    assert with_changes({"exists": True, "files": {}}, covered, changes) == observed


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "sub/c"]), st.sampled_from(["1", "2", None])), max_size=8))
def test_changes_one_by_one_and_all_at_once_are_the_same(changes: list[tuple[str, str | None]]) -> None:
    covered = Covered("d", "**/*")
    fact: dict[str, Any] = {"exists": True, "files": {"a": "0"}}
    one_by_one = fact
    for name, content in changes:
        one_by_one = with_changes(one_by_one, covered, {f"d/{name}": content})
    assert with_changes(fact, covered, {f"d/{name}": content for name, content in changes}) == one_by_one


def test_where_a_file_lies_does_not_hang_on_how_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "d")
    for folder in ("d", "./d", str(tmp_path / "d"), "link", "d/sub/.."):
        covered = Covered(folder, "**/*")
        for path in ("d/x", "./d/../d/x", str(tmp_path / "d" / "x"), "link/x"):
            assert name_within(path, covered) == "x", (folder, path)
        assert name_within("x", covered) is None
        assert name_within("dd/x", covered) is None
        assert name_within("d/..x", covered) == "..x"


def test_a_folder_that_is_made_above_or_beside_is_not_the_folder() -> None:
    covered, absent = Covered("out/a", "**/*"), {"exists": False}
    assert with_changes(absent, covered, {"out": FOLDER}) == absent
    assert with_changes(absent, covered, {"out/b": FOLDER}) == absent
    assert with_changes(absent, covered, {"out/a": FOLDER}) == {"exists": True, "files": {}}
    assert with_changes(absent, covered, {"out/a/b": FOLDER}) == {"exists": True, "files": {}}
