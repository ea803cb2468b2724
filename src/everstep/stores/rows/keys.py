"""Keys of effects: their owners, what an append may do with them, and the rules, which are the same in every store.

A key is in one of four states. `under-way`: the step that has it was begun and is not settled. `done`: it has an
outcome, which every other step with the key and the same arguments shares. `undoing`: its run has begun to undo what
was done, so the outcome is no longer shared, and the action may not be done again yet. `free`: the action was done and
undone (or freed by hand), so that it may be done again, in the next round; a key that was never done is not kept.

A step gets its key in the transaction of its `step_started`, and loses it or gives it an outcome in the transaction of
its own outcome. An outcome is shared only in a transaction in which the key is still done. A step that waits for a key
is registered in the transaction of its `key_taken`, and gets a delivery in its inbox (kind `key`) in the transaction
that changes the key. So neither side can miss the other, whichever process crashes.
"""

from typing import Final, Literal, Protocol

import msgspec

EffectState = Literal["under-way", "done", "undoing", "free"]

STATES: Final[tuple[EffectState, ...]] = ("under-way", "done", "undoing", "free")
UNSETTLED: Final[tuple[EffectState, ...]] = ("under-way", "undoing")
"""The states that will change: other steps wait for such a key, and it is never forgotten."""


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
    """The person who gave the outcome, or freed the key, by hand."""
    note: str = ""
    digest: str = ""
    outcome: bytes | None = None
    """The outcome's payload as it is stored."""
    secret: bool = False
    """Whether the outcome is secret and never shown."""


class KeyClaim(msgspec.Struct, gc=False):
    """A step begins, and takes its key. A step that has the key already may take it again."""

    key: str
    call: int
    seq: int
    step: str
    arguments: str
    effect: str
    round: int = 0
    secret: bool = False


class KeyEnd(msgspec.Struct, gc=False):
    """A step that has its key is settled: with an outcome, which is shared from now on, or without one, which frees the
    key.

    From a step that no longer has the key this changes nothing, except that an outcome is kept if no other step has the
    key: what was done is done.
    """

    claim: KeyClaim
    outcome: bytes | None = None
    digest: str = ""


class KeyShare(msgspec.Struct, gc=False):
    """A step takes over the outcome of its key. The key must be done, and its outcome must have this digest."""

    key: str
    call: int
    digest: str


class KeyUndoing(msgspec.Struct, gc=False):
    """The compensation of a done step has `begun`, it is `undone`, or the step is `kept` as it is after all.

    From a step that no longer has the key this changes nothing.
    """

    key: str
    call: int
    """The call in `compensation_started`; below zero, a step of an older generation."""
    then: Literal["begun", "undone", "kept"]
    own_call: int = 0
    """For a step of an older generation: its call there, and that generation."""
    generation: int = 0


class KeyWait(msgspec.Struct, gc=False):
    """A step waits until its key changes. If the key is settled already, the step is notified at once."""

    key: str
    call: int


class KeyChanges(msgspec.Struct, gc=False):
    """What one append does with keys: claims, then ends, then what is undone, then waits.

    `relies`: keys that the run depends on from now on, because it goes back over what was done under them. They are not
    forgotten while it may continue. If one is gone already, the append is refused.
    """

    claims: list[KeyClaim] = []
    ends: list[KeyEnd] = []
    waits: list[KeyWait] = []
    shares: list[KeyShare] = []
    undoing: list[KeyUndoing] = []
    relies: list[str] = []

    def changed(self) -> set[str]:
        """Return the keys whose waiters may be notified."""
        return {end.claim.key for end in self.ends} | {one.key for one in self.undoing if one.then != "begun"}

    def named(self) -> set[str]:
        """Return all keys that these changes name."""
        keys = {end.claim.key for end in self.ends} | {one.key for one in self.claims} | {one.key for one in self.waits}
        return keys | {one.key for one in self.shares} | {one.key for one in self.undoing} | set(self.relies)


class SettleKey(msgspec.Struct, gc=False):
    """A person decides about a key: it gets an outcome, or without one is freed.

    `Refused("key")` while its owner may still settle or undo it (a run that has not ended), and for an outcome when it
    has one. `Refused("missing")` if no step has it.
    """

    key: str
    at: int
    outcome: bytes | None = None
    digest: str = ""
    by: str = ""
    note: str = ""


class ForgetKeys(msgspec.Struct, gc=False):
    """Delete keys that are done or free and have not changed since `before`, the oldest first. Verdict: `Forgotten`.

    Keys stay that a run depends on which has not ended, or has failed: see `KeyChanges.relies` and `Needs`.
    """

    before: int
    limit: int = 1000


class Forgotten(msgspec.Struct, frozen=True):
    """The number of keys that were deleted."""

    keys: int


class EffectFilter(msgspec.Struct, kw_only=True):
    """Which keys to list, the most recently changed first."""

    prefix: str = ""
    run: str | None = None
    step: str | None = None
    state: EffectState | None = None
    limit: int = 100
    offset: int = 0


Owner = tuple[str, int, int]
"""Run, generation and call of a step."""


