"""Rollback: a run stops, or is taken up once more, and what it did is undone; or it is said why not."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Done, NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.engine.code import loop
from everstep.engine.verbs import runs
from everstep.errors import (
    CompensationBegun,
    Damaged,
    HoldConflict,
    RunActive,
    RunCancelled,
    RunEnded,
    RunHeld,
    Uncompensated,
    UnknownRun,
)
from everstep.stores.memory import MemoryStore
from everstep.testing.checker import check, export_histories
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, cut, play
from tests.engine.resume_helpers import Gate, Machine, freeze
from tests.worlds.ledger import GATES, NOTES


def notes() -> list[str]:
    """Return what was done so far."""
    return list(NOTES)


def unbook(booking: str, city: str) -> None:
    NOTES.append(f"unbook {city}")


@step(compensate=unbook)
async def book(city: str) -> str:
    NOTES.append(f"book {city}")
    if city in GATES:
        await GATES[city].wait()
    return f"b-{city}"


@step
async def look(city: str) -> str:
    NOTES.append(f"look {city}")
    if city in GATES:
        await GATES[city].wait()
    return city


@step(effect="once")
async def mail(text: str) -> str:
    NOTES.append(f"mail {text}")
    if text in GATES:
        await GATES[text].wait()
    return text


@workflow
async def rollback_trip(last: str = "wait") -> str:
    try:
        await book("Oslo")
        await book("Rome")
        if last == "look":
            await look("Wien")
        elif last == "book":
            await book("Wien")
        elif last == "mail":
            await mail("Wien")
        if last in ("return", "mail"):
            return "home"
        return await everstep.receive("word", str)
    except BaseException:
        await look("the exit")
        raise


def sound(machine: Machine) -> None:
    """Every history agrees with the rules of the checker."""
    found = check(export_histories(machine.store))
    assert not found, found


async def rolled_back(machine: Machine, app: App, run: str = "r") -> None:
    """Wait until a run is undone, and see that all agree about it."""
    with pytest.raises(RunCancelled):
        await app.get(run).result(timeout=60)
    assert machine.kinds(run)[-1] == "run_cancelled"
    assert machine.bodies(run, "run_cancelled")[-1].rolled_back
    assert machine.replay(run).differences == []
    sound(machine)


BOOKED = ["book Oslo", "book Rome"]
UNBOOKED = ["unbook Rome", "unbook Oslo"]


# -- in every status ---------------------------------------------------------------------------------------------------
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


# -- in all its lives --------------------------------------------------------------------------------------------------
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

    store = MemoryStore()
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


# -- what is in doubt --------------------------------------------------------------------------------------------------
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


# -- what nothing undoes -----------------------------------------------------------------------------------------------
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


# -- holds -------------------------------------------------------------------------------------------------------------
async def test_a_held_run_is_rolled_back_by_the_verb_and_by_the_resolution(machine: Machine) -> None:
    for name, verb in (("a", "rollback"), ("b", "resolve")):
        NOTES.clear()
        app, _ = await machine.start(rollback_trip, id=name)
        await machine.until_status(name, "waiting")
        await app.hold(name)
        if verb == "rollback":
            await app.rollback(name, "why not", by="ann")
        else:
            await app.resolve(name, "rollback", note="why not", by="ann")
        await rolled_back(machine, app, name)
        assert notes() == BOOKED + UNBOOKED
        (resolved,) = machine.bodies(name, "run_resolved")
        assert (resolved.resolution, resolved.note, resolved.by) == ("rollback", "why not", "ann")


async def test_a_run_whose_step_is_exhausted_is_rolled_back(machine: Machine) -> None:
    @step(retry=Retry(attempts=1, then="hold"), compensate=unbook)
    async def full(city: str) -> str:
        raise ConnectionError(city)

    @workflow
    async def tour() -> None:
        await book("Oslo")
        await full("Rome")

    app, run = await machine.start(tour, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    await app.resolve("r", "rollback")
    await rolled_back(machine, app)
    assert notes() == ["book Oslo", "unbook Oslo"], "what failed is not undone"


async def test_a_run_that_is_stuck_or_drifted_is_rolled_back(machine: Machine) -> None:
    world = {"schema": 1}

    @workflow
    async def stuck() -> None:
        await book("Oslo")
        await asyncio.Event().wait()

    @workflow
    async def drifts() -> None:
        await everstep.expect(everstep.witness.value("schema", lambda: world["schema"]))
        await book("Oslo")
        await everstep.receive("word", str)

    first = await machine.boot()
    with pytest.raises(RunHeld):
        await first.run(stuck, id="stuck")
    await first.start(drifts, id="drift")
    await machine.until_status("drift", "waiting")
    await machine.kill(first)
    world["schema"] = 2
    app, _ = await machine.start(drifts, id="drift")
    await machine.until_status("drift", "held")
    for run in ("stuck", "drift"):
        assert machine.hold(run).reason == run
        NOTES.clear()
        await app.resolve(run, "rollback")
        await rolled_back(machine, app, run)
        assert notes() == ["unbook Oslo"]


async def test_code_that_spins_offers_no_rollback_for_it_would_spin_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def spins() -> None:
        await book("Oslo")
        while True:
            await asyncio.sleep(0)

    app = await machine.boot()
    monkeypatch.setattr(loop, "TURNS_MAX", 1000)
    run = await app.start(spins, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").resolutions == ["retry", "cancel"]


async def test_a_run_whose_code_diverged_is_rolled_back_when_the_right_code_is_there(machine: Machine) -> None:
    def version(city: str) -> Any:
        @workflow(name="rollback_versioned")
        async def versioned() -> str:
            return await book(city) + await look(city) if city == "Oslo" else await look(city)

        return versioned

    app = await machine.boot()
    await app.run(version("Oslo"), id="r")
    version("Rome")
    await app.rollback("r")
    await machine.until_status("r", "held")
    hold = machine.hold("r")
    assert (hold.reason, "rollback" in hold.resolutions) == ("diverged", False)
    with pytest.raises(HoldConflict):
        await app.rollback("r")
    assert notes() == ["book Oslo", "look Oslo"]
    version("Oslo")
    await app.retry_diverged("r")
    await rolled_back(machine, app)
    assert notes() == ["book Oslo", "look Oslo", "unbook Oslo"]


# -- races -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("last", ["return", "raise", "mail"])
async def test_a_rollback_that_meets_the_end_takes_effect(machine: Machine, last: str) -> None:
    """The code has finished and its end is refused, because the request came first."""
    GATES["Rome"] = Gate()

    @workflow
    async def short(last: str) -> str:
        await book("Oslo")
        await book("Rome")
        if last == "raise":
            raise ValueError
        return "home"

    owner, stranger = await machine.boot(), await machine.boot()
    await owner.start(short, last, id="r")
    await GATES["Rome"].reached.wait()
    freeze(owner)  # so that it does not see the request before its end is refused
    await stranger.rollback("r", allow_uncompensated=last == "mail")
    GATES["Rome"].opened.set()
    if last == "raise":  # what it did is being undone already, and it has failed
        with pytest.raises(ValueError):
            await owner.get("r").result(timeout=60)
        sound(machine)
    else:
        await rolled_back(machine, owner)
    assert notes() == BOOKED + UNBOOKED
    assert [one.state for one in machine.store.signals("r")] == ["consumed"]


async def test_what_is_rolled_back_cannot_be_rolled_back_or_retried_again(machine: Machine) -> None:
    gate = Gate()

    async def undo_slowly(outcome: str) -> None:
        await gate.wait()
        NOTES.append("undone")

    @step(compensate=undo_slowly)
    async def do() -> str:
        return "x"

    @workflow
    async def flow() -> str:
        return await do()

    app = await machine.boot()
    await app.run(flow, id="r")
    await app.rollback("r")
    await gate.reached.wait()
    with pytest.raises(CompensationBegun, match="being undone"):
        await app.rollback("r")
    with pytest.raises(RunActive):
        await app.retry("r")
    gate.opened.set()
    await rolled_back(machine, app)
    with pytest.raises(CompensationBegun, match="has been undone"):
        await app.rollback("r")
    with pytest.raises(RunEnded):
        await app.cancel("r")
    assert notes() == ["undone"]


async def test_two_rollbacks_at_once_are_one(machine: Machine) -> None:
    one, other = await machine.boot(), await machine.boot()
    await one.start(rollback_trip, id="r")
    await machine.until_status("r", "waiting")
    await asyncio.gather(one.rollback("r"), other.rollback("r"), return_exceptions=True)
    await rolled_back(machine, one)
    assert notes() == BOOKED + UNBOOKED
    assert machine.kinds("r").count("rollback_requested") == 1


async def test_a_cancel_now_does_not_swallow_a_rollback_that_waits_in_the_inbox(machine: Machine) -> None:
    """They are taken in the order of their arrival; what the cancel leaves, a later rollback undoes."""
    first, _ = await machine.start(rollback_trip, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(first)
    stranger = await machine.boot()
    await runs.rollback(stranger, "r", "", by="", uncompensated=False)
    await stranger.cancel("r", now=True)
    assert machine.status("r") == "waiting"
    app = await machine.worker()
    await machine.until_status("r", "cancelled")
    assert machine.kinds("r").index("rollback_requested") < machine.kinds("r").index("cancel_requested")
    assert notes() == [*BOOKED, "unbook Rome"], "what was under way is settled, and no more"
    await app.rollback("r")
    await rolled_back(machine, app)
    assert notes() == BOOKED + UNBOOKED


async def test_a_rollback_after_a_cancel_takes_the_cancel_s_place(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    app, _ = await machine.start(rollback_trip, "book", id="r")
    await GATES["Wien"].reached.wait()
    await app.cancel("r", now=True)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    await app.rollback("r")
    await machine.until(lambda: "rollback_requested" in machine.kinds("r"))
    GATES["Wien"].opened.set()
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "book Wien", "unbook Wien", *UNBOOKED]


async def test_children_are_asked_to_stop_and_an_ended_child_is_left_alone(machine: Machine) -> None:
    @workflow
    async def waits() -> None:
        await everstep.receive("never", str)

    @workflow(on_parent_end="wait")
    async def awaited() -> None:
        await everstep.receive("never", str)

    @workflow
    async def parent() -> None:
        await everstep.start(waits, id="child")
        await everstep.start(awaited, id="awaited")
        await book("Oslo")
        await everstep.receive("never", str)

    app, _ = await machine.start(parent, id="r")
    await machine.until_status("r", "waiting")
    await machine.until_status("child", "waiting")
    await machine.until_status("awaited", "waiting")
    await app.rollback("r")
    await rolled_back(machine, app)
    await machine.until_status("child", "cancelled")
    await machine.until_status("awaited", "cancelled")
    sound(machine)
