"""What a run does after a restore, rule by rule: what it asks about, what it does not, and when it stops asking."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Done, NotDone, Retry, Unknown, step, workflow
from everstep.engine.history.restored import mark_restored
from everstep.errors import Misuse, RunHeld
from tests.damage.shop import counts
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import ANSWERS, APPLIED, ASKED, FAILS


async def ask(key: str, *args: Any) -> Any:
    ASKED.append(key)
    return ANSWERS.pop(0) if ANSWERS else NotDone()


@step(effect="once", probe=ask, retry=Retry(attempts=3, first=10.0, jitter=0.0))
async def trade(number: int) -> str:
    APPLIED.append(("trade", everstep.key()))
    if FAILS:
        raise FAILS.pop()
    return f"traded {number}"


@step(effect="once")
async def post(number: int) -> str:
    APPLIED.append(("post", everstep.key()))
    return f"posted {number}"


@workflow
async def trading(count: int) -> list[str]:
    done = [await trade(number) for number in range(count)]
    done.append(await everstep.receive("go", str))
    return [*done, await trade(count)]


@workflow
async def posting_three() -> list[str]:
    await everstep.receive("go", str)
    return await asyncio.gather(*(post(number) for number in range(3)))


@workflow
async def posting_child() -> str:
    return await post(1)


@workflow
async def posting_parent() -> str:
    await everstep.receive("go", str)
    return await posting_child()


async def left(machine: Machine, flow: Any, *args: Any) -> None:
    """Leave a run behind that waits for the signal `go`, in a store that is then restored."""
    app, _ = await machine.start(flow, *args, id="r")
    await machine.rest(app)
    await machine.stop(app)
    mark_restored(machine.store)


async def test_what_was_done_before_the_backup_is_known_and_what_comes_is_asked_about(machine: Machine) -> None:
    await left(machine, trading, 2)
    ANSWERS.append(Done("traded long ago"))
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    assert await worker.get("r").result(timeout=60) == ["traded 0", "traded 1", "x", "traded long ago"]
    assert counts() == {"trade": 2}
    assert len(ASKED) == 1
    (completed,) = [body for body in machine.bodies("r", "step_completed") if body.adopted]
    assert completed.attempt == 1
    assert [body.because for body in machine.bodies("r", "step_doubted")] == ["restored"]


async def test_a_probe_that_says_not_done_lets_the_step_run_with_the_same_key(machine: Machine) -> None:
    await left(machine, trading, 0)
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    assert await worker.get("r").result(timeout=60) == ["x", "traded 0"]
    assert [key for _, key in APPLIED] == ASKED


async def test_a_step_that_waited_for_its_next_attempt_is_asked_about_first(machine: Machine) -> None:
    """In the time that is lost, the next attempt may have been made."""
    FAILS.append(NotDone("refused"))
    app, _ = await machine.start(trading, 1, id="r")
    await machine.rest(app)
    assert machine.kinds("r")[-1] == "attempt_failed"
    await machine.stop(app)
    mark_restored(machine.store)
    ANSWERS.append(Done("traded in the lost time"))
    worker = await machine.worker()
    await machine.advance(11)
    await worker.signal("r", "go", "x")
    assert (await worker.get("r").result(timeout=60))[0] == "traded in the lost time"
    assert counts()["trade"] == 2, "the failed attempt, and the last step"


async def test_an_attempt_that_fails_after_it_was_asked_about_is_retried_without_another_question(
    machine: Machine,
) -> None:
    await left(machine, trading, 0)
    FAILS.append(NotDone("refused"))
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
    await machine.rest(worker)
    await machine.advance(11)
    assert await worker.get("r").result(timeout=60) == ["x", "traded 0"]
    assert (len(ASKED), counts()["trade"]) == (1, 2)


async def test_several_at_once_make_one_question_and_one_acceptance(machine: Machine) -> None:
    await left(machine, posting_three)
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    await machine.until_status("r", "held")
    assert machine.kinds("r")[-1] == "run_held"
    assert machine.kinds("r").count("step_started") == 3
    assert counts() == {}
    hold = machine.hold("r")
    assert (hold.reason, hold.resolutions) == ("restored", ["accept", "done", "not-done", "cancel"])
    with pytest.raises(RunHeld, match="after the backup"):
        await worker.get("r").result()
    await worker.resolve("r", "accept", by="ann")
    assert await worker.get("r").result(timeout=60) == ["posted 0", "posted 1", "posted 2"]
    assert machine.kinds("r").count("run_held") == 1
    assert counts() == {"post": 3}
    assert (await worker.get("r").verify()).sound


async def test_a_child_that_may_have_been_started_before_asks_as_well(machine: Machine) -> None:
    await left(machine, posting_parent)
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    await machine.until(lambda: (row := machine.store.run("r.2")) is not None and row.status == "held")
    assert machine.hold("r.2").reason == "restored"
    assert counts() == {}
    await worker.resolve("r.2", "done", value="posted long ago")
    assert await worker.get("r").result(timeout=60) == "posted long ago"
    assert counts() == {}


async def test_a_child_has_the_keys_that_it_had_in_the_time_that_is_lost(machine: Machine) -> None:
    keys = []
    for name in ("lost", "again"):
        other = Machine(machine.folder / name)
        other.folder.mkdir()
        if name == "lost":
            app = await other.boot()
            await app.start(posting_parent, id="r")
            await other.rest(app)
            await other.stop(app)
            copy = other.path.read_bytes()
        else:
            other.path.write_bytes(copy)
        app = await other.worker()
        await app.signal("r", "go", "x")
        assert await app.get("r").result(timeout=60) == "posted 1"
        keys.append(APPLIED.pop())
        await other.shut()
    assert keys[0] == keys[1]


async def test_a_run_that_is_started_after_the_restore_is_not_asked(machine: Machine) -> None:
    await left(machine, posting_three)
    app = await machine.boot()
    assert await app.run(posting_child, id="new") == "posted 1"
    await machine.stop(app)
    app, _ = await machine.start(posting_three, id="later")
    await machine.rest(app)
    await machine.kill(app)
    worker = await machine.worker()
    await worker.signal("later", "go", "x")
    assert len(await worker.get("later").result(timeout=60)) == 3
    assert "run_restored" not in machine.kinds("later")


async def test_what_was_noted_is_remembered_by_the_next_process(machine: Machine) -> None:
    await left(machine, trading, 0)
    worker = await machine.worker()
    await worker.take_up_run("r")
    await machine.rest(worker)
    assert machine.kinds("r")[-1] == "run_restored"
    await machine.kill(worker)
    ANSWERS.append(Done("traded long ago"))
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    assert await worker.get("r").result(timeout=60) == ["x", "traded long ago"]
    assert machine.kinds("r").count("run_restored") == 1
    assert counts() == {}


async def test_a_second_restore_begins_the_questions_again(machine: Machine) -> None:
    await left(machine, trading, 0)
    worker = await machine.worker()
    await worker.take_up_run("r")
    await machine.rest(worker)
    await machine.stop(worker)
    assert mark_restored(machine.store)[0] == 2
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    await worker.get("r").result(timeout=60)
    assert [body.number for body in machine.bodies("r", "run_restored")] == [1, 2]
    assert len(ASKED) == 1


async def test_a_probe_that_does_not_know_leads_to_a_person(machine: Machine) -> None:
    await left(machine, trading, 0)
    ANSWERS.extend([Unknown("it is down")] * 30)
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    await machine.until(lambda: ASKED)
    for _ in range(40):
        if machine.status("r") == "held":
            break
        await machine.advance(61)
    assert machine.hold("r").reason == "restored"
    assert "probe" in machine.hold("r").resolutions
    ANSWERS[:] = [Done("traded")]
    await worker.resolve("r", "probe")
    assert await worker.get("r").result(timeout=60) == ["x", "traded"]


async def test_a_cancel_waits_until_what_may_have_happened_is_known(machine: Machine) -> None:
    await left(machine, trading, 0)
    ANSWERS.extend([Unknown("later"), Done("traded")])
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    await machine.until(lambda: ASKED)
    await worker.cancel("r")
    await machine.rest(worker)
    assert machine.status("r") == "waiting"
    await machine.advance(2)
    await machine.until_status("r", "cancelled")
    assert counts() == {}


async def test_a_store_with_workers_is_not_marked(machine: Machine) -> None:
    await machine.start(trading, 0, id="r")
    with pytest.raises(Misuse, match="Stop every process"):
        mark_restored(machine.store)
    assert machine.store.restores() == 0


# -- keys of actions ---------------------------------------------------------------------------------------------------
@step(effect="once", key="ship:{number}", probe=ask)
async def ship(number: int) -> str:
    APPLIED.append(("ship", everstep.key()))
    return f"shipped {number}"


@workflow(name="restored_shipping")
async def shipping(number: int) -> str:
    await everstep.receive("go", str)
    return await ship(number)


@pytest.mark.parametrize("has_happened", [True, False])
async def test_a_step_with_a_key_of_its_own_is_asked_about_once_the_key_is_its_own(
    machine: Machine, has_happened: bool
) -> None:
    await left(machine, shipping, 7)
    ANSWERS.append(Done("shipped long ago") if has_happened else NotDone())
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    value = await worker.get("r").result(timeout=60)
    assert value == ("shipped long ago" if has_happened else "shipped 7")
    assert [key for _, key in APPLIED] == ([] if has_happened else ASKED)
    row = machine.store.effect("ship:7")
    assert row is not None
    assert row.state == "done"


async def test_what_another_run_has_done_under_the_key_is_shared_without_a_question(machine: Machine) -> None:
    await left(machine, shipping, 7)
    worker = await machine.worker()
    other = await worker.start(shipping, 7, id="other")
    await other.signal("go", "x")
    assert await other.result(timeout=60) == "shipped 7"
    await worker.signal("r", "go", "x")
    assert await worker.get("r").result(timeout=60) == "shipped 7"
    assert counts() == {"ship": 1}
    assert ASKED == []


# -- checkpoints -------------------------------------------------------------------------------------------------------
@workflow(name="restored_trading_on")
async def trading_on(count: int) -> int:
    done = 0
    while done < count:
        done = await everstep.checkpoint(done)
        await everstep.receive("go", str)
        await trade(done)
        done += 1
    return done


async def test_a_checkpoint_remembers_that_there_was_a_restore(machine: Machine) -> None:
    app, _ = await machine.start(trading_on, 4, id="r")
    await app.signal("r", "go", "0")
    await machine.until(lambda: counts() == {"trade": 1})
    await machine.rest(app)
    await machine.stop(app)
    mark_restored(machine.store)
    for number in (1, 2, 3):
        worker = await machine.worker()
        await worker.signal("r", "go", f"{number}")
        await machine.until(lambda: len(ASKED) == number)  # noqa: B023
        await machine.rest(worker)
        await machine.stop(worker)
    assert machine.status("r") == "completed"
    assert machine.kinds("r").count("run_restored") == 1, "it is noted once, also where the note is not read any more"
    assert counts() == {"trade": 4}


async def test_a_process_that_still_has_the_file_from_before_keeps_it_from_being_marked(machine: Machine) -> None:
    """It is not among the workers of the backup, but its lock is held."""
    app, _ = await machine.start(trading, 0, id="r")
    await machine.rest(app)
    machine.sql("DELETE FROM workers")
    with pytest.raises(Misuse, match="the one that was here before"):
        mark_restored(machine.store)
    await machine.kill(app)
    assert mark_restored(machine.store)[0] == 1
