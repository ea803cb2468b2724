"""A store whose methods fail when a test wants it: before they do anything, or after they have done it.

    store = FaultyStore(open_store("memory:"))
    store.fail("commit", after=True, error=StoreFailed("the reply was lost"))
    app = App(store.as_store())

A failed commit is an unknown commit, so both kinds must have the same end: nothing lost, nothing doubled.
"""

from collections.abc import Callable
from typing import Any, Final, cast

from everstep.errors import StoreError
from everstep.stores.brief import Busy
from everstep.stores.protocol import Store

METHODS: Final = (
    "archived",
    "asking",
    "bury_dead",
    "changed",
    "checkpoint",
    "children",
    "commit",
    "connect",
    "counts",
    "answer",
    "arrival",
    "diverged",
    "due",
    "due_notifications",
    "due_schedules",
    "effect",
    "effects",
    "events",
    "generations",
    "holds",
    "inbox",
    "is_in_use",
    "lapse",
    "neighbours",
    "leave",
    "life",
    "next_notification",
    "next_schedule",
    "next_wake",
    "notifications",
    "now",
    "payload",
    "pending",
    "queue_counts",
    "queue_room",
    "queued",
    "queues",
    "register_worker",
    "renew",
    "restores",
    "rows",
    "run",
    "runs",
    "schedules",
    "signals",
    "slots",
    "strays",
    "runs_without_status",
    "stream",
    "stream_head",
    "streams",
    "waiters",
    "workers",
    "write_in",
)
"""Every method that can fail. (`close` is how a process ends, and cannot.)"""


class Fault:
    """A failure of one method: from its `first` call on, `count` times."""

    def __init__(self, error: Exception, *, after: bool, first: int, count: int, when: Callable[..., bool]) -> None:
        self.error = error
        self.after = after
        self.fired = 0
        """How often it has happened."""
        self._first = first
        self._count = count
        self._when = when
        self._calls = 0

    def happens_now(self, args: tuple[Any, ...]) -> bool:
        """Count a call, and return True if it fails."""
        if not self._when(*args):
            return False
        self._calls += 1
        if self._first <= self._calls < self._first + self._count:
            self.fired += 1
            return True
        return False

    def take_back(self) -> None:
        """Undo the count of a call that did not fail after all."""
        self._calls -= 1
        self.fired -= 1


class FaultyStore:
    """Passes every call on to a real store, except those that are set to fail."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._faults: dict[str, Fault] = {}

    def fail(
        self,
        method: str,
        *,
        after: bool,
        error: Exception | None = None,
        first: int = 1,
        count: int = 1,
        when: Callable[..., bool] | None = None,
    ) -> Fault:
        """Make a method fail: `after` it has done its work, or before. `when` chooses calls by their arguments."""
        assert method in METHODS, method
        raised = error or StoreError(f"{method} was told to fail")
        fault = Fault(raised, after=after, first=first, count=count, when=when or (lambda *args: True))
        self._faults[method] = fault
        return fault

    def mend(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def as_store(self) -> Store:
        """Return this object, typed as a store for an app."""
        return cast(Store, self)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name not in METHODS:
            return value

        def call(*args: Any, **options: Any) -> Any:
            fault = self._faults.get(name)
            if fault is None or not fault.happens_now(args):
                return value(*args, **options)
            if fault.after:
                try:
                    value(*args, **options)
                except Busy:  # nothing was done: the fault waits for the next call
                    fault.take_back()
                    raise
            raise fault.error

        return call
