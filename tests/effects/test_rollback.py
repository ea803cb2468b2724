"""Rollback: a run is undone on request, in every status and in all its lives."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Done, NotDone, step, workflow
from everstep.engine.app.app import App
from everstep.engine.verbs import runs
from everstep.errors import (
    CompensationBegun,
    Damaged,
    HoldConflict,
    RunActive,
    RunCancelled,
    RunHeld,
    Uncompensated,
    UnknownRun,
)
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, cut, play
from tests.engine.resume_helpers import Gate, Machine
from tests.lasting import LastingStore
from tests.worlds.ledger import GATES, NOTES
from tests.worlds.rooms import BOOKED, UNBOOKED, book, look, notes, rollback_trip, rolled_back


# -- in every status --------------------------------------------------------------------------------------------------
async def test_a_waiting_run_stops_where_it_is_and_its_code_is_not_asked(machine: Machine) -> None:
    app, _ = await machine.start(rollback_trip, id="r")
    await machine.until_status("r", "waiting")
    await app.rollback("r", "the customer left", by="ann")
    await rolled_back(machine, app)
    assert notes() == BOOKED + UNBOOKED, "no `except` or `finally` has done anything"
    (asked,) = machine.bodies("r", "rollback_requested")
    assert (asked.note, asked.by, asked.uncompensated) == ("the customer left", "ann", False)


async def test_a_waiting_run_that_another_process_drives_is_rolled_back_by_that(machine: Machine) -> None:
    owner, stranger = await machine.boot(), await machine.boot()
    await owner.start(rollback_trip, id="r")
    await machine.until_status("r", "waiting")
    await stranger.rollback("r")
    await rolled_back(machine, stranger)
    assert notes() == BOOKED + UNBOOKED


async def test_a_running_run_does_not_wait_for_a_step_that_has_nothing_to_undo(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    app, _ = await machine.start(rollback_trip, "look", id="r")
    await GATES["Wien"].reached.wait()
    await app.rollback("r")
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "look Wien", *UNBOOKED]


async def test_a_running_run_finishes_a_begun_step_that_can_be_undone_and_undoes_it(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    app, _ = await machine.start(rollback_trip, "book", id="r")
    await GATES["Wien"].reached.wait()
    await app.rollback("r")
    await machine.until(lambda: "rollback_requested" in machine.kinds("r"))
    await asyncio.sleep(0.01)
    assert machine.kinds("r")[-1] == "rollback_requested"
    GATES["Wien"].opened.set()
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "book Wien", "unbook Wien", *UNBOOKED]


async def test_a_begun_step_that_can_be_undone_is_finished_by_another_process_first(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    first, _ = await machine.start(rollback_trip, "book", id="r")
    await GATES["Wien"].reached.wait()
    await first.rollback("r")
    await machine.until(lambda: "rollback_requested" in machine.kinds("r"))
    await machine.kill(first)
    GATES["Wien"].opened.set()
    app = await machine.worker()
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "book Wien", "book Wien", "unbook Wien", *UNBOOKED]


async def test_a_run_that_nobody_drives_is_rolled_back_when_somebody_takes_it_up(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    first, _ = await machine.start(rollback_trip, "look", id="r")
    await GATES["Wien"].reached.wait()
    await machine.kill(first)
    stranger = await machine.boot()
    await runs.rollback(stranger, "r", "", by="", uncompensated=False)
    app = await machine.worker()
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "look Wien", *UNBOOKED]


async def test_a_completed_run_is_taken_up_once_more_and_cancelled(machine: Machine) -> None:
    app = await machine.boot()
    assert await app.run(rollback_trip, "return", id="r") == "home"
    await app.rollback("r")
    await rolled_back(machine, app)
    assert notes() == BOOKED + UNBOOKED
    assert machine.row("r").outcome is None
    with pytest.raises(RunCancelled):
        await (await app.start(rollback_trip, "return", id="r")).result()
    with pytest.raises(RunActive):
        await app.retry("r")
    assert await (await app.start(rollback_trip, "return", id="r", on_existing="restart")).result() == "home"


async def test_a_failed_run_that_has_nothing_to_undo_becomes_cancelled(machine: Machine) -> None:
    @workflow
    async def fails() -> None:
        raise ValueError

    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(fails, id="r")
    await app.rollback("r")
    await rolled_back(machine, app)
    with pytest.raises(CompensationBegun):
        await app.rollback("r")


@pytest.mark.parametrize("now", [False, True])
async def test_a_cancelled_run_can_be_rolled_back_later(machine: Machine, now: bool) -> None:
    app, run = await machine.start(rollback_trip, id="r")
    await machine.until_status("r", "waiting")
    await run.cancel(now=now)
    with pytest.raises(RunCancelled):
        await run.result()
    exits = [] if now else ["look the exit"]
    assert notes() == BOOKED + exits
    await app.rollback("r")
    await rolled_back(machine, app)
    assert notes() == BOOKED + exits + UNBOOKED


async def test_a_step_that_a_cancel_left_open_is_finished_before_the_rollback_undoes_it(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    first, _ = await machine.start(rollback_trip, "book", id="r")
    await GATES["Wien"].reached.wait()
    await machine.kill(first)
    app = await machine.boot()
    await app.cancel("r", now=True)
    assert machine.status("r") == "cancelled"
    GATES["Wien"].opened.set()
    await app.rollback("r")
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "book Wien", "book Wien", "unbook Wien", *UNBOOKED]


async def test_after_a_crash_a_rollback_settles_only_what_can_be_undone(machine: Machine) -> None:
    GATES["Wien"], GATES["Rome"] = Gate(), Gate()

    @workflow
    async def both() -> None:
        await asyncio.gather(look("Wien"), book("Rome"))

    first, _ = await machine.start(both, id="r")
    await GATES["Wien"].reached.wait()
    await GATES["Rome"].reached.wait()
    await first.rollback("r")
    await machine.until(lambda: "rollback_requested" in machine.kinds("r"))
    await machine.kill(first)
    GATES["Rome"].opened.set()
    app = await machine.worker()
    await rolled_back(machine, app)
    assert notes() == ["look Wien", "book Rome", "book Rome", "unbook Rome"]
    assert [event.step for event in machine.events("r") if event.kind == "step_started"].count("look") == 1


async def test_a_delayed_run_that_has_not_begun_is_just_cancelled(machine: Machine) -> None:
    app, _ = await machine.start(rollback_trip, id="r", delay=100)
    await app.rollback("r")
    await machine.until_status("r", "cancelled")
    assert notes() == []


async def test_a_run_that_is_not_there_or_is_damaged_is_not_rolled_back(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(UnknownRun):
        await app.rollback("nobody")
    await app.run(rollback_trip, "return", id="r")
    machine.sql("UPDATE events SET step = 'x' WHERE run = 'r' AND seq = 2")
    with pytest.raises(Damaged):
        await app.rollback("r")
    assert machine.row("r").owner is None
    assert machine.status("r") == "completed"


def test_a_def_workflow_is_rolled_back() -> None:
    @step(compensate=lambda outcome, city: NOTES.append(f"unsee {city}"))
    def see(city: str) -> str:
        return city

    @workflow
    def tour() -> str:
        try:
            return see("Oslo") + everstep.blocking.receive("word", str)
        finally:
            NOTES.append("only in memory")

    async def main() -> None:
        async with everstep.open("memory:") as app:
            run = await app.start(tour, id="r")
            while await run.status() != "waiting":
                await asyncio.sleep(0.001)
            await app.rollback("r")
            with pytest.raises(RunCancelled):
                await run.result(timeout=60)

    asyncio.run(main())
    assert notes() == ["only in memory", "unsee Oslo"]


def test_the_blocking_app_rolls_back_too() -> None:
    with everstep.open("memory:") as app:
        assert app.run(rollback_trip, "return", id="r") == "home"
        with pytest.raises(RunCancelled):
            app.rollback("r", "no more").result(timeout=60)
    assert notes() == BOOKED + UNBOOKED


# -- in all its lives -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("last", ["return", "wait"])
async def test_a_rollback_goes_on_from_every_prefix_of_its_history(last: str) -> None:
    async def live(store: Any, at: int, *, begin: bool) -> tuple[list[str], list[Any]]:
        NOTES.clear()
        clock = FakeClock(at)
        app = await App(store, clock=clock).open()
        try:
            run = await app.start(rollback_trip, last, id=RUN)
            if begin:
                await play(app, clock)
                await app.rollback(RUN)
            await play(app, clock)
            with pytest.raises(RunCancelled):
                await run.result(timeout=60)
            row = store.run(RUN)
            return list(NOTES), list(store.events(RUN, row.generation))
        finally:
            await app.close()

    store = LastingStore()
    notes, events = await live(store, 2_000_000_000_000_000, begin=True)
    assert notes == BOOKED + UNBOOKED
    kinds = [event.kind for event in events]
    for count in range(kinds.index("rollback_requested") + 1, len(events)):
        again, longer = await live(cut(store, count), events[count - 1].at, begin=False)
        assert longer[:count] == events[:count]
        assert [one.kind for one in longer if one.kind != "step_started"] == [
            kind for kind in kinds if kind != "step_started"
        ], count
        done = sum(kind == "step_completed" for kind in kinds[:count]) - 2
        assert again == UNBOOKED[done:], f"cut after event {count} ({kinds[count - 1]})"


# -- what is in doubt -------------------------------------------------------------------------------------------------
def paying(*answers: Any) -> Any:
    """Return a workflow whose payment is in doubt, and the questions that its probe was asked."""
    left = list(answers)

    @step(
        name="pay",
        effect="once",
        compensate=lambda receipt, amount: NOTES.append(f"refund {receipt}"),
        probe=(lambda key, amount: left.pop(0)) if answers else None,
    )
    async def pay(amount: int) -> str:
        NOTES.append("pay")
        raise ConnectionError("the line is dead")

    @workflow
    async def buy() -> str:
        await book("Oslo")
        return await pay(5)

    return buy


@pytest.mark.parametrize(
    ("answer", "value", "undone"),
    [("done", "receipt 7", ["refund receipt 7", "unbook Oslo"]), ("not-done", None, ["unbook Oslo"])],
)
async def test_a_step_in_doubt_is_asked_about_once_more_and_never_done_again(
    machine: Machine, answer: str, value: str | None, undone: list[str]
) -> None:
    app, run = await machine.start(paying(), id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert "rollback" in machine.hold("r").resolutions
    await app.resolve("r", "rollback", note="too late", by="ann")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    hold = machine.hold("r")
    assert hold.reason == "in-doubt"
    assert hold.resolutions == ["done", "not-done", "cancel"]
    assert "not done again" in machine.report("r")["consequences"]["not-done"]
    with pytest.raises(HoldConflict):
        await app.rollback("r")
    await app.resolve("r", answer, value=value)
    await rolled_back(machine, app)
    assert notes() == ["book Oslo", "pay", *undone]


@pytest.mark.parametrize(
    ("answer", "undone"),
    [(Done("receipt 7"), ["refund receipt 7", "unbook Oslo"]), (NotDone(), ["unbook Oslo"])],
)
async def test_a_step_in_doubt_is_settled_by_its_probe_before_a_rollback(
    machine: Machine, answer: Any, undone: list[str]
) -> None:
    buy = paying(everstep.Unknown("not yet"), answer)
    app, _ = await machine.start(buy, id="r")
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    await machine.rest()
    await app.rollback("r")
    await machine.until(lambda: "rollback_requested" in machine.kinds("r"))
    machine.clock.advance(5)
    await rolled_back(machine, app)
    assert notes() == ["book Oslo", "pay", *undone]


async def test_a_once_step_under_way_is_waited_for_and_undone(machine: Machine) -> None:
    gate = Gate()

    @step(effect="once", compensate=lambda receipt: NOTES.append(f"refund {receipt}"))
    async def pay() -> str:
        await gate.wait()
        return "receipt"

    @workflow
    async def buy() -> str:
        return await pay()

    app, _ = await machine.start(buy, id="r")
    await gate.reached.wait()
    await app.rollback("r")
    await machine.until(lambda: "rollback_requested" in machine.kinds("r"))
    assert notes() == []
    gate.opened.set()
    await rolled_back(machine, app)
    assert notes() == ["refund receipt"]


# -- what nothing undoes ----------------------------------------------------------------------------------------------
async def test_a_finished_once_effect_without_a_compensation_refuses_a_rollback_unless_it_is_allowed(
    machine: Machine,
) -> None:
    app = await machine.boot()
    await app.run(rollback_trip, "mail", id="r")
    before = machine.dump()["events"]
    with pytest.raises(Uncompensated, match=r"leave as they are: mail\. .*--allow-uncompensated") as refused:
        await app.rollback("r")
    assert refused.value.steps == ["mail"]
    assert machine.dump()["events"] == before
    assert (machine.status("r"), machine.row("r").owner) == ("completed", None)
    await app.rollback("r", allow_uncompensated=True)
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "mail Wien", *UNBOOKED]
    assert machine.bodies("r", "rollback_requested")[0].uncompensated


async def test_a_begun_once_effect_without_a_compensation_refuses_a_rollback_too(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    app, _ = await machine.start(rollback_trip, "mail", id="r")
    await GATES["Wien"].reached.wait()
    with pytest.raises(Uncompensated):
        await app.rollback("r")
    await app.rollback("r", allow_uncompensated=True)
    GATES["Wien"].opened.set()
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "mail Wien", *UNBOOKED]


async def test_an_effect_that_happens_between_the_question_and_the_rollback_holds_the_run(machine: Machine) -> None:
    """The command sees nothing that would stay; when the request arrives, a mail is on its way."""
    GATES["Wien"], GATES["Rome"] = Gate(), Gate()
    owner, stranger = await machine.boot(), await machine.boot()
    await owner.start(rollback_trip, "mail", id="r")
    await GATES["Rome"].reached.wait()
    ring = owner.drivers["r"].take_inbox_and_deadlines
    # It does not look into its inbox for a while.
    owner.drivers["r"].take_inbox_and_deadlines = lambda: None  # type: ignore[method-assign]
    await stranger.rollback("r", "enough", by="ann")
    GATES["Rome"].opened.set()
    await GATES["Wien"].reached.wait()
    ring()
    GATES["Wien"].opened.set()
    await machine.until_status("r", "held")
    hold = machine.hold("r")
    assert hold.reason == "asked"
    assert "nothing undoes mail" in hold.summary
    assert hold.resolutions == ["retry", "cancel"], "what would be refused is no answer"
    assert "undoes book, book#2 and leaves as they are: mail" in machine.report("r")["rollback"]
    assert machine.report("r")["by"] == "ann"
    with pytest.raises(HoldConflict, match="everstep rollback r"):
        await stranger.resolve("r", "rollback")
    with pytest.raises(Uncompensated):
        await stranger.rollback("r")
    assert machine.status("r") == "held"
    await stranger.rollback("r", allow_uncompensated=True)
    await rolled_back(machine, stranger)
    assert notes() == [*BOOKED, "mail Wien", *UNBOOKED]


async def test_effects_of_child_runs_refuse_a_rollback_and_are_rolled_back_by_themselves(machine: Machine) -> None:
    @step(effect="once", compensate=lambda outcome: NOTES.append("child's own"))
    async def pay() -> str:
        return "paid"

    @workflow
    async def grandchild() -> str:
        return await pay()

    @workflow
    async def child() -> str:
        return await grandchild()

    @workflow
    async def parent() -> str:
        await book("Oslo")
        return await child()

    app = await machine.boot()
    await app.run(parent, id="r")
    (middle,) = machine.store.children("r")
    (last,) = machine.store.children(middle.id)
    with pytest.raises(Uncompensated, match=f"of the run {last.id}"):
        await app.rollback("r")
    await app.rollback(last.id)
    await rolled_back(machine, app, last.id)
    await app.rollback("r")
    await rolled_back(machine, app)
    assert notes() == ["book Oslo", "child's own", "unbook Oslo"]