class KeyStore(Protocol):
    """What a store answers about keys."""

    def effect(self, key: str) -> EffectRow | None:
        """Return a key's owner and outcome."""
        ...

    def effects(self, filter: EffectFilter) -> list[EffectRow]:
        """Return keys, the most recently changed first."""
        ...

    def old_keys(self, before: int) -> int:
        """Return how many keys `ForgetKeys` would delete."""
        ...

    def waiters(self, key: str) -> list[tuple[str, int]]:
        """Return the runs and calls that wait for a key."""
        ...


def owner_of(row: EffectRow) -> Owner:
    """Return the step that has a key, or had it last."""
    return (row.run, row.generation, row.call)


def may_claim(row: EffectRow | None, claim: KeyClaim, owner: Owner) -> bool:
    """Return True if a step may take a key: it is free, or the step has it already. The rounds must be equal.

    The same step of a later generation of its run takes it over, because nothing else will ever settle it.
    """
    if row is None:
        return claim.round == 0
    if row.state == "free":
        return claim.round == row.round
    is_same = (row.step, row.arguments) == (claim.step, claim.arguments)
    is_inherited = is_same and is_of_earlier_generation(row, owner)
    return row.state == "under-way" and (owner_of(row) == owner or is_inherited)


def is_of_earlier_generation(row: EffectRow, owner: Owner) -> bool:
    """Return True if a step of an earlier generation of the same run has a key, or had it last."""
    return row.run == owner[0] and row.generation < owner[1]


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
    """Return True if an end changes a key."""
    if row is None or row.state == "free":
        return end.outcome is not None
    return owner_of(row) == owner and row.state == "under-way"


def ended_row(row: EffectRow | None, end: KeyEnd, owner: Owner, at: int) -> EffectRow | None:
    """Return a key's row after its step was settled; None if the key is not kept."""
    if row is None or row.state == "free":
        row = claimed_row(end.claim, owner, row, at)
    if end.outcome is not None:
        return msgspec.structs.replace(row, state="done", changed_at=at, outcome=end.outcome, digest=end.digest)
    return freed_row(row, at)


def may_share(row: EffectRow | None, share: KeyShare) -> bool:
    """Return True if the outcome of a key may be taken over."""
    return row is not None and row.state == "done" and row.digest == share.digest


def undoing_row(
    row: EffectRow | None, undoing: KeyUndoing, run: str, generation: int, at: int
) -> tuple[bool, EffectRow | None]:
    """Return whether undoing a step changes its key, and the key's row after it; None if the key is not kept.

    While it is being undone its owner is the generation that does so: only that one can tell how it ends.
    """
    own = (undoing.generation or generation, undoing.own_call or undoing.call)
    is_own = row is not None and row.run == run and (row.generation, row.call) in (own, (generation, undoing.call))
    if row is None or not is_own or row.state not in _BEFORE[undoing.then]:
        return False, row
    place = (generation, undoing.call) if undoing.then == "begun" else own
    row = msgspec.structs.replace(row, generation=place[0], call=place[1], changed_at=at)
    if undoing.then == "undone":
        return True, freed_row(row, at)
    return True, msgspec.structs.replace(row, state="undoing" if undoing.then == "begun" else "done")


_BEFORE: Final = {"begun": ("done",), "undone": ("done", "undoing"), "kept": ("undoing",)}
"""The states in which undoing changes a key."""


def was_done(row: EffectRow) -> bool:
    """Return True if the action of a key has happened, also if it is being undone."""
    return row.state in ("done", "undoing")


def freed_row(row: EffectRow, at: int) -> EffectRow | None:
    """Return a key's row after it was freed; None if it is not kept because it was never done."""
    if not was_done(row) and row.round == 0:
        return None
    after = row.round + was_done(row)
    return msgspec.structs.replace(row, state="free", round=after, changed_at=at, outcome=None, digest="")


def settled_by_hand(row: EffectRow, settle: SettleKey) -> EffectRow:
    """Return a key's row after a person decided. A freed one is kept, with who and why."""
    if settle.outcome is not None:
        after = msgspec.structs.replace(row, state="done", outcome=settle.outcome, digest=settle.digest)
    else:
        after = msgspec.structs.replace(row, state="free", round=row.round + was_done(row), outcome=None, digest="")
    return msgspec.structs.replace(after, changed_at=settle.at, by=settle.by, note=settle.note)


def may_settle(row: EffectRow | None, settle: SettleKey, *, owner_is_active: bool) -> Literal["", "key", "missing"]:
    """Return why a person may not decide about a key now; "" if they may."""
    if row is None or row.state == "free":
        return "missing"
    if row.state in UNSETTLED:
        return "key" if owner_is_active else ""
    return "key" if settle.outcome is not None else ""


def ends_with_its_run(row: EffectRow) -> bool:
    """Return True if the end of its run frees a key: its step is in progress, and any run may repeat it.

    One that must not happen twice is in doubt then, and keeps its key until a person or a probe settles it.
    """
    return row.state == "under-way" and row.effect == "repeat"


def shown_effect(row: EffectRow) -> EffectRow:
    """Return a key's row without an outcome that is secret."""
    return msgspec.structs.replace(row, outcome=None, digest="") if row.secret else row
