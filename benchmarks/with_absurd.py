"""Absurd on PostgreSQL, with its own defaults. Its tables are those that `absurdctl init` makes."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
from absurd_sdk import Absurd, AsyncAbsurd
from absurdctl import BUNDLED_SCHEMA_SQL
from measuring import (
    AT_A_TIME,
    LARGE_BYTES,
    LARGE_STEPS,
    RUN_STEPS,
    RUNS,
    STEPS,
    W2_SECONDS_MAX,
    Figures,
    Stopwatch,
    expect,
    large_texts,
    main,
)
from place import POSTGRES, SETTINGS, Weight, ask, looking_into, settings_text

WORKERS = 4
LOOK_SECONDS = 0.02
TEXTS: list[str] = []
COMPLETED = "SELECT count(*) FROM absurd.t_default WHERE state = 'completed'"
OUTCOMES = "SELECT count(*) FROM absurd.c_default"


def act(x: int) -> int:
    return x + 1


async def act_async(x: int) -> int:
    return x + 1


def acting(parameters: dict[str, int], context: Any) -> int:
    x = 0
    for _ in range(parameters["steps"]):
        x = context.step("act", lambda x=x: act(x))
    return x


async def acting_async(parameters: dict[str, int], context: Any) -> int:
    x = 0
    for _ in range(parameters["steps"]):
        x = await context.step("act", lambda x=x: act_async(x))
    return x


def writing(parameters: dict[str, int], context: Any) -> int:
    return sum(len(context.step("write", lambda number=number: TEXTS[number])) for number in range(parameters["steps"]))


def prepared() -> Absurd:
    """Return a client of a new queue."""
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(BUNDLED_SCHEMA_SQL)
    client = connected()
    client.create_queue()
    return client


def connected() -> Absurd:
    """Return a client that knows the workflows."""
    client = Absurd(POSTGRES)
    client.register_task("acting")(acting)
    client.register_task("writing")(writing)
    return client


def settings(client: Absurd) -> str:
    """Return what decides about durability, asked of the client's own connection."""
    return settings_text(*client._conn.execute(SETTINGS).fetchone())  # type: ignore[misc]


def do_now(client: Absurd, name: str, steps: int) -> Any:
    """Spawn one and do it at once, as a worker does that need not wait for its poll."""
    spawned = client.spawn(name, {"steps": steps})
    client.work_batch()
    found = client.fetch_task_result(spawned["task_id"])
    return found.result if found is not None else None


# -- W1 and W3 ---------------------------------------------------------------------------------------------------------
def one_long_run(folder: Path) -> Figures:
    client = prepared()
    do_now(client, "acting", 10)
    weight = Weight(folder)
    with Stopwatch() as watch:
        result = do_now(client, "acting", STEPS)
    expect((result, *ask(folder, "", OUTCOMES)), (STEPS, STEPS + 10), "the result, and the outcomes in the database")
    found = {**watch.rate(STEPS), "settings": settings(client)}
    client.close()
    return {**found, **weight.figures(STEPS, 10)}


async def one_long_run_async(folder: Path) -> Figures:
    prepared().close()
    client = AsyncAbsurd(POSTGRES)
    client.register_task("acting")(acting_async)
    found = None
    for steps in (10, STEPS):
        with Stopwatch() as watch:
            spawned = await client.spawn("acting", {"steps": steps})
            await client.work_batch()
            found = await client.fetch_task_result(spawned["task_id"])
    assert found is not None
    expect((found.result, *ask(folder, "", OUTCOMES)), (STEPS, STEPS + 10), "the result and the outcomes")
    await client.close()
    return watch.rate(STEPS)


def large_results(folder: Path) -> Figures:
    TEXTS.extend(large_texts())
    client = prepared()
    do_now(client, "writing", 2)
    weight = Weight(folder)
    with Stopwatch() as watch:
        result = do_now(client, "writing", LARGE_STEPS)
    expect((result, *ask(folder, "", OUTCOMES)), (LARGE_STEPS * LARGE_BYTES, LARGE_STEPS + 2), "the result")
    client.close()
    return {**watch.rate(LARGE_STEPS), **weight.figures(LARGE_STEPS, 2)}


# -- W2 ----------------------------------------------------------------------------------------------------------------
def one_worker(folder: Path) -> Figures:
    """One worker, a hundred at a time on its threads. All are spawned before the clock starts."""
    client = prepared()
    do_now(client, "acting", 10)
    spawn_all(client)
    worker = connected()
    thread = threading.Thread(target=worker.start_worker, kwargs={"concurrency": AT_A_TIME}, daemon=True)
    with Stopwatch() as watch:
        thread.start()
        done = wait_for_all(folder)
    worker.stop_worker()
    thread.join(20)
    return {**watch.rate(done * RUN_STEPS), "runs": done}


def several_workers(folder: Path) -> Figures:
    """Several workers, each a process that does one after the other. The clock starts when all have begun."""
    client = prepared()
    do_now(client, "acting", 10)
    command = [sys.executable, __file__, "worker", str(folder)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        spawn_all(client)
        (folder / "go").touch()
        with Stopwatch() as watch:
            done = wait_for_all(folder)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return {**watch.rate(done * RUN_STEPS), "runs": done}


def be_worker(folder: Path) -> Figures:
    """One of several workers: it begins when there is a file `go`."""
    client = connected()
    client._conn.execute("SELECT 1")
    print("ready", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.005)
    client.start_worker(batch_size=AT_A_TIME // WORKERS)
    return {}


def spawn_all(client: Absurd) -> None:
    for _ in range(RUNS):
        client.spawn("acting", {"steps": RUN_STEPS})


def wait_for_all(folder: Path) -> int:
    """Wait until all are completed, or the time is over, and return how many are."""
    until = time.perf_counter() + W2_SECONDS_MAX
    with looking_into(folder, "") as first_row:
        while True:
            (done,) = first_row(COMPLETED)
            if done == RUNS + 1 or time.perf_counter() > until:
                return int(done) - 1
            time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(
        {
            "w1-def": one_long_run,
            "w1-async": lambda folder: asyncio.run(one_long_run_async(folder)),
            "w2-one": one_worker,
            "w2-several": several_workers,
            "w3-def": large_results,
            "worker": be_worker,
        }
    )
