"""What it takes to find and claim a run on PostgreSQL, however many finished ones lie beside it; and a worker at rest.

`claiming.py fill-100000 FOLDER` puts finished runs into the store until there are so many; `claiming.py claim FOLDER`
measures; `claiming.py idle FOLDER` is a worker that has nothing to do.
"""

import asyncio
import os
import statistics
import time
from pathlib import Path

import psycopg
from measuring import Figures, expect, main
from place import POSTGRES, ask
from plan_postgres import FINISHED

import everstep
from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import Claim, Claimed

CLAIMS = 200
STARTS = 100
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
    """Find and claim runs one at a time; then start runs for a worker, and wait for their bodies."""
    async with everstep.connect(POSTGRES) as client:
        found = await claims_of(client)
        async with everstep.open(POSTGRES, recover=True):
            seconds = []
            for number in range(STARTS):
                name = f"started-{os.getpid()}-{number}"
                BODIES[name] = asyncio.Event()
                began = time.perf_counter()
                await client.start("moving", name, id=name)
                await BODIES[name].wait()
                seconds.append(BEGUN_AT[name] - began)
                await client.get(name).result()
        return {"claim_seconds": found, "body_seconds": statistics.median(seconds)}


async def claims_of(client: everstep.Client) -> float:
    """Return the median of the seconds from the question what is due until the claim is durable."""
    store = PostgresStore(POSTGRES)
    worker = f"claiming-{os.getpid()}"
    store.register_worker(worker, os.getpid(), "here", store.now() + 10**9)
    seconds = []
    for number in range(CLAIMS):
        name = f"claimed-{os.getpid()}-{number}"
        await client.start("moving", name, id=name)
        began = time.perf_counter()
        due = store.due(at=store.now(), workflows=["moving"], worker=worker, everyone=True, limit=100)
        (verdict,) = store.commit([Claim(due[0], worker, store.now(), STATUSES, True)])
        seconds.append(time.perf_counter() - began)
        expect((due, type(verdict)), ([name], Claimed), "the run that is due, and the claim")
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute("UPDATE everstep.runs SET status = 'cancelled', owner = NULL WHERE owner = %s", (worker,))
    store.leave(worker)
    store.close()
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
