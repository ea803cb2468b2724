"""Plain data that is sent to a run becomes what its code declares; what code of the type made of it is recorded."""

import asyncio
import uuid
from typing import Any

import pytest
from pydantic import BaseModel, Field

import everstep
from everstep import workflow
from everstep.engine.app.client import Client
from everstep.errors import Misuse, WrongType
from tests.engine.resume_helpers import Machine


class Ticket(BaseModel):
    """Each time it is made of plain data, it has another id."""

    id: uuid.UUID = Field(default_factory=uuid.uuid4)
    title: str


class Reply(BaseModel):
    ok: bool


@workflow
async def opens(ticket: Ticket) -> list[str]:
    ids = [str(ticket.id)]
    ids.append(str((await everstep.receive("ticket", Ticket)).id))
    given = await everstep.approval("close", ids, answer=Ticket)
    ids.append(str(given.id))
    async for request in everstep.requests("more", list[Ticket]):
        ids += [str(one.id) for one in request.value]
        request.answer(ids)
        break
    await everstep.receive("end")
    return ids


@workflow
async def decides() -> bool:
    return (await everstep.receive("reply", Reply)).ok


async def test_what_a_default_made_is_the_same_in_every_life(machine: Machine) -> None:
    first = await machine.boot()
    await Client(first).start("opens", {"title": "a"}, id="r")
    worker = await machine.worker()
    run = worker.get("r")
    await run.signal("ticket", {"title": "b"})
    await machine.clock.rest(worker)
    await run.approve({"title": "c"})
    told = await run.ask("more", [{"title": "d"}], timeout=60)
    assert len(set(told)) == 4
    await machine.kill(worker)
    again = await machine.worker()
    await again.get("r").signal("end")
    assert await again.get("r").result(timeout=60) == told
    whats = [body.what for body in machine.bodies("r", "value_converted")]
    assert whats == ["argument ticket", "signal ticket", "approval close", "request more"]


async def test_a_model_is_sent_and_published_without_being_registered(machine: Machine) -> None:
    @workflow
    async def tells() -> Reply:
        reply = await everstep.receive("reply", Reply)
        everstep.publish("reply", reply)
        everstep.stream("replies").append(reply)
        return reply

    _, run = await machine.start(tells, id="r")
    await run.signal("reply", Reply(ok=True), id="s")
    assert not await run.signal("reply", {"ok": True}, id="s"), "equal values are equal"
    assert await run.result(timeout=60) == Reply(ok=True)
    assert await run.published() == {"reply": {"ok": True}}
    assert [entry.value async for entry in run.stream("replies")] == [{"ok": True}]


async def test_what_is_sent_as_its_type_is_not_recorded_a_second_time(machine: Machine) -> None:
    @everstep.register
    class Stamp(BaseModel):
        id: uuid.UUID = Field(default_factory=uuid.uuid4)

    @workflow
    async def stamps(first: Stamp) -> bool:
        return (await everstep.receive("stamp", Stamp)) == first

    stamp = Stamp()
    _, run = await machine.start(stamps, stamp, id="r")
    await run.signal("stamp", stamp)
    assert await run.result(timeout=60)
    assert not machine.bodies("r", "value_converted")


async def test_what_does_not_fit_is_rejected_and_the_next_counts_in_every_life(machine: Machine) -> None:
    app, _ = await machine.start(decides, id="r")
    await machine.clock.rest(app)
    await machine.stop(app)
    app = await machine.boot()
    await machine.send_unseen(app, "r", "reply", {"ok": "perhaps"})
    worker = await machine.worker()
    await machine.clock.rest(worker)
    (body,) = machine.bodies("r", "signal_rejected")
    assert "`$.ok`: Input should be a valid boolean" in body.why
    await machine.kill(worker)
    worker = await machine.worker()
    await worker.get("r").signal("reply", {"ok": True})
    assert await worker.get("r").result(timeout=60) is True


