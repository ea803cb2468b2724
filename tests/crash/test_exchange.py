"""A run that is asked and that writes a stream is killed at every point, with whoever asks and reads."""

import json
from collections import Counter
from pathlib import Path

import pytest

from everstep.model.crash_points import POINTS
from everstep.testing.ledger import Ledger
from tests.crash.exchange import TOKENS
from tests.crash.figures import FIGURES
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at
from tests.crash.trial import Expected, Trial, all_of, told


def answered_twice(trial: Trial) -> list[str]:
    """Return what is wrong with the answers of all lives: whoever asked was given one answer, again and again."""
    given: dict[str, set[str]] = {}
    for line in trial.journal():
        if line["verb"] == "ask" and line["state"] == "acknowledged":
            given.setdefault(line["id"], set()).add(line["value"])
    return [f"{trial.faults}: {id} was answered {values}" for id, values in given.items() if len(values) > 1]


def attempts_read(trial: Trial) -> int:
    lines = (trial.folder / "read.jsonl").read_text().splitlines()
    return max(attempt for _, _, step, attempt, _ in map(json.loads, lines) if step)


def test_an_undisturbed_exchange_is_as_it_should_be(exchanged: Expected) -> None:
    (((answers, names, kept), _),) = exchanged.results.values()
    assert [*answers[:1], answers[2]] == names
    assert answers[1] == "refused: a name is not empty"
    assert kept[""] == ["begin", "end"]
    assert kept["speak"] == [f"a{number}" for number in range(TOKENS)]
    assert kept["shout"] == ["b0", "b1", "b2"]
    assert {"request.posted", "request.answered", "stream.gathered"} <= set(exchanged.points)
    assert exchanged.applied == Counter(rename=2)


def kill_everywhere(place: Path, ledger: Ledger, nursery: Nursery, exchanged: Expected, most: int) -> int:
    """Kill at each point and return in how many trials a step was begun again that had written to the stream."""
    again: list[int] = []

    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "exchange", nursery=nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.run_to_the_end()
        again.append(attempts_read(trial) > 1)
        return [*answered_twice(trial), *trial.finish(exchanged)]

    FIGURES.points = set(POINTS)
    problems = all_of(one, cases(exchanged.points, most))
    assert not problems, told(problems)
    return sum(again)


def test_requests_and_streams_survive_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, exchanged: Expected
) -> None:
    assert kill_everywhere(place, ledger, nursery, exchanged, most=PASSES) > 3


@pytest.mark.soak
def test_requests_and_streams_survive_a_kill_at_every_pass_of_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, exchanged: Expected
) -> None:
    kill_everywhere(place, ledger, nursery, exchanged, most=1000)
