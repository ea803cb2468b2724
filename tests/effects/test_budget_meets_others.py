"""Budgets with outcomes that a retry keeps, with secret steps and with chain keys."""

import logging
from typing import Any

import msgspec
import pytest

import everstep
from everstep import Budget, BudgetExceeded, step, workflow
from everstep.errors import RunHeld
from everstep.testing.checker import check, export_histories
from tests.damage.chained import KEY, booted
from tests.effects.shown import MARK, everything_shown, shown_to_programs
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Machine
from tests.worlds.judging import failed
from tests.worlds.ledger import BROKEN, PAID


def used(machine: Machine, run: str = "r") -> tuple[float, int]:
    """Return the dollars and attempts that the row says were used; its events, counted by themselves, say the same."""
    standing = msgspec.json.decode(machine.row(run).budget or b"{}")
    assert standing["reserved"] == {}
    usd, _, attempts = charged_in(machine.events(run))
    found = standing["used"].get("microdollars", 0) / 1_000_000, standing["used"].get("steps", 0)
    assert found == (usd, attempts)
    return found


async def judged(machine: Machine) -> None:
    await machine.rest()
    assert list(check(export_histories(machine.store), settled=False)) == []
    assert not machine.replay("r").differences


# -- what a retry goes back over ---------------------------------------------------------------------------------------
@step(cost={})
async def load_priced(name: str) -> str:
    if name in BROKEN:
        raise ValueError(name)
    return name


@step(effect="once", cost={"usd": 0.50})
async def refund(what: str) -> str:
    PAID.append(what)
    everstep.charge(usd=0.40)
    return f"{what} {len(PAID)}"


@workflow(name="budget_refunding", budget=Budget(usd=0.60, steps=3, then="fail"))
async def refunding() -> str:
    try:
        return await load_priced("a")
    except ValueError:
        await refund("x")
        everstep.publish("left", list(everstep.budget().left))
        raise


async def test_an_outcome_that_a_retry_keeps_costs_nothing_and_needs_no_room(machine: Machine) -> None:
    """There is neither the money nor a third attempt for another payment: the one that was made is paid for."""
    app = await failed(machine, refunding, "a")
    assert used(machine) == (0.40, 2)
    await app.retry("r", across_once=True)
    with pytest.raises(ValueError, match="a"):
        await app.get("r").result(timeout=60)
    assert PAID == ["x"]
    assert machine.bodies("r", "step_started")[-1].because == "kept"
    assert machine.bodies("r", "step_started")[-1].cost is None
    assert used(machine) == (0.40, 3), "the payment is counted once; the other step was tried again"
    left = msgspec.json.decode(machine.row("r").published or b"{}")["left"]
    assert left[0] == [0.2, None, 0, None], "what the code sees is the same"
    await judged(machine)
    await machine.kill(app)
    BROKEN.clear()
    second = await machine.boot()
    with pytest.raises(BudgetExceeded):
        await second.run(refunding, id="r", on_existing="retry")
    assert used(machine) == (0.40, 3)
    await judged(machine)


# -- secrets -----------------------------------------------------------------------------------------------------------
def priced(hint: str) -> dict[str, float]:
    if "price" in BROKEN:
        raise ValueError(f"no price for {hint}")
    return {"usd": 0.75}


@step(effect="read", secret=True, cost=priced)
async def buy_token(hint: str) -> str:
    everstep.charge(usd=0.71)
    return f"token {MARK}"


@workflow(name="budget_secretive", budget=Budget(usd=1))
async def secretive(count: int) -> int:
    return sum([len(await buy_token(f"{MARK}-hint")) for _ in range(count)])


@workflow(name="budget_secretive_fails", budget=Budget(usd=1, then="fail"))
async def secretive_fails(count: int) -> int:
    return sum([len(await buy_token(f"{MARK}-hint")) for _ in range(count)])


async def all_shown(machine: Machine, app: Any) -> str:
    return everything_shown(machine.path, "r") + await shown_to_programs(app, "r")


async def test_what_a_secret_step_costs_is_shown_and_what_it_is_given_is_not(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    app, run = await machine.start(secretive, 2, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    (withheld,) = machine.bodies("r", "call_withheld")
    assert (withheld.secret, withheld.preview) == (True, "")
    shown = await all_shown(machine, app) + caplog.text
    assert MARK not in shown
    assert "$0.71" in shown
    assert "no room in its budget for buy_token#2" in shown
    await app.resolve("r", "skip", value=f"{MARK} by hand")
    assert await run.result(timeout=60) == len(f"token {MARK}") + len(f"{MARK} by hand")
    assert MARK not in await all_shown(machine, app) + caplog.text
    assert used(machine) == (0.71, 1)
    await judged(machine)


async def test_at_the_limit_a_secret_step_fails_with_what_was_used(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(BudgetExceeded, match=r"0\.71 of 1 usd are used"):
        await app.run(secretive_fails, 2, id="r")
    shown = await all_shown(machine, app)
    assert MARK not in shown
    assert "0.71 of 1 usd are used" in shown
    await judged(machine)


async def test_an_estimate_of_a_secret_step_that_cannot_be_made_does_not_show_why(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    BROKEN.add("price")
    app = await machine.boot()
    with pytest.raises(ValueError, match=f"no price for {MARK}"):
        await app.run(secretive, 1, id="r")
    shown = await all_shown(machine, app) + caplog.text
    assert MARK not in shown
    assert "ValueError" in shown
    await judged(machine)


# -- chain keys --------------------------------------------------------------------------------------------------------
@step(effect="read", cost={"usd": 0.30})
async def ask_priced(number: int) -> int:
    everstep.charge(usd=0.20)
    return number


@workflow(name="budget_keyed_child", budget=Budget(usd=0.50))
async def keyed_asking(number: int) -> int:
    await everstep.receive("go", int)
    return await ask_priced(number)


@workflow(name="budget_keyed", budget=Budget(usd=1))
async def keyed_spending() -> int:
    return await ask_priced(1) + await keyed_asking(2)


async def test_under_a_chain_key_a_parent_pays_what_its_child_has_used(machine: Machine) -> None:
    app = await booted(machine, KEY)
    await app.start(keyed_spending, id="r")
    await machine.until_status("r.2", "waiting")
    await machine.kill(app)
    app = await booted(machine, KEY)
    run = await app.start(keyed_spending, id="r")
    await app.signal("r.2", "go", 1)
    assert await run.result(timeout=60) == 3
    assert used(machine, "r.2") == (0.20, 1)
    assert used(machine) == (0.40, 2)
    assert (await run.verify()).sound


async def test_nobody_without_the_key_can_grant_more(machine: Machine) -> None:
    app = await booted(machine, KEY)
    await app.start(keyed_spending, id="r")
    await machine.until_status("r.2", "waiting")
    await machine.stop(app)
    more = "REPLACE(CAST(budget AS TEXT), '500000', '900000')"
    machine.sql(f"UPDATE runs SET budget = CAST({more} AS BLOB) WHERE id = 'r.2'")
    app = await booted(machine, KEY)
    assert not (await app.get("r.2").verify()).sound
    assert (await app.get("r").verify()).sound
