"""Who is alive: a worker whose process is gone is found at once; one that lives is not buried, whatever happens."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everstep.errors import Misuse, StoreError
from everstep.stores.postgres import PostgresStore
from everstep.stores.postgres.connections import Outage
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.postgres.watching import Watcher
from everstep.stores.protocol import Post, StartRun
from everstep.stores.ticks import ticks
from tests.postgres.server import Server
from tests.stores.kit import PostgresHarness, append_to, begin_python, new_run
from tests.waiting import wait_until

WORKER = """
import os, sys, time
from everstep.stores.postgres import PostgresStore
from everstep.stores.ticks import ticks
from everstep.stores.postgres.transaction import PostgresStatements
store = PostgresStore(sys.argv[1])
store.register_worker("w", os.getpid(), "host", store.now() + 3_000_000_000)
if len(sys.argv) > 2:
    if os.fork() == 0:
        time.sleep(60)
print("entered", flush=True)
time.sleep(60)
"""


@pytest.fixture
def watching(postgres: PostgresHarness) -> Iterator[PostgresStore]:
    """A store object as the engine opens it, which gives everybody their time."""
    made = PostgresStore(postgres.server.url(postgres.schema))
    yield made
    made.close()


@pytest.fixture
def worker(postgres: PostgresHarness) -> Iterator["subprocess.Popen[str]"]:
    yield from _worker(postgres)


def _worker(postgres: PostgresHarness, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with begin_python(WORKER, postgres.server.url(postgres.schema), *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        yield process
        process.kill()


def until(condition: Callable[[], bool]) -> float:
    """Wait for a condition, and return how long it took."""
    began = time.monotonic()
    wait_until(condition)
    return time.monotonic() - began


def stays(condition: Callable[[], bool], seconds: float) -> None:
    """Assert that a condition holds for so long."""
    end = time.monotonic() + seconds
    while True:
        holds = condition()
        if time.monotonic() >= end:
            return  # what was found out too late, on a busy machine, says nothing
        assert holds
        time.sleep(0.02)


def test_a_worker_that_was_killed_is_buried_in_about_a_second(
    watching: PostgresStore, worker: "subprocess.Popen[str]"
) -> None:
    stays(lambda: watching.bury_dead(0) == [], 1.5)
    worker.kill()
    until(lambda: watching.bury_dead(0) == ["w"])
    assert watching.workers() == []


def test_whoever_begins_on_the_machine_of_a_killed_worker_buries_it_at_once(
    postgres: PostgresHarness, worker: "subprocess.Popen[str]", server: Server
) -> None:
    worker.kill()
    worker.wait()
    server.wait_for_sessions_to_end(f"everstep {worker.pid} ")
    beginning = PostgresStore(postgres.server.url(postgres.schema))
    assert beginning.bury_dead(0) == ["w"]
    beginning.close()


def test_of_another_machine_nobody_knows_at_once_that_a_process_is_gone(
    postgres: PostgresHarness, worker: "subprocess.Popen[str]", server: Server
) -> None:
    server.ask(f"UPDATE {postgres.schema}.workers SET machine = 'another'")
    worker.kill()
    worker.wait()
    server.wait_for_sessions_to_end(f"everstep {worker.pid} ")
    beginning = PostgresStore(postgres.server.url(postgres.schema))
    stays(lambda: beginning.bury_dead(0) == [], 0.9)
    until(lambda: beginning.bury_dead(0) == ["w"])
    beginning.close()


def test_a_worker_that_only_lost_its_session_is_not_gone_for_whoever_begins(
    postgres: PostgresHarness, worker: "subprocess.Popen[str]", server: Server
) -> None:
    worker.send_signal(signal.SIGSTOP)
    server.terminate(f"everstep {worker.pid} %")
    server.wait_for_sessions_to_end(f"everstep {worker.pid} ")
    beginning = PostgresStore(postgres.server.url(postgres.schema))
    stays(lambda: beginning.bury_dead(0) == [], 0.8)
    worker.send_signal(signal.SIGCONT)
    stays(lambda: beginning.bury_dead(0) == [], 1.5)
    beginning.close()


def test_of_many_workers_each_looks_after_a_few_and_yet_all_that_are_dead_are_found(
    postgres: PostgresHarness, watching: PostgresStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    ask = PostgresStatements.all
    monkeypatch.setattr(
        PostgresStatements, "all", lambda one, name, *values: asked.append((name, values)) or ask(one, name, *values)
    )
    columns = "(id, place, pid, host, started_at, lease_until)"
    numbers = "generate_series(%s::int, %s::int) AS number"
    dead = f"SELECT 'dead ' || number, number, 1, 'elsewhere', 0, 9000000000000000 FROM {numbers}"
    server.ask(f"INSERT INTO {postgres.schema}.workers {columns} {dead}", 1, 25)
    watching.register_worker("me", os.getpid(), "host", watching.now() + 10**9)
    assert watching.bury_dead(0) == []
    server.ask(f"INSERT INTO {postgres.schema}.workers {columns} {dead}", 27, 51)
    found: list[str] = []
    until(lambda: found.extend(watching.bury_dead(0)) or len(found) >= 50)
    assert sorted(found) == sorted(f"dead {number}" for number in range(1, 52) if number != 26)
    counts = [values[2] for name, values in asked if name == "silent_workers"]
    assert counts[0] is None
    assert set(counts[1:]) == {16}
    assert [row.id for row in watching.workers()] == ["me"]


def test_a_stopped_worker_is_not_buried(watching: PostgresStore, worker: "subprocess.Popen[str]") -> None:
    worker.send_signal(signal.SIGSTOP)
    stays(lambda: watching.bury_dead(0) == [], 2.0)
    assert watching.is_in_use()
    worker.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_a_restart_of_the_server_is_not_taken_for_the_death_of_its_workers(
    watching: PostgresStore, worker: "subprocess.Popen[str]", server: Server, mode: str
) -> None:
    watching.bury_dead(0)
    server.restart(mode)
    stays(lambda: watching.bury_dead(0) == [], 3.0)
    assert [row.id for row in watching.workers()] == ["w"]
    worker.kill()
    until(lambda: watching.bury_dead(0) == ["w"])


def test_after_a_restart_of_the_server_a_slow_worker_has_a_second_to_take_its_lock_again(
    watching: PostgresStore, worker: "subprocess.Popen[str]", server: Server
) -> None:
    stays(lambda: watching.bury_dead(0) == [], 1.2)
    worker.send_signal(signal.SIGSTOP)
    server.restart()
    stays(lambda: watching.bury_dead(0) == [], 0.7)
    worker.send_signal(signal.SIGCONT)
    stays(lambda: watching.bury_dead(0) == [], 2.0)


def test_a_worker_whose_session_was_ended_takes_its_lock_again(
    watching: PostgresStore, worker: "subprocess.Popen[str]", server: Server
) -> None:
    watching.bury_dead(0)
    for _ in range(5):
        server.terminate(f"everstep {worker.pid} %")
        stays(lambda: watching.bury_dead(0) == [], 0.5)
    assert watching.is_in_use()


class HalfOpen:
    """A session whose client's end was cut, as by a proxy or a lost route: of that the server knows nothing yet."""

    def __init__(self, store: PostgresStore) -> None:
        self.connection = store._watcher._connection
        assert self.connection is not None
        self.pid = self.connection.info.backend_pid
        self._server_s = os.dup(self.connection.fileno())
        ours, other = socket.socketpair()
        os.dup2(ours.fileno(), self.connection.fileno())
        ours.close()
        other.close()
        store._watcher._wake()  # it waits for the other end of what it had

    def notice(self) -> None:
        """Let the server find out."""
        os.close(self._server_s)


