"""Keys of effects: who has one, what an append may do about them, and the rules, which are the same in every store.

A key is in one of three states. `under-way`: the step that has it was begun and is not settled. `done`: it has an
outcome, which every other step with the key and the same arguments shares. `free`: the action was done and undone (or
freed by hand), so that it may be done again, in the next round; a key that was never done is not kept at all.

A step gets its key in the transaction of its `step_started`, and loses it or gives it an outcome in the transaction of
its own outcome. Whoever waits for a key is entered in the transaction of its `key_taken`, and told through its inbox
(kind `key`) in the transaction that changes the key. So neither side can miss the other, whoever crashes.
"""

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec

EffectState = Literal["under-way", "done", "free"]

STATES: Final[tuple[EffectState, ...]] = ("under-way", "done", "free")


class EffectRow(msgspec.Struct, kw_only=True, gc=False):
    """A key as the table `effects` has it. Run, generation, call and `seq` (of its `step_started`) name its owner."""

    key: str
    state: EffectState
    run: str
    generation: int
    call: int
    seq: int
    step: str
    """The step's name, without the `#2` of a second call in its run."""
    effect: str
    arguments: str
    """The arguments' digest."""
    round: int = 0
    """How often the key was freed after its action had been done."""
    begun_at: int = 0
    changed_at: int = 0
    by: str = ""
    """Who gave the outcome, or freed the key, by hand."""
    note: str = ""
    digest: str = ""
    outcome: bytes | None = None
    """The outcome's payload as it is stored, and its digest."""
    secret: bool = False
    """Whether the outcome is one that is never shown."""


class KeyClaim(msgspec.Struct, gc=False):
    """A step that begins, and so takes its key. The step that has it already may take it again."""

    key: str
    call: int
    seq: int
    step: str
    arguments: str
    effect: str
    round: int = 0
    secret: bool = False


class KeyEnd(msgspec.Struct, gc=False):
    """A step that has its key is settled: with an outcome, which is shared from now on, or without: the key is free.

    `undone`: it had been done and was compensated. From a step that no longer has the key this changes nothing, except
    that an outcome is kept if nobody else has the key: what was done is done.
    """

    claim: KeyClaim
    outcome: bytes | None = None
    digest: str = ""
    undone: bool = False
    generation: int = 0
    """The older generation of the run whose step it is; 0 for the one that says so."""


class KeyWait(msgspec.Struct, gc=False):
    """A step that waits until its key changes. If it is not under way, the step is told at once."""

    key: str
    call: int


class KeyChanges(msgspec.Struct, gc=False):
    """What one append does about keys: claims, then ends, then waits."""

    claims: list[KeyClaim] = []
    ends: list[KeyEnd] = []
    waits: list[KeyWait] = []


class SettleKey(msgspec.Struct, gc=False):
    """Decide about a key by hand: give it an outcome, or without one free it.

    `Refused("key")` while its owner may still settle it (a run that has not ended), and for an outcome when it has one.
    `Refused("missing")` if nobody has it.
    """

    key: str
    at: int
    outcome: bytes | None = None
    digest: str = ""
    by: str = ""
    note: str = ""


class ForgetKeys(msgspec.Struct, gc=False):
    """Delete keys that are done or free and have not changed since `before`, the oldest first. Verdict: `Forgotten`."""

    before: int
    limit: int = 1000


class Forgotten(msgspec.Struct, frozen=True):
    """So many keys were deleted."""

    keys: int


class EffectFilter(msgspec.Struct, kw_only=True):
    """Which keys to list: those that changed last come first."""

    prefix: str = ""
    run: str | None = None
    step: str | None = None
    state: EffectState | None = None
    limit: int = 100
    offset: int = 0


Owner = tuple[str, int, int]
"""Run, generation and call of a step."""


class KeyStore(Protocol):
    """The part of a store that tells about keys."""

    def effect(self, key: str) -> EffectRow | None:
        """Return who has a key, and its outcome."""
        ...

    def effects(self, filter: EffectFilter) -> list[EffectRow]:
        """Return keys, those that changed last first."""
        ...

    def old_keys(self, before: int) -> int:
        """Return how many keys `ForgetKeys` would delete."""
        ...

    def waiters(self, key: str) -> list[tuple[str, int]]:
        """Return who waits for a key: runs and their calls."""
        ...


