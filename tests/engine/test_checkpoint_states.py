"""What a checkpoint contains: states whose classes change, facts, and all that a run remembers."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import everstep
from everstep import step, witness, workflow
from everstep.engine.code import checkpoints
from everstep.engine.code.execution import Execution
from everstep.engine.code.replay import Replayed
from everstep.errors import Misuse, StepError
from tests.engine.resume_helpers import Gate, Machine, declared
from tests.worlds.judging import killed_at, sound
from tests.worlds.ledger import GATES, NOTES
from tests.worlds.sums import add, summing, taken


# -- the state's class changes ----------------------------------------------------------------------------------------
def with_state(**fields: Any) -> Any:
    """Declare the same loop with another class for its state."""
    namespace = {"__annotations__": {name: type(value) for name, value in fields.items()}}
    required = {name for name, value in fields.items() if value == "required"}
    namespace["__annotations__"] |= dict.fromkeys(required, str)
    Shape = dataclass(type("Shape", (), namespace | {n: v for n, v in fields.items() if n not in required}))

    @workflow(name="checkpoint-shaped")
    async def shaped() -> int:
        state: Any = await everstep.checkpoint(Shape(**dict.fromkeys(required, "given")))
        while state.turn < 6:
            await add(state.turn)
            state.turn += 1
            state = await everstep.checkpoint(state)
        return int(state.turn)

    return shaped


async def test_a_state_that_no_longer_decodes_holds_the_run_and_the_right_code_goes_on(machine: Machine) -> None:
    await killed_at(machine, "add 3", with_state(turn=0))
    with_state(must="required", turn=0)
    app = await machine.worker()
    await machine.until_status("r", "held")
    hold = machine.hold("r")
    assert hold.reason == "diverged"
    assert "accept" not in hold.resolutions
    assert "checkpoint 4" in hold.summary
    (difference,) = machine.report("r")["differences"]
    assert difference["what"] == "state"
    assert "value.must" in difference["now"]
    assert "no default" in difference["now"]
    assert NOTES == []
    await machine.stop(app)
    with_state(turn=0)
    app = await machine.worker()
    await machine.until_status("r", "completed")
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 3", "add 4", "add 5"]


async def test_a_state_of_another_kind_is_not_taken_for_the_new_one(machine: Machine) -> None:
    @workflow(name="checkpoint-shaped")
    async def plain() -> int:
        state = await everstep.checkpoint({"turn": 0})
        while state["turn"] < 6:
            await add(state["turn"])
            state = await everstep.checkpoint({"turn": state["turn"] + 1})
        return state["turn"]

    await killed_at(machine, "add 3", plain)
    with_state(turn=0)
    await machine.worker()
    await machine.until_status("r", "held")
    assert "is a dict" in machine.report("r")["differences"][0]["now"]


async def test_a_compatible_change_of_the_state_goes_on(machine: Machine) -> None:
    await killed_at(machine, "add 3", with_state(turn=0, gone=1))
    with_state(turn=0, new="default")
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 3", "add 4", "add 5"]


async def test_code_without_its_checkpoints_is_held_as_diverged(machine: Machine) -> None:
    await killed_at(machine, "add 3", with_state(turn=0))

    @workflow(name="checkpoint-shaped")
    async def shaped() -> int:
        for turn in range(6):
            await add(turn)
        return 6

    await machine.worker()
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert machine.report("r")["differences"][0]["recorded"] == "checkpoint 1"


async def test_code_that_got_its_checkpoints_under_way_goes_on_and_uses_them_from_then_on(machine: Machine) -> None:
    @workflow(name="checkpoint-shaped")
    async def shaped() -> int:
        for turn in range(6):
            await add(turn)
        return 6

    await killed_at(machine, "add 3", shaped)
    GATES["add 5"] = Gate()
    with_state(turn=0)
    app = await machine.worker()
    await GATES["add 5"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    first = taken(machine)[0]
    assert machine.bodies("r", "checkpoint_taken")[0].number == 5, "those before were passed in the replay"
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 5"]
    assert first > 8
    sound(machine)


def before_the_loop(prompt: str, published: str) -> Any:
    """Declare a loop with something before it."""

    @workflow(name="checkpoint-prefaced")
    async def prefaced() -> int:
        await ask(prompt)
        everstep.publish(published, 1)
        state = 0
        while state < 6:
            state = await everstep.checkpoint(state)
            state += 1 + 0 * await add(state)
        return state

    return prefaced


@step(effect="read")
async def ask(prompt: str) -> str:
    return prompt


async def test_what_the_code_asks_for_before_its_first_checkpoint_is_compared_as_ever(machine: Machine) -> None:
    await killed_at(machine, "add 3", before_the_loop("why", "name"))
    before_the_loop("why", "another")
    await machine.worker()
    await machine.until_status("r", "held")
    (difference,) = machine.report("r")["differences"]
    assert (difference["what"], difference["recorded"]) == ("name", "publish 'name'")
    assert NOTES == []


async def test_what_a_person_accepted_before_a_checkpoint_stays_accepted(machine: Machine) -> None:
    await killed_at(machine, "add 3", before_the_loop("why", "name"))
    before_the_loop("why not", "name")
    app = await machine.worker()
    await machine.until_status("r", "held")
    GATES["add 5"] = Gate()
    await app.resolve("r", "accept")
    await GATES["add 5"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 5"], "from a checkpoint that was taken after the answer"


# -- facts about the outside ------------------------------------------------------------------------------------------
async def test_facts_taken_in_the_loop_are_compared_before_a_run_goes_on_from_a_checkpoint(machine: Machine) -> None:
    path = machine.folder / "fact.txt"
    path.write_text("as it was")

    @workflow(name="checkpoint-watching")
    async def watching() -> int:
        state = await everstep.checkpoint(0)
        while state < 4:
            await everstep.expect(witness.file(path))
            await add(state)
            state = await everstep.checkpoint(state + 1)
        await everstep.receive("go")
        return state

    app, _ = await machine.start(watching, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    path.write_text("as it is now")
    app = await machine.worker()
    await app.signal("r", "go")
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "drift"
    path.write_text("as it was")
    await app.resolve("r", "retry")
    assert await app.get("r").result(timeout=60) == 4
    assert machine.kinds("r").count("witness_taken") == 4


@pytest.mark.parametrize("where", ["before the first", "in the loop"])
async def test_a_fact_that_only_the_code_can_observe_belongs_before_the_first_checkpoint(
    machine: Machine, where: str
) -> None:
    @workflow(name="checkpoint-observing")
    async def observing() -> int:
        fact = witness.value("tide", lambda: "high")
        if where == "before the first":
            await everstep.expect(fact)
        state = await everstep.checkpoint(0)
        if where == "in the loop":
            await everstep.expect(fact)
        while state < 4:
            await add(state)
            state = await everstep.checkpoint(state + 1)
        await everstep.receive("go")
        return state

    app, run = await machine.start(observing, id="r")
    if where == "in the loop":
        with pytest.raises(Misuse, match="`expect` it before the first checkpoint, or `release` it"):
            await run.result(timeout=60)
        return
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    app = await machine.worker()
    await app.signal("r", "go")
    assert await app.get("r").result(timeout=60) == 4


async def test_a_run_with_facts_whose_step_is_due_again_later_goes_on(machine: Machine) -> None:
    """A run that remembers facts leaves memory whenever it rests, and comes back for what is due."""

    @workflow(name="checkpoint-facts-and-time")
    async def facts_and_time() -> str:
        await everstep.expect(witness.file(machine.folder / "none"))
        await asyncio.sleep(5)
        await slow_to_succeed()
        return "done"

    @step(retry=everstep.Retry(attempts=3, first=10, jitter=0.0))
    async def slow_to_succeed() -> None:
        if everstep.current().attempt < 3:
            raise RuntimeError

    app, run = await machine.start(facts_and_time, id="r")
    await machine.rest(app)
    for _ in range(12):
        await machine.advance(5)
    assert await run.result(timeout=60) == "done"


# -- nothing is forgotten ---------------------------------------------------------------------------------------------
KEPT = {
    "_calls": "calls",
    "_visits": "visits",
    "_random": "random",
    "entropy": "entropy",
    "branch": "branch",
    "patches": "patches",
    "witnesses": "facts",
    "kept": "kept",
    "_receiving": "signals",
    "loop": "now",
    "checkpoints": "number",
    "caution": "caution",
    "unseen_workers": "unseen_workers",
    "_saga": "is_undoable",
    "books": "books",
}
"""What an execution remembers, and the field of the engine's part that it is kept in."""


