"""The command itself: help, versions, mistakes, and what is imported when."""

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from everstep.cli import group, main, running

COMMANDS = list(group.MODULES)


def invoked(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_help_shows_the_first_commands_first_and_groups_the_others() -> None:
    status, out, _ = invoked("--help")
    assert status == 0
    positions = [re.search(rf"^  {name} ", out, re.MULTILINE).start() for name in COMMANDS]  # type: ignore[union-attr]
    assert positions == sorted(positions)
    assert COMMANDS[:7] == ["demo", "run", "worker", "ls", "show", "holds", "resolve"]
    for title in ("Commands", "Looking closer", "Acting on runs", "Checking", "The store"):
        assert f"{title}:" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_and_has_json_and_a_store(name: str) -> None:
    status, out, _ = invoked(name, "--help")
    assert status == 0
    assert "--json" in out
    assert name in ("demo", "crashtest", "lint") or "--url" in out  # which have no store, or stores of their own


def test_the_version_is_printed() -> None:
    status, out, _ = invoked("--version")
    assert status == 0
    assert re.fullmatch(r"everstep \d+\.\d+\.\d+\n", out)


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    status, _, err = invoked("hisotry", "x")
    assert status == 2
    assert "Did you mean 'history'?" in err


def test_a_wrong_option_shows_the_usage() -> None:
    status, _, err = invoked("ls", "--colour")
    assert status == 2
    assert "Usage: " in err


def test_a_mistake_of_ours_is_one_message_and_a_traceback_only_for_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours \x1b[2J")

    monkeypatch.setattr(running, "load_workflow", broken)
    monkeypatch.delenv("EVERSTEP_DEBUG", raising=False)
    status, _, err = invoked("run", "app.py")
    assert status == 1
    assert "ZeroDivisionError: ours \\x1b[2J" in err
    assert "EVERSTEP_DEBUG=1" in err
    monkeypatch.setenv("EVERSTEP_DEBUG", "1")
    assert isinstance(CliRunner().invoke(main, ["run", "app.py"]).exception, ZeroDivisionError)


def test_using_the_library_does_not_import_the_command_line() -> None:
    code = "import sys, everstep; print(sorted({'click', 'rich', 'everstep.cli'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_command_is_a_command() -> None:
    context = click.Context(main)
    assert all(isinstance(main.get_command(context, name), click.Command) for name in COMMANDS)
