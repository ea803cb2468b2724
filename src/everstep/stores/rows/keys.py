"""Keys of effects: who has one, what an append may do about them, and the rules, which are the same in every store.

A key is in one of four states. `under-way`: the step that has it was begun and is not settled. `done`: it has an
outcome, which every other step with the key and the same arguments shares. `undoing`: its run has begun to undo what
was done, so the outcome is shared no more, and the action may not be done again yet. `free`: the action was done and
undone (or freed by hand), so that it may be done again, in the next round; a key that was never done is not kept.

A step gets its key in the transaction of its `step_started`, and loses it or gives it an outcome in the transaction of
its own outcome. An outcome is shared only in a transaction in which the key is still done. Whoever waits for a key is
entered in the transaction of its `key_taken`, and told through its inbox (kind `key`) in the transaction that changes
the key. So neither side can miss the other, whoever crashes.
"""

from typing import Final, Literal, Protocol

import msgspec

EffectState = Literal["under-way", "done", "undoing", "free"]

STATES: Final[tuple[EffectState, ...]] = ("under-way", "done", "undoing", "free")
UNSETTLED: Final[tuple[EffectState, ...]] = ("under-way", "undoing")
"""The states that end: whoever asks for such a key waits, and it is never forgotten."""


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

    From a step that no longer has the key this changes nothing, except that an outcome is kept if nobody else has the
    key: what was done is done.
    """

    claim: KeyClaim
    outcome: bytes | None = None
    digest: str = ""


class KeyShare(msgspec.Struct, gc=False):
    """A step that takes over the outcome of its key, with this digest. The key must be done, with just that one."""

    key: str
    call: int
    digest: str


class KeyUndoing(msgspec.Struct, gc=False):
    """A step that was done is undone: that has `begun`, it is `undone`, or the step is `kept` as it is after all.

    From a step that no longer has the key this changes nothing.
    """

    key: str
    call: int
    """As `compensation_started` names it; below zero, a step of an older generation."""
    then: Literal["begun", "undone", "kept"]
    own_call: int = 0
    """With a step of an older generation: its number there, and that generation."""
    generation: int = 0


class KeyWait(msgspec.Struct, gc=False):
    """A step that waits until its key changes. If it is neither under way nor undoing, the step is told at once."""

    key: str
    call: int


class KeyChanges(msgspec.Struct, gc=False):
    """What one append does about keys: claims, then ends, then what is undone, then waits.

    `relies`: keys that the run counts on from now on, because it goes back over what was done under them. They are not
    forgotten while it may go on. If one is gone already, the append is refused.
    """

    claims: list[KeyClaim] = []
    ends: list[KeyEnd] = []
    waits: list[KeyWait] = []
    shares: list[KeyShare] = []
    undoing: list[KeyUndoing] = []
    relies: list[str] = []

    def changed(self) -> set[str]:
        """Return the keys whose waiters may be told."""
        return {end.claim.key for end in self.ends} | {one.key for one in self.undoing if one.then != "begun"}

    def named(self) -> set[str]:
        """Return all keys that this is about."""
        keys = {end.claim.key for end in self.ends} | {one.key for one in self.claims} | {one.key for one in self.waits}
        return keys | {one.key for one in self.shares} | {one.key for one in self.undoing} | set(self.relies)


class SettleKey(msgspec.Struct, gc=False):
    """Decide about a key by hand: give it an outcome, or without one free it.

    `Refused("key")` while its owner may still settle or undo it (a run that has not ended), and for an outcome when it
    has one. `Refused("missing")` if nobody has it.
    """

    key: str
    at: int
    outcome: bytes | None = None
    digest: str = ""
    by: str = ""
    note: str = ""


class ForgetKeys(msgspec.Struct, gc=False):
    """Delete keys that are done or free and have not changed since `before`, the oldest first. Verdict: `Forgotten`.

    Not those that a run counts on which has not ended, or has failed: see `KeyChanges.relies` and `Needs`.
    """

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
    """Tell whether a step may take a key: nobody has it, or it has it already. Its round must be the key's.

    The same step of a later generation of its run takes it over: nobody else will ever settle it.
    """
    if row is None:
        return claim.round == 0
    if row.state == "free":
        return claim.round == row.round
    is_same = (row.step, row.arguments) == (claim.step, claim.arguments)
    is_inherited = is_same and is_of_earlier_generation(row, owner)
    return row.state == "under-way" and (owner_of(row) == owner or is_inherited)


def is_of_earlier_generation(row: EffectRow, owner: Owner) -> bool:
    """Tell whether a step of an earlier generation of the same run has a key, or had it last."""
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
    """Tell whether an end changes a key."""
    if row is None or row.state == "free":
        return end.outcome is not None
    return owner_of(row) == owner and row.state == "under-way"


def ended_row(row: EffectRow | None, end: KeyEnd, owner: Owner, at: int) -> EffectRow | None:
    """Return a key's row after its step was settled; None if nothing of it is kept."""
    if row is None or row.state == "free":
        row = claimed_row(end.claim, owner, row, at)
    if end.outcome is not None:
        return msgspec.structs.replace(row, state="done", changed_at=at, outcome=end.outcome, digest=end.digest)
    return freed_row(row, at)


def may_share(row: EffectRow | None, share: KeyShare) -> bool:
    """Tell whether the outcome of a key may be taken over."""
    return row is not None and row.state == "done" and row.digest == share.digest


def undoing_row(
    row: EffectRow | None, undoing: KeyUndoing, run: str, generation: int, at: int
) -> tuple[bool, EffectRow | None]:
    """Return whether undoing a step changes its key, and the key's row after it; None if nothing of it is kept.

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
    """Tell whether the action of a key has happened, also if it is being undone."""
    return row.state in ("done", "undoing")


def freed_row(row: EffectRow, at: int) -> EffectRow | None:
    """Return a key's row after it was freed; None if nothing of it is kept, for it was never done."""
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
    """Tell whether the end of its run frees a key: its step is under way, and may be done again by anybody.

    One that must not happen twice is in doubt then, and keeps its key until somebody settles it.
    """
    return row.state == "under-way" and row.effect == "repeat"


def shown_effect(row: EffectRow) -> EffectRow:
    """Return a key's row as anybody may see it: without an outcome that is secret."""
    return msgspec.structs.replace(row, outcome=None, digest="") if row.secret else row
