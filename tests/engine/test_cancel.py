"""Cancel: cooperative and durable; it takes effect, or its sender learns that the run had ended."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import Misuse, RunCancelled, RunEnded, RunTimedOut, UnknownRun
from everstep.stores.protocol import Append, Post
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import NOTES, note


@workflow
async def waiting() -> str:
    try:
        return await everstep.receive("word", str)
    finally:
        await note("cleaned up")


@workflow
async def stubborn() -> str:
    while True:
        try:
            await everstep.receive("word", str)
        except asyncio.CancelledError:
            await asyncio.sleep(0)


# -- taking effect -----------------------------------------------------------------------------------------------------
async def test_a_cancel_reaches_the_code_and_its_finally_does_durable_work(machine: Machine) -> None:
    app, run = await machine.start(waiting, id="r")
    await machine.rest(app)
    await run.cancel("no longer wanted")
    with pytest.raises(RunCancelled):
        await run.result()
    assert NOTES == ["cleaned up"]
    assert machine.kinds("r") == [
        "run_started",
        "signal_awaited",
        "cancel_requested",
        "step_started",
        "step_completed",
        "run_cancelled",
    ]
    (request,) = machine.bodies("r", "cancel_requested")
    assert request.reason == "no longer wanted"
    assert machine.replay("r").differences == []


async def test_code_that_catches_the_cancel_and_returns_completes(machine: Machine) -> None:
    @workflow
    async def polite() -> str:
        try:
            await everstep.receive("never")
        except asyncio.CancelledError:
            await note("caught")
        return "done all the same"

    app, run = await machine.start(polite, id="r")
    await machine.rest(app)
    await run.cancel()
    assert await run.result() == "done all the same"


async def test_a_cancelled_step_body_is_stopped_and_records_nothing(machine: Machine) -> None:
    gate = Gate()

    @step
    async def long() -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            NOTES.append("body stopped")
            raise

    @workflow
    async def flow() -> None:
        await long()

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.cancel()
    with pytest.raises(RunCancelled):
        await run.result()
    assert NOTES == ["body stopped"]
    assert machine.kinds("r") == ["run_started", "step_started", "cancel_requested", "step_cancelled", "run_cancelled"]


async def test_after_its_grace_the_run_ends_without_its_code(machine: Machine) -> None:
    app, run = await machine.start(stubborn, id="r")
    await machine.rest(app)
    await run.cancel(grace=5)
    await machine.rest(app)
    await machine.advance(4.9)
    assert machine.status("r") == "waiting"
    await machine.advance(0.2)
    assert machine.status("r") == "cancelled"
    (end,) = machine.bodies("r", "run_cancelled")
    assert end.forced


async def test_grace_is_remembered_across_a_crash(machine: Machine) -> None:
    app, run = await machine.start(stubborn, id="r")
    await machine.rest(app)
    await run.cancel(grace=60)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    await machine.rest(app)
    await machine.kill(app)
    machine.clock.advance(30)
    await machine.worker()
    await machine.advance(29)
    assert machine.status("r") == "waiting"
    await machine.advance(2)
    assert machine.status("r") == "cancelled"


async def test_a_cancel_found_after_downtime_still_gives_the_code_its_grace(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow_cleanup() -> None:
        await gate.wait()
        NOTES.append("cleaned up slowly")

    @workflow
    async def flow() -> None:
        try:
            await everstep.receive("never")
        finally:
            await slow_cleanup()

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.stop(app)
    sender = await machine.boot()
    await sender.cancel("r", grace=10)
    machine.clock.advance(3600)
    await machine.worker()
    await gate.reached.wait()
    assert machine.status("r") == "running"
    gate.opened.set()
    await machine.until_status("r", "cancelled")
    assert NOTES == ["cleaned up slowly"]
    (end,) = machine.bodies("r", "run_cancelled")
    assert not end.forced


async def test_now_ends_a_run_without_its_code(machine: Machine) -> None:
    app, run = await machine.start(waiting, id="r")
    await machine.rest(app)
    await run.cancel("now", now=True)
    with pytest.raises(RunCancelled):
        await run.result()
    assert NOTES == []
    (end,) = machine.bodies("r", "run_cancelled")
    assert end.forced


async def test_now_ends_a_run_that_nobody_drives(machine: Machine) -> None:
    app, _ = await machine.start(waiting, id="r")
    await machine.rest(app)
    await machine.kill(app)
    other = await machine.boot()
    await other.cancel("r", now=True, by="ann")
    assert machine.status("r") == "cancelled"
    assert machine.bodies("r", "cancel_requested")[0].by == "ann"
    assert NOTES == []


async def test_now_reaches_a_run_that_another_process_drives(machine: Machine) -> None:
    app, other = await machine.boot(), await machine.boot()
    run = await app.start(waiting, id="r")
    await machine.rest(app)
    await other.cancel("r", now=True)
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == []


async def test_a_second_cancel_with_now_overrules_the_grace(machine: Machine) -> None:
    app, run = await machine.start(stubborn, id="r")
    await machine.rest(app)
    await run.cancel(grace=1000)
    await machine.rest(app)
    await run.cancel(now=True)
    with pytest.raises(RunCancelled):
        await run.result()


async def test_two_cancels_at_once_are_one_end(machine: Machine) -> None:
    """The second arrives while the first one's end is being saved: the end stands, and nobody waits for the grace."""
    app, run = await machine.start(waiting, id="r")
    await machine.rest(app)
    await asyncio.gather(run.cancel("one"), run.cancel("two"))
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == ["cleaned up"]
    assert machine.kinds("r").count("run_cancelled") == 1
    assert [one.state for one in machine.store.signals("r")] == ["consumed", "consumed"]


