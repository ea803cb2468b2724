"""Sagas: what a failed run did is undone, in reverse, durably; and what is not undone, and why."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import everstep
from everstep import Done, Fatal, Live, NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.engine.run import failures
from everstep.errors import CompensationBegun, HoldConflict, Misuse, RunCancelled, RunHeld, RunTimedOut, StoreError
from everstep.model import events as ev
from everstep.stores.memory import MemoryStore
from everstep.stores.protocol import Post
from everstep.testing.checker import check, export_histories
from everstep.testing.clock import FakeClock
from everstep.testing.rules_history import HistoryJudge
from tests.engine.lives import RUN, Life, cut, live, prove_life
from tests.engine.resume_helpers import Gate, Machine, freeze, scenario

NOTES: list[Any] = []
KEYS: list[tuple[str, str]] = []


@pytest.fixture(autouse=True)
def no_notes() -> None:
    NOTES.clear()
    KEYS.clear()


@dataclass
class Seat:
    row: int
    letter: str


def note(what: str) -> None:
    NOTES.append(what)
    KEYS.append((everstep.current().step, everstep.key()))


def cancel_room(booking: str, city: str) -> None:
    note(f"cancel {booking} in {city}")


@step(compensate=cancel_room)
async def book_room(city: str) -> str:
    note(f"room in {city}")
    return f"r-{city}"


@step
async def give_back(seat: Seat, flight: str, *, child: bool = False) -> str:
    note(f"give back {seat.row}{seat.letter} on {flight}{' for a child' if child else ''}")
    return "given back"


@step(compensate=give_back)
async def book_seat(flight: str, *, child: bool = False) -> Seat:
    note(f"seat on {flight}")
    return Seat(7, "a")


@step
async def plain(name: str) -> str:
    note(name)
    return name


@step(effect="read")
async def fail(text: str = "no car") -> None:
    raise ValueError(text)


def sound(machine: Machine) -> None:
    """Every history agrees with the rules of the checker."""
    assert not check(export_histories(machine.store)), check(export_histories(machine.store))


# -- failing -----------------------------------------------------------------------------------------------------------
def test_completed_steps_are_undone_in_reverse_with_their_outcomes_and_arguments() -> None:
    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await plain("a map")
        await book_seat("LH1", child=True)
        await book_room("Rome")
        await fail()

    life = prove_life(trip)
    assert isinstance(life.error, ValueError)
    assert life.row.status == "failed"
    undone = [(event.step, body.compensates) for event, body in started(life) if body.compensates]
    assert undone == [("book_room.compensate#2", 4), ("give_back", 3), ("book_room.compensate", 1)]
    (begun,) = life.bodies("compensation_started")
    assert (begun.because, begun.steps, begun.cause, begun.forced) == ("failure", [4, 3, 1], 5, False)
    assert life.error.__notes__ == ["Compensated: book_room#2, book_seat, book_room."]
    first = NOTES[: NOTES.index("cancel r-Oslo in Oslo") + 1]
    assert first == [
        *("room in Oslo", "a map", "seat on LH1", "room in Rome"),
        *("cancel r-Rome in Rome", "give back 7a on LH1 for a child", "cancel r-Oslo in Oslo"),
    ]


def started(life: Life) -> list[tuple[Any, Any]]:
    bodies = iter(life.bodies("step_started"))
    return [(event, next(bodies)) for event in life.events if event.kind == "step_started"]


def test_a_compensable_step_and_its_compensation_keep_their_arguments_whole() -> None:
    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await plain("a map")
        await fail()

    bodies = {event.step: body for event, body in started(prove_life(trip))}
    assert bytes(bodies["book_room"].whole) == b'[["Oslo"]]'
    assert bytes(bodies["book_room.compensate"].whole) == b'[["r-Oslo","Oslo"]]'
    assert bodies["book_room"].compensate == "book_room.compensate"
    assert bytes(bodies["plain"].whole) == b""


def test_code_that_catches_the_error_compensates_nothing() -> None:
    @workflow
    async def trip() -> str:
        await book_room("Oslo")
        try:
            await fail()
        except ValueError:
            return "by train then"
        return ""

    life = prove_life(trip)
    assert life.value == "by train then"
    assert "compensation_started" not in life.kinds()
    assert not [one for one in NOTES if one.startswith("cancel")]


def test_a_run_that_completes_compensates_nothing() -> None:
    @workflow
    async def trip() -> str:
        return await book_room("Oslo")

    assert prove_life(trip).kinds()[-1] == "run_completed"
    assert "cancel r-Oslo in Oslo" not in NOTES


def test_the_order_is_that_of_completion_and_not_of_the_start() -> None:
    @step(compensate=cancel_room)
    async def slow_room(city: str) -> str:
        if city == "Oslo":
            await asyncio.sleep(0.03)
        return f"s-{city}"

    @workflow
    async def trip() -> None:
        await asyncio.gather(slow_room("Oslo"), slow_room("Rome"))
        await fail()

    life = prove_life(trip, every_prefix=False)
    assert [body.steps for body in life.bodies("compensation_started")] == [[1, 2]]
    assert NOTES == ["cancel s-Oslo in Oslo", "cancel s-Rome in Rome"]


def test_a_def_workflow_compensates_with_def_and_async_functions() -> None:
    async def leave(outcome: str, city: str) -> None:
        note(f"leave {outcome}")

    @step(compensate=leave)
    def enter(city: str) -> str:
        return f"in {city}"

    @step(compensate=lambda outcome, city: note(f"forget {outcome}"))
    def learn(city: str) -> str:
        return f"all about {city}"

    @workflow
    def visit(city: str) -> None:
        enter(city)
        learn(city)
        raise LookupError(city)

    life = prove_life(visit, "Oslo")
    assert isinstance(life.error, LookupError)
    assert NOTES[:2] == ["forget all about Oslo", "leave in Oslo"]


def test_an_error_of_the_code_itself_and_a_result_that_cannot_be_stored_compensate_too() -> None:
    @workflow
    async def trip() -> Any:
        await book_room("Oslo")
        return object()

    life = prove_life(trip)
    assert life.row.status == "failed"
    assert NOTES.count("cancel r-Oslo in Oslo") >= 1
    assert life.bodies("compensation_started")[0].cause == 0


def test_the_key_of_a_compensation_is_the_same_in_every_attempt_and_no_call_of_the_code_has_it() -> None:
    failures = [ConnectionError("once"), None, None]

    @step(retry=Retry(attempts=2, first=0.01))
    async def undo(outcome: str, city: str) -> None:
        note(f"undo {outcome}")
        error = failures.pop(0)
        if error:
            raise error

    @step(compensate=undo)
    async def do(city: str) -> str:
        return city

    @workflow
    async def trip() -> None:
        await do("Oslo")
        failures.insert(0, None)
        await undo("Oslo", "Oslo")
        raise ValueError

    prove_life(trip, every_prefix=False)
    forward, first, again = [key for name, key in KEYS if name.endswith("undo")]
    assert first == again
    assert forward != first, "what the code did itself, with the same arguments, is another thing"


def test_methods_are_bound_to_the_same_object() -> None:
    class Hotel:
        def __init__(self, name: str) -> None:
            self.name = name

        @step
        async def leave(self, room: str, nights: int) -> None:
            NOTES.append(f"leave {room} of {self.name}")

        @step(compensate=leave)
        async def stay(self, nights: int) -> str:
            return f"room for {nights}"

        @step(compensate=lambda outcome, nights: NOTES.append(f"uneat {outcome}"))
        async def eat(self, nights: int) -> str:
            return f"{nights} meals"

    @workflow
    async def trip() -> None:
        hotel = Hotel("Grand")
        await hotel.stay(2)
        raise ValueError

    prove_life(trip)
    assert set(NOTES) == {"leave room for 2 of Grand"}


def test_what_is_handed_through_reaches_the_compensation() -> None:
    class Client:
        def say(self, text: str) -> None:
            NOTES.append(text)

    async def undo(outcome: str, client: Live[Client], city: str) -> None:
        client.say(f"undo {outcome} {city}")

    @step(compensate=undo)
    async def do(client: Live[Client], city: str) -> str:
        return "done"

    @workflow
    async def trip() -> None:
        await do(Client(), "Oslo")
        raise ValueError

    prove_life(trip)
    assert set(NOTES) == {"undo done Oslo"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"effect": "read", "compensate": cancel_room}, "changes nothing outside"),
        ({"compensate": step(cancel_room, effect="read")}, "cannot undo it, for"),
        ({"compensate": "cancel_room"}, "a step or a function, not str"),
        ({"compensate": lambda outcome: None}, r"called as book.compensate\(outcome, city, child=child\)"),
        ({"compensate": lambda outcome, city: None}, "unexpected keyword argument 'child'"),
        ({"compensate": lambda outcome, city, child, *, more: None}, "missing a required argument"),
    ],
)
def test_a_compensation_that_could_not_be_called_is_refused_when_it_is_declared(
    options: dict[str, Any], words: str
) -> None:
    def book(city: str, *, child: bool = False) -> str:
        return city

    with pytest.raises(Misuse, match=words):
        step(book, name="book", **options)


def test_outside_of_a_run_a_compensable_step_is_the_plain_function() -> None:
    calls: list[str] = []

    @step(compensate=lambda outcome: calls.append("undone"))
    def do() -> str:
        calls.append("done")
        return "x"

    assert do() == "x"
    assert calls == ["done"]


# -- what did not happen is not undone ---------------------------------------------------------------------------------
def test_a_failed_step_and_one_whose_fallback_took_its_place_are_not_compensated() -> None:
    @step(compensate=cancel_room, fallback="none")
    async def no_room(city: str) -> str:
        raise ConnectionError(city)

    @step(compensate=cancel_room)
    async def full(city: str) -> str:
        raise ConnectionError(city)

    @workflow
    async def trip() -> None:
        assert await no_room("Oslo") == "none"
        await full("Rome")

    life = prove_life(trip)
    assert isinstance(life.error, ConnectionError)
    assert "compensation_started" not in life.kinds()
    assert NOTES == []


@scenario
async def test_a_step_that_a_person_skipped_is_not_compensated(machine: Machine) -> None:
    @step(compensate=cancel_room, retry=Retry(attempts=1, then="hold"))
    async def full(city: str) -> str:
        raise ConnectionError(city)

    @workflow
    async def trip() -> None:
        await full("Rome")
        raise ValueError

    app = await machine.boot()
    run = await app.start(trip, id="r")
    with pytest.raises(RunHeld):
        await run.result()
    await app.resolve("r", "skip", value="by hand")
    with pytest.raises(ValueError):
        await run.result()
    assert NOTES == []


# -- what is under way is settled first --------------------------------------------------------------------------------
@scenario
async def test_a_begun_once_step_is_settled_before_anything_is_compensated(machine: Machine) -> None:
    gate, answers = Gate(), [Done("ticket 7")]

    @step(effect="once", compensate=lambda outcome: note(f"return {outcome}"), probe=lambda key: answers.pop())
    async def ticket() -> str:
        await gate.wait()
        raise ConnectionError("the line is dead")

    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await asyncio.gather(ticket(), fail())

    app = await machine.boot()
    run = await app.start(trip, id="r")
    await machine.until(lambda: "step_failed" in machine.kinds("r"))
    await machine.until(lambda: gate.reached.is_set())
    await asyncio.sleep(0.01)
    assert "compensation_started" not in machine.kinds("r")
    gate.opened.set()
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == ["room in Oslo", "return ticket 7", "cancel r-Oslo in Oslo"]
    sound(machine)


@scenario
async def test_a_compensable_step_that_is_cancelled_by_a_failing_sibling_is_finished_and_undone(
    machine: Machine,
) -> None:
    gate = Gate()

    @step(compensate=cancel_room)
    async def slow_room(city: str) -> str:
        await gate.wait()
        note(f"slow room in {city}")
        return f"s-{city}"

    @workflow
    async def trip() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(slow_room("Oslo"))
            group.create_task(fail())

    app = await machine.boot()
    run = await app.start(trip, id="r")
    await machine.until(lambda: "step_failed" in machine.kinds("r"))
    await gate.reached.wait()
    await asyncio.sleep(0.01)
    assert machine.kinds("r")[-1] == "step_failed", "the code is not told that it was cancelled before it is settled"
    gate.opened.set()
    with pytest.raises(ExceptionGroup):
        await run.result(timeout=60)
    assert NOTES == ["slow room in Oslo", "cancel s-Oslo in Oslo"]
    assert "step_cancelled" not in machine.kinds("r")
    sound(machine)


@scenario
async def test_a_compensable_step_that_was_cut_off_by_a_crash_is_finished_before_the_run_ends(machine: Machine) -> None:
    gate = Gate()

    @step(compensate=cancel_room)
    async def slow_room(city: str) -> str:
        note(f"slow room in {city}")
        await gate.wait()
        return f"s-{city}"

    @workflow
    async def trip() -> None:
        await asyncio.gather(slow_room("Oslo"), fail())

    first = await machine.boot()
    await first.start(trip, id="r")
    await machine.until(lambda: "step_failed" in machine.kinds("r"))
    await machine.kill(first)
    gate.opened.set()
    app = await machine.worker()
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["slow room in Oslo", "slow room in Oslo", "cancel s-Oslo in Oslo"]
    sound(machine)


@scenario
async def test_a_compensable_step_that_was_cancelled_between_two_attempts_is_over(machine: Machine) -> None:
    @step(compensate=cancel_room, retry=Retry(attempts=5, first=60.0, jitter=0.0))
    async def shaky(city: str) -> str:
        note(f"try {city}")
        raise ConnectionError(city)

    @workflow
    async def trip() -> str:
        try:
            async with asyncio.timeout(5):
                await shaky("Oslo")
        except TimeoutError:
            return "gave up"
        return ""

    app = await machine.boot()
    run = await app.start(trip, id="r")
    await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
    await machine.rest()
    await machine.advance(5)
    await machine.advance(60)
    assert await run.result(timeout=60) == "gave up"
    assert NOTES == ["try Oslo"]


# -- compensations are steps -------------------------------------------------------------------------------------------
async def held(machine: Machine, run: Any, reason: str) -> Any:
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    hold = machine.hold(run.id)
    assert hold.reason == reason
    return hold


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


@scenario
async def test_a_compensation_that_fails_for_good_holds_the_run_and_says_what_it_means(machine: Machine) -> None:
    trip = failing_compensation(ConnectionError(1), ConnectionError(2), retry=Retry(attempts=2, first=0.0))
    app = await machine.boot()
    run = await app.start(trip, id="r")
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
@scenario
async def test_retry_gives_a_failed_compensation_new_attempts(machine: Machine, error: Exception) -> None:
    trip = failing_compensation(error, error, None)
    app = await machine.boot()
    run = await app.start(trip, id="r")
    for _ in range(2):
        await held(machine, run, "exhausted")
        await app.resolve("r", "retry")
    with pytest.raises(ValueError) as raised:
        await run.result(timeout=60)
    assert NOTES[-4:] == ["undo Rome"] * 3 + ["cancel r-Oslo in Oslo"]
    assert len({key for name, key in KEYS if name.endswith("undo")}) == 1
    assert raised.value.__notes__[0].startswith("Compensated: book_room#2")
    sound(machine)


@scenario
async def test_skip_leaves_one_step_as_it_is_and_goes_on_with_the_others(machine: Machine) -> None:
    trip = failing_compensation(ConnectionError("x"))
    app = await machine.boot()
    run = await app.start(trip, id="r")
    await held(machine, run, "exhausted")
    await app.resolve("r", "skip", value=None, note="by hand", by="ann")
    with pytest.raises(ValueError) as raised:
        await run.result(timeout=60)
    assert NOTES[-1] == "cancel r-Oslo in Oslo"
    assert raised.value.__notes__[0] == "Compensated: book_room#2, book_room."
    assert raised.value.__notes__[1].startswith("Not compensated, as a person decided: ")
    assert await run.status() == "failed"
    sound(machine)


@scenario
async def test_cancel_ends_a_run_in_the_middle_and_a_rollback_goes_on_with_the_rest(machine: Machine) -> None:
    trip = failing_compensation(ConnectionError("x"), None)
    app = await machine.boot()
    run = await app.start(trip, id="r")
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


@scenario
async def test_a_once_compensation_in_doubt_is_settled_like_any_once_step(machine: Machine) -> None:
    for answer, notes in (("done", 1), ("not-done", 2)):
        NOTES.clear()
        trip = failing_compensation(ConnectionError("x"), None, effect="once")
        app = await machine.boot()
        run = await app.start(trip, id=f"r-{answer}")
        hold = await held(machine, run, "in-doubt")
        assert hold.resolutions == ["done", "not-done", "cancel"]
        assert "is in doubt" in hold.summary
        await app.resolve(run.id, answer)
        with pytest.raises(ValueError):
            await run.result(timeout=60)
        assert NOTES.count("undo Rome") == notes
        assert NOTES[-1] == "cancel r-Oslo in Oslo"
    sound(machine)


@scenario
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


@scenario
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

    app = await machine.boot()
    run = await app.start(version(lambda outcome: NOTES.append("undone")), id="r")
    hold = await held(machine, run, "stuck")
    assert hold.summary.startswith("a compensation cannot begin: do.compensate cannot be called to undo do: ")
    assert "takes at most 1" in hold.summary
    version(lambda outcome, *cities: NOTES.append(f"undone {cities}"))
    await app.resolve("r", "retry")
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == ["undone ('Oslo', 'Rome')"]


@scenario
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

    app = await machine.boot()
    run = await app.start(trip, id="r")
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


# -- cancels, timeouts, drift ------------------------------------------------------------------------------------------
def slow_compensation(gate: Gate, **options: Any) -> Any:
    async def undo(outcome: str, city: str) -> None:
        note(f"undo {city}")
        await gate.wait()

    @step(compensate=undo)
    async def do(city: str) -> str:
        return f"r-{city}"

    @workflow(**options)
    async def trip() -> None:
        await book_room("Oslo")
        await do("Rome")
        await fail()

    return trip


@scenario
async def test_a_cancelled_run_is_not_compensated(machine: Machine) -> None:
    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await asyncio.sleep(1000)

    app = await machine.boot()
    run = await app.start(trip, id="r")
    await machine.until_status("r", "waiting")
    await run.cancel()
    with pytest.raises(RunCancelled):
        await run.result()
    assert NOTES == ["room in Oslo"]


@scenario
async def test_a_cancel_does_not_cut_a_compensation_off(machine: Machine) -> None:
    gate = Gate()
    app = await machine.boot()
    run = await app.start(slow_compensation(gate), id="r")
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


@scenario
async def test_a_cancel_that_meets_the_end_of_a_compensation_changes_nothing(machine: Machine) -> None:
    gate = Gate()
    app = await machine.boot()
    run = await app.start(slow_compensation(gate), id="r")
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


@scenario
async def test_cancel_now_ends_a_compensation_when_no_effect_is_under_way(machine: Machine) -> None:
    gate = Gate()
    app = await machine.boot()
    run = await app.start(slow_compensation(gate), id="r")
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


@scenario
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

    app = await machine.boot()
    run = await app.start(trip, id="r")
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


@scenario
async def test_code_that_does_not_stop_in_its_grace_is_compensated_without_it(machine: Machine) -> None:
    @workflow(timeout=10)
    async def stubborn() -> None:
        await book_room("Oslo")
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    first = await machine.boot()
    await first.start(stubborn, id="r")
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


@scenario
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

    first = await machine.boot()
    await first.start(trip, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(first)
    world["schema"] = 2
    second = await machine.boot()
    await second.start(trip, id="r")
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
def test_what_arrives_while_the_failure_is_on_its_way_to_the_disk_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The code is told of an expensive failure when that is durable. What arrives stands before what follows."""
    monkeypatch.setattr(failures, "EXPENSIVE_SECONDS", -1.0)
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

    async def main() -> None:
        store = MemoryStore()
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

    asyncio.run(main())


