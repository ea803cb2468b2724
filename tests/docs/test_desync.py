"""The page about record and world: its blocks are what the programs really print, and what it says of them is so.

All processes are real. The plain programs kill themselves by SIGKILL where `CRASH_AT` says so, those with Everstep
where `EVERSTEP_CRASH_AT` does; then they are started again. What happened is read from the world: files, databases.
"""

import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_links import names_in
from tests.examples import kit
from tests.waiting import open_sqlite


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_desync", ROOT / "docs" / "make_desync.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_desync"] = module  # its dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


maker = load_maker()
PAGE = maker.PAGE.read_text("utf-8")
BLOCKS = list(maker.BLOCK.finditer(PAGE))
HOLDS = {"accept": "nothing to do", "retry": "migrated to v5", "cancel": "was cancelled"}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every session of the page, played, with the folder that it left behind."""
    sessions: dict[str, Any] = maker.play(PAGE, tmp_path_factory.mktemp("sessions"))
    return sessions


def run_in(folder: Path, way: str, *commands: str) -> list[str]:
    """Run commands in a copy of an example's folder, as the page does; return what each of them printed."""
    tools = maker.made_tools(folder.parent / f"{folder.name}-bin")
    session = maker.Session(f"{way} test", "", [list(commands)])
    session.folder = folder.resolve()
    maker.shutil.copytree(maker.PROGRAMS / way, folder)
    maker.play_one(session, tools)
    return [text for _, text in session.printed[0]]


