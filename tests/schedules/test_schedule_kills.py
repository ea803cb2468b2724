"""Workers are killed around a tick, in processes of their own: no tick is lost, and none is started twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from everstep.model.schedules import run_of_tick
from everstep.stores.protocol import RunFilter
from everstep.stores.sqlite import SqliteStore
from tests.crash.figures import FIGURES
from tests.forked import Program

PROGRAMS = Path(__file__).with_name("programs.py")
ROOT = Path(__file__).parents[2]
SECOND = 1_000_000
POINTS = ("schedule.due", "schedule.fired", "store.commit.before", "store.commit.written", "store.commit.after")


def begin(program: str, folder: Path, **environment: str) -> Program:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return Program(
        [sys.executable, str(PROGRAMS), program, str(folder)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(program: str, folder: Path) -> int:
    process = begin(program, folder)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    return int(out)


def judge(folder: Path, first: int, fired: int) -> None:
    """Every second from the first one on has one run, which has ended and has happened."""
    store = SqliteStore(folder / "store.db", create=False)
    try:
        rows = store.runs(RunFilter(limit=100_000))
    finally:
        store.close()
    expected = {run_of_tick("beat", first + number * SECOND) for number in range(fired)}
    assert {row.id for row in rows} == expected
    assert {row.status for row in rows} <= {"completed"}
    happened = Counter((folder / "notes.txt").read_text().splitlines())
    assert set(happened) == expected


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_is_killed_around_a_tick_leaves_it_to_the_next(tmp_path: Path, point: str) -> None:
    first = said("define", tmp_path)
    for count in (1, 2, 3):
        process = begin("work", tmp_path, EVERSTEP_CRASH_AT=f"{point}:{count}")
        out, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, out
        FIGURES.fired.add(point)
        FIGURES.trials += 1
    judge(tmp_path, first, said("finish", tmp_path))


def test_several_workers_that_are_killed_at_random_start_each_tick_once(tmp_path: Path) -> None:
    chance, first = random.Random(1), said("define", tmp_path)
    workers = [begin("work", tmp_path) for _ in range(3)]
    until = time.monotonic() + 10
    kills = 0
    while time.monotonic() < until:
        place = chance.randrange(3)
        time.sleep(chance.uniform(0.2, 0.9))
        workers[place].send_signal(signal.SIGKILL)
        workers[place].communicate(timeout=10)
        kills += 1
        count = chance.randrange(1, 3)
        point = chance.choice(POINTS[:2])
        armed = {"EVERSTEP_CRASH_AT": f"{point}:{count}"} if chance.random() < 0.5 else {}
        workers[place] = begin("work", tmp_path, **armed)
    for worker in workers:
        worker.kill()
        worker.communicate(timeout=10)
    FIGURES.trials += kills + 3
    fired = said("finish", tmp_path)
    assert fired >= 10
    judge(tmp_path, first, fired)


def test_a_worker_that_is_stopped_inside_a_tick_starts_nothing_when_it_wakes_up(tmp_path: Path) -> None:
    first = said("define", tmp_path)
    zombie = begin("work", tmp_path, EVERSTEP_CRASH_AT="schedule.due:1:stop")
    worker = begin("work", tmp_path)
    zombie.wait_until_stopped()
    time.sleep(3)  # the other one starts a few ticks meanwhile
    zombie.send_signal(signal.SIGCONT)
    time.sleep(1.5)
    for process in (zombie, worker):
        process.kill()
        process.communicate(timeout=10)
    judge(tmp_path, first, said("finish", tmp_path))
