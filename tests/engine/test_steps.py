"""Steps: attempts, heartbeats, keys and fallbacks."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Fatal, NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.errors import RunHeld, StepTimedOut
from everstep.model.events import decode_body
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, cut, echo, live, once_live, play, prove, prove_life, settle, until
from tests.engine.processes import notes, run
from tests.lasting import LastingStore

EVEN = Retry(attempts=3, first=10, factor=2, jitter=0)


class Busy(Exception):
    """An error of a service that says when to come back."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"busy for {seconds} s")
        self.retry_after = seconds


class Response:
    headers = {"Retry-After": "120"}


# -- attempts ---------------------------------------------------------------------------------------------------------
def test_a_failing_step_is_tried_again_after_growing_delays_and_then_raises() -> None:
    attempts: list[int] = []

    @step(retry=EVEN)
    async def broken() -> None:
        attempts.append(everstep.current().attempt)
        raise OSError("no")

    @workflow
    async def flow() -> str:
        began = everstep.now()
        try:
            await broken()
        except OSError as error:
            return f"{error} after {(everstep.now() - began).total_seconds()}"
        return "?"

    life = once_live(flow)
    assert life.value == "no after 30.0"
    assert attempts == [1, 2, 3]
    assert [body.attempt for body in life.bodies("attempt_failed")] == [1, 2]
    assert life.bodies("step_failed")[0].attempt == 3


def test_without_a_policy_there_is_one_attempt() -> None:
    attempts: list[int] = []

    @step
    async def broken() -> None:
        attempts.append(1)
        raise OSError("no")

    @workflow
    async def flow() -> None:
        await broken()

    assert isinstance(prove_life(flow, every_prefix=False).error, OSError)
    assert attempts == [1]


@step(retry=EVEN)
async def third_time_lucky() -> int:
    attempt = everstep.current().attempt
    if attempt < 3:
        raise OSError(f"attempt {attempt}")
    return attempt


@workflow
async def lucky_flow() -> int:
    return await third_time_lucky()


async def test_attempt_numbers_and_back_off_deadlines_survive_a_crash_at_every_event() -> None:
    """The step's attempts are counted in the history; a crash that cuts one off adds one, and no failure is lost."""

    store = LastingStore()
    first = await live(store, FakeClock(), lucky_flow, ())
    assert first.value == 3
    dues = [body.due for body in first.bodies("attempt_failed")]
    for count in range(1, len(first.events)):
        kinds = first.kinds()[:count]
        if kinds[-1] != "attempt_failed":
            continue
        clock = FakeClock(first.events[count - 1].at)
        app = await App(cut(store, count), clock=clock).open()
        handle = await app.start(lucky_flow, id=RUN)
        await settle(app)
        due = dues[kinds.count("attempt_failed") - 1]
        assert app.drivers[RUN].wake_at() == due
        clock.advance((due - clock.now()) / 1e6 - 0.001)
        await settle(app)
        assert (await handle.history())[-1].kind == "attempt_failed"  # not a moment before it is due
        clock.advance(0.001)
        await play(app, clock)
        assert await handle.result() == 3
        started = [event.body.get("attempt", 1) for event in await handle.history() if event.kind == "step_started"]
        assert started == [1, 2, 3]
        await app.close()


async def test_a_crash_does_not_give_a_failing_step_more_attempts_than_its_policy() -> None:
    begun: list[int] = []

    @step(retry=EVEN)
    async def broken() -> None:
        begun.append(everstep.current().attempt)
        raise OSError("no")

    @workflow
    async def flow() -> None:
        await broken()

    store = LastingStore()
    first = await live(store, FakeClock(), flow, ())
    assert begun == [1, 2, 3]
    for count, kind in enumerate(first.kinds(), 1):
        if kind == "attempt_failed":
            begun.clear()
            failed = first.kinds()[:count].count("attempt_failed")
            again = await live(cut(store, count), FakeClock(first.events[count - 1].at), flow, ())
            assert isinstance(again.error, OSError)
            assert begun == list(range(failed + 1, 4))


