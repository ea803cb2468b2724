"""Keys of effects, inside an open transaction. The rules are in `everstep.stores.rows.keys`."""

from collections.abc import Sequence

from everstep.model.status import ENDED
from everstep.stores.protocol import Accepted, Append, Operation, Refused
from everstep.stores.rows.keys import (
    UNSETTLED,
    EffectRow,
    ForgetKeys,
    Forgotten,
    KeyChanges,
    SettleKey,
    claimed_row,
    ended_row,
    ends_key,
    ends_with_its_run,
    freed_row,
    may_claim,
    may_settle,
    may_share,
    settled_by_hand,
    undoing_row,
)
from everstep.stores.sql.rows import effect_row, effect_values, text
from everstep.stores.sql.statements import Statements


class KeyTable:
    """The tables `effects` and `waiters` within a transaction, which the caller begins and ends."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._all = statements.all
        self._run = statements.run

    def concern_others(self, operations: Sequence[Operation]) -> bool:
        """Return True if operations may notify other runs of a key. Then the order of the batch matters."""
        changed: list[str] = []
        for operation in operations:
            if isinstance(operation, SettleKey):
                return True
            if isinstance(operation, Append) and operation.keys is not None:
                changed += sorted(operation.keys.changed())
        return bool(changed) and bool(self._all("awaited_keys", self._statements.texts(changed)))

    def lost(self, changes: KeyChanges, run: str, generation: int) -> tuple[int, ...]:
        """Return the calls that would not get their keys, or the outcomes of these."""
        taken: set[str] = set()
        calls: list[int] = []
        for claim in changes.claims:
            owner = (run, generation, claim.call)
            if claim.key in taken or not may_claim(self._effect(claim.key), claim, owner):
                calls.append(claim.call)
            else:
                taken.add(claim.key)
        calls += [share.call for share in changes.shares if not may_share(self._effect(share.key), share)]
        return tuple(calls)

    def apply(self, changes: KeyChanges, run: str, generation: int, at: int) -> None:
        """Apply an append's changes: claims, then ends, then what is undone, then waits."""
        for claim in changes.claims:
            self._write(claimed_row(claim, (run, generation, claim.call), self._effect(claim.key), at))
        for end in changes.ends:
            owner, there = (run, generation, end.claim.call), self._effect(end.claim.key)
            if ends_key(there, end, owner):
                self._change(end.claim.key, ended_row(there, end, owner, at), at)
        for undoing in changes.undoing:
            changes_it, after = undoing_row(self._effect(undoing.key), undoing, run, generation, at)
            if changes_it:
                self._change(undoing.key, after, at)
        for wait in changes.waits:
            row = self._effect(wait.key)
            if row is not None and row.state in UNSETTLED:
                self._run("wait_for_key", wait.key, run, wait.call)
            else:
                self._run("tell_of_key", run, wait.key, str(wait.call), at)
        self.rely(changes.relies, run)

    def end_run(self, run: str, generation: int, at: int) -> None:
        """Free the keys of the run's steps in progress that any run may repeat."""
        for values in self._all("effects_under_way", run, generation):
            row = effect_row(values)
            if ends_with_its_run(row):
                self._change(row.key, freed_row(row, at), at)

    def settle(self, settle: SettleKey) -> Accepted | Refused:
        """Apply a person's decision, or refuse it."""
        row = self._effect(settle.key)
        owner = self._all("run_head", row.run) if row is not None else []
        is_active = row is not None and bool(owner) and owner[0][0] == row.generation and text(owner[0][4]) not in ENDED
        if why := may_settle(row, settle, owner_is_active=is_active):
            return Refused(why)
        assert row is not None
        self._change(row.key, settled_by_hand(row, settle), settle.at)
        return Accepted()

    def forget(self, forget: ForgetKeys) -> Forgotten:
        """Delete old keys, except those that a run depends on which may continue."""
        found = [key for (key,) in self._all("old_effects", forget.before, forget.limit)]
        if not found:
            return Forgotten(0)
        self._statements.lock_keys(found)
        old = {key for (key,) in self._all("old_effects", forget.before, forget.limit)}
        keys = self._statements.texts([key for key in found if key in old])
        self._run("forget_relied", keys)
        return Forgotten(self._run("forget_effects", keys))

    def rely(self, keys: Sequence[str], run: str) -> None:
        """Keep keys for as long as a run may continue."""
        for key in keys:
            self._run("rely_on_key", key, run)

    def has_all(self, keys: Sequence[str]) -> bool:
        """Return True if each of these keys exists."""
        return all(self._effect(key) is not None for key in keys)

    def _change(self, key: str, row: EffectRow | None, at: int) -> None:
        if row is None:
            self._run("delete_effect", key)
        else:
            self._write(row)
        self._run("tell_waiters", key, at)
        self._run("forget_waiters", key)

    def _write(self, row: EffectRow) -> None:
        self._run("write_effect", *effect_values(row))

    def _effect(self, key: str) -> EffectRow | None:
        rows = self._all("effect", key)
        return effect_row(rows[0]) if rows else None