async def test_a_signal_that_was_rejected_by_an_older_release_stays_rejected(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took no plain data for a model."""
    app, _ = await machine.start(decides, id="r")

    def refuse(value: Any, annotation: Any) -> Any:
        raise everstep.errors.NotDecodable("not a Reply")

    with monkeypatch.context() as older:
        older.setattr("everstep.engine.code.execution.converted", refuse)
        await machine.send_unseen(app, "r", "reply", {"ok": True})
        await machine.clock.rest(app)
    assert len(machine.bodies("r", "signal_rejected")) == 1
    await machine.kill(app)
    worker = await machine.worker()
    await worker.get("r").signal("reply", {"ok": False})
    assert await worker.get("r").result(timeout=60) is False


async def test_a_start_converts_and_checks_by_the_declared_types(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(Misuse, match=r"opens: the argument ticket is not a Ticket: `\$\.title`: Field required"):
        await app.start(opens, {"name": "a"}, id="r")
    run = await app.start(opens, {"title": "a"}, id="r")
    assert (await run.status()) in ("running", "waiting")


async def test_arguments_that_do_not_fit_hold_a_run_that_was_started_by_name(machine: Machine) -> None:
    app = await machine.boot()
    await Client(app).start("opens", {"name": "a"}, id="r")
    worker = await machine.worker()
    await machine.clock.rest(worker)
    (hold,) = await worker.holds(run="r")
    assert hold.reason == "diverged"
    assert "the argument ticket is not a Ticket: `$.title`: Field required" in hold.summary


# -- what would be rejected is not sent ------------------------------------------------------------------------------
async def test_a_signal_of_another_type_is_refused_where_the_run_is_driven(machine: Machine) -> None:
    app, run = await machine.start(decides, id="r")
    await machine.clock.rest(app)
    with pytest.raises(WrongType, match=r"as Reply, and this is not a Reply: `\$\.ok`: Input .* It was not sent"):
        await run.signal("reply", {"ok": "perhaps"})
    assert not machine.store.signals("r")
    await run.signal("reply", {"ok": True})
    assert await run.result(timeout=60) is True


async def test_a_signal_of_another_type_is_refused_by_a_process_that_has_the_code(machine: Machine) -> None:
    app, _ = await machine.start(decides, id="r")
    await machine.clock.rest(app)
    await machine.stop(app)
    client = Client(await machine.boot())
    with pytest.raises(WrongType, match=r"`\$\.ok`: Field required"):
        await client.signal("r", "reply", {})
    await client.signal("r", "reply", {"ok": True})


async def test_only_a_signal_that_goes_to_the_wait_is_refused(machine: Machine) -> None:
    """One that comes after another, or one that was sent before, is for a later wait or for none."""

    @workflow
    async def takes_two() -> list[Any]:
        first = await everstep.receive("it", int)
        return [first, await everstep.receive("it", str), await everstep.receive("it", int)]

    app, _ = await machine.start(takes_two, id="r")
    await machine.clock.rest(app)
    await machine.stop(app)
    client = Client(await machine.boot())
    with pytest.raises(WrongType):
        await client.signal("r", "it", "two")
    assert await client.signal("r", "it", 1, id="a")
    assert await client.signal("r", "it", "two")
    assert not await client.signal("r", "it", 1, id="a")
    worker = await machine.worker()
    await machine.clock.rest(worker)
    assert await worker.signal("r", "it", 1, id="a") is False
    assert await worker.signal("r", "it", 3)
    assert await worker.get("r").result(timeout=60) == [1, "two", 3]


async def test_a_wait_that_may_be_over_refuses_nothing(machine: Machine) -> None:
    @workflow
    async def gives_up() -> Any:
        try:
            async with asyncio.timeout(1):
                await everstep.receive("it", int)
        except TimeoutError:
            pass
        await everstep.receive("go")
        return await everstep.receive("it", str)

    app, _ = await machine.start(gives_up, id="r")
    await machine.clock.rest(app)
    machine.clock.advance(2)
    await machine.clock.rest(app)
    await machine.stop(app)
    client = Client(await machine.boot())
    assert await client.signal("r", "it", "late")
    await client.signal("r", "go")
    worker = await machine.worker()
    assert await worker.get("r").result(timeout=60) == "late"


async def test_a_rejected_signal_leaves_the_wait_as_it_was(machine: Machine) -> None:
    app, _ = await machine.start(decides, id="r")
    await machine.clock.rest(app)
    await machine.stop(app)
    stranger = await machine.boot()
    await machine.send_unseen(stranger, "r", "reply", {"ok": "perhaps"})
    worker = await machine.worker()
    await machine.clock.rest(worker)
    assert machine.bodies("r", "signal_rejected")
    await machine.stop(worker)
    with pytest.raises(WrongType):
        await Client(await machine.boot()).signal("r", "reply", {})