@scenario
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


# -- afterwards --------------------------------------------------------------------------------------------------------
@scenario
async def test_begun_compensation_rules_out_a_retry(machine: Machine) -> None:
    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await fail()

    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(trip, id="r")
    before = machine.dump()["events"]
    with pytest.raises(CompensationBegun, match="cannot be retried"):
        await app.retry("r")
    with pytest.raises(CompensationBegun):
        await app.start(trip, id="r", on_existing="retry")
    assert machine.dump()["events"] == before
    with pytest.raises(ValueError):
        await (await app.start(trip, id="r", on_existing="restart")).result()
    assert machine.row("r").generation == 2
    assert NOTES == ["room in Oslo", "cancel r-Oslo in Oslo"] * 2
    assert len(set(KEYS)) == 4, "a new generation has new keys"
    sound(machine)


@scenario
async def test_a_failed_run_without_anything_to_compensate_can_be_retried(machine: Machine) -> None:
    errors = [ValueError("first")]

    @step(effect="read")
    async def shaky() -> None:
        if errors:
            raise errors.pop()

    @workflow
    async def trip() -> str:
        await shaky()
        return await book_room("Oslo")

    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(trip, id="r")
    await app.retry("r")
    assert await app.get("r").result() == "r-Oslo"


# -- children ----------------------------------------------------------------------------------------------------------
@workflow
async def child_trip(fails: bool) -> str:
    room = await book_room("Oslo")
    if fails:
        await fail()
    return room