def owner_of(row: EffectRow) -> Owner:
    """Return who has a key, or had it last."""
    return (row.run, row.generation, row.call)


def may_claim(row: EffectRow | None, claim: KeyClaim, owner: Owner) -> bool:
    """Tell whether a step may take a key: nobody has it, or it has it already. Its round must be the key's."""
    if row is None:
        return claim.round == 0
    if row.state == "free":
        return claim.round == row.round
    return row.state == "under-way" and owner_of(row) == owner


def claimed_row(claim: KeyClaim, owner: Owner, there: EffectRow | None, at: int) -> EffectRow:
    """Return a key's row after a claim."""
    run, generation, call = owner
    is_own = there is not None and there.state == "under-way"
    return EffectRow(
        key=claim.key,
        state="under-way",
        run=run,
        generation=generation,
        call=call,
        seq=claim.seq,
        step=claim.step,
        effect=claim.effect,
        arguments=claim.arguments,
        round=there.round if there is not None else claim.round,
        begun_at=there.begun_at if there is not None and is_own else at,
        changed_at=at,
        secret=claim.secret,
    )


def ends_key(row: EffectRow | None, end: KeyEnd, owner: Owner) -> bool:
    """Tell whether an end changes a key."""
    if row is None or row.state == "free":
        return end.outcome is not None
    return owner_of(row) == owner and row.state == ("done" if end.undone else "under-way")


def ended_row(row: EffectRow | None, end: KeyEnd, owner: Owner, at: int) -> EffectRow | None:
    """Return a key's row after its step was settled; None if nothing of it is kept."""
    if row is None or row.state == "free":
        row = claimed_row(end.claim, owner, row, at)
    if end.outcome is not None:
        return msgspec.structs.replace(row, state="done", changed_at=at, outcome=end.outcome, digest=end.digest)
    return freed_row(row, at)


def freed_row(row: EffectRow, at: int) -> EffectRow | None:
    """Return a key's row after it was freed; None if nothing of it is kept, for it was never done."""
    if row.state != "done" and row.round == 0:
        return None
    after = row.round + (row.state == "done")
    return msgspec.structs.replace(row, state="free", round=after, changed_at=at, outcome=None, digest="")


def settled_by_hand(row: EffectRow, settle: SettleKey) -> EffectRow:
    """Return a key's row after a person decided. A freed one is kept, with who and why."""
    if settle.outcome is not None:
        after = msgspec.structs.replace(row, state="done", outcome=settle.outcome, digest=settle.digest)
    else:
        after = msgspec.structs.replace(
            row, state="free", round=row.round + (row.state == "done"), outcome=None, digest=""
        )
    return msgspec.structs.replace(after, changed_at=settle.at, by=settle.by, note=settle.note)


def may_settle(row: EffectRow | None, settle: SettleKey, *, owner_is_active: bool) -> Literal["", "key", "missing"]:
    """Return why a person may not decide about a key now; "" if they may."""
    if row is None or row.state == "free":
        return "missing"
    if row.state == "under-way":
        return "key" if owner_is_active else ""
    return "key" if settle.outcome is not None else ""


def ends_with_its_run(row: EffectRow) -> bool:
    """Tell whether the end of its run frees a key: its step is under way, and may be done again by anybody.

    One that must not happen twice is in doubt then, and keeps its key until somebody settles it.
    """
    return row.state == "under-way" and row.effect == "repeat"


def shown_effect(row: EffectRow) -> EffectRow:
    """Return a key's row as anybody may see it: without an outcome that is secret."""
    return msgspec.structs.replace(row, outcome=None, digest="") if row.secret else row


def newest_first(rows: Sequence[EffectRow], filter: EffectFilter) -> list[EffectRow]:
    """Return the page of all keys that a filter asks for (for stores that filter in memory)."""
    meant = [
        row
        for row in rows
        if row.key.startswith(filter.prefix)
        and filter.run in (None, row.run)
        and filter.step in (None, row.step)
        and filter.state in (None, row.state)
    ]
    meant.sort(key=lambda row: (-row.changed_at, row.key))
    return meant[filter.offset : filter.offset + filter.limit]
