"""While a transaction can see the past of the database, nothing dead may be removed. Claims stay cheap all the same.

What is counted is how many pages the statements of claims read, in one round after another.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from everstep.cli import doctor_postgres
from everstep.cli.doctor_findings import Finding
from everstep.cli.doctor_postgres import about_postgres
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.protocol import Accepted, Claim, Claimed, Post, Posted
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, TakeSlot
from tests.stores.kit import PostgresHarness, append_to
from tests.waiting import wait_until

RUNS = 20
ROUNDS = 4
SECOND = 1_000_000
READS = (
    "pending",
    "pending_since",
    "owned_among",
    "begun",
    "begun_by",
    "begun_with_key",
    "count_slots",
    "fronts",
    "waiting",
    "come_due",
    "due",
    "next_wake",
    "queue",
)


class Pages:
    """Counts the pages that statements read: each is explained before it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: Counter[str] = Counter()
        execute = PostgresStatements.execute

        def counted(statements: PostgresStatements, name: str, parameters: Any = ()) -> Any:
            if name in READS:
                text = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements._texts[name]}"
                ((plan,),) = statements.connection.execute(text, parameters).fetchall()
                read = plan[0]["Plan"]
                self.read[name] += read["Shared Hit Blocks"] + read["Shared Read Blocks"]
            return execute(statements, name, parameters)

        monkeypatch.setattr(PostgresStatements, "execute", counted)


MANY = """
    INSERT INTO "{schema}".runs SELECT 'x' || n, 'order', '', 1, 'completed', 1, 1, '\\x00', 1, NULL, NULL, 'mail', 0,
        '{{}}', NULL, '', '', 0, n, n, n, '', NULL, NULL, NULL FROM generate_series(1, 2000) AS n
"""
"""So many are there before, that no index gets another level meanwhile."""


@contextmanager
def reader(postgres: PostgresHarness) -> Iterator[None]:
    """A transaction that sees the database as it is now."""
    with psycopg.connect(postgres.server.uri) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1").fetchall()
        yield


@contextmanager
def idle_writer(postgres: PostgresHarness) -> Iterator[None]:
    """A transaction that has written, and does nothing more."""
    with psycopg.connect(postgres.server.uri) as connection:
        connection.execute("SELECT pg_current_xact_id()").fetchall()
        yield


def through_a_queue(postgres: PostgresHarness, round: int, at: int, **fields: Any) -> None:
    """Let runs wait in a queue with four slots, and claim and end them one after the other."""
    store = postgres.store
    ids = [f"{round}-{number}" for number in range(RUNS)]
    for number, id in enumerate(ids):
        tags = {"key": f"k{number % 3}"}
        postgres.start(id, queue="mail", created_at=at, updated_at=at, priority=number % 2, tags=tags, **fields)
    done = 0
    while done < RUNS:
        at += SECOND // 100
        (room,) = store.queue_room(at=at, worker="w")
        for id in store.queued("mail", at=at, workflows=["order"], limit=room.room):
            assert isinstance(postgres.one(Claim(id, "w", at, ["queued"], queued=True)), Claimed)
            assert isinstance(postgres.one(append_to(postgres.row(id), at=at)), Accepted)
            postgres.end(id, at=at)
            done += 1


def delayed(postgres: PostgresHarness, round: int, at: int) -> None:
    """The same for runs that waited for their time first."""
    through_a_queue(postgres, round, at, wake_at=at)


def without_a_queue(postgres: PostgresHarness, round: int, at: int) -> None:
    """Let a worker find and end runs that others have started, each with a timer on the way."""
    store = postgres.store
    for number in range(RUNS):
        postgres.start(f"{round}-{number}", created_at=at, updated_at=at)
    done = 0
    while done < RUNS:
        at += SECOND // 100
        for id in store.due(at=at, workflows=["order"], worker="w", everyone=True, limit=4):
            assert isinstance(postgres.one(Claim(id, "w", at, ["queued", "waiting"], queued=True)), Claimed)
            row = postgres.row(id)
            if row.status == "queued":
                release = row.id.endswith(("0", "2", "4"))  # others keep the run while it sleeps
                postgres.one(append_to(row, at=at, status="waiting", wake_at=at, release=release))
            else:
                postgres.end(id, at=at)
                done += 1
        store.next_wake(worker="w", everyone=True)


