"""Once: what an error means, and what a person says."""

import asyncio
import threading
from typing import Any

import pytest

import everstep
from everstep import Done, Fatal, NotDone, Retry, step, workflow
from everstep.errors import HoldConflict, Misuse, RunCancelled
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import held
from tests.worlds.ledger import NOTES
from tests.worlds.payment import Refused, failing

RETRY = Retry(attempts=3, first=5.0, factor=1.0, jitter=0.0)


def attempts() -> list[str]:
    """Return the attempts that were made, all with one key."""
    assert len({note.partition(" ")[2] for note in NOTES}) <= 1, "the key is the same in each attempt"
    return [note.partition(" ")[0] for note in NOTES]


# -- declaring --------------------------------------------------------------------------------------------------------
def test_what_is_for_once_is_refused_on_other_contracts() -> None:
    async def plain() -> None: ...

    for options in ({"probe": plain}, {"settle": 1.0}, {"not_done": OSError}):
        with pytest.raises(Misuse, match="once"):
            step(plain, effect="repeat", **options)  # type: ignore[call-overload]
    for wrong in ({"probe_for": -1.0}, {"settle": -1.0}):
        with pytest.raises(Misuse, match="seconds"):
            step(plain, effect="once", **wrong)  # type: ignore[call-overload]


def test_a_once_step_inside_of_another_step_is_refused() -> None:
    @step(effect="once")
    async def inner() -> None:
        NOTES.append("inner")

    @step
    async def outer() -> None:
        await inner()

    @workflow
    async def flow() -> None:
        await outer()

    with pytest.raises(Misuse, match="in the workflow"):
        everstep.run(flow, url="memory:")
    assert NOTES == []


# -- what an error means ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [NotDone("no money left the account"), Refused("no")])
async def test_certainly_not_done_goes_by_the_retry_policy(machine: Machine, error: Exception) -> None:
    flow = failing(error, error, None, retry=RETRY, not_done=Refused)
    _, run = await machine.start(flow, id="r")
    await machine.rest()
    assert attempts() == ["1"]
    await machine.advance(4.9)
    assert attempts() == ["1"], "the back-off is kept"
    await machine.advance(0.2)
    await machine.advance(5.1)
    assert await run.result(timeout=60) == "paid 3"
    assert attempts() == ["1", "2", "3"]
    assert "step_doubted" not in machine.kinds("r")
    assert not machine.replay("r").differences


async def test_certainly_not_done_and_no_attempts_left_is_raised(machine: Machine) -> None:
    app = await machine.boot()
    assert await app.run(failing(NotDone("no")), id="r") == "caught NotDone"
    assert attempts() == ["1"]
    assert not machine.replay("r").differences


@pytest.mark.parametrize("error", [Fatal("card stolen"), Refused("no")])
async def test_certainly_failed_is_raised_in_the_workflow_at_once(machine: Machine, error: Exception) -> None:
    flow = failing(error, None, retry=Retry(attempts=3, never=(Refused,)), raises=(Refused,))
    app = await machine.boot()
    assert await app.run(flow, id="r") == f"caught {type(error).__name__}"
    assert attempts() == ["1"]
    assert machine.kinds("r", "step_") == ["step_started", "step_failed"]
    assert not machine.replay("r").differences


@pytest.mark.parametrize("error", [OSError("reset"), Refused("undeclared"), asyncio.CancelledError(), SystemExit(3)])
async def test_any_other_error_is_a_doubt_whatever_the_retry_policy(machine: Machine, error: BaseException) -> None:
    app, run = await machine.start(failing(error, None, retry=RETRY), id="r")
    hold = await held(machine, run, "in-doubt")
    assert hold.resolutions == ["done", "not-done", "cancel"], "without a probe nobody can be asked again"
    assert attempts() == ["1"]
    assert [body.because for body in machine.bodies("r", "step_doubted")] == ["error"]
    assert machine.report("r")["key"] == NOTES[0].partition(" ")[2]
    with pytest.raises(HoldConflict):
        await app.resolve("r", "probe")


