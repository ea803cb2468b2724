"""Races that real engines got wrong, as far as they concern one machine."""

import asyncio
import random
from typing import Any

import pytest

import everstep
from everstep import Retry, step, workflow
from everstep.engine.code.workflow import DECLARED
from everstep.errors import RunCancelled, RunEnded, StoreFailed
from everstep.stores.protocol import RunFilter, StartRun
from everstep.testing.faulty_store import FaultyStore
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import NOTES, note


@workflow
async def quick(text: str) -> str:
    return await note(text)


async def test_commit_done_acknowledgement_lost_and_the_client_asks_again(machine: Machine) -> None:
    store = FaultyStore(machine.open_store())

    def is_start(operations: Any) -> bool:
        return any(isinstance(one, StartRun) for one in operations)

    store.fail("commit", after=True, when=is_start, error=StoreFailed("the reply was lost"))
    app = await machine.boot(store=store.as_store())
    with pytest.raises(StoreFailed):
        await app.start(quick, "a", id="r")
    await machine.kill(app)
    assert machine.status("r") == "running", "it was done although nobody heard of it"
    again = await machine.boot()
    assert await again.run(quick, "a", id="r") == "a"
    assert NOTES == ["a"]


async def test_ids_of_concurrent_steps_are_in_program_order_whoever_ends_first(machine: Machine) -> None:
    gates = {name: Gate() for name in "abc"}

    @step
    async def waits(name: str) -> str:
        await gates[name].wait()
        return f"{name} {everstep.key()}"

    @workflow
    async def flow() -> list[str]:
        return list(await asyncio.gather(*(waits(name) for name in "abc")))

    _, run = await machine.start(flow, id="r")
    for name in "cba":
        await gates[name].reached.wait()
        gates[name].opened.set()
        await machine.until(lambda: machine.kinds("r").count("step_completed") == "cba".index(name) + 1)  # noqa: B023
    first = await run.result()
    assert [value[0] for value in first] == ["a", "b", "c"]
    started = [event.step.rpartition(".")[2] for event in machine.events("r") if event.kind == "step_started"]
    assert started == ["waits", "waits#2", "waits#3"]
    assert machine.replay("r").differences == []


async def test_old_and_new_process_overlap_during_a_rolling_restart(machine: Machine) -> None:
    """Several generations of workers, each started before the last one stops: nothing stuck, nothing twice."""

    @workflow
    async def flow(number: int) -> int:
        for part in range(4):
            await note(f"{number}.{part}")
            await asyncio.sleep(0.003)
        return number

    worker = await machine.worker(clock=None)
    for number in range(12):
        await worker.start(flow, number, id=f"r{number}")
    for _ in range(4):
        fresh = await machine.worker(clock=None)
        await asyncio.sleep(0.005)
        await machine.stop(worker)
        worker = fresh
    await machine.until(lambda: machine.store.counts() == {"completed": 12})
    for number in range(12):
        kinds = machine.kinds(f"r{number}")
        assert kinds.count("step_completed") == kinds.count("timer_fired") == 4
        assert kinds.count("run_completed") == 1
        assert machine.replay(f"r{number}").differences == []


@pytest.mark.parametrize("seed", range(12))
async def test_cancel_against_completion_against_resume_has_one_end(machine: Machine, seed: int) -> None:
    chance = random.Random(seed)

    @workflow
    async def flow() -> str:
        for number in range(3):
            await note(str(number))
        return "done"

    app, _ = await machine.start(flow, id="r")
    for _ in range(chance.randrange(8)):
        await asyncio.sleep(0)
    await machine.kill(app)
    one, two = await machine.worker(), await machine.worker()
    for _ in range(chance.randrange(20)):
        await asyncio.sleep(0)
    try:
        await chance.choice([one, two]).cancel("r", now=chance.random() < 0.5)
        told = "cancelled"
    except RunEnded as ended:
        told = ended.status
    await machine.until_status("r", "completed", "cancelled", "held")
    assert machine.status("r") == told
    ends = [kind for kind in machine.kinds("r") if kind in ("run_completed", "run_cancelled", "run_failed")]
    assert ends == [f"run_{told}"]


