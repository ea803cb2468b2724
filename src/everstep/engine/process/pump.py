"""The pump of an app: it finds runs that need a driver, renews the lease, and notices owners that are gone.

Wake-ups without load: in one process they come directly (`nudge`); between processes a very cheap query ("has another
process written?") is made a few times a second, and only a positive answer leads to a search.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from everstep.engine.history.clock import microseconds, ticks_of
from everstep.engine.process.leases import NEIGHBOURS, Watch
from everstep.engine.process.without_status import AGAIN_SECONDS, hold_runs_without_status
from everstep.engine.run.drive import DEATHS_MAX
from everstep.engine.run.resume import is_supported
from everstep.engine.run.units import is_delayed
from everstep.errors import StoreError, WorkerGone
from everstep.model.status import ENDED
from everstep.model.untrusted import logger
from everstep.stores.protocol import RunRow

if TYPE_CHECKING:  # a real cycle: a host has this part, which drives the host's runs
    from collections.abc import Callable, Sequence

    from everstep.engine.process.host import Host


log = logger("everstep.worker")

LOOKING: Final = "looking for runs"
POLL_SECONDS: Final = 0.05
SWEEP_SECONDS: Final = 0.5
"""How often owners are checked for life."""
ROOM_SHARE: Final = 4
"""When more runs are due than there was room for, the pump looks again as soon as a fourth of all places is free."""


class Pump:
    """One background task of an app."""

    def __init__(self, app: "Host") -> None:
        self.app = app
        self._nudged = False
        self._pausing: asyncio.Future[None] | None = None
        self._stopping = False
        self._ticks = ticks_of(app.clock)
        """Decides when to sweep, to look and to renew. Setting a clock must not delay a renewal."""
        self._next_sweep = 0
        self._next_look = 0
        self._owes_look = self._owes_watchers = False
        """Whether a look was requested and has not succeeded yet; the same for waiters for runs elsewhere."""
        self._next_look_at_rows = 0
        self._next_renewal = 0
        self._renewed_ticks = self._ticks()
        self._watch = Watch(app.clock, app.lease)
        self.renewed_at = app.clock.now()
        self._next_wake: int | None = None
        self._diverged_tried = False
        self._has_more = False
        """Whether the last look found more than there was room for: then the next turn looks again."""
        self._left = 0
        """How many runs have ended or left since that."""
        self._suspect = ""
        self._is_idle = False
        self._check_watcher: Callable[[], None] | None = getattr(app.store, "check_watcher", None)
        self._left_alone: set[str] = set()
        """Runs of a newer release that were mentioned in the log."""

    def start(self) -> None:
        """Start the task, unless it is running."""
        self.app.background.keep("pump", self._work, endless=True)

    def nudge(self) -> None:
        """Look now."""
        self._nudged = True
        self._end_pause()

    def _end_pause(self) -> None:
        if self._pausing is not None and not self._pausing.done():
            self._pausing.set_result(None)

    def is_pausing(self) -> bool:
        """Return True if everything announced was looked at, and nothing known is due."""
        is_due = self._next_wake is not None and self.app.clock.now() >= self._next_wake
        if not self.app.background.is_under_way("pump"):
            return True
        return self._pausing is not None and not self._pausing.done() and not is_due

    def look_after(self) -> None:
        """Start polling, because there is something to look after from now on."""
        if self._is_idle:
            self._is_idle = False
            self.nudge()

    def has_left(self) -> None:
        """Count a run that has ended or left: when there is room for several, the next ones do not wait for a poll."""
        self._left += 1
        if self._has_more and self._has_room_again():
            self._end_pause()

    def _has_room_again(self) -> bool:
        return self._left * ROOM_SHARE >= self.app.concurrency

    async def stop(self) -> None:
        """End."""
        self._stopping = True
        self.nudge()
        await self.app.background.end("pump")

    def say_soon(self) -> None:
        """Renew at the next turn, because this worker's report has changed."""
        self._next_renewal = min(self._next_renewal, self._ticks())

    async def _work(self) -> None:
        while not self._stopping:
            await self._turn()
            self.app.background.works("pump")
            await self._pause()

    async def _pause(self) -> None:
        """Wait for a nudge, or for the next poll. With nothing to poll for, only for a nudge or the lease."""
        app = self.app
        busy = app.drivers or app.wanted or app.watchers or self._has_more or self._next_wake is not None
        busy = busy or app.queueing.has_own or self._owes_look or app.background.has_failing
        idle = not (app.recover or busy)
        self._is_idle = idle
        seconds = app.lease / 3 if idle else POLL_SECONDS
        may_look = app.background.may_try(LOOKING)
        if self._nudged or (self._has_more and self._has_room_again() and may_look):
            return
        self._pausing = app.loop.create_future()
        timer = app.loop.call_later(seconds, self._end_pause)
        try:
            await self._pausing
        finally:
            timer.cancel()
            self._pausing = None

    async def _turn(self) -> None:
        app = self.app
        if app.is_gone:
            return
        at, ticks = app.clock.now(), self._ticks()
        nudged, self._nudged = self._nudged, False
        do, wait = app.background.attempt, app.background.attempt_async
        do("resting runs", app.resting.evict_oldest)
        do("lost tails", app.look_for_losses)
        sweep = ticks >= self._next_sweep
        if ticks >= self._next_renewal and app.worker:
            await wait("renewals", self._renew, at, ticks)
        if sweep:
            self._next_sweep = ticks + microseconds(SWEEP_SECONDS)
            if app.recover or app.wanted:
                nudged = bool(await wait("dead workers", self._bury, at)) or nudged
            if app.worker and ticks >= self._watch.next_at:
                nudged = bool(await wait("leases of others", self._let_lapse)) or nudged
            if app.recover and ticks >= self._next_look_at_rows and not app.draining:
                await wait("damaged rows", self._look_at_rows, ticks)
            if app.presence.left:
                await wait("runs left to others", app.presence.look_again)
            if self._check_watcher is not None:
                do("watcher of the database", self._check_watcher)
        self._owes_look = nudged = nudged or self._owes_look
        changed = await wait(LOOKING, self._look_if_needed, at, ticks, sweep)
        if changed or nudged or sweep:
            do("notifications", app.notifier.look)
            if app.has_limits:
                do("limits", app.limits.look)
        self._owes_watchers = self._owes_watchers or bool(changed) or nudged
        if self._owes_watchers:
            do("watchers", self._let_watchers_look)

    def _let_watchers_look(self) -> None:
        self.app.watchers.look_at_what_is_elsewhere()
        self._owes_watchers = False

    async def _look_if_needed(self, at: int, ticks: int, sweep: bool) -> bool:
        """Look for runs, if there may be any. Returns whether another process has written something."""
        app = self.app
        app.background.why_not_claiming()
        changed = await app.read(app.store.changed)
        self._owes_look = self._owes_look or changed
        wake = self._next_wake is not None and at >= self._next_wake
        expects = app.recover or app.wanted or app.queueing.has_own
        looks = sweep and expects and ticks >= self._next_look
        if self._owes_look or wake or looks:
            self._next_look = ticks + microseconds(app.store.look_seconds)
            await self._look(at)
        elif self._has_more and (room := self._room()) > 0:
            await self._take_more(at, room)
            self._expect_queues()
        else:
            # An app drives everything that it starts, also beyond its places: when some of those leave, there may be no
            # room yet. Counting continues from here; otherwise the next pause would be zero, and the loop would never
            # get a turn.
            self._left = 0
        self._owes_look = False
        return changed

    def is_late(self) -> bool:
        """Return True if the lease was not renewed for as long as it lasts."""
        return self._ticks() - self._renewed_ticks >= microseconds(self.app.lease)

    async def _renew(self, at: int, ticks: int) -> None:
        """Renew the lease."""
        app = self.app
        lapsed = 0 < self._next_renewal <= ticks - microseconds(app.lease * 2 / 3)
        is_known = await app.presence.renew(at)
        self._next_renewal = ticks + microseconds(app.lease / 3)  # not before: a renewal that failed is tried again
        self.renewed_at, self._renewed_ticks = at, ticks
        if not is_known and await self._stops_as_gone():
            return
        if not is_known:
            log.warning("This worker was declared dead by another one; it lets go of its runs.")
            for driver in list(app.drivers.values()):
                app.take_again(driver)
            app.leave_workers()
            app.background.keep("becoming a worker", app.become_worker)
        elif lapsed:
            await self._let_go_of_lost_runs()

    async def _stops_as_gone(self) -> bool:
        """Stop for good if this worker was declared gone, and return whether it was. Its runs belong to others by
        now.
        """
        try:
            await self.app.read(self.app.presence.refuse_if_gone)
        except WorkerGone as error:
            self.app.fail(error)
            self.app.leave_workers()
            for driver in list(self.app.drivers.values()):
                self.app.let_go(driver, error)
            return True
        return False

    async def _let_go_of_lost_runs(self) -> None:
        """Let go of waiting runs that another worker may have taken over while the lease had lapsed."""
        for driver in list(self.app.drivers.values()):
            row = await self.app.read(self.app.store.run, driver.run)
            if self.app.drivers.get(driver.run) is not driver:
                continue
            if row is not None and row.epoch != driver.row.epoch:  # a missing row is about to be written
                self.app.let_go(driver)
        self.nudge()

    async def _bury(self, at: int) -> bool:
        buried = await self.app.read(self.app.store.bury_dead, at)
        for dead in buried:
            log.info("Worker %s is gone; its runs are free.", dead)
        return bool(buried)

    async def _look_at_rows(self, ticks: int) -> None:
        await hold_runs_without_status(self.app)
        self._next_look_at_rows = ticks + microseconds(AGAIN_SECONDS)

    async def _let_lapse(self) -> bool:
        neighbours = await self.app.read(self.app.store.neighbours, self.app.worker, NEIGHBOURS)
        lapsed = False
        for silent in self._watch.look(neighbours):
            if await self.app.read(self.app.store.lapse, silent.id, silent.lease_until):
                log.info("Worker %s has not renewed its lease; its runs are free.", silent.id)
                lapsed = True
        return lapsed

    async def _look(self, at: int) -> None:
        """Claim runs that need a driver, as far as there is room."""
        app = self.app
        if app.has_runs_in_memory():  # a run that is claimed later reads its inbox then
            for run in await app.read(app.store.pending, app.worker):
                app.wake_driver(run)
        if app.wanted:
            await self._take_wanted(at)
        await self._retry_diverged()
        room = self._room()
        found = await self._take_more(at, room)
        self._next_wake = await app.read(app.store.next_wake, worker=app.worker, everyone=app.recover)
        if self._next_wake is not None and self._next_wake <= at and room > 0 and not found:
            self._next_wake = at + microseconds(SWEEP_SECONDS)  # it may be a run that this worker cannot resume
        self._expect_queues()

    def _expect_queues(self) -> None:
        """Look again when a queue will have room."""
        if (room_at := self.app.queueing.next_at) is not None:
            self._next_wake = min(room_at, self._next_wake or room_at)

    async def _take_more(self, at: int, room: int) -> bool:
        """Claim what is due, as far as there is room, and return whether there was any."""
        app = self.app
        due: list[str] = []
        more = False
        self._left = 0
        if room > 0 and not app.draining and not self._runs_alone():
            names = app.workflows()
            served = app.queueing.served
            claims = not app.background.not_claiming
            everyone = app.recover and claims
            wanted = {"workflows": names, "worker": app.worker, "everyone": everyone, "limit": room, "queues": served}
            due = await app.read(app.store.due, at=at, **wanted)
            await self._take_due(due)
            queues = claims and (app.recover or app.queueing.has_own)
            more = await app.queueing.take(at, room - len(due)) if queues else False
        self._has_more = more or len(due) >= room  # without room, perhaps
        return bool(due)

    def _room(self) -> int:
        """Return how many more runs may be driven here at the same time."""
        return self.app.concurrency - [driver.status for driver in self.app.drivers.values()].count("running")

    async def _take_wanted(self, at: int) -> None:
        """Claim runs that belong here as soon as no other worker drives them."""
        app = self.app
        workers = await app.read(app.store.workers)
        alive = {worker.id for worker in workers if worker.has_lease and worker.id != app.worker}
        outcomes: list[bool | BaseException] = []
        for run in list(app.wanted):
            row = await app.read(app.store.run, run)
            if row is None or row.status in ENDED or row.status == "held":
                app.wanted.discard(run)
                app.watchers.look_again(run)
            elif row.owner not in alive:
                outcomes += await asyncio.gather(app.take_up_run(run), return_exceptions=True)
        self._raise_first(outcomes)

    def _raise_first(self, outcomes: "Sequence[bool | BaseException]") -> None:
        """Raise the first error, which retries the rest, now that all have had their turn."""
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _take_due(self, due: "Sequence[str]") -> None:
        """Claim what is due. A run whose drivers keep dying is a suspect: it runs when nothing else does."""
        app = self.app
        if not due:
            return
        suspects: list[str] = []
        others: list[str] = []
        alive = {None, *(worker.id for worker in await app.read(app.store.workers))}
        elsewhere = [run for run in due if run not in app.drivers]
        rows = {row.id: row for row in await app.read(app.store.rows, elsewhere)}
        for run in due:
            if run in app.drivers:
                app.wake_driver(run)
                continue
            row = rows.get(run)
            if row is None or await self._is_left_alone(row):
                continue
            if row.deaths + (row.owner not in alive) >= DEATHS_MAX - 1:  # its owner's death counts when it is claimed
                suspects.append(run)
            else:
                others.append(run)
        # All at once, so that their claims share a commit.
        self._raise_first(await asyncio.gather(*map(app.take_up_run, others), return_exceptions=True))
        if suspects and not app.is_busy():
            self._suspect = suspects[0]
            await app.take_up_run(self._suspect)

    async def _is_left_alone(self, row: RunRow) -> bool:
        """Return True if a run is not for this worker, or not yet: of a newer release, or delayed and not stopped."""
        app = self.app
        if not is_supported(row):
            if row.id not in self._left_alone:
                self._left_alone.add(row.id)
                log.warning("Run %s is of a newer release (semantics %d): left alone.", row.id, row.semantics)
            return True
        if row.owner == app.worker and is_delayed(row, app.clock.now()):
            inbox = await app.read(app.store.inbox, row.id)
            return not any(delivery.kind in ("cancel", "hold") for delivery in inbox)
        return False

    def _runs_alone(self) -> bool:
        """Return True if a suspect is being driven; it runs alone, so that no other run is blamed for its doing."""
        driver = self.app.drivers.get(self._suspect)
        return driver is not None and driver.status == "running"

    async def _retry_diverged(self) -> None:
        """Compare runs held as diverged once when a worker starts, because new code may match again."""
        app = self.app
        if self._diverged_tried or not app.recover:
            return
        self._diverged_tried = True
        for run in await app.read(app.store.diverged, app.workflows(), 1000):
            try:
                await app.holding.retry_diverged(run)
            except StoreError:
                self._diverged_tried = False
                raise
            except Exception:
                log.exception("Run %s is held as diverged, and cannot be compared with the code", run)
