"""`fork`: a new run from an event of another one. Nothing that was done is done again, unless that was allowed."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.history.verify import Recorded, verify_now
from everstep.engine.verbs.fork import refuse_effects
from everstep.errors import CrossesOnce, Damaged, IdConflict, Misuse, Uncompensated, UnknownRun
from everstep.model.events import RunRestored, decode_body
from everstep.stores.protocol import RunFilter
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import NOTES


def note(text: str) -> None:
    NOTES.append(text)


@step(effect="read")
async def think(prompt: str) -> str:
    note(f"think {prompt}")
    return f"about {prompt}"


@step(effect="once")
async def pay(amount: int) -> str:
    note(f"pay {amount} {everstep.key()}")
    return f"receipt {amount}"


@step
async def tell(text: str) -> str:
    note(f"tell {text} {everstep.key()}")
    return text


@workflow(name="agent")
async def agent(topic: str) -> list[str]:
    found = [await think(topic)]
    found.append(await think(found[0]))
    found.append(await pay(len(found)))
    found.append(await tell(found[1]))
    return found


@step(compensate=lambda outcome, room: note(f"unreserve {room}"))
async def reserve(room: int) -> int:
    return room


@workflow(name="agent_waiting")
async def agent_waiting() -> int:
    return await everstep.receive("go", int)


def all_is_sound(machine: Machine) -> None:
    assert check(export_histories(machine.store)) == []
    for row in machine.store.runs(RunFilter()):
        verify_now(machine.store, row.id)


def seq_of(machine: Machine, run: str, kind: str, step: str) -> int:
    return next(one.seq for one in machine.events(run) if (one.kind, one.step) == (kind, step))


async def done_agent(machine: Machine) -> Any:
    app = await machine.boot()
    await (await app.start(agent, "tides", id="r", tags={"of": "ann"})).result(timeout=60)
    return app


async def test_a_fork_begins_with_the_other_runs_history_and_goes_on_by_itself(machine: Machine) -> None:
    app = await done_agent(machine)
    before, old = machine.events("r"), list(NOTES)
    at = seq_of(machine, "r", "step_completed", "think#2")
    fork = await app.fork("r", at=at, id="f", allow_effects=True, by="ann", note="what if")
    assert await fork.result(timeout=60) == ["about tides", "about about tides", "receipt 2", "about about tides"]
    assert [one.split()[0] for one in NOTES[len(old) :]] == ["pay", "tell"], "what was read is not read again"
    assert not {one.split()[-1] for one in old} & {one.split()[-1] for one in NOTES[len(old) :]}, "with keys of its own"
    assert machine.events("r") == before, "the other run is not touched"
    copied = machine.events("f")[1:at]
    assert [one[:5] for one in copied] == [one[:5] for one in before[1:at]]
    assert all(one.digest != two.digest for one, two in zip(copied, before[1:at], strict=True)), "linked anew"
    origin = decode_body("run_started", machine.events("f")[0].body).forked
    assert (origin.run, origin.seq, origin.head, origin.by) == ("r", at, before[at - 1].digest.hex(), "ann")
    assert machine.row("f").tags == {"of": "ann", "forked-from": f"r@{at}"}
    all_is_sound(machine)


async def test_effects_that_would_happen_again_are_named_and_refused_unless_allowed(machine: Machine) -> None:
    app = await done_agent(machine)
    at = seq_of(machine, "r", "step_completed", "think")
    for allowed in (False, (), ["tell"], ["pay"]):
        with pytest.raises(CrossesOnce) as refused:
            await app.fork("r", at=at, id="f", allow_effects=allowed)
        expected = [one for one in ("pay", "tell") if one not in (allowed or ())]
        assert [one.step for one in refused.value.crossed] == expected
    assert machine.store.run("f") is None
    after = seq_of(machine, "r", "step_completed", "pay")
    with pytest.raises(CrossesOnce, match=r"tell \(event"):
        await app.fork("r", at=after)
    fork = await app.fork("r", at=at, allow_effects=["pay", "tell"])
    assert (await fork.result(timeout=60))[2] == "receipt 2"
    end = machine.row("r").head_seq
    assert await (await app.fork("r", at=end)).result(timeout=60) == await app.get("r").result()
    all_is_sound(machine)


async def test_an_event_that_the_code_asked_for_means_the_moment_before_it(machine: Machine) -> None:
    app = await done_agent(machine)
    at = seq_of(machine, "r", "step_started", "pay")
    fork = await app.fork("r", at=at, allow_effects=True)
    assert decode_body("run_started", machine.events(fork.id)[0].body).forked.seq == at - 1
    assert (await fork.result(timeout=60))[2] == "receipt 2"


async def test_another_outcome_takes_the_place_of_the_one_at_the_event(machine: Machine) -> None:
    app = await done_agent(machine)
    at = seq_of(machine, "r", "step_completed", "think#2")
    fork = await app.fork("r", at=at, outcome="nothing", allow_effects=True)
    assert (await fork.result(timeout=60))[1:] == ["nothing", "receipt 2", "nothing"]
    assert decode_body("run_started", machine.events(fork.id)[0].body).forked.edited == "outcome"
    with pytest.raises(Misuse, match="no outcome"):
        await app.fork("r", at=1, outcome="x", allow_effects=True)
    with pytest.raises(Misuse, match="not an outcome"):
        await app.fork("r", at=at + 1, outcome="x", allow_effects=True)
    large = "x" * 20_000
    fork = await app.fork("r", at=at, outcome=large, allow_effects=True)
    assert (await fork.result(timeout=60))[1] == large
    all_is_sound(machine)


async def test_a_failed_step_can_be_given_an_outcome(machine: Machine) -> None:
    @step(name="broken")
    async def broken() -> str:
        raise ValueError("down")

    @workflow(name="breaking")
    async def breaking() -> str:
        return await broken() + "!"

    app = await machine.boot()
    with pytest.raises(ValueError, match="down"):
        await (await app.start(breaking, id="r")).result(timeout=60)
    fork = await app.fork("r", at=seq_of(machine, "r", "step_failed", "broken"), outcome="up")
    assert await fork.result(timeout=60) == "up!"
    assert machine.status("r") == "failed"
    all_is_sound(machine)


async def test_a_failure_that_was_copied_is_not_retried_by_the_fork(machine: Machine) -> None:
    fails = [True]

    @step(name="fragile")
    async def fragile() -> str:
        note(f"fragile {everstep.key()}")
        if fails:
            raise ValueError("down")
        return "up"

    @workflow(name="fragile_work")
    async def fragile_work() -> str:
        return await fragile()

    app = await machine.boot()
    with pytest.raises(ValueError, match="down"):
        await (await app.start(fragile_work, id="r")).result(timeout=60)
    failed = await app.fork("r", at=seq_of(machine, "r", "step_failed", "fragile"), id="f")
    with pytest.raises(ValueError, match="down"):
        await failed.result(timeout=60)
    with pytest.raises(Misuse, match="is that run's to retry"):
        await app.retry("f")
    fails.clear()
    again = await app.fork("r", at=seq_of(machine, "r", "step_started", "fragile"))
    assert await again.result(timeout=60) == "up"
    assert len(set(NOTES)) == 2
    all_is_sound(machine)


async def test_other_arguments_begin_anew_or_agree_with_what_was_recorded(machine: Machine) -> None:
    @workflow(name="two_parts")
    async def two_parts(topic: str, tone: str) -> str:
        return f"{await think(topic)} {tone}"

    app = await machine.boot()
    await (await app.start(two_parts, "tides", "dry", id="r")).result(timeout=60)
    fork = await app.fork("r", at=1, args=["moons", "wry"])
    assert await fork.result(timeout=60) == "about moons wry"
    NOTES.clear()
    fork = await app.fork("r", at=3, args=["tides", "wry"])
    assert await fork.result(timeout=60) == "about tides wry"
    assert NOTES == [], "what was recorded agrees"
    with pytest.raises(Misuse, match="event 2 it was step think"):
        await app.fork("r", at=3, args=["moons", "wry"], id="f")
    assert machine.store.run("f") is None
    with pytest.raises(Misuse, match="missing the required argument 'tone'"):
        await app.fork("r", at=1, args=["moons"])
    all_is_sound(machine)


async def test_the_same_fork_asked_for_twice_is_one_and_another_one_conflicts(machine: Machine) -> None:
    app = await done_agent(machine)
    last = seq_of(machine, "r", "step_completed", "tell")
    first = await app.fork("r", at=last, id="f")
    assert await first.result(timeout=60)
    assert (await app.fork("r", at=last, id="f")).id == "f"
    with pytest.raises(IdConflict):
        await app.fork("r", at=last - 2, id="f", allow_effects=True)
    with pytest.raises(IdConflict):
        await app.fork("r", at=last, id="r")
    with pytest.raises(UnknownRun):
        await app.fork("nobody", at=1)
    for at in (0, 1000):
        with pytest.raises(Misuse, match="none of them"):
            await app.fork("r", at=at)


async def test_where_an_effect_is_under_way_it_is_refused_and_says_where_it_could_be(machine: Machine) -> None:
    @workflow(name="both")
    async def both() -> list[str]:
        first = await think("a")
        rest = await asyncio.gather(tell("b"), think("c"), tell("d"))
        return [first, *rest]

    app = await machine.boot()
    assert len(await (await app.start(both, id="r")).result(timeout=60)) == 4
    events = machine.events("r")
    outcomes = [one.seq for one in events if one.kind == "step_completed"]
    with pytest.raises(Misuse, match=rf"under way.*at event {outcomes[0]} or event {outcomes[-1]}"):
        await app.fork("r", at=outcomes[1], allow_effects=True)
    fork = await app.fork("r", at=outcomes[-1])
    assert await fork.result(timeout=60) == await app.get("r").result()
    all_is_sound(machine)


async def test_a_read_that_was_under_way_is_read_again_and_a_timer_and_a_receive_stay(machine: Machine) -> None:
    @workflow(name="waiting_for_all")
    async def waiting_for_all() -> list[Any]:
        async def late() -> str:
            await asyncio.sleep(5)
            return await think("late")

        return list(await asyncio.gather(think("a"), late(), everstep.receive("word", str)))

    app, run = await machine.start(waiting_for_all, id="r")
    await machine.until_status("r", "waiting")
    fork = await app.fork("r", at=machine.row("r").head_seq)
    await fork.signal("word", "of the fork")
    await run.signal("word", "of the run")
    machine.clock.advance(10)
    assert await fork.result(timeout=60) == ["about a", "about late", "of the fork"]
    assert await run.result(timeout=60) == ["about a", "about late", "of the run"]
    all_is_sound(machine)


async def test_children_that_had_ended_are_kept_and_open_ones_refuse(machine: Machine) -> None:
    @workflow(name="little")
    async def little(word: str) -> str:
        return await tell(word) + await everstep.receive("go", str)

    @workflow(name="big")
    async def big() -> str:
        first = await little("a")
        return first + await think(first)

    app, run = await machine.start(big, id="r")
    await machine.until(lambda: machine.store.run("r.1") is not None and machine.status("r.1") == "waiting")
    with pytest.raises(CrossesOnce, match=r"tell of r\.1"):
        await app.fork("r", at=1)
    await app.signal("r.1", "go", "!")
    assert await run.result(timeout=60) == "a!about a!"
    fork = await app.fork("r", at=next(one.seq for one in machine.events("r") if one.kind == "child_ended"))
    assert await fork.result(timeout=60) == "a!about a!"
    assert len([one for one in NOTES if one.startswith("tell")]) == 1
    all_is_sound(machine)


async def test_a_fork_undoes_only_what_it_did_itself(machine: Machine) -> None:
    @step(name="book", compensate=lambda outcome, room: note(f"unbook {room}"))
    async def book(room: int) -> int:
        note(f"book {room}")
        return room

    @workflow(name="hotel")
    async def hotel() -> None:
        await book(1)
        await think("x")
        await book(2)
        await everstep.receive("go", int)
        raise LookupError("full")

    app, run = await machine.start(hotel, id="r")
    await machine.until_status("r", "waiting")
    fork = await app.fork("r", at=seq_of(machine, "r", "step_completed", "think"), allow_effects=["book"])
    await machine.until_status(fork.id, "waiting")
    NOTES.clear()
    await fork.signal("go", 1)
    with pytest.raises(LookupError):
        await fork.result(timeout=60)
    assert NOTES == ["unbook 2"]
    await run.signal("go", 1)
    with pytest.raises(LookupError):
        await run.result(timeout=60)
    assert NOTES == ["unbook 2", "unbook 2", "unbook 1"]
    with pytest.raises(CrossesOnce, match="which was undone since"):
        await app.fork("r", at=seq_of(machine, "r", "step_completed", "think"))
    with pytest.raises(Misuse, match="being stopped"):
        await app.fork("r", at=machine.row("r").head_seq, allow_effects=True)
    all_is_sound(machine)


async def test_a_step_with_a_key_of_its_own_is_shared_and_not_done_again(machine: Machine) -> None:
    @step(effect="once", name="bill", key="bill:{number}")
    async def bill(number: int) -> str:
        note(f"bill {number}")
        return f"bill {number}"

    @workflow(name="billing")
    async def billing() -> str:
        await think("x")
        return await bill(7)

    app = await machine.boot()
    await (await app.start(billing, id="r")).result(timeout=60)
    fork = await app.fork("r", at=seq_of(machine, "r", "step_completed", "think"))
    assert await fork.result(timeout=60) == "bill 7"
    assert NOTES == ["think x", "bill 7"]
    assert "step_shared" in machine.kinds(fork.id)
    all_is_sound(machine)


async def test_a_fork_draws_other_numbers_and_is_the_same_in_every_replay(machine: Machine) -> None:
    @workflow(name="drawing")
    async def drawing() -> list[Any]:
        first = everstep.random().random()
        await think("x")
        second = everstep.uuid().hex
        await everstep.receive("go", int)
        return [first, second]

    app, run = await machine.start(drawing, id="r")
    await machine.until_status("r", "waiting")
    fork = await app.fork("r", at=3)
    await app.fork(fork.id, at=3, id="again")
    await machine.until_status("again", "waiting")
    await machine.until_status(fork.id, "waiting")
    await machine.kill(app)
    app = await machine.worker()
    results = []
    for id in ("r", fork.id, "again"):
        await app.signal(id, "go", 1)
        results.append(await app.get(id).result(timeout=60))
    assert len({one[0] for one in results}) == 1, "what was drawn before the fork was recorded with it"
    assert len({one[1] for one in results}) == 3
    assert run.id == "r"
    all_is_sound(machine)


async def test_a_fork_is_retried_continued_and_held_like_any_run(machine: Machine) -> None:
    fails = [True]

    @step(name="shaky")
    async def shaky(number: int) -> str:
        note(f"shaky {everstep.key()}")
        if fails:
            raise ValueError("not yet")
        return "ok"

    @workflow(name="trying")
    async def trying(left: int) -> str:
        await think("x")
        done = await shaky(left)
        if left:
            everstep.continue_as(left - 1)
        return done

    app = await machine.boot()
    with pytest.raises(ValueError, match="not yet"):
        await (await app.start(trying, 1, id="r")).result(timeout=60)
    fork = await app.fork("r", at=3, id="f")
    with pytest.raises(ValueError, match="not yet"):
        await fork.result(timeout=60)
    fails.clear()
    await app.retry("f")
    assert await fork.result(timeout=60) == "ok"
    keys = [one.split()[1] for one in NOTES if one.startswith("shaky")]
    assert keys[1] == keys[2] != keys[0], "the retry has the fork's key, not the other run's"
    assert machine.row("f").generation == 2
    with pytest.raises(CrossesOnce) as refused:
        await app.fork("f", at=3, generation=1)
    assert [one.step for one in refused.value.crossed] == ["shaky", "shaky"], "of both generations"
    old = await app.fork("f", at=3, generation=1, id="g", allow_effects=True)
    assert await old.result(timeout=60) == "ok"
    all_is_sound(machine)


async def test_checkpoints_of_the_other_run_are_not_missed_and_new_ones_are_used(machine: Machine) -> None:
    @workflow(name="turning")
    async def turning(turns: int) -> int:
        count = 0
        while count < turns:
            count = await everstep.checkpoint(count, every=1)
            note(f"turn {count}")
            count += 1
            await think(str(count))
        return await everstep.receive("go", int) + count

    app, run = await machine.start(turning, 6, id="r")
    await machine.until_status("r", "waiting")
    fork = await app.fork("r", at=seq_of(machine, "r", "step_completed", "think#2"))
    await machine.until_status(fork.id, "waiting")
    await machine.kill(app)
    NOTES.clear()
    app = await machine.worker()
    await app.signal(fork.id, "go", 1)
    assert await app.get(fork.id).result(timeout=60) == 7
    assert "turn 0" not in NOTES
    assert "checkpoint_damaged" not in machine.kinds(fork.id)
    assert run.id == "r"
    all_is_sound(machine)


async def test_a_fork_refunds_nothing(machine: Machine) -> None:
    @workflow(name="spending_steps", budget=everstep.Budget(steps=3))
    async def spending_steps() -> int:
        for number in range(5):
            await think(str(number))
        return 5

    app, _ = await machine.start(spending_steps, id="r")
    await machine.until_status("r", "held")
    last = max(one.seq for one in machine.events("r") if one.kind == "step_completed")
    fork = await app.fork("r", at=last, id="f")
    await machine.until_status("f", "held")
    assert machine.hold("f").reason == "budget"
    assert len(NOTES) == 3
    assert fork.id == "f"
    all_is_sound(machine)


async def test_a_fork_of_a_run_that_was_continued_does_not_undo_what_older_generations_did(machine: Machine) -> None:
    @workflow(name="moving")
    async def moving(left: int) -> None:
        await reserve(left)
        if left:
            everstep.continue_as(left - 1)
        await think("x")
        await everstep.receive("go", int)
        raise LookupError("full")

    app, _ = await machine.start(moving, 1, id="r")
    await machine.until(lambda: machine.row("r").generation == 2 and machine.status("r") == "waiting")
    fork = await app.fork("r", at=seq_of(machine, "r", "step_completed", "think"), id="f")
    await fork.signal("go", 1)
    with pytest.raises(LookupError):
        await fork.result(timeout=60)
    assert "unreserve" not in " ".join(NOTES)
    await app.signal("r", "go", 1)
    with pytest.raises(LookupError):
        await app.get("r").result(timeout=60)
    assert NOTES[-2:] == ["unreserve 0", "unreserve 1"]
    all_is_sound(machine)


async def test_a_rollback_of_a_fork_is_not_refused_for_what_the_other_run_did(machine: Machine) -> None:
    app = await done_agent(machine)
    fork = await app.fork("r", at=seq_of(machine, "r", "step_completed", "tell"), id="f")
    await fork.result(timeout=60)
    await app.rollback("f")
    await machine.until_status("f", "cancelled")
    with pytest.raises(Uncompensated, match="pay"):
        await app.rollback("r")
    all_is_sound(machine)


async def test_the_timeout_of_a_fork_counts_from_the_fork(machine: Machine) -> None:
    @workflow(name="in_time", timeout=60)
    async def in_time() -> int:
        await think("x")
        return await everstep.receive("go", int)

    app, run = await machine.start(in_time, id="r")
    await run.signal("go", 1)
    assert await run.result(timeout=60) == 1
    machine.clock.advance(1000)
    fork = await app.fork("r", at=3)
    await machine.until_status(fork.id, "waiting")
    machine.clock.advance(30)
    await fork.signal("go", 2)
    assert await fork.result(timeout=60) == 2


async def test_what_was_asked_for_before_the_event_and_not_begun_has_the_forks_key(machine: Machine) -> None:
    """Two outcomes come together, and what follows from the first is recorded after the second."""
    gate = asyncio.Event()

    @step(effect="read", name="slow_read")
    async def slow_read(number: int) -> int:
        await gate.wait()
        return number

    @workflow(name="together")
    async def together() -> list[Any]:
        async def first() -> str:
            return await tell(str(await slow_read(1)))

        return list(await asyncio.gather(first(), slow_read(2)))

    app, other = await machine.start(agent_waiting, id="other")  # with another run here, commits take a moment
    await machine.until_status("other", "waiting")
    run = await app.start(together, id="r")
    await machine.until(lambda: machine.kinds("r").count("step_started") == 2)
    await asyncio.sleep(0.1)  # expensive: the code sees it when it is durable
    gate.set()
    assert await run.result(timeout=60) == ["1", 2]
    early = [one.seq for one in machine.events("r") if one.kind == "step_completed" and b'"early":true' in one.body]
    assert early, machine.kinds("r")
    fork = await app.fork("r", at=early[0], allow_effects=["tell"])
    assert await fork.result(timeout=60) == ["1", 2]
    told = [one for one in NOTES if one.startswith("tell")]
    assert len(told) == len(set(told)) == 2, "not the other run's key"
    all_is_sound(machine)
    assert other.id == "other"


async def test_where_a_part_of_the_history_is_lost_nobody_knows_what_would_happen_again(machine: Machine) -> None:
    app = await done_agent(machine)
    history = verify_now(machine.store, "r")
    last = len(history)
    refuse_effects("r", last, 1, [history], app.store, False)
    restored = [*history, Recorded(last + 1, "run_restored", "", 0, RunRestored(1))]
    with pytest.raises(CrossesOnce, match="lost"):
        refuse_effects("r", last, 1, [restored], app.store, False)
    refuse_effects("r", last, 1, [restored], app.store, True)


async def test_a_fork_of_a_generation_that_is_not_there_says_which_there_are(machine: Machine) -> None:
    app = await done_agent(machine)
    with pytest.raises(Misuse, match="The run r has only generation 1; 2 is not there"):
        await app.fork("r", at=1, generation=2)
    with pytest.raises(Misuse, match="The run r has only generation 1; 7 is not there"):
        await app.get("r").history(7)
    await (await app.start(agent, "tides", id="r", on_existing="restart")).result()
    with pytest.raises(Misuse, match="The run r has the generations 1 to 2; 3 is not there"):
        await app.fork("r", at=1, generation=3)
    assert [row.id for row in await app.list()] == ["r"]


async def test_a_fork_of_a_run_that_lacks_a_generation_says_that_it_is_damaged(machine: Machine) -> None:
    app = await done_agent(machine)
    await machine.stop(app)
    machine.sql("UPDATE runs SET generation = 4611686018427387904")
    app = await machine.boot()
    with pytest.raises(Damaged, match="Generation 2 of run r is not there"):
        await app.fork("r", at=1, generation=1)


@pytest.mark.parametrize("args", [[], ["tides", 2]])
async def test_a_fork_with_arguments_that_the_workflow_does_not_take_is_a_misuse(
    machine: Machine, args: list[Any]
) -> None:
    app = await done_agent(machine)
    with pytest.raises(Misuse, match="args= is the list of all arguments of the workflow"):
        await app.fork("r", at=1, args=args, allow_effects=True)


@pytest.mark.parametrize("allowed", [[5], [["pay"]], ["pay", None]])
async def test_what_a_fork_may_do_once_more_is_named_by_texts(machine: Machine, allowed: list[Any]) -> None:
    app = await done_agent(machine)
    with pytest.raises(Misuse, match="allow_effects"):
        await app.fork("r", at=1, allow_effects=allowed)
