"""What a store tells, as a model: see model.py."""

from collections import Counter
from collections.abc import Callable, Sequence

from everstep.model.events import EventRow
from everstep.model.status import ENDED
from everstep.stores.protocol import LAST, CheckpointRow, Delivery, RunFilter, RunRow
from everstep.stores.rows import keys
from everstep.stores.rows.answers_and_streams import AnswerRow, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.runs import SMALL
from everstep.stores.rows.transfer import RunDump
from tests.stores.model import Model, by_creation
from tests.stores.model_beside import by_urgency, by_wake, earliest, is_due, is_in_line


class ModelStore(Model):
    """The model, with all that the differential tests read."""

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self.queues, self.queue_counts, self.queue_room = self.limits.rows, self.limits.counts, self.limits.room
        self.queued, self.slots = self.limits.queued, self.limits.slots
        self.schedules, self.due_schedules = self.plans.listed, self.plans.due
        self.next_schedule = self.plans.next
        self.notifications, self.due_notifications = self.notes.listed, self.notes.due
        self.next_notification = self.notes.next

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        return [self.kept[id].row for id in ids if id in self.kept]

    def runs(self, filter: RunFilter) -> list[RunRow]:
        def is_meant(row: RunRow) -> bool:
            return (
                (not filter.status or row.status in filter.status)
                and filter.workflow in (None, row.workflow)
                and filter.parent in (None, row.parent)
                and filter.tags.items() <= row.tags.items()
                and (filter.before is None or by_age(row) < filter.before)
                and is_found(filter.text, row)
            )

        rows = [row for row in sorted(self._all(), key=by_age, reverse=True) if is_meant(row)]
        return rows[filter.offset : filter.offset + filter.limit]

    def children(self, run: str) -> list[RunRow]:
        return sorted((row for row in self._all() if row.parent == run), key=by_age)

    def counts(self) -> dict[str, int]:
        return dict(Counter(row.status for row in self._all()))

    def strays(self) -> list[tuple[str, int]]:
        return []

    def restores(self) -> int:
        return self.restored

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        found = self.kept[run].events.get(generation, []) if run in self.kept else []
        return [one for one in found if first <= one.seq <= last and (not only or one.seq in only)]

    def generations(self, run: str) -> list[int]:
        return sorted(self.kept[run].events) if run in self.kept else []

    def payload(self, run: str, digest: str) -> bytes | None:
        return self.kept[run].payloads.get(digest) if run in self.kept else None

    def checkpoint(self, run: str, generation: int, before: int) -> CheckpointRow | None:
        rows = self.kept[run].checkpoints.get(generation, {}) if run in self.kept else {}
        return max((row for row in rows.values() if row.seq < before), default=None, key=lambda row: row.seq)

    def archived(self, run: str) -> list[ArchiveRow]:
        return self.kept[run].archive if run in self.kept else []

    def inbox(self, run: str) -> list[Delivery]:
        return self.kept[run].pending() if run in self.kept else []

    def signals(self, run: str) -> list[Delivery]:
        return list(self.kept[run].inbox.values()) if run in self.kept else []

    def answer(self, run: str, number: int) -> AnswerRow | None:
        return self.kept[run].answers.get(number) if run in self.kept else None

    def stream(self, run: str, generation: int, name: str, after: int = 0, limit: int = 1000) -> list[EntryRow]:
        entries = sorted(self.kept[run].entries.items()) if run in self.kept else []
        return [one for place, one in entries if place[:2] == (generation, name) and place[2] > after][:limit]

    def stream_head(self, run: str, generation: int, name: str) -> EntryRow | None:
        return (self.stream(run, generation, name) or [None])[-1]

    def streams(self, run: str, generation: int) -> list[tuple[str, int]]:
        places = sorted(self.kept[run].entries) if run in self.kept else []
        return list({name: position for number, name, position in places if number == generation}.items())

    def dump(self, run: str) -> RunDump | None:
        if run not in self.kept:
            return None
        kept = self.kept[run]
        return RunDump(
            kept.row,
            [(generation, event) for generation, events in sorted(kept.events.items()) for event in events],
            sorted(kept.payloads.items()),
            [row for _, rows in sorted(kept.checkpoints.items()) for _, row in sorted(rows.items())],
            self.signals(run),
            sorted(kept.followers),
            sorted(kept.holds.values(), key=by_creation),
            [one for _, one in sorted(self.keys.items()) if one.run == run],
            sorted((key, call) for key, id, call in self.waiting if id == run),
            kept.archive,
            answers=sorted(kept.answers.values()),
            entries=[one for _, one in sorted(kept.entries.items())],
        )

    def ties(self, run: str) -> list[str]:
        followed = {(kept.row.id, follower) for kept in self.kept.values() for follower, _ in kept.followers}
        waiting = {(self.keys[key].run, waiter) for key, waiter, _ in self.waiting if key in self.keys}
        return sorted({other for tie in followed | waiting if run in tie for other in tie} - {run})

    def deletions(self) -> list[tuple[str, int]]:
        return [
            (run, generation) for run, (_, generation) in sorted(self.begun.items(), key=lambda one: (one[1][0], one))
        ]

    def asking(self) -> list[str]:
        rows = [kept for kept in self.kept.values() if kept.row.status not in ENDED]
        return sorted(kept.row.id for kept in rows if any(one.kind == "approval_asked" for one in kept.history()))

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        holds = [one for one in self.holds() if one.reason == "diverged" and one.workflow in workflows]
        return list(dict.fromkeys(one.run for one in holds))[:limit]

    def effect(self, key: str) -> keys.EffectRow | None:
        return self.keys.get(key)

    def effects(self, filter: keys.EffectFilter) -> list[keys.EffectRow]:
        meant = [
            row
            for row in self.keys.values()
            if row.key.startswith(filter.prefix)
            and filter.run in (None, row.run)
            and filter.step in (None, row.step)
            and filter.state in (None, row.state)
        ]
        meant.sort(key=lambda row: (-row.changed_at, row.key))
        return meant[filter.offset : filter.offset + filter.limit]

    def old_keys(self, before: int) -> int:
        return len(self._old_keys(before))

    # -- finding work -------------------------------------------------------------------------------------------------
    def due(
        self,
        *,
        at: int,
        workflows: Sequence[str],
        worker: str,
        everyone: bool,
        limit: int,
        queues: Sequence[str] | None = None,
    ) -> list[str]:
        known = [row for row in self._all() if row.workflow in workflows]
        known = [row for row in known if queues is None or row.queue in queues or row.owner == worker]
        free = [row for row in known if everyone and row.owner != worker and self._is_free(row)]
        own = [row for row in known if row.owner == worker]
        ready = [row for row in free if row.status in ("queued", "running") and not is_in_line(row)]
        waiting = [row for row in (*own, *free) if row.status == "waiting"]
        timers = [row for row in waiting if is_due(row.wake_at, at)]
        arrived = [row for row in waiting if self.inbox(row.id)]
        chosen = sorted(ready, key=by_urgency)[:limit] + sorted(timers, key=by_wake)[:limit]
        chosen += sorted(arrived, key=lambda row: self.inbox(row.id)[0].number)[:limit]
        return list(dict.fromkeys(row.id for row in sorted(chosen, key=by_urgency)))[:limit]

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        waiting = [row for row in self._all() if row.status == "waiting"]
        return earliest(row.wake_at for row in waiting if row.owner == worker or (everyone and self._is_free(row)))

    def pending(self, worker: str) -> list[str]:
        owned = [row.id for row in self._all() if row.owner == worker and self.inbox(row.id)]
        return sorted(owned, key=lambda run: self.inbox(run)[0].number)


def by_age(row: RunRow) -> tuple[int, str]:
    return row.created_at, row.id


def is_found(text: str, row: RunRow) -> bool:
    """Tell whether a run has a text where a search looks for it."""
    tags = [f"{name}={value}" for name, value in row.tags.items()]
    return any(text.translate(SMALL) in one.translate(SMALL) for one in (row.id, row.workflow, row.preview, *tags))