@scenario
async def test_a_child_compensates_itself_and_its_parent_does_not_compensate_it(machine: Machine) -> None:
    @workflow
    async def parent() -> None:
        await child_trip(False)
        await book_room("Rome")
        try:
            await child_trip(True)
        except ValueError as error:
            NOTES.append(error.__notes__[0])
        raise LookupError

    app = await machine.boot()
    with pytest.raises(LookupError):
        await app.run(parent, id="r")
    assert NOTES[:3] == ["room in Oslo", "room in Rome", "room in Oslo"]
    assert NOTES[3:] == ["cancel r-Oslo in Oslo", "Compensated: book_room.", "cancel r-Rome in Rome"]
    sound(machine)


@scenario
async def test_a_parent_whose_child_was_compensated_cannot_be_retried(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        return await child_trip(True)

    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(parent, id="r")
    (child,) = machine.store.children("r")
    with pytest.raises(CompensationBegun, match=child.id):
        await app.retry("r")
    assert machine.status("r") == "failed"


@scenario
async def test_children_that_end_with_the_run_are_asked_to_stop_before_it_is_undone(machine: Machine) -> None:
    gate = Gate()

    @workflow
    async def waits() -> None:
        await everstep.receive("never", str)

    async def undo(outcome: str) -> None:
        await gate.wait()

    @step(compensate=undo)
    async def do() -> str:
        return "x"

    @workflow
    async def parent() -> None:
        await everstep.start(waits, id="child")
        await do()
        await fail()

    app = await machine.boot()
    run = await app.start(parent, id="r")
    await gate.reached.wait()
    await machine.until_status("child", "cancelled")
    assert machine.status("r") == "running"
    gate.opened.set()
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    sound(machine)


# -- changed code ------------------------------------------------------------------------------------------------------
def version_of(argument: str = "Oslo", **options: Any) -> Any:
    """Return one version of a workflow; all have the same names."""

    @step(name="do", **options)
    async def do(city: str) -> str:
        note(f"do {city}")
        return f"r-{city}"

    @workflow(name="saga_versioned")
    async def versioned() -> None:
        await do(argument)
        await everstep.receive("go", str)
        raise ValueError("end")

    return versioned


def undo(outcome: str, city: str) -> None:
    note(f"undo {outcome} {city}")


def undo_better(outcome: str, city: str) -> None:
    note(f"undo better {outcome} {city}")


async def begun(machine: Machine, flow: Any) -> None:
    app = await machine.boot()
    await app.start(flow, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(app)


@scenario
async def test_a_compensation_that_was_added_later_is_used(machine: Machine) -> None:
    await begun(machine, version_of())
    version_of(compensate=undo)
    app = await machine.worker()
    await app.signal("r", "go", "!")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "undo r-Oslo Oslo"]


@scenario
async def test_a_compensation_that_was_replaced_is_used(machine: Machine) -> None:
    await begun(machine, version_of(compensate=undo))
    version_of(compensate=undo_better)
    app = await machine.worker()
    await app.signal("r", "go", "!")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "undo better r-Oslo Oslo"]