def inboxes(postgres: PostgresHarness, round: int, at: int) -> None:
    """Let runs that wait be sent to, take what they were sent, and end; one of them never does."""
    store = postgres.store
    if round == 0:
        postgres.start("never", status="waiting", created_at=at, updated_at=at)
        postgres.one(Post("never", "signal"))
    for number in range(8 * RUNS):
        row = postgres.start(f"{round}-{number}", status="waiting", created_at=at, updated_at=at)
        posted = postgres.one(Post(row.id, "signal"))
        assert isinstance(posted, Posted)
        assert sorted(store.due(at=at, workflows=["order"], worker="w", everyone=True, limit=4)) == [row.id, "never"]
        postgres.one(append_to(row, status="completed", at=at, consumed=[posted.number]))
        assert store.pending("w") == []


def slots(postgres: PostgresHarness, round: int, at: int) -> None:
    """Let attempts at steps take and free the slots of a named limit."""
    for number in range(8 * RUNS):
        assert postgres.one(TakeSlot("model", f"{round}-{number}", 1, "w", at)) == Accepted()
        postgres.one(FreeSlot("model", f"{round}-{number}", 1, "w"))


@pytest.mark.parametrize("pin", [reader, idle_writer])
@pytest.mark.parametrize("work", [through_a_queue, delayed, without_a_queue, inboxes, slots])
def test_beside_a_transaction_that_pins_the_past_a_claim_reads_no_more_from_round_to_round(
    postgres: PostgresHarness,
    monkeypatch: pytest.MonkeyPatch,
    pin: Callable[[PostgresHarness], Any],
    work: Callable[[PostgresHarness, int, int], None],
) -> None:
    postgres.enter("w", lease_until=10**15)
    postgres.one(ChangeQueue("queue", "mail", {"concurrency": 4, "per_worker": 4, "per_key": 2}, 1))
    postgres.one(ChangeQueue("limit", "model", {"concurrency": 4}, 1))
    postgres.store.close()
    postgres.store = postgres.another(whole_seconds=3600.0)  # looks from the front are few: not counted here
    postgres.server.ask(MANY.format(schema=postgres.schema))
    pages, rounds = Pages(monkeypatch), []
    with pin(postgres):
        for round in range(ROUNDS):
            work(postgres, round, (round + 1) * 100 * SECOND)
            rounds.append(pages.read.copy())
            pages.read.clear()
    read = [one.total() for one in rounds]
    assert read[0] > RUNS, "nothing was counted"
    assert read[-1] < read[1] * 1.25, f"pages that were read, round by round: {rounds}"


# -- what comes back --------------------------------------------------------------------------------------------------
def test_a_run_that_is_put_back_elsewhere_is_found_although_lines_are_read_from_behind_it(
    postgres: PostgresHarness,
) -> None:
    at = 100 * SECOND
    looking = postgres.another(whole_seconds=3600.0)  # so it is not found by a look from the front that was due
    looking.changed()  # it listens
    postgres.enter("w", lease_until=10**15)
    for queue in ("mail", "default"):
        old = postgres.start(f"old-{queue}", queue=queue, created_at=1, updated_at=1)
        assert isinstance(postgres.one(Claim(old.id, "w", 1, ["queued"], queued=True)), Claimed)

    def waiting() -> set[str]:
        looking.queue_room(at=at, worker="me")
        due = looking.due(at=at, workflows=["order"], worker="me", everyone=True, limit=9)
        return {*due, *looking.queued("mail", at=at, workflows=["order"], limit=9)}

    assert waiting() == set()
    postgres.start("new-mail", queue="mail", created_at=at, updated_at=at)
    postgres.start("new-default", created_at=at, updated_at=at)
    assert waiting() == {"new-mail", "new-default"}, "what is new comes behind"
    postgres._others["w"].leave("w")
    wait_until(lambda: waiting() == {"new-mail", "new-default", "old-mail", "old-default"})
    looking.close()


