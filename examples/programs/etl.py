"""ETL: read many files at once, clean what they say, and load each of them into a warehouse in one transaction."""

import asyncio
import sqlite3

import everstep
from everstep import step, workflow

FILES = 12


@step(effect="read", retry=everstep.Retry(attempts=3, first=0.01))
async def extract(number: int) -> list[str]:
    await asyncio.sleep(0.02)
    if everstep.current().attempt == 1 and number % 5 == 0:
        raise ConnectionError("the source did not answer")
    return [f" {number}-{line}; {line * number} " for line in range(20)]


def clean(lines: list[str]) -> list[tuple[str, int]]:
    parts = (line.strip().split("; ") for line in lines)
    return [(name, int(amount)) for name, amount in parts]


@everstep.transaction("sqlite:///warehouse.db")
def load(warehouse: sqlite3.Connection, rows: list[tuple[str, int]]) -> int:
    warehouse.execute("create table if not exists sales (name, amount)")  # no key: only the transaction protects it
    warehouse.executemany("insert into sales values (?, ?)", rows)
    return len(rows)


@workflow
async def etl() -> int:
    async def one(number: int) -> int:
        async with at_once:
            rows = clean(await extract(number))
            return await asyncio.to_thread(load, rows)

    at_once = asyncio.Semaphore(4)
    return sum(await asyncio.gather(*(one(number) for number in range(FILES))))


if __name__ == "__main__":
    print(everstep.run(etl, id="etl-1"))
