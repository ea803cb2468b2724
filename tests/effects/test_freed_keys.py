"""When a key is free again: certain failure, doubt, cancelled and ended runs, and changed code."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Fatal, NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.errors import KeyConflict, Misuse, RunCancelled
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine
from tests.worlds.invoices import (
    ERRORS,
    FLOWS,
    K,
    begun,
    charge,
    charging,
    effect,
    held,
    keys_presented,
    perform,
    runs_that_ran,
    ship,
    shipping,
    sound,
    waiting,
)
from tests.worlds.ledger import GATES, NOTES


@pytest.fixture(autouse=True)
def nothing_noted() -> None:
    ERRORS.clear()


# -- freed ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("contract", "error"),
    [("once", NotDone("no")), ("once", Fatal("no")), ("repeat", ValueError("no")), ("repeat", Fatal("no"))],
)
async def test_certain_failure_frees_the_key_for_exactly_one(machine: Machine, contract: str, error: Exception) -> None:
    ERRORS.append(error)
    app = await machine.boot()
    first = await begun(app, FLOWS[contract], "a")
    others = [await waiting(machine, app, FLOWS[contract], f"w{n}") for n in range(5)]
    GATES["a"].opened.set()
    with pytest.raises(type(error)):
        await first.result(timeout=60)
    results = {await run.result(timeout=60) for run in others}
    assert len(results) == 1
    assert len(NOTES) == 2, "one of those who waited did it, for all"
    assert len(keys_presented()) == 1, "the receiver sees one action"
    assert [body.because for body in machine.bodies(runs_that_ran()[1], "step_started")] == ["freed"]
    sound(machine)


async def test_one_failure_after_the_other_lets_one_after_the_other_do_it(machine: Machine) -> None:
    ERRORS.extend(NotDone(str(n)) for n in range(4))
    app = await machine.boot()
    first = await begun(app, charging, "r0")
    others = [await waiting(machine, app, charging, f"r{n}") for n in range(1, 6)]
    GATES["r0"].opened.set()
    ends = await asyncio.gather(*(run.result(timeout=60) for run in [first, *others]), return_exceptions=True)
    assert sum(isinstance(end, NotDone) for end in ends) == 4
    assert len({end for end in ends if isinstance(end, str)}) == 1
    assert len(NOTES) == 5
    assert len(set(runs_that_ran())) == 5
    sound(machine)


async def test_while_it_is_tried_again_the_key_is_kept(machine: Machine) -> None:
    tried = step(perform, name="tried", effect="repeat", key="t:{invoice}", retry=Retry(attempts=3, first=60))

    @workflow
    async def flow(name: str) -> str:
        return await tried(7, 5)

    ERRORS.append(OSError("reset"))
    app, first = await machine.start(flow, "a", id="a")
    await machine.until(lambda: "attempt_failed" in machine.kinds("a"))
    second = await waiting(machine, app, flow, "b", "b")
    assert effect(machine, "t:7").run == "a"
    await machine.kill(app)
    app = await machine.worker()
    machine.clock.advance(90)
    app.pump.nudge()
    assert await app.get("b").result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a", "a"]
    assert [one.id for one in (first, second)] == ["a", "b"]
    sound(machine)


async def test_a_fallback_s_outcome_is_its_own_run_s_and_the_key_is_free(machine: Machine) -> None:
    fallen = step(perform, name="fallen", effect="once", key="f:{invoice}", fallback="later")

    @workflow
    async def flow(name: str) -> str:
        return await fallen(7, 5)

    ERRORS.append(NotDone("no"))
    app = await machine.boot()
    assert await app.run(flow, "a", id="a") == "later"
    assert machine.store.effect("f:7") is None
    assert await app.run(flow, "b", id="b") == "paid 5 by b"
    sound(machine)


async def test_who_gives_up_a_step_that_may_be_repeated_frees_its_key(machine: Machine) -> None:
    @workflow
    async def impatient() -> str:
        try:
            async with asyncio.timeout(5):
                return await ship(7, 5)
        except TimeoutError:
            await everstep.receive("go")
            return "gave up"

    app = await machine.boot()
    await begun(app, impatient, "a")
    second = await waiting(machine, app, shipping, "b")
    machine.clock.advance(6)
    assert await second.result(timeout=60) == "paid 5 by b"
    assert len(keys_presented()) == 1
    await app.signal("a", "go")
    assert await app.get("a").result(timeout=60) == "gave up"
    sound(machine)


@pytest.mark.parametrize("how", ["returned", "failed", "cancelled", "now", "elsewhere"])
async def test_the_end_of_a_run_frees_the_keys_of_steps_that_may_be_repeated(machine: Machine, how: str) -> None:
    @workflow
    async def leaving() -> str:
        task = asyncio.create_task(ship(7, 5))
        await everstep.receive("go")
        if how == "failed":
            raise ValueError("no")
        assert not task.done()
        return "left"

    app = await machine.boot()
    first = await begun(app, leaving, "a")
    other = await machine.boot()
    second = await waiting(machine, other, shipping, "b")
    if how in ("returned", "failed"):
        await first.signal("go")
    elif how == "cancelled":
        await first.cancel()
    elif how == "now":
        await app.cancel("a", now=True)
    else:
        await machine.kill(app)
        await other.cancel("a", now=True)
    assert await second.result(timeout=60) == "paid 5 by b"
    sound(machine)


async def test_a_step_that_is_given_up_before_it_begins_takes_no_key(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        task = asyncio.create_task(charge(7, 5))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return "gave up"

    app = await machine.boot()
    assert await app.run(flow, id="a") == "gave up"
    assert machine.store.effect(K) is None
    assert NOTES == []
    sound(machine)
    assert await app.run(charging, 7, id="b") == "paid 5 by b"


# -- in doubt ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["done", "not-done"])
async def test_while_the_owner_is_in_doubt_others_wait_for_what_a_person_says(machine: Machine, answer: str) -> None:
    ERRORS.append(OSError("reset"))
    app = await machine.boot()
    first = await begun(app, charging, "a")
    second = await waiting(machine, app, charging, "b")
    GATES.pop("a").opened.set()
    await held(machine, first)
    assert machine.report("a")["effect"] == K
    assert machine.report("a")["key"] in keys_presented()
    await machine.rest()
    assert machine.status("b") == "waiting"
    await app.resolve("a", answer, value="paid by hand" if answer == "done" else None)
    wanted = "paid by hand" if answer == "done" else "paid 5 by a"
    assert await first.result(timeout=60) == await second.result(timeout=60) == wanted
    assert runs_that_ran() == (["a"] if answer == "done" else ["a", "a"])
    sound(machine)


async def test_an_exhausted_step_that_is_skipped_frees_its_key(machine: Machine) -> None:
    stubborn = step(perform, name="stubborn", effect="repeat", key="s:{invoice}", retry=Retry(attempts=1, then="hold"))

    @workflow
    async def flow(name: str) -> str:
        return await stubborn(7, 5)

    ERRORS.append(ValueError("no"))
    app = await machine.boot()
    first = await begun(app, flow, "a", "a")
    second = await waiting(machine, app, flow, "b", "b")
    GATES["a"].opened.set()
    assert (await held(machine, first)).reason == "exhausted"
    await app.resolve("a", "skip", value="skipped")
    assert await first.result(timeout=60) == "skipped"
    assert await second.result(timeout=60) == "paid 5 by b"
    sound(machine)


@pytest.mark.parametrize("answer", ["free", "done"])
async def test_a_cancelled_run_in_doubt_keeps_its_key_until_somebody_decides(machine: Machine, answer: str) -> None:
    ERRORS.append(OSError("reset"))
    app = await machine.boot()
    await held(machine, await app.start(charging, 7, id="a"))
    with pytest.raises(KeyConflict, match="may still settle it"):
        await app.free_key(K)
    await app.resolve("a", "cancel")
    second = await waiting(machine, app, charging, "b")
    assert effect(machine).state == "under-way"
    if answer == "free":
        await app.free_key(K, note="the bank knows nothing", by="ann")
        assert await second.result(timeout=60) == "paid 5 by b"
        assert len(keys_presented()) == 1, "if the first did reach its receiver after all, the second is the same"
    else:
        await app.settle_key(K, "paid, says the bank", note="asked", by="ann")
        assert await second.result(timeout=60) == "paid, says the bank"
        assert [body.by for body in machine.bodies("b", "step_shared")] == ["ann"]
        assert (effect(machine).by, effect(machine).note) == ("ann", "asked")
    sound(machine)


async def test_what_was_done_and_freed_by_hand_is_another_action_to_its_receiver(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    await app.free_key(K, note="do it again", by="ann")
    assert effect(machine).state == "free"
    assert await app.run(charging, 7, id="b") == "paid 5 by b"
    assert len(keys_presented()) == 2
    assert [body.round for body in machine.bodies("b", "step_started")] == [1]
    assert await app.run(charging, 7, id="c") == "paid 5 by b"
    with pytest.raises(Misuse, match="No step has the key"):
        await app.free_key("invoice:none")
    sound(machine)


# -- cancelling who waits ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["cancel", "now", "timeout"])
@pytest.mark.parametrize("contract", FLOWS)
async def test_who_waits_can_be_cancelled_and_leaves_the_key_alone(machine: Machine, contract: str, how: str) -> None:
    target = charge if contract == "once" else ship

    @workflow
    async def impatient() -> str:
        try:
            async with asyncio.timeout(30):
                return await target(7, 5)
        except TimeoutError:
            return "too long"

    app = await machine.boot()
    first = await begun(app, FLOWS[contract], "a")
    second = await waiting(machine, app, impatient, "b")
    if how == "timeout":
        machine.clock.advance(31)
        assert await second.result(timeout=60) == "too long"
    else:
        await app.cancel("b", now=how == "now")
        with pytest.raises(RunCancelled):
            await second.result(timeout=60)
    third = await waiting(machine, app, FLOWS[contract], "c")
    GATES["a"].opened.set()
    assert await first.result(timeout=60) == await third.result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a"]
    sound(machine)


# -- ended runs -------------------------------------------------------------------------------------------------------
async def damaged_with_its_key(machine: Machine, flow: Any) -> tuple[App, Any]:
    """A run has its key and dies; its history is damaged from the first event on, and another run waits for the key."""
    app = await machine.boot()
    await begun(app, flow, "a")
    await machine.kill(app)
    GATES.clear()
    machine.sql("UPDATE events SET body = x'00' WHERE run = 'a' AND seq = 1")
    worker = await machine.worker()
    other = await waiting(machine, worker, flow, "b")
    await machine.until_status("a", "held")
    return worker, other


@pytest.mark.parametrize("resolution", ["done", "not-done"])
async def test_a_damaged_run_that_is_restarted_settles_what_its_earlier_generation_left_in_doubt(
    machine: Machine, resolution: str
) -> None:
    worker, other = await damaged_with_its_key(machine, charging)
    run = await worker.start(charging, 7, id="a", on_existing="restart")
    hold = await held(machine, run)
    assert (hold.reason, hold.step) == ("in-doubt", "charge")
    assert "earlier generation" in hold.summary
    assert runs_that_ran() == ["a"], "nothing is done again by itself"
    await worker.resolve("a", resolution, value="paid by hand" if resolution == "done" else None)
    paid = await run.result(timeout=60)
    assert await other.result(timeout=60) == paid
    assert runs_that_ran() == (["a"] if resolution == "done" else ["a", "a"])
    assert len(keys_presented()) == 1
    assert (effect(machine).generation, effect(machine).state) == (2, "done")


async def test_a_damaged_run_that_is_restarted_gives_back_the_key_of_what_may_be_repeated(machine: Machine) -> None:
    worker, other = await damaged_with_its_key(machine, shipping)
    run = await worker.start(shipping, 7, id="a", on_existing="restart")
    assert await run.result(timeout=60) == await other.result(timeout=60)
    assert len(NOTES) == 2
    assert len(keys_presented()) == 1


async def test_a_key_of_an_earlier_generation_with_other_arguments_is_a_conflict(machine: Machine) -> None:
    worker, _ = await damaged_with_its_key(machine, charging)
    run = await worker.start(charging, 7, 6, id="a", on_existing="restart")
    with pytest.raises(KeyConflict):
        await run.result(timeout=60)
    assert runs_that_ran() == ["a"]


async def test_a_restarted_run_shares_what_its_earlier_generation_did(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    run = await app.start(charging, 7, id="a", on_existing="restart")
    assert await run.result(timeout=60) == "paid 5 by a"
    assert machine.row("a").generation == 2
    assert machine.kinds("a") == ["run_started", "key_taken", "step_shared", "run_completed"]
    assert runs_that_ran() == ["a"]
    assert check(export_histories(machine.store), settled=False) == []


@pytest.mark.parametrize("meanwhile", ["nobody", "done", "under way"])
async def test_a_retried_run_asks_for_its_key_again(machine: Machine, meanwhile: str) -> None:
    ERRORS.append(NotDone("no"))
    app, run = await machine.start(charging, 7, id="a")
    with pytest.raises(NotDone):
        await run.result(timeout=60)
    if meanwhile == "done":
        await app.run(charging, 7, id="b")
    elif meanwhile == "under way":
        await begun(app, charging, "b")
    await app.retry("a")
    if meanwhile == "under way":
        await machine.until_status("a", "waiting")
        GATES["b"].opened.set()
    assert await run.result(timeout=60) == f"paid 5 by {'a' if meanwhile == 'nobody' else 'b'}"
    assert runs_that_ran() == (["a", "a"] if meanwhile == "nobody" else ["a", "b"])
    assert len(keys_presented()) == 1
    sound(machine)


async def test_a_waiting_run_that_failed_and_is_retried_is_told(machine: Machine) -> None:
    """The key changes while the run has ended, so nobody tells it then."""

    @workflow
    async def flow() -> str:
        waits = asyncio.create_task(ship(7, 5))
        await everstep.receive("go")
        if not NOTES[-1].startswith("fixed"):
            raise ValueError("no")
        return await waits

    app = await machine.boot()
    first = await begun(app, shipping, "a")
    second = await waiting(machine, app, flow, "b")
    await second.signal("go")
    with pytest.raises(ValueError, match="no"):
        await second.result(timeout=60)
    GATES["a"].opened.set()
    await first.result(timeout=60)
    NOTES.append("fixed")
    await app.retry("b")
    assert await second.result(timeout=60) == "paid 5 by a"
    assert check(export_histories(machine.store), settled=False) == []


async def test_what_a_handler_did_before_a_retry_is_done(machine: Machine) -> None:
    """The retry makes its call void, and the number of its call comes again; the effect does not."""

    @step(effect="repeat")
    async def shaky() -> str:
        NOTES.append("shaky")
        if NOTES.count("shaky") == 1:
            raise ValueError("no")
        return "fine"

    @workflow
    async def flow() -> list[str]:
        try:
            first = await shaky()
        except ValueError:
            await charge(7, 5)
            raise
        return [first, await charge(7, 5)]

    app, run = await machine.start(flow, id="a")
    with pytest.raises(ValueError, match="no"):
        await run.result(timeout=60)
    await app.retry("a")
    assert await run.result(timeout=60) == ["fine", "paid 5 by a"]
    assert [note for note in NOTES if note != "shaky"] == NOTES[1:2], "it was charged once"
    assert machine.kinds("a")[-3:] == ["key_taken", "step_shared", "run_completed"]
    assert not machine.replay("a").differences


# -- the key that bodies present --------------------------------------------------------------------------------------
async def test_the_same_action_presents_the_same_key_in_every_run_of_a_store_and_in_no_other(machine: Machine) -> None:
    app = await machine.boot()
    for error in (NotDone("1"), NotDone("2"), None):
        if error is not None:
            ERRORS.append(error)
        run = await app.start(charging, 7)
        await asyncio.gather(run.result(timeout=60), return_exceptions=True)
    assert len(NOTES) == 3
    assert len(keys_presented()) == 1
    await app.run(charging, 8)
    await app.run(charging, 9, 6)
    assert len(keys_presented()) == 3
    async with everstep.open("memory:") as another:
        await another.run(charging, 7)
    assert len(keys_presented()) == 4


async def test_a_probe_is_asked_with_the_key_that_the_body_presented(machine: Machine) -> None:
    asked: list[str] = []

    def probe(key: str, invoice: int, amount: int) -> everstep.Done:
        asked.append(key)
        return everstep.Done("adopted")

    probed = step(perform, name="probed", effect="once", key="p:{invoice}", probe=probe)

    @workflow
    async def flow(name: str) -> str:
        return await probed(7, 5)

    app = await machine.boot()
    await begun(app, flow, "a", "a")
    await waiting(machine, app, flow, "b", "b")
    await machine.kill(app)
    app = await machine.worker()
    await machine.until_status("a", "completed")
    await machine.advance(1)
    assert await app.get("b").result(timeout=60) == "adopted"
    assert set(asked) == keys_presented()
    assert runs_that_ran() == ["a"]
    sound(machine)


# -- changed code -----------------------------------------------------------------------------------------------------
PREFIX = {"now": "old"}


changing = step(perform, name="changing", effect="repeat", key=lambda invoice, amount: f"{PREFIX['now']}:{invoice}")


@workflow
async def changing_flow() -> str:
    paid = await changing(7, 5)
    await everstep.receive("go")
    return paid


@pytest.mark.parametrize("change", ["another key", "no key"])
async def test_a_step_whose_key_the_code_has_changed_diverges(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    app = await machine.boot()
    await waiting(machine, app, changing_flow, "a")
    await machine.kill(app)
    with monkeypatch.context() as patch:
        if change == "another key":
            patch.setitem(PREFIX, "now", "new")
        else:
            patch.setattr(changing, "key", None)
        app = await machine.boot()
        hold = await held(machine, await app.start(changing_flow, id="a"))
        assert hold.reason == "diverged"
        assert machine.report("a")["differences"][0]["what"] == "key"
    run = await app.start(changing_flow, id="a")
    await run.signal("go")
    assert await run.result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a"]


async def test_a_step_that_was_begun_without_a_key_goes_on_without_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.boot()
    with monkeypatch.context() as patch:
        patch.setattr(changing, "key", None)
        await begun(app, changing_flow, "a")
        await machine.kill(app)
    GATES.clear()
    app, run = await machine.start(changing_flow, id="a")
    await run.signal("go")
    assert await run.result(timeout=60) == "paid 5 by a"
    assert len(keys_presented()) == 1, "the key of its first attempt"
    assert machine.store.effect("old:7") is None
    sound(machine)
