"""Runs that a schedule, a light client or a caller's transaction starts wait in their queues, as all others."""

import asyncio
from pathlib import Path

import pytest

import everstep
from everstep import workflow
from everstep.errors import Misuse
from tests.schedules.kit import Place, until
from tests.waiting import open_raw

HOUR = 3600


@workflow
async def stay() -> str:
    """Goes on until it is told to end."""
    return await everstep.receive("end", str)


@workflow(queue="lane")
async def pass_by() -> None:
    await asyncio.sleep(0)


async def test_runs_of_a_schedule_begin_when_their_queue_has_room() -> None:
    place = Place()
    async with place.worker() as app:
        await app.queue("lane", concurrency=1)
        await app.schedule(stay, every=HOUR, overlap="allow", queue="lane")
        for _ in range(3):
            await place.move(app, HOUR)
        first, second, third = place.runs()
        await until(lambda: place.status(first) == "waiting")
        assert [place.status(run) for run in (second, third)] == ["queued", "queued"]
        await app.signal(first, "end", "now")
        await until(lambda: place.status(first) == "completed")
        await until(lambda: place.status(second) == "waiting")
        assert place.status(third) == "queued"


async def test_what_a_client_or_a_transaction_starts_waits_in_the_queue(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    async with everstep.open(url, recover=True) as app:
        await app.queue("lane", paused=True)
        connection = open_raw(tmp_path / "runs.db")
        with connection:
            await app.start(pass_by, id="t", transaction=connection)
        async with everstep.connect(url) as client:
            await client.start("pass_by", id="c", queue="lane")
        await asyncio.sleep(0.6)
        (count,) = app.store.queue_counts()
        assert (count.name, count.waiting, count.begun) == ("lane", 2, 0)
        await app.queue("lane", paused=False)
        for run in ("t", "c"):
            await app.get(run).result(timeout=60)


async def test_a_queue_that_cannot_be_one_is_said_by_everybody_who_starts_runs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    async with everstep.open(url) as app, everstep.connect(url) as client:
        with pytest.raises(Misuse, match="queue"):
            await app.schedule(stay, every=HOUR, queue="two words")
        with pytest.raises(Misuse, match="queue"):
            await client.start("stay", queue="two words")
        connection = open_raw(tmp_path / "runs.db")
        with connection, pytest.raises(Misuse, match="queue"):
            await app.start(stay, transaction=connection, queue="two words")
