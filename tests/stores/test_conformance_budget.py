"""How a run's budget stands: kept in its row, and told to those who follow it."""

import msgspec
import pytest

from everstep.stores.protocol import Accepted, RestartRun, StartRun
from tests.stores.kit import Harness, append_to, new_run


def told(harness: Harness, run: str) -> list[dict[str, object]]:
    return [msgspec.json.decode(one.value) for one in harness.store.inbox(run) if one.kind == "child"]


def test_a_budget_stays_until_a_new_one_comes(harness: Harness) -> None:
    row = harness.start("a", status="running", budget=b"1")
    assert row.budget == b"1"
    harness.one(append_to(row))
    assert harness.row("a").budget == b"1"
    harness.one(append_to(harness.row("a"), budget=b"2"))
    harness.one(append_to(harness.row("a"), status="waiting", wake_at=7))
    assert harness.row("a").budget == b"2"
    harness.one(append_to(harness.row("a"), status="waiting", wake_at=7, budget=b"3"))
    assert harness.row("a").budget == b"3"


def test_an_append_that_is_refused_leaves_the_budget(harness: Harness) -> None:
    row = harness.start("a", status="running", budget=b"1")
    late = append_to(row, budget=b"2")
    harness.one(append_to(row))
    assert harness.one(late) != Accepted()
    assert harness.row("a").budget == b"1"


def test_budgets_of_many_runs_in_one_batch_reach_their_rows(harness: Harness) -> None:
    rows = [harness.start(f"r{n}", status="running") for n in range(12)]
    harness.do(*[append_to(row, budget=str(n).encode() if n % 3 else None) for n, row in enumerate(rows)])
    assert [harness.row(f"r{n}").budget for n in range(12)] == [str(n).encode() if n % 3 else None for n in range(12)]


@pytest.mark.parametrize("together", [True, False])
def test_followers_are_told_what_an_end_says_about_the_budget(harness: Harness, together: bool) -> None:
    parent = harness.start("p", status="running")
    names = ["c1", "c2"]
    children = [new_run(name, follower="p", follower_call=n, status="running") for n, name in enumerate(names)]
    harness.one(append_to(parent, starts=children))
    ends = [append_to(harness.row(name), status="completed", outcome=b"1", budget=b'{"used":9}') for name in names]
    for batch in [ends] if together else [[end] for end in ends]:
        assert harness.do(*batch) == [Accepted()] * len(batch)
    assert told(harness, "p") == [{"status": "completed", "outcome": 1, "budget": {"used": 9}}] * 2


def test_who_follows_an_ended_run_is_told_its_budget(harness: Harness) -> None:
    harness.start("c", arguments="x", status="running")
    harness.end("c", budget=b'{"used":4}')
    parent = harness.start("p", status="running")
    harness.one(append_to(parent, starts=[new_run("c", arguments="x", follower="p", follower_call=1)]))
    assert told(harness, "p") == [{"status": "completed", "outcome": None, "budget": {"used": 4}}]


def test_a_new_generation_has_a_budget_of_its_own(harness: Harness) -> None:
    harness.one(StartRun(new_run("a", status="running", budget=b"1")))
    harness.end("a", budget=b"2")
    row = harness.row("a")
    assert harness.one(RestartRun(row.epoch, new_run("a", generation=2, budget=b"3"))) == Accepted()
    assert harness.row("a").budget == b"3"
