"""Sagas: what a failed run did is undone, in reverse, durably; and what is not undone, and why."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from everstep import Done, Live, Retry, step, workflow
from everstep.errors import Misuse, RunHeld
from tests.engine.lives import Life, prove_life
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import sound
from tests.worlds.ledger import KEYS, NOTES
from tests.worlds.trip import book_room, cancel_room, fail, note, plain


@dataclass
class Seat:
    row: int
    letter: str


@step
async def give_back(seat: Seat, flight: str, *, child: bool = False) -> str:
    note(f"give back {seat.row}{seat.letter} on {flight}{' for a child' if child else ''}")
    return "given back"


@step(compensate=give_back)
async def book_seat(flight: str, *, child: bool = False) -> Seat:
    note(f"seat on {flight}")
    return Seat(7, "a")


# -- failing ----------------------------------------------------------------------------------------------------------
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
        ({"compensate": step(cancel_room, effect="read")}, "cannot undo it, because"),
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


# -- what did not happen is not undone --------------------------------------------------------------------------------
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


async def test_a_step_that_a_person_skipped_is_not_compensated(machine: Machine) -> None:
    @step(compensate=cancel_room, retry=Retry(attempts=1, then="hold"))
    async def full(city: str) -> str:
        raise ConnectionError(city)

    @workflow
    async def trip() -> None:
        await full("Rome")
        raise ValueError

    app, run = await machine.start(trip, id="r")
    with pytest.raises(RunHeld):
        await run.result()
    await app.resolve("r", "skip", value="by hand")
    with pytest.raises(ValueError):
        await run.result()
    assert NOTES == []


# -- what is under way is settled first -------------------------------------------------------------------------------
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

    _, run = await machine.start(trip, id="r")
    await machine.until(lambda: "step_failed" in machine.kinds("r"))
    await machine.until(lambda: gate.reached.is_set())
    await asyncio.sleep(0.01)
    assert "compensation_started" not in machine.kinds("r")
    gate.opened.set()
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == ["room in Oslo", "return ticket 7", "cancel r-Oslo in Oslo"]
    sound(machine)


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

    _, run = await machine.start(trip, id="r")
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

    first, _ = await machine.start(trip, id="r")
    await machine.until(lambda: "step_failed" in machine.kinds("r"))
    await machine.kill(first)
    gate.opened.set()
    app = await machine.worker()
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["slow room in Oslo", "slow room in Oslo", "cancel s-Oslo in Oslo"]
    sound(machine)


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

    _, run = await machine.start(trip, id="r")
    await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
    await machine.rest()
    await machine.advance(5)
    await machine.advance(60)
    assert await run.result(timeout=60) == "gave up"
    assert NOTES == ["try Oslo"]
