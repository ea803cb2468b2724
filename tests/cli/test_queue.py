"""Queues under real workers: limits hold over all of them, whoever dies."""

import random
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.cli.conftest import Folder
from tests.cli.queues import start_charges

RUNS = 90


@pytest.fixture
def queued(folder: Folder) -> Folder:
    shutil.copy(Path(__file__).with_name("queued_app.py"), folder.path / "queued_app.py")
    return folder


def fill(folder: Folder, count: int, **settings: object) -> None:
    """Start runs in the queue, from a process that drives none of them."""
    code = f"""
import everstep, queued_app
with everstep.open("everstep.db", queues=["default"], durability="process") as app:
    app.queue("mail", **{settings!r})
    for number in range({count}):
        tags = {{"key": f"k{{number % 4}}"}}
        app.start(queued_app.letter, f"{{number:03}}", id=f"l-{{number:03}}", tags=tags, priority=number % 2)
"""
    forked.run([sys.executable, "-c", code], cwd=folder.path, check=True, env=folder.environment())


def overlaps(folder: Folder) -> tuple[int, int]:
    """Return how many runs were at work at once at most, and of one key. One that was cut off is, until it goes on."""
    most = most_of_key = 0
    at_work: set[str] = set()
    for line in sorted(folder.effects(), key=lambda line: int(line.split()[3])):
        sign, name, *_ = line.split()
        if sign == "+":
            at_work.add(name)
        else:
            at_work.discard(name)
        most = max(most, len(at_work))
        keys = [int(one) % 4 for one in at_work]
        most_of_key = max([most_of_key, *(keys.count(key) for key in keys)])
    return most, most_of_key


def ended(folder: Folder) -> int:
    """Return how many runs are completed, as the table has it: a command would take longer than they do."""
    return folder.count("SELECT count(*) FROM runs WHERE status = 'completed'")


def test_limits_hold_over_workers_that_are_killed_and_their_slots_come_back(queued: Folder) -> None:
    fill(queued, RUNS, concurrency=3, per_key=1)
    chance = random.Random(5)
    workers = [queued.begin("worker", "queued_app.py") for _ in range(3)]
    for kills in range(6):
        before = ended(queued)  # eight more, so that what was cut off has ended: three deaths would hold a run
        queued.wait_for(lambda before=before: ended(queued) >= before + 8)  # type: ignore[misc]
        place = chance.randrange(3)
        queued.kill(workers[place])
        assert ended(queued) < RUNS, kills
        workers[place] = queued.begin("worker", "queued_app.py")
    queued.wait_for(lambda: ended(queued) == RUNS)
    most, most_of_key = overlaps(queued)
    assert most == 3
    assert most_of_key == 1
    facts = queued.json("queue", "show", "mail")
    assert (facts["waiting"], facts["begun"]) == (0, 0)


def test_runs_begin_by_priority_and_in_order_whoever_serves_them(queued: Folder) -> None:
    fill(queued, 20, concurrency=1)
    workers = [queued.begin("worker", "queued_app.py", env={"BODY_SECONDS": "0"}) for _ in range(2)]
    queued.wait_for(lambda: ended(queued) == 20)
    for worker in workers:
        queued.kill(worker)
    begun = [line.split()[1] for line in queued.effects() if line.startswith("+")]
    assert begun == [f"{n:03}" for n in range(1, 20, 2)] + [f"{n:03}" for n in range(0, 20, 2)]


def test_a_queue_is_paused_and_changed_while_workers_run(queued: Folder) -> None:
    fill(queued, 40, concurrency=1)
    assert queued.everstep("queue", "pause", "mail").status == 0
    queued.begin("worker", "queued_app.py", env={"BODY_SECONDS": "0.02"})
    queued.wait_for(lambda: queued.json("worker", "ls"))
    assert queued.json("queue", "show", "mail")["paused"]
    assert ended(queued) == 0
    out = queued.everstep("queue", "ls").out
    assert "paused" in out
    assert "1 at once" in out
    assert queued.everstep("queue", "set", "mail", "--concurrency", "5").status == 0
    assert queued.everstep("queue", "resume", "mail").status == 0
    queued.wait_for(lambda: ended(queued) == 40)
    assert overlaps(queued)[0] == 5


