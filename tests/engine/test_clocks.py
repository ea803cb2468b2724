"""Clocks that jump, drift and stop: they rob no worker, timers keep to the store's clock, and time never goes back.

Each process here has a clock of its own (how its kernel counts) and a wall clock (what its store object is told). Both
are made from one world's time, which a test moves.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Retention, step, workflow
from everstep.engine.app.app import App
from everstep.engine.history.clock import Alarms, StoreClock
from everstep.engine.process.leases import outwait
from everstep.stores import ticks as kernel
from everstep.stores.protocol import Store
from everstep.stores.sqlite import SqliteStore
from tests.engine.resume_helpers import PATIENCE_SECONDS, freeze
from tests.lasting import LastingStore

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
SHIFTS = [DAY, -DAY, HOUR, -HOUR]
LEASE = 30.0
BODIES: list[str] = []
GATES: dict[str, asyncio.Event] = {}


@step
async def slow(name: str) -> str:
    BODIES.append(name)
    await GATES.setdefault(name, asyncio.Event()).wait()
    return name


@workflow
async def at_work(name: str) -> str:
    return await slow(name)


@workflow
async def asleep(seconds: float) -> list[float]:
    before = everstep.now()
    await asyncio.sleep(seconds)
    return [before.timestamp(), everstep.now().timestamp()]


class World:
    """Time as it really passes, and the processes in it."""

    def __init__(self, url: str) -> None:
        self.at = 2_000_000_000 * SECOND
        self.url = url
        self.shifts: dict[str, int] = {}
        """How far each process's wall clock is from the truth."""
        self.apps: dict[str, App] = {}
        self.stores: list[Store] = []

    def open_store(self, name: str) -> Any:
        def wall() -> int:
            return self.at + self.shifts[name]

        if self.url.startswith("postgres"):
            from everstep.stores.postgres import PostgresStore

            return PostgresStore(self.url, durability="process", clock=wall)
        return SqliteStore(self.url, durability="process", clock=wall)

    async def boot(self, name: str, *, shift: int = 0, rate: float = 1.0, **options: Any) -> App:
        """Start a process whose wall clock is wrong by `shift`, and whose kernel counts `rate` times as fast."""
        self.shifts[name] = shift
        store, began = self.open_store(name), self.at
        clock = StoreClock(store.now, lambda: 1000 * (round((self.at - began) * rate) + DAY))
        app = App(store, clock=clock, lease=LEASE, recover=True, **options)
        await app.open()
        await app.become_worker()
        self.apps[name] = app
        return app

    async def turn(self, *names: str) -> None:
        """Let the pumps of processes do what is to be done now."""
        for app in [self.apps[name] for name in names or self.apps]:
            app.pump.nudge()
            await self.until(lambda pump=app.pump: not pump._nudged and pump._pausing is not None)

    def stop(self, name: str) -> None:
        """Let a process be stopped as by SIGSTOP, as far as its lease is concerned."""
        freeze(self.apps[name])

    async def live(self, seconds: float, *names: str, pace: float = 5.0) -> None:
        """Let time pass, in which these processes (or all) work."""
        for _ in range(round(seconds / pace)):
            self.at += round(pace * SECOND)
            await self.turn(*names)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await asyncio.sleep(0.001)

    def row(self, run: str) -> Any:
        return next(iter(self.apps.values())).store.run(run)


