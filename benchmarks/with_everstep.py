"""Everstep: SQLite or PostgreSQL, `durability="power"`, which is its default."""

import asyncio
import itertools
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import (
    AT_A_TIME,
    HISTORY_STEPS,
    LARGE_BYTES,
    LARGE_STEPS,
    RUN_STEPS,
    RUNS,
    STEPS,
    TURN_BYTES,
    TURNS,
    Failed,
    Figures,
    Stopwatch,
    bytes_in,
    expect,
    large_texts,
    main,
)
from place import POSTGRES, SETTINGS, Weight, ask, looking_into, process_seconds, server_seconds, settings_text, url_of
from with_sqlite import durability_text, percentiles

import everstep
from everstep import step, workflow

SCHEMA = "everstep." if POSTGRES else ""
LOOK_SECONDS = 0.02
BODIES_AT: list[float] = []
"""When bodies ran: the time between two is what a sequential step takes."""


@step
async def act(x: int) -> int:
    BODIES_AT.append(time.perf_counter())
    return x + 1


@step
def act_plainly(x: int) -> int:
    return x + 1


@step(effect="read")
async def look(x: int) -> int:
    return x + 1


@workflow
async def acting(steps: int) -> int:
    x = 0
    for _ in range(steps):
        x = await act(x)
    return x


@workflow
def acting_plainly(steps: int) -> int:
    x = 0
    for _ in range(steps):
        x = act_plainly(x)
    return x


@workflow
async def looking(steps: int) -> int:
    x = 0
    for _ in range(steps):
        x = await look(x)
    return x


# -- W1 ----------------------------------------------------------------------------------------------------------------
async def one_long_run(flow: Any, folder: Path) -> Figures:
    """One run of many sequential steps. Its result is given when its end, and so all before it, is durable."""
    async with everstep.open(url_of(folder, "everstep")) as app:
        await app.run(flow, 10)
        BODIES_AT.clear()
        weight, server = Weight(folder), server_cpu(app)
        with Stopwatch() as watch:
            result = await app.run(flow, STEPS, id="measured")
        server = server_cpu(app) - server
        written = what_is_durable(folder, "measured")
        expect(result, STEPS, "the result")
        expect(written, ("completed", STEPS, STEPS), "what a second connection sees once the clock has stopped")
        between = [later - earlier for earlier, later in itertools.pairwise(BODIES_AT)]
        latency = percentiles(between) if between else {}
        found = {**watch.rate(STEPS), **latency, "settings": settings(app), **server_figures(server, STEPS)}
    return {**found, **weight.figures(STEPS, 10)}


def what_is_durable(folder: Path, run: str) -> tuple[Any, ...]:
    """Ask the store on another connection: the run's status, its steps begun and its outcomes."""
    count = f"(SELECT count(*) FROM {SCHEMA}events WHERE run = ? AND kind = '{{}}')"
    columns = f"status, {count.format('step_started')}, {count.format('step_completed')}"
    return ask(folder, "everstep", f"SELECT {columns} FROM {SCHEMA}runs WHERE id = ?", run, run, run)


def settings(app: Any) -> str:
    """Return what decides about durability, asked of the connection that writes."""
    if POSTGRES:
        return settings_text(*app.store._writer._connection.execute(SETTINGS).fetchone())
    import apsw

    writing = app.store._writer.connection
    return durability_text(writing.pragma("journal_mode"), writing.pragma("synchronous"), apsw.sqlite_lib_version())


def server_cpu(app: Any) -> float:
    """Return the CPU time that PostgreSQL has used for the connection that writes."""
    return server_seconds(app.store._writer._connection) if POSTGRES else 0.0


def server_figures(seconds: float, steps: int) -> Figures:
    return {"server_microseconds": 1e6 * seconds / steps} if seconds else {}


# -- W2 ----------------------------------------------------------------------------------------------------------------
async def many_short_runs(flow: Any, folder: Path) -> Figures:
    """Many runs of a few steps, a hundred at a time."""
    async with everstep.open(url_of(folder, "everstep")) as app:
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one(number: int) -> None:
            async with gate:
                expect(await app.run(flow, RUN_STEPS, id=f"run-{number}"), RUN_STEPS, "the result")

        await app.run(flow, 10)
        commits, server = app.committer.commits, server_cpu(app)
        with Stopwatch() as watch:
            await asyncio.gather(*(one(number) for number in range(RUNS)))
        expect(ended(folder), (RUNS + 1, RUNS * RUN_STEPS + 10), "runs and outcomes in the store")
        found = server_figures(server_cpu(app) - server, RUNS * RUN_STEPS)
        return {**watch.rate(RUNS * RUN_STEPS), "commits": app.committer.commits - commits, **found}


def ended(folder: Path) -> tuple[Any, ...]:
    """Return how many runs are completed and how many outcomes recorded, as another connection sees it."""
    outcomes = f"(SELECT count(*) FROM {SCHEMA}events WHERE kind = 'step_completed')"
    return ask(folder, "everstep", f"SELECT count(*), {outcomes} FROM {SCHEMA}runs WHERE status = 'completed'")


