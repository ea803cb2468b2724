"""Schedules and clients on PostgreSQL: of several workers one starts a tick, and a client needs no code."""

import asyncio
from contextlib import AsyncExitStack, suppress

import psycopg
import pytest

import everstep
from everstep import workflow
from everstep.errors import Misuse
from tests.postgres.server import server


@workflow
async def tick() -> str:
    return everstep.current().run


async def test_of_several_workers_one_starts_a_tick(url: str) -> None:
    async with AsyncExitStack() as stack:
        apps = [await stack.enter_async_context(everstep.open(url, recover=True)) for _ in range(3)]
        schedule = await apps[0].schedule(tick, name="s", every=1, overlap="allow", catch_up="all")
        while (await schedule.show()).fired < 3:
            await asyncio.sleep(0.05)
        await schedule.pause()
        facts = await schedule.show()
        rows = await apps[1].list(tags={"schedule": "s"}, limit=1000)
        assert len(rows) == facts.fired
        assert facts.missed == 0
        for row in rows:
            assert await apps[2].get(row.id).result(timeout=60) == row.id


async def test_a_client_starts_a_run_by_name(url: str) -> None:
    async with everstep.open(url, recover=True), everstep.connect(url) as client:
        run = await client.start("tick", id="t")
        assert await run.result(timeout=60) == "t"
        with pytest.raises(Misuse, match=r"psycopg\.Connection"):
            await client.start("tick", transaction=object())


async def test_a_run_that_is_started_in_a_transaction_is_there_if_and_only_if_that_is_committed(url: str) -> None:
    async with everstep.open(url, recover=True) as app:
        with psycopg.connect(server().uri) as connection:
            connection.execute("CREATE TEMPORARY TABLE orders (id text PRIMARY KEY)")
            connection.commit()
            with suppress(LookupError), connection.transaction():
                connection.execute("INSERT INTO orders VALUES ('lost')")
                await app.start(tick, id="lost", transaction=connection)
                raise LookupError
            with connection.transaction():
                connection.execute("INSERT INTO orders VALUES ('kept')")
                await app.start(tick, id="kept", transaction=connection)
                assert await app.list() == []
            kept = connection.execute("SELECT id FROM orders").fetchall()
        assert kept == [("kept",)]
        assert await app.get("kept").result(timeout=60) == "kept"
        assert [row.id for row in await app.list()] == ["kept"]


async def test_a_connection_to_another_database_is_refused(url: str) -> None:
    async with everstep.open(url) as app:
        with psycopg.connect(server().uri, dbname="template1") as connection, connection.transaction():
            with pytest.raises(Misuse, match="to another"):
                await app.start(tick, id="t", transaction=connection)
            assert connection.execute("SELECT 1").fetchone() == (1,)  # it goes on as it was
        assert await app.list() == []