def scenario(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make `async def test_…(world, …)` a test on both stores."""

    @pytest.mark.parametrize("kind", ["sqlite", "postgres"])
    def test(kind: str, tmp_path: Path, **others: Any) -> None:
        asyncio.run(_in_world(function, kind, tmp_path, others))

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    test.__signature__ = _signature(function)  # type: ignore[attr-defined]
    return test


def _signature(function: Callable[..., Any]) -> Any:
    import inspect

    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("kind", "tmp_path")]
    return inspect.Signature([*first, *list(inspect.signature(function).parameters.values())[1:]])


async def _in_world(function: Callable[..., Awaitable[None]], kind: str, folder: Path, others: dict[str, Any]) -> None:
    BODIES.clear()
    GATES.clear()
    async with _world(kind, folder) as world:
        try:
            await function(world, **others)
        finally:
            for gate in GATES.values():
                gate.set()
            for app in world.apps.values():
                await app.close()


@asynccontextmanager
async def _world(kind: str, folder: Path) -> AsyncIterator[World]:
    if kind == "sqlite":
        yield World(str(folder / "runs.db"))
        return
    pytest.importorskip("psycopg")
    from tests.postgres.server import server

    schema = server().fresh_schema()
    try:
        yield World(server().url(schema))
    finally:
        server().drop(schema)


def run_of(name: str) -> str:
    return f"run-of-{name.replace(' ', '-')}"


async def both_at_work(world: World, *names: str) -> None:
    """Let each process drive a run whose step has begun."""
    for name in names:
        await world.apps[name].start(at_work, name, id=run_of(name))
    await world.until(lambda: sorted(BODIES) == sorted(names))


async def nobody_was_robbed(world: World, *names: str) -> None:
    """Each process still drives its own run, and ends it; no body ran twice."""
    for name in names:
        assert world.row(run_of(name)).owner == world.apps[name].worker, name
        GATES[name].set()
        assert await world.apps[name].get(run_of(name)).result(timeout=PATIENCE_SECONDS) == name
    assert sorted(BODIES) == sorted(names)


@pytest.mark.parametrize("shift", SHIFTS)
@scenario
async def test_two_workers_whose_clocks_are_apart_leave_each_other_alone(world: World, shift: int) -> None:
    await world.boot("right")
    await world.boot("wrong", shift=shift)
    await both_at_work(world, "right", "wrong")
    await world.live(3 * LEASE)
    await nobody_was_robbed(world, "right", "wrong")


@pytest.mark.parametrize("shift", SHIFTS)
@scenario
async def test_a_clock_that_is_set_while_two_workers_are_at_work_costs_neither_its_run(
    world: World, shift: int
) -> None:
    await world.boot("one")
    await world.boot("two")
    await both_at_work(world, "one", "two")
    await world.live(LEASE)
    world.shifts["one"] = shift
    await world.live(LEASE)
    world.shifts["two"] = shift
    await world.live(2 * LEASE)
    world.shifts["one"] = world.shifts["two"] = 0
    await world.live(2 * LEASE)
    await nobody_was_robbed(world, "one", "two")


@scenario
async def test_two_workers_whose_clocks_drift_apart_leave_each_other_alone(world: World) -> None:
    await world.boot("slow", rate=0.99)
    await world.boot("quick", rate=1.01)
    await both_at_work(world, "slow", "quick")
    await world.live(20 * LEASE)
    await nobody_was_robbed(world, "slow", "quick")


@scenario
async def test_after_a_suspend_of_eight_hours_each_worker_has_a_whole_lease_to_wake_up(world: World) -> None:
    await world.boot("sleepy")
    await world.boot("awake")
    await both_at_work(world, "sleepy", "awake")
    await world.live(LEASE)
    world.stop("sleepy")
    world.at += 8 * HOUR
    await world.live(LEASE, "awake")  # the other has not had a turn since
    await nobody_was_robbed(world, "sleepy", "awake")


@scenario
async def test_whoever_was_stopped_for_long_robs_nobody_when_it_wakes(world: World) -> None:
    await world.boot("stopped")
    await world.boot("at work")
    await both_at_work(world, "at work")
    for _ in range(5):
        world.stop("stopped")
        await world.live(1.5 * LEASE, "at work")
        world.apps["stopped"].pump.start()
        await world.turn("stopped")
    await nobody_was_robbed(world, "at work")


@pytest.mark.parametrize("shift", [0, *SHIFTS])
@scenario
async def test_the_runs_of_a_stopped_worker_go_on_elsewhere_whatever_the_clocks_say(world: World, shift: int) -> None:
    stopped = await world.boot("stopped")
    await both_at_work(world, "stopped")
    world.stop("stopped")
    await world.boot("other", shift=shift)
    await world.live(LEASE - 5, "other")
    assert world.row(run_of("stopped")).owner == stopped.worker
    await world.live(15, "other")
    await world.until(lambda: BODIES == ["stopped", "stopped"])
    assert world.row(run_of("stopped")).owner == world.apps["other"].worker
    assert world.row(run_of("stopped")).deaths == 0, "it is stopped, and not dead"


def quick_clock(store: LastingStore) -> StoreClock:
    """Return a clock on which a fifth of a second passes whenever it is looked at."""
    passing = itertools.count(0, SECOND // 5)
    return StoreClock(store.now, lambda: 1000 * next(passing))


def test_a_command_watches_a_stopped_owner_for_a_whole_lease_and_then_takes_its_run() -> None:
    store = LastingStore(clock=lambda: DAY)
    store.register_worker("stopped", 1, "host", HOUR, (), b'{"lease":1.0}')
    assert outwait(store, quick_clock(store), "stopped")
    assert [row.has_lease for row in store.workers()] == [False]
    assert outwait(store, quick_clock(store), "gone")


def test_a_command_does_not_wait_for_a_worker_whose_lease_lasts_or_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LastingStore(clock=lambda: DAY)
    store.register_worker("alive", 1, "host", 2 * DAY, (), b'{"lease":1.0}')
    assert not outwait(store, quick_clock(store), "alive")
    assert store.renew("alive", HOUR)  # its clock is far behind
    monkeypatch.setattr("everstep.engine.process.leases.time.sleep", lambda _: store.renew("alive", HOUR))
    assert not outwait(store, quick_clock(store), "alive")
    assert [row.has_lease for row in store.workers()] == [True]


# -- timers -----------------------------------------------------------------------------------------------------------


@scenario
async def test_a_timer_that_came_due_while_the_machine_was_suspended_fires_when_it_wakes(world: World) -> None:
    app = await world.boot("laptop")
    run = await app.start(asleep, 2 * 3600.0, id="r")
    await world.until(lambda: world.row("r").status == "waiting")
    await world.live(60)
    world.at += 8 * HOUR
    before, after = await run.result(timeout=PATIENCE_SECONDS)
    assert after - before > 8 * 3600


@pytest.mark.parametrize("rate", [0.95, 0.99, 1.01, 1.05, 1.5])
@scenario
async def test_a_timer_follows_the_store_s_clock_although_the_process_s_drifts(world: World, rate: float) -> None:
    app = await world.boot("drifting", rate=rate)
    run = await app.start(asleep, 2 * 3600.0, id="r")
    await world.until(lambda: world.row("r").status == "waiting")
    await world.live(7200 - 30, pace=10)
    assert app.store.run("r").status == "waiting", "it fired early"
    await world.live(40, pace=10)
    before, after = await run.result(timeout=PATIENCE_SECONDS)
    assert 7200 <= after - before < 7240


@pytest.mark.parametrize("shift", [-DAY, -HOUR])
@scenario
async def test_a_clock_that_is_set_back_makes_a_timer_no_longer(world: World, shift: int) -> None:
    app = await world.boot("set back")
    run = await app.start(asleep, 600.0, id="r")
    await world.until(lambda: world.row("r").status == "waiting")
    await world.live(60)
    world.shifts["set back"] = shift
    await world.live(600 - 90)
    assert app.store.run("r").status == "waiting", "it fired early"
    await world.live(45)
    before, after = await run.result(timeout=PATIENCE_SECONDS)
    assert 600 <= after - before < 700


@scenario
async def test_a_clock_that_is_put_forward_is_followed(world: World) -> None:
    """As after a pause that the kernel did not count: the timer's time has come."""
    app = await world.boot("put forward")
    run = await app.start(asleep, 7200.0, id="r")
    await world.until(lambda: world.row("r").status == "waiting")
    world.shifts["put forward"] = 8 * HOUR
    await world.live(LEASE)
    before, after = await run.result(timeout=PATIENCE_SECONDS)
    assert after - before > 7 * 3600


# -- retention --------------------------------------------------------------------------------------------------------


@scenario
async def test_a_clock_that_is_a_year_ahead_deletes_nothing_for_a_day(world: World) -> None:
    app = await world.boot("right")
    await app.start(asleep, 0.0, id="r")
    await app.get("r").result(timeout=PATIENCE_SECONDS)
    await world.live(LEASE)
    wrong = await world.boot("wrong", shift=365 * DAY, retention=Retention(runs=7 * 86400.0, every=10))
    await world.live(60)
    await world.until(lambda: wrong.collector._trusted_at)
    await world.live(60)
    assert world.row("r") is not None
    assert len((await wrong.gc()).runs) == 1, "a person's word counts"


@scenario
async def test_a_clock_that_is_put_forward_by_a_year_deletes_nothing_for_a_day(world: World) -> None:
    app = await world.boot("put forward", retention=Retention(runs=7 * 86400.0, every=10))
    await app.start(asleep, 0.0, id="r")
    await app.get("r").result(timeout=PATIENCE_SECONDS)
    await world.live(LEASE)
    world.shifts["put forward"] = 365 * DAY
    await world.live(LEASE)
    await world.until(lambda: app.collector._trusted_at)
    assert world.row("r") is not None
    world.at += DAY + HOUR
    await world.until(lambda: world.row("r") is None)


# -- the clock itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_done_to_the_store_s_clock_time_never_goes_back(seed: int) -> None:
    chance = random.Random(seed)
    at, shift = [DAY], [0]
    clock = StoreClock(lambda: at[0] + shift[0], lambda: 1000 * at[0])
    seen = [clock.now()]
    for _ in range(300):
        at[0] += chance.choice([0, 1, SECOND, 10 * SECOND, HOUR])
        shift[0] += chance.choice([0, 0, 0, 1, -1, 100_000, -100_000, HOUR, -HOUR, DAY, -DAY])
        seen.append(clock.now())
        clock.read_again()
        seen.append(clock.now())
    assert seen == sorted(seen)


def test_a_clock_that_was_set_back_and_put_right_again_is_where_it_would_have_been() -> None:
    at, shift = [DAY], [0]
    clock = StoreClock(lambda: at[0] + shift[0], lambda: 1000 * at[0])
    for change in (-DAY, 0, DAY, 0):
        shift[0] += change
        at[0] += 10 * SECOND
        clock.read_again()
        assert clock.now() == at[0]


def test_a_store_s_clock_that_stands_still_is_not_waited_for() -> None:
    """As that of a file whose machine's clock was set back: it is what was noted last."""
    at = [DAY]
    clock = StoreClock(lambda: DAY, lambda: 1000 * at[0])
    for _ in range(10):
        at[0] += 10 * SECOND
        clock.read_again()
    assert clock.now() == at[0]


class FakeTicks:
    """A process whose kernel counts `rate` times as fast as the store's clock goes."""

    def __init__(self, rate: float, *, notes: bool = False) -> None:
        self.at, self.shift, self.latest, self._rate, self._notes = 2_000_000_000 * SECOND, 0, 0, rate, notes
        self.clock = StoreClock(self.store_now, lambda: 1000 * round(self.at * rate))
        self.seen = [self.clock.now()]

    def store_now(self) -> int:
        return max(self.at + self.shift, self.latest)

    def live(self, seconds: float) -> None:
        """Let time pass, and read the clock again; the store notes what was read, as stores do."""
        for _ in range(10):
            self.at += round(seconds * SECOND / 10)
            self.seen.append(self.clock.now())
        noted = self.clock.read_again()
        if self._notes:
            self.latest = max(self.latest, noted)
        self.seen.append(self.clock.now())
        assert self.seen == sorted(self.seen), "time went back"


RATES = [0.5, 0.95, 0.99, 1.0, 1.01, 1.05, 1.5, 2.0]


@pytest.mark.parametrize("rate", RATES)
def test_however_wrong_ticks_are_time_keeps_to_the_store_s_clock(rate: float) -> None:
    world = FakeTicks(rate)
    for _ in range(500):
        world.live(10)
        assert world.clock.now() - world.at in range(-1000, round(10 * SECOND * max(0.0, rate - 1)) + 1000)


@pytest.mark.parametrize("set_back", [HOUR, DAY])
@pytest.mark.parametrize("rate", RATES)
def test_a_store_s_clock_that_was_set_back_is_followed_at_its_pace_however_wrong_ticks_are(
    rate: float, set_back: int
) -> None:
    world = FakeTicks(rate)
    world.live(10)
    world.shift = -set_back
    world.live(10)
    before, at = world.clock.now(), world.at
    assert abs(before - at) <= 20 * SECOND
    for _ in range(500):
        world.live(10)
    passed = (world.clock.now() - before) / (world.at - at)
    assert min(rate, 1.0) * 0.99 < passed < 1.01


@pytest.mark.parametrize("set_back", [HOUR, DAY])
@pytest.mark.parametrize("seed", range(5))
def test_a_store_that_is_never_behind_what_was_noted_loses_no_time(seed: int, set_back: int) -> None:
    chance, world = random.Random(seed), FakeTicks(1.0, notes=True)
    world.live(10)
    world.shift = -set_back
    for _ in range(300):
        world.live(chance.uniform(1, 20))
        assert abs(world.clock.now() - world.at) < 1000


def test_ticks_count_the_time_of_a_suspended_machine_where_there_is_such_a_clock() -> None:
    import time

    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this kernel has no such clock")
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    between = kernel.ticks()
    assert before <= between <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


async def test_cancelled_alarms_are_not_kept_until_their_time() -> None:
    clock = StoreClock(lambda: DAY, lambda: 1000 * DAY)
    alarms = Alarms(clock, asyncio.get_running_loop())
    kept = [alarms.add(2 * DAY, list) for _ in range(10)]
    for _ in range(10_000):
        alarms.add(2 * DAY, list).cancel()
    assert len(alarms._heap) < 500
    for alarm in kept:
        alarm.cancel()