async def test_two_cancels_found_together_are_one_end(machine: Machine) -> None:
    @workflow
    async def plain() -> None:
        await everstep.receive("never")

    app, _ = await machine.start(plain, id="r")
    await machine.rest(app)
    await machine.stop(app)
    sender = await machine.boot()
    for _ in range(3):
        await sender.cancel("r")
    await machine.worker()
    await machine.until_status("r", "cancelled")
    assert machine.kinds("r")[-2:] == ["cancel_requested", "run_cancelled"]


# -- against the end ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
async def test_a_cancel_that_comes_too_late_is_told_so(machine: Machine, how: str) -> None:
    @workflow
    async def flow() -> None:
        if how == "failed":
            raise ValueError(how)
        if how == "cancelled":
            await everstep.receive("never")

    app, run = await machine.start(flow, id="r")
    await machine.rest(app)
    if how == "cancelled":
        await run.cancel()
    await machine.until_status("r", how)
    for now in (False, True):
        with pytest.raises(RunEnded) as caught:
            await run.cancel(now=now)
        assert caught.value.status == how
    assert machine.store.inbox("r") == []


async def test_a_cancel_that_arrives_while_the_run_completes_comes_first(machine: Machine) -> None:
    """The code has returned, its end is not durable, and a cancel is already in the inbox: the cancel is not lost."""
    app = await machine.boot()
    gate = Gate()

    @step(effect="read")
    async def last() -> str:
        await gate.wait()
        return "done"

    @workflow
    async def flow() -> str:
        return await last()

    run = await app.start(flow, id="r")
    await gate.reached.wait()
    await machine.until(lambda: app.committer._queue == type(app.committer._queue)())
    commit = app.store.commit
    raced = []

    def commit_after_a_cancel(operations: Any, **how: bool) -> Any:
        ends = [one for one in operations if isinstance(one, Append) and one.row.status == "completed"]
        if ends and not raced:
            raced.append(True)
            body = everstep.model.events.CancelRequested(reason="just in time")  # type: ignore[attr-defined]
            machine.store.commit([Post("r", "cancel", value=everstep.model.events.encode_body(body), at=1)])  # type: ignore[attr-defined]
        return commit(operations, **how)

    app.store.commit = commit_after_a_cancel  # type: ignore[method-assign]
    gate.opened.set()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert raced
    assert machine.kinds("r")[-3:] == ["step_completed", "cancel_requested", "run_cancelled"]
    assert machine.replay("r").differences == []


