"""Compensations are steps: they are retried, held, cancelled and judged like others."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Done, Fatal, NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.engine.run import doubts
from everstep.errors import CompensationBegun, HoldConflict, RunCancelled, RunTimedOut, StoreError
from everstep.model import events as ev
from everstep.stores.protocol import Post
from everstep.testing.checker import export_histories
from everstep.testing.clock import FakeClock
from everstep.testing.rules_history import HistoryJudge
from tests.engine.lives import RUN, cut, live, prove_life
from tests.engine.resume_helpers import Gate, Machine, freeze
from tests.lasting import LastingStore
from tests.worlds.judging import held, sound
from tests.worlds.ledger import KEYS, NOTES
from tests.worlds.trip import book_room, fail, note, plain, slow_compensation


# -- compensations are steps ------------------------------------------------------------------------------------------
def failing_compensation(*errors: BaseException | None, **options: Any) -> Any:
    """Return a workflow of three rooms; the compensation of the second raises these, one after the other."""
    left = list(errors)

    @step(**options)
    async def undo(outcome: str, city: str) -> None:
        note(f"undo {city}")
        error = left.pop(0)
        if error is not None:
            raise error

    @step(compensate=undo)
    async def do(city: str) -> str:
        return f"r-{city}"

    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await do("Rome")
        await book_room("Wien")
        await fail()

    return trip


async def test_a_compensation_that_fails_for_good_holds_the_run_and_says_what_it_means(machine: Machine) -> None:
    trip = failing_compensation(ConnectionError(1), ConnectionError(2), retry=Retry(attempts=2, first=0.0))
    app, run = await machine.start(trip, id="r")
    hold = await held(machine, run, "exhausted")
    assert hold.resolutions == ["retry", "skip", "cancel"]
    assert hold.summary.startswith("the compensation of")
    assert "do failed: " in hold.summary
    report = machine.report("r")
    assert report["not_compensated_yet"] == [report["undoes"], "book_room"]
    assert report["consequences"]["cancel"].endswith(f"not compensated: {report['undoes']}, book_room")
    assert f"leave {report['undoes']} as it is" in report["consequences"]["skip"]
    assert NOTES == ["room in Oslo", "room in Wien", "cancel r-Wien in Wien", "undo Rome", "undo Rome"]
    with pytest.raises(HoldConflict):
        await app.rollback("r")
    with pytest.raises(HoldConflict, match="fresh set of attempts"):
        await app.resolve("r", "accept")


@pytest.mark.parametrize("error", [ConnectionError("x"), Fatal("never")])
async def test_retry_gives_a_failed_compensation_new_attempts(machine: Machine, error: Exception) -> None:
    trip = failing_compensation(error, error, None)
    app, run = await machine.start(trip, id="r")
    for _ in range(2):
        await held(machine, run, "exhausted")
        await app.resolve("r", "retry")
    with pytest.raises(ValueError) as raised:
        await run.result(timeout=60)
    assert NOTES[-4:] == ["undo Rome"] * 3 + ["cancel r-Oslo in Oslo"]
    assert len({key for name, key in KEYS if name.endswith("undo")}) == 1
    assert raised.value.__notes__[0].startswith("Compensated: book_room#2")
    sound(machine)


async def test_skip_leaves_one_step_as_it_is_and_goes_on_with_the_others(machine: Machine) -> None:
    trip = failing_compensation(ConnectionError("x"))
    app, run = await machine.start(trip, id="r")
    await held(machine, run, "exhausted")
    await app.resolve("r", "skip", value=None, note="by hand", by="ann")
    with pytest.raises(ValueError) as raised:
        await run.result(timeout=60)
    assert NOTES[-1] == "cancel r-Oslo in Oslo"
    assert raised.value.__notes__[0] == "Compensated: book_room#2, book_room."
    assert raised.value.__notes__[1].startswith("Not compensated, as a person decided: ")
    assert await run.status() == "failed"
    sound(machine)


async def test_cancel_ends_a_run_in_the_middle_and_a_rollback_goes_on_with_the_rest(machine: Machine) -> None:
    trip = failing_compensation(ConnectionError("x"), None)
    app, run = await machine.start(trip, id="r")
    await held(machine, run, "exhausted")
    await app.resolve("r", "cancel")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert "cancel r-Oslo in Oslo" not in NOTES
    await app.rollback("r")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES[-2:] == ["undo Rome", "cancel r-Oslo in Oslo"]
    assert NOTES.count("cancel r-Wien in Wien") == 1
    assert len({key for name, key in KEYS if "undo" in name}) == 1, "begun once more with the same key"
    with pytest.raises(CompensationBegun, match="nothing left"):
        await app.rollback("r")
    sound(machine)


async def test_a_once_compensation_in_doubt_is_settled_like_any_once_step(machine: Machine) -> None:
    for answer, notes in (("done", 1), ("not-done", 2)):
        NOTES.clear()
        trip = failing_compensation(ConnectionError("x"), None, effect="once")
        app, run = await machine.start(trip, id=f"r-{answer}")
        hold = await held(machine, run, "in-doubt")
        assert hold.resolutions == ["done", "not-done", "cancel"]
        assert "is in doubt" in hold.summary
        await app.resolve(run.id, answer)
        with pytest.raises(ValueError):
            await run.result(timeout=60)
        assert NOTES.count("undo Rome") == notes
        assert NOTES[-1] == "cancel r-Oslo in Oslo"
    sound(machine)


async def test_a_once_compensation_asks_its_probe(machine: Machine) -> None:
    asked: list[tuple[Any, ...]] = []

    def probe(key: str, *args: Any) -> NotDone | Done:
        asked.append(args)
        return Done()

    trip = failing_compensation(ConnectionError("x"), effect="once", probe=probe)
    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(trip, id="r")
    assert asked == [("r-Rome", "Rome")]
    assert machine.bodies("r", "probe_answered")[0].answer == "done"


def test_what_a_compensation_returns_need_not_be_storable() -> None:
    @step(compensate=lambda outcome: object())
    async def do() -> int:
        return 1

    @workflow
    async def trip() -> None:
        await do()
        raise ValueError

    life = prove_life(trip)
    assert life.row.status == "failed"


async def test_a_compensation_that_cannot_be_called_with_the_outcome_holds_the_run(machine: Machine) -> None:
    def version(undo: Any) -> Any:
        @step(name="do", compensate=undo)
        async def do(*cities: str) -> str:
            return "done"

        @workflow(name="saga_versioned")
        async def versioned() -> None:
            await do("Oslo", "Rome")
            raise ValueError

        return versioned

    app, run = await machine.start(version(lambda outcome: NOTES.append("undone")), id="r")
    hold = await held(machine, run, "stuck")
    assert hold.summary.startswith("a compensation cannot begin: do.compensate cannot be called to undo do: ")
    assert "takes at most 1" in hold.summary
    version(lambda outcome, *cities: NOTES.append(f"undone {cities}"))
    await app.resolve("r", "retry")
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == ["undone ('Oslo', 'Rome')"]


async def test_an_outcome_that_cannot_be_read_just_now_is_read_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large outcome is kept beside the history; when it is needed, the disk has a bad moment."""
    failures = [StoreError("a bad moment")]

    @step(compensate=lambda outcome: NOTES.append(len(outcome)))
    async def large() -> str:
        return "x" * 100_000

    @workflow
    async def trip() -> None:
        await large()
        await everstep.receive("go", str)
        raise ValueError

    app, run = await machine.start(trip, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    read = app.store.payload

    def payload(run: str, digest: str) -> bytes | None:
        if failures:
            raise failures.pop()
        return read(run, digest)

    monkeypatch.setattr(app.store, "payload", payload)
    await run.signal("go", "!")
    await machine.until(lambda: not failures)
    machine.clock.advance(1)
    app.pump.nudge()
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == [100_000]
    assert failures == []
    sound(machine)


# -- cancels, timeouts, drift -----------------------------------------------------------------------------------------
async def test_a_cancelled_run_is_not_compensated(machine: Machine) -> None:
    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await asyncio.sleep(1000)

    _, run = await machine.start(trip, id="r")
    await machine.until_status("r", "waiting")
    await run.cancel()
    with pytest.raises(RunCancelled):
        await run.result()
    assert NOTES == ["room in Oslo"]


async def test_a_cancel_does_not_cut_a_compensation_off(machine: Machine) -> None:
    gate = Gate()
    _, run = await machine.start(slow_compensation(gate), id="r")
    await gate.reached.wait()
    await run.cancel("enough", grace=0.0)
    await run.cancel("enough", grace=0.0)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    machine.clock.advance(100)
    await asyncio.sleep(0.01)
    gate.opened.set()
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == ["room in Oslo", "undo Rome", "cancel r-Oslo in Oslo"]
    assert await run.status() == "failed"
    sound(machine)


async def test_a_cancel_that_meets_the_end_of_a_compensation_changes_nothing(machine: Machine) -> None:
    gate = Gate()
    app, run = await machine.start(slow_compensation(gate), id="r")
    await gate.reached.wait()
    stranger = await machine.boot()
    freeze(app)  # so that it does not see the cancel before its end is refused
    await stranger.cancel("r", "enough")
    gate.opened.set()
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert machine.kinds("r")[-2:] == ["cancel_requested", "run_failed"]
    sound(machine)
    assert machine.replay("r").differences == []


async def test_cancel_now_ends_a_compensation_when_no_effect_is_under_way(machine: Machine) -> None:
    gate = Gate()
    app, run = await machine.start(slow_compensation(gate), id="r")
    await gate.reached.wait()
    await run.cancel(now=True)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    gate.opened.set()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == ["room in Oslo", "undo Rome"]
    await app.rollback("r")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == ["room in Oslo", "undo Rome", "cancel r-Oslo in Oslo"]
    sound(machine)


async def test_a_run_that_takes_too_long_is_compensated_and_its_grace_does_not_count_for_that(machine: Machine) -> None:
    gate = Gate()

    async def undo(outcome: str) -> None:
        await gate.wait()
        note("undone")

    @step(compensate=undo)
    async def do() -> str:
        return "x"

    @workflow(timeout=10)
    async def trip() -> None:
        await do()
        try:
            await asyncio.sleep(1000)
        finally:
            await plain("cleaned up")

    _, run = await machine.start(trip, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    machine.clock.advance(10)
    await gate.reached.wait()
    machine.clock.advance(1000)
    await asyncio.sleep(0.01)
    gate.opened.set()
    with pytest.raises(RunTimedOut):
        await run.result(timeout=60)
    assert NOTES == ["cleaned up", "undone"]


async def test_code_that_does_not_stop_in_its_grace_is_compensated_without_it(machine: Machine) -> None:
    @workflow(timeout=10)
    async def stubborn() -> None:
        await book_room("Oslo")
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    first, _ = await machine.start(stubborn, id="r")
    await machine.until_status("r", "waiting")
    await machine.advance(10)
    await machine.advance(31)
    await machine.until_status("r", "failed")
    with pytest.raises(RunTimedOut):
        await first.get("r").result()
    assert NOTES == ["room in Oslo", "cancel r-Oslo in Oslo"]
    (begun,) = machine.bodies("r", "compensation_started")
    assert begun.forced
    assert machine.replay("r").differences == []
    sound(machine)


async def test_a_run_that_fails_because_of_drift_is_compensated_and_compared_no_more(machine: Machine) -> None:
    world = {"schema": 1}
    gate = Gate()

    async def undo(outcome: str) -> None:
        note("undo")
        world["schema"] = 3
        await gate.wait()

    @step(compensate=undo)
    async def do() -> str:
        return "x"

    @workflow
    async def trip() -> None:
        await everstep.expect(everstep.witness.value("schema", lambda: world["schema"]), on_drift="fail")
        await do()
        await everstep.receive("never", str)

    first, _ = await machine.start(trip, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(first)
    world["schema"] = 2
    second, _ = await machine.start(trip, id="r")
    await gate.reached.wait()
    assert machine.kinds("r")[-2:] == ["compensation_started", "step_started"]
    await machine.kill(second)
    gate.opened.set()
    third = await machine.worker()
    with pytest.raises(everstep.errors.Drift):
        await third.get("r").result(timeout=60)
    assert NOTES == ["undo", "undo"]
    sound(machine)


@pytest.mark.parametrize("kind", ["cancel", "signal"])
async def test_what_arrives_while_the_failure_is_on_its_way_to_the_disk_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The code is told of an expensive failure when that is durable. What arrives stands before what follows."""
    monkeypatch.setattr(doubts, "EXPENSIVE_SECONDS", -1.0)
    senders: list[Any] = []

    @step(effect="read")
    async def fail_while_cancelled() -> None:
        for send in senders:
            send()
        raise ValueError

    @workflow
    async def waiting() -> None:
        await everstep.receive("never", str)

    @workflow
    async def trip() -> None:
        async def listen() -> None:
            await plain(await everstep.receive("word", str))

        listening = asyncio.create_task(listen())
        await book_room("Oslo")
        await fail_while_cancelled()
        await listening

    store = LastingStore()
    app = await App(store, clock=FakeClock()).open()

    def send() -> None:
        value = b'["hello"]' if kind == "signal" else ev.encode_body(ev.CancelRequested())
        store.commit([Post(RUN, kind, "word" if kind == "signal" else "", value=value, at=app.clock.now())])
        app.loop.call_soon(app.drivers[RUN].take_inbox_and_deadlines)

    senders.append(send)
    await app.start(waiting)  # with a single run, every outcome would be durable at once
    run = await app.start(trip, id=RUN)
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    await app.close()
    senders.clear()
    events = store.events(RUN, 1)
    kinds = [event.kind for event in events]
    arrived = "signal_received" if kind == "signal" else "cancel_requested"
    place = kinds.index(arrived)
    assert kinds[place - 1 : place + 2] == ["step_failed", arrived, "compensation_started"]
    assert ev.decode_body(kinds[place], events[place].body).early
    for count in range(place, len(events)):
        life = await live(cut(store, count), FakeClock(events[count - 1].at), trip, ())
        assert isinstance(life.error, ValueError), count
        assert life.kinds().count("compensation_started") == 1
        assert "plain" not in {event.step for event in life.events}, count


async def test_the_keys_of_compensations_are_those_that_the_checker_expects(machine: Machine) -> None:
    """Also after a retry, which gives the calls that follow it other keys."""
    errors = [ValueError("first")]

    @step(effect="read")
    async def shaky() -> None:
        if errors:
            raise errors.pop()

    @workflow
    async def trip() -> None:
        await shaky()
        await book_room("Oslo")
        await fail()

    app = await machine.boot()
    with pytest.raises(ValueError, match="first"):
        await app.run(trip, id="r")
    await app.retry("r")
    with pytest.raises(ValueError, match="no car"):
        await app.get("r").result()
    (history,) = export_histories(machine.store)
    expected = {call.key for call in HistoryJudge(history).every_call if call.step.startswith("book_room")}
    assert {key for _, key in KEYS} == expected
    sound(machine)
