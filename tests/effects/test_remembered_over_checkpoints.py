"""What a run remembers of the outside, and of effects that a retry went back over, is in its checkpoints too."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import files, step, transaction, witness, workflow
from everstep.errors import CrossesOnce, Misuse
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw
from tests.worlds.judging import failed
from tests.worlds.ledger import ASKED, BROKEN, PAID


@pytest.fixture(autouse=True)
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("a.txt").write_text("old")


@dataclass
class Turns:
    left: int
    done: list[str] = field(default_factory=list)


@step
async def act(what: str) -> str:
    if what in BROKEN:
        raise ValueError(what)
    return what


@step(effect="once")
async def pay(what: str) -> str:
    PAID.append(what)
    return f"{what} {len(PAID)}"


def decide(remembered: Any, now: Any) -> str:
    ASKED.append((remembered["text"], now["text"]))
    return "ignore" if now["text"] == "ignored" else "accept"


@workflow
async def remembering_loop() -> list[str]:
    await everstep.expect(witness.file("a.txt"), on_drift=decide)
    await everstep.expect(witness.directory("d"))
    state = Turns(3)
    while state.left:
        state = await everstep.checkpoint(state)
        await files.write(f"d/{state.left}.txt", "mine", witness=False)
        state.done.append(await act(f"turn {state.left}"))
        state.done.append(await everstep.receive("word", str))
        state.left -= 1
    return state.done


async def turn(machine: Machine, app: Any, word: str) -> None:
    """Let the run take one word, and its process vanish when it waits for the next."""
    before = len(machine.bodies("r", "signal_received"))
    await app.get("r").signal("word", word)
    await machine.until(lambda: len(machine.bodies("r", "signal_received")) > before)
    await machine.rest()
    await machine.kill(app)


async def test_own_changes_and_what_a_function_ignored_survive_a_jump(machine: Machine) -> None:
    app, _ = await machine.start(remembering_loop, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    await machine.kill(app)
    Path("a.txt").write_text("ignored")
    await turn(machine, await machine.worker(), "a")
    await turn(machine, await machine.worker(), "b")
    assert len(machine.bodies("r", "checkpoint_taken")) == 3
    assert ASKED == [("old", "ignored")], "what it said is in the checkpoint, and so are the files that the run wrote"
    Path("a.txt").write_text("newer")
    app = await machine.worker()
    await app.get("r").signal("word", "c")
    assert await app.get("r").result(timeout=60) == ["turn 3", "a", "turn 2", "b", "turn 1", "c"]
    assert ASKED == [("old", "ignored"), ("old", "newer")], "its function is known again after the jump"
    assert machine.kinds("r", "run_held") == []
    assert list(check(export_histories(machine.store))) == []


async def test_a_stranger_s_change_in_the_folder_is_found_after_a_jump(machine: Machine) -> None:
    app, _ = await machine.start(remembering_loop, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    await turn(machine, app, "a")
    Path("d/3.txt").write_text("theirs")
    app = await machine.worker()
    await app.get("r").signal("word", "b")
    await machine.until_status("r", "held")
    assert [one["subject"] for one in machine.report("r")["drift"]] == ["directory:d:**/*"]


async def test_a_function_that_a_jump_could_not_find_again_is_refused_at_once(machine: Machine) -> None:
    @workflow
    async def late() -> None:
        state = 0
        while True:
            state = await everstep.checkpoint(state) + 1
            await everstep.expect(witness.file("a.txt"), on_drift=decide)

    app = await machine.boot()
    with pytest.raises(Misuse, match=r"file:a\.txt.*or not judge"):
        await app.run(late, id="r")


@workflow
async def crossing_loop() -> list[str]:
    state = Turns(3)
    try:
        state.done.append(await act("first"))
    except ValueError:
        await pay("same")
        raise
    while state.left:
        state = await everstep.checkpoint(state)
        state.done.append(await everstep.receive("word", str))
        if state.left == 1:
            state.done += [await pay("same"), await pay("same")]
        state.left -= 1
    return state.done


async def test_an_outcome_that_was_kept_survives_a_jump_and_is_given_once(machine: Machine) -> None:
    app = await failed(machine, crossing_loop, "first")
    BROKEN.clear()
    with pytest.raises(CrossesOnce):
        await app.retry("r")
    await app.retry("r", across_once=True)
    await machine.until_status("r", "waiting")
    await machine.rest()
    await turn(machine, app, "a")
    await turn(machine, await machine.worker(), "b")
    app = await machine.worker()
    await app.get("r").signal("word", "c")
    assert await app.get("r").result(timeout=60) == ["first", "a", "b", "c", "same 1", "same 2"]
    assert PAID == ["same", "same"]
    assert list(check(export_histories(machine.store))) == []


# -- other contracts ---------------------------------------------------------------------------------------------------
@transaction(everstep.STORE)
def book(connection: Any, what: str) -> str:
    connection.execute("CREATE TABLE IF NOT EXISTS bookings (what)")
    connection.execute("INSERT INTO bookings VALUES (?)", (what,))
    return what


def bookings(machine: Machine) -> list[Any]:
    connection = open_raw(machine.path)
    try:
        return [what for (what,) in connection.execute("SELECT what FROM bookings")]
    finally:
        connection.close()


@workflow
async def booking() -> str:
    try:
        return await act("first")
    except ValueError:
        await asyncio.to_thread(book, "refund")
        raise


async def test_an_atomic_step_after_the_failure_is_neither_forgotten_nor_repeated(machine: Machine) -> None:
    app = await failed(machine, booking, "first")
    with pytest.raises(CrossesOnce, match="book"):
        await app.retry("r")
    await app.retry("r", across_once=True)
    with pytest.raises(ValueError, match="first"):
        await app.get("r").result(timeout=60)
    assert bookings(machine) == ["refund"]
    BROKEN.clear()
    assert await app.run(booking, id="r", on_existing="retry") == "first"


@step(effect="once", key="refund:{what}")
async def pay_keyed(what: str) -> str:
    PAID.append(what)
    return what


@workflow
async def keyed() -> str:
    try:
        return await act("first")
    except ValueError:
        await pay_keyed("x")
        raise


async def test_a_step_with_a_key_of_its_own_is_guarded_by_that(machine: Machine) -> None:
    app = await failed(machine, keyed, "first")
    with pytest.raises(ValueError, match="first"):
        await app.run(keyed, id="r", on_existing="retry")
    assert PAID == ["x"], "the key has its outcome, and shares it with the branch that comes there again"
    assert list(check(export_histories(machine.store))) == []


async def test_a_retry_over_an_earlier_retry_keeps_each_effect_once(machine: Machine) -> None:
    """The code keeps the first failure and raises it again later, so the second retry goes back over the first."""

    @workflow
    async def twice() -> list[str]:
        kept: list[BaseException] = []
        try:
            await act("first")
        except ValueError as failure:
            kept.append(failure)
            await pay("one")
        done = [await pay("two")]
        if kept:
            raise kept[0]
        return [*done, await pay("one"), await pay("one")]

    app = await failed(machine, twice, "first")
    await app.retry("r", across_once=True)
    with pytest.raises(ValueError, match="first"):
        await app.get("r").result(timeout=60)
    assert PAID == ["one", "two"]
    BROKEN.clear()
    await app.retry("r", across_once=True)
    assert await app.get("r").result(timeout=60) == ["two 2", "one 1", "one 3"]
    assert PAID == ["one", "two", "one"]
    assert not machine.replay("r").differences
    assert list(check(export_histories(machine.store))) == []
