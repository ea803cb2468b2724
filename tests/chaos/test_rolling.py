"""Workers are replaced one after the other under load: nothing is in doubt, nothing is held, nothing is done twice."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.testing.ledger import Mode
from tests.chaos.nursery import WorkerProcess
from tests.chaos.trial import SLOW, Trial
from tests.crash.figures import FIGURES
from tests.waiting import DEADLINE_SECONDS

RELEASE = """
import asyncio
import everstep
from tests.chaos.program import remit, stamp

@everstep.workflow(version="{version}")
async def released(number: int) -> str:
    {before}
    word = await everstep.receive("word", str)
    {after}
    return "{version}"
"""
REMIT = "await asyncio.to_thread(remit, number)"
STAMP = "await asyncio.to_thread(stamp, str(number))"


def replaced(trial: Trial, old: WorkerProcess, gate: str = "", **how: str) -> WorkerProcess:
    """Start the next worker, and when it is at work tell the old one to end, which it has to do in good order.

    Its effects that wait at a gate are open until then, however long the next worker takes to begin.
    """
    new = trial.begin_worker(**how)
    trial.wait_until_at_work(new)
    open_effects = trial.open_effects(old)
    old.send(signal.SIGTERM)
    if gate:
        (trial.folder / gate).touch()
    status = old.status(trial.drain + DEADLINE_SECONDS)
    trial.note(f"{old.pid}, with {open_effects} effects open, was told to end, and ended with {status}")
    assert status == 0, trial.told([old.output.read_text()[-2000:]])
    trial.workers.remove(old)
    old.end()
    FIGURES.trials += open_effects > 0
    return new


def judge(trial: Trial, runs: int, effects: tuple[str, ...]) -> None:
    """Every run has ended, every effect was applied once, and nothing ever was in doubt or held."""
    verdict = trial.judge(runs, {}, effects)
    doubted = [
        f"{history.row.id}: {event.kind}"
        for history in verdict.histories
        for event in history.events
        if event.kind in ("step_doubted", "run_held", "probe_answered")
    ]
    FIGURES.lost += verdict.lost
    FIGURES.doubled += verdict.doubled
    problems = verdict.problems + doubted
    assert not problems, trial.told(problems)
    assert (verdict.ended, verdict.lost, verdict.doubled) == (runs, 0, 0)
    assert trial.server.ask(f'SELECT count(*) FROM "{trial.schema}".holds') == [(0,)]


def roll(trial: Trial, *, restarts: int, seconds: float, runs_each: int) -> None:
    """Replace the only worker so often, each time in the middle of `once` bodies that take some seconds."""
    trial.drain = seconds * 2 + 10
    trial.workflow = "chaos_slow"
    trial.ledger.behave("remit_slowly", Mode(honours_keys=False))
    worker = trial.begin_worker()
    for number in range(restarts):
        gate = f"gate-{number}"
        for run in range(number * runs_each, (number + 1) * runs_each):
            trial.client.start("chaos_slow", run, seconds, gate, id=f"order-{run}")
        trial.wait_for(lambda worker=worker: trial.open_effects(worker) > 0)
        before = FIGURES.trials
        worker = replaced(trial, worker, gate)
        assert FIGURES.trials == before + 1, trial.told(["no effect was open"])
    runs = restarts * runs_each
    assert trial.wait_until_ended(runs, 60 + seconds), trial.told([str(trial.statuses())])
    judge(trial, runs, ("remit_slowly",))


def test_rolling_restarts_in_the_middle_of_once_bodies_leave_nothing_in_doubt(new_trial: Callable[..., Trial]) -> None:
    roll(new_trial(lease=30.0), restarts=4, seconds=1.0, runs_each=6)


@pytest.mark.soak
def test_ten_rolling_restarts_in_the_middle_of_long_once_bodies_leave_nothing_in_doubt(
    new_trial: Callable[..., Trial],
) -> None:
    roll(new_trial(lease=30.0), restarts=10, seconds=5.0, runs_each=10)


def test_two_releases_side_by_side_are_replaced_and_nothing_is_held_that_one_can_continue(
    new_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    programs = {}
    for version, before, after in (("old", REMIT, STAMP), ("new", STAMP, REMIT)):
        path = tmp_path / version / "released.py"
        path.parent.mkdir()
        path.write_text(RELEASE.format(version=version, before=before, after=after))
        programs[version] = str(path)
    trial = new_trial(lease=30.0)
    trial.behave(SLOW)
    trial.workflow = "released"
    workers = {"old": trial.begin_worker(programs["old"])}
    trial.start(range(8))
    trial.wait_for(lambda: trial.statuses()["waiting"] == 8)
    workers["new"] = trial.begin_worker(programs["new"])
    trial.wait_until_at_work(workers["new"])
    workers["old"].send(signal.SIGSTOP)  # one worker may claim all at once, and each release should have some
    trial.start(range(8, 16))
    trial.wait_for(lambda: trial.statuses()["waiting"] == 16)
    workers["old"].send(signal.SIGCONT)
    trial.start(range(16, 24))
    trial.wait_for(lambda: trial.statuses()["waiting"] == 24)
    trial.signal(range(0, 24, 3))
    for version in ("old", "new"):
        workers[version] = replaced(trial, workers[version], program=programs[version])
    trial.signal(range(24))
    assert trial.wait_until_ended(24, 60), trial.told([str(trial.statuses())])
    trial.read_results(range(24))
    assert [trial.results[f"order-{number}"] for number in range(8)] == ["old"] * 8
    assert set(trial.results.values()) == {"old", "new"}
    judge(trial, 24, ("remit", "stamp"))
