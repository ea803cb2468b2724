"""DBOS on SQLite or PostgreSQL, with its own defaults."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dbos import DBOS, DBOSConfig
from measuring import (
    AT_A_TIME,
    LARGE_BYTES,
    LARGE_STEPS,
    RUN_STEPS,
    RUNS,
    STEPS,
    Figures,
    ManyRuns,
    Stopwatch,
    expect,
    large_texts,
    main,
)
from place import POSTGRES, SETTINGS, Weight, ask, settings_text, url_of
from with_sqlite import durability_text


@DBOS.step()
def act(x: int) -> int:
    return x + 1


@DBOS.step()
async def act_async(x: int) -> int:
    return x + 1


@DBOS.workflow()
def acting(steps: int) -> int:
    x = 0
    for _ in range(steps):
        x = act(x)
    return x


@DBOS.workflow()
async def acting_async(steps: int) -> int:
    x = 0
    for _ in range(steps):
        x = await act_async(x)
    return x


@contextmanager
def launched(folder: Path) -> Iterator[None]:
    """Open DBOS in its place. Only the log is quieter than by default, which costs it nothing."""
    DBOS(config=configuration(folder))
    DBOS.launch()
    try:
        yield
    finally:
        DBOS.destroy()


def configuration(folder: Path) -> DBOSConfig:
    """Return a configuration without any choice but the place."""
    logging.getLogger("dbos").setLevel(logging.ERROR)
    return {"name": "bench", "system_database_url": url_of(folder, "dbos"), "log_level": "ERROR"}


def settings() -> str:
    """Return what decides about durability, asked of a connection from DBOS's own pool."""
    import dbos._dbos

    with dbos._dbos._get_dbos_instance()._sys_db.engine.connect() as connection:
        if POSTGRES:
            return settings_text(*connection.exec_driver_sql(SETTINGS).one())
        journal_mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        synchronous = connection.exec_driver_sql("PRAGMA synchronous").scalar()
    return durability_text(journal_mode, synchronous, sqlite3.sqlite_version)


def outcomes(folder: Path) -> int:
    """Return how many steps' outcomes a second connection sees."""
    return int(ask(folder, "dbos", f"SELECT count(*) FROM {'dbos.' if POSTGRES else ''}operation_outputs")[0])


# -- W1 ----------------------------------------------------------------------------------------------------------------
def one_long_run(folder: Path) -> Figures:
    with launched(folder):
        acting(10)
        weight = Weight(folder)
        with Stopwatch() as watch:
            result = acting(STEPS)
        expect((result, outcomes(folder)), (STEPS, STEPS + 10), "the result, and the outcomes in the database")
        found = {**watch.rate(STEPS), "settings": settings()}
    return {**found, **weight.figures(STEPS, 10)}


def one_long_run_with_wal(folder: Path) -> Figures:
    """The same on a file that somebody has switched to write-ahead logging: a setting that stays with the file."""
    connection = sqlite3.connect(folder / "dbos.db")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    return one_long_run(folder)


async def one_long_run_async(folder: Path) -> Figures:
    with launched(folder):
        await acting_async(10)
        with Stopwatch() as watch:
            result = await acting_async(STEPS)
        expect((result, outcomes(folder)), (STEPS, STEPS + 10), "the result, and the outcomes in the database")
        return {**watch.rate(STEPS), "settings": settings()}


# -- W2 ----------------------------------------------------------------------------------------------------------------
def many_short_runs(folder: Path) -> Figures:
    with launched(folder), ThreadPoolExecutor(AT_A_TIME) as pool:
        acting(10)
        runs = ManyRuns()
        with Stopwatch() as watch:
            for result in pool.map(lambda _: acting(RUN_STEPS) if runs.may_begin() else None, range(RUNS)):
                if result is not None:
                    runs.count(result)
        expect(outcomes(folder), runs.done * RUN_STEPS + 10, "the outcomes in the database")
        return runs.figures(watch)


async def many_short_runs_async(folder: Path) -> Figures:
    with launched(folder):
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one() -> None:
            async with gate:
                if runs.may_begin():
                    runs.count(await acting_async(RUN_STEPS))

        await acting_async(10)
        runs = ManyRuns()
        with Stopwatch() as watch:
            await asyncio.gather(*(one() for _ in range(RUNS)))
        expect(outcomes(folder), runs.done * RUN_STEPS + 10, "the outcomes in the database")
        return runs.figures(watch)


# -- W3 ----------------------------------------------------------------------------------------------------------------
TEXTS: list[str] = []


@DBOS.step()
def write(number: int) -> str:
    return TEXTS[number]


@DBOS.step()
async def write_async(number: int) -> str:
    return TEXTS[number]


@DBOS.workflow()
def writing(steps: int) -> int:
    return sum(len(write(number)) for number in range(steps))


@DBOS.workflow()
async def writing_async(steps: int) -> int:
    return sum([len(await write_async(number)) for number in range(steps)])


def large_results(folder: Path) -> Figures:
    TEXTS.extend(large_texts())
    with launched(folder):
        writing(2)
        weight = Weight(folder)
        with Stopwatch() as watch:
            result = writing(LARGE_STEPS)
        expect((result, outcomes(folder)), (LARGE_STEPS * LARGE_BYTES, LARGE_STEPS + 2), "the result and the outcomes")
    return {**watch.rate(LARGE_STEPS), **weight.figures(LARGE_STEPS, 2)}


async def large_results_async(folder: Path) -> Figures:
    TEXTS.extend(large_texts())
    with launched(folder):
        await writing_async(2)
        with Stopwatch() as watch:
            result = await writing_async(LARGE_STEPS)
        expect((result, outcomes(folder)), (LARGE_STEPS * LARGE_BYTES, LARGE_STEPS + 2), "the result and the outcomes")
    return watch.rate(LARGE_STEPS)


def on_a_loop(measurement: Callable[[Path], Any]) -> Callable[[Path], Figures]:
    return lambda folder: asyncio.run(measurement(folder))


if __name__ == "__main__":
    main(
        {
            "w1-def": one_long_run,
            "w1-def-wal": one_long_run_with_wal,
            "w1-async": on_a_loop(one_long_run_async),
            "w2-def": many_short_runs,
            "w2-async": on_a_loop(many_short_runs_async),
            "w3-def": large_results,
            "w3-async": on_a_loop(large_results_async),
        }
    )