NOT_KEPT = {
    "place": "it is every execution's",
    "workflow": "it is the code's",
    "run": "it is the run's",
    "generation": "it is the run's",
    "codec": "it is the app's",
    "lookup": "it is the store's",
    "steps": "none is open",
    "begun": "none is open",
    "children": "none is open",
    "copied_children": "it is about the replay",
    "followed": "it is about the replay",
    "new_patches": "they are recorded before",
    "failures": "errors that the code still holds come from before the first checkpoint",
    "replaying": "it is about the replay",
    "unapplied": "there are none",
    "conversions": "it is about the replay",
    "rejected": "it is about the replay",
    "unwinding": "it is about leaving memory",
    "wants_places": "it is about the replay",
    "ended": "the code goes on",
    "cancel": "a run that is being cancelled takes none",
    "rollback": "a run that is being undone takes none",
    "main": "it is the code itself",
    "refusal": "a run to which the machine refused something is taken up again",
    "_issued": "what was asked for before is recorded before",
    "_cancel_came_too_late": "a run that is being cancelled takes none",
}
"""What need not be kept, and why."""


KEPT_OF_A_REPLAY = {"published", "accepted", "first_checkpoint", "retried"}


NOT_KEPT_OF_A_REPLAY = {"execution", "differences", "fresh", "attempts", "cancel_at", "spins"}


