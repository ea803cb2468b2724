"""Runs that leave memory while they wait, and code that cannot go on."""

import asyncio
import logging
from typing import Any

import pytest

import everstep
from everstep import blocking, workflow
from everstep.engine.code import loop as loop_module
from everstep.engine.process import resting
from everstep.engine.run.holds import report_facts
from everstep.errors import RunHeld
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, echo, play, settle
from tests.lasting import LastingStore
from tests.worlds.told import TOLD, an_app, echo_flow, tell


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    TOLD.clear()


# -- leaving memory while waiting -------------------------------------------------------------------------------------
async def test_waiting_runs_beyond_the_cache_leave_memory_and_come_back_by_signal_and_by_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resting, "RESTING_MAX", 3)

    @workflow
    async def by_signal(number: int) -> str:
        await tell(f"begin {number}")
        return f"{number} {await everstep.receive('word', str)}"

    @workflow
    async def by_timer(number: int) -> str:
        await tell(f"begin {number}")
        await asyncio.sleep(1000 + number)
        return f"{number} slept"

    clock = FakeClock()
    async with an_app(clock=clock) as app:
        flows = [by_signal if number % 2 else by_timer for number in range(12)]
        runs = [await app.start(flow, number, id=f"run-{number}") for number, flow in enumerate(flows)]
        await settle(app)
        await app.start(by_signal, 99, id="one-more")
        await settle(app)
        assert len(app.drivers) <= 4
        for run in runs[1::2]:
            await run.signal("word", "came")
        results = await asyncio.gather(*(run.result(timeout=60) for run in runs[1::2]))
        assert results == [f"{number} came" for number in range(1, 12, 2)]
        clock.advance(2000)
        results = await asyncio.gather(*(run.result(timeout=60) for run in runs[::2]))
        assert results == [f"{number} slept" for number in range(0, 12, 2)]
    assert sorted(TOLD) == sorted([*(f"begin {number}" for number in range(12)), "begin 99"])


def test_output_of_code_is_heard_once_across_leaving_memory_and_restarts(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("the.user's")

    @workflow
    async def flow() -> str:
        print("begin")
        await echo(1)
        print("one", flush=True)
        log.warning("logged one")
        await asyncio.sleep(10)
        print("two")
        word = await everstep.receive("word", str)
        log.warning("logged %s", word)
        print("end")
        return word

    async def main() -> None:
        store, clock = LastingStore(), FakeClock()
        async with an_app(store, clock) as app:
            await app.start(flow, id=RUN)
            await settle(app)
            app.resting._evict(app.drivers[RUN])
            clock.advance(10)
            await app.take_up_run(RUN)
            await settle(app)
        async with an_app(store, clock) as app:
            run = await app.start(flow, id=RUN)
            await settle(app)
            await run.signal("word", "three")
            await run.result(timeout=60)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert capsys.readouterr().out == "begin\none\ntwo\nend\n"
    assert [record.message for record in caplog.records if record.name == log.name] == ["logged one", "logged three"]


# -- code that cannot go on -------------------------------------------------------------------------------------------
async def held_as(workflow: Any, clock: FakeClock | None = None) -> tuple[str, str, list[str]]:
    """Return the reason and the summary of the hold that a run ends up in, and its events."""
    clock = clock or FakeClock()
    async with an_app(clock=clock) as app:
        run = await app.start(workflow, id=RUN)
        with pytest.raises(RunHeld) as held:
            await run.result(timeout=60)
        assert await app.run(echo_flow, 5) == 5  # the app is as lively as before
        (hold,) = await run.holds()
        assert reason_places(hold), "it says where the code is"
        return held.value.reason, str(held.value), [event.kind for event in await run.history()]


def reason_places(hold: Any) -> list[str]:
    return [line for line in report_facts(hold)["waiting_at"] if "test_evicted.py:" in line]


@workflow
async def spins_at_once() -> None:
    while True:
        await asyncio.sleep(0)


@workflow
async def spins_after_a_step() -> None:
    await tell("before")
    while True:
        await asyncio.sleep(0)


@workflow
async def spins_in_a_task() -> None:
    async def spin() -> None:
        event = asyncio.Event()
        event.set()
        while True:
            await event.wait()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(spin())
        group.create_task(tell("beside"))


@pytest.mark.parametrize("flow", [spins_at_once, spins_after_a_step, spins_in_a_task])
def test_a_workflow_that_never_rests_is_held_as_stuck(flow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TURNS_MAX", 2_000)
    reason, summary, kinds = asyncio.run(held_as(flow))
    assert reason == "stuck"
    assert "does not come to rest" in summary
    assert kinds[-1] == "run_held"


@workflow
async def waits_for_an_event() -> None:
    await tell("before")
    await asyncio.Event().wait()


@workflow
async def waits_at_once() -> None:
    await asyncio.get_running_loop().create_future()


@workflow
async def deadlock() -> None:
    one, other = asyncio.Lock(), asyncio.Lock()

    async def takes(first: asyncio.Lock, second: asyncio.Lock) -> None:
        async with first:
            await asyncio.sleep(1)
            async with second:
                pass

    await asyncio.gather(takes(one, other), takes(other, one))


@workflow
def plain_wait() -> None:
    blocking.gather(lambda: blocking._wait("wait", asyncio.Event().wait()))


@pytest.mark.parametrize("flow", [waits_for_an_event, waits_at_once, deadlock, plain_wait])
async def test_a_workflow_that_waits_for_nothing_that_can_happen_is_held_as_stuck(flow: Any) -> None:
    clock = FakeClock()
    async with an_app(clock=clock) as app:
        run = await app.start(flow, id=RUN)
        await play(app, clock)
        with pytest.raises(RunHeld) as held:
            await run.result(timeout=60)
        assert held.value.reason == "stuck"
        assert "can never happen" in str(held.value)
        hold = (await run.holds())[0]
        assert b"test_evicted.py" in hold.report  # it says where


def test_a_stuck_run_goes_on_when_its_code_can(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = True

    @workflow
    async def flow() -> str:
        await tell("before")
        if stuck:
            await asyncio.Event().wait()
        return "done"

    async def main() -> str:
        nonlocal stuck
        async with an_app() as app:
            run = await app.start(flow, id=RUN)
            with pytest.raises(RunHeld):
                await run.result(timeout=60)
            stuck = False
            await app.resolve(RUN, "retry", note="mended", by="ann")
            return await run.result(timeout=60)

    assert asyncio.run(main()) == "done"
    assert TOLD == ["before"]