async def test_an_attempt_past_its_timeout_is_a_doubt_and_its_thread_may_still_act(machine: Machine) -> None:
    go_on = threading.Event()

    @step(effect="once", timeout=0.05)
    def pay() -> str:
        NOTES.append("begun")
        go_on.wait(20)
        NOTES.append("sent")
        return "paid"

    @workflow
    async def flow() -> str:
        return await asyncio.to_thread(pay)

    app, run = await machine.start(flow, id="r")
    await held(machine, run, "in-doubt")
    await app.resolve("r", "not-done")
    hold = await held(machine, run, "in-doubt")
    assert "its body on a thread still runs in this process" in hold.summary
    assert NOTES == ["begun"], "a person's word is not enough while the thread may act"
    go_on.set()
    await machine.until(lambda: not app.acting.runs())
    await app.resolve("r", "not-done")
    assert await run.result(timeout=60) == "paid"
    assert NOTES == ["begun", "sent", "begun", "sent"]


async def test_a_thread_of_another_step_does_not_count_as_one_that_may_still_act(machine: Machine) -> None:
    go_on = threading.Event()

    @step(effect="read")
    def long_read() -> str:
        go_on.wait(20)
        return "read"

    @step(effect="once", probe=lambda key: NotDone())
    def pay() -> str:
        NOTES.append("pay")
        if len(NOTES) == 1:
            raise OSError("reset")
        return "paid"

    @workflow
    async def flow() -> list[str]:
        return await asyncio.gather(asyncio.to_thread(long_read), asyncio.to_thread(pay))

    _, run = await machine.start(flow, id="r")
    await machine.until(lambda: len(NOTES) == 2 or machine.status("r") == "held")
    go_on.set()
    assert await run.result(timeout=60) == ["read", "paid"]


async def test_an_outcome_that_cannot_be_stored_is_held_as_done_without_a_value(machine: Machine) -> None:
    @step(effect="once")
    async def pay() -> Any:
        NOTES.append("pay")
        return object()

    @workflow
    async def flow() -> Any:
        return await pay()

    app, run = await machine.start(flow, id="r")
    hold = await held(machine, run, "in-doubt")
    assert hold.resolutions == ["done", "cancel"], "it happened, so it is not done again"
    assert "it happened" in hold.summary
    await app.resolve("r", "done", value="receipt 7")
    assert await run.result(timeout=60) == "receipt 7"
    assert NOTES == ["pay"]
    assert not machine.replay("r").differences


async def test_that_it_happened_is_not_forgotten_while_another_hold_comes_first(machine: Machine) -> None:
    gate = Gate()

    @step(effect="once")
    async def doubtful() -> str:
        raise OSError("reset")

    @step(effect="once", probe=lambda key: NotDone())
    async def pay() -> Any:
        NOTES.append("pay")
        await gate.wait()
        return object()

    @workflow
    async def flow() -> list[Any]:
        return list(await asyncio.gather(doubtful(), pay()))

    app, run = await machine.start(flow, id="r")
    await machine.until(lambda: "step_doubted" in machine.kinds("r"))
    gate.opened.set()
    hold = await held(machine, run, "in-doubt")
    assert hold.step.endswith("doubtful")
    await machine.kill(app)
    app = await machine.boot()
    await app.resolve("r", "done", value="D")
    run = app.get("r")
    hold = await held(machine, run, "in-doubt")
    assert hold.resolutions == ["done", "cancel"], "its probe would say that it may be done again"
    await app.resolve("r", "done", value="P")
    assert await run.result(timeout=60) == ["D", "P"]
    assert NOTES == ["pay"]


async def test_a_fallback_follows_only_a_certain_failure(machine: Machine) -> None:
    app = await machine.boot()
    assert await app.run(failing(Fatal("no"), fallback="by letter"), id="a") == "by letter"
    await held(machine, await app.start(failing(OSError("reset"), fallback="by letter"), id="b"), "in-doubt")


