"""What a crash may cost: only the reads that were under way are made again."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from everstep.testing.checker import RunHistory
from everstep.testing.ledger import Ledger
from everstep.testing.rules_history import HistoryJudge
from tests.crash.conftest import READ_SECONDS
from tests.crash.nursery import Nursery
from tests.crash.trial import KILLED, Expected, Trial, all_of, told
from tests.crash.workload import LANES, READS

KILLS = 20
SLACK_SECONDS = 0.25
"""An outcome that arrived so long before the kill is durable, also on a busy machine."""


@pytest.fixture(scope="module")
def undisturbed_reads(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    return Expected.of(Trial.new(place, ledger, "reads", nursery=nursery))


def finished(snapshot: list[RunHistory]) -> set[str]:
    """Return the keys of the reads whose outcomes a kill has left behind."""
    calls = [call for history in snapshot for call in HistoryJudge(history).every_call]
    return {call.key for call in calls if call.outcome == "step_completed"}


def kill_after(
    place: Path, ledger: Ledger, nursery: Nursery, expected: Expected, seconds: float
) -> tuple[list[str], int]:
    """Kill the workload so long after its first request. Returns what is wrong, and how many reads were made again."""
    trial = Trial.new(place, ledger, "reads", nursery=nursery)
    process = trial.spawn()
    while not (trial.book.folder / "ledger.jsonl").exists():
        time.sleep(0.005)
    time.sleep(seconds)
    process.kill()
    assert process.wait() == KILLED, trial.output()
    killed_at = time.time() * 1e6
    trial.faults.append(f"killed {seconds:.3f} s after the first request")
    trial.take_snapshot()
    before = trial.book.entries()
    trial.run_to_the_end()
    done = finished(trial.snapshots[0])
    requests = Counter(entry["key"] for entry in trial.book.entries())
    first = {entry["key"]: entry["at"] for entry in before}
    again = {key for key, count in requests.items() if count > 1}
    trial.problems += [f"{key} was made again although its outcome was recorded" for key in again & done]
    old = killed_at - (READ_SECONDS + SLACK_SECONDS) * 1e6
    trial.problems += [f"{key} had ended before the kill and was lost" for key in again if first[key] < old]
    trial.problems += [f"{key} was made {count} times" for key, count in requests.items() if count > 2]
    if len(requests) != READS:
        trial.problems.append(f"{len(requests)} different reads were made")
    return trial.finish(expected), len(again)


def test_only_reads_that_were_under_way_are_made_again(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed_reads: Expected
) -> None:
    chance = random.Random(3)
    instants = [chance.uniform(0.0, 0.9) for _ in range(KILLS)]
    repeated: list[int] = []

    def one(seconds: float) -> list[str]:
        problems, again = kill_after(place, ledger, nursery, undisturbed_reads, seconds)
        repeated.append(again)
        return problems

    problems = all_of(one, instants, in_parallel=5)
    assert not problems, told(problems)
    assert sum(repeated) > 0, "no kill hit a read under way, so nothing was tested"


def test_a_key_never_stands_for_two_different_reads(place: Path, ledger: Ledger, nursery: Nursery) -> None:
    """A crash may lose outcomes of quick reads. Their order may then be another one, and so what follows from it."""
    expected = Expected.of(Trial.new(place, ledger, "lanes", nursery=nursery))

    def one(number: int) -> list[str]:
        trial = Trial.new(place, ledger, "lanes", nursery=nursery)
        status = trial.run(at=f"body.before:{number}")
        trial.faults.append(f"killed at body.before:{number}")
        assert status == KILLED, trial.output()
        trial.take_snapshot()
        trial.run_to_the_end()
        return trial.finish(expected)

    problems = all_of(one, [number for number in range(LANES + 1, READS) for _ in range(2)])
    assert not problems, told(problems)
