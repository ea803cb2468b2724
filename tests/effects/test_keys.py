"""`key=`: one action, however many runs ask for it. Who does it, who waits, who shares, who conflicts."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

import everstep
from everstep import Fatal, Live, NotDone, Retry, step, workflow
from everstep.codec import Codec
from everstep.engine.app.app import App
from everstep.engine.process import host
from everstep.errors import KeyConflict, Misuse, RunCancelled, RunHeld
from everstep.stores.protocol import RunFilter
from everstep.stores.rows.keys import EffectRow
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine, declared, scenario

NOTES: list[str] = []
GATES: dict[str, Gate] = {}
ERRORS: list[BaseException] = []
"""What the next bodies of `charge` raise, one after the other."""
K = "invoice:7"


@pytest.fixture(autouse=True)
def nothing_noted() -> None:
    NOTES.clear()
    GATES.clear()
    ERRORS.clear()


async def perform(invoice: int, amount: int) -> str:
    run = everstep.current().run
    NOTES.append(f"{run} {everstep.key()}")
    if run in GATES:
        await GATES[run].wait()
    if ERRORS:
        raise ERRORS.pop(0)
    return f"paid {amount} by {run}"


charge = step(perform, name="charge", effect="once", key="invoice:{invoice}")
ship = step(perform, name="ship", effect="repeat", key="invoice:{invoice}")


@workflow
async def charging(invoice: int, amount: int = 5) -> str:
    return await charge(invoice, amount)


@workflow
async def shipping(invoice: int, amount: int = 5) -> str:
    return await ship(invoice, amount)


FLOWS = {"once": charging, "repeat": shipping}


def gate(run: str) -> Gate:
    GATES[run] = Gate()
    return GATES[run]


def runs_that_ran() -> list[str]:
    return [note.partition(" ")[0] for note in NOTES]


def keys_presented() -> set[str]:
    return {note.partition(" ")[2] for note in NOTES}


def effect(machine: Machine, key: str = K) -> EffectRow:
    row = machine.store.effect(key)
    assert row is not None
    return row


def arguments(flow: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args or ((7,) if declared(flow).signature.least else ())


async def begun(app: App, flow: Any, run: str, *args: Any) -> Any:
    """Start a run whose body waits at its gate, and wait until it is there."""
    there = gate(run)
    handle = await app.start(flow, *arguments(flow, args), id=run)
    await asyncio.wait_for(there.reached.wait(), 60)
    return handle


async def waiting(machine: Machine, app: App, flow: Any, run: str, *args: Any) -> Any:
    """Start a run that waits for a key, and wait until it rests."""
    handle = await app.start(flow, *arguments(flow, args), id=run)
    await machine.until(lambda: machine.store.run(run) is not None and machine.status(run) == "waiting")
    return handle


async def held(machine: Machine, run: Any) -> Any:
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    return machine.hold(run.id)


def sound(machine: Machine) -> None:
    """Every rule holds, and every history replays."""
    assert check(export_histories(machine.store), settled=False) == []
    for run in machine.store.runs(RunFilter(limit=1000)):
        assert not machine.replay(run.id).differences, run.id


# -- declaring ---------------------------------------------------------------------------------------------------------
async def plain(invoice: int, note: str = "") -> str:
    return ""


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("invoice:{number}", "no parameter number. It has: invoice, note"),
        ("invoice", "the same for all arguments"),
        ("invoice:{}", "name the parameters"),
        ("invoice:{0}", "name the parameters"),
        ("invoice:{invoice", "no format string"),
        (7, "is a int"),
        (plain, "is `async`"),
    ],
)
def test_a_key_that_can_never_be_right_is_refused_when_it_is_declared(key: Any, why: str) -> None:
    with pytest.raises(Misuse, match=why.replace("(", r"\(")):
        step(plain, effect="once", key=key)


def test_a_read_has_no_key() -> None:
    with pytest.raises(Misuse, match="a read changes nothing"):
        step(plain, effect="read", key="{invoice}")


class Nameless:
    """Its text is its address."""


class Bill:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize(
    ("value", "why"),
    [(None, "is None"), ("", "is ''"), (Nameless(), "its address"), ({1, 2}, "no order"), (frozenset(), "no order")],
)
def test_a_part_that_names_nothing_is_refused_in_the_workflow(value: Any, why: str) -> None:
    @step(key="thing:{thing}")
    async def do(thing: Live[Any], other: Any = None) -> None: ...

    @step(key="thing:{other}")
    async def do_other(thing: Live[Any], other: Any) -> None: ...

    maker = do_other.key  # type: ignore[attr-defined]
    arguments = Codec().encode_arguments(do_other.signature, (1, 2), {}, "x")  # type: ignore[attr-defined]
    with pytest.raises(Misuse, match=why):
        maker.make(do_other.signature, arguments._replace(args=(1, value)))  # type: ignore[attr-defined]
    with pytest.raises(Misuse, match="handed through"):
        do.key.make(do.signature, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", [7, "", "x" * 501, "a\nb", "\ud800"])
def test_what_is_no_key_is_refused_in_the_workflow_and_nothing_begins(made: Any) -> None:
    @step(key=lambda number: made)
    async def do(number: int) -> None:
        NOTES.append("begun")

    @workflow
    async def flow() -> None:
        await do(1)

    with pytest.raises(Misuse, match="The key of"):
        everstep.run(flow, url="memory:")
    assert NOTES == []


@scenario
async def test_a_key_is_made_from_the_bound_arguments(machine: Machine) -> None:
    def of(bill: dict[str, int], kind: str = "b") -> str:
        return f"fn:{kind}:{bill['id']}"

    @step(key="{kind}:{bill[id]:03}:{when.real}")
    async def by_text(bill: dict[str, int], kind: str = "a", *, when: int = 4) -> str:
        return ""

    @step(key=of)
    async def by_function(bill: dict[str, int], kind: str = "b") -> str:
        return ""

    class Shop:
        @step(key="shop:{amount}")
        async def sell(self, amount: Decimal) -> str:
            return ""

    @workflow
    async def flow() -> None:
        await by_text({"id": 7})
        await by_text(kind="c", bill={"id": 8}, when=5)
        await by_function({"id": 7}, kind="z")
        await Shop().sell(Decimal("1.50"))

    app = await machine.boot()
    await app.run(flow, id="r")
    made = [body.key for body in machine.bodies("r", "step_started")]
    assert made == ["a:007:4", "c:008:5", "fn:z:7", "shop:1.50"]
    sound(machine)


def test_a_step_with_a_key_inside_of_another_step_is_refused() -> None:
    @step
    async def outer() -> None:
        await ship(7, 5)

    @workflow
    async def flow() -> None:
        await outer()

    with pytest.raises(Misuse, match=r"has a key .* in the workflow"):
        everstep.run(flow, url="memory:")
    assert NOTES == []


# -- sharing -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("contract", FLOWS)
@scenario
async def test_a_second_run_gets_the_first_ones_outcome_and_does_not_run(machine: Machine, contract: str) -> None:
    app = await machine.boot()
    assert await app.run(FLOWS[contract], 7, id="a") == "paid 5 by a"
    assert await app.run(FLOWS[contract], 7, id="b") == "paid 5 by a"
    assert runs_that_ran() == ["a"]
    assert machine.kinds("b") == ["run_started", "key_taken", "step_shared", "run_completed"]
    (taken,), (shared,) = machine.bodies("b", "key_taken"), machine.bodies("b", "step_shared")
    assert (taken.key, taken.run, taken.generation, taken.seq) == (K, "a", 1, 2)
    assert (shared.run, shared.generation, shared.seq) == ("a", 1, 2)
    assert effect(machine).state == "done"
    sound(machine)


@scenario
async def test_what_is_shared_is_read_from_the_history_alone(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        first = await charge(7, 5)
        await everstep.receive("go")
        return [first, await charge(8, 5)]

    app = await machine.boot()
    await app.run(charging, 7, id="a")
    await waiting(machine, app, flow, "b")
    await machine.kill(app)
    machine.sql("DELETE FROM effects")
    app = await machine.boot()
    run = await app.start(flow, id="b")
    await run.signal("go")
    assert await run.result(timeout=60) == ["paid 5 by a", "paid 5 by b"]
    assert runs_that_ran() == ["a", "b"], "the first was not decided again"


@scenario
async def test_a_large_outcome_is_shared_whole(machine: Machine) -> None:
    @step(key="text:{number}")
    async def write(number: int) -> str:
        NOTES.append("written")
        return f"{number:05} " * 20_000

    @workflow
    async def flow(name: str) -> str:
        return await write(3)

    app = await machine.boot()
    first = await app.run(flow, "a", id="a")
    machine.sql("DELETE FROM payloads WHERE run = 'a'")
    assert await app.run(flow, "b", id="b") == first
    assert NOTES == ["written"]
    await machine.stop(app)
    app = await machine.boot()
    assert await app.get("b").result() == first
    assert not machine.replay("b").differences


@scenario
async def test_an_outcome_that_is_damaged_is_not_shared(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    machine.sql("UPDATE effects SET outcome = CAST('z' || 'nonsense' AS BLOB)")
    hold = await held(machine, await app.start(charging, 7, id="b"))
    assert hold.reason == "stuck"
    assert "cannot be believed" in hold.summary
    await app.free_key(K, note="it is gone")
    await app.resolve("b", "retry")
    assert await app.get("b").result(timeout=60) == "paid 5 by b"
    sound(machine)


@scenario
async def test_twenty_runs_at_once_do_it_once(machine: Machine) -> None:
    app = await machine.boot()
    first = gate("r0")
    runs = [await app.start(charging, 7, id=f"r{n}") for n in range(20)]
    await first.reached.wait()
    await machine.until(lambda: len(machine.store.waiters(K)) == 19)
    assert {machine.status(f"r{n}") for n in range(1, 20)} == {"waiting"}
    first.opened.set()
    assert {await run.result(timeout=60) for run in runs} == {"paid 5 by r0"}
    assert runs_that_ran() == ["r0"]
    sound(machine)


@scenario
async def test_steps_of_one_run_share_as_well(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        together = await asyncio.gather(charge(7, 5), charge(7, 5), charge(8, 5))
        return [*together, await charge(7, 5)]

    app = await machine.boot()
    assert await app.run(flow, id="a") == ["paid 5 by a"] * 4
    assert len(NOTES) == 2
    assert machine.kinds("a").count("step_shared") == 2
    sound(machine)


# -- waiting -----------------------------------------------------------------------------------------------------------
@scenario
async def test_who_waits_leaves_memory_and_is_woken(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESTING_MAX", 0)
    app = await machine.boot()
    first = await begun(app, charging, "a")
    second = await waiting(machine, app, charging, "b")
    await machine.until(lambda: "b" not in app.drivers)
    assert machine.row("b").wake_at is None
    GATES["a"].opened.set()
    assert await first.result(timeout=60) == await second.result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a"]
    sound(machine)


@pytest.mark.parametrize("order", ["owner first", "waiter first"])
@scenario
async def test_who_waits_goes_on_after_a_restart(machine: Machine, order: str) -> None:
    """In another process, and whether the key has changed meanwhile or changes later."""
    owner, other = await machine.boot(), await machine.boot()
    first = await begun(owner, charging, "a")
    await waiting(machine, other, charging, "b")
    await machine.kill(other)
    if order == "owner first":
        GATES["a"].opened.set()
        await first.result(timeout=60)
        assert len(machine.store.inbox("b")) == 1
    other = await machine.boot()
    second = await other.start(charging, 7, id="b")
    if order == "waiter first":
        await machine.until_status("b", "waiting")
        GATES["a"].opened.set()
    assert await second.result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a"]
    sound(machine)


@scenario
async def test_when_both_processes_are_gone_both_runs_go_on(machine: Machine) -> None:
    app = await machine.boot()
    await begun(app, shipping, "a")
    await waiting(machine, app, shipping, "b")
    await machine.kill(app)
    GATES.clear()
    app = await machine.worker()
    await machine.until_status("a", "completed")
    await machine.advance(1)
    assert await app.get("b").result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a", "a"]
    assert len(keys_presented()) == 1
    assert [body.because for body in machine.bodies("a", "step_started")] == ["", "crash"]
    sound(machine)


@scenario
async def test_a_timer_that_was_due_before_the_key_changed_wins(machine: Machine) -> None:
    """Also if both are found after downtime."""

    @workflow
    async def patient(invoice: int) -> str:
        try:
            async with asyncio.timeout(10):
                return await charge(invoice, 5)
        except TimeoutError:
            return "too late"

    owner, other = await machine.boot(), await machine.boot()
    first = await begun(owner, charging, "a")
    await waiting(machine, other, patient, "b")
    await machine.kill(other)
    machine.clock.advance(60)
    GATES["a"].opened.set()
    await first.result(timeout=60)
    other = await machine.boot()
    second = await other.start(patient, 7, id="b")
    assert await second.result(timeout=60) == "too late"
    sound(machine)


# -- conflicts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["done", "under way"])
@scenario
async def test_other_arguments_are_a_conflict_and_a_replay_raises_it_again(machine: Machine, state: str) -> None:
    @workflow
    async def careful(invoice: int, amount: int) -> str:
        try:
            return await charge(invoice, amount)
        except KeyConflict as conflict:
            found = f"{conflict.key} is of {conflict.run}"
        await everstep.receive("go")
        return found

    app = await machine.boot()
    first = await begun(app, charging, "a")
    if state == "done":
        GATES["a"].opened.set()
        await first.result(timeout=60)
    await waiting(machine, app, careful, "b", 7, 99)
    await machine.kill(app)
    machine.sql("DELETE FROM effects")
    app = await machine.boot()
    run = await app.start(careful, 7, 99, id="b")
    await run.signal("go")
    assert await run.result(timeout=60) == f"{K} is of a"
    assert machine.kinds("b")[:3] == ["run_started", "key_taken", "step_failed"]
    assert runs_that_ran() == ["a"]


@scenario
async def test_another_step_is_a_conflict(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    with pytest.raises(KeyConflict, match="belongs to charge of run a, another step"):
        await app.run(shipping, 7, id="b")
    sound(machine)


@scenario
async def test_a_run_that_failed_with_a_conflict_is_retried(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    for _ in range(2):
        run = await app.start(charging, 7, 99, id="b", on_existing="retry")
        with pytest.raises(KeyConflict):
            await run.result(timeout=60)
    await app.free_key(K)
    await app.retry("b")
    assert await app.get("b").result(timeout=60) == "paid 99 by b"
    sound(machine)


# -- freed -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("contract", "error"),
    [("once", NotDone("no")), ("once", Fatal("no")), ("repeat", ValueError("no")), ("repeat", Fatal("no"))],
)
@scenario
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


@scenario
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


@scenario
async def test_while_it_is_tried_again_the_key_is_kept(machine: Machine) -> None:
    tried = step(perform, name="tried", effect="repeat", key="t:{invoice}", retry=Retry(attempts=3, first=60))

    @workflow
    async def flow(name: str) -> str:
        return await tried(7, 5)

    ERRORS.append(OSError("reset"))
    app = await machine.boot()
    first = await app.start(flow, "a", id="a")
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


@scenario
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


@scenario
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
@scenario
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


@scenario
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


# -- in doubt ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["done", "not-done"])
@scenario
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


@scenario
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
@scenario
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


@scenario
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


# -- cancelling who waits ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["cancel", "now", "timeout"])
@pytest.mark.parametrize("contract", FLOWS)
@scenario
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


# -- ended runs --------------------------------------------------------------------------------------------------------
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
@scenario
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


@scenario
async def test_a_damaged_run_that_is_restarted_gives_back_the_key_of_what_may_be_repeated(machine: Machine) -> None:
    worker, other = await damaged_with_its_key(machine, shipping)
    run = await worker.start(shipping, 7, id="a", on_existing="restart")
    assert await run.result(timeout=60) == await other.result(timeout=60)
    assert len(NOTES) == 2
    assert len(keys_presented()) == 1


@scenario
async def test_a_key_of_an_earlier_generation_with_other_arguments_is_a_conflict(machine: Machine) -> None:
    worker, _ = await damaged_with_its_key(machine, charging)
    run = await worker.start(charging, 7, 6, id="a", on_existing="restart")
    with pytest.raises(KeyConflict):
        await run.result(timeout=60)
    assert runs_that_ran() == ["a"]


@scenario
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
@scenario
async def test_a_retried_run_asks_for_its_key_again(machine: Machine, meanwhile: str) -> None:
    ERRORS.append(NotDone("no"))
    app = await machine.boot()
    run = await app.start(charging, 7, id="a")
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


@scenario
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


@scenario
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

    app = await machine.boot()
    run = await app.start(flow, id="a")
    with pytest.raises(ValueError, match="no"):
        await run.result(timeout=60)
    await app.retry("a")
    assert await run.result(timeout=60) == ["fine", "paid 5 by a"]
    assert [note for note in NOTES if note != "shaky"] == NOTES[1:2], "it was charged once"
    assert machine.kinds("a")[-3:] == ["key_taken", "step_shared", "run_completed"]
    assert not machine.replay("a").differences


# -- the key that bodies present ---------------------------------------------------------------------------------------
@scenario
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


@scenario
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


# -- changed code ------------------------------------------------------------------------------------------------------
PREFIX = {"now": "old"}
changing = step(perform, name="changing", effect="repeat", key=lambda invoice, amount: f"{PREFIX['now']}:{invoice}")


@workflow
async def changing_flow() -> str:
    paid = await changing(7, 5)
    await everstep.receive("go")
    return paid


@pytest.mark.parametrize("change", ["another key", "no key"])
@scenario
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


@scenario
async def test_a_step_that_was_begun_without_a_key_goes_on_without_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.boot()
    with monkeypatch.context() as patch:
        patch.setattr(changing, "key", None)
        await begun(app, changing_flow, "a")
        await machine.kill(app)
    GATES.clear()
    app = await machine.boot()
    run = await app.start(changing_flow, id="a")
    await run.signal("go")
    assert await run.result(timeout=60) == "paid 5 by a"
    assert len(keys_presented()) == 1, "the key of its first attempt"
    assert machine.store.effect("old:7") is None
    sound(machine)
