"""What the command line says about budgets, and how a person grants more."""

from everstep.model.budgets import Amounts, Charge, Limits
from everstep.view.money import amounts_text, dollars
from tests.cli.conftest import Folder

PROGRAM = """
import everstep
from everstep import Budget, step, workflow

@step(effect="read", cost={"usd": 0.5, "tokens": 100})
async def ask(number: int) -> int:
    everstep.charge(usd=0.3, tokens=1050)
    return number

@step(effect="read", cost={"usd": 0.5}, fallback=0)
async def dear(number: int) -> int:
    raise AssertionError

@workflow(budget=Budget(usd=1, steps=100, seconds=3600))
async def agent(count: int) -> int:
    return sum([await ask(number) for number in range(count)])

@workflow(budget=Budget(usd=0.1, then="fallback"))
async def modest() -> int:
    return await dear(7)

@workflow
async def unlimited() -> int:
    return await ask(1)
"""


def test_a_run_that_is_held_for_its_budget_shows_what_was_used_and_is_granted_more(folder: Folder) -> None:
    folder.file("spend.py", PROGRAM)
    held = folder.everstep("run", "spend.py:agent", "4", "--id", "a-1")
    assert held.status == 3
    assert "ask#3: no room in the budget (usd), it is not begun" in held.err
    listed = folder.everstep("ls")
    assert "$0.60 of $1.00 · 2,100 tokens · 2 of" in listed.out
    shown = folder.everstep("show", "a-1").out
    assert "budget $0.60 of $1.00 · 2,100 tokens · 2 of 100 steps" in shown
    assert "no room in the budget (usd)" in shown
    assert "$0.30 1,050 tokens" in shown
    holds = folder.everstep("holds").out
    assert "used: usd 0.6; tokens 2,100; steps 2" in holds
    assert "by step: ask usd 0.6, tokens 2,100, steps 2" in holds
    assert "grant the same budget once more, and continue" in holds
    facts = folder.json("show", "a-1")
    assert facts["budget"]["used"] == {"usd": 0.6, "tokens": 2100, "steps": 2}
    assert facts["budget"]["limits"] == {"usd": 1.0, "steps": 100, "seconds": 3600.0}
    assert facts["used_by_step"] == {"ask": {"usd": 0.6, "tokens": 2100, "steps": 2}}
    assert folder.json("resolve", "a-1", "--accept", "--note", "worth it")["status"] == "queued"
    done = folder.everstep("run", "spend.py:agent", "4", "--id", "a-1")
    assert (done.status, done.out.strip()) == (0, "6")
    assert "there is room in the budget; attempt 1" in done.err
    history = folder.everstep("history", "a-1").out
    assert "granted=$1.00 100 steps 1 h" in history
    assert "cost=$0.50 100 tokens" in history
    assert folder.json("ls")[0]["budget"]["granted"] == {"usd": 1.0, "steps": 100}


def test_a_fallback_for_want_of_budget_is_shown_as_such(folder: Folder) -> None:
    folder.file("spend.py", PROGRAM)
    done = folder.everstep("run", "spend.py:modest", "--id", "m-1")
    assert (done.status, done.out.strip()) == (0, "0")
    assert "dear: no room in the budget (usd), its fallback takes over" in done.err
    assert "no room in the budget (usd); by its fallback" in folder.everstep("show", "m-1").out


def test_without_a_budget_what_was_used_is_shown_as_well(folder: Folder) -> None:
    folder.file("spend.py", PROGRAM)
    assert folder.everstep("run", "spend.py:unlimited", "--id", "u-1").status == 0
    assert "used $0.30 1,050 tokens 1 step" in folder.everstep("show", "u-1").out
    facts = folder.json("show", "u-1")
    assert (facts["budget"], facts["used"]["usd"]) == (None, 0.3)


def test_amounts_are_said_as_people_say_them() -> None:
    assert [dollars(one) for one in (0, 1, 20_000, 1_200_000, 1_234_567_890_000)] == [
        "$0.00",
        "$0.000001",
        "$0.02",
        "$1.20",
        "$1,234,567.89",
    ]
    assert amounts_text(Amounts(20_000, 900, 1)) == "$0.02 900 tokens 1 step"
    assert amounts_text(Limits(steps=3, seconds=90.0)) == "3 steps 1 min 30 s"
    assert amounts_text(Charge()) == "nothing"
    assert amounts_text({"microdollars": 500_000, "then": "hold"}) == "$0.50"
