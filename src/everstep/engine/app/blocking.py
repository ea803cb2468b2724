"""The same app for blocking code: a loop on a thread of its own, and calls that wait for it."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, overload

from everstep.engine.app.app import App
from everstep.engine.app.handles import Run
from everstep.engine.code.workflow import OnExisting
from everstep.engine.history.verify import Event
from everstep.engine.process.retention import Collected
from everstep.engine.verbs.approve import Approval
from everstep.engine.verbs.gone import Gone
from everstep.engine.verbs.repair import Repair
from everstep.engine.verbs.schedules import Moment, Schedule, Scheduled
from everstep.engine.verbs.streams import Entry, entries_now
from everstep.engine.verbs.transfer import Exported, Imported
from everstep.engine.verbs.verify import Verification
from everstep.errors import Misuse
from everstep.model.ids import checked_run_id
from everstep.model.status import Status
from everstep.stores.protocol import HoldRow, RunRow
from everstep.stores.rows.keys import EffectRow
from everstep.stores.rows.queues import QueueRow

if TYPE_CHECKING:
    from everstep.engine.app.ground import Ground


R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class BlockingApp:
    """What `with everstep.open() as app:` gives: the methods of `App`, blocking."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, App]], *, waits: bool = True) -> None:
        self._process = os.getpid()
        self.ground: Ground | None = None
        """What adapters on this app share."""
        self._asked: set[concurrent.futures.Future[Any]] = set()
        """What is waited for."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="everstep-loop", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise
        self._opening = asyncio.run_coroutine_threadsafe(_open(make), self._loop)
        if not waits:
            return
        try:
            self._opening.result()
        except BaseException:
            self._opening.cancel()
            self._stop_loop()
            raise

    @property
    def _app(self) -> App:
        return self._opening.result()

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the app's loop and wait for it. An interrupt of the wait cancels it."""
        future = self.begin(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, coroutine: Coroutine[Any, Any, R]) -> "concurrent.futures.Future[R]":
        """Run a coroutine on the app's loop. Where the loop ends before the coroutine, its future says so."""
        try:
            self.refuse_elsewhere()
            future: concurrent.futures.Future[R] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException as error:
            coroutine.close()
            if self._loop.is_closed() and isinstance(error, RuntimeError):
                raise _closed() from None
            raise
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        if self._loop.is_closed():
            self._give_up()
        return future

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that opened the app: its loop and its connections are not here."""
        return self._process != os.getpid()

    def refuse_elsewhere(self) -> None:
        """Refuse to wait here for a loop that runs in another process, or to write in that one's name."""
        if self._process != os.getpid():
            raise Misuse(
                f"The store was opened in process {self._process}, and this process ({os.getpid()}) is a fork of it: "
                "connections, leases and threads do not come along. Open it in each process, after the fork (under a "
                "server that loads the application before it forks, in what that calls when a worker begins)."
            )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the app, on a thread of its own."""
        self.refuse_elsewhere()
        if self._loop.is_closed():
            raise _closed()
        return self._loop

    @property
    def inner(self) -> App:
        """The app that is waited for."""
        return self._app

    def wait_here(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine that waits for nothing, on this thread: the caller's connection may be used only here."""
        try:
            coroutine.send(None)
        except StopIteration as done:
            result: R = done.value
            return result
        coroutine.close()
        raise AssertionError("what is done in the caller's transaction waits for nothing")

    def close(self, drain: float = 0.0) -> None:
        """Give the runs back and stop."""
        if self.is_elsewhere or self._loop.is_closed():
            return  # nothing of it is here
        try:
            if self._opening.exception() is None:
                self.wait(self._app.close(drain))
        finally:
            self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._give_up()

    def _give_up(self) -> None:
        """Tell those who still wait that the loop has ended: what they asked for will not be answered."""
        for future in list(self._asked):
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(_closed())

    @overload
    def start(
        self,
        workflow: Callable[[*Ts], Coroutine[Any, Any, R]],
        /,
        *args: *Ts,
        id: str | None = ...,
        on_existing: OnExisting | None = ...,
        **options: Any,
    ) -> "BlockingRun[R]": ...
    @overload
    def start(
        self,
        workflow: Callable[[*Ts], R],
        /,
        *args: *Ts,
        id: str | None = ...,
        on_existing: OnExisting | None = ...,
        **options: Any,
    ) -> "BlockingRun[R]": ...
    def start(self, workflow: Any, /, *args: Any, **options: Any) -> "BlockingRun[Any]":  # type: ignore[misc]  # as in App.start
        """See `App.start`."""
        wait = self.wait if options.get("transaction") is None else self.wait_here
        return BlockingRun(self, wait(self._app.start(workflow, *args, **options)))

    @overload
    def run(
        self, workflow: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, id: str | None = ..., **options: Any
    ) -> R: ...
    @overload
    def run(self, workflow: Callable[[*Ts], R], /, *args: *Ts, id: str | None = ..., **options: Any) -> R: ...
    def run(self, workflow: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[misc]  # as in App.start
        """See `App.run`."""
        return self.start(workflow, *args, **options).result()

    def get(self, run: str) -> "BlockingRun[Any]":
        """See `App.get`."""
        return BlockingRun(self, self._app.get(run))

    def list(self, **filter: Any) -> Sequence[RunRow]:
        """See `App.list`."""
        return self.wait(self._app.list(**filter))

    def signal(self, run: str, name: str, value: Any = None, *, id: str | None = None, transaction: Any = None) -> bool:
        """See `App.signal`."""
        wait = self.wait if transaction is None else self.wait_here
        return wait(self._app.signal(run, name, value, id=id, transaction=transaction))

    def approvals(self, run: str | None = None) -> "Sequence[Approval]":
        """See `App.approvals`."""
        return self.wait(self._app.approvals(run))

    def approve(self, run: str, answer: Any = True, **options: Any) -> "Approval":
        """See `App.approve`."""
        return self.wait(self._app.approve(run, answer, **options))

    def schedule(self, workflow: Any, /, *args: Any, **options: Any) -> "BlockingSchedule":
        """See `App.schedule`."""
        return BlockingSchedule(self, self.wait(self._app.schedule(workflow, *args, **options)))

    def get_schedule(self, name: str) -> "BlockingSchedule":
        """See `App.get_schedule`."""
        return BlockingSchedule(self, self._app.get_schedule(name))

    def schedules(self) -> Sequence[Scheduled]:
        """See `App.schedules`."""
        return self.wait(self._app.schedules())

    def ask(self, run: str, name: str, value: Any = None, **options: Any) -> Any:
        """See `App.ask`."""
        return self.wait(self._app.ask(run, name, value, **options))

    def cancel(self, run: str, reason: str = "", **options: Any) -> None:
        """See `App.cancel`."""
        self.wait(self._app.cancel(run, reason, **options))

    def retry(self, run: str, *, by: str = "", across_once: bool = False) -> "BlockingRun[Any]":
        """See `App.retry`."""
        return BlockingRun(self, self.wait(self._app.retry(run, by=by, across_once=across_once)))

    def rollback(self, run: str, note: str = "", **options: Any) -> "BlockingRun[Any]":
        """See `App.rollback`."""
        return BlockingRun(self, self.wait(self._app.rollback(run, note, **options)))

    def fork(self, run: str, *, at: int, **options: Any) -> "BlockingRun[Any]":
        """See `App.fork`."""
        return BlockingRun(self, self.wait(self._app.fork(run, at=at, **options)))

    def hold(self, run: str, note: str = "", *, by: str = "") -> None:
        """See `App.hold`."""
        self.wait(self._app.hold(run, note, by=by))

    def holds(self, *, run: str | None = None, open_only: bool = True) -> Sequence[HoldRow]:
        """See `App.holds`."""
        return self.wait(self._app.holds(run=run, open_only=open_only))

    def resolve(self, run: str, resolution: str, **options: Any) -> "BlockingRun[Any]":
        """See `App.resolve`."""
        return BlockingRun(self, self.wait(self._app.resolve(run, resolution, **options)))

    def forget_markers(self, database: Any, **options: Any) -> int:
        """See `App.forget_markers`."""
        return self.wait(self._app.forget_markers(database, **options))

    def effects(self, **filter: Any) -> Sequence[EffectRow]:
        """See `App.effects`."""
        return self.wait(self._app.effects(**filter))

    def free_key(self, key: str, *, note: str = "", by: str = "") -> None:
        """See `App.free_key`."""
        self.wait(self._app.free_key(key, note=note, by=by))

    def settle_key(self, key: str, value: Any = None, *, note: str = "", by: str = "") -> None:
        """See `App.settle_key`."""
        self.wait(self._app.settle_key(key, value, note=note, by=by))

    def forget_keys(self, *, older_than: float) -> int:
        """See `App.forget_keys`."""
        return self.wait(self._app.forget_keys(older_than=older_than))

    def gc(self, **options: Any) -> Collected:
        """See `App.gc`."""
        return self.wait(self._app.gc(**options))

    def worker_gone(self, worker: str, *, note: str, by: str = "") -> Gone:
        """See `App.worker_gone`."""
        return self.wait(self._app.worker_gone(worker, note=note, by=by))

    def host_gone(self, host: str, *, note: str, by: str = "") -> Gone:
        """See `App.host_gone`."""
        return self.wait(self._app.host_gone(host, note=note, by=by))

    def queue(self, name: str, **options: Any) -> QueueRow:
        """As `App.queue`."""
        return self.wait(self._app.queue(name, **options))

    def limit(self, name: str, **options: Any) -> QueueRow:
        """As `App.limit`."""
        return self.wait(self._app.limit(name, **options))

    def export(self, runs: Sequence[str] | None, path: str, **options: Any) -> Exported:
        """See `App.export`."""
        return self.wait(self._app.export(runs, path, **options))

    def import_(self, path: str, **options: Any) -> Imported:
        """See `App.import_`."""
        return self.wait(self._app.import_(path, **options))

    def repair(self, run: str, **options: Any) -> Repair:
        """See `App.repair`."""
        return self.wait(self._app.repair(run, **options))


class BlockingRun(Generic[T]):
    """What a `BlockingApp` gives for a run: the methods of `Run`, blocking."""

    def __init__(self, app: BlockingApp, run: Run[T]) -> None:
        self._app = app
        self._run = run
        self.id = run.id

    def result(self, timeout: float | None = None) -> T:
        """See `Run.result`."""
        return self._app.wait(self._run.result(timeout))

    def row(self) -> RunRow:
        """See `Run.row`."""
        return self._app.wait(self._run.row())

    def status(self) -> Status:
        """See `Run.status`."""
        return self._app.wait(self._run.status())

    def history(self, generation: int | None = None) -> list[Event]:
        """See `Run.history`."""
        return self._app.wait(self._run.history(generation))

    def published(self) -> dict[str, Any]:
        """See `Run.published`."""
        return self._app.wait(self._run.published())

    def holds(self, *, open_only: bool = True) -> list[HoldRow]:
        """See `Run.holds`."""
        return self._app.wait(self._run.holds(open_only=open_only))

    def children(self) -> "list[BlockingRun[Any]]":
        """See `Run.children`."""
        return [BlockingRun(self._app, one) for one in self._app.wait(self._run.children())]

    def signal(self, name: str, value: Any = None, *, id: str | None = None) -> bool:
        """See `Run.signal`."""
        return self._app.wait(self._run.signal(name, value, id=id))

    def ask(self, name: str, value: Any = None, **options: Any) -> Any:
        """See `Run.ask`."""
        return self._app.wait(self._run.ask(name, value, **options))

    def approvals(self) -> "Sequence[Approval]":
        """See `Run.approvals`."""
        return self._app.wait(self._run.approvals())

    def approve(self, answer: Any = True, **options: Any) -> "Approval":
        """See `Run.approve`."""
        return self._app.wait(self._run.approve(answer, **options))

    def stream(self, name: str, *, after: int = 0) -> Iterator[Entry]:
        """See `Run.stream`."""
        entries = self._run.stream(name, after=after)
        while True:
            try:
                yield self._app.wait(_next(entries))
            except StopAsyncIteration:
                return

    def cancel(self, reason: str = "", *, grace: float = 30.0, now: bool = False) -> None:
        """See `Run.cancel`."""
        self._app.wait(self._run.cancel(reason, grace=grace, now=now))

    def verify(self, *, outside: bool = False) -> Verification:
        """See `Run.verify`."""
        return self._app.wait(self._run.verify(outside=outside))

    def __repr__(self) -> str:
        return f"<run {self.id}>"


class BlockingSchedule:
    """What a `BlockingApp` gives for a schedule: the methods of `Schedule`, blocking."""

    def __init__(self, app: BlockingApp, schedule: Schedule) -> None:
        self._app = app
        self._schedule = schedule
        self.name = schedule.name

    def show(self) -> Scheduled:
        """See `Schedule.show`."""
        return self._app.wait(self._schedule.show())

    def pause(self, note: str = "", *, by: str = "") -> None:
        """See `Schedule.pause`."""
        self._app.wait(self._schedule.pause(note, by=by))

    def resume(self) -> None:
        """See `Schedule.resume`."""
        self._app.wait(self._schedule.resume())

    def trigger(self) -> str:
        """See `Schedule.trigger`."""
        return self._app.wait(self._schedule.trigger())

    def backfill(self, start: Moment, end: Moment) -> Sequence[str]:
        """See `Schedule.backfill`."""
        return self._app.wait(self._schedule.backfill(start, end))

    def delete(self) -> None:
        """See `Schedule.delete`."""
        self._app.wait(self._schedule.delete())

    def __repr__(self) -> str:
        return f"<schedule {self.name}>"


def _closed() -> Misuse:
    return Misuse("The app was closed: what still uses it cannot go on. Close it when that has ended.")


async def _open(make: Callable[[], Coroutine[Any, Any, App]]) -> App:
    return await (await make()).open()


async def _next(entries: AsyncIterator[Entry]) -> Entry:
    return await entries.__anext__()


def stream_of(blocking: "BlockingApp", run: str, name: str) -> list[Entry]:
    """Return all entries that a stream has now, verified, and none if there is no such run."""
    app = blocking.inner

    def read() -> list[Entry]:
        return list(entries_now(app, run, name)) if app.store.run(checked_run_id(run)) is not None else []

    return blocking.wait(app.read(read))
