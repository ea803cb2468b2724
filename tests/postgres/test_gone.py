"""A machine that is gone: somebody says so once, and probes settle what it left in doubt."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from everstep.errors import Misuse
from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import RunFilter
from tests.postgres import machines as program
from tests.waiting import wait_until

NAMES = ("a", "b", "c")


class Fleet:
    """Machines with a worker each, and the ledger that all payments are written to."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        self.store = PostgresStore(url)
        (path / "ledger").touch()
        source = str(Path(everstep.__file__).parents[1])
        self._environment = {**os.environ, "PYTHONPATH": source, "PLACE": str(path), "EVERSTEP_URL": url}
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, host: str, **more: str) -> "subprocess.Popen[bytes]":
        with (self.path / f"log-{host}").open("ab") as stream:
            words = [sys.executable, str(Path(program.__file__)), self.url, host]
            process = subprocess.Popen(words, env=self._environment | more, stdout=stream, stderr=stream)
        self.processes.append(process)
        wait_until(lambda: any(row.pid == process.pid for row in self.store.workers()))
        return process

    def start(self, *names: str) -> None:
        with everstep.connect(self.url) as client:
            for name in names:
                client.start("order", name, id=name)

    def everstep(self, *words: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "everstep", *words]
        return subprocess.run(line, env=self._environment, capture_output=True, text=True, check=False)

    def ledger(self) -> list[str]:
        return (self.path / "ledger").read_text().splitlines()

    def said(self, host: str) -> str:
        return (self.path / f"log-{host}").read_text()

    def worker_of(self, process: "subprocess.Popen[bytes]") -> str:
        (row,) = [row for row in self.store.workers() if row.pid == process.pid]
        return row.id

    def wait_for_held(self, *names: str) -> None:
        wait_until(lambda: {hold.run for hold in self.store.holds()} == set(names))

    def wait_for_paid(self, host: str, *names: str) -> None:
        """Let a machine pay, and wait until the runs are completed."""
        (self.path / f"go-{host}").touch()
        wait_until(lambda: {row.id for row in self.store.runs(RunFilter(status=("completed",)))} >= set(names))
        for name in names:
            assert [line for line in self.ledger() if line.startswith(f"paid {name} ")] == [f"paid {name} {host}"]


@pytest.fixture
def fleet(tmp_path: Path, url: str) -> Iterator[Fleet]:
    made = Fleet(tmp_path, url)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()
    made.store.close()
    print(*(path.read_text() for path in tmp_path.glob("log-*")), sep="\n----\n")


def begin_payments(fleet: Fleet, host: str, *names: str) -> "subprocess.Popen[bytes]":
    """Let a machine be in the middle of payments."""
    process = fleet.begin(host)
    fleet.start(*names)
    wait_until(lambda: set(fleet.ledger()) >= {f"began {name} {host}" for name in names})
    return process


def test_a_host_that_is_declared_gone_is_taken_at_the_word_of_its_probes_and_one_of_that_name_later_is_not(
    fleet: Fleet,
) -> None:
    alpha = begin_payments(fleet, "alpha", *NAMES)
    fleet.begin("beta")
    refused = fleet.everstep("worker", "gone", "--host", "alpha", "--note", "a mistake")
    assert refused.returncode != 0
    assert "is not gone: its lease lasts" in refused.stderr
    assert fleet.store.gone() == []
    alpha.kill()
    fleet.wait_for_held(*NAMES)
    assert all("not proven" in hold.summary for hold in fleet.store.holds())

    done = fleet.everstep("worker", "gone", "--host", "alpha", "--note", "the node was deleted", "--json")
    assert done.returncode == 0, done.stderr
    fleet.wait_for_paid("beta", *NAMES)
    (said,) = fleet.store.gone("host", "alpha")
    assert (said.note, bool(said.by)) == ("the node was deleted", True)
    assert {hold.resolution for hold in fleet.store.holds(open_only=False)} == {"probe"}
    assert all("the node was deleted" in hold.note for hold in fleet.store.holds(open_only=False))

    again = begin_payments_on_one_of(fleet, "alpha", "d")
    again.kill()
    fleet.wait_for_held("d")


def begin_payments_on_one_of(fleet: Fleet, host: str, name: str) -> "subprocess.Popen[bytes]":
    """Let a machine be in the middle of a payment, while another one is too busy."""
    for process in fleet.processes:
        process.send_signal(signal.SIGSTOP)
    try:
        return begin_payments(fleet, host, name)
    finally:
        for process in fleet.processes[:-1]:
            process.send_signal(signal.SIGCONT)


def test_a_worker_that_was_declared_gone_and_lives_stops_and_says_why(fleet: Fleet) -> None:
    alpha = begin_payments(fleet, "alpha", "a")
    worker = fleet.worker_of(alpha)
    fleet.begin("beta")
    alpha.send_signal(signal.SIGSTOP)  # as if its network were cut
    fleet.wait_for_held("a")
    with everstep.open(fleet.url) as app:
        with pytest.raises(Misuse, match="has never seen a worker 'nobody'"):
            app.worker_gone("nobody", note="a slip")
        assert app.worker_gone(worker, note="its rack burned", by="ann").asked == ["a"]
    fleet.wait_for_paid("beta", "a")
    alpha.send_signal(signal.SIGCONT)
    wait_until(lambda: "was declared gone by ann: its rack burned" in fleet.said("alpha"))
    fleet.start("b")
    fleet.wait_for_paid("beta", "b")
    assert "began b alpha" not in fleet.ledger()
    assert not any(row.host == "alpha" for row in fleet.store.workers())


def test_with_gone_after_a_silent_worker_counts_as_gone_and_that_is_noted(fleet: Fleet) -> None:
    alpha = begin_payments(fleet, "alpha", *NAMES)
    worker = fleet.worker_of(alpha)
    beta = fleet.begin("beta", GONE_AFTER="1")
    alpha.kill()
    fleet.wait_for_paid("beta", *NAMES)
    assert fleet.store.holds(open_only=False) == []
    wait_until(lambda: fleet.store.gone("worker", worker))
    assert fleet.store.gone("worker", worker)[0].by == fleet.worker_of(beta)
