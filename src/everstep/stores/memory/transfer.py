"""How the in-memory store deletes ended runs part by part, and how runs are moved out of it and into it."""

from collections.abc import MutableMapping, Set
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from everstep.model.forked import TAG
from everstep.model.ids import STEP_PREFIX
from everstep.model.status import ENDED
from everstep.stores.protocol import Accepted, Refused, Verdict
from everstep.stores.rows.answers_and_streams import Beside
from everstep.stores.rows.keys import UNSETTLED
from everstep.stores.rows.transfer import ClaimFamily, Deleted, DeletePart, ImportRuns, RunDump, arrived, numbered

if TYPE_CHECKING:  # a real cycle: the store has this part, which changes the store's rows
    from everstep.stores.memory.store import MemoryStore


class MemoryMoving:
    """Which deletions have begun, and what is done to whole runs."""

    def __init__(self, store: "MemoryStore") -> None:
        self.begun: dict[str, tuple[int, int]] = {}
        """Run to when its deletion began, and its generation then."""
        self._store = store

    # -- deleting -------------------------------------------------------------------------------------------------
    def is_begun(self, run: str) -> bool:
        """Tell whether the deletion of a run has begun."""
        row = self._store._runs.get(run)
        return row is not None and run in self.begun and self.begun[run][1] == row.generation

    def claim(self, family: ClaimFamily) -> Verdict:
        """Claim a family for its deletion, or refuse it and change nothing."""
        runs = self._store._runs
        if not all(self._is_as_judged(run, epoch, family.before) for run, epoch in family.epochs.items()):
            return Refused("fenced")
        if self.is_needed(set(family.epochs)):
            return Refused("taken")
        for run in family.epochs:
            runs[run].epoch, runs[run].owner = runs[run].epoch + 1, family.worker
            self.begun[run] = (family.at, runs[run].generation)
        return Accepted()

    def _is_as_judged(self, run: str, epoch: int, before: int) -> bool:
        store, row = self._store, self._store._runs.get(run)
        if row is None or row.epoch != epoch or row.status not in ENDED or (row.ended_at or 0) >= before:
            return False
        if not store._is_free(row) or store.holds(run=run):
            return False
        if any(one.run == run and one.state not in ("done", "free") for one in store._keys.rows.values()):
            return False
        is_step = row.workflow.startswith(STEP_PREFIX) and "thread" in row.tags
        return not is_step or not store.saved.states(row.tags["thread"], limit=1)

    def is_needed(self, family: Set[str]) -> bool:
        """Tell whether a run that is not in a family needs one of it. See `Store.is_needed`."""
        store = self._store
        for row in store._runs.values():
            if row.id in family and row.parent in store._runs and row.parent not in family:
                return True
            if row.id not in family and row.parent in family:
                return True
        users = {one.run for one in store._signals.values() if one.kind == "child" and one.name in family}
        return any(self.may_go_on(run) for run in (users | self._forks_of(users | family)) - family)

    def may_go_on(self, run: str) -> bool:
        """Tell whether there is a run that has not ended, or has failed and so may be retried."""
        row = self._store._runs.get(run)
        return row is not None and row.status not in ("completed", "cancelled")

    def _forks_of(self, runs: Set[str]) -> set[str]:
        return {row.id for row in self._store._runs.values() if row.tags.get(TAG, "").rpartition("@")[0] in runs}

    def delete(self, part: DeletePart) -> Verdict:
        """Delete a part of an ended run, or refuse it and change nothing."""
        store, row = self._store, self._store._runs.get(part.run)
        if row is None:
            return Refused("missing")
        if row.epoch != part.epoch or row.status not in ENDED or store.holds(run=row.id):
            return Refused("fenced")
        left = part.limit
        for generation in store.generations(row.id):
            events = store._events[row.id, generation]
            gone = min(len(events), left)
            del events[:gone]
            left -= gone
            if left <= 0:
                self.begun.setdefault(row.id, (part.at, row.generation))
                return Deleted(part.limit, False)
            del store._events[row.id, generation]
        beside = self._drop(row.id)
        del store._runs[row.id]
        self.begun.pop(row.id, None)
        return Deleted(part.limit - left + beside + 1, True)

    def _drop(self, run: str) -> int:
        """Forget all of a run but its row, its events and the keys of its actions. Returns how many large rows."""
        store, whole = self._store, self.dump(run)
        assert whole is not None
        tables: list[MutableMapping[Any, Any]] = [store._payloads, store._checkpoints]
        for table in tables:
            for key in [key for key in table if key[0] == run]:
                del table[key]
        store._signals = {number: one for number, one in store._signals.items() if one.run != run}
        store._followers = {one for one in store._followers if run not in one[:2]}
        store._keys.relied = {one for one in store._keys.relied if one[1] != run}
        store._holds = {id: one for id, one in store._holds.items() if one.run != run}
        store._notifications.forget(run)
        store._repairs.rows = [row for row in store._repairs.rows if row.run != run]
        for place in [place for place in store._answers if place[0] == run]:
            del store._answers[place]
        for stream in [stream for stream in store._streams if stream[0] == run]:
            del store._streams[stream]
        store._arrivals.pop(run, None)
        return (
            len(whole.entries)
            + len(whole.payloads)
            + len(whole.checkpoints)
            + len(whole.deliveries)
            + len(whole.archive)
        )

    def dump(self, run: str) -> RunDump | None:
        """Return everything of a run. Markers are in the database beside, which is not moved."""
        store, row = self._store, self._store._runs.get(run)
        if row is None:
            return None
        generations = store.generations(run)
        return deepcopy(
            RunDump(
                row,
                [(generation, event) for generation in generations for event in store._events[run, generation]],
                sorted((digest, value) for (id, digest), value in store._payloads.items() if id == run),
                [
                    kept[seq]
                    for (id, _), kept in sorted(store._checkpoints.items(), key=lambda one: one[0])
                    for seq in sorted(kept)
                    if id == run
                ],
                [one for one in store._signals.values() if one.run == run],
                sorted((follower, call) for id, follower, call in store._followers if id == run),
                sorted((one for one in store._holds.values() if one.run == run), key=lambda h: (h.created_at, h.id)),
                [one for _, one in sorted(store._keys.rows.items()) if one.run == run],
                sorted((key, call) for key, id, call in store._keys.waiters if id == run),
                [one for one in store._repairs.rows if one.run == run],
                answers=sorted(one for (id, _), one in store._answers.items() if id == run),
                entries=[
                    entries[position]
                    for (id, _, _), entries in sorted(store._streams.items())
                    for position in sorted(entries)
                    if id == run
                ],
                arrivals=[one for id, one in store._arrivals.items() if id == run],
            )
        )

    def ties(self, run: str) -> list[str]:
        """Return the runs that one is tied to."""
        store = self._store
        tied = {other for one in store._followers if run in one[:2] for other in one[:2]}
        for key, waiter, _ in store._keys.waiters:
            owner = store._keys.rows[key].run if key in store._keys.rows else run
            tied |= {waiter, owner} if run in (waiter, owner) else set()
        return sorted(tied - {run})

    def accept(self, operation: ImportRuns) -> Verdict:
        """Put runs here, or refuse it and change nothing."""
        store, dumps = self._store, operation.dumps
        taken = any(dump.row.id in store._runs for dump in dumps)
        if taken or any(hold.id in store._holds for dump in dumps for hold in dump.holds):
            return Refused("taken")
        if any(one.key in store._keys.rows for dump in dumps for one in dump.effects if one.state in UNSETTLED):
            return Refused("key")
        for dump in dumps:
            self._put(dump)
        return Accepted()

    def _put(self, dump: RunDump) -> None:
        store, row = self._store, arrived(dump)
        store._runs[row.id] = row
        for generation, event in dump.events:
            store._events.setdefault((row.id, generation), []).append(event)
        store._keep_payloads(row.id, dump.payloads)
        for one in dump.checkpoints:
            store._checkpoints.setdefault((row.id, one.generation), {})[one.seq] = one
        moved: dict[int, int] = {}
        for number, delivery in list(numbered(dump, store._signals.__contains__)):
            before = delivery.number
            moved[before] = delivery.number = store.last_number + 1 if number is None else number
            store.last_number = max(store.last_number, delivery.number)
            store._signals[delivery.number] = delivery
        store._signals = dict(sorted(store._signals.items()))
        answers = [one._replace(number=moved.get(one.number, one.number)) for one in dump.answers]
        store._keep_beside(Beside(answers, dump.entries))
        store._followers |= {(row.id, follower, call) for follower, call in dump.followers}
        store._holds |= {hold.id: hold for hold in dump.holds}
        for effect in dump.effects:
            store._keys.rows.setdefault(effect.key, effect)
        store._keys.waiters |= {(key, row.id, call) for key, call in dump.waits}
        store._repairs.rows += dump.archive
        store._arrivals |= {one.run: one for one in dump.arrivals}
