"""Workers on several hosts: one is cut off and let back; another goes on, and the first adds nothing."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import everstep
from everstep.engine.history.verify import load_verified
from everstep.stores.postgres import PostgresStore
from tests.postgres import payments
from tests.postgres.hosts import Namespaces, Network, Swallowing
from tests.postgres.server import Server
from tests.waiting import wait_until

PROGRAM = str(Path(payments.__file__))
LEASE = 3.0
PLACES = 600


@pytest.fixture(params=[Swallowing, Namespaces], ids=["swallowing", "namespaces"])
def network(request: pytest.FixtureRequest, server: Server) -> Iterator[Network]:
    made = request.param(server.socket_path(), 2)
    yield made
    made.close()


class Hosts:
    """Workers on their hosts, and the ledger that they share."""

    def __init__(self, path: Path, network: Network, schema: str) -> None:
        self.path = path
        self.notes = path / "notes"
        self.notes.touch()
        self._network = network
        self._schema = schema
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, host: int) -> "subprocess.Popen[bytes]":
        source = str(Path(everstep.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "NOTES": str(self.notes), "LEASE": str(LEASE)}
        url = f"postgresql://postgres@{self._network.address(host)}/postgres?schema={self._schema}"
        words = [*self._network.on(host), sys.executable, PROGRAM, url]
        with self._log(host).open("ab") as stream:
            process = subprocess.Popen(words, env=environment, stdout=stream, stderr=stream)
        self.processes.append(process)
        until(lambda: "driving" in self.said(host))
        return process

    def _log(self, host: int) -> Path:
        return self.path / f"log-{host}"

    def said(self, host: int) -> str:
        return self._log(host).read_text()

    def lines(self, worker: "subprocess.Popen[bytes]") -> list[str]:
        """Return what a worker has written."""
        return [line for line in self.notes.read_text().splitlines() if line.endswith(f" {worker.pid}")]


@pytest.fixture
def hosts(tmp_path: Path, network: Network, schema: str) -> Iterator[Hosts]:
    made = Hosts(tmp_path, network, schema)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()
    print(made.said(0), made.said(1), sep="\n----\n")


def until(condition: Callable[[], Any]) -> float:
    """Wait for a condition, and return how long that took at least."""
    began = time.monotonic()
    wait_until(condition)
    return time.monotonic() - began


def start(url: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(PROGRAM).parent)!r})\n"
        "import everstep, payments\n"
        f"with everstep.connect({url!r}) as client: client.start('ticking', 't', {PLACES}, id='t')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(everstep.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def lease_of(store: PostgresStore) -> tuple[int, str]:
    """Return how often the run was claimed, and the process that has it."""
    row = store.run("t")
    assert row is not None
    return row.epoch, (row.owner or "").split("-")[-3]


def is_at_work(store: PostgresStore, worker: "subprocess.Popen[bytes]") -> bool:
    """Tell whether a worker has prolonged its lease."""
    return any(row.pid == worker.pid and row.lease_until > store.now() for row in store.workers())


def test_a_host_that_is_cut_off_and_let_back_adds_nothing_to_what_another_took_over(
    hosts: Hosts, network: Network, url: str
) -> None:
    store = PostgresStore(url)
    first = hosts.begin(0)
    start(url)
    until(lambda: len(hosts.lines(first)) > 20)
    second = hosts.begin(1)
    network.cut(0)
    done = len(hosts.lines(first))
    took = until(lambda: hosts.lines(second))
    assert not is_at_work(store, first)
    assert took > LEASE / 2, "nobody is told of a cut, so the lease counts"
    assert len(hosts.lines(first)) <= done + 2, "without an intent on the disk no body begins"
    done = len(hosts.lines(first))

    network.heal(0)
    until(lambda: is_at_work(store, first))
    before = len(hosts.lines(second))
    until(lambda: len(hosts.lines(second)) > before + 50)
    assert len(hosts.lines(first)) == done, "the one that was let back does nothing"
    assert lease_of(store) == (2, str(second.pid))
    assert first.poll() is None

    second.kill()  # and yet it is as good a worker as any
    until(lambda: len(hosts.lines(first)) > done + 5)
    assert lease_of(store) == (3, str(first.pid))
    until(lambda: getattr(store.run("t"), "status", "") == "completed")
    row = store.run("t")
    assert row is not None
    history = load_verified(store, row)
    completed = [event.step for event in history if event.kind == "step_completed"]
    assert len(completed) == len(set(completed)) == PLACES
    begun = [event.step for event in history if event.kind == "step_started"]
    assert len(begun) <= PLACES + 2, "begun again is what was under way at the cut and at the kill"
    written = [line.split()[2] for line in hosts.notes.read_text().splitlines()]
    assert set(written) == set(map(str, range(PLACES)))
    assert len(written) <= PLACES + 2
    assert row.outcome is not None
    assert msgspec.json.decode(row.outcome)[0] == PLACES
    store.close()
