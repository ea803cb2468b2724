"""The keys of effects (`@step(key=…)`): who has each, what came of it, and what a person's decision would mean."""

from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from everstep.codec import Codec
from everstep.engine.run.keys import shared_outcome
from everstep.errors import ChainKeyMissing, Damaged
from everstep.model.secrets import HIDDEN
from everstep.model.status import ENDED
from everstep.stores.protocol import Store
from everstep.stores.rows.keys import STATES, UNSETTLED, EffectFilter, EffectRow
from everstep.view.fields import made_of
from everstep.view.plain import payload_json

IN_DOUBT: Final = "in-doubt"
KEY_STATES: Final = (*STATES, IN_DOUBT)
PAGE: Final = 500
WILDCARDS: Final = "*?["
OUTCOME_CHARACTERS_MAX: Final = 120

CONSEQUENCES: Final[dict[str, str]] = {
    "free done": "the outcome no longer counts: the next step with this key does the action again, and its receiver "
    "sees another idempotency key",
    "free in doubt": "the next step with this key does the action, with the same idempotency key: a receiver that "
    "honours keys does it once, another one may do it twice",
    "free undoing": "the action counts as undone: the next step with this key does it again, and its receiver sees "
    "another idempotency key",
    "done undoing": "the action counts as done, and not undone: the value is the outcome of every step with this key "
    "and the same arguments; none of them runs",
    "done in doubt": "the value is the outcome of every step with this key and the same arguments; none of them runs",
}


class KeyView(msgspec.Struct, kw_only=True):
    """A key, and the run that has it."""

    key: str
    state: str
    """`in-doubt`: it is under way or undoing, and its run has ended without knowing."""
    step: str
    effect: str
    run: str
    generation: int
    seq: int
    run_status: str | None
    round: int
    begun_at: int
    changed_at: int
    by: str
    note: str
    outcome: Any
    waiting: list[str]
    """The runs that wait for it."""
    is_undoing: bool
    preview: str
    """Its outcome, or why there is none, in a line."""

    def consequence(self, decision: str) -> str:
        """Return what it would mean to free the key, or to say that its action was done."""
        if self.is_undoing:
            return CONSEQUENCES[f"{decision} undoing"]
        return CONSEQUENCES[f"{decision} {'done' if self.state == 'done' and decision == 'free' else 'in doubt'}"]


def key_views(
    store: Store, *, key: str | None, run: str | None, step: str | None, state: str | None, limit: int
) -> list[KeyView]:
    """Return keys, those that changed last first. `key` is how they begin, or a pattern."""
    pattern = key or ""
    places = [pattern.index(one) for one in WILDCARDS if one in pattern]
    prefix = pattern[: min(places)] if places else pattern
    stored: Any = None if state == IN_DOUBT else state
    found: list[KeyView] = []
    offset = 0
    while len(found) < limit:
        page = store.effects(EffectFilter(prefix=prefix, run=run, step=step, state=stored, limit=PAGE, offset=offset))
        for row in page:
            is_meant = not places or fnmatchcase(row.key, pattern)
            if is_meant and (state != IN_DOUBT or state_of(store, row) == IN_DOUBT) and len(found) < limit:
                found.append(key_view(store, row))
        offset += len(page)
        if len(page) < PAGE:
            break
    return found


def state_of(store: Store, row: EffectRow) -> str:
    """Return the state of a key; `in-doubt` if its run has ended, and only a person can say what came of it."""
    if row.state not in UNSETTLED:
        return row.state
    owner = store.run(row.run)
    is_gone = owner is None or owner.generation != row.generation or owner.status in ENDED
    return IN_DOUBT if is_gone else row.state


def key_view(store: Store, row: EffectRow) -> KeyView:
    """Return a key as it is now."""
    owner, payload, preview = store.run(row.run), None, row.note
    if row.outcome is not None:
        try:
            payload = shared_outcome(store.chain, row)
            preview = HIDDEN if row.secret else Codec().preview(payload, OUTCOME_CHARACTERS_MAX)
        except Damaged:
            preview = "damaged"
        except ChainKeyMissing:
            preview = "not verified: the chain key is missing"
    outcome = HIDDEN if row.secret else payload_json(payload or b"[null]")
    facts: dict[str, Any] = {"state": state_of(store, row), "run_status": owner.status if owner is not None else None}
    facts |= {"outcome": outcome if row.state == "done" else None, "is_undoing": row.state == "undoing"}
    facts |= {"waiting": [run for run, _ in store.waiters(row.key)]}
    return made_of(KeyView, row, preview=row.note if row.state == "undoing" else preview, **facts)
