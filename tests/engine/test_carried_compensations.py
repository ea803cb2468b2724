"""Compensations over `continue_as`: a later generation that fails undoes what all of them did, the last first, once."""

from typing import Any

import pytest

import everstep
from everstep import Live, step, workflow
from everstep.effects import saga as declared
from everstep.engine.history.verify import verify_now
from everstep.errors import CompensationBegun, Misuse, RunCancelled
from everstep.model.carried import undoing_entropy
from everstep.model.digests import step_key
from everstep.model.events import decode_body
from everstep.stores.rows.keys import EffectFilter
from everstep.view.timeline import timeline_of
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import sound
from tests.worlds.ledger import GATES, NOTES, pass_gate


@step
async def unbook(booking: str, room: int) -> None:
    NOTES.append(f"unbook {booking} {everstep.key()}")
    await pass_gate(f"unbook {room}")


@step(compensate=unbook)
async def book(room: int) -> str:
    NOTES.append(f"book {room}")
    return f"room {room}"


@step(effect="once", key="bell:{text}", compensate=lambda outcome, text: NOTES.append(f"unring {outcome}"))
async def ring(text: str) -> str:
    NOTES.append(f"ring {text}")
    return text


@step(effect="once", secret=True, compensate=lambda outcome, word: NOTES.append("forget"))
async def whisper(word: str) -> str:
    return f"{word}!"


@workflow(name="touring")
async def touring(room: int, last: int, fails: bool) -> str:
    await book(room)
    await book(room + 10)
    if room < last:
        everstep.continue_as(room + 1, last, fails)
    if fails:
        raise LookupError("full")
    return "home"


def undone() -> list[str]:
    return [" ".join(note.split()[1:3]) for note in NOTES if note.startswith("unbook")]


ALL = ["room 13", "room 3", "room 12", "room 2", "room 11", "room 1"]


