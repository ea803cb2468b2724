"""Holds: each reason, what it says, what resolves it, and that nothing but the hold is written."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import everstep
from everstep import Fatal, Retry, step, workflow
from everstep.engine.run.holds import CONSEQUENCES
from everstep.errors import Damaged, HoldConflict, RunCancelled, RunEnded, RunHeld, UnknownRun
from everstep.stores.protocol import HoldRow
from tests.engine.resume_helpers import Gate, Machine, Program
from tests.worlds.ledger import BROKEN, NOTES


@step(effect="read")
async def load(name: str) -> str:
    NOTES.append(name)
    return name * 20_000  # too large for an event


@workflow
async def reader() -> str:
    first = await load("a")
    second = await load("b")
    word = await everstep.receive("word", str)
    return first[:1] + second[:1] + word


# -- damage ------------------------------------------------------------------------------------------------------------
def flip(column: str, seq: int) -> str:
    return (
        f"UPDATE events SET {column} = CAST(substr({column}, 1, 8) || char(unicode(substr({column}, 9, 1)) + 1) || "
        f"substr({column}, 10) AS BLOB) WHERE run = 'r' AND seq = {seq}"
    )


ADD_A_ROW = (
    "INSERT INTO events SELECT run, generation, 7, kind, step, at, body, digest FROM events WHERE run = 'r' AND seq = 6"
)
DAMAGE: dict[str, tuple[list[str], int]] = {
    # name: (statements, the last event that can still be believed)
    "a byte of a body": ([flip("body", 3)], 2),
    "a byte of the first body": ([flip("body", 1)], 0),
    "a time": (["UPDATE events SET at = at + 1 WHERE run = 'r' AND seq = 3"], 2),
    "a kind": (["UPDATE events SET kind = 'step_failed' WHERE run = 'r' AND seq = 3"], 2),
    "an unknown kind": (["UPDATE events SET kind = 'step_complated' WHERE run = 'r' AND seq = 3"], 2),
    "a step's name": (["UPDATE events SET step = 'lead' WHERE run = 'r' AND seq = 2"], 1),
    "a digest": (["UPDATE events SET digest = zeroblob(16) WHERE run = 'r' AND seq = 4"], 3),
    "a number": (["UPDATE events SET seq = 40 WHERE run = 'r' AND seq = 4"], 3),
    "a deleted row": (["DELETE FROM events WHERE run = 'r' AND seq = 3"], 2),
    "a deleted first row": (["DELETE FROM events WHERE run = 'r' AND seq = 1"], 0),
    "a cut tail": (["DELETE FROM events WHERE run = 'r' AND seq >= 5"], 4),
    "no history at all": (["DELETE FROM events WHERE run = 'r'"], 0),
    "swapped rows": (
        [
            "UPDATE events SET seq = 99 WHERE run = 'r' AND seq = 2",
            "UPDATE events SET seq = 2 WHERE run = 'r' AND seq = 4",
            "UPDATE events SET seq = 4 WHERE run = 'r' AND seq = 99",
        ],
        1,
    ),
    "a row of another run": (
        [
            "DELETE FROM events WHERE run = 'r' AND seq = 3",
            "UPDATE events SET run = 'r' WHERE run = 'other' AND seq = 3",
        ],
        2,
    ),
    "an added row": (
        [ADD_A_ROW],
        6,
    ),
    "the head's number": (["UPDATE runs SET head_seq = 5 WHERE id = 'r'"], 6),
    "the head's digest": (["UPDATE runs SET head_digest = zeroblob(16) WHERE id = 'r'"], 6),
    "the generation": (["UPDATE runs SET generation = 2 WHERE id = 'r'"], 6),
    "the workflow in the row": (["UPDATE runs SET workflow = 'other_reader' WHERE id = 'r'"], 6),
    "a payload": (["UPDATE payloads SET value = x'7a0102' WHERE run = 'r'"], 2),
    "a deleted payload": (["DELETE FROM payloads WHERE run = 'r'"], 2),
    "another payload": (["UPDATE payloads SET value = CAST('r[1]' AS BLOB) WHERE run = 'r'"], 2),
}


@workflow
async def other_reader() -> str:
    first = await load("a")
    second = await load("b")
    word = await everstep.receive("word", str)
    return first[:1] + second[:1] + word


async def left_behind(machine: Machine) -> None:
    app, _ = await machine.start(reader, id="r")
    await app.start(reader, id="other")
    await machine.rest(app)
    await app.signal("other", "word", "x")
    await app.get("other").result()
    await machine.kill(app)
    NOTES.clear()
    assert machine.kinds("r") == [
        "run_started", "step_started", "step_completed", "step_started", "step_completed", "signal_awaited",
    ]  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
async def test_damage_is_found_before_anything_is_done_and_nothing_is_overwritten(machine: Machine, what: str) -> None:
    await left_behind(machine)
    statements, last_good = DAMAGE[what]
    for statement in statements:
        machine.sql(statement)
    sender = await machine.boot()
    await sender.signal("r", "word", "z")
    before = machine.dump()
    verification = await sender.get("r").verify()
    held: list[HoldRow] = []
    worker = await machine.worker(on_hold=held.append)
    await machine.until_status("r", "held")
    await machine.rest(worker)

    hold = machine.hold("r")
    assert (hold.reason, hold.resolutions) == ("damaged", ["retry", "repair"] if last_good else ["retry"])
    assert machine.report("r")["last_good"] == last_good
    assert held == [msgspec.structs.replace(hold, workflow="")]
    assert NOTES == []
    after = machine.dump()
    for table in ("events", "payloads", "signals", "followers"):
        assert after[table] == before[table], table
    for old, new in zip(before["runs"], after["runs"], strict=True):
        changed = {n for n, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
        assert changed <= {4, 8, 9, 10, 19}, "status, epoch, owner, wake-up and updated_at, and nothing else"
    assert not verification.sound
    if what not in ("the head's number", "the generation"):  # there the events themselves are whole
        assert verification.last_good == last_good

    with pytest.raises(RunHeld, match="damaged"):
        await worker.get("r").result()
    await worker.resolve("r", "retry")
    await machine.until(lambda: len(machine.store.holds(run="r", open_only=False)) == 2)
    await machine.until_status("r", "held")
    assert machine.dump()["events"] == before["events"]


async def test_a_repaired_history_goes_on(machine: Machine) -> None:
    await left_behind(machine)
    ((body,),) = [(event.body,) for event in machine.events("r") if event.seq == 3]
    machine.sql("UPDATE events SET body = ? WHERE run = 'r' AND seq = 3", body + b" ")
    worker = await machine.worker()
    await worker.signal("r", "word", "z")
    await machine.until_status("r", "held")
    machine.sql("UPDATE events SET body = ? WHERE run = 'r' AND seq = 3", body)
    await worker.resolve("r", "retry")
    assert await worker.get("r").result() == "abz"
    assert NOTES == []


@pytest.mark.parametrize("status", ["queued", "running", "waiting"])
async def test_a_row_that_says_unfinished_of_an_ended_history_is_damage(machine: Machine, status: str) -> None:
    await left_behind(machine)
    machine.sql("UPDATE runs SET status = ?, owner = NULL, wake_at = 1 WHERE id = 'other'", status)
    before = machine.dump()["events"]
    assert not (await (await machine.boot()).get("other").verify()).sound
    await machine.worker()
    await machine.until_status("other", "held")
    assert machine.hold("other").reason == "damaged"
    assert machine.dump()["events"] == before


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE runs SET status = 'failed' WHERE id = 'other'",
        "UPDATE runs SET outcome = CAST('[\"forged\"]' AS BLOB) WHERE id = 'other'",
        "UPDATE runs SET status = 'completed' WHERE id = 'r'",
    ],
)
async def test_an_edited_end_in_the_row_is_found_by_verify(machine: Machine, edit: str) -> None:
    await left_behind(machine)
    app = await machine.boot()
    assert (await app.get("other").verify()).sound
    assert (await app.get("r").verify()).sound
    machine.sql(edit)
    checked = [await app.get(run).verify() for run in ("r", "other")]
    assert [one.sound for one in checked].count(False) == 1


async def test_a_person_can_do_nothing_to_a_damaged_history_but_have_it_verified_again(machine: Machine) -> None:
    """Each verb finds the damage by itself, whoever comes first, and adds no event."""
    await left_behind(machine)
    machine.sql(flip("body", 3))
    events = machine.dump()["events"]
    app = await machine.boot()
    with pytest.raises(Damaged):
        await app.cancel("r", now=True)
    assert (machine.status("r"), machine.hold("r").reason) == ("held", "damaged")
    with pytest.raises(HoldConflict):
        await app.cancel("r")
    with pytest.raises(HoldConflict):
        await app.resolve("r", "cancel")
    assert machine.dump()["events"] == events


async def test_asking_to_hold_a_damaged_run_holds_it_as_damaged(machine: Machine) -> None:
    await left_behind(machine)
    machine.sql(flip("body", 3))
    events = machine.dump()["events"]
    app = await machine.boot()
    await app.hold("r", "look at it")
    assert machine.hold("r").reason == "damaged"
    assert machine.dump()["events"] == events


async def test_damage_during_another_hold_is_found_when_that_is_resolved(machine: Machine) -> None:
    await left_behind(machine)
    app = await machine.boot()
    await app.hold("r")
    machine.sql(flip("body", 3))
    events = machine.dump()["events"]
    with pytest.raises(Damaged):
        await app.resolve("r", "retry")
    assert machine.dump()["events"] == events
    assert machine.row("r").owner is None


# -- exhausted ---------------------------------------------------------------------------------------------------------
@step(retry=Retry(attempts=2, first=0.0, jitter=0.0, then="hold"))
async def flaky(name: str) -> str:
    NOTES.append(name)
    if "flaky" in BROKEN:
        raise OSError("down")
    return name.upper()


@workflow
async def uses_flaky() -> str:
    return await flaky("f") + "!"


async def exhausted(machine: Machine) -> Any:
    BROKEN.add("flaky")
    app, run = await machine.start(uses_flaky, id="r")
    with pytest.raises(RunHeld, match="exhausted") as caught:
        await run.result()
    assert caught.value.reason == "exhausted"
    hold = machine.hold("r")
    assert (hold.id, hold.step) == (caught.value.hold, "flaky")
    assert "OSError" in hold.summary
    assert hold.resolutions == ["retry", "skip", "cancel"]
    assert NOTES == ["f", "f"]
    return app


async def test_an_exhausted_step_gets_a_fresh_set_of_attempts_by_retry(machine: Machine) -> None:
    app = await exhausted(machine)
    await app.resolve("r", "retry", by="ann")
    await machine.until(lambda: len(machine.store.holds(run="r", open_only=False)) == 2)
    assert NOTES == ["f"] * 4
    BROKEN.clear()
    await app.resolve("r", "retry", by="ann")
    assert await app.get("r").result() == "F!"
    assert [body.because for body in machine.bodies("r", "step_started")] == ["", "retry", "person", "retry", "person"]
    assert [body.by for body in machine.bodies("r", "run_resolved")] == ["ann", "ann"]
    assert machine.replay("r").differences == []


async def test_an_exhausted_step_is_skipped_with_a_given_value(machine: Machine) -> None:
    app = await exhausted(machine)
    await machine.kill(app)
    other = await machine.boot()
    await other.resolve("r", "skip", value="by hand", note="ann did it")
    assert await other.get("r").result() == "by hand!"
    assert NOTES == ["f", "f"]
    assert machine.replay("r").differences == []


async def test_an_exhausted_run_is_cancelled_without_its_code(machine: Machine) -> None:
    app = await exhausted(machine)
    await app.resolve("r", "cancel")
    with pytest.raises(RunCancelled):
        await app.get("r").result()


async def test_skipping_fits_in_beside_an_outcome_that_the_code_had_not_seen(machine: Machine) -> None:
    """An expensive sibling had just ended when the run was held: its outcome is recorded and not applied."""

    @step
    async def slow() -> str:
        await asyncio.sleep(0.07)
        return "slow"

    @workflow
    async def flow() -> list[str]:
        async def chain() -> str:
            return await slow() + await load("c")

        first, second = await asyncio.gather(chain(), flaky("f"))
        return [first[:5], second]

    app = await machine.boot()
    deliver = everstep.engine.run.driver.Driver.deliver  # type: ignore[attr-defined]
    done: list[bool] = []

    def deliver_and_hold(self: Any, kind: str, step: str, body: Any, *, expensive: bool = False) -> None:
        deliver(self, kind, step, body, expensive=expensive)
        if expensive and not done:
            done.append(True)
            call = next(call for call in self.execution.steps.values() if call.step == "flaky")
            self.put_on_hold(everstep.engine.run.holds.exhausted_report(call, 2, OSError("down")))  # type: ignore[attr-defined]

    @step(name="flaky")
    async def hanging(name: str) -> str:
        await asyncio.Event().wait()
        return name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(everstep.engine.run.driver.Driver, "deliver", deliver_and_hold)  # type: ignore[attr-defined]
        patch.setitem(globals(), "flaky", hanging)
        run = await app.start(flow, id="r")
        with pytest.raises(RunHeld, match="exhausted"):
            await run.result()
        assert done
        await app.resolve("r", "skip", value="by hand")
        assert await run.result() == ["slowc", "by hand"]


async def test_fatal_is_never_held_as_exhausted(machine: Machine) -> None:
    @step(retry=Retry(attempts=3, then="hold"))
    async def hopeless() -> None:
        raise Fatal("no")

    @workflow
    async def flow() -> None:
        await hopeless()

    app = await machine.boot()
    with pytest.raises(Fatal):
        await app.run(flow, id="r")


# -- stuck -------------------------------------------------------------------------------------------------------------
async def test_code_that_waits_for_what_can_never_happen_is_held_as_stuck(machine: Machine) -> None:
    def declare(right: bool) -> Any:
        @workflow(name="stuck")
        async def stuck() -> str:
            await load("a")
            if not right:
                await asyncio.Event().wait()
            return "free"

        return stuck

    app, run = await machine.start(declare(False), id="r")
    with pytest.raises(RunHeld, match="stuck"):
        await run.result()
    assert "test_holds.py" in machine.report("r")["waiting_at"][0]
    await app.resolve("r", "retry")
    with pytest.raises(RunHeld, match="stuck"):
        await run.result()
    declare(True)
    await app.resolve("r", "retry")
    assert await run.result() == "free"
    assert NOTES == ["a"]


# -- asked -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("driven", ["here", "elsewhere", "nowhere"])
async def test_a_person_may_hold_a_run_wherever_it_is_driven(machine: Machine, driven: str) -> None:
    app, run = await machine.start(reader, id="r")
    await machine.rest(app)
    other = await machine.boot()
    if driven == "nowhere":
        await machine.kill(app)
        await other.hold("r", "audit", by="ann")
    else:
        await (app if driven == "here" else other).hold("r", "audit", by="ann")
    await machine.until_status("r", "held")
    assert machine.hold("r").summary == "audit"
    assert machine.report("r")["by"] == "ann"
    await other.signal("r", "word", "z")
    await other.resolve("r", "retry", by="bob", note="audited")
    assert await other.get("r").result() == "abz"
    assert machine.kinds("r", "run_") == ["run_started", "run_held", "run_resolved", "run_completed"]
    del run


async def test_a_held_run_does_nothing_not_even_when_its_timer_is_due(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        await asyncio.sleep(60)
        return "awake"

    app = await machine.worker()
    run = await app.start(flow, id="r")
    await machine.rest(app)
    await app.hold("r")
    await machine.until_status("r", "held")
    await machine.advance(1000)
    assert machine.status("r") == "held"
    assert "timer_fired" not in machine.kinds("r")
    await app.resolve("r", "retry")
    assert await run.result() == "awake"


async def test_holding_a_running_step_stops_its_body_and_it_is_begun_again_later(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        NOTES.append("slow")
        await gate.wait()
        return "done"

    @workflow
    async def flow() -> str:
        return await slow()

    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await app.hold("r")
    gate.opened.set()
    await app.resolve("r", "retry")
    assert await run.result() == "done"
    assert NOTES == ["slow", "slow"]


async def test_a_run_that_has_ended_cannot_be_held(machine: Machine) -> None:
    @workflow
    async def flow() -> None:
        return None

    app = await machine.boot()
    await app.run(flow, id="r")
    with pytest.raises(RunEnded):
        await app.hold("r")
    with pytest.raises(UnknownRun):
        await app.hold("nobody")


async def test_a_hold_that_comes_while_the_run_ends_is_told_so(machine: Machine) -> None:
    gate = Gate()

    @step(effect="read")
    async def last() -> None:
        await gate.wait()

    @workflow
    async def flow() -> None:
        await last()

    app, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    driver = app.drivers["r"]
    gate.opened.set()
    await machine.until(lambda: driver.ending or driver.stopped)
    with pytest.raises(RunEnded):
        await app.hold("r")


async def test_a_held_run_cannot_be_held_again(machine: Machine) -> None:
    app, _ = await machine.start(reader, id="r")
    await machine.rest(app)
    await app.hold("r")
    await machine.until_status("r", "held")
    with pytest.raises(HoldConflict, match="held already"):
        await app.hold("r")


# -- resolving ---------------------------------------------------------------------------------------------------------
async def test_resolving_twice_an_unknown_hold_or_in_a_wrong_way_is_refused_with_the_list(machine: Machine) -> None:
    app, _ = await machine.start(reader, id="r")
    await machine.rest(app)
    await app.hold("r")
    await machine.until_status("r", "held")
    hold = machine.hold("r")
    with pytest.raises(HoldConflict, match=f"{hold.id}.*asked"):
        await app.resolve("r", "retry", hold="h000")
    for wrong in ("skip", "accept", "done", ""):
        with pytest.raises(HoldConflict, match=r"retry .*cancel "):
            await app.resolve("r", wrong)
    assert machine.status("r") == "held"
    await app.resolve("r", "retry", hold=hold.id)
    with pytest.raises(HoldConflict, match=rf"{hold.id} was resolved already \(retry\). Open: none"):
        await app.resolve("r", "retry", hold=hold.id)
    with pytest.raises(HoldConflict, match="0 open holds"):
        await app.resolve("r", "retry")
    with pytest.raises(UnknownRun):
        await app.resolve("nobody", "retry")


async def test_an_ambiguous_resolution_is_refused_with_the_list(machine: Machine) -> None:
    app, _ = await machine.start(reader, id="r")
    await machine.rest(app)
    await app.hold("r")
    await machine.until_status("r", "held")
    machine.sql(
        "INSERT INTO holds SELECT 'h2', run, 'stuck', step, summary, report, resolutions, created_at + 1, resolved_at, "
        "resolution, by, note FROM holds WHERE run = 'r'"
    )
    with pytest.raises(HoldConflict, match=r"2 open holds: .*\(asked\), h2 \(stuck\)"):
        await app.resolve("r", "retry")
    await app.resolve("r", "retry", hold="h2")


async def test_two_people_resolving_at_once_one_wins(machine: Machine) -> None:
    one, two = await machine.boot(), await machine.boot()
    await one.start(reader, id="r")
    await machine.rest(one)
    await one.hold("r")
    await machine.until_status("r", "held")
    answers = await asyncio.gather(
        one.resolve("r", "cancel", by="ann"), two.resolve("r", "retry", by="bob"), return_exceptions=True
    )
    assert [isinstance(answer, HoldConflict) for answer in answers].count(True) == 1
    assert machine.kinds("r").count("run_resolved") == 1
    (hold,) = machine.store.holds(run="r", open_only=False)
    winner = ("cancel", "ann") if isinstance(answers[1], HoldConflict) else ("retry", "bob")
    assert (hold.resolution, hold.by) == winner


def test_every_reason_names_its_resolutions_with_their_consequences() -> None:
    for reason, resolutions in CONSEQUENCES.items():
        assert resolutions, reason
        assert all(resolutions.values())


async def test_on_hold_is_called_once_and_its_own_failure_hurts_nobody(machine: Machine) -> None:
    held: list[str] = []

    def on_hold(hold: HoldRow) -> None:
        held.append(hold.reason)
        raise RuntimeError("pager is down")

    app = await machine.boot(on_hold=on_hold)
    run = await app.start(reader, id="r")
    await machine.rest(app)
    await app.hold("r")
    await machine.until(lambda: held)
    await app.resolve("r", "retry")
    await run.signal("word", "z")
    assert await run.result() == "abz"
    assert held == ["asked"]


# -- poisoned ----------------------------------------------------------------------------------------------------------
POISON = """
@step
async def die(how: str) -> None:
    if os.path.exists("cured"):
        return
    if how == "exit":
        os._exit(7)
    import ctypes
    ctypes.string_at(0)

