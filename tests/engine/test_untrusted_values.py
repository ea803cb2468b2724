"""Values that misbehave: results, published values, keys, answers of probes, facts, what callbacks raise."""

import asyncio
import logging
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import RunHeld
from everstep.testing.clock import FakeClock
from tests.engine.misbehaving import RAISED, Liar, raising


class Plain:
    """An object of which nothing can be stored, and whose every method raises."""

    __slots__ = ()
    __str__ = __repr__ = __eq__ = __hash__ = __len__ = __iter__ = __bool__ = raising(SystemExit)  # type: ignore[assignment]
    __getattr__ = __format__ = raising(SystemExit)  # type: ignore[assignment]


class Faked:
    """An object that says it is of a class it is not."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return raising(SystemExit)()


class Encoded:
    """A class whose encoding raises."""


KIND: list[type[BaseException]] = [ValueError]
everstep.register(Encoded, encode=lambda value: raising(KIND[0])(), decode=lambda data: Encoded())
VALUES = {"plain": Plain(), "faked": Faked(), "encoded": Encoded(), "text": Liar("text"), "nested": [{"a": Plain()}]}
GIVEN: list[Any] = [None]


@step
async def returns() -> Any:
    return GIVEN[0]


@step
def returns_on_a_thread() -> Any:
    return GIVEN[0]


@step(fallback=lambda: GIVEN[0])
async def falls_back() -> Any:
    raise ValueError


@step(effect="once")
async def once() -> Any:
    return GIVEN[0]


async def probe(key: str) -> Any:
    return GIVEN[0]


async def probe_done(key: str) -> Any:
    return everstep.Done(GIVEN[0])


@step(effect="once", probe=probe, probe_for=0)
async def probed() -> None:
    raise ConnectionError


@step(effect="once", probe=probe_done, probe_for=0)
async def probed_done() -> None:
    raise ConnectionError


@step(key=lambda: GIVEN[0])
async def keyed() -> None:
    pass


@step(cost=lambda: GIVEN[0])
async def priced() -> None:
    pass


@step
async def takes(value: Any) -> None:
    pass


@step
async def beats() -> None:
    everstep.heartbeat(GIVEN[0])


@step
async def streams() -> None:
    everstep.stream("s").append(GIVEN[0])


STEPS: dict[str, Any] = {
    one.name: one for one in (returns, falls_back, once, probed, probed_done, keyed, priced, beats, streams)
}


@workflow(budget=everstep.Budget(usd=1))
async def uses(name: str) -> Any:
    match name:
        case "result":
            return GIVEN[0]
        case "published":
            everstep.publish("value", GIVEN[0])
        case "thread":
            await asyncio.to_thread(returns_on_a_thread)
        case "argument":
            await takes(GIVEN[0])
        case "approval":
            await everstep.approval("what", GIVEN[0])
        case "continued":
            everstep.continue_as(GIVEN[0])
        case "checkpoint":
            await everstep.checkpoint(GIVEN[0])
        case _:
            await STEPS[name]()
    return None


PLACES = [*STEPS, "result", "published", "thread", "argument", "approval", "continued", "checkpoint"]
OVER = ("failed", "completed", "held")
HELD = {"once": "in-doubt", "probed": "in-doubt", "probed_done": "in-doubt"}
STOPPED = {place: "poisoned" for place in PLACES if place not in ("once", "probed", "keyed", "priced")}
"""What becomes of a run whose value raises what stops a program whenever it is encoded."""


CASES = [(what, ValueError) for what in VALUES] + [
    ("encoded", kind)
    for kind in RAISED
    if kind is not KeyboardInterrupt  # which may be a real one, and ends the process
]


@pytest.mark.parametrize(("what", "kind"), CASES)
async def test_a_run_ends_as_it_should_whatever_is_wrong_with_a_value(what: str, kind: type[BaseException]) -> None:
    GIVEN[0], KIND[0] = VALUES[what], kind

    clock = FakeClock()
    async with everstep.open("memory:", clock=clock) as app:
        for place in PLACES:
            run = await app.start(uses, place, id=place)
            async with asyncio.timeout(60):
                while app.store.run(place).status not in OVER:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
                    await clock.rest(app)
                    clock.advance(3600)
                    app.pump.nudge()
            try:
                await run.result()
                ended = "completed"
            except RunHeld as held:
                ended = held.reason
            except Exception:  # noqa: BLE001  # that it can be raised counts
                ended = "failed"
            expected = "completed" if (what, place) == ("text", "keyed") else HELD.get(place, "failed")
            if kind in (SystemExit, asyncio.CancelledError):
                expected = STOPPED.get(place, expected)
            assert ended == expected, place


@pytest.mark.parametrize("kind", [ValueError, RecursionError, RuntimeError])
def test_a_callback_or_a_logger_that_raises_changes_nothing_about_a_hold(kind: type[Exception]) -> None:
    class Rude(Exception):
        __str__ = __repr__ = raising(kind)  # type: ignore[assignment]
        __cause__ = __notes__ = property(raising(kind))  # type: ignore[assignment]

    def tell(hold: Any) -> None:
        raise Rude

    async def tell_later(hold: Any) -> None:
        raise Rude

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise kind

    @workflow
    async def waits() -> None:
        await everstep.receive("never")

    async def main() -> None:
        async with everstep.open("memory:", on_hold=[tell, tell_later]) as app:
            await app.start(waits, id="r")
            await app.hold("r")
            with pytest.raises(RunHeld):
                await app.get("r").result()
            await app.resolve("r", "retry")
            assert await app.get("r").status() != "held"

    handler = Broken()
    logging.getLogger("everstep").addHandler(handler)
    try:
        asyncio.run(main())
    finally:
        logging.getLogger("everstep").removeHandler(handler)
