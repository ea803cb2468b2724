"""Deleting old runs on PostgreSQL: whoever writes, claims or starts is not held up by it."""

import subprocess
import sys
import threading
import time
from typing import Any

import psycopg

from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import Claim, Claimed, StartRun
from tests.postgres.server import Server
from tests.stores.kit import append_to, new_run

RUNS, EVENTS = 300, 60
TABLE_LOCKS = """
    SELECT DISTINCT mode FROM pg_locks JOIN pg_class ON pg_class.oid = relation JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'relation' AND relnamespace = %s::regnamespace AND relkind = 'r'
        AND backend_type = 'client backend'
"""
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s AND wait_event_type = 'Lock'"
HARMLESS = {"AccessShareLock", "RowShareLock", "RowExclusiveLock"}


class Onlooker(threading.Thread):
    """Sees which locks there are, and whether a writer ever waits for one."""

    def __init__(self, server: Server, schema: str, writer: str) -> None:
        super().__init__(daemon=True)
        self.modes: set[str] = set()
        self.looks = 0
        self.waits = 0
        self._asked = (server.uri, schema, writer)
        self._over = threading.Event()

    def run(self) -> None:
        uri, schema, writer = self._asked
        with psycopg.connect(uri, autocommit=True) as connection:
            while not self._over.is_set():
                self.modes |= {mode for (mode,) in connection.execute(TABLE_LOCKS, (schema,))}
                ((waits,),) = connection.execute(WAITING, (f"{writer}%",)).fetchall()
                self.waits += waits
                self.looks += 1

    def end(self) -> None:
        self._over.set()
        self.join()


def test_deleting_old_runs_takes_no_lock_that_anybody_waits_for(url: str, schema: str, server: Server) -> None:
    store = PostgresStore(url)
    for number in range(RUNS):
        store.commit([StartRun(new_run(f"old-{number}", status="running", created_at=number))])
    for number in range(RUNS):
        old = store.run(f"old-{number}")
        assert old is not None
        store.commit([append_to(old, EVENTS, body=b'{"x":"' + b"y" * 400 + b'"}', status="completed")])
    store.register_worker("w", 1, "host", 10**18)
    onlooker = Onlooker(server, schema, store.name)
    onlooker.start()
    process = subprocess.Popen([sys.executable, "-m", "everstep", "gc", "--older-than", "1d", "--url", url])
    count = work_beside(store, process)
    assert process.wait(60) == 0
    onlooker.end()
    assert store.counts() == {"running": count}
    store.close()
    assert onlooker.looks > 10
    assert onlooker.modes <= HARMLESS
    assert onlooker.waits == 0


def work_beside(store: PostgresStore, process: "subprocess.Popen[bytes]") -> int:
    """Start, claim and move runs while a process is at work, and return how many."""
    count = 0
    while process.poll() is None:
        name = f"new-{count}"
        store.commit([StartRun(new_run(name, status="running"))])
        (claimed,) = store.commit([Claim(name, "w", 1, ("running",), True)])
        assert isinstance(claimed, Claimed)
        verdict: Any = store.commit([append_to(claimed.row)])
        count += 1
        assert len(verdict) == 1
        time.sleep(0.001)
    return count