# -- W2, by workers ---------------------------------------------------------------------------------------------------
async def by_workers(folder: Path, count: int) -> Figures:
    """The same runs, started before the clock, and done by so many worker processes."""
    async with everstep.open(url_of(folder, "everstep")) as app:
        await app.run(acting, 10)
    command = [sys.executable, __file__, "worker", str(folder)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        async with everstep.connect(url_of(folder, "everstep")) as client:
            await asyncio.gather(*(client.start("acting", RUN_STEPS, id=f"run-{number}") for number in range(RUNS)))
        completed = f"SELECT count(*) FROM {SCHEMA}runs WHERE status = 'completed'"
        before = sum(process_seconds(worker.pid) for worker in workers)
        with looking_into(folder, "everstep") as first_row, Stopwatch() as watch:
            (folder / "go").touch()
            while (done := first_row(completed)[0]) < RUNS + 1:
                if worker_ended := [worker for worker in workers if worker.poll() is not None]:
                    raise Failed(f"{len(worker_ended)} workers have ended; {done} runs are done")
                await asyncio.sleep(LOOK_SECONDS)
        watch.cpu_seconds = sum(process_seconds(worker.pid) for worker in workers) - before
        server = sum(server_cpu_for(folder, worker.pid) for worker in workers)
        expect(ended(folder), (RUNS + 1, RUNS * RUN_STEPS + 10), "runs and outcomes in the store")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return {**watch.rate(RUNS * RUN_STEPS), **server_figures(server, RUNS * RUN_STEPS)}


def server_cpu_for(folder: Path, pid: int) -> float:
    """Return the CPU time that PostgreSQL has used for the connections of a worker."""
    if not POSTGRES:
        return 0.0
    query = "SELECT array_agg(pid) FROM pg_stat_activity WHERE starts_with(application_name, ?)"
    (backends,) = ask(folder, "everstep", query, f"everstep {pid} ")
    return sum(map(process_seconds, backends or ()))


async def be_worker(folder: Path) -> Figures:
    """One of these workers: it begins when there is a file `go`. By then it has loaded all that a worker needs."""
    async with everstep.open(url_of(folder, "everstep"), recover=True):
        pass
    print("ready", flush=True)
    while not (folder / "go").exists():
        await asyncio.sleep(0.005)
    async with everstep.open(url_of(folder, "everstep"), recover=True):
        await asyncio.Event().wait()
    return {}


# -- W3 ----------------------------------------------------------------------------------------------------------------
TEXTS: list[str] = []


@step
async def write(number: int) -> str:
    return TEXTS[number]


@workflow
async def writing(steps: int) -> int:
    return sum([len(await write(number)) for number in range(steps)])


async def large_results(folder: Path) -> Figures:
    """One run whose steps return large texts."""
    TEXTS.extend(large_texts())
    async with everstep.open(url_of(folder, "everstep")) as app:
        await app.run(writing, 2)
        weight = Weight(folder)
        with Stopwatch() as watch:
            result = await app.run(writing, LARGE_STEPS, id="measured")
        expect(result, LARGE_STEPS * LARGE_BYTES, "the length of all results")
        expect(what_is_durable(folder, "measured"), ("completed", LARGE_STEPS, LARGE_STEPS), "what is durable")
    return {**watch.rate(LARGE_STEPS), **weight.figures(LARGE_STEPS, 2)}


# -- a conversation ----------------------------------------------------------------------------------------------------
@step
async def answer(conversation: list[str]) -> str:
    """Stands for a model: it is given the whole conversation and adds to it. What it says can hardly be compressed."""
    return random.Random(len(conversation)).randbytes(TURN_BYTES // 2).hex()


@workflow
async def talking(turns: int) -> int:
    conversation: list[str] = []
    for _ in range(turns):
        conversation.append(await answer(conversation))
    return len(conversation)


async def conversation(folder: Path) -> Figures:
    """What a conversation takes on the disk, half of it and all of it."""
    found = {}
    for name, turns in (("half_megabytes", TURNS // 2), ("megabytes", TURNS)):
        place = folder / name
        place.mkdir()
        async with everstep.open(url_of(place, "everstep")) as app:
            expect(await app.run(talking, turns), turns, "the turns")
        found[name] = bytes_in(place) / 1e6
    return found


# -- replay inside one process -----------------------------------------------------------------------------------------
REACHED: list[asyncio.Event] = []


@step(effect="read")
async def last() -> None:
    REACHED[-1].set()
    await asyncio.Event().wait()


@workflow
async def looking_long(steps: int) -> None:
    for x in range(steps):
        await look(x)
    await last()


async def replay(folder: Path) -> Figures:
    """Load, verify and replay a long history, until the next body runs; without starting Python."""
    await until_last_step(folder)
    return (await until_last_step(folder)).rate(HISTORY_STEPS)


async def until_last_step(folder: Path) -> Stopwatch:
    """Start the long run or go on with it until its last step's body runs, and leave it there."""
    REACHED.append(asyncio.Event())
    async with everstep.open(url_of(folder, "everstep")) as app:
        with Stopwatch() as watch:
            await app.start(looking_long, HISTORY_STEPS, id="long")
            await REACHED[-1].wait()
        await app.committer.drained()
    return watch


MEASUREMENTS = {
    "w1-repeat": lambda folder: asyncio.run(one_long_run(acting, folder)),
    "w1-repeat-def": lambda folder: asyncio.run(one_long_run(acting_plainly, folder)),
    "w1-read": lambda folder: asyncio.run(one_long_run(looking, folder)),
    "w2-async": lambda folder: asyncio.run(many_short_runs(acting, folder)),
    "w2-def": lambda folder: asyncio.run(many_short_runs(acting_plainly, folder)),
    "w2-workers-1": lambda folder: asyncio.run(by_workers(folder, 1)),
    "w2-workers-2": lambda folder: asyncio.run(by_workers(folder, 2)),
    "w2-workers-4": lambda folder: asyncio.run(by_workers(folder, 4)),
    "worker": lambda folder: asyncio.run(be_worker(folder)),
    "w3": lambda folder: asyncio.run(large_results(folder)),
    "conversation": lambda folder: asyncio.run(conversation(folder)),
    "replay": lambda folder: asyncio.run(replay(folder)),
}

if __name__ == "__main__":
    main(MEASUREMENTS)
