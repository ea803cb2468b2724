"""The part of an app that drives runs: it claims and resumes them, keeps waiting ones in memory, and lets them go."""

import asyncio
import contextvars
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Final, Self, TypeVar

from everstep.codec import Codec
from everstep.effects import descent
from everstep.engine.code import asyncio_parts
from everstep.engine.code.stops import stop_in
from everstep.engine.code.workflow import DECLARED, Workflow
from everstep.engine.history.clock import Clock, MachineRandom, StoreClock
from everstep.engine.history.verify import Recorded
from everstep.engine.process.background import PATIENCE_SECONDS, Background
from everstep.engine.process.committer import Committer
from everstep.engine.process.elsewhere import Elsewhere, on_a_thread, outlasted
from everstep.engine.process.holding import Holding
from everstep.engine.process.interruptions import Interrupted, Stumbling
from everstep.engine.process.limits import Limits
from everstep.engine.process.lost_tails import Losses
from everstep.engine.process.notify import Notifier, OnHold
from everstep.engine.process.presence import Presence
from everstep.engine.process.pump import Pump
from everstep.engine.process.queues import Queueing
from everstep.engine.process.resting import Resting
from everstep.engine.process.retention import Collector
from everstep.engine.process.returns import Returns
from everstep.engine.process.schedules import Scheduler
from everstep.engine.process.watchers import Watchers
from everstep.engine.run.acting import Acting
from everstep.engine.run.attempts import BodyTasks
from everstep.engine.run.begin import drive_new
from everstep.engine.run.children import RecentEnds
from everstep.engine.run.drive import drive
from everstep.engine.run.driver import LOOK_AGAIN_SECONDS, Driver
from everstep.engine.run.holds import HoldReport
from everstep.engine.run.threads import Threads
from everstep.errors import Damaged, Misuse, StoreError, WorkerGone
from everstep.model.crash_points import crash_point
from everstep.model.events import decode_body
from everstep.model.retention import Retention
from everstep.model.status import ENDED, Status
from everstep.model.untrusted import logger
from everstep.stores.brief import Busy, briefly
from everstep.stores.protocol import (
    Claim,
    Claimed,
    GoneRow,
    HoldRow,
    NewRun,
    NotClaimed,
    Operation,
    Release,
    RunRow,
    Store,
)
from everstep.stores.rows.keys import KeyChanges
from everstep.stores.rows.queues import DEFAULT_QUEUE

ONCE_SECONDS: Final = 10.0
"""The minimum time that closing waits for a body whose effect would be in doubt afterwards, in seconds."""


