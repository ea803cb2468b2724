"""Teardown is not execution; and code that can never go on, or never rests, is held and does not hang."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import blocking, step, workflow
from everstep.engine.app.app import App
from everstep.engine.code import loop as loop_module
from everstep.engine.code import unwinding
from everstep.engine.process import host
from everstep.engine.run.holds import report_facts
from everstep.errors import Evicted, RunHeld
from everstep.stores.memory import MemoryStore
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, echo, hang, play, settle
from tests.engine.resume_helpers import Program

TOLD: list[str] = []


@step(name="tell")
async def tell(text: str) -> str:
    TOLD.append(text)
    return text


@step(name="tell_plainly")
def tell_plainly(text: str) -> str:
    TOLD.append(text)
    return text


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    TOLD.clear()


def lasting_store() -> MemoryStore:
    """Return a store that several apps use, one after the other."""
    store = MemoryStore()
    store.close = lambda: None  # type: ignore[method-assign]
    return store


@asynccontextmanager
async def an_app(store: Any = None, clock: FakeClock | None = None) -> AsyncIterator[App]:
    app = await App(store or MemoryStore(), clock=clock or FakeClock()).open()
    try:
        yield app
    finally:
        await app.close()


async def stopped_and_taken_up(workflow: Any) -> tuple[Any, list[str], list[str]]:
    """Start a run, stop its worker, take it up again; return its result and what was told before and after."""
    store, clock = lasting_store(), FakeClock()
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


# -- code that refuses to leave --------------------------------------------------------------------------------------
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
    store, clock = lasting_store(), FakeClock()
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
        store = lasting_store()
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


# -- leaving memory while waiting ------------------------------------------------------------------------------------
async def test_waiting_runs_beyond_the_cache_leave_memory_and_come_back_by_signal_and_by_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "RESTING_MAX", 3)

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
        store, clock = lasting_store(), FakeClock()
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


# -- code that cannot go on ------------------------------------------------------------------------------------------
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
    return [line for line in report_facts(hold)["waiting_at"] if "test_teardown.py:" in line]


@workflow
async def echo_flow(number: int) -> int:
    return await echo(number)  # type: ignore[no-any-return]


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
        assert b"test_teardown.py" in hold.report  # it says where


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
