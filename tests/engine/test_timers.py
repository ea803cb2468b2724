"""Timers: never early, once, across crashes and jumps of the clock; and a run that waits is not in memory."""

import asyncio
import random
from datetime import datetime, timedelta

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.history.clock import SECOND
from everstep.engine.process import resting
from everstep.stores.protocol import Post
from everstep.testing.clock import FakeClock
from tests.engine.resume_helpers import Machine

HOUR = 3600.0


@step(effect="read")
async def look(text: str) -> str:
    return text


@workflow
async def sleeper(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


@workflow
async def impatient(seconds: float) -> str:
    try:
        return await everstep.receive("word", str, timeout=seconds)
    except TimeoutError:
        return "timed out"


def check_timers(machine: Machine, run: str) -> None:
    """Each timer fired at most once, and never before its deadline."""
    deadlines = {body.call: body.deadline for body in machine.bodies(run, "timer_started")}
    fired = [(event.at, body.call) for event, body in zip(
        [event for event in machine.events(run) if event.kind == "timer_fired"],
        machine.bodies(run, "timer_fired"),
        strict=True,
    )]  # fmt: skip
    assert len({call for _, call in fired}) == len(fired)
    for at, call in fired:
        assert at >= deadlines[call]


async def test_a_timer_fires_when_it_is_due_and_not_a_moment_before(machine: Machine) -> None:
    app, run = await machine.start(sleeper, 10.0, id="r")
    await machine.rest(app)
    await machine.advance(9.999999)
    assert machine.status("r") == "waiting"
    await machine.advance(0.000001)
    assert await run.result() == "awake"
    check_timers(machine, "r")


async def test_the_deadline_is_recorded_and_kept_across_a_crash(machine: Machine) -> None:
    app, _ = await machine.start(sleeper, HOUR, id="r")
    await machine.rest(app)
    began = machine.clock.now()
    await machine.kill(app)
    (timer,) = machine.bodies("r", "timer_started")
    assert (timer.duration, timer.deadline) == (3600 * SECOND, began + 3600 * SECOND)
    machine.clock.advance(HOUR - 1)
    await machine.worker()
    await machine.advance(0.5)
    assert machine.status("r") == "waiting"
    await machine.advance(0.6)
    await machine.until_status("r", "completed")
    assert machine.kinds("r").count("timer_started") == 1
    check_timers(machine, "r")


async def test_a_timer_that_came_due_while_nobody_lived_fires_once(machine: Machine) -> None:
    app, _ = await machine.start(sleeper, HOUR, id="r")
    await machine.rest(app)
    await machine.kill(app)
    machine.clock.advance(10 * HOUR)
    await machine.worker()
    await machine.worker()
    await machine.until_status("r", "completed")
    assert machine.kinds("r").count("timer_fired") == 1
    check_timers(machine, "r")


@pytest.mark.parametrize("jump", [-10 * 365 * 86400.0, -HOUR, -1.0, 1.0, HOUR, 10 * 365 * 86400.0])
async def test_a_jump_of_the_clock_between_crash_and_resume_loses_and_doubles_nothing(
    machine: Machine, jump: float
) -> None:
    times: list[datetime] = []

    @step(effect="read")
    async def tick(number: int) -> int:
        return number

    @workflow
    async def flow() -> list[str]:
        seen = [everstep.now()]
        for number in range(3):
            await tick(number)
            seen.append(everstep.now())
            await asyncio.sleep(60)
            seen.append(everstep.now())
        times[:] = seen
        return [moment.isoformat() for moment in seen]

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.kill(app)
    machine.clock = FakeClock(machine.clock.now() + round(jump * SECOND))
    worker = await machine.worker()
    await machine.rest(worker)
    for _ in range(10):
        if machine.status("r") == "completed":
            break
        await machine.advance(max(60.0, -jump + 61))
    await machine.until_status("r", "completed")
    assert times == sorted(times), "now() never goes backwards"
    moments = [event.at for event in machine.events("r")]
    assert moments == sorted(moments)
    assert machine.kinds("r").count("timer_fired") == 3
    check_timers(machine, "r")
    assert await worker.get("r").result() == [moment.isoformat() for moment in times]


@pytest.mark.parametrize("seed", range(20))
async def test_crashes_and_jumps_in_any_order_neither_lose_nor_double_a_timer(machine: Machine, seed: int) -> None:
    chance = random.Random(seed)

    @workflow
    async def flow() -> int:
        done = 0
        for seconds in (5, 50, 500):
            await asyncio.sleep(seconds)
            await look(str(seconds))
            done += 1
        return done

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    for _ in range(6):
        await machine.kill(app)
        machine.clock = FakeClock(machine.clock.now() + round(chance.choice([-1000, -10, 0, 7, 70, 700]) * SECOND))
        app = await machine.worker()
        await machine.advance(chance.choice([0.0, 1.0, 6.0, 51.0]))
    for _ in range(40):
        if machine.status("r") == "completed":
            break
        await machine.advance(300)
    assert await app.get("r").result(timeout=60) == 3
    assert machine.kinds("r").count("timer_started") == machine.kinds("r").count("timer_fired") == 3
    check_timers(machine, "r")


async def test_now_is_the_time_of_the_newest_event_and_the_same_in_a_replay(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        first = everstep.now().isoformat()
        await asyncio.sleep(60)
        second = everstep.now().isoformat()
        await everstep.receive("go")
        return [first, second]

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.advance(75)
    await machine.kill(app)
    machine.clock.advance(HOUR)
    worker = await machine.worker()
    await worker.signal("r", "go")
    await machine.until_status("r", "completed")
    first, second = map(datetime.fromisoformat, await worker.get("r").result())
    assert second - first == timedelta(seconds=75)


async def test_events_that_happen_while_the_clock_is_behind_are_not_before_their_predecessors(
    machine: Machine,
) -> None:
    @workflow
    async def flow() -> list[str]:
        seen = [everstep.now()]
        for _ in range(3):
            await everstep.receive("go")
            seen.append(everstep.now())
            await look("x")
            seen.append(everstep.now())
        await asyncio.sleep(60)
        seen.append(everstep.now())
        return [moment.isoformat() for moment in seen]

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await app.signal("r", "go")
    await machine.rest(app)
    await machine.kill(app)
    behind = machine.clock = FakeClock(machine.clock.now() - 3600 * SECOND)
    worker = await machine.worker()
    for _ in range(2):
        await worker.signal("r", "go")
        await machine.until(lambda: not machine.store.inbox("r"))
        await machine.rest(worker)
    (timer,) = machine.bodies("r", "timer_started")
    assert timer.deadline == behind.now() + 60 * SECOND, "the events are ahead of the clock, and that delays nothing"
    behind.advance(61)
    await machine.until_status("r", "completed")
    moments = [event.at for event in machine.events("r")]
    assert moments == sorted(moments)
    seen = await worker.get("r").result()
    assert seen == sorted(seen)
    check_timers(machine, "r")


# -- against signals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("downtime", ["killed", "stopped", "in memory"])
@pytest.mark.parametrize(("arrives", "outcome"), [(9.0, "hello"), (11.0, "timed out")])
async def test_whichever_came_first_wins_also_when_both_are_found_after_downtime(
    machine: Machine, downtime: str, arrives: float, outcome: str
) -> None:
    app, _ = await machine.start(impatient, 10.0, id="r")
    await machine.rest(app)
    if downtime == "killed":
        await machine.kill(app)
    elif downtime == "stopped":
        await machine.stop(app)
    at = machine.clock.now() + round(arrives * SECOND)
    machine.store.commit([Post("r", "signal", "word", "", b'["hello"]', at)])
    machine.clock._at += 1000 * SECOND
    if downtime == "in memory":
        app.drivers["r"].take_inbox_and_deadlines()
    else:
        app = await machine.worker()
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == outcome


async def test_a_recorded_timeout_stays_a_timeout_whatever_arrives_later(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        try:
            first = await everstep.receive("word", str, timeout=10)
        except TimeoutError:
            first = "timed out"
        return [first, await everstep.receive("word", str)]

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.advance(11)
    await machine.kill(app)
    worker = await machine.worker()
    await worker.signal("r", "word", "late")
    await machine.until_status("r", "completed")
    assert await worker.get("r").result() == ["timed out", "late"]


async def test_a_senders_clock_that_is_ahead_makes_no_timer_fire_early(machine: Machine) -> None:
    app, _ = await machine.start(impatient, 100.0, id="r")
    await machine.rest(app)
    ahead = await machine.boot(clock=FakeClock(machine.clock.now() + 1000 * SECOND))
    await ahead.signal("r", "word", "from the future")
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == "from the future"
    assert "timer_fired" not in machine.kinds("r")


# -- memory ------------------------------------------------------------------------------------------------------------
async def test_waiting_runs_beyond_the_cache_are_not_in_memory_and_still_wake(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "RESTING_MAX", 5)
    app = await machine.boot()
    runs = [await app.start(sleeper, 60.0 + number, id=f"r{number}") for number in range(20)]
    signalled = await app.start(impatient, 1e6, id="signalled")
    await machine.rest(app)
    await machine.until(lambda: len(app.drivers) <= 6)
    assert machine.store.counts() == {"waiting": 21}
    await machine.advance(30)
    assert machine.store.counts() == {"waiting": 21}
    await signalled.signal("word", "still here")
    assert await signalled.result() == "still here"
    await machine.advance(60)
    assert await asyncio.gather(*(run.result() for run in runs)) == ["awake"] * 20
    for run in runs:
        check_timers(machine, run.id)


async def test_a_delayed_run_begins_at_its_time_and_a_signal_does_not_hurry_it(machine: Machine) -> None:
    app, run = await machine.start(impatient, 10.0, id="r", delay=HOUR)
    await machine.rest(app)
    await run.signal("word", "early")
    await machine.advance(HOUR - 1)
    assert machine.kinds("r") == ["run_started"]
    await machine.advance(2)
    assert await run.result() == "early"


async def test_a_delayed_run_begins_at_its_time_after_a_crash(machine: Machine) -> None:
    app, _ = await machine.start(sleeper, 1.0, id="r", delay=HOUR)
    await machine.kill(app)
    worker = await machine.worker()
    await machine.rest(worker)
    await machine.advance(HOUR - 10)
    assert machine.kinds("r") == ["run_started"]
    await machine.advance(11)
    await machine.until(lambda: "timer_started" in machine.kinds("r"))


async def test_attaching_to_a_delayed_run_does_not_hurry_it(machine: Machine) -> None:
    app, _ = await machine.start(sleeper, 1.0, id="r", delay=HOUR)
    await machine.kill(app)
    other, run = await machine.start(sleeper, 1.0, id="r")
    await machine.rest(other)
    assert machine.kinds("r") == ["run_started"]
    await machine.advance(HOUR + 1)
    await machine.advance(2)
    assert await run.result(timeout=60) == "awake"


@workflow(timeout=HOUR)
async def told_to_sleep() -> str:
    await everstep.receive("now")
    await asyncio.sleep(20)
    return "awake"


async def test_a_timer_of_a_run_that_was_started_by_a_wrong_clock_goes_by_the_store_s(machine: Machine) -> None:
    """The run's events are a day ahead, and stay so; what is due in twenty seconds is due in twenty seconds."""
    ahead = FakeClock(machine.clock.now() + 86_400 * SECOND)
    app = await machine.boot(clock=ahead)
    await app.start(told_to_sleep, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(app)
    app, run = await machine.start(told_to_sleep, id="r")
    await run.signal("now", None)
    await machine.until(lambda: "timer_started" in machine.kinds("r"))
    await machine.advance(21)
    assert await run.result(timeout=60) == "awake"
    check_timers(machine, "r")
