"""Scheduled jobs: a report at every tick, by a program that is always running, and is now and then killed."""

import asyncio
import sqlite3

import everstep
from everstep import step, workflow

REPORTS = 5


@step
async def send(tick: str) -> str:
    with sqlite3.connect("outside.db", timeout=30) as outside:
        outside.execute("create table if not exists sent (tick, key primary key)")
        outside.execute("insert or ignore into sent values (?, ?)", (tick, everstep.key()))
    return tick


@workflow
async def job() -> str:
    await asyncio.sleep(0.05)
    return await send(everstep.current().run)


async def main() -> None:
    async with everstep.open(recover=True) as app:
        await app.schedule(job, name="report", every=1)
        while len(await app.list(status="completed", workflow="job")) < REPORTS:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main())
    print("done")