@pytest.mark.parametrize("may_end", [True, False])
def test_a_worker_keeps_its_lock_although_the_server_ends_its_lost_session_late(
    postgres: PostgresHarness, watching: PostgresStore, server: Server, monkeypatch: pytest.MonkeyPatch, may_end: bool
) -> None:
    if not may_end:
        monkeypatch.setattr(Watcher, "_end_last_session", lambda self, place: None)
    living = PostgresStore(postgres.server.url(postgres.schema))
    living.register_worker("living", os.getpid(), "host", living.now() + 10**9)
    server.ask(f"UPDATE {postgres.schema}.workers SET machine = 'another'")
    stays(lambda: watching.bury_dead(0) == [], 1.2)
    lost = HalfOpen(living)
    stays(lambda: watching.bury_dead(0) == [], 1.5)
    lost.notice()
    wait_until(lambda: not server.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", lost.pid))
    stays(lambda: watching.bury_dead(0) == [], 2.0)
    assert living.renew("living", living.now() + 10**9)
    assert [row.id for row in watching.workers()] == ["living"]
    assert watching.is_alive(watching.workers()[0])
    living.close()
    until(lambda: watching.bury_dead(0) == ["living"])


def test_a_lost_session_that_has_the_lock_is_ended_by_its_worker(postgres: PostgresHarness, server: Server) -> None:
    living = PostgresStore(postgres.server.url(postgres.schema))
    living.register_worker("living", os.getpid(), "host", living.now() + 10**9)
    lost = HalfOpen(living)
    wait_until(lambda: not server.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", lost.pid))
    wait_until(lambda: not living._watcher._untaken and living.is_in_use())
    lost.notice()
    living.close()


@pytest.mark.parametrize("machine", ["this", "another"])
def test_a_worker_that_cannot_listen_is_not_buried_while_it_writes(
    postgres: PostgresHarness, watching: PostgresStore, server: Server, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """Its session with the lock is lost, and no other can be had: the server has no place for more, say."""
    living = PostgresStore(postgres.server.url(postgres.schema))
    living.register_worker("living", os.getpid(), "host", living.now() + 10**9)
    if machine == "another":
        server.ask(f"UPDATE {postgres.schema}.workers SET machine = 'another'")
    stays(lambda: watching.bury_dead(0) == [], 1.2)

    def refuse() -> None:
        raise Outage("too many connections")

    monkeypatch.setattr(living._watcher, "_open", refuse)
    server.terminate(f"{living.name} l")
    server.wait_for_sessions_to_end(f"{living.name} l")
    stays(lambda: watching.bury_dead(0) == [], 2.0)
    assert not watching.is_in_use(), "it has no lock"
    server.terminate(f"{living.name} w%")
    server.wait_for_sessions_to_end(f"{living.name} w")
    assert living.renew("living", living.now() + 10**9), "its next session is named after it as well"
    stays(lambda: watching.bury_dead(0) == [], 1.5)
    until_us = living.now() - 1
    assert living.renew("living", until_us)
    assert watching.lapse("living", until_us), "its lease counts"
    until(lambda: watching.bury_dead(0) == ["living"])
    living.close()


def test_a_worker_that_left_is_not_taken_for_the_next_one_at_its_place(
    postgres: PostgresHarness, watching: PostgresStore, worker: "subprocess.Popen[str]", server: Server
) -> None:
    """A store object that goes on without its worker is not called after the place any more."""
    left = PostgresStore(postgres.server.url(postgres.schema))
    assert left.register_worker("left", os.getpid(), "host", left.now() + 10**9).place == 2
    left.leave("left")
    columns = "(id, place, pid, host, started_at, lease_until)"
    server.ask(
        f"INSERT INTO {postgres.schema}.workers {columns} VALUES ('dead', 2, 1, 'elsewhere', 0, 9000000000000000)"
    )
    until(lambda: watching.bury_dead(0) == ["dead"])
    left.close()


def _is_registered(store: PostgresStore, worker: str) -> bool:
    """Register a worker; False while the session that watches is made again."""
    try:
        store.register_worker(worker, os.getpid(), "host", store.now() + 10**9)
    except StoreError:
        return False
    return True


def test_a_worker_whose_row_is_gone_wants_its_lock_no_more(postgres: PostgresHarness, server: Server) -> None:
    living = PostgresStore(postgres.server.url(postgres.schema))
    living.register_worker("living", os.getpid(), "host", living.now() + 10**9)
    server.ask(f"DELETE FROM {postgres.schema}.workers")
    assert not living.renew("living", living.now() + 10**9)
    assert not living.is_in_use()
    server.terminate(f"{living.name} l")
    server.wait_for_sessions_to_end(f"{living.name} l")
    until(lambda: _is_registered(living, "again"))
    assert [row.place for row in living.workers()] == [1]
    living.close()


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(
    watching: PostgresStore, postgres: PostgresHarness
) -> None:
    for worker in _worker(postgres, "fork"):
        watching.bury_dead(0)
        worker.kill()
        until(lambda: watching.bury_dead(0) == ["w"])


def test_a_second_worker_of_the_same_name_is_refused_while_the_first_lives(
    watching: PostgresStore, worker: "subprocess.Popen[str]", server: Server
) -> None:
    with pytest.raises(Misuse, match="live worker w"):
        watching.register_worker("w", 1, "host", 1)
    worker.kill()
    server.wait_for_sessions_to_end(f"everstep {worker.pid} ")
    assert watching.register_worker("w", 1, "host", 1).place == 1


def test_behind_a_pooler_only_the_lease_counts(postgres: PostgresHarness) -> None:
    pooled = PostgresStore(postgres.server.url(postgres.schema, pooler="on"))
    pooled.register_worker("w", os.getpid(), "host", pooled.now() + 60_000_000)
    assert postgres.store.bury_dead(0) == []
    assert pooled.is_in_use()
    assert pooled.commit([StartRun(new_run("a", status="running", owner="w"))])
    assert postgres.due("me", pooled.now()) == []
    until = pooled.now() - 1
    assert pooled.renew("w", until)
    assert postgres.due("me", pooled.now()) == []
    assert postgres.store.lapse("w", until)
    assert postgres.due("me", pooled.now()) == ["a"]
    assert postgres.store.bury_dead(0) == [], "nobody knows whether it lives"
    until = pooled.now() - 2 * 3600 * 1_000_000
    assert pooled.renew("w", until)
    assert postgres.store.bury_dead(0) == [], "it has renewed its lease"
    assert postgres.store.lapse("w", until)
    pooled.close()
    assert postgres.store.bury_dead(0) == ["w"], "but not for ever"


# -- news -----------------------------------------------------------------------------------------------------------
def test_what_another_process_does_is_heard_at_once(postgres: PostgresHarness, watching: PostgresStore) -> None:
    row = postgres.start("a", status="running")
    watching.changed()
    time.sleep(0.1)
    watching.changed()
    stays(lambda: not watching.changed(), 1.0)
    postgres.one(Post("a", "signal"))
    until(watching.changed)
    postgres.one(append_to(row))
    stays(lambda: not watching.changed(), 0.3)


def test_a_listener_whose_session_was_ended_hears_again(
    postgres: PostgresHarness, watching: PostgresStore, server: Server
) -> None:
    postgres.start("a", status="running")
    watching.changed()
    server.terminate(f"{watching.name} l")
    until(watching.changed)  # what was said meanwhile was not heard
    time.sleep(0.3)
    watching.changed()
    postgres.one(Post("a", "signal"))
    until(watching.changed)


def test_whoever_hears_nothing_looks_now_and_then(postgres: PostgresHarness) -> None:
    deaf = PostgresStore(postgres.server.url(postgres.schema, pooler="on"))
    deaf.changed()
    assert until(deaf.changed) > 0.2
    deaf.close()


# -- the server's clock -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seconds", [86400, -86400, 3600, -3600])
def test_the_server_s_clock_is_read_again_with_every_renewal(
    postgres: PostgresHarness, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """The machine's own clock has gone wrong since the store was opened: drifted, or paused without being counted."""
    moved = [0]
    monkeypatch.setattr("everstep.stores.postgres.store.ticks", lambda: ticks() + moved[0])
    store = PostgresStore(postgres.server.url(postgres.schema))
    try:
        store.register_worker("w", os.getpid(), "host", 1)
        moved[0] = seconds * 1_000_000
        assert abs(store.now() - store._reader.server_time()) > 1000 * 1_000_000 or seconds < 0
        assert store.renew("w", 2)
        assert abs(store.now() - store._reader.server_time()) < 1000 * 1_000_000
    finally:
        store.leave("w")
        store.close()


def test_an_answer_of_the_server_that_took_long_moves_the_clock_no_further_than_it_proves(
    postgres: PostgresHarness,
) -> None:
    store = PostgresStore(postgres.server.url(postgres.schema))
    try:
        store._offset = 1_000
        store._correct(server=5_000, before=3_000, after=4_500)
        assert store._offset == 1_000, "it may be just right"
        store._correct(server=5_000, before=4_500, after=4_600)
        assert store._offset == 500
        store._correct(server=9_000, before=3_000, after=4_000)
        assert store._offset == 5_000
    finally:
        store.close()
