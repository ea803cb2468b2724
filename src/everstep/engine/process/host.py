"""The part of an app that drives runs: it claims them, takes them up, lets them rest, and lets them go."""

import asyncio
import contextvars
import random
import threading
from collections import OrderedDict
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
from everstep.engine.history.damage import diagnose
from everstep.engine.history.verify import Recorded
from everstep.engine.process.background import PATIENCE_SECONDS, Background
from everstep.engine.process.committer import Committer
from everstep.engine.process.elsewhere import Elsewhere, on_a_thread, outlasted
from everstep.engine.process.interruptions import Interrupted, Stumbling
from everstep.engine.process.limits import Limits
from everstep.engine.process.lost_tails import Losses
from everstep.engine.process.notify import Notifier, OnHold
from everstep.engine.process.presence import Presence
from everstep.engine.process.pump import Pump
from everstep.engine.process.queues import Queueing
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
from everstep.engine.run.holds import HoldReport, damaged_report
from everstep.engine.run.inbox import cancel_in, hold_in
from everstep.engine.run.resume import is_supported, would_go_on
from everstep.engine.run.threads import Threads
from everstep.engine.run.units import cancelled_unit, hold_unit, resolve_unit
from everstep.errors import Damaged, Misuse, StoreError, WorkerGone
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.model.events import decode_body
from everstep.model.retention import Retention
from everstep.model.status import ENDED, Status
from everstep.model.untrusted import logger
from everstep.stores.brief import Busy, briefly
from everstep.stores.protocol import (
    Accepted,
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
"""How long closing waits at least for a body whose effect nobody could tell afterwards."""


async def wait_for_bodies(drivers: "Mapping[str, Driver]", seconds: float, *, can_save: Callable[[], bool]) -> None:
    """Let running bodies end. Threads cannot be stopped, so they get a little time in any case.

    What must not happen twice and is about to begin is waited for as well, unless nothing can become durable any more.
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


RESTING_MAX: Final = 256
"""Number of waiting runs cached in memory, to avoid a replay when a signal arrives."""


class Resting:
    """The waiting runs of an app, the longest waiting first."""

    def __init__(self, app: "Host") -> None:
        self._app = app
        self._drivers: OrderedDict[str, Driver] = OrderedDict()

    def add(self, driver: "Driver") -> None:
        """Keep a run that waits now; the one that has waited longest leaves."""
        if driver.execution.witnesses and driver.is_idle:
            self._evict(driver)  # what it remembers of the outside is compared again before it goes on
            return
        self._drivers[driver.run] = driver
        self._drivers.move_to_end(driver.run)
        self.evict_oldest()

    def evict_oldest(self) -> None:
        """Let waiting runs leave memory while there are too many, the longest waiting first."""
        while len(self._drivers) > RESTING_MAX:
            run, oldest = next(iter(self._drivers.items()))
            if oldest.status != "waiting" or oldest.stopped:
                del self._drivers[run]
            elif oldest.is_idle:
                self._evict(oldest)
            else:
                return  # what it wrote is not durable yet; the pump looks again

    def forget(self, driver: "Driver") -> None:
        """The run leaves memory in another way."""
        self._drivers.pop(driver.run, None)

    def _evict(self, driver: "Driver") -> None:
        self._drivers.pop(driver.run, None)
        self._app.drivers.pop(driver.run, None)
        driver.stop()
        self._app.pump.nudge()  # from now on it wakes this run


class Parts:
    """What an app has only once somebody has asked for it."""

    has_scheduler = False
    has_limits = False
    has_losses = False
    has_interrupted = False

    @cached_property
    def recent_ends(self) -> "RecentEnds":
        """How children ended that were driven here."""
        return RecentEnds()

    @cached_property
    def scheduler(self: Any) -> "Scheduler":
        """What starts the runs of schedules. Only an app with `recover` does that."""
        self.has_scheduler = True
        return Scheduler(self)

    @cached_property
    def limits(self: Any) -> "Limits":
        """The steps that wait for a slot of a named limit, and those that have one."""
        self.has_limits = True
        return Limits(self)

    @cached_property
    def losses(self: Any) -> "Losses":
        """The runs that have lost their tails and are not held yet."""
        self.has_losses = True
        return Losses(self)

    @cached_property
    def interrupted(self: Any) -> "Interrupted":
        """The runs that were stopped, and are taken up again after a pause."""
        self.has_interrupted = True
        return Interrupted(self)

    def look_for_losses(self: Any) -> set[str]:
        """Stop the runs that are known by now to have lost their tails, have them held, and return their ids."""
        found = self.store.lost_tails()
        return self.losses.look(found) if found or self.has_losses else set()

    def is_lost(self, run: str) -> bool:
        """Tell whether a run is not to be driven: its tail is lost, and it is about to be held."""
        self.look_for_losses()
        return self.has_losses and run in self.losses.open


log = logger("everstep.app")

V = TypeVar("V")

THREADS_MAX: Final = 64
"""Number of `def` bodies that run at the same time."""
STOP_SECONDS: Final = 5.0
"""How long closing waits for bodies that were cancelled."""
LEAVE_ATTEMPTS: Final = 5
"""How often an app that closes tries to give its runs back."""
CLAIMABLE: Final[tuple[Status, ...]] = ("queued", "running", "waiting")


class Host(Parts):
    """A store, a committer, and the drivers of the runs that this process has claimed."""

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
        """Runs that this app should drive and does not yet: somebody else does, or they are about to be claimed."""
        self.untakeable: set[str] = set()
        """Runs that cannot be claimed, or whose chain key is not here; they are let alone until this app ends."""
        self.background = Background(self, patience)
        self.returns = Returns(self)
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
        self.queueing = Queueing(self, queues)
        self.presence = Presence(self)
        self._taking_up: set[str] = set()
        self._woken: set[str] = set()
        """Those of them for which something has arrived since they were claimed."""
        self._comparing: set[str] = set()
        """Those of them whose outside is being compared."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._entering: asyncio.Task[None] | None = None
        """What enters this process among the workers."""
        self._failed: BaseException | None = None

    def leave_workers(self) -> None:
        """This process is no worker any more."""
        self.worker = ""

    # -- opening and closing ---------------------------------------------------------------------------------------
    async def open(self) -> Self:
        """Begin: bind to the running loop, and with `recover` take up what was left behind."""
        asyncio_parts.install()
        self.loop = asyncio.get_running_loop()
        descent.watch_tasks(self.loop)
        self.thread = threading.get_ident()
        failed, works = self.background.failed, self.background.works
        self.threads = Threads(self.loop, THREADS_MAX, partial(failed, "threads"), partial(works, "threads"))
        self.acting = Acting(self)
        descent.install()
        self.committer = Committer(self.store, self.loop, partial(failed, "commits"), partial(works, "commits"))
        self.body_tasks = BodyTasks(self.loop, self.context)
        self.elsewhere = Elsewhere(self.loop)
        self.pump = Pump(self)
        if self.recover:
            await self.become_worker()
        return self

    async def become_worker(self) -> None:
        """Enter this process among the workers, once it drives its first run."""
        if not self.worker:
            if self.is_gone:
                self.refuse_when_failed()
            if self._entering is None or self._entering.done():
                self._entering = self.loop.create_task(self._enter())
            await asyncio.shield(self._entering)  # whoever waits may be cancelled: a worker that is entered is known

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
            can_wait = False  # nobody runs this task any more
            raise
        finally:
            await self._end(can_wait=can_wait and asyncio._get_running_loop() is not None)

    async def _end(self, *, can_wait: bool) -> None:
        """Let go of everything. The store is left on a thread, and waited for also if the caller is cancelled."""
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
        """Give the runs back and close the store. On a thread: it may have to be waited for."""
        try:
            if leaves:
                self._leave_patiently(acting)
        finally:  # whatever happens: without its liveness lock, the runs of this worker are free
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
        """Leave; a statement that was interrupted, and wrote nothing, is tried again."""
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
        """A run is driven here from now on."""
        self.drivers[driver.run] = driver
        self.pump.look_after()
        self.wanted.discard(driver.run)
        self.watchers.look_again(driver.run)  # for what another process wrote before this one took the run over

    def forget_driver(self, driver: Driver) -> None:
        """A run is no longer driven here, if it was by this driver."""
        if self.drivers.get(driver.run) is driver:
            del self.drivers[driver.run]
            self.pump.has_left()

    def set_aside(self, row: RunRow, error: BaseException) -> None:
        """The code of a claimed run was stopped before its first rest, or in a replay. Anything else is raised."""
        if (stop := stop_in(error)) is None:
            raise error
        self.interrupted.set_aside(row, stop, "workflow code")

    def hold_new(self, run: str, report: HoldReport) -> None:
        """Hold a run that was started just now."""
        self.spawn(self._hold_new(run, report), run=run)

    async def hold_or_leave(self, row: RunRow, report: HoldReport) -> None:
        """Hold a claimed run, unless another worker may find nothing wrong with it."""
        if not await self.presence.leaves_for_another(row, report.reason):
            self.spawn(self.hold_claimed(row, report), run=row.id)

    async def _hold_new(self, run: str, report: "HoldReport") -> None:
        """Hold a run that was started just now. Its start may not be durable yet, and a claim comes behind that."""
        verdict = await self.committer.submit(Claim(run, self.worker, self.clock.now(), ("running",)))
        if isinstance(verdict, Claimed):
            await self.hold_claimed(verdict.row, report)

    async def hold_claimed(self, row: RunRow, report: "HoldReport", consumed: Sequence[int] = ()) -> None:
        try:
            unit = await self.read(hold_unit, self, row, report)
            unit.consumed = consumed
            verdict = await self.committer.submit(unit)
        except StoreError:
            self.want(row.id)  # it is taken up again, and held then
            raise
        if not isinstance(verdict, Accepted):
            self.watchers.look_again(row.id)  # somebody else drives it, and what looked wrong was their progress
            return
        self.held(unit.hold)
        self.watchers.tell(row.id, "held", None)

    def held(self, hold: "HoldRow | None") -> None:
        """Tell whoever should know that a run is held."""
        if hold is None:
            return
        log.warning("Run %s is held (%s); `everstep holds` says why and what can be done.", hold.run, hold.reason)
        self.notifier.tell(hold)

    @contextmanager
    def setting_aside(self, run: str) -> Iterator[None]:
        """Within the block a run that is claimed here is not taken up: something else is done with it."""
        is_new = run not in self._taking_up
        self._taking_up.add(run)
        try:
            yield
        finally:
            if is_new:
                self._taking_up.discard(run)

    def put_aside(self, run: str) -> None:
        """Do not take up a run until it is put back."""
        self._taking_up.add(run)

    def put_back(self, run: str) -> None:
        """A run that was put aside may be taken up again."""
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
                await self.give_back(verdict.row)  # it is held first
                return False
            await drive(self, verdict)
            return run in self.drivers
        except Damaged as error:
            log.error("Run %s cannot be taken up: %s", run, error)
            self.cannot_take_up(run)
            return False
        except (StoreError, asyncio.CancelledError):
            self.want(run)  # it may be ours by now, and nobody else would look for it
            raise
        except Exception as error:  # noqa: BLE001  # it reaches this run alone; others are taken up
            stumbled = error
            return False
        finally:
            self._woken.discard(run)
            if run not in self._comparing:
                self._taking_up.discard(run)
            if stumbled is not None:
                self.stumbling.take_later(run, stumbled)

    def was_woken(self, run: str) -> bool:
        """Tell whether something has arrived for a run since it was claimed."""
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
        """Let the outside of a run be compared while others are looked after. It is not taken up again meanwhile."""
        self._comparing.add(run)
        self.spawn(self._compare(run, comparing), run=run)

    async def _compare(self, run: str, comparing: Coroutine[Any, Any, None]) -> None:
        try:
            await comparing
        finally:
            self._comparing.discard(run)
            self._taking_up.discard(run)

    def abandon(self, driver: Driver) -> None:
        """The outside of a run could not be compared: it is taken up again."""
        driver.stop()
        if not self.draining:
            self.want(driver.run)

    async def look_at_delayed(self, row: RunRow) -> None:
        """A run that has not begun is cancelled or held without its code; anything else waits until it begins."""
        for delivery in await self.read(self.store.inbox, row.id):
            if delivery.kind == "cancel":
                await self.end_claimed(row, cancel_in(delivery))
                return
            if delivery.kind == "hold":
                await self.hold_claimed(row, hold_in(delivery), [delivery.number])
                return

    async def end_claimed(self, row: RunRow, request: ev.CancelRequested) -> bool:
        """End a claimed run as cancelled, without its code. Cancels in its inbox are answered by that as well."""
        consumed = [one.number for one in await self.read(self.store.inbox, row.id) if one.kind == "cancel"]
        try:
            unit = await self.read(cancelled_unit, self, row, request, consumed)
        except Damaged as error:
            report = damaged_report(error, await self.read(diagnose, self.store, row))
            unit = await self.read(hold_unit, self, row, report)
            if isinstance(await self.committer.submit(unit), Accepted):
                self.held(unit.hold)
            raise
        verdict = await self.committer.submit(unit)
        if not isinstance(verdict, Accepted):
            await self.returns.give_back(Release(row.id, row.epoch, "queued"))
            return False
        for post in unit.posts:
            self.wake(post.run)
        self.ended_without_code(row.id, "cancelled")
        return True

    def adopt(self, run: str) -> None:
        """Drive a child run that one of our runs has started."""
        self._has_children = True
        self.want(run)
        crash_point("child.adopted")
        self.spawn(self._adopt(run), run=run)

    async def _adopt(self, run: str) -> None:
        taken = await self.take_up_run(run)
        if not taken:
            await self.retry_diverged(run)
        if not taken or self.drivers[run].row.epoch > 1:
            # It was there before. If it has ended, or is another's, that is in its parent's inbox already.
            self.pump.nudge()

    def want(self, run: str) -> None:
        """Remember a run that should be driven here as soon as nobody else does."""
        self.wanted.add(run)
        self.pump.look_after()

    def wake(self, run: str) -> None:
        """Something arrived for a run: if it is here, let it look into its inbox; else look who can take it up."""
        driver = self.drivers.get(run)
        if driver is not None:
            self.spawn(self._wake(driver), run=run)  # later: the code that sent it goes on first
        else:
            self.pump.nudge()

    async def _wake(self, driver: Driver) -> None:
        driver.take_inbox_and_deadlines()

    def wake_driver(self, run: str) -> None:
        """Let a run that is here look at its inbox and its deadlines."""
        driver = self.drivers.get(run)
        if driver is not None:
            driver.take_inbox_and_deadlines()
        elif run in self._taking_up:
            self._woken.add(run)

    def has_runs_in_memory(self) -> bool:
        """Tell whether any run is in memory here, or is being taken up."""
        return bool(self.drivers or self._taking_up)

    def is_busy(self) -> bool:
        """Tell whether any run is being driven here just now."""
        return bool(self._taking_up) or any(driver.status == "running" for driver in self.drivers.values())

    def is_at_rest(self) -> bool:
        """Tell whether every run that is driven here waits, and all of that is durable."""
        is_busy = self._taking_up or self._tasks or self.background.is_busy
        return not is_busy and all(driver.is_idle for driver in self.drivers.values())

    async def retry_diverged(self, run: str) -> None:
        """Compare a run that is held as diverged with the code as it is now; if it matches, it goes on by itself."""
        holds = [hold for hold in await self.read(self.store.holds, run=run) if hold.reason == "diverged"]
        row = await self.read(self.store.run, run)
        if not holds or row is None or not is_supported(row) or row.workflow not in DECLARED.names():
            return
        await self.become_worker()
        verdict = await self.committer.submit(Claim(run, self.worker, self.clock.now(), ("held",)))
        if not isinstance(verdict, Claimed):
            return
        if not await would_go_on(self, verdict.row, DECLARED.named(row.workflow)):
            await self.returns.give_back(Release(run, verdict.row.epoch, "held"))
            return
        note = "the code matches the history again"
        unit = await self.read(resolve_unit, self, verdict.row, holds[0], "retry", note=note, by="everstep")
        if isinstance(await self.committer.submit(unit), Accepted):
            self.adopt(run)

    def take_again(self, driver: Driver) -> None:
        """Let a run leave memory, and take it up again from its history."""
        self.let_go(driver)
        self.want(driver.run)

    def take_next(self, driver: Driver) -> None:
        """The run goes on with a fresh history: let the old one leave memory, and take up the new one."""
        self.take_again(driver)
        self.spawn(self.take_up_run(driver.run), run=driver.run)

    def hold_unstorable(self, driver: Driver, error: BaseException) -> None:
        """The store refuses a run's newest events, a value that is too large for instance: it stops, and no other."""
        self.let_go(driver)
        self.spawn(self._hold_unstorable(driver, type(error).__name__), run=driver.run)

    async def _hold_unstorable(self, driver: Driver, error: str) -> None:
        try:
            row = await self.read(self.store.run, driver.run)
        except StoreError:
            self.want(driver.run)  # it is taken up again, and held then if the same is refused again
            return
        if row is not None and row.epoch == driver.row.epoch:
            await self.hold_claimed(row, HoldReport("stuck", f"its newest events cannot be stored: {error}"))

    def let_go(self, driver: Driver, error: BaseException | None = None) -> None:
        """A run has ended, is held, was taken over, or its store failed: it leaves memory, and waiters are told."""
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
                self.pump.nudge()  # a run of ours may follow this one, or wait for its keys, or for its slot
        elif driver.run in self.watchers:
            self.wanted.add(driver.run)
            self.watchers.look_again(driver.run)  # another process may have taken it over, and ended it

    def fail(self, error: BaseException) -> None:
        """The store has failed: this process writes nothing more, and tells everyone who waits."""
        if self._failed is None:
            what = "This worker was declared gone" if self.is_gone else "The store failed"
            log.error("%s; this process stops writing. %s", what, error)
        self._failed = error
        self.watchers.look_all_again()

    def note_gone(self, worker: str) -> None:
        """Keep that a worker counts as gone: it stops if it comes back, and people see why its steps were repeated."""
        note = f"no sign of life for {self.gone_after:g} s (gone_after)"
        gone = GoneRow("worker", worker, self.clock.now(), self.worker, note)
        self.spawn(on_a_thread(self.store.declare_gone, gone, [worker]))

    def ended_without_code(self, run: str, status: Status) -> None:
        """Tell whoever waits for a run that it has ended, and whoever follows it to look into its inbox."""
        self.watchers.tell(run, status, None)
        self.pump.nudge()

    def keys_changed(self, changes: "KeyChanges") -> None:
        """A run has changed keys: whoever waits for them, here or left behind by others, has that in its inbox now."""
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
        """Do something once in the background. If it fails, that is noted, and the run that it is for is taken again.

        What has to go on whatever happens is kept by `background` instead.
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
            self.background.works("tasks")  # each is another one
            self.loop.call_later(LOOK_AGAIN_SECONDS, self.pump.nudge)

    # -- asking the store ------------------------------------------------------------------------------------------
    async def read(self, method: Callable[..., V], /, *args: Any, **named: Any) -> V:
        """Ask the store: right here if it answers at once, else on a thread, while the loop goes on.

        It may be begun twice, and on another thread. So it is only for what changes nothing before the store has
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
        except Busy:  # no task waits for it: an application may cancel all tasks, and the run would wait for ever
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
