"""What the tests of checkpoints share: stores that keep every checkpoint ever taken, and two ways to the same place."""

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.codec import Codec
from everstep.engine.code.recovery_point import Past, load_past
from everstep.engine.code.replay import Replayed
from everstep.engine.code.workflow import Workflow
from everstep.engine.run.resume import replay
from everstep.model.accounts import Accounts
from everstep.model.events import EventRow
from everstep.stores.protocol import LAST, Accepted, Append, CheckpointRow, Operation, RunRow, Store, Verdict
from tests.engine.lives import RUN, cut
from tests.lasting import LastingStore


class KeepingStore(LastingStore):
    """A store that remembers every checkpoint it was ever given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.every: list[CheckpointRow] = []
        self.read: list[int] = []
        """The numbers of the events that anybody has read."""

    def commit(self, operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        verdicts = super().commit(operations, **how)
        for operation, verdict in zip(operations, verdicts, strict=True):
            if isinstance(operation, Append) and isinstance(verdict, Accepted):
                self.every += operation.checkpoints
        return verdicts

    def events(self, run: str, generation: int, *bounds: int, only: Sequence[int] = ()) -> list[EventRow]:
        found = super().events(run, generation, *bounds, only=only)
        self.read += [event.seq for event in found]
        return found


def cut_with_checkpoints(store: KeepingStore, count: int, kept: int = 3) -> LastingStore:
    """Return another store with the first events of the run and the checkpoints that were there by then."""
    other = cut(store, count)
    other.put_checkpoints(sorted(row for row in store.every if row.seq <= count)[-kept:])
    return other


def recovered(store: Store, workflow: Any, run: str = RUN) -> tuple[Past, Replayed]:
    """Replay as a recovery does: from the newest checkpoint, if there is one."""
    row = existing(store, run)
    past = load_past(store, row)
    assert isinstance(workflow, Workflow)
    return past, replay(store, Codec(), row, workflow, past.events, past.checkpoint, quiet=True)


def replayed_whole(store: Store, workflow: Any, run: str = RUN) -> Replayed:
    """Replay everything from the beginning."""
    row = existing(store, run)
    past = load_past(without_checkpoints(store), row)
    assert past.checkpoint is None
    assert isinstance(workflow, Workflow)
    return replay(store, Codec(), row, workflow, past.events, quiet=True)


class with_events:  # it reads as a preposition
    """A store as it is, but for its events."""

    def __init__(self, store: Store, events: Sequence[EventRow]) -> None:
        self._store = store
        self._events = events

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        return [event for event in self._events if first <= event.seq <= last and (not only or event.seq in only)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class without_checkpoints:  # it reads as a verb
    """A store as it is, but for its checkpoints."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def checkpoint(self, *where: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def existing(store: Store, run: str) -> RunRow:
    row = store.run(run)
    assert row is not None
    return row


def account(replayed: Replayed) -> dict[str, Any]:
    """Return everything that a replay leads to: two that lead to the same place have the same account."""
    execution = replayed.execution
    loop = execution.loop
    return {
        "differences": replayed.differences,
        "asks": [(type(one).__name__, one.kind, one.step, one.call, one.text()) for one in replayed.fresh],
        "attempts": {
            call: msgspec.structs.asdict(one) for call, one in replayed.attempts.items() if call in execution.steps
        },
        "published": {name: bytes(value) for name, value in replayed.published.items()},
        "cancel": (replayed.cancel_at, execution.cancel, replayed.retried),
        "calls": execution._calls,
        "visits": execution._visits,
        "random": execution._random and execution._random.getstate(),
        "keys": (execution.entropy, execution.branch),
        "patches": (execution.patches, execution.new_patches),
        "facts": {one: (taken.payload, taken.on_drift) for one, taken in execution.witnesses.items()},
        "signals": [(name, number, bytes(value)) for name, number, value in execution.receiving.unreceived()],
        "waits for": execution.receiving.awaited(),
        "open steps": {number: (call.step, call.entropy) for number, call in execution.steps.items()},
        "open children": {number: call.run for number, call in execution.children.items()},
        "timers": {number: (one.duration, one.deadline) for number, one in loop.timers.items()},
        "clock": loop.now,
        "created": loop.created,
        "tasks": {number: task.get_name() for number, task in loop.tasks.items()},
        "ended": execution.ended,
        "checkpoint": execution.checkpoints.number if execution.checkpoints is not None else 0,
        "first checkpoint": replayed.first_checkpoint,
        "budget": [books_of(one) for one in (execution.books.head, execution.books.view)] if execution.books else [],
    }


def books_of(accounts: Accounts) -> tuple[Any, ...]:
    """Return what matters of a run's accounts. Parts that the code has left, and children that ended, do not."""
    children = [child for child in accounts.children.values() if child.is_open]
    return accounts.standing(), accounts.begun, children, accounts.by_step


def compare_replays(store: KeepingStore, count: int, code: Any) -> int:
    """Compare both ways for one prefix. Returns how many events the short way did without."""
    there = cut_with_checkpoints(store, count)
    past, short = recovered(there, code)
    whole = replayed_whole(there, code)
    try:
        assert past.damaged == [], count
        assert short.differences == [], count
        assert account(short) == account(whole), count
    finally:
        short.execution.evict()
        whole.execution.evict()
    return count - len(past.events)
