"""What a user gets wrong is answered with what is wrong and what to do, and leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.cli.arguments import decoded_json
from everstep.errors import Misuse
from tests.cli.conftest import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_importing_what_is_no_export_names_the_file_and_makes_no_store(folder: Folder) -> None:
    folder.file("notes.txt", "hello\n")
    done = folder.everstep("import", "notes.txt")
    assert done.status != 0
    assert "notes.txt is not a file of exported runs" in done.err
    assert not (folder.path / "everstep.db").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://host/db", "postgresql://host/database"),
        ("sqlite:", "needs the path of a file"),
        ("nowhere.db", "The first run makes one; --url or EVERSTEP_URL name another place"),
    ],
)
def test_a_url_that_names_no_store_is_answered_with_what_would(folder: Folder, url: str, said: str) -> None:
    done = folder.everstep("ls", "--url", url)
    assert done.status == 2
    assert said in done.err


WRONG_UNDOING = """\
from everstep import step

@step
def release(item: str) -> None: ...

@step(compensate=release)
def reserve(item: str) -> str:
    return item
"""


def test_a_declaration_that_is_refused_is_named_with_its_line_and_what_it_should_be(folder: Folder) -> None:
    folder.file("shop.py", WRONG_UNDOING)
    done = folder.everstep("run", "shop.py")
    assert done.status == 2
    assert "it would be called as release(outcome, item)" in done.err
    assert "it takes (item)" in done.err
    assert "shop.py:6: @step(compensate=release)" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", """write it as '"hello"'"""),
        ('"hello', "Is a quote, comma or bracket missing?"),
        ('{"a" 1}', "Is a quote, comma or bracket missing?"),
    ],
)
def test_what_is_no_json_is_answered_by_what_was_meant(text: str, said: str) -> None:
    with pytest.raises(Misuse, match="is not JSON") as error:
        decoded_json(text, "argument 1")
    assert said in str(error.value)


@pytest.mark.parametrize("words", [["doctor"], ["--help"], ["doctor", "--json"]])
def test_a_reader_that_has_gone_is_no_failure_of_a_run(folder: Folder, words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "everstep", *words],
        cwd=folder.path,
        env=folder.environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
