"""The writing side of one run: units for the committer, and callbacks for when they are durable."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from everstep.engine.code.commands import StepCall
from everstep.errors import Damaged, StoreError
from everstep.model.crash_points import crash_point
from everstep.model.events import Body
from everstep.model.status import ENDED, Status, may_become
from everstep.model.untrusted import is_refusal, logger
from everstep.stores.protocol import Accepted, Append, Failed, Refused, RowChange, Verdict

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.driver import Driver


log = logger("everstep.run")

STATUS_OF_END: Final[dict[str, Status]] = {
    "run_completed": "completed",
    "run_failed": "failed",
    "run_cancelled": "cancelled",
    "run_continued": "running",
}
_RUNNING: Final[tuple[Status, int | None]] = ("running", None)


class RunWriter:
    """Puts a run's unsaved events into units, each of which expects the head that the previous one leaves."""

    def __init__(self, driver: "Driver") -> None:
        self.is_queued = False
        self.durable = driver.journal.seq
        """The newest event that is certainly on disk."""
        self._driver = driver
        self._sent_seq, self._sent_digest = driver.journal.seq, driver.journal.digest
        is_running = driver.row.status == "running" and driver.row.wake_at is None
        self._written: tuple[Status, int | None] = _RUNNING if is_running else (driver.row.status, driver.row.wake_at)
        self._durable_status = self._written
        self._waiters: deque[tuple[int, Callable[[], None] | None, Any, bool]] = deque()
        """What waits for which event: the start of a call's body or of its fallback, or any other callback."""

    def save(self, *, waited_for: bool) -> None:
        """Ask the committer for a commit; `waited_for` when something waits for it."""
        self._driver.app.committer.ready(self, waited_for=waited_for)

    def save_status(self) -> None:
        """Write the run's status, if the store does not have it yet."""
        if self._written != (self._driver.status, self._driver.wake_at()):
            self.save(waited_for=False)

    def when_durable(self, seq: int, callback: Callable[[], None]) -> None:
        """Call back once an event, and everything before it, is durable."""
        self._waiters.append((seq, callback, None, False))
        self._driver.app.committer.ready(self, waited_for=True)

    def start_when_durable(self, seq: int, call: "StepCall", fallback: bool) -> None:
        """Start the body of a call, or its fallback, once an event, and everything before it, is durable."""
        self._waiters.append((seq, None, call, fallback))
        self._driver.app.committer.ready(self, waited_for=True)

    @property
    def all_is_durable(self) -> bool:
        """Whether nothing is left to write or to wait for."""
        journal = self._driver.journal
        unwritten = self._waiters or journal.unsaved or journal.attached is not None
        return not unwritten and self.durable == journal.seq

    @property
    def status_is_durable(self) -> bool:
        """Whether the store has the run's present status, so that other processes find it."""
        return self._durable_status == (self._driver.status, self._driver.wake_at())

    # -- for the committer -----------------------------------------------------------------------------------------
    def unit(self) -> Append | None:
        """Return everything that is not saved yet."""
        driver = self._driver
        if driver.stopped:
            return None
        journal = driver.journal
        goes_on = self._written is _RUNNING and driver.status == "running" and not (driver.ending or driver.hold)
        has_more = journal.attached or driver.budgets or driver.publishes or driver.attempts.restarts
        if goes_on and journal.unsaved and not has_more:  # most units: events, and the present step of the run
            events, steps, seq, digest = journal.unsaved, driver.execution.steps, self._sent_seq, self._sent_digest
            current = next(iter(steps.values())).step if steps else ""
            row = RowChange("running", journal.at, None, current, None, None, True, None, True)
            journal.unsaved = []
            self._sent_seq, self._sent_digest = journal.seq, journal.digest
            return Append(driver.run, journal.generation, driver.row.epoch, seq, digest, events, row, plain=True)
        wake_at = driver.wake_at() if driver.status == "waiting" else None
        if not journal.unsaved and journal.attached is None and self._written == (driver.status, wake_at):
            return None
        row = self._row_change(wake_at)
        head = self._sent_seq, self._sent_digest
        unit = Append(driver.run, journal.generation, driver.row.epoch, *head, journal.unsaved, row)
        if driver.renewal is not None:
            unit.renewal = driver.renewal
        if driver.hold is not None:
            unit.hold, unit.release = driver.hold, True
            unit.notifications = driver.app.notifier.rows(driver.hold)
        if journal.attached is not None:
            journal.attached.put_into(unit)
            journal.attached = None
        if row.status == "running" and self._written is _RUNNING and row.progress:
            row.stays = True
        else:
            before, _ = self._written
            assert row.status == before or may_become(before, row.status), f"{before} does not lead to {row.status}"
            self._written = (row.status, wake_at) if row.status != "running" else _RUNNING
        self._sent_seq, self._sent_digest = journal.seq, journal.digest
        journal.unsaved = []
        return unit

    def _row_change(self, wake_at: int | None) -> RowChange:
        """Return the new content of the run's row, in addition to the head."""
        driver = self._driver
        steps, journal, attempts = driver.execution.steps, driver.journal, driver.attempts
        current = next(iter(steps.values())).step if steps else ""
        budget = driver.budgets.news(ended=bool(driver.ending)) if driver.budgets is not None else None
        at, news = journal.at, driver.published_json() if driver.publishes else None
        if driver.ending:
            return RowChange(STATUS_OF_END[driver.ending], at, wake_at, current, news, driver.outcome, budget=budget)
        progress = len(journal.unsaved) > attempts.restarts
        attempts.restarts = 0
        status: Status = "held" if driver.hold else driver.status
        return RowChange(status, at, wake_at, current, news, None, progress, budget)

    def settle(self, unit: Append, verdict: Verdict) -> None:
        """Apply the committer's verdict."""
        driver = self._driver
        if driver.stopped:
            return
        if type(verdict) is Accepted:
            crash_point("unit.durable")
            events, waiters, attempts, is_plain = unit.events, self._waiters, driver.attempts, unit.plain
            if events:
                self.durable = events[-1][0]
            if not is_plain:
                self._tell(unit)
            durable = self.durable
            while waiters and waiters[0][0] <= durable:
                _, callback, call, fallback = waiters.popleft()
                if callback is None:
                    attempts.start(call, fallback)
                else:
                    callback()
            self._durable_status = _RUNNING if is_plain else (unit.row.status, unit.row.wake_at)
            if not is_plain and unit.renewal is not None:
                crash_point("run.continued")
                driver.app.take_next(driver)
            elif not is_plain and (unit.row.status == "held" or unit.row.status in ENDED):
                driver.app.let_go(driver)
            elif driver.execution.witnesses and not self._driver.stopped and driver.is_idle:  # a waiter may stop it
                driver.app.resting.add(driver)
        elif isinstance(verdict, Refused) and verdict.why == "inbox":
            self._take_back_end(unit)
        elif isinstance(verdict, Refused) and verdict.why == "key":
            self._take_back_claims(unit, verdict.calls)
        elif isinstance(verdict, Failed) and is_refusal(verdict.error):
            self.stumble(verdict.error, is_own=False)
        elif isinstance(verdict, Failed) and (
            isinstance(verdict.error, Damaged) or not isinstance(verdict.error, StoreError)
        ):
            driver.app.holding.hold_unstorable(driver, verdict.error)
        elif isinstance(verdict, Failed):
            self.fail(verdict.error)
        else:
            if driver.run in driver.app.look_for_losses():
                return
            log.info("Run %s was taken over by another worker; this one lets go of it.", driver.run)
            driver.app.let_go(driver)

    def _tell(self, unit: Append) -> None:
        """Notify the waiters of what is durable now."""
        driver = self._driver
        unapplied = driver.unapplied_refs() if unit.payloads else ()
        for digest, _ in unit.payloads:
            if digest not in unapplied:  # otherwise it would have to be read back for the code
                driver.journal.undurable.pop(digest, None)
        if unit.keys is not None:
            driver.app.keys_changed(unit.keys)
        if unit.beside is not None:
            driver.app.watchers.look_again(driver.run)

    def fail(self, error: BaseException) -> None:
        """Stop after a failure of the store: nothing is assumed, and nothing more is done."""
        self._driver.app.let_go(self._driver, error)

    def stumble(self, error: BaseException, *, is_own: bool) -> None:
        """Evict and resume the run: something that was done for it raised, or the fate of its unit is unknown."""
        self._driver.app.stumbling.leave(self._driver, error, is_own=is_own)

    def _take_back_end(self, unit: Append) -> None:
        """Take back the end, because a cancel arrived before it was durable, and comes first."""
        journal = self._driver.journal
        self._take_back(unit, len(unit.events) - 1)
        last = unit.events[-2] if len(unit.events) > 1 else None
        journal.seq = last.seq if last else unit.expected_seq
        journal.digest = last.digest if last else unit.expected_digest
        self._driver.take_back_end()

    def _take_back_claims(self, unit: Append, calls: tuple[int, ...]) -> None:
        """Take back claims of keys that other steps have, or shares of outcomes that are being undone. The rest
        stays.
        """
        crash_point("key.refused")
        self._take_back(unit, len(unit.events))
        assert unit.keys is not None
        keys = self._driver.attempts.keys
        if shares := [share for share in unit.keys.shares if share.call in calls]:
            keys.unshared(shares)
        if claims := [claim for claim in unit.keys.claims if claim.call in calls]:
            keys.lost(claims)
        if not self._driver.stopped:
            self.save(waited_for=bool(self._waiters))

    def _take_back(self, unit: Append, count: int) -> None:
        """Take back a refused unit: its first `count` events are written again."""
        driver = self._driver
        driver.journal.take_back(unit, count)
        driver.take_back_row(unit.row, count)
        self._sent_seq, self._sent_digest = unit.expected_seq, unit.expected_digest
        self._written = self._durable_status

    def rewrite(self, changed: dict[int, tuple[str, Body]]) -> None:
        """Replace unsaved events under the same numbers. What waited for the old ones waits no more."""
        self._driver.journal.rewrite(self._sent_digest, changed)
        self._waiters = deque(waiter for waiter in self._waiters if waiter[0] not in changed)