@step
async def fine(number: int) -> int:
    await asyncio.sleep(0.02)
    return number

@workflow
async def poison(how: str) -> str:
    await fine(0)
    await die(how)
    return "cured"

@workflow
async def healthy(number: int) -> int:
    for _ in range(3):
        await fine(number)
    return number

async def main():
    async with everstep.open(URL, recover=True) as app:
        if sys.argv[2] == "first":
            for number in range(3):
                await app.start(healthy, number, id=f"healthy-{number}")
            await app.start(poison, sys.argv[3], id="poison")
        while app.store.counts().keys() & {"queued", "running", "waiting"}:
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["exit", "segfault"])
def test_a_run_that_kills_its_worker_again_and_again_is_held_and_the_others_finish(tmp_path: Path, how: str) -> None:
    deaths = 0
    for number in range(12):
        program = Program(tmp_path, POISON, "first" if number == 0 else "again", how)
        status, _, err = program.end()
        if status == 0:
            break
        assert status in (7, -11), err
        deaths += 1
    else:
        raise AssertionError("it is never held")
    machine = Machine(tmp_path)
    try:
        assert machine.status("poison") == "held"
        assert machine.hold("poison").reason == "poisoned"
        assert [machine.status(f"healthy-{number}") for number in range(3)] == ["completed"] * 3
        assert 3 <= deaths <= 5
        assert len(machine.store.holds()) == 1, "nobody else is blamed"
    finally:
        machine.store.close()


