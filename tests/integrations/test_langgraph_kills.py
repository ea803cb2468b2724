"""An agent of LangGraph is killed at every boundary, and does its work once."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger
from tests.crash.figures import FIGURES
from tests.integrations.nursery import Nursery
from tests.waiting import open_raw

SHOP = "tests.integrations.shop"
EFFECTS = {"charge": 1, "ship": 1}
MODEL_CALLS = 3


class Life:
    """A store, its book of the ledger, and the processes that work on it."""

    def __init__(self, folder: Path, ledger: Ledger, nursery: Nursery, durability: str, url: str = "") -> None:
        folder.mkdir(parents=True)
        self.book, self.nursery = ledger.book(folder.name), nursery
        self.url = url or f"sqlite:///{folder}/everstep.db"
        self.arguments = (self.url, self.book.url, str(self.book.folder / "ledger.jsonl"), durability)

    def run(self, action: str = "run", **environment: str) -> tuple[int, str]:
        return self.nursery.run(SHOP, *self.arguments, action, **environment)

    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((one["kind"], one["effect"]) for one in self.book.entries())


def boundaries(folder: Path, ledger: Ledger, nursery: Nursery, durability: str) -> tuple[list[str], str]:
    """Return every crash point that an undisturbed run passes, by name and number, and what it printed."""
    life, count = (
        Life(folder / f"undisturbed-{durability}", ledger, nursery, durability),
        folder / f"points-{durability}",
    )
    status, said = life.run(EVERSTEP_CRASH_COUNT=str(count))
    assert status == 0, said
    assert life.counts()["request", "model"] == MODEL_CALLS
    passed: Counter[str] = Counter()
    points = []
    for name in count.read_text().split():
        passed[name] += 1
        points.append(f"{name}:{passed[name]}")
    return points, said


@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_an_agent_killed_at_any_boundary_does_each_effect_once(
    durability: str, tmp_path: Path, ledger: Ledger, nursery: Nursery
) -> None:
    kill_everywhere(durability, tmp_path, ledger, nursery, each=13)


@pytest.mark.soak
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_so_it_does_at_every_single_one(durability: str, tmp_path: Path, ledger: Ledger, nursery: Nursery) -> None:
    kill_everywhere(durability, tmp_path, ledger, nursery, each=1)


def kill_everywhere(durability: str, tmp_path: Path, ledger: Ledger, nursery: Nursery, each: int) -> None:
    points, undisturbed = boundaries(tmp_path, ledger, nursery, durability)
    wanted = [point for point in points if not point.startswith(("store.create", "store.switch", "store.migrate"))]
    chosen = wanted[::each]
    model_calls = 0
    for number, point in enumerate(chosen):
        name, _, count = point.rpartition(":")
        for earlier in range(int(count), 0, -1):  # this process may write more at once than the one that was counted
            life = Life(tmp_path / f"{durability}-{number}-{earlier}", ledger, nursery, durability)
            status, said = life.run(EVERSTEP_CRASH_AT=f"{name}:{earlier}")
            assert status in (0, -signal.SIGKILL), f"{point}: {said}"
            if status != 0:
                break
        assert status == -signal.SIGKILL, point
        for _ in range(2):
            status, said = life.run()
            assert status == 0, f"{point}: {said}"
        assert said == undisturbed, point
        counts = life.counts()
        assert {name: counts["applied", name] for name in EFFECTS} == EFFECTS, f"{point}: {counts}"
        assert MODEL_CALLS <= counts["request", "model"] <= MODEL_CALLS + 1, f"{point}: {counts}"
        model_calls += counts["request", "model"] - MODEL_CALLS
    FIGURES.trials += len(chosen)
    FIGURES.lines.append(
        f"langgraph, durability {durability}: boundaries {len(chosen)} killed {len(chosen)} · "
        f"model calls = undisturbed + {model_calls} under way · effects as contracted"
    )


def lose_checkpoints(url: str, count: int) -> None:
    """A cache has evicted the newest checkpoints of the thread."""

    connection = open_raw(url.removeprefix("sqlite:///"))
    rows = list(connection.execute("SELECT namespace, id FROM saved_states ORDER BY id DESC LIMIT ?", (count,)))
    assert len(rows) == count
    for namespace, id in rows:
        connection.execute("DELETE FROM saved_states WHERE namespace = ? AND id = ?", (namespace, id))
        connection.execute("DELETE FROM saved_writes WHERE namespace = ? AND state = ?", (namespace, id))
    connection.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_what_was_done_after_lost_checkpoints_is_not_done_again(
    count: int, tmp_path: Path, ledger: Ledger, nursery: Nursery
) -> None:
    life = Life(tmp_path / f"evicted-{count}", ledger, nursery, "sync")
    status, said = life.run()
    assert status == 0, said
    before = life.counts()
    lose_checkpoints(life.url, count)
    assert life.run() == (0, said)
    assert life.counts() == before


def test_two_processes_resume_one_interrupt_and_one_of_them_goes_on(
    url: str, tmp_path: Path, ledger: Ledger, nursery: Nursery
) -> None:
    from everstep.testing.ledger import Mode

    life = Life(tmp_path / f"raced-{url[:6]}", ledger, nursery, "sync", url)
    assert life.run("once")[0] == 0
    life.book.behave("ship", Mode(delay=0.5))
    children = [nursery.start(SHOP, *life.arguments, "run") for _ in range(2)]
    ended = sorted(nursery.wait(child) for child in children)
    assert [status for status, _ in ended] == [0, 1], ended
    assert "ThreadActive" in ended[1][1]
    assert "is being run by" in ended[1][1]
    assert life.counts()["applied", "ship"] == life.counts()["request", "ship"] == 1
    assert json.loads(ended[0][1])[3] == "True"


def test_a_process_that_was_stopped_for_longer_than_its_lease_writes_nothing_more(
    tmp_path: Path, ledger: Ledger, nursery: Nursery
) -> None:
    life = Life(tmp_path / "stopped", ledger, nursery, "sync")
    stop = {"SHOP_LEASE": "1", "EVERSTEP_CRASH_AT": "body.before:1:stop"}
    stopped = nursery.start(SHOP, *life.arguments, "run", **stop)
    until = time.monotonic() + 60
    status, said = 1, ""
    while status and time.monotonic() < until:
        status, said = life.run(SHOP_LEASE="1")
        assert status == 0 or "ThreadActive" in said, said
    assert status == 0, said
    os.kill(stopped, signal.SIGCONT)
    status, told = nursery.wait(stopped)
    assert status == 1, told
    assert life.run() == (0, said)
    assert life.counts()["applied", "charge"] == life.counts()["applied", "ship"] == 1


def test_the_thread_of_a_killed_process_is_free_at_once(
    url: str, tmp_path: Path, ledger: Ledger, nursery: Nursery
) -> None:
    life = Life(tmp_path / f"killed-{url[:6]}", ledger, nursery, "sync", url)
    status, _ = life.run(EVERSTEP_CRASH_AT="body.before:3")
    assert status == -signal.SIGKILL
    status, said = life.run()
    assert status == 0, said
    assert life.counts()["applied", "charge"] == 1