def all_of(check: Callable[[str], None], cases: Iterable[str]) -> None:
    """Check all cases, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, cases))


def name_of(case: str) -> str:
    return re.sub(r"\W", "-", case)


@pytest.fixture(scope="module")
def made(played: dict[str, Any]) -> list[str]:
    """The blocks of the page, as they would be made now."""
    return [block.group() for block in maker.BLOCK.finditer(maker.made_page(PAGE, played))]


# -- the page is what happens -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"{one[1]} {one[2]}" for one in BLOCKS])
def test_a_block_is_what_the_program_is_and_does(made: list[str], number: int) -> None:
    assert BLOCKS[number].group() == made[number], "run: make docs"


def test_the_picture_is_what_the_maker_draws() -> None:
    assert maker.PICTURE.read_text("utf-8") == maker.picture(), "run: make docs"


def test_every_block_of_the_page_is_made() -> None:
    assert [block.text for block in blocks(PAGE)] == [block.group(4) for block in BLOCKS]
    assert {block.language for block in blocks(PAGE)} == {"python", "text"}


def test_every_way_has_both_versions_and_both_are_killed(played: dict[str, Any]) -> None:
    ways = {path.name for path in maker.PROGRAMS.iterdir() if path.is_dir()}
    assert ways == {session.way for session in played.values()}
    assert len(ways) == 6
    for way in ways:
        for version, variable in (("wrong", "CRASH_AT="), ("right", "EVERSTEP_CRASH_AT=")):
            killed = [text for command, text in played[f"{way} {version}"].printed[0] if command.startswith(variable)]
            assert killed, f"{way} {version} is not killed"
            assert all(text.endswith("Killed") for text in killed)


def test_the_table_names_a_way_a_guarantee_and_a_test_in_each_row() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    assert len(rows) == 6
    for row in rows:
        assert "](#" in row
        assert "](guarantees.md#" in row
        (test,) = re.findall(r"`(test_\w+)`", row)
        assert test in names_in(Path(__file__))


# -- by hand: the harm ------------------------------------------------------------------------------------------------
def test_by_hand_the_record_says_c_and_c_is_never_written(played: dict[str, Any]) -> None:
    folder = played["marked_first wrong"].folder
    assert json.loads((folder / "record.json").read_text()) == ["a.py", "b.py", "c.py"]
    assert {name: "fetch" in (folder / name).read_text() for name in ("a.py", "b.py", "c.py")} == {
        "a.py": False,
        "b.py": False,
        "c.py": True,
    }


def test_by_hand_one_checkpoint_pays_and_mails_twice(played: dict[str, Any]) -> None:
    folder = played["one_checkpoint wrong"].folder
    assert Counter(kit.lines(folder / "bank.txt"))["15 to bo"] == 2
    assert Counter(kit.lines(folder / "outbox.txt"))["bo: your 15 are on their way"] == 2


def test_by_hand_an_old_plan_is_carried_out_on_a_new_world(played: dict[str, Any]) -> None:
    assert prices(played["outside_changed wrong"].folder) == (5, {"lamp": 400_000, "chair": 1_800_000})


def test_by_hand_the_letters_follow_two_plans(played: dict[str, Any]) -> None:
    folder = played["memory_only wrong"].folder
    assert letters(folder) == {"acme": "invoices", "kite": "invoices", "nord": "bills", "opal": "bills"}


def test_by_hand_a_clock_that_is_set_back_hides_a_change_and_moves_a_deadline(played: dict[str, Any]) -> None:
    folder = played["clocks wrong"].folder
    assert (folder / "notes" / "lamp").read_text() == "45 euros\n"
    assert (folder / "index" / "lamp").read_text() == "in short: 40 euros\n"
    assert "I wait for 60 more minutes" in played["clocks ask-wrong"].output()


def test_by_hand_a_torn_record_sends_letters_twice(played: dict[str, Any]) -> None:
    session = played["torn wrong"]
    assert "state.json cannot be read" in session.output()
    assert readers(session.folder) == {"ann": 2, "bo": 2, "cleo": 2, "dan": 1}


def prices(folder: Path) -> tuple[int, dict[str, int]]:
    with closing(open_sqlite(folder / "shop.db")) as database:
        (version,) = database.execute("select version from schema").fetchone()
        return version, dict(database.execute("select item, amount from prices"))


def letters(folder: Path) -> dict[str, str]:
    return {path.stem: path.parent.name for path in folder.glob("*/*.txt")}


def readers(folder: Path) -> dict[str, int]:
    return dict(Counter(line.partition(":")[0] for line in kit.lines(folder / "outbox.txt")))


# -- with Everstep ----------------------------------------------------------------------------------------------------
AUDITED = """
import os, runpy, sys
written = []
def hook(event, args):
    if event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
        written.append(str(args[0]))
    elif event in ("os.rename", "os.link"):
        written.append(str(args[1]))
    elif event in ("os.remove", "os.truncate", "os.chmod", "os.utime"):
        written.append(str(args[0]))