@scenario
async def test_a_compensation_that_was_removed_is_a_divergence_until_somebody_accepts_it(machine: Machine) -> None:
    await begun(machine, version_of(compensate=undo))
    version_of()
    app = await machine.worker()
    await machine.until_status("r", "waiting", "held")
    await app.signal("r", "go", "!")
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert "(compensation)" in machine.hold("r").summary
    assert "rollback" not in machine.hold("r").resolutions
    await app.resolve("r", "accept")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo"]


@scenario
async def test_after_other_arguments_were_accepted_the_recorded_ones_are_undone(machine: Machine) -> None:
    await begun(machine, version_of(compensate=undo))
    version_of(compensate=undo, argument="Rome")
    app = await machine.worker()
    await app.signal("r", "go", "!")
    await machine.until_status("r", "held")
    await app.resolve("r", "accept")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "undo r-Oslo Oslo"]


@scenario
async def test_other_arguments_of_a_once_step_in_doubt_are_not_accepted_and_it_keeps_its_key(machine: Machine) -> None:
    gate = Gate()
    asked: list[Any] = []

    def version(amount: int) -> Any:
        @step(name="pay", effect="once", probe=lambda key, amount: asked.append((key, amount)) or Done("paid"))
        async def pay(amount: int) -> str:
            note(f"pay {amount}")
            await gate.wait()
            return ""

        @workflow(name="saga_versioned")
        async def versioned() -> str:
            return await pay(amount)

        return versioned

    first = await machine.boot()
    await first.start(version(5), id="r")
    await gate.reached.wait()
    await machine.kill(first)
    version(6)
    app = await machine.worker()
    await machine.until_status("r", "held")
    assert "accept" not in machine.hold("r").resolutions
    version(5)
    await app.resolve("r", "retry")
    assert await app.get("r").result(timeout=60) == "paid"
    assert asked == [(KEYS[0][1], 5)]


