"""Budgets for people: what was used, and of how much."""

from collections.abc import Mapping
from typing import Any

import msgspec

from everstep.model.accounts import as_facts
from everstep.model.budgets import MICRO, Amounts, Charge, Limits, Standing
from everstep.stores.protocol import RunRow
from everstep.view.words import duration


def standing_of(row: RunRow) -> Standing | None:
    """Return the state of a run's budget, or None."""
    try:
        return msgspec.json.decode(row.budget, type=Standing) if row.budget is not None else None
    except msgspec.MsgspecError:
        return None


def budget_facts(row: RunRow) -> dict[str, Any] | None:
    """Return the state of a run's budget for `--json`; None if it has none."""
    standing = standing_of(row)
    if standing is None:
        return None
    facts: dict[str, Any] = {name: as_facts(getattr(standing, name)) for name in ("used", "reserved", "limits")}
    return facts | {"granted": as_facts(standing.granted), "then": standing.then, "until": standing.until}


def budget_text(standing: Standing, row: RunRow, now: int) -> str:
    """Return the state of a budget in words: `$1.20 of $5.00 · 12 of 100 steps`."""
    parts = []
    for measure in ("microdollars", "tokens", "steps"):
        used, limit = getattr(standing.used, measure), getattr(standing.limits, measure)
        if used or limit is not None:
            parts.append(_of(_amount(measure, used), None if limit is None else _amount(measure, limit, is_limit=True)))
    if standing.until is not None and standing.limits.seconds is not None:
        passed = duration(((row.ended_at or now) - row.created_at) / MICRO)
        parts.append(f"{passed} of {duration((standing.until - row.created_at) / MICRO)}")
    if standing.reserved:
        parts.append(f"{amounts_text(standing.reserved)} reserved")
    return " · ".join(parts)


def _of(used: str, limit: str | None) -> str:
    return used if limit is None else f"{used.partition(' ')[0]} of {limit}"


def _amount(measure: str, amount: int, *, is_limit: bool = False) -> str:
    if measure == "microdollars":
        return dollars(amount)
    return f"{amount:,} {measure}" if amount != 1 or is_limit else f"1 {measure.removesuffix('s')}"


def dollars(microdollars: int) -> str:
    """Return an amount of money: two digits after the point, or as many as it has."""
    whole, rest = divmod(microdollars, MICRO)
    digits = f"{rest:06}".rstrip("0").ljust(2, "0")
    return f"${whole:,}.{digits}"


def amounts_text(amounts: Amounts | Charge | Limits | Mapping[str, Any]) -> str:
    """Return amounts in words: `$0.02 900 tokens`. They may come from a body's JSON."""
    known = amounts if isinstance(amounts, Mapping) else msgspec.to_builtins(amounts)
    parts = [_amount(one, known[one]) for one in ("microdollars", "tokens", "steps") if isinstance(known.get(one), int)]
    if isinstance(known.get("seconds"), int | float):
        parts.append(duration(float(known["seconds"])))
    return " ".join(parts) or "nothing"