async def test_a_signal_beside_that_cancel_is_visibly_undelivered(machine: Machine) -> None:
    app = await machine.boot()

    @workflow
    async def flow() -> str:
        return await note("done")

    commit = app.store.commit
    raced = []

    def commit_after_both(operations: Any, **how: bool) -> Any:
        ends = [one for one in operations if isinstance(one, Append) and one.row.status == "completed"]
        if ends and not raced:
            raced.append(True)
            body = everstep.model.events.CancelRequested()  # type: ignore[attr-defined]
            value = everstep.model.events.encode_body(body)  # type: ignore[attr-defined]
            machine.store.commit(
                [Post("r", "signal", "word", value=b"[1]", at=1), Post("r", "cancel", value=value, at=2)]
            )
        return commit(operations, **how)

    app.store.commit = commit_after_both  # type: ignore[method-assign]
    run = await app.start(flow, id="r")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert raced
    assert [(one.kind, one.state) for one in machine.store.signals("r")] == [
        ("signal", "undelivered"),
        ("cancel", "consumed"),
    ]
    assert machine.replay("r").differences == []


async def test_cancels_race_with_completions_and_each_has_one_end(machine: Machine) -> None:
    @workflow
    async def quick(number: int) -> int:
        await note(str(number))
        return number

    app = await machine.boot()

    async def one(number: int) -> str:
        run = await app.start(quick, number, id=f"q{number}")
        for _ in range(number % 7):
            await asyncio.sleep(0)
        try:
            await run.cancel()
            told = "cancelled"
        except RunEnded as ended:
            told = ended.status
        try:
            await run.result(timeout=60)
            became = "completed"
        except RunCancelled:
            became = "cancelled"
        assert became == told
        ends = [kind for kind in machine.kinds(run.id) if kind in ("run_completed", "run_cancelled", "run_failed")]
        assert ends == [f"run_{became}"]
        return became

    became = await asyncio.gather(*(one(number) for number in range(60)))
    assert "cancelled" in became


# -- in every status ---------------------------------------------------------------------------------------------------
async def test_a_queued_run_is_cancelled_when_it_is_taken_up(machine: Machine) -> None:
    app, _ = await machine.start(waiting, id="r")
    await machine.rest(app)
    machine.sql("UPDATE runs SET status = 'queued', owner = NULL WHERE id = 'r'")
    await machine.kill(app)
    other = await machine.boot()
    await other.cancel("r")
    assert machine.status("r") == "queued"
    await machine.worker()
    await machine.until_status("r", "cancelled")
    assert NOTES == ["cleaned up"]


async def test_a_held_run_is_cancelled_at_once_without_its_code(machine: Machine) -> None:
    app, run = await machine.start(waiting, id="r")
    await machine.rest(app)
    await app.hold("r", "wait for ann")
    await machine.until_status("r", "held")
    await run.cancel("not needed")
    assert machine.status("r") == "cancelled"
    assert NOTES == []
    (hold,) = machine.store.holds(run="r", open_only=False)
    assert (hold.resolution, hold.note) == ("cancel", "not needed")


async def test_a_run_that_was_delayed_never_begins_when_it_is_cancelled(machine: Machine) -> None:
    _, run = await machine.start(waiting, id="r", delay=3600)
    await run.cancel("changed my mind")
    await machine.until_status("r", "cancelled")
    with pytest.raises(RunCancelled):
        await run.result()
    assert "signal_awaited" not in machine.kinds("r")
    assert NOTES == []


async def test_a_delayed_run_that_another_process_owns_never_begins_when_it_is_cancelled(machine: Machine) -> None:
    app, other = await machine.boot(), await machine.boot()
    run = await app.start(waiting, id="r", delay=3600)
    await other.cancel("r")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert "signal_awaited" not in machine.kinds("r")