sys.addaudithook(hook)
runpy.run_path("right.py", run_name="__main__")
print("written:", *sorted({os.path.basename(path) for path in written} & {"a.py", "b.py", "c.py"}))
"""
"""Runs the agent and says which of the three files that process opened for writing, replaced or changed otherwise."""


def test_the_resume_writes_c_and_does_not_touch_a_and_b(tmp_path: Path) -> None:
    """Killed when C is begun; when C is written and nobody noted it; before the model was asked about C."""
    resumed = {"body.before:9": "written: c.py", "body.after:9": "written:", "body.before:8": "written: c.py"}

    def check(at: str) -> None:
        folder = tmp_path / name_of(at)
        (tmp_path / f"{folder.name}.py").write_text(AUDITED)
        kill, resume = f"EVERSTEP_CRASH_AT={at} python right.py", f"python ../{folder.name}.py"
        killed, _, again, audit = run_in(folder, "marked_first", kill, "python audit.py", resume, "python audit.py")
        assert killed == "wrote a.py\nwrote b.py\nKilled"
        assert again.splitlines()[-3:] == ["wrote c.py", "done: a.py b.py c.py", resumed[at]]
        touched = "TOUCHED" if resumed[at].endswith("c.py") else "untouched"
        assert audit.splitlines() == ["a.py untouched", "b.py untouched", f"c.py {touched}"]
        assert not [name for name in ("a.py", "b.py", "c.py") if "fetch" in (folder / name).read_text()]
        if at.endswith(":9"):  # C was begun, so all before it is recorded, and only C is begun again
            assert again.splitlines()[0] == "wrote c.py"
            events = [event for event in kit.history(folder, "refactor-1") if event.kind == "step_started"]
            begun = Counter(event.step for event in events if event.step.startswith("files.write"))
            assert begun == {"files.write": 1, "files.write#2": 1, "files.write#3": 2}

    all_of(check, resumed)


def test_each_refund_and_each_mail_goes_out_once(tmp_path: Path) -> None:
    """Killed when bo is paid, when his mail is begun, and when it is out."""

    def check(at: str) -> None:
        folder = tmp_path / name_of(at)
        run_in(folder, "one_checkpoint", f"EVERSTEP_CRASH_AT={at} python right.py", "python right.py")
        for name in ("bank.txt", "outbox.txt", "closed.txt"):
            assert len(kit.lines(folder / name)) == 3, f"{name} after a kill at {at}"
            assert len(set(kit.lines(folder / name))) == 3
        kinds = [event.kind for event in kit.history(folder, "tickets-1")]
        assert kinds.count("step_doubted") == (at in ("body.before:5", "body.after:5"))
        assert kinds[-1] == "run_completed"

    all_of(check, ["body.after:4", "body.before:5", "body.after:5"])


def test_a_schema_migrated_by_hand_holds_the_run_and_a_person_decides(played: dict[str, Any]) -> None:
    held = played["outside_changed right"]
    assert "remembered [[4, 'euro']], now [[5, 'cent']]" in held.output()
    assert prices(held.folder) == (5, {"lamp": 4_000, "chair": 18_000})
    kinds = [event.kind for event in kit.history(held.folder, "prices-1")]
    assert kinds[-1] == "run_held"
    assert kinds.count("step_started") == 3  # the third was begun before the kill, and not again
    for resolution, said in HOLDS.items():
        session = played[f"outside_changed {resolution}"]
        assert said in session.output()
        assert prices(session.folder) == (5, {"lamp": 4_000, "chair": 18_000})
        events = kit.history(session.folder, "prices-1")
        decided = [event.body["resolution"] for event in events if event.kind == "run_resolved"]
        assert decided == ([resolution] * 2 if resolution == "retry" else [resolution])
        assert events[-1].kind == ("run_cancelled" if resolution == "cancel" else "run_completed")


def test_a_change_of_a_database_by_the_run_itself_that_is_not_recorded_is_asked_about(tmp_path: Path) -> None:
    commands = (
        "python shop.py new",
        "EVERSTEP_CRASH_AT=body.after:3 python right.py",
        "python right.py",
        "everstep resolve prices-1 --accept",
        "python right.py",
    )
    *_, held, _, result = run_in(tmp_path / "own", "outside_changed", *commands)
    assert "is held (drift)" in held
    assert result == "nothing to do, it is not v4 any more"
    assert prices(tmp_path / "own") == (5, {"lamp": 4_000, "chair": 18_000})


def test_what_the_model_said_is_kept_and_followed_to_the_end(played: dict[str, Any], tmp_path: Path) -> None:
    folder = played["memory_only right"].folder
    assert set(letters(folder).values()) == {"invoices"}
    assert len(letters(folder)) == 4
    assert len(kit.lines(folder / "model.log")) == 1
    # Killed before the answer is recorded, it is asked again; but nothing has followed from the first answer.
    folder = tmp_path / "unrecorded"
    run_in(folder, "memory_only", "EVERSTEP_CRASH_AT=body.after:2 python right.py", "python right.py")
    assert set(letters(folder).values()) == {"bills"}
    assert len(letters(folder)) == 4


def test_a_clock_that_is_set_back_hides_no_change_and_moves_no_deadline(played: dict[str, Any]) -> None:
    folder = played["clocks right"].folder
    assert (folder / "index" / "lamp").read_text() == "in short: 45 euros\n"
    assert (folder / "index" / "chair").read_text() == "in short: 180 euros\n"
    asked = played["clocks ask-right"]
    assert asked.output().endswith("(the clock is set to 11:00)\nnobody answered in time")
    (timer,) = [event for event in kit.history(asked.folder, "question-1") if event.kind == "timer_started"]
    (fired,) = [event for event in kit.history(asked.folder, "question-1") if event.kind == "timer_fired"]
    assert 0 <= fired.at - timer.body["deadline"] < 600_000_000  # not early, and not an hour late


def test_a_commit_that_is_cut_off_leaves_the_history_before_it(tmp_path: Path) -> None:
    """Killed at each of the first commits: before its statements, before it is made, and when it is made."""

    def check(at: str) -> None:
        folder = tmp_path / name_of(at)
        commands = f"EVERSTEP_CRASH_AT={at} python right.py > /dev/null", "python right.py > /dev/null"
        assert run_in(folder, "torn", *commands) == ["Killed", ""], at
        assert readers(folder) == {"ann": 1, "bo": 1, "cleo": 1, "dan": 1}, at
        assert kit.history(folder, "letters-1")[-1].kind == "run_completed"

    all_of(check, [f"store.commit.{where}" for where in ("written:2", "before:3", "written:4", "after:5")])


def test_a_flipped_bit_is_found_and_nothing_is_merged(played: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "flipped"
    run_in(folder, "torn", "EVERSTEP_CRASH_AT=body.before:6 python right.py", "python flip_bit.py")
    damaged = rows(folder)
    again = maker.Session("torn again", "", [["python right.py"]], folder=folder)
    maker.play_one(again, tmp_path / "flipped-bin")
    assert "is held (damaged)" in again.output()
    assert rows(folder) == damaged  # nothing was added, cut off or put right
    assert readers(folder) == {"ann": 1, "bo": 1}
    repaired = played["torn flipped"].folder
    assert readers(repaired) == {"ann": 1, "bo": 1, "cleo": 1, "dan": 1}
    begun = [event.step for event in kit.history(repaired, "letters-1") if event.kind == "step_started"]
    assert Counter(begun)["send#3"] == 2  # what the damaged event said was not lost


def rows(folder: Path) -> list[tuple[Any, ...]]:
    with closing(open_sqlite(folder / "everstep.db")) as store:
        return store.execute("select * from events order by run, generation, seq").fetchall()


# -- the maker --------------------------------------------------------------------------------------------------------
def test_what_is_another_one_each_time_is_replaced(tmp_path: Path) -> None:
    keys: dict[str, int] = {}
    printed = f"h0123456789  12 ms ago  {tmp_path}/a.py  [deadbeef] [0badcafe] [deadbeef]   \n"
    assert maker.settled(printed, tmp_path, keys) == "h…  a moment ago  ./a.py  [key 1] [key 2] [key 1]"
    assert maker.settled("sh: line 1:  123 Killed   python x.py\n", tmp_path, keys) == "Killed"
    assert maker.settled("lamp 40, chair 180", tmp_path, keys) == "lamp 40, chair 180"


def test_a_block_that_is_not_what_happens_is_found(tmp_path: Path) -> None:
    page = "<!-- session: marked_first x -->\n```text\n$ cat a.py | head -1\nnothing\n```\n"
    made = maker.made_page(page, maker.play(page, tmp_path))
    assert made != page
    assert "def fetch(item):" in made


def test_an_excerpt_is_taken_with_its_decorators_and_a_missing_one_is_an_error() -> None:
    right = maker.PROGRAMS / "marked_first" / "right.py"
    assert maker.excerpt(right, ["refactor"]).startswith("@workflow\ndef refactor(")
    with pytest.raises(LookupError, match="nothing_of_the_kind"):
        maker.excerpt(right, ["nothing_of_the_kind"])