async def test_an_attempt_that_a_crash_cut_off_does_not_use_up_the_policy() -> None:
    store = LastingStore()
    first = await live(store, FakeClock(), lucky_flow, ())
    begun = first.kinds().index("step_started", first.kinds().index("attempt_failed")) + 1
    again = await live(cut(store, begun), FakeClock(first.events[begun - 1].at), lucky_flow, ())
    assert again.value == 3
    assert [(body.attempt, body.because) for body in again.bodies("step_started")] == [
        (1, ""),
        (2, "retry"),
        (3, "crash"),
    ]


@pytest.mark.parametrize(
    ("policy", "error", "attempts"),
    [
        (Retry(attempts=3, first=0, only=OSError), OSError("x"), 3),
        (Retry(attempts=3, first=0, only=(OSError, KeyError)), ConnectionError("x"), 3),
        (Retry(attempts=3, first=0, only=OSError), ValueError("x"), 1),
        (Retry(attempts=3, first=0, only=OSError), NotDone("x"), 3),
        (Retry(attempts=3, first=0, never=ValueError), ValueError("x"), 1),
        (Retry(attempts=3, first=0, never=ValueError), OSError("x"), 3),
        (Retry(attempts=3, first=0), Fatal("x"), 1),
        (Retry(attempts=3, first=0, only=Fatal), Fatal("x"), 1),
    ],
)
def test_the_policy_says_which_errors_get_another_attempt(policy: Retry, error: Exception, attempts: int) -> None:
    seen: list[int] = []

    @step(retry=policy)
    async def broken() -> None:
        seen.append(1)
        raise error

    @workflow
    async def flow() -> None:
        await broken()

    assert type(once_live(flow).error) is type(error)
    assert len(seen) == attempts


@pytest.mark.parametrize("carried", ["attribute", "header"])
def test_a_retry_after_that_an_error_carries_is_honoured(carried: str) -> None:
    @step(retry=Retry(attempts=2, first=1, jitter=0))
    async def limited() -> str:
        if everstep.current().attempt == 1:
            error = Busy(120) if carried == "attribute" else OSError("429")
            if carried == "header":
                error.response = Response()  # type: ignore[attr-defined]
            raise error
        return "in"

    @workflow
    async def flow() -> float:
        began = everstep.now()
        await limited()
        return (everstep.now() - began).total_seconds()

    assert once_live(flow).value == 120.0


def test_when_attempts_are_used_up_the_policy_may_ask_a_person() -> None:
    @step(retry=Retry(attempts=2, first=0, then="hold"))
    async def broken() -> None:
        raise OSError("no")

    @workflow
    async def flow() -> None:
        await broken()

    with pytest.raises(RunHeld) as held:
        once_live(flow)
    assert held.value.reason == "exhausted"


def test_jitter_spreads_attempts_and_stays_within_its_share() -> None:
    @step(retry=Retry(attempts=2, first=40, jitter=0.5))
    async def broken() -> None:
        raise OSError("no")

    @workflow
    async def flow() -> None:
        await broken()

    delays = set()
    for _ in range(5):
        life = once_live(flow)
        failed = next(event for event in life.events if event.kind == "attempt_failed")
        delays.add((decode_body(failed.kind, failed.body).due - failed.at) / 1e6)
    assert len(delays) == 5
    assert all(20 <= delay <= 60 for delay in delays)


def test_an_async_body_that_takes_too_long_is_cancelled_and_counts_as_failed() -> None:
    told: list[str] = []

    @step(timeout=0.01, retry=Retry(attempts=2, first=0))
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    @workflow
    async def flow() -> str:
        try:
            await slow()
        except TimeoutError as error:
            return f"{type(error).__name__}: {error}"
        return "?"

    assert once_live(flow).value.startswith("StepTimedOut: An attempt at ")
    assert told == ["cancelled", "cancelled"]


