"""A key whose effect is being undone: nobody shares the outcome, nobody does the action again, until that has ended."""

import asyncio
import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import everstep
from everstep import Fatal, step, workflow
from everstep.cli import main
from everstep.engine.app.app import App
from everstep.errors import KeyConflict, RunCancelled, RunHeld
from everstep.stores.protocol import Append, Operation
from tests.engine.resume_helpers import Gate, Machine, run_program
from tests.worlds.judging import sound
from tests.worlds.ledger import FAILS, GATES, NOTES, pass_gate

K = "invoice:7"


@step(effect="once")
async def refund(receipt: str, invoice: int) -> None:
    await pass_gate("refund")
    if FAILS:
        raise FAILS.pop(0)
    NOTES.append(f"refund {receipt}")


@step(effect="once", key="invoice:{invoice}", compensate=refund)
async def charge(invoice: int) -> str:
    await pass_gate("charge")
    NOTES.append(f"charge by {everstep.current().run}")
    return f"receipt of {everstep.current().run}"


@step
async def unbook(room: str) -> None:
    await pass_gate("unbook")
    NOTES.append("unbook")


@step(compensate=unbook)
async def book() -> str:
    return "room"


@workflow(name="undoing_selling")
async def selling(invoice: int, fails: bool) -> str:
    receipt = await charge(invoice)
    await book()  # it is undone before the charge is
    if fails:
        raise LookupError("out of stock")
    return f"{receipt}, {await everstep.receive('go', str)}"


@workflow(name="undoing_buying")
async def buying(invoice: int) -> str:
    return await charge(invoice)


@workflow(name="undoing_in_parts")
async def in_parts(invoice: int, part: int) -> str:
    if part == 1:
        await charge(invoice)
        everstep.continue_as(invoice, 2)
    await everstep.receive("go", str)
    raise LookupError("out of stock")


def state(machine: Machine) -> str:
    row = machine.store.effect(K)
    return row.state if row is not None else ""


async def fail(machine: Machine, app: App) -> None:
    await app.start(selling, 7, True, id="a")


async def roll_back(machine: Machine, app: App) -> None:
    await app.start(selling, 7, False, id="a")
    await machine.until_status("a", "waiting")
    await app.rollback("a")


async def roll_back_an_ended_run(machine: Machine, app: App) -> None:
    run = await app.start(selling, 7, False, id="a")
    await run.signal("go", "x")
    assert await run.result(timeout=60) == "receipt of a, x"
    await app.rollback("a")


async def roll_back_a_held_run(machine: Machine, app: App) -> None:
    await app.start(selling, 7, False, id="a")
    await machine.until_status("a", "waiting")
    await app.hold("a", note="look")
    await machine.until_status("a", "held")
    await app.resolve("a", "rollback")


async def fail_in_a_later_history(machine: Machine, app: App) -> None:
    run = await app.start(in_parts, 7, 1, id="a")
    await machine.until(lambda: machine.row("a").generation == 2)
    await run.signal("go", "x")


WAYS = [fail, roll_back, roll_back_an_ended_run, roll_back_a_held_run, fail_in_a_later_history]


@pytest.mark.parametrize("at", ["unbook", "refund"])
@pytest.mark.parametrize("begin", WAYS)
async def test_whoever_asks_while_it_is_undone_waits_and_then_does_it_anew(
    machine: Machine, begin: Any, at: str
) -> None:
    at = "refund" if begin is fail_in_a_later_history else at
    GATES[at] = Gate()
    app = await machine.boot(recover=True)
    await begin(machine, app)
    await asyncio.wait_for(GATES[at].reached.wait(), 60)
    assert state(machine) == "undoing"
    other = await app.start(buying, 7, id="b")
    await machine.until_status("b", "waiting")
    assert machine.store.waiters(K) == [("b", 1)]
    assert "step_shared" not in machine.kinds("b")
    assert machine.bodies("b", "key_taken")[0].run == "a"
    with pytest.raises(KeyConflict, match="is being undone"):
        await app.free_key(K)
    GATES[at].opened.set()
    assert await other.result(timeout=60) == "receipt of b"
    assert [note for note in NOTES if note != "unbook"] == ["charge by a", "refund receipt of a", "charge by b"]
    await machine.until_status("a", "failed", "cancelled")
    assert state(machine) == "done"
    sound(machine, "b")


@pytest.mark.parametrize("begin", WAYS)
async def test_a_process_that_dies_while_it_undoes_leaves_the_key_as_it_is(machine: Machine, begin: Any) -> None:
    GATES["refund"] = Gate()
    app = await machine.boot(recover=True)
    await begin(machine, app)
    await asyncio.wait_for(GATES["refund"].reached.wait(), 60)
    await machine.kill(app)
    assert state(machine) == "undoing"
    again = await machine.boot(recover=True)
    other = await again.start(buying, 7, id="b")
    await machine.until_status("a", "held")  # whether the money went back, nobody knows
    await machine.until_status("b", "waiting")
    assert state(machine) == "undoing"
    await again.resolve("a", "done", value=None)
    assert await other.result(timeout=60) == "receipt of b"
    assert NOTES.count("charge by b") == 1
    sound(machine, "b")


