"""Code that is taken out of memory: nothing of it runs on, and code that refuses to leave is named."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import blocking, step, workflow
from everstep.engine.code import unwinding
from everstep.errors import Evicted
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, hang, play, settle
from tests.engine.resume_helpers import Program
from tests.lasting import LastingStore
from tests.worlds.told import TOLD, an_app, echo_flow, tell


@step(name="tell_plainly")
def tell_plainly(text: str) -> str:
    TOLD.append(text)
    return text


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    TOLD.clear()


async def stopped_and_taken_up(workflow: Any) -> tuple[Any, list[str], list[str]]:
    """Start a run, stop its worker, take it up again; return its result and what was told before and after."""
    store, clock = LastingStore(), FakeClock()
    async with an_app(store, clock) as app:
        run = await app.start(workflow, id=RUN)
        await settle(app)
        recorded = await run.history()
    before = list(TOLD)
    assert len(store.events(RUN, 1)) == len(recorded)
    async with an_app(store, clock) as app:
        run = await app.start(workflow, id=RUN)
        await play(app, clock)
        result = await run.result(timeout=60)
        assert (await run.history())[: len(recorded)] == recorded
    return result, before, TOLD[len(before) :]


def test_a_finally_with_a_step_does_not_run_when_a_worker_merely_stops() -> None:
    @workflow
    async def flow() -> str:
        try:
            await tell("begin")
            await asyncio.sleep(100)
            return "done"
        finally:
            await tell("finally")

    assert asyncio.run(stopped_and_taken_up(flow)) == ("done", ["begin"], ["finally"])


def test_the_same_in_a_def_workflow() -> None:
    @workflow
    def flow() -> str:
        try:
            tell_plainly("begin")
            blocking.gather(lambda: blocking.sleep(100), lambda: blocking.sleep(50))
            return "done"
        finally:
            tell_plainly("finally")

    assert asyncio.run(stopped_and_taken_up(flow)) == ("done", ["begin"], ["finally"])


def test_except_exception_does_not_catch_an_eviction_and_except_baseexception_gets_no_further() -> None:
    caught: list[str] = []

    @workflow
    async def flow() -> str:
        try:
            await asyncio.sleep(100)
        except Exception as error:  # noqa: BLE001
            caught.append(f"Exception {type(error).__name__}")
        except BaseException as error:  # noqa: BLE001
            caught.append(type(error).__name__)
            await tell("rescue")
            caught.append("went on")
        return "done"

    assert asyncio.run(stopped_and_taken_up(flow)) == ("done", [], [])
    assert caught == ["Evicted"]


@pytest.mark.parametrize("command", ["step", "child", "receive", "publish", "start", "patched", "to_thread"])
def test_every_command_raises_evicted_while_code_is_unwound(command: str) -> None:
    caught: list[str] = []

    @workflow
    async def child() -> None:
        TOLD.append("child")

    @workflow
    async def flow() -> None:
        try:
            await asyncio.sleep(100)
        except Evicted:
            try:
                if command == "step":
                    await tell("no")
                elif command == "child":
                    await child()
                elif command == "receive":
                    await everstep.receive("no")
                elif command == "publish":
                    everstep.publish("no", 1)
                elif command == "start":
                    await everstep.start(child)
                elif command == "patched":
                    everstep.patched("no")
                else:
                    await asyncio.to_thread(tell_plainly, "no")
            except Evicted:
                caught.append("Evicted again")
            raise

    async def main() -> list[str]:
        async with an_app() as app:
            run = await app.start(flow, id=RUN)
            await settle(app)
        return [event.kind for event in await run.history()]

    assert asyncio.run(main()) == ["run_started", "timer_started"]
    assert (caught, TOLD) == (["Evicted again"], [])


def test_all_tasks_are_unwound_in_groups_shields_and_queues() -> None:
    left: list[str] = []

    @workflow
    async def flow() -> None:
        async def waits(name: str, what: Any) -> None:
            try:
                await what
            finally:
                left.append(name)
                await tell(f"no {name}")

        queue: asyncio.Queue[int] = asyncio.Queue()
        lock = asyncio.Lock()
        await lock.acquire()
        asyncio.create_task(waits("lock", lock.acquire()))  # noqa: RUF006
        asyncio.create_task(waits("shield", asyncio.shield(asyncio.sleep(100))))  # noqa: RUF006
        async with asyncio.TaskGroup() as group:
            group.create_task(waits("queue", queue.get()))
            group.create_task(waits("step", hang("step")))
            group.create_task(waits("gather", asyncio.gather(asyncio.sleep(5), everstep.receive("never"))))
            async with asyncio.timeout(50):
                await waits("timeout", asyncio.Event().wait())

    async def main() -> None:
        async with an_app() as app:
            run = await app.start(flow, id=RUN)
            await settle(app)
            before = await run.history()
        assert await run.history() == before

    asyncio.run(main())
    assert sorted(left) == ["gather", "lock", "queue", "shield", "step", "timeout"]
    assert TOLD == []


# -- code that refuses to leave ---------------------------------------------------------------------------------------
@workflow
async def sleeps_again() -> None:
    while True:
        try:
            await asyncio.sleep(100)
        except:  # noqa: E722
            continue


@workflow
async def receives_again() -> None:
    while True:
        try:
            await everstep.receive("never")
        except BaseException:  # noqa: BLE001
            continue


@workflow
async def publishes_again() -> None:
    while True:
        try:
            everstep.publish("at", 1)
            await asyncio.sleep(100)
        except:  # noqa: E722
            continue


@workflow
async def insists_in_its_finally() -> None:
    try:
        await asyncio.sleep(100)
    finally:
        while True:
            try:
                await tell("no")
                break
            except BaseException:  # noqa: BLE001
                continue


@workflow
async def turns_round_in_its_finally() -> None:
    try:
        await asyncio.sleep(100)
    finally:
        while True:
            await asyncio.sleep(0)


@workflow
async def insists_in_a_generator() -> None:
    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            while True:
                try:
                    await tell("no")
                except BaseException:  # noqa: BLE001
                    continue

    async for _ in numbers():
        await asyncio.sleep(100)


@workflow
async def insists_in_many_tasks() -> None:
    async def part(number: int) -> None:
        while True:
            try:
                await everstep.receive(f"never-{number}")
            except:  # noqa: E722
                continue

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(part(number))


@workflow
async def starts_and_asks_again() -> None:
    @workflow
    async def child() -> None:
        TOLD.append("no")

    while True:
        try:
            await asyncio.sleep(100)
        except:  # noqa: E722
            while True:
                for command in (lambda: everstep.start(child), lambda: asyncio.to_thread(tell_plainly, "no"), child):
                    try:
                        await command()
                    except:  # noqa: E722
                        continue


@workflow
def plainly_calls_again() -> None:
    blocking_is_over = False
    while True:
        try:
            if blocking_is_over:
                tell_plainly("no")
            blocking_is_over = True
            blocking.sleep(100)
        except:  # noqa: E722
            continue


@workflow
def plainly_sleeps_again() -> None:
    while True:
        try:
            blocking.gather(lambda: blocking.sleep(100), lambda: blocking.sleep(50))
        except:  # noqa: E722
            continue


@workflow
async def exits() -> None:
    try:
        await asyncio.sleep(100)
    finally:
        raise SystemExit(3)


code_in_a_node: everstep.Graph[Any] = everstep.Graph("code_in_a_node")


@code_in_a_node.node
async def node(state: dict[str, Any]) -> None:
    while True:
        try:
            await everstep.receive("never")
        except:  # noqa: E722
            continue


REFUSES: dict[str, Any] = {
    one.name: one
    for one in (
        sleeps_again,
        receives_again,
        publishes_again,
        insists_in_its_finally,
        turns_round_in_its_finally,
        insists_in_a_generator,
        insists_in_many_tasks,
        starts_and_asks_again,
        plainly_calls_again,
        plainly_sleeps_again,
    )
}


async def left_behind(flow: Any, *args: Any) -> list[str]:
    """Start a run, stop its app, and return what it has recorded; another run is driven meanwhile and after it."""
    store, clock = LastingStore(), FakeClock()
    async with an_app(store, clock) as app:
        run = await app.start(flow, *args, id=RUN)
        await settle(app)
        before = await run.history()
        app.resting._evict(app.drivers[RUN])
        assert await app.run(echo_flow, 5) == 5, "the others go on"
        await app.take_up_run(RUN)
        await settle(app)
    assert await run.history() == before
    gc.collect()
    assert TOLD == []
    return [event.kind for event in before]


@pytest.mark.parametrize("name", [*REFUSES, "code_in_a_node"])
def test_code_that_refuses_to_leave_is_torn_away_and_its_line_is_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        flow = left_behind(REFUSES[name]) if name in REFUSES else left_behind(code_in_a_node, {})
        assert "run_started" in asyncio.run(flow)
    told = [record.message for record in caplog.records if "caught Evicted" in record.message]
    assert len(told) == 2, "once for each time that it left"
    assert all("test_teardown.py:" in one and RUN in one for one in told)


def test_code_that_exits_while_it_is_unwound_ends_nothing() -> None:
    assert asyncio.run(left_behind(exits)) == ["run_started", "timer_started"]


def test_code_that_was_torn_away_does_not_come_back_when_its_process_ends(tmp_path: Path) -> None:
    """Python would resume what it drops, at the latest when it ends: and such code would never end."""
    code = """
    @step
    async def tell() -> None:
        print("no")

    @workflow
    async def sleeping() -> None:
        while True:
            try:
                await asyncio.sleep(100)
            except:
                continue

    @workflow
    async def calling() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            while True:
                try:
                    await tell()
                except:
                    continue

    @workflow
    async def generating() -> None:
        async def numbers():
            while True:
                try:
                    yield 1
                except:
                    continue
        async for _ in numbers():
            await asyncio.sleep(100)

    async def main():
        async with everstep.open(URL) as app:
            for flow in (sleeping, calling, generating):
                await app.start(flow)
            await asyncio.sleep(0.1)
        print("closed")

    asyncio.run(main())
    print("end")
    """
    status, out, err = Program(tmp_path, code).end()
    assert (status, out.split()) == (0, ["closed", "end"]), err
    assert "Exception ignored" not in err


@workflow
async def spins_in_its_finally() -> None:
    try:
        await asyncio.sleep(100)
    finally:
        while True:
            pass


@workflow
def plainly_spins_in_its_finally() -> None:
    try:
        blocking.sleep(100)
    finally:
        while True:
            sum((1, 2))


@pytest.mark.parametrize("flow", [spins_in_its_finally, plainly_spins_in_its_finally])
def test_code_that_does_not_give_way_while_it_is_unwound_is_named_and_ended(
    flow: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwinding, "LOOK_SECONDS", 0.02)
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(left_behind(flow)) == ["run_started", "timer_started"]
    assert "does not give way" in caplog.text
    assert "test_teardown.py:" in caplog.text


def test_unwinding_code_prints_and_logs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    @workflow
    async def flow() -> None:
        try:
            print("begin")
            await asyncio.sleep(100)
        finally:
            print("unwound")

    async def main() -> None:
        async with an_app() as app:
            await app.start(flow, id=RUN)
            await settle(app)

    asyncio.run(main())
    assert capsys.readouterr().out == "begin\n"


def test_a_step_under_way_when_a_worker_stops_is_cancelled_and_done_again_later() -> None:
    attempts: list[str] = []
    block = True

    @step(name="hang_once")
    async def hang_once() -> str:
        attempts.append(everstep.key())
        try:
            if block:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            attempts.append("cancelled")
            raise
        return "done"

    @workflow
    async def flow() -> str:
        return await hang_once()

    async def main() -> str:
        nonlocal block
        store = LastingStore()
        async with an_app(store) as app:
            await app.start(flow, id=RUN)
            await settle(app)
            await asyncio.sleep(0)
        assert [event.kind for event in store.events(RUN, 1)] == ["run_started", "step_started"]
        block = False
        async with an_app(store) as app:
            return await (await app.start(flow, id=RUN)).result(timeout=60)

    assert asyncio.run(main()) == "done"
    assert attempts == [attempts[0], "cancelled", attempts[0]]
