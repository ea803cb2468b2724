"""What the page about `once` says to do at 3 a.m.: its commands are those that the hold offers, and they work."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import everstep
from everstep.cli import main
from tests.docs.pages import ROOT
from tests.examples.kit import environment

PAGE = (ROOT / "docs" / "howto" / "once.md").read_text("utf-8")
NIGHT = PAGE.partition("## What to do at 3 a.m.")[2].partition("\n## ")[0]
TABLE = re.findall(r"^\| .* \|$", NIGHT, flags=re.MULTILINE)
COMMANDS = [command for row in TABLE for command in re.findall(r"`(everstep [^`]+ [^`]+)`", row)]
PROGRAM = """
import everstep
from everstep import Done, NotDone, Unknown, step, workflow
from pathlib import Path

def find_charge(key: str, customer: str, cents: int) -> Done | Unknown:
    return Done("found") if Path("bank-works").exists() else Unknown("the bank is down")

@step(compensate=lambda parcel: None)
def pack() -> str:
    return "a parcel"

@step(effect="once", probe=find_charge, probe_for=0)
def charge(customer: str, cents: int) -> str:
    return "charged"

@workflow
def sell(customer: str, cents: int) -> str:
    pack()
    return charge(customer, cents)

if __name__ == "__main__":
    print(everstep.run(sell, "ann", 500, id="order-7"))
"""

Night = Callable[[], subprocess.CompletedProcess[str]]


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """Hold order-7: its process was killed behind the charge, and the bank is down."""
    (tmp_path / "app.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVERSTEP_URL", raising=False)

    def start(**settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "app.py"]
        return subprocess.run(command, env=environment(**settings), capture_output=True, text=True, timeout=60)

    assert start(EVERSTEP_CRASH_AT="body.after:2").returncode == -signal.SIGKILL
    assert "RunHeld" in start().stderr
    return start


def everstep_command(command: str) -> int:
    """Run a command as the page has it."""
    _, *arguments = shlex.split(command)
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert isinstance(exited.value.code, int)
    return exited.value.code


def the_command_with(option: str) -> str:
    return next(command for command in COMMANDS if option in command)


def test_the_page_has_a_command_for_each_case() -> None:
    options = ["--done", "--not-done", "--probe", "--cancel", "worker gone", "--reason"]
    assert [option for option in options if not any(option in command for command in COMMANDS)] == []


@pytest.mark.parametrize(
    ("option", "prints"),
    [("--done", "ch_81\n"), ("--not-done", "charged\n"), ("--probe", "found\n"), ("--reason", "found\n")],
)
def test_a_decision_of_the_page_lets_the_run_complete(night: Night, option: str, prints: str) -> None:
    command = the_command_with(option)
    if "--probe" in command:
        Path("bank-works").touch()
    assert everstep_command(command) == 0
    if option == "--reason":  # first it is only listed
        assert "RunHeld" in night().stderr
        assert everstep_command(f"{command} --yes") == 0
    assert night().stdout == prints


def test_a_withdrawn_order_is_cancelled(night: Night) -> None:
    assert everstep_command(the_command_with("--cancel")) == 0
    with everstep.open() as app:
        assert app.get("order-7").status() == "cancelled"


def test_the_command_about_a_lost_machine_is_accepted(night: Night) -> None:
    assert everstep_command(f"{the_command_with('worker gone')} --never-seen") == 0  # this machine is not lost


def test_the_hold_of_the_page_has_the_lines_of_a_real_one(night: Night, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert everstep_command("everstep holds") == 0
    real = capsys.readouterr().out
    shown = NIGHT.partition("◼")[2].partition("```")[0]
    for label in ("begun:", "died:", "key:", "arguments:", "source:", "--done", "--not-done", "--cancel"):
        assert label in shown
        assert label in real
