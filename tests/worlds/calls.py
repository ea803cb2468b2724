"""What the tests of budgets share: calls with a price."""

import msgspec

import everstep
from everstep import step
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import NOTES


@step(effect="read", cost={"usd": 0.50, "tokens": 100}, fallback="a cheap answer")
async def ask(question: str) -> str:
    """Estimated at 50 cents, and costs 30."""
    NOTES.append(question)
    everstep.charge(usd=0.30, tokens=60)
    return f"about {question}"


@step(effect="read")
async def ask_unknown(question: str) -> str:
    """Without an estimate; costs 30 cents."""
    NOTES.append(question)
    everstep.charge(usd=0.30)
    return f"about {question}"


@step(cost={})
async def save(text: str) -> str:
    NOTES.append(f"saved {text}")
    return text


def used(machine: Machine, run: str) -> tuple[float, int, int]:
    """Return what the run's row says was used; the events must say the same."""
    row = msgspec.json.decode(machine.row(run).budget or b"{}")["used"]
    told = (row.get("microdollars", 0) / 1_000_000, row.get("tokens", 0), row.get("steps", 0))
    if machine.status(run) in ("completed", "failed", "cancelled"):
        assert told == charged_in(machine.events(run))
    return told
