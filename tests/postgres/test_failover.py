"""The primary dies and its standby lacks the last moment: what was lost is noticed, and nothing is done twice."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.codec import ANY, Codec
from everstep.engine.run.holds import report_of
from everstep.errors import StoreError
from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import Accepted, Claim, Claimed, Post, Refused, RunRow, StartRun
from tests.postgres import payments
from tests.postgres.pair import Pair, make_pair
from tests.postgres.server import Server
from tests.stores.kit import PostgresHarness, append_to, new_run
from tests.waiting import wait_until

PROGRAM = str(Path(payments.__file__))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = make_pair()
    yield made
    made.close()


class Shop:
    """A worker on a pair of servers, and the ledger of its payments."""

    def __init__(self, path: Path, url: str) -> None:
        self.url = url
        self.notes = path / "notes"
        self.notes.touch()
        self.log = path / "log"
        source = str(Path(everstep.__file__).parents[1])
        self.environment = {**os.environ, "PYTHONPATH": source, "NOTES": str(self.notes), "EVERSTEP_URL": url}
        self.store = PostgresStore(url)
        self.workers: list[subprocess.Popen[bytes]] = []

    def begin(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as stream:
            words = [sys.executable, PROGRAM, self.url]
            process = subprocess.Popen(words, env=self.environment, stdout=stream, stderr=stream)
        self.workers.append(process)
        return process

    def order(self, *names: str) -> None:
        code = (
            f"import sys; sys.path.insert(0, {str(Path(PROGRAM).parent)!r})\n"
            "import everstep, payments\n"
            "with everstep.open(queues=['none']) as app:\n"
            f"    for name in {names!r}: app.start(payments.order, name, id=name)\n"
        )
        subprocess.run([sys.executable, "-c", code], env=self.environment, check=True)

    def everstep(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "everstep", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    def go(self, *names: str, seconds: float = 0.0) -> None:
        value = Codec().encode(seconds, ANY, "a signal")
        self.store.commit([Post(name, "signal", "go", value=value) for name in names])

    def payments(self) -> list[str]:
        return [line for line in self.notes.read_text().splitlines() if not line.startswith("note")]

    def row(self, name: str) -> RunRow | None:
        try:
            return self.store.run(name)
        except StoreError:
            return None

    def status(self, name: str) -> str:
        row = self.row(name)
        return row.status if row is not None else ""

    def rests_after(self, *lines: str) -> bool:
        """Whether payments were made, and their runs wait again."""
        paid = self.payments()
        return all(line in paid and self.status(line.split()[0]) == "waiting" for line in lines)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()
        self.store.close()


@pytest.fixture
def shop(tmp_path: Path, pair: Pair) -> Iterator[Shop]:
    made = Shop(tmp_path, pair.url())
    yield made
    made.close()
    print(made.log.read_text())


def test_runs_whose_tail_a_failover_lost_are_held_and_nothing_is_paid_twice(shop: Shop, pair: Pair) -> None:
    names = ("tail", "busy", "ended", "calm")
    shop.order(*names)
    shop.begin()
    shop.go(*names)
    wait_until(lambda: shop.rests_after(*(f"{name} 1" for name in names)))
    shop.go("ended")
    wait_until(lambda: shop.rests_after("ended 2"))
    pair.wait_until_followed()
    pair.cut()
    shop.go("tail", "ended")
    shop.order("new")
    shop.go("new")
    shop.go("busy", seconds=20.0)
    wait_until(lambda: shop.rests_after("tail 2", "new 1") and shop.status("ended") == "completed")
    wait_until(lambda: shop.status("busy") == "running")
    pair.fail_over()
    wait_until(lambda: [shop.status(name) for name in ("tail", "busy", "ended")] == ["held"] * 3)

    # What nothing was lost of goes on by itself.
    shop.go("calm")
    wait_until(lambda: shop.rests_after("calm 2"))
    shop.go("calm")
    wait_until(lambda: shop.status("calm") == "completed")
    log = shop.log.read_text()
    assert "everstep restored" in log
    assert "1 had ended" in log
    assert "1 are gone altogether" in log
    assert "(new)" in log
    holds = {hold.run: hold for hold in shop.store.holds()}
    assert {hold.reason for hold in holds.values()} == {"damaged"}
    assert holds["tail"].resolutions == ["repair"]
    report = report_of(holds["tail"])
    assert (report["seen"] > report["last_good"], report["seen_status"]) == (True, "waiting")
    assert [re.match(r"pay#\d+ \(once\), event \d+, key", line) is not None for line in report["begun"]] == [True]
    assert [
        re.match(r"pay#\d+ \(once\), event \d+, key", line) is not None for line in report_of(holds["busy"])["begun"]
    ] == [True]
    assert report_of(holds["ended"])["seen_status"] == "completed"
    shown = shop.everstep("holds")
    assert "was durable and is gone" in shown
    assert "begun: pay#" in shown

    # A repair lets them go on, and they ask before they pay what they may have paid.
    for name in ("tail", "busy", "ended"):
        shop.everstep("resolve", name, "--repair")
        shop.go(name)
    wait_until(lambda: [shop.status(name) for name in ("tail", "busy", "ended")] == ["held"] * 3)
    assert {hold.reason for hold in shop.store.holds()} == {"in-doubt"}
    for name, amount in (("tail", 2), ("ended", 3)):
        shop.everstep("resolve", name, "--done", str(amount))
    shop.everstep("resolve", "busy", "--not-done")  # it was under way, and stopped
    wait_until(lambda: shop.status("ended") == "completed" and shop.rests_after("busy 2"))
    shop.go("tail", "busy")
    wait_until(lambda: shop.status("tail") == shop.status("busy") == "held")
    shop.everstep("resolve", "--reason", "in-doubt", "--accept", "--yes")
    wait_until(lambda: shop.status("tail") == shop.status("busy") == "completed")
    counts = Counter(shop.payments())
    assert set(counts) == {"new 1", *(f"{name} {amount}" for name in names for amount in (1, 2, 3))}
    assert set(counts.values()) == {1}, counts
    assert "sound" in shop.everstep("verify", "--all")


def test_whoever_saw_more_of_a_run_has_it_held_although_another_worker_goes_on_with_it(shop: Shop, pair: Pair) -> None:
    shop.order("tail")
    first = shop.begin()
    shop.go("tail")
    wait_until(lambda: shop.rests_after("tail 1"))
    pair.wait_until_followed()
    pair.cut()
    shop.go("tail")
    wait_until(lambda: shop.rests_after("tail 2"))
    first.send_signal(signal.SIGSTOP)
    second = shop.begin()
    pair.fail_over()
    shop.store.commit([Post("tail", "signal", "unknown", value=Codec().encode(1, ANY, "a signal"))])
    wait_until(
        lambda: str(second.pid) in str(getattr(shop.row("tail"), "owner", "")) and shop.status("tail") == "waiting"
    )
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: shop.status("tail") == "held")
    (hold,) = shop.store.holds()
    assert (hold.reason, hold.resolutions) == ("damaged", ["repair"])
    assert [line.partition(",")[0] for line in report_of(hold)["begun"]] == ["pay#2 (once)"]
    shop.everstep("repair", "tail")
    shop.go("tail")
    wait_until(lambda: [hold.reason for hold in shop.store.holds()] == ["in-doubt"])
    shop.everstep("resolve", "tail", "--done", "2")
    wait_until(lambda: shop.status("tail") == "waiting")
    assert shop.payments() == ["tail 1", "tail 2"]
    assert "sound" in shop.everstep("verify", "--all")


def test_a_failover_that_lost_nothing_holds_nothing(shop: Shop, pair: Pair) -> None:
    names = [f"r{number}" for number in range(6)]
    shop.order(*names)
    shop.begin()
    shop.go(*names)
    wait_until(lambda: shop.rests_after(*(f"{name} 1" for name in names)))
    shop.go(*names, seconds=2.0)
    wait_until(lambda: all(shop.status(name) == "running" for name in names))
    pair.wait_until_followed()
    pair.fail_over()
    wait_until(lambda: shop.rests_after(*(f"{name} 2" for name in names)))
    shop.go(*names)
    wait_until(lambda: all(shop.status(name) == "completed" for name in names))
    assert shop.store.holds(open_only=False) == []
    assert set(Counter(shop.payments()).values()) == {1}
    assert "has lost" not in shop.log.read_text()


def test_the_doctor_says_what_a_promotion_would_lose(pair: Pair, tmp_path: Path) -> None:
    shop = Shop(tmp_path, pair.url())
    try:
        assert "1, and no commit waits for them: a promotion may lose the last moment" in _in_one_line(shop)
        pair.primary.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
        pair.primary.ask("SELECT pg_reload_conf()")
        wait_until(lambda: "a commit waits for *: a promotion of it loses nothing" in _in_one_line(shop))
        pair.cut()
        pair.primary.ask("ALTER SYSTEM RESET synchronous_standby_names")
        pair.primary.ask("SELECT pg_reload_conf()")
        wait_until(lambda: "standbys none" in _in_one_line(shop))
    finally:
        shop.close()


def _in_one_line(shop: Shop) -> str:
    return " ".join(shop.everstep("doctor").split())


# -- the store -----------------------------------------------------------------------------------------------------
def cut_back(server: Server, schema: str, run: str, keep: int) -> None:
    """Let a run be as it was, as on a standby that lags behind."""
    server.ask(f'DELETE FROM "{schema}".events WHERE run = %s AND seq > %s', run, keep)
    server.ask(
        f"""UPDATE "{schema}".runs SET status = 'running', ended_at = NULL, head_seq = %s, head_digest = (
            SELECT digest FROM "{schema}".events WHERE run = %s AND seq = %s) WHERE id = %s""",
        keep, run, keep, run,
    )  # fmt: skip


def advance(postgres: PostgresHarness, run: str, count: int = 1, **fields: Any) -> None:
    assert postgres.one(append_to(postgres.row(run), count, **fields)) == Accepted()


def test_after_a_restart_each_head_that_was_seen_is_compared_before_anything_is_written(
    postgres: PostgresHarness, server: Server
) -> None:
    for run in ("whole", "behind", "gone", "other"):
        postgres.start(run, status="running")
        advance(postgres, run, 3)
    assert postgres.store.lost_tails() == []
    cut_back(server, postgres.schema, "behind", 2)
    cut_back(server, postgres.schema, "other", 2)
    server.ask(f'DELETE FROM "{postgres.schema}".runs WHERE id = %s', "gone")
    server.ask(f'DELETE FROM "{postgres.schema}".events WHERE run = %s', "gone")
    another = postgres.another()
    assert another.commit([append_to(postgres.row("other"), 4, body=b"[]")]) == [Accepted()]
    server.restart()
    assert isinstance(postgres.one(Claim("whole", "me", 1, ["running"])), Claimed)
    found = {tail.run: tail for tail in postgres.store.lost_tails()}
    assert {run: (tail.seen, tail.there, tail.status, tail.is_other) for run, tail in found.items()} == {
        "behind": (4, 2, "running", False),
        "gone": (4, None, None, False),
        "other": (4, 6, "running", True),
    }
    assert [event.seq for event in found["behind"].events] == [2, 3, 4]
    server.restart()
    advance(postgres, "whole")
    assert postgres.store.lost_tails() == [], "each is told of once"
    another.close()


def test_an_append_that_is_refused_leads_to_a_comparison(postgres: PostgresHarness, server: Server) -> None:
    postgres.start("a", status="running")
    advance(postgres, "a", 3)
    late = append_to(postgres.row("a"))
    cut_back(server, postgres.schema, "a", 2)
    assert postgres.one(late) == Refused("head")
    assert [(tail.run, tail.seen, tail.there) for tail in postgres.store.lost_tails()] == [("a", 4, 2)]


def test_a_run_that_another_worker_took_over_has_lost_nothing(postgres: PostgresHarness, server: Server) -> None:
    postgres.start("a", status="running")
    advance(postgres, "a", 3)
    row = postgres.row("a")
    another = postgres.another()
    assert another.commit([append_to(row, 2)]) == [Accepted()]
    assert postgres.one(append_to(row)) == Refused("head")
    server.restart()
    advance(postgres, "a")
    assert postgres.store.lost_tails() == []
    another.close()


def test_an_ended_run_that_was_deleted_or_begun_anew_long_after_is_not_missed(
    postgres: PostgresHarness, server: Server
) -> None:
    postgres.start("old", status="running")
    advance(postgres, "old", status="completed")
    postgres.one(StartRun(new_run("b", status="running")))
    server.ask(f'DELETE FROM "{postgres.schema}".runs WHERE id = %s', "old")
    server.ask(f'DELETE FROM "{postgres.schema}".events WHERE run = %s', "old")
    server.restart()
    advance(postgres, "b")
    assert postgres.store.lost_tails() == [], "its last event is more than an hour old"
