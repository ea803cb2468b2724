"""Each error of the server is blamed on whom it is about: hardly ever on the run that was being written."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import everstep
from everstep.errors import Damaged, StoreError, StoreFailed, StoreFull, StoreReadOnly, StoreUnusable
from everstep.stores.postgres import PostgresStore, commits, connections, heads
from everstep.stores.protocol import (
    Accepted,
    Claim,
    Claimed,
    Failed,
    Operation,
    Post,
    Posted,
    StartRun,
    Verdict,
)
from everstep.stores.sql.sqlstates import CLASSES, ground_of
from tests.postgres.faults import OF_EACH_CLASS, SQLSTATES, Canceller, Faults
from tests.postgres.server import Server
from tests.stores.kit import PostgresHarness, append_to, new_run

ABOUT_A_VALUE = ("22", "23", "54")
"""Only these classes speak of what a run wrote."""
FORBIDDEN = ("0L", "0P", "28", "2B", "42501")
UNUSABLE = ("3D", "3F", "42", "44")
OF_THE_STORE: dict[str, type[StoreError]] = {
    "53100": StoreFull,
    "XX001": StoreFailed,
    "XX002": StoreFailed,
    **dict.fromkeys(FORBIDDEN, StoreReadOnly),
}


def blamed_on_the_store(code: str) -> type[StoreError] | None:
    """Return what is raised for an error after which everything pauses or stops."""
    if code == "42P05":  # a name of a prepared statement: a new session has none
        return None
    found = OF_THE_STORE.get(code) or OF_THE_STORE.get(code[:2])
    return found or (StoreUnusable if code.startswith(UNUSABLE) else None)


@pytest.fixture
def faults(postgres: PostgresHarness) -> Iterator[Faults]:
    made = Faults(postgres.server, postgres.schema)
    yield made
    made.close()


def appends_to(postgres: PostgresHarness, *ids: str) -> list[Operation]:
    return [append_to(postgres.row(id)) for id in ids]


def is_done(verdict: Verdict) -> bool:
    return isinstance(verdict, Accepted | Posted | Claimed)


PATHS = ["one append", "several appends", "in order"]


def batch_of(postgres: PostgresHarness, path: str) -> list[Operation]:
    if path == "in order":
        return [Post("good", "signal"), Post("bad", "signal"), Post("good", "signal")]
    return appends_to(postgres, "good") if path == "one append" else appends_to(postgres, "good", "bad")


def test_every_error_that_the_server_knows_has_its_place_in_the_table() -> None:
    for code in SQLSTATES:
        assert (ground_of(code) == "value") == code.startswith(ABOUT_A_VALUE), code
        assert (ground_of(code) in ("lost", "again", "value")) == (blamed_on_the_store(code) is None), code
    assert {code[:2] for code in SQLSTATES} - {"ZZ", "QX"} <= set(CLASSES)


@pytest.mark.parametrize("path", PATHS)
def test_an_error_that_comes_once_is_blamed_on_no_run_whatever_it_is(
    postgres: PostgresHarness, faults: Faults, path: str
) -> None:
    for id in ("good", "bad"):
        postgres.start(id, status="running")
    for code in OF_EACH_CLASS:
        batch = batch_of(postgres, path)
        faults.arm(code)
        expected = blamed_on_the_store(code)
        if expected is not None:
            with pytest.raises(StoreError) as raised:
                postgres.do(*batch)
            assert type(raised.value) is expected, code
        verdicts = postgres.do(*batch)
        assert all(map(is_done, verdicts)), (code, verdicts)
    for id in ("good", "bad"):
        seqs = [event.seq for event in postgres.store.events(id, 1)]
        assert seqs == list(range(1, len(seqs) + 1))
    if path == "in order":
        assert len(postgres.store.inbox("good")) == 2 * len(OF_EACH_CLASS)


@pytest.mark.parametrize("code", ["57014", "40001", "40P01", "53200", "53300", "25P02", "55P03", "XX000", "P0001"])
@pytest.mark.parametrize("path", PATHS)
def test_an_error_that_says_nothing_is_waited_out(
    postgres: PostgresHarness, faults: Faults, path: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PAUSE_SECONDS_MAX", 0.01)
    for id in ("good", "bad"):
        postgres.start(id, status="running")
    batch = batch_of(postgres, path)
    faults.arm(code, count=45)
    assert all(map(is_done, postgres.do(*batch)))
    assert len(postgres.store.inbox("good")) == (2 if path == "in order" else 0)


@pytest.mark.parametrize("code", ["22003", "22021", "23505", "54000", "54001"])
@pytest.mark.parametrize("path", ["several appends", "in order"])
def test_a_value_that_the_server_refuses_is_blamed_on_its_own_run_alone(
    postgres: PostgresHarness, faults: Faults, path: str, code: str
) -> None:
    for id in ("good", "bad"):
        postgres.start(id, status="running")
    batch = batch_of(postgres, path)
    faults.arm(code, count=1000, run="bad")
    verdicts = postgres.do(*batch)
    for operation, verdict in zip(batch, verdicts, strict=True):
        is_bad = operation.run == "bad"  # type: ignore[union-attr]
        assert isinstance(verdict, Failed) == is_bad, verdict
        if isinstance(verdict, Failed):
            assert isinstance(verdict.error, Damaged) or not isinstance(verdict.error, StoreError)


def test_a_rule_of_a_table_that_is_not_the_stores_is_blamed_on_no_run(
    postgres: PostgresHarness, server: Server
) -> None:
    """Somebody keeps an account of events in a table of their own, and that one refuses a row for a while."""
    row = postgres.start("a", status="running")
    server.ask(f'CREATE SCHEMA "{postgres.schema}_audit"')
    try:
        server.ask(f'CREATE TABLE "{postgres.schema}_audit".seen (n int CHECK (n > 3))')
        server.ask(f'CREATE SEQUENCE "{postgres.schema}_audit".numbers')
        server.ask(
            f'CREATE FUNCTION "{postgres.schema}_audit".keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN '
            f'INSERT INTO "{postgres.schema}_audit".seen VALUES (nextval(\'"{postgres.schema}_audit".numbers\')); '
            "RETURN NEW; END $$"
        )
        server.ask(
            f'CREATE TRIGGER audit BEFORE INSERT ON "{postgres.schema}".events FOR EACH ROW '
            f'EXECUTE FUNCTION "{postgres.schema}_audit".keep()'
        )
        assert postgres.one(append_to(row)) == Accepted()
    finally:
        server.ask(f'DROP SCHEMA "{postgres.schema}_audit" CASCADE')


def test_a_question_whose_answer_is_cancelled_is_asked_again(postgres: PostgresHarness, faults: Faults) -> None:
    for code in OF_EACH_CLASS:
        faults.arm(code)
        ask = lambda: postgres.postgres._reader.ask(  # noqa: E731
            lambda statements: statements.connection.execute(f'SELECT "{postgres.schema}".fault(NULL)').fetchall()
        )
        if blamed_on_the_store(code) is not None or code.startswith(ABOUT_A_VALUE):
            with pytest.raises(StoreError):
                ask()
        assert ask() == [(1,)], code


def test_an_error_while_a_lease_is_prolonged_is_no_lost_lease(postgres: PostgresHarness, faults: Faults) -> None:
    postgres.store.register_worker("me", 1, "host", 10_000)
    for code in OF_EACH_CLASS:
        faults.arm(code)
        if blamed_on_the_store(code) is not None or code.startswith(ABOUT_A_VALUE):
            with pytest.raises(StoreError):
                postgres.store.renew("me", 20_000)
        assert postgres.store.renew("me", 20_000), code


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_enters_and_leaves_although_statements_are_cancelled(
    postgres: PostgresHarness, faults: Faults, count: int
) -> None:
    faults.arm("57014", count=count)
    postgres.store.register_worker("me", 1, "host", 10_000)
    assert [worker.id for worker in postgres.store.workers()] == ["me"]
    assert postgres.store.is_in_use()
    postgres.store.leave("me")
    assert not postgres.store.workers()
    assert not postgres.store.is_in_use(), "its liveness lock is free"


def test_a_transaction_that_cannot_be_rolled_back_is_tried_on_a_new_connection(
    postgres: PostgresHarness, faults: Faults
) -> None:
    """Its session is ended in the moment in which it has to give way to another transaction."""
    postgres.start("good", status="running")
    writer = postgres.postgres._writer
    roll_back = writer._roll_back

    def lost() -> None:
        assert writer._connection is not None
        postgres.server.ask("SELECT pg_terminate_backend(%s)", writer._connection.info.backend_pid)
        roll_back()

    writer._roll_back = lost  # type: ignore[method-assign]
    faults.arm("40P01", count=2)
    assert isinstance(postgres.one(Post("good", "signal")), Posted)
    assert len(postgres.store.inbox("good")) == 1


@pytest.mark.parametrize("pooler", ["off", "on"])
def test_a_role_with_other_wishes_changes_nothing(postgres: PostgresHarness, server: Server, pooler: str) -> None:
    """What a role has set for its sessions is not for those of a store, be it behind a pooler."""
    wishes = {
        "default_transaction_isolation": "serializable",
        "default_transaction_read_only": "on",
        "statement_timeout": "200ms",
        "lock_timeout": "200ms",
        "idle_session_timeout": "200ms",
        "idle_in_transaction_session_timeout": "200ms",
    }
    role = f"{postgres.schema}_hasty"
    server.ask(f'CREATE ROLE "{role}" LOGIN SUPERUSER')
    try:
        for name, value in wishes.items():
            if (name, pooler) == ("default_transaction_read_only", "on"):
                continue  # it is a session that cannot write, and is refused when the store is opened
            server.ask(f"ALTER ROLE \"{role}\" SET {name} = '{value}'")
        store = PostgresStore(server.as_role(role).url(postgres.schema, pooler=pooler))
        store.register_worker("me", 1, "host", 10**18)
        for number in range(3):
            store.commit([StartRun(new_run(f"r{number}", status="running"))])
        rows = [postgres.row(f"r{number}") for number in range(3)]
        assert store.commit(list(map(append_to, rows))) == [Accepted()] * 3
        assert isinstance(store.commit([Post("r0", "signal")])[0], Posted)
        assert store.renew("me", 10**18)
        store.close()
    finally:
        server.ask(f'DROP OWNED BY "{role}"')
        server.ask(f'DROP ROLE "{role}"')


# -- cancelled for real -----------------------------------------------------------------------------------------------
def test_statements_cancelled_again_and_again_lose_and_double_nothing(
    postgres: PostgresHarness, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "everstep.store")
    store = postgres.another()
    heads = {f"r{number}": postgres.start(f"r{number}", status="running") for number in range(8)}
    store.register_worker("me", 1, "host", 10**18)
    faults.arm(None, pause=0.002)
    posted: list[int] = []
    with Canceller(postgres.server, f"{store.name}%"):
        for turn in range(60):
            appends = [append_to(row) for row in heads.values()]
            verdicts = store.commit([*appends, Post("r0", "signal")])
            assert verdicts[:-1] == [Accepted()] * 8, verdicts
            assert isinstance(verdicts[-1], Posted)
            posted.append(verdicts[-1].number)
            for append in appends:
                heads[append.run].head_seq = append.events[-1].seq
                heads[append.run].head_digest = append.events[-1].digest
            (claim,) = store.commit([Claim(f"r{turn % 8}", "me", 1, ["running"])])
            assert isinstance(claim, Claimed), claim
            heads[claim.row.id].epoch = claim.row.epoch
            assert store.renew("me", 10**18)
            assert [worker.id for worker in store.workers()] == ["me"]
            store.changed()
    store.close()
    assert "canceling statement due to user request" in caplog.text, "some of them were hit"
    for id, row in heads.items():
        events = postgres.store.events(id, 1)
        assert [event.seq for event in events] == list(range(1, row.head_seq + 1))
        assert events[-1].digest == row.head_digest
    assert [delivery.number for delivery in postgres.store.inbox("r0")] == posted


def test_an_app_whose_statements_are_cancelled_again_and_again_ends_all_its_runs(
    server: Server, url: str, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "everstep")
    done: Counter[str] = Counter()
    PostgresStore(url).close()
    faults = Faults(server, schema)
    faults.arm(None, pause=0.001)

    @everstep.step(effect="once")
    async def charge(who: str, number: int) -> int:
        done[f"{who} {number}"] += 1
        return number

    @everstep.workflow
    async def child(who: str) -> int:
        return await charge(who, 100)

    @everstep.workflow
    async def order(who: str) -> int:
        total = sum(await asyncio.gather(*[charge(who, number) for number in range(3)]))
        total += await everstep.receive("more", int)
        await everstep.sleep(0.01)
        return total + await child(who + "'s")

    async def main() -> list[Any]:
        async with everstep.open(url, recover=True, lease=2) as app:
            with Canceller(server):
                handles = [await app.start(order, f"c{number}", id=f"c{number}") for number in range(8)]
                for handle in handles:
                    await handle.signal("more", 10)
                ended = await asyncio.wait_for(asyncio.gather(*[handle.result() for handle in handles]), 120)
            assert not app.store.holds()
            assert app.background.is_under_way("pump")
            return ended

    try:
        assert asyncio.run(main()) == [3 + 10 + 100] * 8
    finally:
        faults.close()
    assert set(done.values()) == {1}
    assert len(done) == 8 * 4
    assert "canceling statement due to user request" in caplog.text, "some of them were hit"


def test_a_role_that_loses_a_right_pauses_work_and_no_run_is_held(server: Server, url: str, schema: str) -> None:
    """Runs wait where they are, those who ask are told, and everything goes on when the right is granted again."""
    PostgresStore(url).close()
    role = f"{schema}_worker"
    server.ask(f'CREATE ROLE "{role}" LOGIN')
    for what in ("TABLES", "SEQUENCES"):
        server.ask(f'GRANT ALL ON ALL {what} IN SCHEMA "{schema}" TO "{role}"')
    server.ask(f'GRANT USAGE ON SCHEMA "{schema}" TO "{role}"')
    began, may_end = asyncio.Event(), asyncio.Event()

    @everstep.step(effect="once")
    async def wait() -> int:
        began.set()
        await may_end.wait()
        return 1

    @everstep.workflow
    async def flow() -> int:
        return await wait() + 1

    async def main() -> None:
        async with everstep.open(server.as_role(role).url(schema)) as app:
            handle = await app.start(flow, id="r")
            await asyncio.wait_for(began.wait(), 60)
            server.ask(f'REVOKE INSERT ON "{schema}".events FROM "{role}"')
            may_end.set()
            with pytest.raises(StoreReadOnly, match="Grant it what it needs"):
                await app.start(flow, id="another")
            while not app.committer.full:  # its outcome finds that it cannot be written
                await asyncio.sleep(0.01)
            server.ask(f'GRANT INSERT ON "{schema}".events TO "{role}"')
            assert await asyncio.wait_for(handle.result(), 60) == 2
            assert not app.store.holds()

    try:
        asyncio.run(main())
    finally:
        server.ask(f'DROP OWNED BY "{role}"')
        server.ask(f'DROP ROLE "{role}"')


def test_what_is_kept_of_appends_is_bounded_by_its_bytes(
    postgres: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "APPENDS_BYTES_MAX", 10_000)
    row = postgres.start("a", status="running")
    for _ in range(8):
        assert postgres.one(append_to(row, body=b"x" * 3_000)) == Accepted()
        row = postgres.row("a")
    kept = postgres.postgres._writer.heads._appends
    assert sum(len(event.body) for _, _, events, _ in kept for event in events) == 9_000


def test_an_operation_that_is_too_large_to_be_sent_is_blamed_on_its_run_alone(
    postgres: PostgresHarness, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the session of a client that sends a gigabyte, and does not say why."""
    monkeypatch.setattr(commits, "VALUE_BYTES_MAX", 100_000)
    rows = [postgres.start(id, status="running") for id in ("good", "bad")]
    faults.arm("08P01", count=1000, run="bad")
    good, bad = postgres.do(append_to(rows[0]), append_to(rows[1], body=b"x" * 200_000))
    assert good == Accepted()
    assert isinstance(bad, Failed)
    assert isinstance(bad.error, ValueError)