@pytest.mark.parametrize("answer", ["retry", "skip", "cancel"])
async def test_a_compensation_that_failed_is_told_to_who_waits_and_its_answer_reaches_them(
    machine: Machine, answer: str
) -> None:
    FAILS.append(Fatal("the bank is closed"))
    app = await machine.boot()
    await fail(machine, app)
    await machine.until_status("a", "held")
    other = await app.start(buying, 7, id="b")
    await machine.until_status("b", "waiting")
    (wait,) = await shown(machine, "b")
    assert (wait["key"], wait["run"], wait["state"]) == (K, "a", "undoing")
    assert "the compensation of charge failed" in wait["held"]
    assert wait["command"].startswith("everstep show a")
    listed = await run_command(machine, "effects", "--state", "undoing", "--json")
    assert '"state":"undoing"' in listed.replace(" ", "")

    await app.resolve("a", answer, value=None)
    if answer == "retry":
        assert await other.result(timeout=60) == "receipt of b"
        assert NOTES == ["charge by a", "unbook", "refund receipt of a", "charge by b"]
    elif answer == "skip":
        assert await other.result(timeout=60) == "receipt of a", "it was left as it is, so its outcome counts again"
        assert NOTES == ["charge by a", "unbook"]
    else:
        await machine.until_status("a", "cancelled")
        assert (state(machine), machine.status("b")) == ("undoing", "waiting"), "nobody knows: a person has to say it"
        (wait,) = await shown(machine, "b")
        assert (wait["state"], "held" in wait) == ("in-doubt", False)
        await app.free_key(K, note="the bank has sent it back")
        assert await other.result(timeout=60) == "receipt of b"
    sound(machine, "b")


async def shown(machine: Machine, run: str) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = json.loads(await run_command(machine, "show", run, "--json"))["waits_for"]
    return facts


async def run_command(machine: Machine, *words: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, main, [*words, "--url", str(machine.path)])
    return result.output


@pytest.mark.parametrize("how", ["now", "by its hold"])
async def test_what_nobody_began_to_undo_is_shared_again_when_the_run_is_cut_off(machine: Machine, how: str) -> None:
    GATES["unbook"] = Gate()
    app = await machine.boot()
    await fail(machine, app)
    await asyncio.wait_for(GATES["unbook"].reached.wait(), 60)
    other = await app.start(buying, 7, id="b")
    await machine.until_status("b", "waiting")
    if how == "now":
        await app.cancel("a", now=True)
        GATES["unbook"].opened.set()
    else:
        await app.hold("a", note="look")
        GATES["unbook"].opened.set()
        await machine.until_status("a", "held")
        await app.resolve("a", "cancel")
    await machine.until_status("a", "cancelled")
    assert await other.result(timeout=60) == "receipt of a"
    assert not any(note.startswith("refund") for note in NOTES)
    assert state(machine) == "done"
    sound(machine, "b")


async def test_a_step_that_is_settled_after_the_rollback_was_asked_for_is_never_shared(machine: Machine) -> None:
    GATES["charge"] = Gate()
    app, run = await machine.start(selling, 7, False, id="a")
    await asyncio.wait_for(GATES["charge"].reached.wait(), 60)
    other = await app.start(buying, 7, id="b")
    await machine.until_status("b", "waiting")
    await app.rollback("a")
    await machine.until(lambda: "rollback_requested" in machine.kinds("a"))
    GATES["charge"].opened.set()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert await other.result(timeout=60) == "receipt of b"
    assert NOTES == ["charge by a", "refund receipt of a", "charge by b"]
    sound(machine, "b")


def has_shares(operations: Sequence[Operation]) -> bool:
    return any(isinstance(one, Append) and one.keys is not None and bool(one.keys.shares) for one in operations)


class HeldBack:
    """Holds back the first commit of an app in which an outcome is shared, until it is opened."""

    def __init__(self, app: App) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._commit = app.store.commit
        app.store.commit = self.commit  # type: ignore[method-assign]
        app.committer._seconds = 1.0  # such a disk is not waited for on the application's loop

    def commit(self, operations: Any, **how: bool) -> Any:
        if has_shares(operations):
            self.reached.set()
            assert self.opened.wait(60)
        return self._commit(operations, **how)


