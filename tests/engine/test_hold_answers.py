"""What a hold about a step tells, and what becomes of the value that a person gives for it."""

import uuid
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, Field

import everstep
from everstep import Done, Retry, step, workflow
from everstep.engine.run.acting import process_of
from everstep.engine.run.holds import resolve_line
from everstep.errors import HoldConflict, RunHeld
from tests.engine.resume_helpers import Gate, Machine


@dataclass
class Receipt:
    number: int
    to: str = ""


@step(effect="once")
async def pay(to: str) -> Receipt:
    raise ConnectionResetError("the answer was lost")


@workflow
async def answered(to: str) -> str:
    receipt: Any = await pay(to)
    return f"{type(receipt).__name__} {receipt}"


async def held(machine: Machine, run: Any) -> Any:
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    return machine.hold(run.id)


async def test_a_person_s_json_becomes_what_the_step_returns(machine: Machine) -> None:
    app, run = await machine.start(answered, "ann", id="r")
    await held(machine, run)
    await app.resolve("r", "done", value={"number": 7}, by="bob", note="saw it")
    assert await run.result(timeout=60) == "Receipt Receipt(number=7, to='')"
    assert machine.bodies("r", "step_completed")[0].adopted
    assert not machine.replay("r").differences


async def test_what_cannot_become_that_stays_as_it_was_given(machine: Machine) -> None:
    app, run = await machine.start(answered, "ann", id="r")
    await held(machine, run)
    await app.resolve("r", "done", value=["another", "thing"])
    assert await run.result(timeout=60) == "list ['another', 'thing']"
    assert not machine.replay("r").differences


async def test_the_line_to_paste_has_an_example_of_the_right_type(machine: Machine) -> None:
    @step(retry=Retry(attempts=1, then="hold"))
    async def never() -> int:
        raise ValueError

    @workflow
    async def trying() -> int:
        return await never() + 1

    app = await machine.boot()
    doubted = await held(machine, await app.start(answered, "ann", id="r"))
    assert resolve_line(doubted, "done", None) == f"everstep resolve r --hold {doubted.id} --done '{{\"number\":1}}'"
    exhausted = await held(machine, await app.start(trying, id="s"))
    assert resolve_line(exhausted, "skip", None) == f"everstep resolve s --hold {exhausted.id} --skip 1"
    await app.resolve("s", "skip", value=1)
    assert await app.get("s").result(timeout=60) == 2


async def test_a_step_that_raised_is_reported_with_its_error_and_who_began_it(machine: Machine) -> None:
    app = await machine.boot()
    await held(machine, await app.start(answered, "ann", id="r"))
    report = machine.report("r")
    assert (report["because"], report["error"]) == ("error", "ConnectionResetError: the answer was lost")
    assert report["worker"] == app.worker
    assert report["began_at"] == next(event.at for event in machine.events("r") if event.kind == "step_started")
    assert "last_sign_at" not in report
    assert report["arguments"] == '[["ann"]]'


async def test_a_crash_is_reported_with_its_process_and_the_time_in_which_it_died(machine: Machine) -> None:
    gate = Gate()

    @step(effect="once")
    async def slow() -> str:
        await gate.wait()
        return ""

    @workflow
    async def slowly() -> str:
        return await slow()

    app, _ = await machine.start(slowly, id="r")
    await gate.reached.wait()
    began = machine.clock.now()
    await machine.kill(app)
    machine.clock.advance(60)
    other = await machine.boot()
    await held(machine, await other.start(slowly, id="r"))
    report = machine.report("r")
    assert report["because"] == "crash"
    assert (report["worker"], report["pid"]) == (app.worker, process_of(app.worker)["pid"])
    assert (report["last_sign_at"], report["doubted_at"]) == (began, began + 60_000_000)


@pytest.mark.parametrize(
    ("worker", "process"),
    [
        ("box-12-abcdef-0a0b0c0d", {"pid": 12, "host": "box"}),
        ("a-long-name-7-123456-00000000", {"pid": 7, "host": "a-long-name"}),
        ("a-long-name-00000000", {}),
        ("ghost", {}),
        ("", {}),
    ],
)
def test_a_worker_s_id_names_its_process(worker: str, process: dict[str, Any]) -> None:
    assert process_of(worker) == process


async def test_a_settled_hold_is_refused_with_who_settled_it(machine: Machine) -> None:
    app, run = await machine.start(answered, "ann", id="r")
    hold = await held(machine, run)
    await app.resolve("r", "done", value={"number": 7}, by="bob")
    await run.result(timeout=60)
    with pytest.raises(HoldConflict, match=rf"{hold.id} was resolved already \(done by bob\). Open: none"):
        await app.resolve("r", "cancel", hold=hold.id)


class Ticket(BaseModel):
    """Each time it is made of plain data, it has another id."""

    id: uuid.UUID = Field(default_factory=uuid.uuid4)
    title: str


PROBED: list[Any] = []


async def ask_where(key: str) -> Any:
    return PROBED[0]


@step(effect="once")
async def book() -> Ticket:
    raise ConnectionResetError("the answer was lost")


@step(effect="once", probe=ask_where)
async def book_probed() -> Ticket:
    raise ConnectionResetError("the answer was lost")


@workflow
async def booking(probed: bool) -> list[str]:
    ticket = await (book_probed() if probed else book())
    word = await everstep.receive("go")
    return [type(ticket).__name__, str(ticket.id), ticket.title, word]


@pytest.mark.parametrize("probed", [False, True])
async def test_a_model_that_is_adopted_is_the_same_in_every_life(machine: Machine, probed: bool) -> None:
    PROBED[:] = [Done({"title": "Oslo"})]
    app, run = await machine.start(booking, probed, id="r")
    if not probed:
        await held(machine, run)
        await app.resolve("r", "done", value={"title": "Oslo"}, by="bob")
    await machine.clock.rest(app)
    first = machine.replay("r")
    assert not first.differences
    await machine.kill(app)
    worker = await machine.worker()
    await machine.clock.rest(worker)
    await machine.kill(worker)
    worker = await machine.worker()
    await worker.get("r").signal("go", "on")
    name, id, title, _ = await worker.get("r").result(timeout=60)
    assert (name, title) == ("Ticket", "Oslo")
    recorded = [bytes(body.value).decode() for body in machine.bodies("r", "value_converted")]
    stored = bytes(machine.bodies("r", "step_completed")[0].value).decode() + "".join(recorded)
    assert id in stored
