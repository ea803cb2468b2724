"""Queues: how many runs begin, which ones, and when."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.app.handles import Run
from everstep.errors import Misuse, RunCancelled
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import BEGUN, GATES


@step(effect="read")
async def pass_gate(name: str) -> None:
    BEGUN.append(name)
    await GATES.setdefault(name, asyncio.Event()).wait()


@workflow(queue="mail")
async def letter(name: str) -> str:
    await pass_gate(name)
    return name


@workflow
async def plain(name: str) -> str:
    await pass_gate(name)
    return name


@workflow
async def parent(name: str) -> str:
    return await letter(name)


@asynccontextmanager
async def opened(machine: Machine, **options: Any) -> AsyncIterator[App]:
    yield await machine.boot(**options)


async def started(machine: Machine, app: App, name: str, **options: Any) -> Run[str]:
    """Start a letter a moment later than the one before."""
    machine.clock.advance(0.001)
    return await app.start(letter, name, **options)


async def begun(*names: str) -> None:
    """Wait until just these have begun, and give others the time to begin wrongly."""
    async with asyncio.timeout(60):
        while len(BEGUN) < len(names):
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert list(names) == BEGUN


def let(*names: str) -> None:
    for name in names:
        GATES.setdefault(name, asyncio.Event()).set()


async def test_no_more_runs_of_a_queue_begin_than_it_has_slots(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", concurrency=2)
        runs = [await started(machine, app, name) for name in "abcd"]
        await begun("a", "b")
        assert [await run.status() for run in runs] == ["running", "running", "queued", "queued"]
        let("b")
        await begun("a", "b", "c")
        let("a", "c", "d")
        assert [await run.result(60) for run in runs] == list("abcd")


async def test_a_queue_of_which_nothing_was_said_has_room_for_all(machine: Machine) -> None:
    async with opened(machine) as app:
        runs = [await app.start(plain, name, id=name, queue="new") for name in "abc"]
        await begun("a", "b", "c")
        let(*"abc")
        assert [await run.result(60) for run in runs] == list("abc")


async def test_runs_begin_by_priority_and_then_in_the_order_of_their_starts(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", concurrency=1, paused=True)
        for name, priority in {"low": -1, "one": 0, "two": 0, "high": 7, "three": 0}.items():
            await started(machine, app, name, priority=priority)
            let(name)
        await app.queue("mail", paused=False)
        await begun("high", "one", "two", "three", "low")


async def test_a_paused_queue_begins_nothing_and_what_has_begun_goes_on(machine: Machine) -> None:
    async with opened(machine) as app:
        first = await app.start(letter, "a")
        await begun("a")
        row = await app.queue("mail", paused=True)
        assert row.paused
        second = await app.start(letter, "b")
        let("a", "b")
        assert await first.result(60) == "a"
        await begun("a")
        await app.queue("mail", paused=False)
        assert await second.result(60) == "b"


async def test_a_change_takes_effect_on_an_app_that_runs(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", concurrency=1)
        runs = [await started(machine, app, name) for name in "abc"]
        await begun("a")
        await app.queue("mail", concurrency=None)
        await begun("a", "b", "c")
        let(*"abc")
        await asyncio.gather(*(run.result(60) for run in runs))


async def test_a_key_has_its_own_limit_and_others_pass_by(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", per_key=1)
        for name, key in {"a1": "ann", "a2": "ann", "b1": "bob", "none": ""}.items():
            await started(machine, app, name, tags={"key": key} if key else None)
        await begun("a1", "b1", "none")
        let("a1", "a2", "b1", "none")
        await begun("a1", "b1", "none", "a2")


async def test_a_rate_is_kept_by_the_store_s_clock(machine: Machine) -> None:
    clock = machine.clock
    async with opened(machine) as app:
        await app.queue("mail", rate=(2, 60))
        for name in "abcde":
            await started(machine, app, name)
        await begun("a", "b")
        clock.advance(29.8)
        await begun("a", "b")
        clock.advance(0.2)
        await begun("a", "b", "c")
        clock.advance(60)
        await begun("a", "b", "c", "d", "e")


async def test_a_delayed_run_waits_for_its_time_and_then_for_a_slot(machine: Machine) -> None:
    clock = machine.clock
    async with opened(machine) as app:
        await app.queue("mail", concurrency=1)
        late = await app.start(letter, "late", delay=10, priority=9)
        await app.start(letter, "now")
        await begun("now")
        assert await late.status() == "queued"
        clock.advance(11)
        await begun("now")
        let("now")
        await begun("now", "late")


async def test_a_run_that_waits_in_a_queue_is_cancelled_without_its_code(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", concurrency=0)
        run = await app.start(letter, "a")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result(60)
        assert BEGUN == []


async def test_a_held_run_gives_its_slot_back_and_waits_for_another_when_it_is_resolved(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", concurrency=1)
        first = await started(machine, app, "a")
        second = await started(machine, app, "b")
        await begun("a")
        await app.hold(first.id)
        await begun("a", "b")
        await app.resolve(first.id, "retry")
        await begun("a", "b")
        assert await first.status() == "queued"
        let("a", "b")
        assert [await first.result(60), await second.result(60)] == ["a", "b"]


async def test_a_child_waits_in_the_queue_of_its_workflow(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", concurrency=1)
        await app.start(letter, "a")
        await begun("a")
        run = await app.start(parent, "child")
        await begun("a")
        let("a", "child")
        assert await run.result(60) == "child"


async def test_the_same_id_is_one_run_while_it_waits_too(machine: Machine) -> None:
    async with opened(machine) as app:
        await app.queue("mail", concurrency=0)
        await app.start(letter, "a", id="a-1")
        await app.start(letter, "a", id="a-1")
        assert len(await app.list()) == 1
        await app.queue("mail", concurrency=1)
        let("a")
        assert await app.get("a-1").result(60) == "a"
        assert BEGUN == ["a"]


async def test_an_app_drives_only_runs_of_the_queues_that_it_serves(machine: Machine) -> None:
    async with opened(machine, recover=True, queues=["default"]) as app:
        await app.start(plain, "plain")
        await app.start(letter, "letter")
        await app.start(parent, "child")
        await begun("plain")


async def test_a_queue_s_settings_are_checked(machine: Machine) -> None:
    async with opened(machine) as app:
        for wrong in ({"concurrency": -1}, {"per_key": 0}, {"rate": 5}, {"rate": (0, 1)}, {"rate": (1, 0)}):
            with pytest.raises(Misuse):
                await app.queue("mail", **wrong)
        with pytest.raises(Misuse, match="do not wait"):
            await app.queue("default", concurrency=1)
        with pytest.raises(Misuse, match="not a name"):
            await app.start(letter, "a", queue="two words")
        row = await app.queue("mail", concurrency=3, rate=(5, 60))
        assert (row.concurrency, row.rate, row.seconds, row.paused) == (3, 5, 60.0, False)
        assert (await app.queue("mail")).concurrency == 3
        assert (await app.queue("mail", rate=None)).rate is None
    with pytest.raises(Misuse, match="list of names"):
        everstep.open("memory:", queues="mail")


def test_blocking_code_has_queues_too(tmp_path: Any) -> None:
    with everstep.open(str(tmp_path / "runs.db"), durability="process") as app:
        assert app.queue("mail", concurrency=2).concurrency == 2
        assert app.limit("api", rate=(1, 2)).seconds == 2.0
