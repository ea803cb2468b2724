"""Damage in an inbox: a child's end is only believed as the child's own history has it, and a cancel is never lost."""

from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import RunCancelled
from everstep.stores.protocol import Post, child_value
from tests.damage.subject import flip
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw


@step(effect="read")
async def look() -> str:
    return "seen"


@workflow
async def told_child() -> str:
    await everstep.receive("go", bool)
    return await look()


@workflow
async def told_parent() -> str:
    return f"the child said {await told_child()}"


async def left_with_an_end_in_the_inbox(machine: Machine) -> int:
    """A parent whose child has ended while nobody drove the parent. Returns the delivery's number."""
    app, _ = await machine.start(told_parent, id="p")
    await machine.until(lambda: machine.store.run("p.1"))
    await machine.rest(app)
    await machine.kill(app)
    other = await machine.worker(workflows=["told_child"])
    await other.signal("p.1", "go", True)
    await machine.until_status("p.1", "completed")
    await machine.stop(other)
    (delivery,) = machine.store.inbox("p")
    return delivery.number


def value_of(machine: Machine, number: int) -> bytes:
    connection = open_raw(machine.path)
    try:
        ((value,),) = connection.execute("SELECT value FROM signals WHERE number = ?", (number,))
        return bytes(value)
    finally:
        connection.close()


@pytest.mark.parametrize("bit", range(0, 330, 23))
async def test_a_damaged_delivery_of_a_child_s_end_is_set_right_from_the_child_s_history(
    machine: Machine, bit: int
) -> None:
    number = await left_with_an_end_in_the_inbox(machine)
    value = value_of(machine, number)
    assert bit < 8 * len(value)
    machine.sql("UPDATE signals SET value = ? WHERE number = ?", flip(value, bit), number)
    worker = await machine.worker()
    assert await worker.get("p").result(timeout=60) == "the child said seen"


async def test_a_forged_end_of_a_child_that_goes_on_is_not_believed(machine: Machine) -> None:
    app, run = await machine.start(told_parent, id="p")
    await machine.until(lambda: machine.store.run("p.1"))
    await machine.rest(app)
    forged = Post("p", "child", "p.1", "1", child_value("completed", b'["forged"]'), 1)
    machine.store.commit([forged])
    app.wake("p")
    await machine.until(lambda: not machine.store.inbox("p"))
    assert machine.status("p") == "waiting"
    await app.signal("p.1", "go", True)
    assert await run.result(timeout=60) == "the child said seen"


@pytest.mark.parametrize("value", [b"", b"\xff", b"{", b"[1]"])
async def test_a_cancel_whose_text_is_damaged_is_still_a_cancel(machine: Machine, value: bytes) -> None:
    app = await machine.boot()
    run: Any = await app.start(told_child, id="r")
    await machine.rest(app)
    machine.store.commit([Post("r", "cancel", value=value, at=1)])
    app.wake("r")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
