"""Whoever writes hardly notices that somebody else deletes old runs meanwhile."""

import subprocess
import sys
import time
from pathlib import Path

from everstep.stores.protocol import StartRun
from everstep.stores.sqlite import SqliteStore
from tests.stores.kit import append_to, new_run

RUNS, EVENTS = 300, 60


def latencies(store: SqliteStore, name: str, seconds: float, process: "subprocess.Popen[bytes] | None") -> list[float]:
    """Commit an event again and again, and return how long each took."""
    store.commit([StartRun(new_run(name, status="running"))])
    taken: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and (process is None or process.poll() is None):
        row = store.run(name)
        assert row is not None
        begun = time.perf_counter()
        store.commit([append_to(row)])
        taken.append(time.perf_counter() - begun)
        time.sleep(0.001)
    return sorted(taken)


def percentile(taken: list[float], part: float) -> float:
    return taken[min(len(taken) - 1, int(len(taken) * part))]


def test_a_writer_is_not_delayed_by_a_deletion(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    for number in range(RUNS):
        store.commit([StartRun(new_run(f"old-{number}", status="running", created_at=number))])
        row = store.run(f"old-{number}")
        assert row is not None
        store.commit([append_to(row, EVENTS, body=b'{"x":"' + b"y" * 400 + b'"}', status="completed")])
    alone = latencies(store, "alone", 1.5, None)
    command = [sys.executable, "-m", "everstep", "gc", "--older-than", "1d", "--url", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    beside = latencies(store, "beside", 60.0, process)
    assert process.wait(60) == 0
    assert store.counts() == {"running": 2}
    store.close()
    told = {part: (percentile(alone, part) * 1e3, percentile(beside, part) * 1e3) for part in (0.5, 0.99, 1.0)}
    print({f"p{int(part * 100)}": f"{a:.1f} ms alone, {b:.1f} ms beside gc" for part, (a, b) in told.items()})
    # Far above what is measured on a quiet machine, and far below what one transaction for all would take.
    assert told[0.99][1] < max(60.0, told[0.99][0] * 10), told
