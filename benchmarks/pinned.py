"""Throughput and latency beside a transaction that pins the past of the database, in rounds, against one without.

    python benchmarks/pinned.py [--rounds 20] [--runs 300] [--probes 20] [--seconds 600]

Three databases of one server have a worker each: in the first nothing is pinned, in the second a reader keeps its
snapshot, in the third a transaction that has written is idle. In each round the three take turns: runs through a queue
with `concurrency=10`, runs that a client starts and the worker takes up, and one such run at a time for the latency. It
ends after so many rounds, or so many seconds. The table is printed, and written to `results/pinned.md`.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from measuring import HERE
from server import Server, started

import everstep

SLOTS = 10
PINS = ("free", "reader", "idle writer")
RESULTS = HERE / "results" / "pinned.md"
SIZES = """
SELECT (SELECT sum(n_dead_tup) FROM pg_stat_user_tables WHERE schemaname = 'everstep'),
    (SELECT sum(pg_table_size(relid)) FROM pg_stat_user_tables WHERE schemaname = 'everstep'),
    (SELECT sum(pg_relation_size(indexrelid)) FROM pg_stat_user_indexes WHERE schemaname = 'everstep')
"""


@everstep.step
async def move(number: int) -> int:
    return number


@everstep.workflow(queue="narrow")
async def queued(number: int) -> int:
    return await move(number)


@everstep.workflow
async def plain(number: int) -> int:
    return await move(number)


class Round(NamedTuple):
    """What one round came to."""

    queued: float
    """Runs a second through the queue."""
    plain: float
    """Runs a second without one."""
    milliseconds: float
    """The median from the start of a run to its result, one at a time."""
    dead: int
    table_bytes: int
    index_bytes: int


class Place:
    """A database with a worker, a client that starts runs, and perhaps a transaction that pins its past."""

    def __init__(self, server: Server, pin: str) -> None:
        self.pin = pin
        self._server = server
        self._database = server.make()
        self._pinning: psycopg.Connection[Any] | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        url = self._server.uri(self._database)
        app = await stack.enter_async_context(everstep.open(url, recover=True))
        await app.queue("narrow", concurrency=SLOTS)
        self._client = await stack.enter_async_context(everstep.connect(url))
        if self.pin != "free":
            self._pinning = stack.enter_context(psycopg.connect(url))
            self._pinning.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self._pinning.execute("SELECT 1" if self.pin == "reader" else "SELECT pg_current_xact_id()")

    async def round(self, runs: int, probes: int) -> Round:
        queued, plain = await self._rate("queued", runs), await self._rate("plain", runs)
        took = [await self._seconds(number) for number in range(probes)]
        dead, table, index = self._server.ask(SIZES, database=self._database)[0]
        return Round(queued, plain, statistics.median(took) * 1000, int(dead), int(table), int(index))

    async def _rate(self, workflow: str, runs: int) -> float:
        began = time.perf_counter()
        handles = await asyncio.gather(*(self._client.start(workflow, number) for number in range(runs)))
        await asyncio.gather(*(handle.result() for handle in handles))
        return runs / (time.perf_counter() - began)

    async def _seconds(self, number: int) -> float:
        began = time.perf_counter()
        await (await self._client.start("plain", number)).result()
        return time.perf_counter() - began


async def measured(rounds: int, runs: int, probes: int, seconds: float) -> dict[str, list[Round]]:
    """Return the rounds of each place. They take turns, and who is first changes."""
    found: dict[str, list[Round]] = {pin: [] for pin in PINS}
    until = time.monotonic() + seconds
    with started() as server:
        async with AsyncExitStack() as stack:
            places = [Place(server, pin) for pin in PINS]
            for place in places:
                await place.open(stack)
            for number in range(rounds):
                first = number % len(places)
                for place in places[first:] + places[:first]:
                    found[place.pin].append(await place.round(runs, probes))
                print(f"round {number + 1}: " + ", ".join(f"{pin} {found[pin][-1].queued:.0f}/s" for pin in PINS))
                if time.monotonic() > until:
                    break
    return found


def table(found: dict[str, list[Round]]) -> str:
    """Return the table of a results page: the first rounds, the last, and the medians of each quarter."""
    lines = ["| | round | queue, runs/s | plain, runs/s | latency, ms | dead rows | tables | indexes |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for pin, rounds in found.items():
        quarter = max(1, len(rounds) // 4)
        for first in range(0, len(rounds), quarter):
            part = rounds[first : first + quarter]
            lines.append(f"| {pin} | {first + 1}–{first + len(part)} | {_cells(part)} |")
    for pin in PINS[1:]:
        shares = [_shares(one, free) for one, free in zip(found[pin], found["free"], strict=True)]
        medians = [f"{statistics.median(column):.2f}" for column in zip(*shares, strict=True)]
        last = shares[-max(1, len(shares) // 4) :]
        ends = [f"{statistics.median(column):.2f}" for column in zip(*last, strict=True)]
        lines.append(f"| {pin} ÷ free | all | {' | '.join(medians)} | | | |")
        lines.append(f"| {pin} ÷ free | last quarter | {' | '.join(ends)} | | | |")
    return "\n".join(lines) + "\n"


def _cells(part: Sequence[Round]) -> str:
    queued, plain, milliseconds, *_ = (statistics.median(column) for column in zip(*part, strict=True))
    last = part[-1]
    sizes = f"{last.dead:,} | {last.table_bytes / 1e6:.1f} MB | {last.index_bytes / 1e6:.1f} MB"
    return f"{queued:.0f} | {plain:.0f} | {milliseconds:.1f} | {sizes}"


def _shares(one: Round, free: Round) -> tuple[float, ...]:
    return one.queued / free.queued, one.plain / free.plain, one.milliseconds / free.milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 20), ("runs", 300), ("probes", 20), ("seconds", 600)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    found = asyncio.run(measured(asked.rounds, asked.runs, asked.probes, asked.seconds))
    command = f"--rounds {asked.rounds} --runs {asked.runs} --probes {asked.probes}"
    page = f"# Beside a transaction that pins the past\n\n`python benchmarks/pinned.py {command}`\n\n{table(found)}"
    asked.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