def test_a_worker_serves_only_the_queues_that_it_is_given(queued: Folder) -> None:
    fill(queued, 2)
    start_charges(queued, {"c-1": 1})
    queued.begin("worker", "queued_app.py", "--queue", "money", env={"BODY_SECONDS": "0"})
    queued.wait_for(lambda: queued.run_row("c-1")[0] == "completed")
    assert queued.run_row("l-000") == ("queued", None)
    (worker,) = queued.json("worker", "ls")
    assert worker["queues"] == ["money"]
    listed = queued.everstep("ls").out
    assert "no worker serves" in listed
    (finding,) = [one for one in queued.json("doctor")["findings"] if one["name"] == "unserved"]
    assert "2 runs" in finding["text"]
    assert "letter in queue mail" in finding["text"]


def test_mistakes_about_queues_are_said(queued: Folder) -> None:
    fill(queued, 1)
    for words in (
        ("show", "none"),
        ("pause", "none"),
        ("set", "mail"),
        ("set", "mail", "--rate", "fast"),
        ("set", "mail", "--concurrency", "-1"),
        ("set", "api", "--limit", "--per-key", "1"),
        ("pause", "mail", "--concurrency", "1"),
        ("set", "default", "--concurrency", "1"),
        ("show",),
    ):
        assert queued.everstep("queue", *words).status == 2, words
    assert queued.json("queue", "set", "api", "--limit", "--rate", "10/60")["rate"] == 10
    assert queued.everstep("queue", "pause", "api").status == 2


def test_charges_survive_rolling_restarts_without_a_hold(queued: Folder) -> None:
    """Drained workers begin no new body, so that nothing is cut off that must not happen twice."""
    start_charges(queued, {f"c-{number}": 6 for number in range(4)})
    slow = {"BODY_SECONDS": "0.4"}
    worker = queued.begin("worker", "queued_app.py", "--drain", "20", env=slow)
    for _ in range(4):
        seen = len(queued.effects())
        queued.wait_for(lambda seen=seen: len(queued.effects()) >= seen + 3)  # type: ignore[misc]
        worker.send_signal(signal.SIGTERM)
        following = queued.begin("worker", "queued_app.py", "--drain", "20", env=slow)
        assert queued.finish(worker).status == 0
        worker = following
    queued.wait_for(lambda: ended(queued) == 4)
    assert queued.json("holds") == []
    begun = [line.split()[1] for line in queued.effects() if line.startswith("+")]
    assert sorted(begun) == sorted(f"c-{run}/{number}" for run in range(4) for number in range(6))


def test_a_limit_of_steps_holds_over_workers_that_are_killed_and_what_waited_has_not_happened(queued: Folder) -> None:
    code = """
import everstep, queued_app
with everstep.open("everstep.db", durability="process") as app:
    app.limit("api", concurrency=0)
    for number in range(3):
        app.start(queued_app.questions, f"q{number}", 8, id=f"q-{number}")
"""
    forked.run([sys.executable, "-c", code], cwd=queued.path, check=True, env=queued.environment())
    queued.everstep("queue", "set", "api", "--limit", "--concurrency", "2")
    slow = {"BODY_SECONDS": "0.1"}
    workers = [queued.begin("worker", "queued_app.py", env=slow) for _ in range(2)]
    queued.wait_for(lambda: len(queued.effects()) >= 6)
    shown = queued.everstep("show", "q-0").out + queued.everstep("show", "q-1").out + queued.everstep("show", "q-2").out
    assert "waits for a slot of the limit api" in shown
    assert "api" in queued.everstep("top", "--once").out
    queued.kill(workers[0])
    queued.wait_for(lambda: len(queued.effects()) >= 20)
    queued.kill(workers[1])
    held: dict[str, str] = {}

    def all_is_said() -> bool:
        """What was cut off is a person's to say; everything else has happened once."""
        for hold in queued.json("holds"):
            held[hold["run"]] = hold["step"]
            queued.everstep("resolve", hold["run"], "--hold", hold["id"], "--done", "null")
        return ended(queued) == 3

    workers = [queued.begin("worker", "queued_app.py", env=slow) for _ in range(2)]
    queued.wait_for(all_is_said)
    begun = [line.split()[1] for line in queued.effects() if line.startswith("+")]
    assert sorted(begun) == sorted(f"q{run}/{number}" for run in range(3) for number in range(8)), "each just once"
    over = {line.split()[1] for line in queued.effects() if line.startswith("-")}
    cut_off = set(begun) - over
    assert len(cut_off) <= 4, "only what had a slot was in doubt"
    at_work: set[str] = set()
    for line in sorted(queued.effects(), key=lambda line: int(line.split()[3])):
        sign, name, *_ = line.split()
        (at_work.add if sign == "+" else at_work.discard)(name)
        assert len(at_work - cut_off) <= 2
    assert queued.json("queue", "show", "api")["slots"] == []
