"""Many runs that share their commits: killed in the middle of that."""

import random
import signal
import sys
import time
from pathlib import Path

import pytest

from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from everstep.testing.histories import RunHistory
from tests.crash.figures import FIGURES
from tests.crash.many import RUNS, STEPS
from tests.forked import Program

KILLS = 2
TRIALS = 10

Act = tuple[str, int]


def lines(file: Path) -> list[str]:
    """Return the whole lines of a file: those that a kill did not cut off."""
    found = file.read_text().split("\n") if file.exists() else []
    return [line.removesuffix(" .") for line in found if line.endswith(" .")]


class Trial:
    """A folder with a store, and with what the processes noted of what they did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.completed: set[Act] = set()
        """What was durable when the last process ended."""

    def acts(self) -> list[Act]:
        """Return the steps whose bodies have run, in their order."""
        return [(run, int(number)) for _, run, number, _ in map(str.split, lines(self.folder / "acts"))]

    def go_on(self, kill_after: int | None = None) -> None:
        """Let a process go on, kill it when so many bodies have run, and judge by what is durable then."""
        before = len(self.acts())
        process = Program([sys.executable, "-m", "tests.crash.many", str(self.folder)])
        if kill_after is None:
            assert process.wait(60) == 0
        else:
            self._kill(process, before + kill_after)
        histories = self._histories()
        assert check(histories) == []
        done = self.acts()[before:]
        assert not self.completed & set(done), "a step that had finished was done again"
        assert set(done) <= acts_in(histories, "step_started"), "a body ran whose intent is not durable"
        self.completed = acts_in(histories, "step_completed")

    def _kill(self, process: Program, count: int) -> None:
        until = time.monotonic() + 60
        while len(self.acts()) < count and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        process.kill()
        assert process.wait(30) in (0, -signal.SIGKILL)
        FIGURES.trials += 1

    def _histories(self) -> list[RunHistory]:
        store = SqliteStore(self.folder / "everstep.db")
        try:
            return export_histories(store)
        finally:
            store.close()


def acts_in(histories: list[RunHistory], kind: str) -> set[Act]:
    """Return the steps of which histories have an event of a kind: each run does one after the other."""
    return {
        (history.row.id, number)
        for history in histories
        for number in range(sum(event.kind == kind for event in history.events))
    }


@pytest.mark.parametrize("number", range(TRIALS))
def test_what_many_runs_did_is_neither_lost_nor_done_again(number: int, tmp_path: Path) -> None:
    chance, trial = random.Random(number), Trial(tmp_path)
    for _ in range(KILLS):
        trial.go_on(kill_after=chance.randrange(1, RUNS * STEPS // KILLS))
    trial.go_on()
    assert len(trial.completed) == RUNS * STEPS
    keys = {tuple(line.split()[1:]) for line in lines(tmp_path / "acts")}
    assert len(keys) == RUNS * STEPS, "another attempt had another key"
    assert len(lines(tmp_path / "shared")) > KILLS, "commits were shared"