async def test_a_later_generation_that_fails_undoes_what_all_of_them_did_the_last_first(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(LookupError) as failed:
        await (await app.start(touring, 1, 3, True, id="r")).result(timeout=60)
    assert undone() == ALL
    assert len({note.split()[-1] for note in NOTES if note.startswith("unbook")}) == 6, "each has a key of its own"
    said = "book#2, book, book#2 of generation 2, book of generation 2, book#2 of generation 1, book of generation 1"
    assert failed.value.__notes__ == [f"Compensated: {said}."]
    assert machine.bodies("r", "compensation_started")[0].steps == [2, 1, -1, -2, -3, -4]
    sound(machine)
    shown = [(row.name, row.undone) for row in timeline_of(machine.store, "r", 3).compensations()]
    assert shown[0] == ("book of generation 1", "compensated")
    assert len(shown) == 6


async def test_a_rollback_undoes_older_generations_too_and_only_once(machine: Machine) -> None:
    app, run = await machine.start(touring, 1, 3, False, id="r")
    assert await run.result(timeout=60) == "home"
    await app.rollback("r")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert undone() == ALL
    with pytest.raises(CompensationBegun):
        await app.rollback("r")
    sound(machine)


async def test_a_process_that_dies_while_it_undoes_an_older_generation_leaves_the_rest_to_the_next(
    machine: Machine,
) -> None:
    gate = GATES["unbook 2"] = Gate()
    app, _ = await machine.start(touring, 1, 3, True, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    before = list(NOTES)
    GATES.clear()
    worker = await machine.worker()
    with pytest.raises(LookupError):
        await worker.get("r").result(timeout=60)
    begun, again = before[-1], NOTES[len(before)]
    assert begun == again, "the same compensation, with the same key"
    assert undone() == [*ALL[:4], *ALL[3:]]
    sound(machine)


async def test_the_keys_of_compensations_do_not_depend_on_the_generation_that_undoes(machine: Machine) -> None:
    app = await machine.boot()
    for id, last in (("r", 2), ("s", 3)):
        with pytest.raises(LookupError):
            await (await app.start(touring, 1, last, True, id=id)).result(timeout=60)
    two, three = (machine.row(id).generation for id in "rs")
    carried = [decode_body("run_started", machine.events("s", one)[0].body).carried.undoable for one in (2, three)]
    assert two == 2
    for id, generation in (("r", two), ("s", three)):
        events = machine.events(id, generation)
        given = decode_body("run_started", events[0].body).carried
        begun = [(one.step, decode_body(one.kind, one.body)) for one in events if one.kind == "step_started"]
        undoing = [(step, body) for step, body in begun if body.compensates < 0]
        keys = [step_key(undoing_entropy(given, "", body.compensates), step, body.arguments) for step, body in undoing]
        assert keys
        assert set(keys) < {note.split()[-1] for note in NOTES}
    assert [one.entropy for one in carried[0]] == [one.entropy for one in carried[1][:2]]


async def test_a_key_of_its_own_is_freed_when_a_later_generation_undoes_its_step(machine: Machine) -> None:
    @workflow(name="ringing")
    async def ringing(left: int) -> None:
        if left:
            await ring("a")
            everstep.continue_as(left - 1)
        raise LookupError("no car")

    app = await machine.boot()
    with pytest.raises(LookupError):
        await (await app.start(ringing, 1, id="r")).result(timeout=60)
    assert NOTES == ["ring a", "unring a"]
    (row,) = machine.store.effects(EffectFilter())
    assert (row.key, row.state, row.generation, row.round) == ("bell:a", "free", 1, 1)
    sound(machine)


async def test_what_is_large_or_secret_is_carried_over_whole_and_not_shown(machine: Machine) -> None:
    @workflow(name="whispering")
    async def whispering(word: str, left: int) -> None:
        if left:
            await whisper(word)
            everstep.continue_as(word[:1], left - 1)
        raise LookupError("no car")

    _, run = await machine.start(whispering, "psst" * 5000, 1, id="r")
    with pytest.raises(LookupError):
        await run.result(timeout=60)
    assert NOTES == ["forget"]
    first = (await run.history())[0].body["carried"]["undoable"][0]
    assert (first["step"], first["whole_ref"], first["ref"]) == ("whisper", "(secret)", "(secret)")
    verify_now(machine.store, "r")
    sound(machine)


async def test_a_person_is_asked_about_a_compensation_of_an_older_generation(machine: Machine) -> None:
    @step(effect="once", name="unsend")
    async def unsend(outcome: int, number: int) -> None:
        raise ConnectionError("who knows")

    @step(effect="once", name="send", key="sent:{number}", compensate=unsend)
    async def send(number: int) -> int:
        return number

    @workflow(name="sending")
    async def sending(left: int) -> None:
        if left:
            await send(7)
            everstep.continue_as(left - 1)
        raise LookupError("no car")

    app, run = await machine.start(sending, 1, id="r")
    await machine.until(lambda: machine.status("r") == "held")
    assert "send of generation 1" in machine.hold("r").summary
    await app.resolve("r", "done", value=None)
    with pytest.raises(LookupError, match="no car"):
        await run.result(timeout=60)
    assert [row.state for row in machine.store.effects(EffectFilter())] == ["free"]
    sound(machine)


async def test_code_that_no_longer_declares_the_step_holds_the_run_and_the_right_code_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(declared, "_DECLARED", {"book": declared._DECLARED["book"]})
        app, run = await machine.start(touring, 1, 2, False, id="r")
        assert await run.result(timeout=60) == "home"
        declared._DECLARED.clear()
        await app.rollback("r")
        await machine.until(lambda: machine.status("r") == "held")
        assert "book#2 of generation 1 is to be compensated" in machine.hold("r").summary
    assert undone() == ALL[2:4]
    await app.resolve("r", "retry")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert undone() == ALL[2:]


async def _made_inside(left: int) -> None:
    await step(_nothing, name="made", compensate=_undo_nothing)(1)
    everstep.continue_as(left)


async def _nothing(number: int) -> None: ...


async def _undo_nothing(outcome: None, number: int) -> None: ...


class Shop:
    @step(compensate=lambda outcome, number: None)
    async def sell(self, number: int) -> None: ...


async def _bound(left: int) -> None:
    await Shop().sell(1)
    everstep.continue_as(left)


async def close_shop(outcome: None, shop: Live[Shop]) -> None: ...


@step(compensate=close_shop)
async def open_shop(shop: Live[Shop]) -> None: ...


async def _live(left: int) -> None:
    await open_shop(Shop())
    everstep.continue_as(left)


@pytest.mark.parametrize(
    ("function", "says"), [(_made_inside, "made by the code"), (_bound, "bound to an object"), (_live, "not stored")]
)
async def test_a_step_that_a_later_generation_could_not_undo_is_refused(
    machine: Machine, function: Any, says: str
) -> None:
    _, run = await machine.start(workflow(name=f"wrong{function.__name__}")(function), 1, id="r")
    with pytest.raises(Misuse, match=says):
        await run.result(timeout=60)
    assert machine.row("r").generation == 1


async def test_checkpoints_of_a_later_generation_are_used_and_older_ones_are_undone(machine: Machine) -> None:
    @workflow(name="looping_on")
    async def looping_on(left: int) -> None:
        if left:
            await book(left)
            everstep.continue_as(left - 1)
        count = 0
        while count < 3:
            count = await everstep.checkpoint(count, every=1)
            NOTES.append(f"turn {count}")
            count += 1
            await everstep.receive("go", int)
        raise LookupError("full")

    app, run = await machine.start(looping_on, 1, id="r")
    await run.signal("go", 1)
    await machine.until(lambda: "turn 1" in NOTES and machine.status("r") == "waiting")
    await machine.kill(app)
    NOTES.clear()
    app = await machine.worker()
    for _ in range(2):
        await app.signal("r", "go", 1)
    with pytest.raises(LookupError):
        await app.get("r").result(timeout=60)
    assert "turn 0" not in NOTES, "it went on from the checkpoint"
    assert undone() == ["room 1"]
