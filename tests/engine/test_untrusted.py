"""Errors and values that misbehave: whatever they raise, return or claim to be, their run ends as it should."""

import asyncio
import logging
import math
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import everstep
from everstep import NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.engine.code import unwinding
from everstep.errors import RunHeld
from everstep.model.retry import retry_after
from everstep.model.untrusted import Log, attribute, described, is_a, log_error, logger, text_of, type_name
from everstep.testing.clock import FakeClock
from tests.engine.misbehaving import RAISED, Liar, raising


def endless(*args: Any) -> Iterator[int]:
    while True:
        yield 1


NAMES = ("response", "retry_after", "args", "__cause__", "__context__", "__traceback__", "__notes__", "__dict__")
METHODS = ("__str__", "__repr__", "__eq__", "__hash__", "__getattribute__", "__getattr__", "__bool__", "__reduce__")
METHODS_MORE = ("__reduce_ex__", "__instancecheck__", "__format__", "__len__", "__iter__", "__setattr__", "__dir__")


def misbehaving() -> dict[str, type[Exception]]:
    """Return classes of errors, by what is wrong with them."""
    found: dict[str, dict[str, Any]] = {}
    for kind in RAISED:
        for name in NAMES:
            found[f"{name} raises {kind.__name__}"] = {name: property(raising(kind))}
        for name in METHODS:
            found[f"{name} raises {kind.__name__}"] = {name: raising(kind)}
    for name in METHODS_MORE:
        found[f"{name} raises"] = {name: raising(ValueError)}
    found["__class__ raises"] = {"__class__": property(raising(ValueError))}
    found["__class__ lies"] = {"__class__": property(lambda self: everstep.Fatal)}
    found["__str__ returns a number"] = {"__str__": lambda self: 1}
    found["__str__ is huge"] = {"__str__": lambda self: "x" * 5_000_000}
    found["__str__ lies"] = {"__str__": lambda self: Liar("text")}
    found["__str__ has a half of a character"] = {"__str__": lambda self: "\ud800"}
    found["args never end"] = {"args": property(endless)}
    found["notes never end"] = {"__notes__": property(endless)}
    found["a cause that is no error"] = {"__cause__": property(lambda self: "text")}
    found["itself as its cause"] = {"__cause__": property(lambda self: self)}
    for asked in (1e300, math.nan, math.inf, -1, "1e300", "soon", "Fri, 31 Dec 9999 23:59:59 GMT", True, [], object()):
        found[f"retry_after is {type(asked).__name__} {str(asked)[:12]}"] = {"retry_after": asked}
    headers = type("Headers", (), {"get": raising(SystemExit)})()
    found["headers.get raises"] = {"response": type("Response", (), {"headers": headers})()}
    found["headers never end"] = {"response": type("Response", (), {"headers": {"Retry-After": "9" * 400}})()}
    return {name: type("Hostile", (Exception,), dict(body)) for name, body in found.items()}


MISBEHAVING = misbehaving()


class Mean(type):
    """A metaclass that lies about its classes."""

    __name__ = property(raising(SystemExit))  # type: ignore[assignment]
    __mro__ = property(raising(SystemExit))  # type: ignore[assignment]
    __hash__ = __eq__ = raising(SystemExit)  # type: ignore[assignment]


MISBEHAVING["its class misbehaves"] = Mean("Hostile", (Exception,), {})  # type: ignore[assignment]
CURRENT: list[type[Exception]] = []
RANDOM = random.Random(1)


def error() -> Exception:
    return CURRENT[0].__new__(CURRENT[0], "word", object())


# -- the places -----------------------------------------------------------------------------------------------------
@step(retry=Retry(attempts=2, first=1))
async def awaited() -> None:
    raise error()


@step(retry=Retry(attempts=2, first=1))
def on_a_thread() -> None:
    raise error()


@step(retry=Retry(attempts=2, only=LookupError, never=OSError))
async def chosen() -> None:
    raise error()


@step(timeout=60)
def timed() -> None:
    raise error()


@step(retry=Retry(attempts=1, then="hold"))
async def exhausted() -> None:
    raise error()


@step(effect="once", not_done=LookupError)
async def doubtful() -> None:
    raise error()


async def no_answer(key: str) -> Any:
    raise error()


@step(effect="once", probe=no_answer, probe_for=0)
async def probed() -> None:
    raise error()


async def hopeless() -> None:
    raise error()


@step(fallback=hopeless)
async def falling_back() -> None:
    raise error()


@step(cost=lambda: error().args[5])
async def charged() -> None:
    raise error()


async def undo(outcome: Any) -> None:
    raise error()


@step(compensate=undo)
async def done_before() -> str:
    return "done"


@workflow
async def fails_itself() -> None:
    raise error()


@workflow
async def child() -> None:
    await awaited()


@workflow
async def calls(name: str) -> None:
    if name == "child":
        await child()
    elif name == "on_a_thread":
        await asyncio.to_thread(on_a_thread)
    elif name == "timed":
        await asyncio.to_thread(timed)
    elif name == "group":
        async with asyncio.TaskGroup() as both:
            both.create_task(awaited())
            both.create_task(chosen())
    elif name == "compensated":
        await done_before()
        await awaited()
    else:
        await STEPS[name]()


STEPS: dict[str, Any] = {
    "awaited": awaited,
    "chosen": chosen,
    "exhausted": exhausted,
    "doubtful": doubtful,
    "probed": probed,
    "falling_back": falling_back,
    "charged": charged,
}
ENDS = {"exhausted": "exhausted", "doubtful": "in-doubt", "probed": "in-doubt", "compensated": "exhausted"}
"""Why a run is held, where that is the right end. All others fail."""
PLACES = [*STEPS, "on_a_thread", "timed", "child", "group", "compensated", "itself"]