@scenario
async def test_code_that_changed_in_the_middle_of_a_compensation_is_verified(machine: Machine) -> None:
    gate = Gate()

    async def slow_undo(outcome: str, city: str) -> None:
        note("slow undo")
        await gate.wait()

    first = await machine.boot()
    await first.start(version_of(compensate=slow_undo), id="r")
    await machine.until_status("r", "waiting")
    await first.signal("r", "go", "!")
    await gate.reached.wait()
    await machine.kill(first)

    renamed = step(slow_undo, name="another")
    version_of(compensate=renamed)
    app = await machine.worker()
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert NOTES == ["do Oslo", "slow undo"]

    version_of(compensate=slow_undo)
    gate.opened.set()
    await app.retry_diverged("r")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "slow undo", "slow undo"]
    sound(machine)


@scenario
async def test_what_is_undone_is_decided_when_that_begins(machine: Machine) -> None:
    """A compensation that is added to another step in the middle of undoing comes too late."""
    gate = Gate()

    async def slow_undo(outcome: str) -> None:
        note("slow undo")
        await gate.wait()

    def version(**options: Any) -> Any:
        @step(name="first", **options)
        async def first() -> str:
            return "1"

        @step(name="second", compensate=slow_undo)
        async def second() -> str:
            return "2"

        @workflow(name="saga_versioned")
        async def versioned() -> None:
            await first()
            await second()
            raise ValueError

        return versioned

    before = await machine.boot()
    await before.start(version(), id="r")
    await gate.reached.wait()
    await machine.kill(before)
    gate.opened.set()
    version(compensate=lambda outcome: note("too late"))
    app = await machine.worker()
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["slow undo", "slow undo"]
    sound(machine)