async def test_a_message_that_arrives_while_the_run_completes_is_consumed_or_refused(machine: Machine) -> None:
    app, sender = await machine.boot(), await machine.boot()
    told: dict[str, str] = {}
    for number in range(30):
        run = await app.start(quick, "x", id=f"r{number}")
        for _ in range(number % 6):
            await asyncio.sleep(0)
        try:
            await sender.signal(run.id, "word", "hello")
            told[run.id] = "acknowledged"
        except RunEnded:
            told[run.id] = "refused"
        await run.result()
    for run_id, answer in told.items():
        states = [one.state for one in machine.store.signals(run_id)]
        assert (len(states) == 1 and states[0] in ("consumed", "undelivered")) == (answer == "acknowledged")


async def test_exception_types_and_attempts_and_back_off_are_the_same_across_a_crash(machine: Machine) -> None:
    fails = {"count": 0}

    @step(retry=Retry(attempts=4, first=100.0, factor=2.0, most=1e6, jitter=0.0))
    async def flaky() -> str:
        fails["count"] += 1
        raise ConnectionResetError(104, f"attempt {fails['count']}")

    @workflow
    async def flow() -> str:
        try:
            return await flaky()
        except ConnectionResetError as error:
            return f"{type(error).__name__} {error.errno} {error.strerror}"

    app, _ = await machine.start(flow, id="r")
    for attempt in range(1, 5):
        await machine.until(lambda: fails["count"] == attempt)  # noqa: B023
        await machine.until(lambda: machine.kinds("r").count("attempt_failed") == min(attempt, 3))  # noqa: B023
        await machine.until(lambda: machine.status("r") != "running")
        if attempt == 4:
            break
        await machine.kill(app)
        app = await machine.worker()
        await machine.advance(100 * 2 ** (attempt - 1) - 1)
        assert fails["count"] == attempt, "not before its time"
        await machine.advance(2)
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == "ConnectionResetError 104 attempt 4"
    assert [body.attempt for body in machine.bodies("r", "step_started")] == [1, 2, 3, 4]
    assert [body.because for body in machine.bodies("r", "step_started")] == ["", "retry", "retry", "retry"]


