"""What a worker costs the server: next to nothing while idle, one round trip for a batch, always by an index."""

import asyncio
import re
import threading
from typing import Any

import psycopg
import pytest

import everstep
from everstep.stores.postgres import PostgresStore, transaction
from everstep.stores.postgres.connections import PLANS_OF_WRITER
from everstep.stores.postgres.direct import Direct
from everstep.stores.postgres.queries import statements
from everstep.stores.protocol import Accepted, Claim, Claimed, Existing, NotClaimed, RunFilter, StartRun
from tests.stores.kit import PostgresHarness, append_to, new_run

SECONDS = 6.0


class Counter:
    """Counts statements, and round trips outside of pipelines."""

    def __init__(self, patch: pytest.MonkeyPatch, *, watchers: bool = True) -> None:
        self._watchers = watchers
        self.statements: list[str] = []
        self.round_trips = 0
        execute, pipeline = psycopg.Connection.execute, psycopg.Connection.pipeline

        def counting(connection: Any, query: Any, *args: Any, **options: Any) -> Any:
            if threading.current_thread().name == "everstep-watcher" and not self._watchers:
                return execute(connection, query, *args, **options)
            self.statements.append(str(query))
            self.round_trips += connection.pgconn.pipeline_status == 0
            return execute(connection, query, *args, **options)

        def one_more(connection: Any) -> Any:
            self.round_trips += 1
            return pipeline(connection)

        changed = Direct.changed

        def directly(statement: Direct, *args: Any) -> int:
            self.statements.append("direct")
            self.round_trips += 1
            return changed(statement, *args)

        together = transaction.done_together

        def together_directly(connection: Any, asked: Any) -> Any:
            self.statements += ["direct"] * len(asked)
            self.round_trips += 1
            return together(connection, asked)

        patch.setattr(transaction, "done_together", together_directly)
        patch.setattr(Direct, "changed", directly)
        patch.setattr(psycopg.Connection, "execute", counting)
        patch.setattr(psycopg.Connection, "pipeline", one_more)

    def clear(self) -> None:
        self.statements.clear()
        self.round_trips = 0


