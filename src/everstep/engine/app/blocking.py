"""The same app for blocking code: a loop on a thread of its own, and calls that wait for it."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

from everstep.engine.app.app import App
from everstep.engine.app.handles import Run
from everstep.engine.app.options import StartOptions
from everstep.engine.verbs.schedules import Schedule
from everstep.engine.verbs.streams import Entry, entries_now
from everstep.errors import Misuse
from everstep.model.durations import Duration
from everstep.model.ids import checked_run_id

if TYPE_CHECKING:  # a real cycle: a ground is made on a blocking app, and kept with it
    from everstep.engine.app.ground import Ground


H = TypeVar("H")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Face(Protocol):
    """What waits: the app whose loop does the work, and the async object that does it there."""

    @property
    def _blocking(self) -> "BlockingApp": ...

    @property
    def inner(self) -> Any:
        """The async object."""


@overload
def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]: ...
@overload
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], handle: "Callable[[BlockingApp, R], H]"
) -> Callable[Concatenate[Any, P], H]: ...
def blocking(method: Callable[..., Coroutine[Any, Any, Any]], handle: Any = None) -> Callable[..., Any]:
    """Make the blocking method of an async one: it takes the same arguments, waits, and returns the same.

    handle: the blocking class of the handle that the async method returns.
    """

    @wraps(method)
    def wait(face: Face, /, *args: Any, **options: Any) -> Any:
        app = face._blocking
        waits = app.wait if options.get("transaction") is None else app.wait_here
        result = waits(method(face.inner, *args, **options))
        return result if handle is None else handle(app, result)

    return wait


class BlockingRun(Generic[T]):
    """What a `BlockingApp` gives for a run: the methods of `Run`, blocking."""

    def __init__(self, app: "BlockingApp", run: Run[T]) -> None:
        self._blocking = app
        self.inner = run
        """The run that is waited for."""
        self.id = run.id

    def result(self, timeout: Duration | None = None) -> T:
        """See `Run.result`."""
        return self._blocking.wait(self.inner.result(timeout))

    def stream(self, name: str, *, after: int = 0) -> Iterator[Entry]:
        """See `Run.stream`."""
        return self._entries(self.inner.stream(name, after=after))  # which refuses wrong values before the first entry

    def _entries(self, entries: AsyncIterator[Entry]) -> Iterator[Entry]:
        while True:
            try:
                yield self._blocking.wait(_next(entries))
            except StopAsyncIteration:
                return

    def children(self) -> "list[BlockingRun[Any]]":
        """See `Run.children`."""
        return [BlockingRun(self._blocking, one) for one in self._blocking.wait(self.inner.children())]

    row = blocking(Run.row)
    status = blocking(Run.status)
    history = blocking(Run.history)
    published = blocking(Run.published)
    holds = blocking(Run.holds)
    signal = blocking(Run.signal)
    ask = blocking(Run.ask)
    approvals = blocking(Run.approvals)
    approve = blocking(Run.approve)
    cancel = blocking(Run.cancel)
    verify = blocking(Run.verify)

    def __repr__(self) -> str:
        return f"<run {self.id}>"


class BlockingSchedule:
    """What a `BlockingApp` gives for a schedule: the methods of `Schedule`, blocking."""

    def __init__(self, app: "BlockingApp", schedule: Schedule) -> None:
        self._blocking = app
        self.inner = schedule
        """The schedule that is waited for."""
        self.name = schedule.name

    show = blocking(Schedule.show)
    pause = blocking(Schedule.pause)
    resume = blocking(Schedule.resume)
    trigger = blocking(Schedule.trigger)
    backfill = blocking(Schedule.backfill)
    delete = blocking(Schedule.delete)

    def __repr__(self) -> str:
        return f"<schedule {self.name}>"


class BlockingApp:
    """The object of `with everstep.open() as app:`: the methods of `App`, blocking."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, App]], *, waits: bool = True) -> None:
        self._process = os.getpid()
        self.ground: Ground | None = None
        """What adapters share that use this app."""
        self._asked: set[concurrent.futures.Future[Any]] = set()
        """The futures that callers wait for."""
        self._closing = threading.RLock()
        """Held by the thread that closes the app; a signal handler on that thread may close it, too."""
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
    def _blocking(self) -> "BlockingApp":
        return self

    @property
    def inner(self) -> App:
        """The app that is waited for."""
        return self._opening.result()

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the app's loop and wait for it. An interrupt of the wait cancels it."""
        try:
            self._refuse_on_its_loop()
        except BaseException:
            coroutine.close()
            raise
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
        """Whether this process is a fork of the one that opened the app, so that its loop and its connections are
        not here.
        """
        return self._process != os.getpid()

    def refuse_elsewhere(self) -> None:
        """Refuse to wait here for a loop that runs in another process, or to write on that one's behalf."""
        if self._process != os.getpid():
            raise Misuse(
                f"The store was opened in process {self._process}, and this process ({os.getpid()}) is a fork of it: "
                "connections, leases and threads do not come along. Open it in each process, after the fork (under a "
                "server that loads the application before it forks, in what that calls when a worker begins)."
            )

    def _refuse_on_its_loop(self) -> None:
        """Refuse to wait on the loop's own thread, where the loop could not do what is waited for."""
        if threading.current_thread() is self._thread:
            raise Misuse(
                "This code runs on the loop of the blocking app that it calls, so the call would wait for itself, and "
                "every run of the app with it. Workflow code calls steps, and `everstep.start` or `everstep.blocking`; "
                "a `def` step may call the app, because it runs on a thread of its own."
            )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the app, on a thread of its own."""
        self.refuse_elsewhere()
        if self._loop.is_closed():
            raise _closed()
        return self._loop

    def wait_here(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine that never waits, on this thread: the caller's connection may be used only here."""
        try:
            coroutine.send(None)
        except StopIteration as done:
            result: R = done.value
            return result
        coroutine.close()
        raise AssertionError("what is done in the caller's transaction waits for nothing")

    def close(self, drain: float = 0.0) -> None:
        """Give the runs back and stop. A second thread that closes the app waits for the first."""
        if self.is_elsewhere:
            return  # nothing of the app is in this process
        self._refuse_on_its_loop()
        with self._closing:
            if self._loop.is_closed():
                return
            try:
                if self._opening.exception() is None:
                    self.wait(self.inner.close(drain))
            finally:
                self._stop_loop()

    def _stop_loop(self) -> None:
        if self._loop.is_closed():
            return  # by a signal handler, in the middle of a close
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._give_up()

    def _give_up(self) -> None:
        """Fail the calls that still wait, because the loop has ended."""
        for future in list(self._asked):
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(_closed())

    @overload
    def start(
        self, workflow: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, **options: Unpack[StartOptions]
    ) -> BlockingRun[R]: ...
    @overload
    def start(self, workflow: Callable[[*Ts], R], /, *args: *Ts, **options: Unpack[StartOptions]) -> BlockingRun[R]: ...
    @overload
    def start(
        self,
        workflow: Callable[..., Coroutine[Any, Any, R]],
        /,
        *args: Any,
        kwargs: Mapping[str, Any],
        **options: Unpack[StartOptions],
    ) -> BlockingRun[R]: ...
    @overload
    def start(
        self, workflow: Callable[..., R], /, *args: Any, kwargs: Mapping[str, Any], **options: Unpack[StartOptions]
    ) -> BlockingRun[R]: ...
    def start(self, workflow: Any, /, *args: Any, **options: Any) -> BlockingRun[Any]:  # type: ignore[misc]  # as in App.start
        """See `App.start`."""
        wait = self.wait if options.get("transaction") is None else self.wait_here
        return BlockingRun(self, wait(self.inner.start(workflow, *args, **options)))

    @overload
    def run(
        self, workflow: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, **options: Unpack[StartOptions]
    ) -> R: ...
    @overload
    def run(self, workflow: Callable[[*Ts], R], /, *args: *Ts, **options: Unpack[StartOptions]) -> R: ...
    @overload
    def run(
        self,
        workflow: Callable[..., Coroutine[Any, Any, R]],
        /,
        *args: Any,
        kwargs: Mapping[str, Any],
        **options: Unpack[StartOptions],
    ) -> R: ...
    @overload
    def run(
        self, workflow: Callable[..., R], /, *args: Any, kwargs: Mapping[str, Any], **options: Unpack[StartOptions]
    ) -> R: ...
    def run(self, workflow: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[misc]  # as in App.start
        """See `App.run`."""
        return self.start(workflow, *args, **options).result()

    def get(self, run: str) -> BlockingRun[Any]:
        """See `App.get`."""
        return BlockingRun(self, self.inner.get(run))

    def get_schedule(self, name: str) -> BlockingSchedule:
        """See `App.get_schedule`."""
        return BlockingSchedule(self, self.inner.get_schedule(name))

    list = blocking(App.list)
    signal = blocking(App.signal)
    ask = blocking(App.ask)
    approvals = blocking(App.approvals)
    approve = blocking(App.approve)
    cancel = blocking(App.cancel)
    retry = blocking(App.retry, BlockingRun)
    rollback = blocking(App.rollback, BlockingRun)
    fork = blocking(App.fork, BlockingRun)
    hold = blocking(App.hold)
    holds = blocking(App.holds)
    resolve = blocking(App.resolve, BlockingRun)
    repair = blocking(App.repair)
    effects = blocking(App.effects)
    free_key = blocking(App.free_key)
    settle_key = blocking(App.settle_key)
    forget_keys = blocking(App.forget_keys)
    forget_markers = blocking(App.forget_markers)
    gc = blocking(App.gc)
    queue = blocking(App.queue)
    limit = blocking(App.limit)
    worker_gone = blocking(App.worker_gone)
    host_gone = blocking(App.host_gone)
    export = blocking(App.export)
    import_ = blocking(App.import_)
    schedule = blocking(App.schedule, BlockingSchedule)
    schedules = blocking(App.schedules)


def _closed() -> Misuse:
    return Misuse("The app was closed, so this call cannot continue. Close the app after its last use.")


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