async def test_an_unknown_run_and_a_wrong_grace_are_refused(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(UnknownRun, match="there"):
        await app.cancel("nobody")
    await app.start(waiting, id="r")
    with pytest.raises(Misuse, match="seconds"):
        await app.cancel("r", grace=-1)


async def test_a_cancel_and_a_signal_in_one_batch_come_in_their_order(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        words = []
        try:
            while True:
                words.append(await everstep.receive("word", str))
        except asyncio.CancelledError:
            await note("-".join(words))
            raise

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.stop(app)
    sender = await machine.boot()
    await sender.signal("r", "word", "a")
    await sender.signal("r", "word", "b")
    await sender.cancel("r")
    await sender.signal("r", "word", "c")
    await machine.worker()
    await machine.until_status("r", "cancelled")
    assert NOTES == ["a-b"]
    assert [one.state for one in machine.store.signals("r")][:3] == ["consumed"] * 3


# -- children ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["cooperative", "now", "now, nobody drives it", "held"])
async def test_a_cancel_reaches_children_however_the_parent_ends(machine: Machine, how: str) -> None:
    @workflow
    async def parent() -> None:
        await everstep.start(waiting, id="child")
        await everstep.receive("never")

    app, _ = await machine.start(parent, id="p")
    await machine.until_status("child", "waiting")
    await machine.rest(app)
    if how == "held":
        await app.hold("p")
        await machine.until_status("p", "held")
    if how == "now, nobody drives it":
        await machine.kill(app)
        app = await machine.worker(workflows=["waiting"])
    await app.cancel("p", now=how.startswith("now"))
    await machine.until_status("p", "cancelled")
    await machine.until_status("child", "cancelled")
    assert NOTES == ["cleaned up"]


# -- timeouts ----------------------------------------------------------------------------------------------------------
@workflow(timeout=100)
async def limited() -> str:
    try:
        return await everstep.receive("word", str)
    finally:
        await note("cleaned up")


async def test_a_run_that_takes_too_long_is_cancelled_and_fails_as_timed_out(machine: Machine) -> None:
    app, run = await machine.start(limited, id="r")
    await machine.rest(app)
    await machine.advance(99)
    assert machine.status("r") == "waiting"
    await machine.advance(2)
    with pytest.raises(RunTimedOut, match="100"):
        await run.result()
    assert machine.status("r") == "failed"
    assert NOTES == ["cleaned up"]
    (request,) = machine.bodies("r", "cancel_requested")
    assert request.timeout


async def test_a_timeout_is_judged_after_downtime_and_the_code_has_its_grace(machine: Machine) -> None:
    app, _ = await machine.start(limited, id="r")
    await machine.rest(app)
    await machine.kill(app)
    machine.clock.advance(100_000)
    await machine.worker()
    await machine.until_status("r", "failed")
    assert NOTES == ["cleaned up"]


async def test_a_signal_that_came_before_the_timeout_counts_after_downtime(machine: Machine) -> None:
    @workflow(timeout=100)
    async def flow() -> str:
        return await everstep.receive("word", str)

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.kill(app)
    sender = await machine.boot()
    machine.clock.advance(50)
    await sender.signal("r", "word", "in time")
    machine.clock.advance(100_000)
    worker = await machine.worker()
    await machine.until_status("r", "completed", "failed")
    assert await worker.get("r").result() == "in time"


async def test_a_retried_run_has_its_whole_time_again(machine: Machine) -> None:
    app, run = await machine.start(limited, id="r")
    await machine.rest(app)
    await machine.advance(101)
    await machine.until_status("r", "failed")
    await app.retry("r")
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.advance(99)
    await run.signal("word", "at last")
    assert await run.result() == "at last"


async def test_the_time_of_a_delayed_run_counts_from_its_beginning(machine: Machine) -> None:
    app, run = await machine.start(limited, id="r", delay=1000)
    await machine.rest(app)
    await machine.advance(1001)
    await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
    await machine.advance(90)
    await run.signal("word", "in time")
    assert await run.result() == "in time"
