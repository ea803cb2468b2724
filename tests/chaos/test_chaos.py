"""Workers, sessions, replies and the server itself are broken at random, all the time: every run ends all the same.

The ledger, in its own process, has each effect once. What was done is printed when a trial fails, with its seed.
"""

from pathlib import Path

import pytest

from tests.chaos.agent import Agent
from tests.chaos.cluster import ChaosServer
from tests.chaos.nursery import Nursery
from tests.chaos.trial import SLOW, Trial, result_of, undisturbed
from tests.crash.figures import FIGURES

WORKERS = 4
PUSH_SEED = 1
SOAK_SEED = 2
SAMPLE = 10
"""So many runs are made undisturbed, to see that results are what they are taken for."""


def break_everything(trial: Trial, agent: Agent, runs: int, rounds: int, kills: int) -> None:
    """Start runs, a few in each round, while the server is restarted in each, workers are killed, and so on."""
    for number in range(rounds):
        mine = range(number * runs // rounds, (number + 1) * runs // rounds)
        trial.start(mine)
        for _ in range(kills):
            agent.pause(0.4)
            agent.kill()
        agent.anything()
        agent.restart()
        trial.signal(mine)
        trial.resolve_holds()
    trial.wake_stopped(all_of_them=True)


def chaos(place: Path, server: ChaosServer, nursery: Nursery, *, runs: int, rounds: int, kills: int, seed: int) -> int:
    """Make a trial, fail if anything is lost or doubled, say what was done, and return the kills inside an effect."""
    sample = undisturbed(place / f"undisturbed-{runs}", server, nursery, SAMPLE)
    expected = {f"order-{number}": result_of(number) for number in range(runs)}
    assert sample == {run: expected[run] for run in sample}
    trial = Trial(place / f"chaos-{runs}", server, nursery)
    try:
        trial.behave(SLOW)
        for _ in range(WORKERS):
            trial.begin_worker()
        agent = Agent(trial, seed)
        break_everything(trial, agent, runs, rounds, kills)
        trial.note("the agent has gone")
        trial.wait_until_ended(2 * runs, 60 + runs / 10)
        trial.read_results(range(runs))
        verdict = trial.judge(runs, expected)
        inside = sum(kill.open_effects > 0 for kill in trial.kills)
        FIGURES.trials += len(trial.kills) + agent.done["restarts"]
        FIGURES.lost += verdict.lost
        FIGURES.doubled += verdict.doubled
        FIGURES.lines.append(
            f"runs {runs} ended {verdict.ended} · restarts {agent.done['restarts']} · kills {len(trial.kills)} "
            f"({inside} in an open effect) · ledger lost {verdict.lost} doubled {verdict.doubled}"
        )
        trial.note(f"{dict(agent.done)}, {trial.proxy.lost} replies lost, {trial.holds_resolved} holds resolved")
        assert not verdict.problems, trial.told(verdict.problems)
        assert (verdict.ended, verdict.lost, verdict.doubled) == (runs, 0, 0)
        assert agent.done["restarts"] == rounds
        assert len(trial.kills) >= rounds * kills * 3 // 4, trial.told([f"only {len(trial.kills)} kills"])
        print("\n".join(trial.log))
        return inside
    finally:
        trial.close()


def test_runs_end_as_if_undisturbed_while_the_server_is_restarted_and_workers_are_killed(
    place: Path, server: ChaosServer, nursery: Nursery
) -> None:
    assert chaos(place, server, nursery, runs=200, rounds=20, kills=3, seed=PUSH_SEED) >= 20


@pytest.mark.soak
def test_two_thousand_runs_end_as_if_undisturbed_while_workers_are_killed_inside_their_effects(
    place: Path, server: ChaosServer, nursery: Nursery
) -> None:
    assert chaos(place, server, nursery, runs=2000, rounds=100, kills=8, seed=SOAK_SEED) >= 500
