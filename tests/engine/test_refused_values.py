"""Memory or descriptors refused while a value is encoded or decoded: no fault of the run, which is tried again."""

import asyncio
import errno
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from tests.engine.resume_helpers import Machine

REFUSED: list[BaseException] = []
"""What the machine answers for now."""
ASKED: list[str] = []


class Large:
    """A value that takes what the machine may not have."""

    def __init__(self, way: str) -> None:
        self.way = way


def ask(way: str, doing: str) -> None:
    if way == doing and REFUSED:
        ASKED.append(doing)
        raise REFUSED[0]


def encode(large: Large) -> str:
    ask(large.way, "encode")
    return large.way


def decode(way: str) -> Large:
    ask(way, "decode")
    return Large(way)


everstep.register(Large, encode=encode, decode=decode)


@step
async def takes(large: Large) -> None:
    pass


@step
async def returns(way: str) -> Large:
    return Large(way)


@workflow
async def child(large: Large) -> None:
    pass


@workflow
async def flow(place: str, way: str) -> Any:
    if place == "result":
        return Large(way)
    if place == "argument":
        await takes(Large(way))
    elif place == "later":
        await asyncio.sleep(0.001)
        await takes(Large(way))
    elif place == "swallowed":
        try:
            await takes(Large(way))
        except Exception:  # noqa: BLE001
            return "another way"
    elif place == "grouped":
        async with asyncio.TaskGroup() as group:
            group.create_task(takes(Large(way)))
    elif place == "outcome":
        await returns(way)
    elif place == "child":
        await child(Large(way))
    elif place == "published":
        everstep.publish("large", Large(way))
    elif place == "checkpoint":
        await everstep.checkpoint(Large(way))
    return "done"


ERRORS = {"no memory": MemoryError(), "no descriptors": OSError(errno.EMFILE, "too many open files")}
PLACES = ["argument", "later", "swallowed", "grouped", "outcome", "child", "published", "checkpoint", "result"]
CASES = [(place, "encode") for place in PLACES] + [
    (place, "decode") for place in PLACES if place not in ("published", "result")
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("place", "way"), CASES)
async def test_a_run_is_tried_again_for_as_long_as_a_value_finds_no_room(
    machine: Machine, place: str, way: str, error: str
) -> None:
    ASKED.clear()
    REFUSED[:] = [ERRORS[error]]
    try:
        app = await machine.boot(clock=None)
        run = await app.start(flow, place, way, id="r")
        await machine.until(lambda: len(ASKED) >= 3)
    finally:
        REFUSED.clear()
    result = await asyncio.wait_for(run.result(), 30)
    assert result == "done" if place != "result" else isinstance(result, Large)
    assert not set(machine.kinds("r")) & {"step_failed", "attempt_failed", "run_failed", "run_held"}