def test_a_def_body_that_takes_too_long_is_given_up_although_its_thread_goes_on() -> None:
    release, ended = threading.Event(), threading.Event()

    @step(timeout=0.01)
    def slow() -> str:
        release.wait(10)
        ended.set()
        return "too late"

    @workflow
    def flow() -> str:
        try:
            return slow()
        except StepTimedOut:
            return "timed out"

    async def main() -> tuple[str, list[str]]:
        clock = FakeClock()
        app = await App(LastingStore(), clock=clock).open()
        handle = await app.start(flow, id=RUN)
        result = await handle.result(timeout=60)
        release.set()
        await until(ended.is_set)
        kinds = [event.kind for event in await handle.history()]
        await app.close()
        return result, kinds

    result, kinds = asyncio.run(main())
    assert result == "timed out"
    assert kinds == ["run_started", "step_started", "step_failed", "run_completed"]


def test_a_timeout_error_of_the_body_itself_is_not_taken_for_the_step_s_timeout() -> None:
    @step(timeout=10)
    async def own() -> None:
        raise TimeoutError("the body's own")

    @workflow
    async def flow() -> str:
        try:
            await own()
        except TimeoutError as error:
            return f"{type(error).__name__} {error}"
        return "?"

    assert prove(flow) == "TimeoutError the body's own"


# -- heartbeats -------------------------------------------------------------------------------------------------------
def test_the_newest_heartbeat_reaches_the_next_attempt() -> None:
    seen: list[Any] = []

    @step(retry=Retry(attempts=3, first=0))
    async def copy() -> int:
        details = everstep.current().details
        seen.append(details)
        everstep.heartbeat({"done": len(seen) * 10 - 5})
        everstep.heartbeat({"done": len(seen) * 10})
        if len(seen) < 3:
            raise OSError("cut off")
        return int(details["done"])

    @workflow
    async def flow() -> int:
        return await copy()

    assert once_live(flow).value == 20
    assert seen == [None, {"done": 10}, {"done": 20}]


def test_heartbeats_of_a_def_body_come_from_its_thread() -> None:
    seen: list[Any] = []

    @step(retry=Retry(attempts=2, first=0))
    def copy() -> Any:
        seen.append(everstep.current().details)
        everstep.heartbeat([1, 2])
        everstep.heartbeat([3, 4])
        if len(seen) == 1:
            raise OSError("cut off")
        return seen[-1]

    @workflow
    def flow() -> Any:
        return copy()

    assert once_live(flow).value == [3, 4]


def test_a_heartbeat_reaches_the_next_attempt_when_the_worker_merely_stops() -> None:
    seen: list[Any] = []
    beaten = asyncio.Event()

    @step
    async def hang_and_count() -> Any:
        seen.append(everstep.current().details)
        if len(seen) == 1:
            for number in range(5):
                everstep.heartbeat(number)
            beaten.set()
            await asyncio.Event().wait()
        return seen[-1]

    @workflow
    async def flow() -> Any:
        return await hang_and_count()

    async def main() -> Any:
        store = LastingStore()
        close, store.close = store.close, lambda: None  # type: ignore[method-assign]
        app = await App(store, clock=FakeClock()).open()
        await app.start(flow, id=RUN)
        await beaten.wait()
        await app.close()
        result = (await live(store, FakeClock(), flow, ())).value
        close()
        return result

    assert asyncio.run(main()) == 4


def test_a_heartbeat_survives_a_real_kill_and_the_key_stays_the_same(tmp_path: Path) -> None:
    status, output = run("count", tmp_path)
    assert status == -9, output
    status, output = run("count", tmp_path)
    assert status == 0, output
    first, second, result = notes(tmp_path)
    key = first.rpartition(" ")[2]
    assert first == f"attempt 1 from None with {key}"
    assert second == f"attempt 2 from 3 with {key}"
    assert result == "[2, 3]"


# -- keys -------------------------------------------------------------------------------------------------------------
KEYS: list[str] = []


@step(retry=Retry(attempts=2, first=0), name="keyed")
async def keyed(fail_first: bool) -> str:
    KEYS.append(everstep.key())
    if fail_first and everstep.current().attempt == 1:
        raise OSError("again")
    return everstep.key()


@workflow
async def keys_flow() -> list[str]:
    return [await keyed(True), await keyed(False)]


