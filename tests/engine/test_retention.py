"""`retention=`: what is old enough is deleted in the background, and nothing that anybody still needs."""

import asyncio
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Retention, step, workflow
from everstep.engine.app.app import App
from everstep.engine.process import retention
from everstep.errors import Misuse, UnknownRun
from everstep.testing.clock import FakeClock
from tests.worlds.ledger import DONE


@step(effect="once", key="pay:{name}")
async def pay(name: str) -> str:
    DONE.append(name)
    return f"paid {name}"


@step(effect="read")
async def look(number: int) -> str:
    return "x" * number


@everstep.transaction(everstep.STORE)
async def count(connection: Any, name: str) -> int:
    connection.execute("CREATE TABLE IF NOT EXISTS counted (name TEXT)")
    connection.execute("INSERT INTO counted VALUES (?)", (name,))
    return len(connection.execute("SELECT name FROM counted WHERE name = ?", (name,)).fetchall())


@workflow
async def short(name: str) -> str:
    everstep.publish("name", name)
    return await look(5) + name


@workflow
async def buyer(name: str) -> str:
    return await pay(name)


@workflow
async def patient(name: str, who: str) -> str:
    """It uses another run's outcome, another run's key, a child and the store's own tables, and then waits."""
    other = await everstep.start(short, name, id="other")
    child = await short("child")
    paid = await pay(name)
    counted = await count(who)
    word = await everstep.receive("word", str)
    again = await pay(name)
    return f"{await other.result()} {child} {paid} {again} {counted} {word}"


async def ids(app: App) -> list[str]:
    return sorted(row.id for row in await app.list(limit=1000))


async def passes(app: App, clock: FakeClock, seconds: float) -> None:
    """Let time pass, and whatever becomes due by it."""
    clock.advance(seconds)
    await clock.rest(app)


async def test_runs_go_when_their_time_is_over_with_what_they_published(tmp_path: Path) -> None:
    clock = FakeClock()
    kept = Retention(runs=timedelta(seconds=100), every=10)
    async with everstep.open(str(tmp_path / "a.db"), clock=clock, retention=kept) as app:
        first = await app.start(short, "a", id="a")
        assert await first.result() == "xxxxxa"
        await passes(app, clock, 60)
        await app.run(short, "b", id="b")
        await passes(app, clock, 39)
        assert await ids(app) == ["a", "b"]
        assert await first.published() == {"name": "a"}
        await passes(app, clock, 11)
        assert await ids(app) == ["b"]
        with pytest.raises(UnknownRun):
            await first.published()
        await passes(app, clock, 100)
        assert await ids(app) == []
        assert await app.run(short, "a", id="a") == "xxxxxa"


async def test_without_a_retention_everything_stays(tmp_path: Path) -> None:
    clock = FakeClock()
    async with everstep.open(str(tmp_path / "a.db"), clock=clock) as app:
        await app.run(short, "a", id="a")
        await passes(app, clock, 10 * 365 * 86400)
        assert await ids(app) == ["a"]
        with pytest.raises(Misuse, match="retention"):
            await app.gc()


def test_an_unfinished_run_needs_nothing_of_what_was_deleted(tmp_path: Path) -> None:
    """Its child, its markers and its keys stay, and a run that it was told the end of; a key outlives its run."""

    async def begin() -> None:
        clock = FakeClock()
        async with everstep.open(str(tmp_path / "a.db"), clock=clock, retention=Retention(runs=100, every=10)) as app:
            await app.run(short, "a", id="other")
            await app.run(buyer, "a", id="first")
            await app.start(patient, "a", "ann", id="held")
            await app.start(patient, "a", "bob", id="waiting")
            await clock.rest(app)
            await app.hold("held")
            await clock.rest(app)
            before = await ids(app)
            assert len(before) == 6
            await passes(app, clock, 500)
            assert await ids(app) == [run for run in before if run != "first"]
            assert [row.key for row in await app.effects(run="first")] == ["pay:a"]

    async def go_on() -> None:
        async with everstep.open(str(tmp_path / "a.db"), recover=True) as app:
            run = app.get("waiting")
            await run.signal("word", "now")
            assert await run.result(timeout=60) == "xxxxxa xxxxxchild paid a paid a 1 now"
            assert (await run.verify()).sound

    asyncio.run(begin())
    asyncio.run(go_on())
    assert DONE == ["a"]