async def test_an_idle_worker_sends_fewer_than_two_statements_a_second(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with everstep.open(url, recover=True) as app, everstep.open(url, recover=True):
        await app.run(journey_of_none, id="j")
        await asyncio.sleep(1.5)
        counter = Counter(monkeypatch)
        await asyncio.sleep(SECONDS)
        assert len(counter.statements) < 2 * 2 * SECONDS, "of two workers"
        assert counter.statements, "they look whether the other one lives"


@everstep.workflow
async def journey_of_none() -> None:
    """Do nothing."""


def test_a_batch_of_appends_and_starts_is_one_round_trip(
    postgres: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [postgres.start(f"r{number}", status="running") for number in range(20)]
    batch = [
        *map(append_to, rows[:18]),
        *(append_to(row, status="completed", payloads=[("p", b"1")]) for row in rows[18:]),
    ]
    counter = Counter(monkeypatch, watchers=False)
    assert postgres.do(*batch, StartRun(new_run("new"))) == [Accepted()] * 21
    assert counter.round_trips == 1
    append = append_to(postgres.row("r0"))
    counter.clear()
    assert postgres.one(append) == Accepted()
    assert (len(counter.statements), counter.round_trips) == (1, 1)


def test_claims_of_many_runs_are_one_round_trip_also_those_that_fail(
    postgres: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [postgres.start(f"r{number}", status="running") for number in range(20)]
    postgres.store.register_worker("other", 1, "host", 10**18)
    postgres.store.register_worker("w", 2, "host", 10**18)
    assert isinstance(postgres.one(Claim("r3", "other", 5, ("running",))), Claimed)
    claims = [Claim(row.id, "w", 5 + place, ("running", "queued"), True) for place, row in enumerate(rows)]
    counter = Counter(monkeypatch, watchers=False)
    verdicts = postgres.do(*claims)
    assert counter.round_trips == 1
    taken = [verdict.row for verdict in verdicts if isinstance(verdict, Claimed)]
    assert [(row.id, row.owner, row.epoch) for row in taken] == [
        (row.id, "w", row.epoch + 1) for row in rows if row.id != "r3"
    ]
    assert isinstance(verdicts[3], NotClaimed)
    assert verdicts[3].row is not None
    assert verdicts[3].row.owner == "other"


def test_starts_of_runs_that_exist_are_two_round_trips(
    postgres: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(0, 20, 2):
        postgres.start(f"r{number}", status="running")
    counter = Counter(monkeypatch, watchers=False)
    verdicts = postgres.do(*(StartRun(new_run(f"r{number}")) for number in range(20)))
    assert counter.round_trips == 2
    assert verdicts[1::2] == [Accepted()] * 10
    assert [one.row.id for one in verdicts if isinstance(one, Existing)] == [f"r{number}" for number in range(0, 20, 2)]


MAY_SCAN = re.compile(r"Seq Scan on (workers|meta|waiters|deletions)")
BY_INDEX = (
    "append_simple",
    "append_one",
    "claim_simple",
    "events_of_claimed",
    "inboxes",
    "rows_of_runs",
    "due",
    "next_wake",
    "owned_among",
    "lock_runs",
    "events",
    "inbox",
)


@pytest.mark.parametrize("name", BY_INDEX)
def test_what_is_asked_all_the_time_is_found_by_an_index_however_old_the_plan(
    postgres: PostgresHarness, name: str
) -> None:
    """The plan is made while the tables are empty, and for any parameters, as that of a prepared statement."""
    text = statements(postgres.schema)[name]
    kinds = _parameter_kinds(postgres, text)
    with psycopg.connect(
        postgres.server.uri, autocommit=True, options=f"{PLANS_OF_WRITER} -c plan_cache_mode=force_generic_plan"
    ) as connection:
        connection.execute(f"PREPARE asked ({', '.join(kinds)}) AS {text}")
        nothing = ", ".join(["NULL"] * len(kinds))
        plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN EXECUTE asked ({nothing})").fetchall())
    scanned = [line for line in re.findall(r"Seq Scan on \w+", plan) if not MAY_SCAN.match(line)]
    assert not scanned, plan
    assert not (name == "append_simple" and "hashed" in plan), "it reads what concerns nobody in the batch"
    whole = [line for line in plan.split("\n") if re.search(r"using (runs|events|signals)_pkey", line)]
    assert all("Index Cond" in plan.split(line)[1].split("\n")[1] for line in whole), plan


def _parameter_kinds(postgres: PostgresHarness, text: str) -> list[str]:
    """Return the types that the server finds for a statement's parameters."""
    with psycopg.connect(postgres.server.uri, autocommit=True) as connection:
        connection.execute(f"PREPARE kinds AS {text}")
        found = connection.execute("SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'kinds'")
        kinds: list[str] = found.fetchall()[0][0]
    return kinds


PLANS_MADE = """
    SELECT sum(generic_plans)::int, sum(custom_plans)::int FROM pg_prepared_statements
    WHERE position($1 IN statement) > 0
"""


@pytest.mark.parametrize(("name", "plans"), [("due", (4, 0)), ("runs", (0, 4))])
def test_a_worker_asks_by_one_plan_and_a_person_by_one_for_each_question(
    postgres: PostgresHarness, name: str, plans: tuple[int, int]
) -> None:
    store = PostgresStore(postgres.server.url(postgres.schema))
    for _ in range(4):
        if name == "due":
            store.due(at=1, workflows=["w"], worker="me", everyone=True, limit=5)
        else:
            store.runs(RunFilter(parent="p"))
    text = statements(postgres.schema)[name]
    made = store._reader.ask(lambda asked: asked.connection.execute(PLANS_MADE, [text]).fetchall())
    store.close()
    assert made == [plans]


def test_every_statement_is_one_that_the_server_understands(postgres: PostgresHarness) -> None:
    with psycopg.connect(postgres.server.uri, autocommit=True) as connection:
        for name, text in statements(postgres.schema).items():
            if text.startswith(("LOCK", "CREATE", "SET")):
                continue
            try:
                connection.execute(f"PREPARE {name} AS {text}")
            except psycopg.errors.IndeterminateDatatype:
                pass  # a parameter without a context, which always comes with its type


def test_large_columns_are_not_compressed_by_the_server(postgres: PostgresHarness) -> None:
    asked = """
        SELECT relname || '.' || attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
        WHERE relnamespace = %s::regnamespace AND relkind = 'r' AND atttypid = 'bytea'::regtype AND attstorage <> 'e'
    """
    compressed = {name for (name,) in postgres.server.ask(asked, postgres.schema)}
    small = {"runs.head_digest", "runs.budget", "events.digest", "checkpoints.previous", "checkpoints.digest"}
    small |= {"streams.digest", "saved_states.digest", "saved_parts.digest", "saved_writes.digest"}
    plain = {"holds.report", "archive.row", "everstep_markers.outcome", "saved_states.body", "saved_items.value"}
    assert compressed == small | plain, "the rest is compressed by us, if that is worth it"