async def end_of(app: App, clock: FakeClock, place: str) -> str:
    """Return how a run ended: failed, or why it is held. Pauses between attempts are skipped, a day at a time."""
    run = await (app.start(fails_itself, id=place) if place == "itself" else app.start(calls, place, id=place))
    async with asyncio.timeout(60):
        while (row := app.store.run(place)) is not None and row.status not in ("failed", "completed", "held"):
            await asyncio.sleep(0)
            await clock.rest(app)
            clock.advance(86_400)
            app.pump.nudge()
    try:
        await run.result()
    except RunHeld as held:
        return held.reason
    except Exception:  # noqa: BLE001  # of whatever type; that it can be raised counts
        return "failed"
    return "completed"


@pytest.mark.parametrize("what", MISBEHAVING)
async def test_a_run_ends_as_it_should_whatever_is_wrong_with_an_error(what: str) -> None:
    CURRENT[:] = [MISBEHAVING[what]]

    clock = FakeClock()
    async with everstep.open("memory:", clock=clock) as app:
        for place in PLACES:
            assert await end_of(app, clock, place) == ENDS.get(place, "failed"), place
            history = str(await app.get(place).history())
            assert "Hostile" in history or "'ref'" in history, "what could be read of the error is recorded"


@pytest.mark.parametrize("what", MISBEHAVING)
def test_nothing_of_an_error_is_trusted(what: str) -> None:
    CURRENT[:] = [MISBEHAVING[what]]
    bad = error()
    assert type_name(bad) == "Hostile"
    assert len(text_of(bad)) < 10_000
    assert text_of(bad, by=repr)
    assert described(bad).startswith("Hostile")
    assert is_a(bad, Exception) and not is_a(bad, everstep.Fatal, NotDone)  # noqa: PT018
    assert attribute(bad, "nothing", 7) == 7
    pause = Retry(attempts=2, first=3, jitter=0).delay(1, bad, RANDOM)
    assert pause in (3, 86_400)


def test_a_text_that_cannot_be_read_is_replaced_by_a_note() -> None:
    CURRENT[:] = [MISBEHAVING["__str__ raises SystemExit"]]
    assert text_of(error()) == "<Hostile: its text could not be read, SystemExit was raised>"


@pytest.mark.parametrize(
    ("asked", "pause"),
    [(30, 30), ("45", 45), (0, 0), (1e300, 86_400), (10**400, None), ("1e300", 86_400), (90_000, 86_400)]
    + [(one, None) for one in (math.nan, math.inf, -1, "soon", "Wed, 01 Jan 9999 00:00:00 GMT", None, True, b"x")],
)
def test_a_server_may_ask_for_a_day_at_most(asked: Any, pause: float | None) -> None:
    bad = Exception()
    bad.retry_after = asked  # type: ignore[attr-defined]
    policy = Retry(attempts=2, first=3, jitter=0)
    assert policy.delay(1, bad, RANDOM) == (3 if pause is None else pause)
    assert (retry_after(bad) is None) == (pause is None)


def test_the_longest_pause_that_a_server_may_ask_for_is_a_setting() -> None:
    bad = Exception()
    bad.retry_after = 500  # type: ignore[attr-defined]
    policy = Retry(attempts=2, retry_after_most=60)
    assert policy.delay(1, bad, RANDOM) == 60


class Raising(logging.Handler):
    """A handler that misbehaves."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self._act = act

    def emit(self, record: logging.LogRecord) -> None:
        self._act()


@pytest.fixture
def handled() -> Iterator[Callable[[Callable[[], Any]], Log]]:
    name = "everstep.tests.handled"
    before = list(logging.getLogger(name).handlers)

    def with_handler(act: Callable[[], Any]) -> Log:
        logging.getLogger(name).addHandler(Raising(act))
        return logger(name)

    yield with_handler
    logging.getLogger(name).handlers[:] = before


@pytest.mark.parametrize("kind", [ValueError, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_a_log_handler_that_raises_ends_nothing(kind: type[BaseException], handled: Any) -> None:
    log = handled(lambda: raising(kind)())
    log.error("a record")
    log_error(log, "a record", error=ValueError("text"))


def test_a_signal_that_comes_while_a_record_is_logged_ends_the_process_all_the_same(handled: Any) -> None:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(number)

    log = handled(lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit):
            log.error("a record")
        with pytest.raises(SystemExit):
            log_error(log, "a record", error=ValueError("text"))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_that_comes_while_a_record_is_logged_is_passed_on(handled: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        handled(raising(KeyboardInterrupt)).error("a record")


def leave_at_a_signal(*args: Any) -> Any:
    signal.raise_signal(signal.SIGUSR1)


async def closes() -> Any:
    try:
        yield 1
    finally:
        leave_at_a_signal()


async def close_one() -> None:
    generator = closes()
    await anext(generator)
    await unwinding._close(generator)


ASKS: dict[str, Callable[[], Any]] = {
    "text": lambda: text_of(type("Asked", (), {"__str__": leave_at_a_signal})()),
    "attribute": lambda: attribute(type("Asked", (), {"it": property(leave_at_a_signal)})(), "it"),
    "generator": lambda: asyncio.run(close_one()),
}


@pytest.mark.parametrize("asked", ASKS)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_signal_that_comes_while_an_object_is_asked_is_passed_on(asked: str, kind: type[BaseException]) -> None:
    before = signal.signal(signal.SIGUSR1, raising(kind))
    try:
        with pytest.raises(kind):
            ASKS[asked]()
    finally:
        signal.signal(signal.SIGUSR1, before)