def test_priorities_and_queues_that_come_later_are_found(postgres: PostgresHarness) -> None:
    at = 100 * SECOND
    postgres.store.close()
    store = postgres.store = postgres.another(whole_seconds=3600.0)

    def waiting(queue: str) -> list[str]:
        names = [room.name for room in store.queue_room(at=at, worker="me")]
        return store.queued(queue, at=at, workflows=["order"], limit=9) if queue in names else []

    assert waiting("mail") == []
    for number, priority in enumerate([0, 7, -3, 7, 2**40]):
        postgres.start(f"r{number}", queue="mail", created_at=at, updated_at=at, priority=priority)
        postgres.start(f"d{number}", created_at=at, updated_at=at, priority=priority)
        store.queue_room(at=at, worker="me")
    assert waiting("mail") == ["r4", "r1", "r3", "r0", "r2"]
    assert store.due(at=at, workflows=["order"], worker="me", everyone=True, limit=9) == ["d4", "d1", "d3", "d0", "d2"]
    postgres.start("far", queue="a", created_at=at, updated_at=at)
    postgres.start("later", queue="z", created_at=at, updated_at=at, wake_at=at - 1)
    assert waiting("a") == ["far"]
    assert waiting("z") == ["later"]


def test_the_timer_of_a_run_whose_owner_is_gone_is_found_when_it_is_due(postgres: PostgresHarness) -> None:
    at = 100 * SECOND
    postgres.start("r", owner="dead", status="waiting", wake_at=at + SECOND, created_at=1)
    postgres.store.close()
    store = postgres.store = postgres.another(whole_seconds=3600.0)

    def due(now: int) -> list[str]:
        return store.due(at=now, workflows=["order"], worker="me", everyone=True, limit=9)

    for now in (at, at + 1, at + 2):
        assert due(now) == []
        assert store.next_wake(worker="me", everyone=True) == at + SECOND
    assert due(at + SECOND) == ["r"]
    assert due(at + SECOND) == ["r"], "nobody has taken it"


# -- what a person is told --------------------------------------------------------------------------------------------
def test_doctor_names_what_has_pinned_the_past_and_for_how_long(
    postgres: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [finding.text for finding in about_pins(postgres)] == ["no transaction is older than five minutes"]
    monkeypatch.setattr(doctor_postgres, "PINNED_SECONDS", 0.0)
    server = postgres.server
    server.ask("SELECT pg_create_physical_replication_slot('idle_consumer', true)")
    try:
        with psycopg.connect(server.uri, application_name="reports") as connection:
            connection.execute("SELECT pg_current_xact_id()").fetchall()
            (finding,) = [one for one in about_pins(postgres) if "reports" in one.text]
            pid = connection.info.backend_pid
        assert finding.verdict == "warning"
        assert f"process {pid} of role" in finding.text
        assert "(reports, idle in transaction)" in finding.text
        assert f"pg_terminate_backend({pid})" in finding.text
        assert not any("reports" in one.text for one in about_pins(postgres)), "it has ended"
        assert not any("idle_consumer" in one.text for one in about_pins(postgres)), "it pins nothing"
    finally:
        server.ask("SELECT pg_drop_replication_slot('idle_consumer')")


def about_pins(postgres: PostgresHarness) -> list[Finding]:
    return [finding for finding in about_postgres(postgres.postgres) if finding.name == "horizon"]
