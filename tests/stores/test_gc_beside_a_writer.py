"""Whoever writes goes on while another process deletes old runs: a deletion is many short transactions."""

import subprocess
import sys
import time
from pathlib import Path

from everstep.stores.protocol import StartRun
from everstep.stores.sqlite import SqliteStore
from tests.stores.kit import append_to, new_run

RUNS, EVENTS = 300, 60


def test_a_writer_comes_in_between_the_parts_of_a_deletion(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SqliteStore(path, durability="process")
    for number in range(RUNS):
        store.commit([StartRun(new_run(f"old-{number}", status="running", created_at=number))])
        row = store.run(f"old-{number}")
        assert row is not None
        store.commit([append_to(row, EVENTS, body=b'{"x":"' + b"y" * 400 + b'"}', status="completed")])
    store.commit([StartRun(new_run("beside", status="running"))])
    process = subprocess.Popen([sys.executable, "-m", "everstep", "gc", "--older-than", "1d", "--url", str(path)])
    left_at_commits = set()
    while process.poll() is None:
        row = store.run("beside")
        assert row is not None
        store.commit([append_to(row)])
        left_at_commits.add(store.counts().get("completed", 0))
        time.sleep(0.001)
    assert process.wait() == 0
    assert store.counts() == {"running": 1}
    store.close()
    assert any(0 < left < RUNS for left in left_at_commits), "all was deleted in one go"