async def test_stopping_a_worker_runs_no_finally_with_steps(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        try:
            return await everstep.receive("word", str)
        finally:
            await note("finally")

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.stop(app)
    assert NOTES == []
    worker = await machine.worker()
    await worker.signal("r", "word", "x")
    await machine.until_status("r", "completed")
    assert NOTES == ["finally"]


async def test_hand_over_while_a_step_runs_gives_both_callers_one_result(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        NOTES.append("slow")
        await gate.wait()
        return f"done {NOTES.count('slow')}"

    @workflow
    async def flow() -> str:
        return await slow()

    _, first = await machine.start(flow, id="r")
    await gate.reached.wait()
    two, second = await machine.start(flow, id="r")
    waiting = asyncio.ensure_future(second.result())
    machine.sql("UPDATE runs SET owner = NULL WHERE id = 'r'")  # as if its lease had lapsed
    machine.clock.advance(1)
    two.pump.nudge()
    await machine.until(lambda: NOTES.count("slow") == 2)
    gate.opened.set()
    results = await asyncio.gather(first.result(timeout=60), waiting)
    assert results == ["done 2", "done 2"]
    assert machine.kinds("r").count("step_completed") == 1


async def test_many_starters_of_one_id_make_one_run(machine: Machine) -> None:
    apps = [await machine.boot() for _ in range(4)]
    results = await asyncio.gather(*(app.run(quick, "x", id="r") for app in apps for _ in range(5)))
    assert results == ["x"] * 20
    assert NOTES == ["x"]
    assert len(machine.store.runs(RunFilter())) == 1


async def test_a_cancelled_caller_does_not_cancel_the_run(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        await gate.wait()
        return "done"

    @workflow
    async def flow() -> str:
        return await slow()

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    with pytest.raises(TimeoutError):
        await run.result(timeout=0.01)
    caller = asyncio.ensure_future(run.result())
    await asyncio.sleep(0)
    caller.cancel()
    gate.opened.set()
    assert await run.result() == "done"


async def test_a_cancel_between_two_steps_is_seen_before_the_second(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> None:
        NOTES.append("first")
        await gate.wait()

    @workflow
    async def flow() -> None:
        await slow()
        await note("second")

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    cancelling = asyncio.ensure_future(run.cancel())
    await cancelling
    gate.opened.set()
    with pytest.raises(RunCancelled):
        await run.result()
    assert NOTES == ["first"]


async def test_a_message_is_consumed_once_although_the_commit_of_that_is_tried_again(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        return [await everstep.receive("word", str), await everstep.receive("word", str)]

    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store())
    await app.start(flow, id="r")
    await machine.rest(app)

    def consumes(operations: Any) -> bool:
        return any(getattr(one, "consumed", None) for one in operations)

    store.fail("commit", after=True, when=consumes, error=StoreFailed("the reply was lost"))
    sender = await machine.boot()
    await sender.signal("r", "word", "one")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    await machine.kill(app)
    worker = await machine.worker()
    await machine.rest(worker)
    assert machine.kinds("r").count("signal_received") == 1
    await sender.signal("r", "word", "two")
    assert await worker.get("r").result() == ["one", "two"]


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_child_is_started_with_its_parent_s_record_or_not_at_all(machine: Machine, is_done: bool) -> None:
    @workflow
    async def parent() -> str:
        return await quick("child")

    store = FaultyStore(machine.open_store())

    def starts_a_child(operations: Any) -> bool:
        return any(getattr(one, "starts", None) for one in operations)

    store.fail("commit", after=is_done, when=starts_a_child, error=StoreFailed("the disk is gone"))
    app = await machine.boot(store=store.as_store())
    await app.start(parent, id="r")
    await machine.until(lambda: "r" not in app.drivers)
    assert len(machine.store.children("r")) == machine.kinds("r").count("child_started") == is_done
    await machine.kill(app)
    worker = await machine.worker(clock=None)
    assert await worker.get("r").result() == "child"
    assert len(machine.store.children("r")) == 1
    assert NOTES == ["child"]


@pytest.mark.parametrize("first", ["cancel", "signal"])
async def test_a_cancel_and_a_signal_that_are_found_together_take_effect_in_their_order(
    machine: Machine, first: str
) -> None:
    @workflow
    async def flow() -> str:
        word = await everstep.receive("word", str)
        await note(word)
        await asyncio.sleep(1000)
        return word

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.kill(app)
    sender = await machine.boot()
    for what in ("cancel", "signal") if first == "cancel" else ("signal", "cancel"):
        if what == "signal":
            await sender.signal("r", "word", "hello")
        else:
            await sender.cancel("r")
    worker = await machine.worker()
    await machine.until_status("r", "cancelled")
    with pytest.raises(RunCancelled):
        await worker.get("r").result()
    received = machine.kinds("r").count("signal_received")
    assert received == (first == "signal")
    (signal,) = [one for one in machine.store.signals("r") if one.name == "word"]
    assert signal.state == ("consumed" if received else "undelivered")


async def test_a_run_whose_workflow_is_not_known_here_is_left_for_a_worker_that_knows_it(
    machine: Machine,
) -> None:
    @workflow(name="elsewhere")
    async def flow() -> str:
        await everstep.receive("go")
        return await note("elsewhere")

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.kill(app)
    before = machine.events("r")
    known = DECLARED._by_name.pop("elsewhere")
    stranger = await machine.worker()
    await stranger.signal("r", "go")
    await asyncio.sleep(0.3)
    assert machine.events("r") == before, "nothing is done about it"
    assert machine.status("r") in ("waiting", "queued", "running")
    assert NOTES == []
    await machine.stop(stranger)
    DECLARED._by_name["elsewhere"] = known
    await machine.worker()
    await machine.until_status("r", "completed")
    assert NOTES == ["elsewhere"]
