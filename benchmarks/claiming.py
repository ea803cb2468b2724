"""What it takes to find and claim a run on PostgreSQL, however many finished ones lie beside it; and a worker at rest.

`claiming.py fill-100000 FOLDER` puts finished runs into the store until there are so many; `claiming.py claim FOLDER`
measures in the stores that BENCH_CLAIMS names; `claiming.py idle FOLDER` is a worker that has nothing to do.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
from measuring import Figures, expect, main
from place import POSTGRES, ask
from plan_postgres import FINISHED

import everstep
from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import Claim, Claimed

CLAIMS = 400
CLAIMS_BEFORE = 20
"""So many are not measured: until then plans are made, and pages are read for the first time."""
STARTS = 60
IDLE_SECONDS = 29.0
STATUSES = ("queued", "running", "waiting")

RUNS = """
INSERT INTO everstep.runs
SELECT md5(number::text), 'moving', '', 1, 'completed', 1, 2, decode(md5(number::text), 'hex'), 1, NULL, NULL,
    'default', 0, '{}', NULL, '[]', 'move', 0, 1700000000000000 + number, 1700000000000000 + number,
    1700000000000000 + number, '', NULL, '\\x5b5d', NULL
FROM generate_series(%s::bigint, %s::bigint) AS number
"""
EVENTS = """
INSERT INTO everstep.events
SELECT md5(number::text), 1, seq, CASE seq WHEN 1 THEN 'run_started' ELSE 'run_completed' END, '', 1700000000000000,
    '\\x7b7d', decode(md5(number::text), 'hex')
FROM generate_series(%s::bigint, %s::bigint) AS number, generate_series(1, 2) AS seq
"""
BODIES: dict[str, asyncio.Event] = {}
BEGUN_AT: dict[str, float] = {}


@everstep.step
async def move(name: str) -> None:
    BEGUN_AT[name] = time.perf_counter()
    BODIES[name].set()


@everstep.workflow
async def moving(name: str) -> None:
    await move(name)


def fill(folder: Path, count: int) -> Figures:
    """Put finished runs into the store until there are so many."""
    PostgresStore(POSTGRES).close()
    began = time.perf_counter()
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        there = connection.execute("SELECT count(*) FROM everstep.runs WHERE status = 'completed'").fetchone()
        first = (there[0] if there else 0) + 1
        connection.execute(RUNS, (first, count))
        connection.execute(EVENTS, (first, count))
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
    return {"seconds": time.perf_counter() - began}


async def claim(folder: Path) -> Figures:
    """Claim runs in several stores by turns; then start runs for a worker of each, and wait for their bodies."""
    stores = os.environ["BENCH_CLAIMS"].split()
    return {"claim_seconds": await claims_in(stores), "body_seconds": [await seconds_to_bodies(url) for url in stores]}


async def claims_in(stores: Sequence[str]) -> list[float]:
    """Return the median, for each store, of the seconds from the question what is due until the claim is durable.

    They take turns claim by claim, and who is first changes: whatever else the machine does, it does to all of them.
    """
    async with AsyncExitStack() as open_ones:
        claiming = [Claiming(url, await open_ones.enter_async_context(everstep.connect(url))) for url in stores]
        for number in range(CLAIMS + CLAIMS_BEFORE):
            first = number % len(claiming)
            for one in claiming[first:] + claiming[:first]:
                await one.claim(number)
        return [statistics.median(one.close()[CLAIMS_BEFORE:]) for one in claiming]


class Claiming:
    """One that finds and claims runs of a store, one at a time."""

    def __init__(self, url: str, client: everstep.Client) -> None:
        self._url = url
        self._client = client
        self._store = PostgresStore(url)
        self._worker = f"claiming-{os.getpid()}"
        self._seconds: list[float] = []
        self._store.register_worker(self._worker, os.getpid(), "here", self._store.now() + 10**9)

    async def claim(self, number: int) -> None:
        name, store = f"claimed-{os.getpid()}-{number}", self._store
        await self._client.start("moving", name, id=name)
        began = time.perf_counter()
        due = store.due(at=store.now(), workflows=["moving"], worker=self._worker, everyone=True, limit=100)
        (verdict,) = store.commit([Claim(due[0], self._worker, store.now(), STATUSES, True)])
        self._seconds.append(time.perf_counter() - began)
        expect((due, type(verdict)), ([name], Claimed), "the run that is due, and the claim")

    def close(self) -> list[float]:
        """Let nobody go on with what was claimed, and return the seconds of all claims."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            ended = "UPDATE everstep.runs SET status = 'cancelled', owner = NULL WHERE owner = %s"
            connection.execute(ended, (self._worker,))
        self._store.leave(self._worker)
        self._store.close()
        return self._seconds


async def seconds_to_bodies(url: str) -> float:
    """Return the median of the seconds from the start of a run, by a client, until a worker's body runs."""
    seconds = []
    async with everstep.connect(url) as client, everstep.open(url, recover=True):
        for number in range(STARTS):
            name = f"started-{os.getpid()}-{number}"
            BODIES[name] = asyncio.Event()
            began = time.perf_counter()
            await client.start("moving", name, id=name)
            await BODIES[name].wait()
            seconds.append(BEGUN_AT[name] - began)
            await client.get(name).result()
    return statistics.median(seconds)


async def idle(folder: Path) -> Figures:
    """Be a worker for a while, and return how many connections it has. Somebody else counts its statements."""
    async with everstep.open(POSTGRES, recover=True):
        (folder / "idle").touch()
        await asyncio.sleep(IDLE_SECONDS)
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        (connections,) = ask(folder, "", query)
        return {"connections": connections}


if __name__ == "__main__":
    main(
        {
            **{f"fill-{count}": lambda folder, count=count: fill(folder, count) for count in FINISHED},  # type: ignore[misc]
            "claim": lambda folder: asyncio.run(claim(folder)),
            "idle": lambda folder: asyncio.run(idle(folder)),
        }
    )