async def test_keys_have_a_time_of_their_own(tmp_path: Path) -> None:
    clock = FakeClock()
    kept = Retention(runs=100, keys=1000, every=10)
    async with everstep.open(str(tmp_path / "a.db"), clock=clock, retention=kept) as app:
        await app.run(buyer, "a", id="one")
        await passes(app, clock, 200)
        assert await ids(app) == []
        assert await app.run(buyer, "a", id="two") == "paid a"
        assert DONE == ["a"]  # the key outlived its run
        wanted = await app.gc(keys_older_than=100, dry_run=True)
        assert (wanted.keys, len(await app.effects())) == (1, 1)
        await passes(app, clock, 900)
        assert await app.effects() == []
        assert await app.run(buyer, "a", id="three") == "paid a"
        assert DONE == ["a", "a"]


def test_an_app_that_is_closed_while_it_deletes_leaves_a_store_that_is_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")

    async def fill() -> None:
        async with everstep.open(path) as app:
            await asyncio.gather(*(app.run(short, "a", id=f"r-{number}") for number in range(300)))

    async def begin() -> int:
        async with everstep.open(path, recover=True, retention=Retention(runs=0, every=0.01)) as app:
            while len(await ids(app)) == 300:
                await asyncio.sleep(0.001)
            return len(await ids(app))

    async def end() -> None:
        async with everstep.open(path) as app:
            for run in await ids(app):
                assert (await app.get(run).verify()).sound
            await app.gc(older_than=0)
            assert await ids(app) == []

    asyncio.run(fill())
    assert asyncio.run(begin()) > 0
    asyncio.run(end())


async def test_steps_go_on_between_the_parts_of_a_deletion_in_the_same_process(tmp_path: Path) -> None:
    """Whatever is deleted, a run waits for a few parts of that and not for all of it."""

    async with everstep.open(str(tmp_path / "a.db")) as app:
        await asyncio.gather(*(app.run(short, "a") for _ in range(1_000)))
        commit = app.store.commit
        parts_before: list[int] = []
        parts = 0

        def counted(operations: Any, **options: Any) -> Any:
            nonlocal parts
            parts += any(getattr(one, "limit", 0) for one in operations)
            return commit(operations, **options)

        app.store.commit = counted  # type: ignore[method-assign]
        deletion = asyncio.create_task(app.gc(older_than=0))
        while not deletion.done():
            await app.run(buyer, f"beside-{len(parts_before)}")
            parts_before.append(parts)
        assert len((await deletion).runs) >= 1_000
        assert parts > 50
        waited_for = [after - before for before, after in pairwise([0, *parts_before])]
        assert max(waited_for) < parts / 3, waited_for


async def test_a_deletion_yields_to_others_and_takes_few_rows_at_a_time(tmp_path: Path) -> None:
    """What a store is told to delete at once is bounded, however many runs and events there are."""

    async with everstep.open(str(tmp_path / "a.db")) as app:
        await asyncio.gather(*(app.run(short, "a") for _ in range(100)))
        commit = app.store.commit
        weights: list[int] = []

        def spied(operations: Any, **options: Any) -> Any:
            weights.append(sum(getattr(one, "limit", 0) for one in operations))
            return commit(operations, **options)

        app.store.commit = spied  # type: ignore[method-assign]
        done = await app.gc(older_than=0)
        assert len(done.runs) == 100
        assert 5 < len([weight for weight in weights if weight]) < 60  # shared, and yet not all at once
        assert max(weights) <= retention.PART


@pytest.mark.parametrize(
    "wrong",
    [{"runs": -1}, {"runs": float("inf")}, {"runs": "30d"}, {"keys": True}, {"keep": -1}, {"keep": 1.5}, {"every": 0}],
)
def test_a_retention_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misuse, match=r"it is a number of|Retention"):
        Retention(**wrong)


def test_a_time_alone_is_that_of_runs() -> None:
    with everstep.open("memory:", retention=3600) as app:
        assert app.gc(dry_run=True).runs == []
    with pytest.raises(Misuse, match=r"it is a number of|Retention"):
        everstep.open("memory:", retention="a month")  # type: ignore[arg-type]
