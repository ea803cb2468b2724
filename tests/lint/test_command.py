"""The command, and no false alarm on anything that users are shown."""

from pathlib import Path

import pytest

from everstep.lint.linting import lint_paths, lint_text
from tests.cli.conftest import Folder
from tests.docs.pages import ROOT, name_of, pages, script

BAD = """\
import time

import everstep


def helper():
    return time.time()


@everstep.workflow
async def flow():
    return helper()
"""
SHOWN_ON_PURPOSE = {("docs/tutorial.md", "outside"): "the page shows how this is refused"}
NO_FALSE_ALARM_IN_A_SCRIPT = "import"
"""A page is a script that nobody imports, and runs its programs as it goes."""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_no_example_alarms_it() -> None:
    linted = lint_paths([str(ROOT / "examples")])
    assert linted.files > 20
    assert [one for one in linted.findings if "broken" not in Path(one.file).parts] == []  # those are so on purpose


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_page_alarms_it(page: Path) -> None:
    found = {(name_of(page), one.rule): str(one) for one in lint_text(page.name, script(page.read_text("utf-8")))}
    unexpected = {
        place: text
        for place, text in found.items()
        if place not in SHOWN_ON_PURPOSE and place[1] != NO_FALSE_ALARM_IN_A_SCRIPT
    }
    assert not unexpected
    assert {place for place in SHOWN_ON_PURPOSE if place[0] == name_of(page)} <= set(found)


def test_a_finding_names_its_place_the_way_there_and_the_remedy(folder: Folder) -> None:
    folder.file("bad.py", BAD)
    done = folder.everstep("lint", "bad.py")
    assert done.status == 1
    assert "bad.py:7:12: clock: The workflow body asks the machine for the time" in done.out
    assert "use everstep.now()" in done.out
    assert "by way of flow → helper" in done.out
    assert "1 found in 1 file: 1 clock" in done.out


def test_json_has_the_same_facts(folder: Folder) -> None:
    folder.file("bad.py", BAD)
    done = folder.everstep("lint", "--json", "bad.py")
    assert done.status == 1
    answer = done.json()
    assert answer["files"] == 1
    (found,) = answer["findings"]
    assert (found["file"], found["line"], found["rule"], found["via"]) == ("bad.py", 7, "clock", ["flow", "helper"])
    assert found["source"] == "return time.time()"


def test_folders_are_looked_into_and_nothing_is_imported(folder: Folder) -> None:
    (folder.path / "code" / ".hidden").mkdir(parents=True)
    folder.file("code/bad.py", BAD + "\nraise SystemExit(9)\n")
    folder.file("code/.hidden/bad.py", BAD)
    folder.file("good.py", "import everstep\n")
    done = folder.everstep("lint", "code", "good.py")
    assert done.status == 1
    assert "1 found in 2 files" in done.out


def test_a_sound_file_exits_with_0_and_a_missing_one_with_2(folder: Folder) -> None:
    folder.file("good.py", "import everstep\n")
    assert folder.everstep("lint", "good.py").status == 0
    missing = folder.everstep("lint", "nowhere.py")
    assert missing.status == 2
    assert "There is no file or folder nowhere.py" in missing.err


def test_a_named_file_that_is_no_python_is_found_and_one_without_everstep_is_said_to_be(folder: Folder) -> None:
    folder.file("broken.py", "def x(:\n")
    done = folder.everstep("lint", "broken.py")
    assert done.status == 1
    assert "broken.py:1:7: syntax: This is not Python" in done.out
    folder.file("other.py", "x = 1\n")
    done = folder.everstep("lint", "other.py")
    assert (done.status, done.out.strip()) == (0, "Nothing found in 1 file; it does not use Everstep.")


def test_a_folder_without_python_is_not_called_sound(folder: Folder) -> None:
    (folder.path / "empty").mkdir()
    done = folder.everstep("lint", "empty")
    assert done.status == 2
    assert "There is no Python file in empty" in done.err