async def test_all_that_a_run_remembers_is_kept_in_a_checkpoint_or_has_a_reason_not_to_be(machine: Machine) -> None:
    """Whoever gives an execution something new to remember decides here whether a resume from a checkpoint needs it."""
    execution = Execution(
        declared(summing),
        run="r",
        generation=1,
        codec=machine.store,
        lookup=bytes.fromhex,  # type: ignore[arg-type]
    )
    # Annotations: what few runs have stands at the class, and is an execution's own once it is set.
    assert set(vars(execution)) | set(Execution.__annotations__) == set(KEPT) | set(NOT_KEPT)
    assert set(KEPT.values()) <= set(checkpoints.EnginePart.__struct_fields__)
    assert set(Replayed.__struct_fields__) == KEPT_OF_A_REPLAY | NOT_KEPT_OF_A_REPLAY


async def test_an_error_that_is_raised_again_after_a_checkpoint_is_still_a_steps(machine: Machine) -> None:
    @workflow(name="checkpoint-raising")
    async def raising() -> None:
        error: BaseException | None = None
        try:
            await failing()
        except StepError as caught:
            error = caught
        state = await everstep.checkpoint(0)
        while state < 4:
            await add(state)
            state = await everstep.checkpoint(state + 1)
        assert error is not None
        raise error

    @step
    async def failing() -> None:
        raise type("Unknown", (Exception,), {})("odd")

    GATES["add 3"] = Gate()
    await killed_at(machine, "add 3", raising)
    app = await machine.worker()
    with pytest.raises(StepError):
        await app.get("r").result(timeout=60)
    (failed,) = machine.bodies("r", "run_failed")
    assert failed.call == 1