@step(effect="once")
async def send(gate: str) -> str:
    await GATES[gate].wait()
    return gate


@workflow
async def sends_twice() -> list[str]:
    return [await send("first"), await send("second")]


GATES: dict[str, Gate] = {}


async def test_a_hold_that_waits_for_a_body_is_not_lost_when_the_process_is_killed(machine: Machine) -> None:
    GATES.update(first=Gate(), second=Gate())
    app = await machine.boot(clock=None)
    await app.start(sends_twice, id="r")
    await GATES["first"].reached.wait()
    await app.hold("r", note="look at this")
    assert machine.status("r") == "running", "its body must not be cut off"
    await machine.kill(app)
    again = await machine.worker(clock=None)
    with pytest.raises(RunHeld):
        await again.get("r").result(timeout=60)
    assert machine.hold("r").reason == "asked", "it comes first, although a step is in doubt"
    assert machine.report("r")["consequences"].keys() >= {"retry"}
    GATES["second"].opened.set()
    await again.resolve("r", "retry")
    with pytest.raises(RunHeld):
        await again.get("r").result(timeout=60)
    assert machine.hold("r").reason == "in-doubt"
    assert not GATES["second"].reached.is_set()
    await again.resolve("r", "done", value="first")
    assert await again.get("r").result(timeout=60) == ["first", "second"]
    assert len(machine.bodies("r", "run_held")) == 2