@scenario
async def test_code_that_no_longer_fails_does_not_match_a_begun_compensation(machine: Machine) -> None:
    gate = Gate()

    async def slow_undo(outcome: str) -> None:
        await gate.wait()

    def version(*, fails: bool) -> Any:
        @step(name="do", compensate=slow_undo)
        async def do() -> str:
            return "x"

        @workflow(name="saga_versioned")
        async def versioned() -> str:
            await do()
            if fails:
                raise ValueError
            return "fine"

        return versioned

    first = await machine.boot()
    await first.start(version(fails=True), id="r")
    await gate.reached.wait()
    await machine.kill(first)
    version(fails=False)
    await machine.worker()
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert "raise an error, and compensate" in machine.hold("r").summary


# -- while it is undone ------------------------------------------------------------------------------------------------
@scenario
async def test_a_signal_during_a_compensation_moves_nothing(machine: Machine) -> None:
    gate = Gate()

    async def undo_slowly(outcome: str) -> None:
        await gate.wait()

    @step(compensate=undo_slowly)
    async def do() -> str:
        return "x"

    @workflow
    async def trip() -> None:
        async def listen() -> None:
            await plain(await everstep.receive("word", str))

        listening = asyncio.create_task(listen())
        await do()
        await fail()
        await listening

    app = await machine.boot()
    run = await app.start(trip, id="r")
    await gate.reached.wait()
    await run.signal("word", "hello")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    await machine.kill(app)
    gate.opened.set()
    second = await machine.worker()
    with pytest.raises(ValueError):
        await second.get("r").result(timeout=60)
    assert NOTES == []
    sound(machine)