@pytest.mark.parametrize("then", ["undone", "left as it is"])
async def test_an_outcome_that_is_undone_between_the_look_at_it_and_the_commit_is_not_shared(
    machine: Machine, then: str
) -> None:
    """The code has not seen it, for it is given to the code when it is durable."""
    seen: list[str] = []

    @workflow(name="undoing_and_more")
    async def buying_more(invoice: int) -> list[Any]:
        async def buy() -> str:
            seen.append(receipt := await charge(invoice))
            return receipt

        return await asyncio.gather(buy(), book())

    first, second = await machine.boot(), await machine.boot()
    owner = await first.start(selling, 7, False, id="a")
    await machine.until_status("a", "waiting")
    slow = HeldBack(second)
    other = await second.start(buying_more, 7, id="b")
    await asyncio.to_thread(slow.reached.wait, 60)
    GATES["refund"] = Gate()
    if then == "left as it is":
        FAILS.append(Fatal("the bank is closed"))
    await first.rollback("a")
    await asyncio.wait_for(GATES["refund"].reached.wait(), 60)
    slow.opened.set()
    await machine.until(lambda: machine.store.waiters(K))
    assert (seen, state(machine)) == ([], "undoing")
    assert "step_shared" not in machine.kinds("b")
    GATES["refund"].opened.set()
    if then == "left as it is":
        with pytest.raises(RunHeld):
            await owner.result(timeout=60)
        await first.resolve("a", "skip", value=None)
    receipt = "receipt of a" if then == "left as it is" else "receipt of b"
    assert await other.result(timeout=60) == [receipt, "room"]
    assert seen == [receipt]
    assert NOTES.count("charge by b") == (then == "undone")
    sound(machine, "b")


async def test_what_an_earlier_release_began_to_undo_is_not_shared_any_more(machine: Machine) -> None:
    """Its histories do not mark the key; whoever goes on with the run does."""
    GATES["refund"] = Gate()
    app = await machine.boot()
    await fail(machine, app)
    await asyncio.wait_for(GATES["refund"].reached.wait(), 60)
    await machine.kill(app)
    machine.sql("UPDATE effects SET state = 'done', call = 1")
    worker = await machine.worker()
    await machine.until_status("a", "held")
    assert state(machine) == "undoing"
    await worker.resolve("a", "not-done")
    GATES["refund"].opened.set()
    await machine.until(lambda: state(machine) == "free")


# -- real processes ----------------------------------------------------------------------------------------------------
CODE = """
    ACCOUNT = sys.argv[2]

    def note(text):
        with open(ACCOUNT, "a") as stream:
            stream.write(text + "\\n")

    def know(key, *args):
        done = open(ACCOUNT).read().split()
        return everstep.Done(f"receipt-{key}") if f"charge:{key}" in done else everstep.NotDone()

    def know_refund(key, *args):
        return everstep.Done(None) if f"refund:{key}" in open(ACCOUNT).read().split() else everstep.NotDone()

    WAITS = asyncio.Event()

    @step(effect="once", probe=know_refund)
    async def refund(receipt, invoice):
        await WAITS.wait()
        note(f"refund:{everstep.key()} of:{receipt}")

    @step(effect="once", key="invoice:{invoice}", probe=know, compensate=refund)
    async def charge(invoice):
        note(f"charge:{everstep.key()}")
        return f"receipt-{everstep.key()}"

    @workflow
    async def failing(invoice):
        await charge(invoice)
        raise LookupError("out of stock")

    @workflow
    async def buying(invoice):
        return await charge(invoice)

    async def main():
        async with everstep.open(URL, recover=True) as app:
            a = await app.start(failing, 7, id="a")
            while "compensation_started" not in [event.kind for event in await a.history()]:
                await asyncio.sleep(0.005)
            b = await app.start(buying, 7, id="b")
            while "key_taken" not in [event.kind for event in await b.history()]:
                await asyncio.sleep(0.005)
            WAITS.set()
            print(await b.result(timeout=60))

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    "point",
    ["compensation.begin:1", "key.woken:1", "run.end:1"]
    + [f"{name}:{number}" for name in ("store.commit.written", "unit.durable") for number in (2, 3, 4, 5, 6)],
)
def test_killed_at_any_point_between_the_money_goes_back_once_and_is_taken_once_more(
    tmp_path: Path, point: str
) -> None:
    account = tmp_path / "account"
    account.touch()
    killed, _ = run_program(tmp_path, CODE, str(account), environment={"EVERSTEP_CRASH_AT": point})
    assert killed == -signal.SIGKILL
    status, out = run_program(tmp_path, CODE, str(account))
    assert status == 0
    lines = account.read_text().split()
    charges = [one.partition(":")[2] for one in lines if one.startswith("charge")]
    refunds = [one.partition(":receipt-")[2] for one in lines if one.startswith("of")]
    assert len(set(charges)) == len(charges) == 2, "each is another action to its receiver"
    assert refunds == charges[:1]
    assert out.split()[-1] == f"receipt-{charges[1]}"
    assert lines.index(f"charge:{charges[1]}") > lines.index(f"of:receipt-{charges[0]}")
