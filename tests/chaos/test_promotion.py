"""The primary dies for good and its standby is promoted: what was acknowledged is there, and work goes on by itself."""

import time
from pathlib import Path

from tests.chaos.cluster import chaos_server, synchronous_standby
from tests.chaos.nursery import Nursery
from tests.chaos.trial import SLOW, Trial, result_of
from tests.crash.figures import FIGURES

RUNS = 60
WORKERS = 3


def test_the_promotion_of_a_synchronous_standby_loses_and_doubles_nothing(tmp_path: Path, nursery: Nursery) -> None:
    with chaos_server() as primary, synchronous_standby(primary) as standby:
        trial = Trial(tmp_path / "promotion", primary, nursery)
        try:
            trial.behave(SLOW)
            for _ in range(WORKERS):
                trial.begin_worker()
            trial.start(range(RUNS // 2))
            trial.signal(range(0, RUNS // 2, 2))
            trial.wait_for(lambda: trial.statuses()["completed"] > 0)
            under_way = trial.statuses()
            trial.note(f"the primary dies: {dict(under_way)}")
            primary.stop("immediate")
            time.sleep(0.5)
            standby.promote()
            trial.server = standby
            trial.note("the standby is promoted")
            assert under_way["running"] + under_way["waiting"] > 5, trial.told([str(under_way)])
            trial.start(range(RUNS // 2, RUNS))
            trial.signal(range(RUNS))
            assert trial.wait_until_ended(2 * RUNS, 90), trial.told([str(trial.statuses())])
            trial.read_results(range(RUNS))
            verdict = trial.judge(RUNS, {f"order-{number}": result_of(number) for number in range(RUNS)})
            FIGURES.trials += 1
            FIGURES.lost += verdict.lost
            FIGURES.doubled += verdict.doubled
            assert not verdict.problems, trial.told(verdict.problems)
            assert (verdict.ended, verdict.lost, verdict.doubled) == (RUNS, 0, 0)
        finally:
            trial.close()
