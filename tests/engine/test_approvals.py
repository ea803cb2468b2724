"""Approvals: a person's answer to just the arguments that were shown, once, until it expires."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import everstep
from everstep import blocking, step, workflow
from everstep.engine.verbs.approve import Approval
from everstep.errors import ApprovalConflict, Misuse, RunEnded, UnknownRun
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine
from tests.waiting import wait_until


@dataclass
class Order:
    to: str
    usd: int


@dataclass
class Verdict:
    yes: bool
    most: int = 0


@step
async def pay(order: Order) -> str:
    return f"{order.usd} to {order.to}"


@workflow
async def paying(to: str, usd: int) -> str:
    order = Order(to, usd)
    if await everstep.approval("pay", order, answer=bool, timeout=3600):
        return await pay(order)
    return "refused"


@workflow
async def anything() -> Any:
    return [await everstep.approval("anything", {"a": 1})]


async def asked(machine: Machine, run: str, count: int = 1) -> None:
    await machine.until(lambda: len(machine.kinds(run, "approval_asked")) == count)


async def test_a_run_goes_on_with_a_persons_answer(machine: Machine) -> None:
    app, run = await machine.start(paying, "ann", 5, id="r")
    await asked(machine, "r")
    (one,) = await app.approvals()
    assert (one.run, one.workflow, one.what, one.type) == ("r", "paying", "pay", "bool")
    assert one.arguments == {"to": "ann", "usd": 5}
    assert one.expires_at == one.asked_at + 3_600_000_000
    assert (await run.approve(True, by="bob", note="fine")).id == one.id
    assert await run.result() == "5 to ann"
    assert await app.approvals() == []
    assert machine.replay("r").differences == []
    assert check(export_histories(machine.store)) == []


@pytest.mark.parametrize("answer", [False, 0, "", None, [], {}, 0.5, "yes", {"a": [1, None]}])
async def test_any_json_value_is_an_answer(machine: Machine, answer: Any) -> None:
    app, run = await machine.start(anything, id="r")
    await asked(machine, "r")
    await app.approve("r", answer)
    assert await run.result() == [answer]


async def test_the_first_answer_counts_and_the_second_is_told_so(machine: Machine) -> None:
    app, run = await machine.start(paying, "ann", 5, id="r")
    await asked(machine, "r")
    other = await machine.boot(workflows=())
    outcomes = await asyncio.gather(
        *(one.approve("r", yes, by=by) for one, yes, by in ((app, True, "bob"), (other, False, "cat"))),
        return_exceptions=True,
    )
    (refused,) = [one for one in outcomes if isinstance(one, BaseException)]
    (first,) = [one for one in outcomes if isinstance(one, Approval)]
    assert isinstance(refused, ApprovalConflict)
    assert "has its answer already: " in str(refused)
    assert first.what == "pay"
    assert await run.result() in ("5 to ann", "refused")
    with pytest.raises(RunEnded):
        await app.approve("r", True)


async def test_an_answer_in_the_inbox_of_a_run_that_nobody_drives_is_the_first_one(machine: Machine) -> None:
    app, _ = await machine.start(paying, "ann", 5, id="r")
    await asked(machine, "r")
    await machine.kill(app)
    other = await machine.boot(workflows=())
    await other.approve("r", False, by="bob")
    assert await other.approvals() == [], "it has its answer"
    with pytest.raises(ApprovalConflict, match="has its answer already: false by bob"):
        await other.approve("r", True)
    worker = await machine.worker()
    assert await worker.get("r").result() == "refused"


async def test_an_answer_to_other_arguments_is_refused(machine: Machine) -> None:
    app, run = await machine.start(paying, "ann", 5, id="r")
    await asked(machine, "r")
    with pytest.raises(ApprovalConflict, match="is about other arguments"):
        await run.approve(True, arguments={"to": "ann", "usd": 6})
    await app.start(paying, "ann", 6, id="s")
    await asked(machine, "s")
    (one,) = await app.approvals("s")
    with pytest.raises(ApprovalConflict, match="no such approval"):
        await run.approve(True, id=one.id)
    await app.signal("r", f"approval:{one.id}", {"answer": True})
    assert machine.status("r") != "completed"
    await run.approve(True, arguments=Order("ann", 5))
    assert await run.result() == "5 to ann"


async def test_an_approval_expires_and_nobody_can_answer_it_then(machine: Machine) -> None:
    app, run = await machine.start(paying, "ann", 5, id="r")
    await asked(machine, "r")
    await machine.kill(app)
    machine.clock.advance(3601)
    other = await machine.boot(workflows=())
    assert await other.approvals() == []
    with pytest.raises(ApprovalConflict, match="has expired"):
        await other.approve("r", True)
    worker = await machine.worker()
    with pytest.raises(TimeoutError):
        await worker.get("r").result()
    assert machine.kinds("r", "approval_withdrawn") == ["approval_withdrawn"]
    assert run.id == "r"


@workflow
async def careful() -> int:
    return (await everstep.approval("limit", [1, 2], answer=Verdict)).most


async def test_an_answer_of_another_type_is_rejected_and_the_run_goes_on_waiting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, run = await machine.start(careful, id="r")
    await asked(machine, "r")
    other = await machine.boot()
    with monkeypatch.context() as without_code:
        without_code.setattr("everstep.engine.verbs.approve.type_named", lambda workflow, text: ...)
        await other.approve("r", "yes")
    app.wake("r")
    await machine.until(lambda: machine.kinds("r", "signal_rejected"))
    (one,) = await run.approvals()
    assert one.rejected == 1
    await run.approve({"yes": True, "most": 7})
    assert await run.result() == 7
    assert machine.replay("r").differences == []
    assert check(export_histories(machine.store)) == []


@pytest.mark.parametrize("answer", [1, "yes", None, 0])
async def test_whoever_answers_with_another_plain_type_is_told_at_once(machine: Machine, answer: Any) -> None:
    _, run = await machine.start(paying, "ann", 5, id="r")
    await asked(machine, "r")
    with pytest.raises(ApprovalConflict, match="wants a bool"):
        await run.approve(answer)
    assert machine.kinds("r", "signal_rejected") == []


@workflow
async def two_at_once() -> list[Any]:
    one, other = everstep.approval("one", 1), everstep.approval("two", 2)
    return list(await asyncio.gather(one, other))


async def test_of_several_one_is_named(machine: Machine) -> None:
    app, run = await machine.start(two_at_once, id="r")
    await asked(machine, "r", 2)
    with pytest.raises(ApprovalConflict, match="waits for 2 approvals"):
        await run.approve(True)
    await run.approve("b", what="two")
    await run.approve("a")
    assert await run.result() == ["a", "b"]
    with pytest.raises(UnknownRun):
        await app.approve("other", True)


@workflow
async def hasty() -> str:
    waiting = asyncio.ensure_future(everstep.approval("slow", None))
    try:
        return str(await asyncio.wait_for(waiting, 10))
    except TimeoutError:
        return str(await everstep.approval("again", None))


async def test_what_the_code_waits_for_no_longer_cannot_be_answered(machine: Machine) -> None:
    _, run = await machine.start(hasty, id="r")
    await asked(machine, "r")
    (first,) = await run.approvals()
    await machine.advance(11)
    await asked(machine, "r", 2)
    assert [one.what for one in await run.approvals()] == ["again"]
    with pytest.raises(ApprovalConflict, match="waits no longer"):
        await run.approve(True, id=first.id)
    await run.approve("fine")
    assert await run.result() == "fine"
    assert machine.replay("r").differences == []


@workflow
async def hushed(word: str) -> Any:
    return await everstep.approval("tell", {"word": word}, secret=True)


async def test_secret_arguments_are_neither_shown_nor_stored_with_the_question(machine: Machine) -> None:
    _, run = await machine.start(hushed, "abracadabra", id="r")
    await asked(machine, "r")
    (one,) = await run.approvals()
    assert one.arguments == "(secret)"
    (event,) = [one for one in machine.events("r") if one.kind == "approval_asked"]
    assert b"abracadabra" not in event.body
    await run.approve(True, arguments={"word": "abracadabra"})
    assert await run.result() is True


@workflow
def plainly() -> str:
    try:
        return str(blocking.approval("go", [1], answer=int, timeout=60))
    except TimeoutError:
        return "late"


async def test_a_def_workflow_waits_as_well(machine: Machine) -> None:
    app, run = await machine.start(plainly, id="r")
    await asked(machine, "r")
    await run.approve(0)
    assert await run.result() == "0"
    late = await app.start(plainly, id="s")
    await asked(machine, "s")
    await machine.advance(61)
    assert await late.result() == "late"


async def test_the_wait_survives_a_death_and_takes_no_memory(machine: Machine) -> None:
    app, _ = await machine.start(paying, "ann", 5, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(app)
    worker = await machine.worker()
    (one,) = await worker.approvals()
    await worker.approve("r", True, id=one.id)
    assert await worker.get("r").result() == "5 to ann"
    assert machine.kinds("r", "approval_asked") == ["approval_asked"]


async def test_large_arguments_are_kept_beside_the_history_and_shown_whole(machine: Machine) -> None:
    _, run = await machine.start(bulky, id="r")
    await asked(machine, "r")
    (one,) = await run.approvals()
    assert one.arguments == ["x" * 200_000]
    await run.approve(True)
    assert await run.result() is True


@workflow
async def bulky() -> Any:
    return await everstep.approval("read all of this", ["x" * 200_000])


def current_usd() -> int:
    return USD[0]


USD = [5]


@workflow
async def changing() -> str:
    order = Order("ann", current_usd())
    return await pay(order) if await everstep.approval("pay", order) else "refused"


async def test_a_run_whose_code_asks_about_other_arguments_now_is_held_and_does_nothing(machine: Machine) -> None:
    app, _ = await machine.start(changing, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(app)
    await (await machine.boot(workflows=())).approve("r", True)
    USD[0] = 500
    try:
        await machine.worker()
        await machine.until_status("r", "held")
    finally:
        USD[0] = 5
    assert machine.hold("r").reason == "diverged"
    assert "accept" not in machine.hold("r").resolutions
    assert machine.kinds("r", "step_started") == []


@pytest.mark.parametrize("what", ["", "a\nb", "x" * 201])
async def test_what_is_to_be_approved_is_a_line_of_text(machine: Machine, what: str) -> None:
    app = await machine.boot()
    with pytest.raises(Misuse, match="text of 1 to 200"):
        await app.run(naming, what)


@workflow
async def naming(what: str) -> Any:
    return await everstep.approval(what, None)


def test_blocking_apps_and_clients_list_and_answer(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with everstep.open(url) as app, everstep.connect(url) as client:
        run = app.start(paying, "ann", 5, id="r")
        wait_until(app.approvals)
        assert [one.what for one in client.approvals()] == ["pay"]
        assert [one.what for one in run.approvals()] == ["pay"]
        client.approve("r", True, by="ann")
        assert run.result(timeout=60) == "5 to ann"
        other = app.start(paying, "ann", 6, id="s")
        wait_until(app.approvals)
        other.approve(False)
        assert other.result(timeout=60) == "refused"


def test_it_is_for_workflow_code() -> None:
    with pytest.raises(Misuse, match="for workflow code"):
        asyncio.run(everstep.approval("pay", None))
