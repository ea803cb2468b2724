"""A loop that does not turn is noticed by a thread, which names the line and the run."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.process.stalls import LOOP, NAMED_AFTER, Stalls
from tests.lasting import LastingStore

NAMED: threading.Event = threading.Event()


class Hears(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "has not turned" in record.getMessage():
            NAMED.set()


@pytest.fixture
def hears() -> Iterator[Hears]:
    NAMED.clear()
    made = Hears()
    logging.getLogger("everstep.worker").addHandler(made)
    yield made
    logging.getLogger("everstep.worker").removeHandler(made)


@step
async def blocks() -> str:
    NAMED.wait(60)  # it waits without `await`
    return "done"


@workflow
async def with_body() -> str:
    return await blocks()


@workflow
async def computes() -> str:
    while not NAMED.is_set():
        pass
    return "done"


@step
def plain() -> None: ...


@workflow
def computes_plainly() -> str:
    plain()
    while not NAMED.is_set():
        pass
    return "done"


@pytest.mark.parametrize(
    ("flow", "whose"),
    [
        (with_body, "the body of blocks of run r"),
        (computes, "workflow code of run r (computes)"),
        (computes_plainly, "workflow code of run r (computes_plainly)"),
    ],
    ids=["body", "workflow", "def workflow"],
)
def test_code_that_keeps_the_loop_is_named_with_its_line(hears: Hears, flow: object, whose: str) -> None:
    async def main() -> App:
        app = await App(LastingStore()).open()
        stalls = Stalls(app, look_seconds=0.01)
        stalls.begin()
        assert await app.run(flow, id="r") == "done"  # type: ignore[call-overload]
        while not app.background.troubles():
            await asyncio.sleep(0.001)
        stalls.close()
        await app.close()
        return app

    app = asyncio.run(main())
    (line,) = [line for line in hears.lines if "has not turned" in line]
    assert whose in line
    assert f"{Path(__file__).name}:" in line
    assert app.background.troubles()[LOOP].error == "LoopStalled"


async def test_a_process_that_was_stopped_raises_no_alarm(hears: Hears) -> None:
    """However long it was stopped, the thread looks once before the loop has its turn."""

    app = await App(LastingStore()).open()
    stalls = Stalls(app)
    for _ in range(10):
        for _ in range(NAMED_AFTER):  # one look that asks, and as many in vain as do not matter yet
            stalls.look()
        await asyncio.sleep(0)
    assert not hears.lines
    for _ in range(NAMED_AFTER + 1):
        stalls.look()
    assert NAMED.is_set()
    await app.close()
