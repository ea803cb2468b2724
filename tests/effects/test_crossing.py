"""A retry goes back to what failed. A `once` step that happened after that is neither forgotten nor done again."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import NotDone, step, workflow
from everstep.errors import CompensationBegun, CrossesOnce, Uncompensated
from everstep.stores.rows.keys import EffectFilter
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import failed
from tests.worlds.ledger import BROKEN, PAID


@step
async def load(name: str) -> str:
    if name in BROKEN:
        raise ValueError(name)
    return name


@step(effect="once")
async def pay(what: str) -> str:
    PAID.append((what, everstep.key()))
    if what in BROKEN:
        raise NotDone(what)
    return f"{what} {len(PAID)}"


def paid() -> list[str]:
    return [what for what, _ in PAID]


async def sound(machine: Machine) -> bool:
    await machine.rest()
    assert not machine.replay("r").differences
    assert list(check(export_histories(machine.store), settled=False)) == []
    return True


@workflow
async def refunding() -> str:
    try:
        value = await load("a")
    except ValueError:
        await pay("refund")
        raise
    return value + await pay("fee")


async def test_a_retry_over_a_payment_that_was_made_after_the_failure_is_refused(machine: Machine) -> None:
    app = await failed(machine, refunding, "a")
    BROKEN.clear()
    before = machine.dump()
    for attempt in range(2):
        with pytest.raises(CrossesOnce, match=r"of r would go back over .*: pay \(event 5\)") as caught:
            await (app.retry("r") if attempt else app.start(refunding, id="r", on_existing="retry"))
        assert [(one.run, one.step, one.seq) for one in caught.value.crossed] == [("r", "pay", 5)]
    assert machine.dump() == before, "nothing was changed"
    assert paid() == ["refund"]


async def test_what_somebody_allows_is_recorded_and_goes_on(machine: Machine) -> None:
    app = await failed(machine, refunding, "a")
    BROKEN.clear()
    await app.retry("r", by="ann", across_once=True)
    assert await app.get("r").result(timeout=60) == "afee 2"
    assert paid() == ["refund", "fee"]
    (retried,) = machine.bodies("r", "run_retried")
    assert (retried.by, retried.crossed) == ("ann", [5])
    assert await sound(machine)


async def test_if_the_code_comes_there_again_it_gets_the_outcome_and_does_not_pay_again(machine: Machine) -> None:
    app = await failed(machine, refunding, "a")
    await app.retry("r", across_once=True)
    with pytest.raises(ValueError, match="a"):
        await app.get("r").result(timeout=60)
    assert paid() == ["refund"], "the same failure, the same handler, and no second refund"
    (kept,) = [body for body in machine.bodies("r", "step_started") if body.because == "kept"]
    assert kept.attempt == 1
    assert machine.bodies("r", "step_completed")[-1].adopted
    assert await sound(machine)
    with pytest.raises(ValueError, match="a"):  # what was kept was not done here, so nothing is crossed by this
        await app.run(refunding, id="r", on_existing="retry")
    assert paid() == ["refund"], "nor a third one"
    BROKEN.clear()
    assert await app.run(refunding, id="r", on_existing="retry") == "afee 2"
    assert await sound(machine)


async def test_a_chain_beside_the_failure_goes_on_and_is_paid_once(machine: Machine) -> None:
    """Both chains run at once; the second pays again after the first has failed."""
    gate = Gate()

    @step(effect="once")
    async def pay_slowly(what: str) -> str:
        PAID.append((what, everstep.key()))
        await gate.wait()
        return what

    @workflow
    async def both() -> str:
        async def chain() -> str:
            return await pay_slowly("one") + await pay("two") + await pay("three")

        first, second = await asyncio.gather(load("a"), chain())
        return first + second

    BROKEN.add("a")
    app, run = await machine.start(both, id="r")
    await gate.reached.wait()
    await machine.until(lambda: "step_failed" in machine.kinds("r"))
    gate.opened.set()
    with pytest.raises(ValueError, match="a"):
        await run.result(timeout=60)
    assert paid() == ["one", "two", "three"], "a run ends when its payments are settled, and they went on"
    BROKEN.clear()
    with pytest.raises(CrossesOnce):
        await app.retry("r")
    await app.retry("r", across_once=True)
    assert await app.get("r").result(timeout=60) == "aonetwo 2three 3"
    assert paid() == ["one", "two", "three"]
    assert await sound(machine)


async def test_each_outcome_is_given_once_and_the_next_call_pays(machine: Machine) -> None:
    @workflow
    async def counting() -> list[str]:
        try:
            await load("a")
        except ValueError:
            await pay("same")
            raise
        return [await pay("same"), await pay("same"), await pay("other")]

    app = await failed(machine, counting, "a")
    BROKEN.clear()
    await app.retry("r", across_once=True)
    assert await app.get("r").result(timeout=60) == ["same 1", "same 2", "other 3"]
    assert paid() == ["same", "same", "other"]
    assert len({key for _, key in PAID}) == 3
    assert await sound(machine)


async def test_after_a_restart_what_was_given_is_not_given_again(machine: Machine) -> None:
    @workflow
    async def slowly() -> list[str]:
        try:
            await load("a")
        except ValueError:
            await pay("same")
            raise
        first = await pay("same")
        await everstep.receive("word", str)
        return [first, await pay("same")]

    app = await failed(machine, slowly, "a")
    BROKEN.clear()
    await app.retry("r", across_once=True)
    await machine.until_status("r", "waiting")
    await machine.kill(app)
    app = await machine.worker()
    await app.get("r").signal("word", "x")
    assert await app.get("r").result(timeout=60) == ["same 1", "same 2"]
    assert paid() == ["same", "same"], "the second is another payment, and is made"
    assert await sound(machine)


async def test_what_has_certainly_not_happened_is_no_reason_to_refuse(machine: Machine) -> None:
    @workflow
    async def trying() -> str:
        try:
            return await load("a")
        except ValueError as failure:
            try:
                await pay("never")
            except NotDone:
                pass
            raise failure

    app = await failed(machine, trying, "a", "never")
    BROKEN.clear()
    assert await app.run(trying, id="r", on_existing="retry") == "a"
    assert await sound(machine)


async def test_what_was_paid_before_the_failure_is_not_crossed(machine: Machine) -> None:
    @workflow
    async def orderly() -> str:
        return await pay("first") + await load("a")

    app = await failed(machine, orderly, "a")
    BROKEN.clear()
    assert await app.run(orderly, id="r", on_existing="retry") == "first 1a"
    assert paid() == ["first"]
    assert await sound(machine)


async def test_a_child_that_paid_after_the_failure_counts_as_well(machine: Machine) -> None:
    @workflow
    async def inner() -> str:
        return await pay("inner")

    @workflow
    async def middle() -> str:
        return await inner()

    @workflow
    async def outer() -> str:
        try:
            return await load("a")
        except ValueError:
            await middle()
            raise

    app = await failed(machine, outer, "a")
    BROKEN.clear()
    with pytest.raises(CrossesOnce, match=r"pay of r\.2\.1 \(event 3\)"):
        await app.retry("r")
    await app.retry("r", across_once=True)
    assert await app.get("r").result(timeout=60) == "a"
    assert paid() == ["inner"]


async def test_a_timed_out_run_whose_cleaning_up_has_paid(machine: Machine) -> None:
    @workflow(timeout=10)
    async def cleaning_up() -> str:
        try:
            return await everstep.receive("never", str)
        finally:
            await pay("cleaning")

    app, run = await machine.start(cleaning_up, id="r")
    await machine.rest(app)
    await machine.advance(11)
    with pytest.raises(everstep.errors.RunTimedOut):
        await run.result(timeout=60)
    with pytest.raises(CrossesOnce, match="pay"):
        await app.retry("r")
    await app.retry("r", across_once=True)
    await machine.rest(app)
    await run.signal("never", "now")
    assert await run.result(timeout=60) == "now"
    assert paid() == ["cleaning"], "it is asked for again, with the same arguments, and was done"
    assert await sound(machine)


AFTER_THE_RETRY = ["run_retried", "step_started", "step_failed", "step_started", "step_completed", "run_failed"]


@pytest.mark.parametrize("place", [0, 1, 2, 4])  # the kept step and its outcome, 3 and 4, are one unit
async def test_a_crash_at_any_event_after_the_retry_pays_nothing_twice(machine: Machine, place: int) -> None:
    """The history is cut after each event in turn, as a crash would, and the run goes on from there."""
    app = await failed(machine, refunding, "a")
    await app.retry("r", across_once=True)
    with pytest.raises(ValueError, match="a"):
        await app.get("r").result(timeout=60)
    await machine.stop(app)
    events = machine.events("r")
    assert [event.kind for event in events[-6:]] == AFTER_THE_RETRY
    last = events[-6 + place]
    machine.sql("DELETE FROM events WHERE run = 'r' AND seq > ?", last.seq)
    machine.sql(
        "UPDATE runs SET head_seq = ?, head_digest = ?, status = 'queued', owner = NULL, outcome = NULL, "
        "ended_at = NULL WHERE id = 'r'",
        last.seq,
        last.digest,
    )
    app = await machine.worker()
    with pytest.raises(ValueError, match="a"):
        await app.get("r").result(timeout=60)
    assert paid() == ["refund"]
    assert await sound(machine)


def test_the_command_line_refuses_with_the_list_and_goes_on_when_told(tmp_path: Any) -> None:
    from click.testing import CliRunner

    from everstep.cli import main as cli

    BROKEN.add("a")
    url = str(tmp_path / "runs.db")
    with pytest.raises(ValueError, match="a"):
        everstep.run(refunding, id="r", url=url)
    refused = CliRunner().invoke(cli, ["retry", "r", "--url", url])
    assert refused.exit_code == 2
    assert "pay (event 5)" in refused.stderr
    assert "everstep.run.crosses_once" in refused.stderr
    BROKEN.clear()
    assert CliRunner().invoke(cli, ["retry", "r", "--across-once", "--url", url]).exit_code == 0
    assert everstep.run(refunding, id="r", url=url) == "afee 2"


def test_the_checker_finds_a_retry_that_forgets_a_payment(tmp_path: Any) -> None:
    """The rule of the checker sees what the refusal prevents."""
    from everstep.engine.verbs import runs
    from everstep.stores.sqlite import SqliteStore

    BROKEN.add("a")
    url = str(tmp_path / "runs.db")
    with pytest.raises(ValueError, match="a"):
        everstep.run(refunding, id="r", url=url)
    BROKEN.clear()

    async def careless() -> None:
        async with everstep.open(url) as app:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runs, "effects_since", lambda *args: [])
                await app.retry("r")
            await app.get("r").result(timeout=60)

    asyncio.run(careless())
    store = SqliteStore(url)
    found = list(check(export_histories(store)))
    store.close()
    assert [violation.rule for violation in found] == ["L3"]
    assert "forgets pay (once)" in str(found[0])


# -- undoing, keys ---------------------------------------------------------------------------------------------------
async def refund(outcome: str, what: str) -> None:
    PAID.append((f"refund {what}", everstep.key()))


@step(effect="once", compensate=step(refund, name="crossing.refund", effect="once"))
async def pay_refundable(what: str) -> str:
    PAID.append((what, everstep.key()))
    return what


@workflow
async def cleaning_child() -> str:
    await pay_refundable("child's")
    return await load("child")


@workflow
async def undoing_with_child() -> str:
    try:
        return await load("a")
    except ValueError:
        try:
            await cleaning_child()
        except ValueError:
            pass
        raise


async def test_what_a_child_has_undone_itself_is_no_reason_to_refuse_and_happens_again(machine: Machine) -> None:
    app = await failed(machine, undoing_with_child, "a", "child")
    assert paid() == ["child's", "refund child's"]
    BROKEN.discard("child")
    with pytest.raises(ValueError, match="a"):
        await app.run(undoing_with_child, id="r", on_existing="retry")
    assert paid() == ["child's", "refund child's", "child's"], "a new child, and what was undone happened again"
    with pytest.raises(CrossesOnce, match="pay_refundable of r"):
        await app.retry("r")


@workflow
async def undone_after() -> str:
    try:
        return await load("a")
    except ValueError:
        await pay_refundable("fine")
        raise


async def test_a_run_that_has_undone_what_it_did_is_not_retried_whatever_is_allowed(machine: Machine) -> None:
    app = await failed(machine, undone_after, "a")
    assert paid() == ["fine", "refund fine"]
    BROKEN.clear()
    before = machine.dump()
    for across_once in (False, True):
        with pytest.raises(CompensationBegun):
            await app.retry("r", across_once=across_once)
    assert machine.dump() == before
    assert await app.run(undone_after, id="r", on_existing="restart") == "a"


@step(effect="once", key="crossing:{what}")
async def pay_keyed(what: str) -> str:
    PAID.append((what, everstep.key()))
    return f"{what} {len(PAID)}"


@workflow
async def keyed_after() -> str:
    try:
        value = await load("a")
    except ValueError:
        await pay_keyed("one")
        raise
    return value + await pay_keyed("one")


async def test_a_step_with_a_key_is_guarded_by_that_and_its_own_run_shares_it(machine: Machine) -> None:
    app = await failed(machine, keyed_after, "a")
    BROKEN.clear()
    assert await app.run(keyed_after, id="r", on_existing="retry") == "aone 1"
    assert paid() == ["one"]
    (effect,) = machine.store.effects(EffectFilter())
    assert (effect.key, effect.state, effect.run) == ("crossing:one", "done", "r"), "the key is still its own"
    assert "step_shared" in machine.kinds("r")
    assert await sound(machine)


@workflow
async def kept_then_waits() -> str:
    try:
        value = await load("a")
    except ValueError:
        value = "failed"
        await pay("refund")
        if "handler" in BROKEN:
            raise
    await meets(value)
    return await everstep.receive("word", str)


@step(compensate=lambda outcome, value: None)
async def meets(value: str) -> str:
    return value


async def test_a_kept_outcome_is_one_effect_for_a_rollback_before_and_after_it_is_given(machine: Machine) -> None:
    app = await failed(machine, kept_then_waits, "a", "handler")
    BROKEN.discard("handler")
    await app.retry("r", across_once=True)
    await machine.until_status("r", "waiting")
    assert paid() == ["refund"]
    with pytest.raises(Uncompensated) as refused:
        await app.rollback("r")
    assert refused.value.steps == ["pay"]
    await app.hold("r")
    assert "rollback" not in machine.hold("r").resolutions
    assert "leaves as they are: pay" in machine.report("r")["rollback"]


async def test_an_outcome_that_was_kept_and_never_asked_for_again_is_an_effect_still(machine: Machine) -> None:
    app = await failed(machine, kept_then_waits, "a", "handler")
    BROKEN.clear()
    await app.retry("r", across_once=True)
    await machine.until_status("r", "waiting")
    with pytest.raises(Uncompensated):
        await app.rollback("r")
    await app.hold("r")
    assert "rollback" not in machine.hold("r").resolutions