@scenario
async def test_a_held_compensation_that_was_asked_for_goes_on(machine: Machine) -> None:
    gate = Gate()
    app = await machine.boot()
    run = await app.start(slow_compensation(gate), id="r")
    await gate.reached.wait()
    await app.hold("r", "let me look")
    hold = await held(machine, run, "asked")
    assert hold.resolutions == ["retry", "cancel"]
    gate.opened.set()
    await app.resolve("r", "retry")
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == ["room in Oslo", "undo Rome", "undo Rome", "cancel r-Oslo in Oslo"]
    sound(machine)


@scenario
async def test_a_compensation_that_nobody_drives_is_held_without_the_offer_to_roll_back(machine: Machine) -> None:
    gate = Gate()
    first = await machine.boot()
    await first.start(slow_compensation(gate), id="r")
    await gate.reached.wait()
    await machine.kill(first)
    app = await machine.boot()
    await app.hold("r")
    assert machine.hold("r").resolutions == ["retry", "cancel"]
    with pytest.raises(HoldConflict):
        await app.rollback("r")


@scenario
async def test_what_the_code_asked_for_after_its_time_was_over_was_never_asked_for(machine: Machine) -> None:
    """A signal arrives when the grace is over and a payment is waited for: the code does not act any more."""
    gate = Gate()

    @step(effect="once", compensate=lambda receipt: note(f"refund {receipt}"))
    async def pay() -> str:
        await gate.wait()
        return "receipt"

    @workflow(timeout=10)
    async def stubborn() -> None:
        paying = asyncio.create_task(pay())
        while True:
            try:
                await plain(await everstep.receive("word", str))
            except asyncio.CancelledError:
                pass
        await paying

    app = await machine.boot()
    run = await app.start(stubborn, id="r")
    await gate.reached.wait()
    machine.clock.advance(10)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    machine.clock.advance(31)
    await machine.until(lambda: app.drivers["r"].end_wanted)
    await run.signal("word", "hello")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    gate.opened.set()
    with pytest.raises(RunTimedOut):
        await run.result(timeout=60)
    assert NOTES == ["refund receipt"]
    assert machine.replay("r").differences == []
    sound(machine)