async def wait_for_bodies(drivers: "Mapping[str, Driver]", seconds: float, *, can_save: Callable[[], bool]) -> None:
    """Wait for running bodies to end. Threads cannot be stopped, so they get a little time in any case.

    A step that must not happen twice and is about to begin is waited for as well, unless nothing can become durable any
    more.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        passed = loop.time() - began
        attempts = [driver.attempts for driver in drivers.values()]
        has_once = any(one.must_not_be_cut_off(starting=can_save()) for one in attempts)
        must_wait = has_once and passed < max(seconds, ONCE_SECONDS)
        if not must_wait and not (any(one.running for one in attempts) and passed < seconds):
            return
        await asyncio.sleep(0.02)


log = logger("everstep.app")

V = TypeVar("V")

THREADS_MAX: Final = 64
"""Number of `def` bodies that run at the same time."""
STOP_SECONDS: Final = 5.0
"""How long closing waits for bodies that were cancelled, in seconds."""
LEAVE_ATTEMPTS: Final = 5
"""How often an app that closes tries to give its runs back."""
CLAIMABLE: Final[tuple[Status, ...]] = ("queued", "running", "waiting")


class Host:
    """A store, a committer, and the drivers of the runs that this process has claimed."""

    has_scheduler = False
    has_limits = False
    has_losses = False
    has_interrupted = False

    def __init__(
        self,
        store: "Store",
        *,
        recover: bool = False,
        lease: float = 30.0,
        concurrency: int = 100,
        clock: "Clock | None" = None,
        codec: Codec | None = None,
        randomness: random.Random | None = None,
        workflows: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        on_hold: "OnHold" = None,
        retention: "Retention | float | timedelta | None" = None,
        patience: float = PATIENCE_SECONDS,
        gone_after: float | None = None,
    ) -> None:
        if lease < 1:
            raise Misuse(f"lease={lease!r}: it is a number of seconds, at least 1.")
        if not patience > 0:
            raise Misuse(f"patience={patience!r}: it is a number of seconds, more than 0.")
        self.store = store
        self.recover = recover
        self.gone_after = gone_after
        self.lease = lease
        self.concurrency = concurrency
        self.clock = clock or StoreClock(store.now)
        self.now = self.clock.now
        self.opened_at = self.clock.now()
        self.codec = codec or Codec()
        self.randomness = randomness or MachineRandom()
        self.context = contextvars.copy_context()
        self.drivers: dict[str, Driver] = {}
        self.wanted: set[str] = set()
        """Runs that this app should drive and does not yet: another worker does, or they are about to be claimed."""
        self.untakeable: set[str] = set()
        """Runs that cannot be claimed, or whose chain key is missing here; they are left alone until this app ends."""
        self.background = Background(self, patience)
        self.stumbling = Stumbling(self)
        self.watchers = Watchers(self)
        self.draining = False
        self.notifier = Notifier(self, on_hold)
        self.collector = Collector(self, retention)
        self.worker = ""
        self.life = ""
        """The store's present life, once this is a worker. It does not end while there are workers."""
        self._workflows = workflows
        self._has_children = False
        self._awaited_keys: set[str] = set()
        """Keys that runs of this process wait for, or waited for."""
        self.resting = Resting(self)
        self.holding = Holding(self)
        self.queueing = Queueing(self, queues)
        self.presence = Presence(self)
        self._taking_up: set[str] = set()
        self._woken: set[str] = set()
        """Those of them that have received a delivery since they were claimed."""
        self._comparing: set[str] = set()
        """Those of them whose outside is being compared."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._entering: asyncio.Task[None] | None = None
        """The task that registers this process as a worker."""
        self._failed: BaseException | None = None

    def leave_workers(self) -> None:
        """Record that this process is no longer a worker."""
        self.worker = ""

    # -- opening and closing ---------------------------------------------------------------------------------------
    async def open(self) -> Self:
        """Begin: bind to the running loop, and with `recover` resume what was left behind."""
        asyncio_parts.install()
        self.loop = asyncio.get_running_loop()
        descent.watch_tasks(self.loop)
        self.thread = threading.get_ident()
        failed, works = self.background.failed, self.background.works
        self.threads = Threads(self.loop, THREADS_MAX, partial(failed, "threads"), partial(works, "threads"))
        self.acting = Acting(self.loop, self.threads, self._running_bodies)
        descent.install()
        self.committer = Committer(self.store, self.loop, partial(failed, "commits"), partial(works, "commits"))
        self.returns = Returns(self.background, self.committer)
        self.body_tasks = BodyTasks(self.loop, self.context)
        self.elsewhere = Elsewhere(self.loop)
        self.pump = Pump(self)
        if self.recover:
            await self.become_worker()
        return self

    async def become_worker(self) -> None:
        """Register this process as a worker, when it drives its first run."""
        if not self.worker:
            if self.is_gone:
                self.refuse_when_failed()
            if self._entering is None or self._entering.done():
                self._entering = self.loop.create_task(self._enter())
            await asyncio.shield(self._entering)  # the waiter may be cancelled, but a registered worker must be known

    async def _enter(self) -> None:
        worker, self.life = await on_a_thread(self.presence.enter)
        self.acting.enter(worker)
        self.worker = worker
        self.pump.start()
        self.collector.begin()
        if self.recover:
            self.scheduler.look_closely()

    async def close(self, drain: float = 0.0) -> None:
        """Stop: start no more bodies, wait `drain` seconds for those that run, save, and give the runs back."""
        self.draining, can_wait = True, True
        try:
            if self._entering is not None:
                await asyncio.wait([self._entering])
            await self.pump.stop()
            self.collector.close()
            if self.has_interrupted:
                self.interrupted.close()
            if self.has_scheduler:
                self.scheduler.close()
            async with self.presence.prolonged():
                await wait_for_bodies(self.drivers, drain, can_save=lambda: self._failed is None)
            if self._failed is None:
                for driver in self.drivers.values():
                    driver.attempts.bodies.record_heartbeats()
                    driver.attempts.bodies.record_charges()
                await self.committer.drained()
            await self.notifier.close(send=self._failed is None)
            await self._stop_all()
            await self.committer.close()
        except GeneratorExit:
            can_wait = False  # this task no longer runs
            raise
        finally:
            await self._end(can_wait=can_wait and asyncio._get_running_loop() is not None)

    async def _end(self, *, can_wait: bool) -> None:
        """Let go of everything. The store is left on a thread, and waited for even if the caller is cancelled."""
        if self._entering is not None and can_wait:
            await outlasted(self._entering)
        for driver in list(self.drivers.values()):
            driver.stop()
        self.background.close()
        self.committer.stop()
        self.threads.close()
        acting = self.acting.runs() if self.worker else set()
        leave = partial(self._leave_store, acting, leaves=bool(self.worker) and self._failed is None)
        try:
            if can_wait:
                left = self.elsewhere.call(leave)
                await outlasted(left)
                left.result()
            else:
                leave()
        finally:
            self._failed = self._failed or Misuse("The app was closed.")
            self.watchers.look_all_again()

    def _leave_store(self, acting: set[str], *, leaves: bool) -> None:
        """Give the runs back and close the store. On a thread, because the store may block."""
        try:
            if leaves:
                self._leave_patiently(acting)
        finally:  # in any case: without its liveness lock, the runs of this worker are free
            if acting:
                log.warning("Steps of %d runs still act; these runs are free when that has ended.", len(acting))
                self.acting.keep_until_ended(self.store.hand_over_lock(self.worker))
            self.store.close()

    async def _stop_all(self) -> None:
        """Take all runs out of memory, and wait until their bodies have taken note."""
        bodies = [one.task for driver in self.drivers.values() for one in driver.attempts.running.values()]
        for driver in list(self.drivers.values()):
            driver.stop()
        for task in self._tasks:
            task.cancel()
        kept = self.background.close()
        if stopping := [task for task in (*bodies, *self._tasks, *kept) if task is not None]:
            await asyncio.wait(stopping, timeout=STOP_SECONDS)

    def _leave_patiently(self, acting: set[str]) -> None:
        """Leave the store; a statement that was interrupted, and wrote nothing, is repeated."""
        for attempt in range(1, LEAVE_ATTEMPTS + 1):
            try:
                self._leave(acting)
                return
            except StoreError as error:
                if not error.pauses or attempt == LEAVE_ATTEMPTS:
                    raise

    def _leave(self, acting: set[str]) -> None:
        """Give all runs back. A run of which a step still acts keeps its owner and liveness lock until that ends."""
        if not acting:
            self.store.leave(self.worker)
            return
        others = [driver for driver in self.drivers.values() if driver.run not in acting]
        back: list[Operation] = [
            Release(one.run, one.row.epoch, "waiting" if one.status == "waiting" else "queued") for one in others
        ]
        self.store.commit(back)

    def _running_bodies(self) -> list[tuple[str, int]]:
        """Return the run and the call of each body that runs here. May be called on any thread."""
        drivers = [driver for driver in list(self.drivers.values()) if not driver.stopped]
        return [(driver.run, call) for driver in drivers for call in list(driver.attempts.bodies.running)]

    # -- driving ---------------------------------------------------------------------------------------------------
    @property
    def is_failed(self) -> bool:
        """Whether the store has failed, so that nothing is written any more."""
        return self._failed is not None

    @property
    def is_gone(self) -> bool:
        """Whether this app has stopped because its worker or host was declared gone."""
        return isinstance(self._failed, WorkerGone)

    def refuse_when_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def drive_new(self, new: NewRun, workflow: Workflow) -> None:
        """Drive a run that was started just now."""
        seq, kind, step, at, body, _ = new.event
        drive_new(self, new.row, workflow, Recorded(seq, kind, step, at, new.started or decode_body(kind, body)))

    def note_driven(self, driver: Driver) -> None:
        """Record that a run is driven here from now on."""
        self.drivers[driver.run] = driver
        self.pump.look_after()
        self.wanted.discard(driver.run)
        self.watchers.look_again(driver.run)  # another process may have written before this one took the run over

    def forget_driver(self, driver: Driver) -> None:
        """Forget a run that is no longer driven here, if it was by this driver."""
        if self.drivers.get(driver.run) is driver:
            del self.drivers[driver.run]
            self.pump.has_left()

    def set_aside(self, row: RunRow, error: BaseException) -> None:
        """The code of a claimed run was stopped before its first rest, or in a replay. Anything else is raised."""
        if (stop := stop_in(error)) is None:
            raise error
        self.interrupted.set_aside(row, stop, "workflow code")

    async def hold_or_leave(self, row: RunRow, report: HoldReport) -> None:
        """Hold a claimed run, unless its code may match on another worker."""
        if not await self.presence.leaves_for_another(row, report.reason):
            self.spawn(self.holding.hold_claimed(row, report), run=row.id)

    def held(self, hold: "HoldRow | None") -> None:
        """Notify of a run that is held."""
        if hold is None:
            return
        log.warning("Run %s is held (%s); `everstep holds` says why and what can be done.", hold.run, hold.reason)
        self.notifier.tell(hold)

    @contextmanager
    def setting_aside(self, run: str) -> Iterator[None]:
        """Do not resume a claimed run within the block, because something else is done with it."""
        is_new = run not in self._taking_up
        self._taking_up.add(run)
        try:
            yield
        finally:
            if is_new:
                self._taking_up.discard(run)

    def put_aside(self, run: str) -> None:
        """Do not resume a run until it is put back."""
        self._taking_up.add(run)

    def put_back(self, run: str) -> None:
        """Allow a run to be resumed that was put aside."""
        self._taking_up.discard(run)
        self._woken.discard(run)

    async def take_up_run(self, run: str, statuses: Sequence[Status] = CLAIMABLE) -> bool:
        """Claim a run if it is free, and drive it. Returns whether it is driven here now."""
        if run in self.drivers or run in self._taking_up or self.draining or run in self.untakeable:
            return run in self.drivers
        if self.has_interrupted and self.interrupted.is_pausing(run):
            return False
        self._taking_up.add(run)
        stumbled: Exception | None = None
        try:
            await self.become_worker()
            claim = Claim(run, self.worker, self.clock.now(), statuses, True, self.queueing.served)
            verdict = await self.committer.submit(claim)
            if isinstance(verdict, NotClaimed):
                row = verdict.row
                if row is None or row.status in ENDED or (row.owner is None and self.queueing.expect(row)):
                    self.wanted.discard(run)
            if not isinstance(verdict, Claimed) or self.draining:
                return False
            if self.is_lost(run):
                await self.give_back(verdict.row)  # it must be held first
                return False
            await drive(self, verdict)
            return run in self.drivers
        except Damaged as error:
            log.error("Run %s cannot be resumed: %s", run, error)
            self.cannot_take_up(run)
            return False
        except (StoreError, asyncio.CancelledError):
            self.want(run)  # it may be this worker's by now, and no other would look for it
            raise
        except Exception as error:  # noqa: BLE001  # it reaches this run alone; others are claimed
            stumbled = error
            return False
        finally:
            self._woken.discard(run)
            if run not in self._comparing:
                self._taking_up.discard(run)
            if stumbled is not None:
                self.stumbling.take_later(run, stumbled)

    def was_woken(self, run: str) -> bool:
        """Return True if a run has received a delivery since it was claimed."""
        return run in self._woken

    async def give_back(self, row: RunRow) -> None:
        """Give a claimed run back as it was."""
        await self.committer.submit(Release(row.id, row.epoch, row.status))

    async def leave_alone(self, row: RunRow) -> None:
        """Give a run back that this process cannot read, and do not claim it again."""
        await self.give_back(row)
        self.cannot_take_up(row.id)

    def cannot_take_up(self, run: str) -> None:
        """Leave a run alone from now on, until it was repaired."""
        self.untakeable.add(run)
        self.wanted.discard(run)
        self.watchers.look_again(run)

    def compare_later(self, run: str, comparing: Coroutine[Any, Any, None]) -> None:
        """Compare a run with the outside in the background. It is not resumed meanwhile."""
        self._comparing.add(run)
        self.spawn(self._compare(run, comparing), run=run)

    async def _compare(self, run: str, comparing: Coroutine[Any, Any, None]) -> None:
        try:
            await comparing
        finally:
            self._comparing.discard(run)
            self._taking_up.discard(run)

    def abandon(self, driver: Driver) -> None:
        """Resume a run whose outside could not be compared."""
        driver.stop()
        if not self.draining:
            self.want(driver.run)

    def adopt(self, run: str) -> None:
        """Drive a child run that one of our runs has started."""
        self._has_children = True
        self.want(run)
        crash_point("child.adopted")
        self.spawn(self._adopt(run), run=run)

    async def _adopt(self, run: str) -> None:
        taken = await self.take_up_run(run)
        if not taken:
            await self.holding.retry_diverged(run)
        if not taken or self.drivers[run].row.epoch > 1:
            # It existed before. If it has ended, or is another worker's, its parent's inbox has that already.
            self.pump.nudge()

    def want(self, run: str) -> None:
        """Remember a run that should be driven here as soon as no other worker does."""
        self.wanted.add(run)
        self.pump.look_after()

    def wake(self, run: str) -> None:
        """Look at a run that received something: if it is here, it reads its inbox; otherwise look who can claim it."""
        driver = self.drivers.get(run)
        if driver is not None:
            self.spawn(self._wake(driver), run=run)  # later: the code that sent it continues first
        else:
            self.pump.nudge()

    async def _wake(self, driver: Driver) -> None:
        driver.take_inbox_and_deadlines()

    def wake_driver(self, run: str) -> None:
        """Make a run that is here read its inbox and check its deadlines."""
        driver = self.drivers.get(run)
        if driver is not None:
            driver.take_inbox_and_deadlines()
        elif run in self._taking_up:
            self._woken.add(run)

    def has_runs_in_memory(self) -> bool:
        """Return True if any run is in memory here, or is being resumed."""
        return bool(self.drivers or self._taking_up)

    def is_busy(self) -> bool:
        """Return True if any run is active here now."""
        return bool(self._taking_up) or any(driver.status == "running" for driver in self.drivers.values())

    def is_at_rest(self) -> bool:
        """Return True if every run that is driven here waits, and all of that is durable."""
        is_busy = self._taking_up or self._tasks or self.background.is_busy
        return not is_busy and all(driver.is_idle for driver in self.drivers.values())

    def take_again(self, driver: Driver) -> None:
        """Evict a run, and resume it from its history."""
        self.let_go(driver)
        self.want(driver.run)

    def take_next(self, driver: Driver) -> None:
        """Evict the old generation of a run, and resume the new one."""
        self.take_again(driver)
        self.spawn(self.take_up_run(driver.run), run=driver.run)

    def let_go(self, driver: Driver, error: BaseException | None = None) -> None:
        """Evict a run that has ended, is held, was taken over, or whose store failed, and notify its waiters."""
        self.resting.forget(driver)
        self.forget_driver(driver)
        status, outcome, hold = driver.ended_as(), driver.outcome, driver.hold
        if status in ENDED and driver.row.parent is not None and driver.budgets is None:
            self.recent_ends.note(driver.run, status, outcome, driver.ends_secretly)
        driver.stop()
        if error is not None:
            self.fail(error)
            return
        self.held(hold if status == "held" else None)
        if status is not None:
            if self.has_interrupted:
                self.interrupted.forget(driver.run)
            self.stumbling.forget(driver.run)
            crash_point("run.ended")
            self.watchers.tell(driver.run, status, outcome)
            if self._has_children or self._awaited_keys or driver.row.queue != DEFAULT_QUEUE:
                self.pump.nudge()  # another run here may follow this one, or wait for its keys or its slot
        elif driver.run in self.watchers:
            self.wanted.add(driver.run)
            self.watchers.look_again(driver.run)  # another process may have taken it over, and ended it

    def fail(self, error: BaseException) -> None:
        """Stop because the store has failed: this process writes nothing more, and all waiters get the error."""
        if self._failed is None:
            what = "This worker was declared gone" if self.is_gone else "The store failed"
            log.error("%s; this process stops writing. %s", what, error)
        self._failed = error
        self.watchers.look_all_again()

    def note_gone(self, worker: str) -> None:
        """Record that a worker counts as gone: it stops if it comes back, and people see why its steps were
        repeated.
        """
        note = f"no sign of life for {self.gone_after:g} s (gone_after)"
        gone = GoneRow("worker", worker, self.clock.now(), self.worker, note)
        self.spawn(on_a_thread(self.store.declare_gone, gone, [worker]))

    def ended_without_code(self, run: str, status: Status) -> None:
        """Notify waiters of a run that ended without its code, and make its followers read their inboxes."""
        self.watchers.tell(run, status, None)
        self.pump.nudge()

    def keys_changed(self, changes: "KeyChanges") -> None:
        """Make the runs read their inboxes that wait for changed keys, here or left behind by others."""
        changed = changes.changed()
        if changes.waits or changed & self._awaited_keys or (self.recover and changed):
            self.pump.nudge()
        self._awaited_keys -= changed
        self._awaited_keys |= {wait.key for wait in changes.waits}

    # -- small helpers ---------------------------------------------------------------------------------------------
    def workflows(self) -> Sequence[str]:
        """Return the names of the workflows that this app can drive."""
        return self._workflows if self._workflows is not None else DECLARED.names()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, run: str = "") -> None:
        """Run a coroutine once in the background. A failure is recorded, and its run is resumed.

        Work that must continue in any case belongs to `background` instead.
        """
        try:
            task = self.loop.create_task(coroutine, context=self.context.copy())
        except Exception as error:  # noqa: BLE001  # there is no memory for it just now
            coroutine.close()
            self._spawned_failed(error, run)
            return
        self._tasks.add(task)
        task.add_done_callback(partial(self._spawned_done, run))

    def _spawned_done(self, run: str, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self.draining and task.cancelled():
            return
        error = asyncio.CancelledError("the application cancelled it") if task.cancelled() else task.exception()
        if error is not None:
            self._spawned_failed(error, run)

    def _spawned_failed(self, error: BaseException, run: str) -> None:
        if isinstance(error, StoreError):
            log.error("The store failed just now, and is asked again: %s", error)
            self.loop.call_later(LOOK_AGAIN_SECONDS, self.pump.nudge)
        elif run and run not in self.drivers:
            self.stumbling.take_later(run, error, is_own=not isinstance(error, asyncio.CancelledError))
        else:
            self.background.failed("tasks", error)
            self.background.works("tasks")  # each task is another one
            self.loop.call_later(LOOK_AGAIN_SECONDS, self.pump.nudge)

    # -- parts that an app has only once they are asked for --------------------------------------------------------
    @cached_property
    def recent_ends(self) -> RecentEnds:
        """How children ended that were driven here."""
        return RecentEnds()

    @cached_property
    def scheduler(self) -> Scheduler:
        """What starts the runs of schedules. Only an app with `recover` does that."""
        self.has_scheduler = True
        return Scheduler(self)

    @cached_property
    def limits(self) -> Limits:
        """The steps that wait for a slot of a named limit, and those that have one."""
        self.has_limits = True
        return Limits(self)

    @cached_property
    def losses(self) -> Losses:
        """The runs that have lost their tails and are not held yet."""
        self.has_losses = True
        return Losses(self)

    @cached_property
    def interrupted(self) -> Interrupted:
        """The runs that were stopped, and are resumed after a pause."""
        self.has_interrupted = True
        return Interrupted(self)

    def look_for_losses(self) -> set[str]:
        """Stop the runs that are known by now to have lost their tails, have them held, and return their ids."""
        found = self.store.lost_tails()
        return self.losses.look(found) if found or self.has_losses else set()

    def is_lost(self, run: str) -> bool:
        """Tell whether a run is not to be driven: its tail is lost, and it is about to be held."""
        self.look_for_losses()
        return self.has_losses and run in self.losses.open

    # -- asking the store ------------------------------------------------------------------------------------------
    async def read(self, method: Callable[..., V], /, *args: Any, **named: Any) -> V:
        """Call a method of the store: right here if it answers at once, else on a thread, while the loop runs on.

        It may be begun twice, and on another thread. So it is only for calls that change nothing before the store has
        answered.
        """
        try:
            return briefly(method, *args, **named)
        except Busy:
            return await self.elsewhere.call(partial(method, *args, **named))

    def read_then(
        self,
        run: str,
        then: Callable[[V], Any],
        failed: Callable[[StoreError], Any],
        method: Callable[..., V],
        /,
        *args: Any,
    ) -> None:
        """Do the same where nothing can be awaited: call `then` with the answer, now or when it has come."""
        try:
            answer = briefly(method, *args)
        except Busy:  # not awaited by a task: an application may cancel all tasks, and the run would wait for ever
            answered = self.elsewhere.call(partial(method, *args))
            answered.add_done_callback(partial(self._answered, run, then, failed), context=self.context.copy())
        except StoreError as error:
            failed(error)
        else:
            then(answer)

    def _answered(
        self, run: str, then: Callable[[V], Any], failed: Callable[[StoreError], Any], answered: "asyncio.Future[V]"
    ) -> None:
        try:
            then(answered.result())
        except StoreError as error:
            failed(error)
        except Exception as error:  # noqa: BLE001  # whatever it is reaches this run alone
            if (driver := self.drivers.get(run)) is not None:
                self.stumbling.leave(driver, error)
            else:
                self._spawned_failed(error, run)