# -- what a person says -----------------------------------------------------------------------------------------------
async def test_done_takes_the_value_and_the_step_does_not_run(machine: Machine) -> None:
    app, run = await machine.start(failing(OSError("reset"), None), id="r")
    await held(machine, run, "in-doubt")
    await app.resolve("r", "done", value="paid by hand", by="ann")
    assert await run.result(timeout=60) == "paid by hand"
    assert attempts() == ["1"]
    (resolved,) = machine.bodies("r", "run_resolved")
    assert (resolved.resolution, resolved.by) == ("done", "ann")
    assert not machine.replay("r").differences


async def test_not_done_does_it_again_with_the_same_key(machine: Machine) -> None:
    app, run = await machine.start(failing(OSError("reset"), OSError("reset"), None), id="r")
    for _ in range(2):
        await held(machine, run, "in-doubt")
        await app.resolve("r", "not-done")
    assert await run.result(timeout=60) == "paid 3"
    assert attempts() == ["1", "2", "3"]
    assert [body.because for body in machine.bodies("r", "step_started")] == ["", "person", "person"]
    assert not machine.replay("r").differences


async def test_probe_asks_the_outside_again(machine: Machine) -> None:
    answers: list[Any] = [RuntimeError("down"), Done("paid, says the bank")]

    def probe(key: str, amount: int) -> Any:
        NOTES.append(f"asked {key}")
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    app, run = await machine.start(failing(OSError("reset"), None, probe=probe, probe_for=0.0), id="r")
    hold = await held(machine, run, "in-doubt")
    assert hold.resolutions == ["done", "not-done", "probe", "cancel"]
    await app.resolve("r", "probe")
    assert await run.result(timeout=60) == "paid, says the bank"
    assert [note.partition(" ")[0] for note in NOTES] == ["1", "asked", "asked"]
    assert len({note.partition(" ")[2] for note in NOTES}) == 1, "it is asked about the key that the body has used"
    assert not machine.replay("r").differences


async def test_cancel_ends_the_run_and_the_step_does_not_run(machine: Machine) -> None:
    app, run = await machine.start(failing(OSError("reset"), None), id="r")
    await held(machine, run, "in-doubt")
    await app.resolve("r", "cancel")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert attempts() == ["1"]
    assert machine.status("r") == "cancelled"


async def test_two_steps_in_doubt_are_asked_about_one_after_the_other(machine: Machine) -> None:
    gate = Gate()

    @step(effect="once")
    async def pay(name: str) -> str:
        NOTES.append(name)
        if len(NOTES) == 2:
            gate.reached.set()
        await gate.opened.wait()
        return name

    @workflow
    async def flow() -> list[str]:
        first = asyncio.create_task(pay("a"))
        second = asyncio.create_task(pay("b"))
        return [await first, await second]

    app, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    app, run = await machine.start(flow, id="r")
    await held(machine, run, "in-doubt")
    assert machine.kinds("r")[-1] == "run_held", "nothing is written after the hold"
    await app.resolve("r", "done", value="A")
    await held(machine, run, "in-doubt")
    assert machine.kinds("r")[-1] == "run_held"
    await app.resolve("r", "done", value="B")
    assert await run.result(timeout=60) == ["A", "B"]
    assert sorted(NOTES) == ["a", "b"]
    assert not machine.replay("r").differences


async def test_a_step_that_was_asked_for_behind_a_doubt_is_not_begun_while_the_run_is_held(machine: Machine) -> None:
    """The code's next command is new when the run is taken up, and the run is held at that moment."""
    gate = Gate()

    @step(effect="once")
    async def pay(name: str) -> str:
        NOTES.append(name)
        if name == "a":
            await gate.wait()
        return name

    @step
    async def look() -> None:
        NOTES.append("look")

    @workflow
    async def flow() -> list[str]:
        async def other() -> str:
            await everstep.receive("go")
            return await pay("b")

        return list(await asyncio.gather(pay("a"), other()))

    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    app = await machine.boot()
    await held(machine, await app.start(flow, id="r"), "in-doubt")
    await app.signal("r", "go")
    await app.resolve("r", "done", value="A")
    run = app.get("r")
    assert await run.result(timeout=60) == ["A", "b"]
    assert NOTES == ["a", "b"]
    assert not machine.replay("r").differences