@pytest.mark.parametrize("flow", ["begun", "fresh"])
async def test_a_hold_that_was_asked_while_no_process_lived_comes_before_any_body(machine: Machine, flow: str) -> None:
    """The open step may be repeated, or the next one is not even in the history."""
    GATES.update(first=Gate(), second=Gate())
    app = await machine.boot(clock=None)
    await app.start(repeats if flow == "begun" else receives_and_repeats, id="r")
    if flow == "begun":
        await GATES["first"].reached.wait()
    else:
        await machine.until_status("r", "waiting")
    await machine.kill(app)
    other = await machine.boot(clock=None, workflows=())
    if flow == "fresh":
        await other.signal("r", "go", 1)
    await other.hold("r", note="look at this")
    GATES["first"] = Gate()
    again = await machine.worker(clock=None)
    with pytest.raises(RunHeld):
        await again.get("r").result(timeout=60)
    assert machine.hold("r").reason == "asked"
    assert not GATES["first"].reached.is_set()
    GATES["first"].opened.set()
    await again.resolve("r", "retry")
    assert await again.get("r").result(timeout=60) == "first"


@step
async def post(gate: str) -> str:
    await GATES[gate].wait()
    return gate


@workflow
async def repeats() -> str:
    return await post("first")


@workflow
async def receives_and_repeats() -> str:
    await everstep.receive("go")
    return await post("first")


async def test_a_hold_that_waits_for_a_body_is_made_when_that_has_ended(machine: Machine) -> None:
    GATES.update(first=Gate(), second=Gate())
    run = await (app := await machine.boot(clock=None)).start(sends_twice, id="r")
    await GATES["first"].reached.wait()
    await app.hold("r", note="look at this")
    GATES["first"].opened.set()
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").reason == "asked"
    assert not GATES["second"].reached.is_set()
