"""The table `effects` of the in-memory store, and who waits for its keys."""

from collections.abc import Callable

from everstep.stores.rows.keys import (
    UNSETTLED,
    EffectRow,
    ForgetKeys,
    KeyChanges,
    SettleKey,
    claimed_row,
    ended_row,
    ends_key,
    ends_with_its_run,
    freed_row,
    may_claim,
    may_share,
    settled_by_hand,
    undoing_row,
)


class MemoryKeys:
    """Keys by their text. `tell` puts the news of a changed key into a run's inbox."""

    def __init__(self, tell: Callable[[str, str, int, int], None]) -> None:
        self.rows: dict[str, EffectRow] = {}
        self.waiters: set[tuple[str, str, int]] = set()
        self.relied: set[tuple[str, str]] = set()
        """Keys that runs count on."""
        self._tell = tell

    def lost(self, changes: KeyChanges, run: str, generation: int) -> tuple[int, ...]:
        """Return the calls that would not get their keys, or the outcomes of these."""
        taken: set[str] = set()
        calls: list[int] = []
        for claim in changes.claims:
            owner = (run, generation, claim.call)
            if claim.key in taken or not may_claim(self.rows.get(claim.key), claim, owner):
                calls.append(claim.call)
            else:
                taken.add(claim.key)
        calls += [share.call for share in changes.shares if not may_share(self.rows.get(share.key), share)]
        return tuple(calls)

    def apply(self, changes: KeyChanges, run: str, generation: int, at: int) -> None:
        """Do what an append wants: claims, then ends, then what is undone, then waits."""
        for claim in changes.claims:
            there = self.rows.get(claim.key)
            self.rows[claim.key] = claimed_row(claim, (run, generation, claim.call), there, at)
        for end in changes.ends:
            owner, there = (run, generation, end.claim.call), self.rows.get(end.claim.key)
            if ends_key(there, end, owner):
                self._change(end.claim.key, ended_row(there, end, owner, at), at)
        for undoing in changes.undoing:
            changes_it, after = undoing_row(self.rows.get(undoing.key), undoing, run, generation, at)
            if changes_it:
                self._change(undoing.key, after, at)
        for wait in changes.waits:
            there = self.rows.get(wait.key)
            if there is not None and there.state in UNSETTLED:
                self.waiters.add((wait.key, run, wait.call))
            else:
                self._tell(run, wait.key, wait.call, at)
        self.relied |= {(key, run) for key in changes.relies}

    def end_run(self, run: str, generation: int, at: int) -> None:
        """Free what the run's steps had under way and anybody may do again."""
        mine = [row for row in self.rows.values() if (row.run, row.generation) == (run, generation)]
        for row in sorted(mine, key=lambda row: row.key):
            if ends_with_its_run(row):
                self._change(row.key, freed_row(row, at), at)

    def settle(self, settle: SettleKey) -> None:
        """Do what a person decided."""
        self._change(settle.key, settled_by_hand(self.rows[settle.key], settle), settle.at)

    def forget(self, forget: ForgetKeys, may_go_on: Callable[[str], bool]) -> int:
        """Delete old keys, and return how many."""
        old = sorted(self.old(forget.before, may_go_on), key=lambda row: (row.changed_at, row.key))[: forget.limit]
        for row in old:
            del self.rows[row.key]
        self.relied = {one for one in self.relied if one[0] in self.rows}
        return len(old)

    def old(self, before: int, may_go_on: Callable[[str], bool]) -> list[EffectRow]:
        """Return keys that may be forgotten."""
        old = [row for row in self.rows.values() if row.state not in UNSETTLED and row.changed_at < before]
        relied = {key for key, run in self.relied if may_go_on(run)}
        return [row for row in old if row.key not in relied]

    def waiting_for(self, key: str) -> list[tuple[str, int]]:
        """Return who waits for a key."""
        return sorted((run, call) for one, run, call in self.waiters if one == key)

    def _change(self, key: str, row: EffectRow | None, at: int) -> None:
        if row is None:
            del self.rows[key]
        else:
            self.rows[key] = row
        for run, call in self.waiting_for(key):
            self.waiters.remove((key, run, call))
            self._tell(run, key, call, at)