def test_a_key_is_the_same_in_every_attempt_and_another_in_every_step_and_run() -> None:
    KEYS.clear()
    one = once_live(keys_flow).value
    assert [one[0], one[0], one[1]] == KEYS
    other = once_live(keys_flow).value
    assert len({*one, *other}) == 4
    assert all(len(key) >= 32 for key in one)


async def test_a_key_is_the_same_after_a_crash_and_another_after_a_restart() -> None:
    store = LastingStore()
    first = await live(store, FakeClock(), keys_flow, ())
    for count in range(1, len(first.events)):
        again = await live(cut(store, count), FakeClock(first.events[count - 1].at), keys_flow, ())
        assert again.value == first.value
    app = await App(store, clock=FakeClock()).open()
    restarted = await (await app.start(keys_flow, id=RUN, on_existing="restart")).result(timeout=60)
    assert not set(restarted) & set(first.value)
    await app.close()


def test_the_history_flags_a_repeated_effect_whose_body_never_asked_for_its_key() -> None:
    @step(retry=Retry(attempts=2, first=0))
    async def effect(asks: bool) -> None:
        if asks:
            everstep.key()
        if everstep.current().attempt == 1:
            raise OSError("again")

    @step(effect="read", retry=Retry(attempts=2, first=0))
    async def look() -> None:
        if everstep.current().attempt == 1:
            raise OSError("again")

    @workflow
    async def flow() -> None:
        await effect(True)
        await effect(False)
        await look()
        await echo(1)

    flags = [body.key_unused for body in once_live(flow).bodies("step_completed")]
    assert flags == [False, True, False, False]


# -- fallbacks --------------------------------------------------------------------------------------------------------
FALLEN: list[str] = []


def fall_back(name: str) -> str:
    FALLEN.append(threading.current_thread().name)
    return f"plain {name}"


async def fall_back_later(name: str) -> str:
    await asyncio.sleep(0)
    return f"async {name}"


@pytest.mark.parametrize(
    ("fallback", "expected"), [("a value", "a value"), (fall_back, "plain x"), (fall_back_later, "async x")]
)
@pytest.mark.parametrize("error", [OSError("no"), Fatal("never")])
def test_a_fallback_takes_the_place_of_a_failed_step_s_outcome(fallback: Any, expected: str, error: Exception) -> None:
    attempts: list[int] = []

    @step(retry=Retry(attempts=2, first=0), fallback=fallback)
    async def broken(name: str) -> str:
        attempts.append(1)
        raise error

    @workflow
    async def flow() -> str:
        return await broken("x")

    life = once_live(flow)
    assert life.value == expected
    assert len(attempts) == (1 if isinstance(error, Fatal) else 2)
    assert [body.fallback for body in life.bodies("step_completed")] == [True]


def test_a_plain_fallback_does_not_block_the_application_s_loop() -> None:
    @step(fallback=fall_back)
    async def broken(name: str) -> str:
        raise OSError(name)

    @workflow
    async def flow() -> str:
        return await broken("x")

    FALLEN.clear()
    assert once_live(flow).value == "plain x"
    assert [threading.main_thread().name] != FALLEN


def test_a_fallback_s_own_error_is_the_step_s_failure() -> None:
    @step(fallback=lambda: 1 // 0)
    async def broken() -> int:
        raise OSError("no")

    @workflow
    async def flow() -> str:
        try:
            await broken()
        except ZeroDivisionError as error:
            return str(error)
        return "?"

    assert "zero" in prove(flow)


async def test_a_crash_before_the_fallback_s_outcome_does_not_bring_a_finally_failed_step_back() -> None:
    begun: list[int] = []

    @step(retry=Retry(attempts=5, first=0), fallback="fallen")
    async def broken() -> str:
        begun.append(1)
        raise Fatal("certainly")

    @workflow
    async def flow() -> str:
        return await broken()

    store = LastingStore()
    first = await live(store, FakeClock(), flow, ())
    assert first.value == "fallen"
    begun.clear()
    count = first.kinds().index("attempt_failed") + 1
    again = await live(cut(store, count), FakeClock(first.events[-1].at), flow, ())
    assert again.value == "fallen"
    assert begun == []
