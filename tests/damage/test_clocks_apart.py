"""Real processes whose clocks differ, or that were suspended together: a living worker keeps its runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.stores.opening import open_store
from everstep.testing.checker import check, export_histories
from tests import forked

PROGRAM = Path(__file__).with_name("clocks_apart.py")
HOUR = 3600 * 1_000_000
DAY = 24 * HOUR
LEASE_SECONDS = 4.0
NAMES = sorted(f"{effect}-{n}" for effect in ("once", "repeat") for n in range(5))


def spawn(url: str, folder: Path, role: str, shift: int = 0, rate: float = 1.0) -> forked.Program:
    """Start a process, and wait until it is at work."""
    command = [sys.executable, str(PROGRAM), url, str(folder), role, str(shift), str(rate)]
    program = forked.Program(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert program.stdout.readline().split()[:1] == ["begun" if role == "owner" else "ready"]
    return program


def everything_happened_once(url: str, folder: Path, owner: forked.Program, workers: list[forked.Program]) -> None:
    """Each body has run once, in the owner; each run is completed, and none was held."""
    try:
        out, _ = owner.communicate(timeout=60)
        assert owner.returncode == 0, out
    finally:
        (folder / "over").touch()
        for worker in workers:
            worker.communicate(timeout=60)
    assert sorted((folder / "bodies").read_text().splitlines()) == [f"{name} owner" for name in NAMES]
    store = open_store(url)
    try:
        histories = export_histories(store)
        assert store.counts() == {"completed": len(NAMES)}
        assert store.holds(open_only=False) == []
        assert [str(violation) for violation in check(histories)] == []
    finally:
        store.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shift", [DAY, HOUR], ids=["a-day", "an-hour"])
def test_workers_whose_clocks_are_ahead_and_behind_rob_no_living_worker(url: str, tmp_path: Path, shift: int) -> None:
    owner = spawn(url, tmp_path, "owner")
    workers = [spawn(url, tmp_path, "worker", shift), spawn(url, tmp_path, "worker", -shift)]
    everything_happened_once(url, tmp_path, owner, workers)


@pytest.mark.timeout(180)
def test_workers_whose_clocks_drift_rob_no_living_worker(url: str, tmp_path: Path) -> None:
    owner = spawn(url, tmp_path, "owner", rate=0.99)
    workers = [spawn(url, tmp_path, "worker", rate=1.01)]
    everything_happened_once(url, tmp_path, owner, workers)


@pytest.mark.timeout(180)
def test_workers_that_were_suspended_together_leave_each_other_alone_when_they_wake(url: str, tmp_path: Path) -> None:
    owner = spawn(url, tmp_path, "owner")
    worker = spawn(url, tmp_path, "worker")
    for process in (owner, worker):
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5 * LEASE_SECONDS)
    os.kill(worker.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(owner.pid, signal.SIGCONT)
    everything_happened_once(url, tmp_path, owner, [worker])
