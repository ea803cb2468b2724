"""Opening an app: in an application's own loop, on a loop of its own for blocking code, or for a single run."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, TypeVarTuple, Unpack, overload

from everstep.codec import Codec
from everstep.effects.surroundings import persons_line
from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp
from everstep.engine.app.options import RunOptions
from everstep.engine.code.workflow import OnExisting
from everstep.engine.process.elsewhere import Elsewhere
from everstep.engine.process.notify import OnHold
from everstep.engine.process.webhooks import Webhook
from everstep.errors import Misuse
from everstep.model.chains import ChainKeyOption
from everstep.model.durations import Duration
from everstep.model.ids import checked_name
from everstep.model.mistakes import runs_while_imported, starts_a_run
from everstep.model.options import (
    checked_choice,
    checked_flag,
    checked_kwargs,
    checked_seconds,
    checked_text,
    refuse_generator,
    refuse_names,
    refused,
)
from everstep.model.retention import Retention, retention_of
from everstep.model.untrusted import attempted, is_a
from everstep.stores.opening import default_url, open_store
from everstep.stores.protocol import Store

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

IMPORTING: Final = "EVERSTEP_IMPORTING"
"""Set while a command imports a user's file: `everstep.run` is then an error that shows the guard."""


def default_on_hold() -> "Webhook | None":
    """Return the webhook that `EVERSTEP_ON_HOLD` and `EVERSTEP_ON_HOLD_SECRET` name, if they do."""
    url = os.environ.get("EVERSTEP_ON_HOLD")
    if not url:
        return None

    return Webhook(url, secret=os.environ.get("EVERSTEP_ON_HOLD_SECRET") or None)


class Opening:
    """What `everstep.open()` returns: use it with `async with`, or with `with` in blocking code."""

    def __init__(
        self,
        url: str | None,
        durability: Literal["power", "process"],
        options: dict[str, Any],
        chain_key: "ChainKeyOption" = None,
    ) -> None:
        self._url = url or default_url()
        self._chain_key = chain_key
        self._durability: Literal["power", "process"] = durability
        self._options = options
        self._app: App | None = None
        self._blocking: BlockingApp | None = None

    def _open_store(self) -> "Store":
        return open_store(self._url, durability=self._durability, chain_key=self._chain_key)

    async def make(self) -> App:
        """Open the store, on a thread, and return an app that is not open yet."""
        store = await opened_elsewhere(self._open_store)
        try:
            return App(store, **self._options)
        except BaseException:
            store.close()
            raise

    def __await__(self) -> Generator[Any, Any, App]:
        """Open an app that lives until its `close()`: `app = await everstep.open()`, as in cells of a notebook."""
        return self.__aenter__().__await__()

    if not TYPE_CHECKING:  # a type checker finds these mistakes by itself

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not hasattr(App, name):
                raise AttributeError(f"what everstep.open() returns has no attribute {name!r}")
            raise Misuse(
                f"app.{name}: everstep.open() returns what opens the app, and it is not open yet. Write "
                "`with everstep.open() as app:` (in a coroutine `async with`), and use `app` inside."
            )

    async def __aenter__(self) -> App:
        _refuse_in_a_workflow("everstep.open()")
        self._app = await self.make()
        return await self._app.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._app is not None
        await self._app.close()

    def __enter__(self) -> "BlockingApp":

        _refuse_in_a_workflow("everstep.open()")
        if asyncio._get_running_loop() is not None:
            raise Misuse("`with everstep.open()` blocks, and an event loop is running here: write `async with`.")
        self._blocking = BlockingApp(self.make)
        return self._blocking

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._blocking is not None
        self._blocking.close()


async def opened_elsewhere(open_one: "Callable[[], Store]") -> "Store":
    """Open a store on a thread: another process may have locked it, or its server may not answer."""
    elsewhere = Elsewhere(asyncio.get_running_loop())
    opening = elsewhere.call(open_one)

    def close(opened: "asyncio.Future[Store]") -> None:
        if not opened.cancelled() and opened.exception() is None:
            elsewhere.call(opened.result().close)

    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(close)
        raise


def _checked_retention(retention: "Retention | Duration | None") -> "Retention | None":
    if retention is None:
        return None

    return retention_of(retention)


def _check_on_hold(on_hold: Any) -> None:
    for one in on_hold if is_a(on_hold, list, tuple) else (on_hold,):
        if one is None or is_a(one, str):
            continue
        if callable(one):
            refuse_generator("on_hold=", one)
            continue

        if not is_a(one, Webhook):
            raise refused("on_hold", one, "it takes functions, webhooks and their addresses")


def _checked_queues(queues: Sequence[str] | None) -> Sequence[str] | None:
    if queues is None:
        return None
    if is_a(queues, str) or attempted(isinstance, queues, Sequence) is not True:
        raise refused("queues", queues, 'it is a list of names, such as queues=["default", "mail"]')
    return [checked_name(one, "queue") for one in queues]


def open(
    url: str | None = None,
    *,
    recover: bool = False,
    lease: Duration = 30.0,
    durability: Literal["power", "process"] = "power",
    codec: Any = None,
    on_hold: "OnHold" = None,
    chain_key: "ChainKeyOption" = None,
    retention: "Retention | Duration | None" = None,
    queues: Sequence[str] | None = None,
    patience: Duration = 60.0,
    gone_after: Duration | None = None,
    **testing: Any,
) -> Opening:
    """Open a store and return an app for it: `async with everstep.open() as app:`, or `with` in blocking code.

    url: `sqlite:///file.db`, a path, `postgresql://…`, or `memory:` for tests; default `EVERSTEP_URL`, else `sqlite:///everstep.db`.
    recover: also resume unfinished runs whose owner is gone, now and from now on.
    lease: seconds after which a worker that does not answer loses its runs. (A dead one here loses them at once.)
    durability: `"power"` (default): every commit survives a power failure. `"process"`: it survives the death of the
        process, not of the machine.
    on_hold: what is notified when a run is held: a function (called here with the hold), an `everstep.Webhook` or its
        address (notified durably, by any worker that has it), or a list of these. Default: the webhook that
        `EVERSTEP_ON_HOLD` names, if it is set.
    chain_key: a secret of at least 16 bytes, kept outside the store, with which the digests of histories are made: then
        an attacker who can write the store cannot forge one unnoticed. Or a list: the first makes new runs, the
        others are still believed, and `None` among them accepts runs that were made without a key. Or a
        function that returns either. Default: `EVERSTEP_CHAIN_KEY`.
    retention: how long ended runs are kept: seconds, a `timedelta`, or an `everstep.Retention` with more options. While
        this app drives runs, it deletes older ones in the background. Default: everything is kept.
    queues: the queues whose runs this app drives, such as `["default", "mail"]`. Default: all.
    patience: seconds. When anything in the background has failed for this time without a success, the app claims no
        more runs of others until it succeeds.
    gone_after: seconds after which a worker elsewhere that gives no sign of life counts as gone, so that the probes of
        its `once` steps decide without a person. The risk: one that was only cut off may still act then, and an effect
        happens twice. Default: never. See docs/operating/gone.md.
    """
    checked_choice("durability", durability, ("power", "process"))
    checked_flag("recover", recover)
    lease = checked_seconds("lease", lease, above=True)
    if url is not None:
        checked_text("url", url)
    patience = checked_seconds("patience", patience, above=True)
    if codec is not None and not is_a(codec, Codec):
        raise refused("codec", codec, "it is a Codec of everstep, or None for the one that all apps have")
    on_hold = default_on_hold() if on_hold is None else on_hold
    _check_on_hold(on_hold)
    kept = _checked_retention(retention)
    options = {"recover": recover, "lease": lease, "codec": codec, "on_hold": on_hold, "retention": kept, **testing}
    if gone_after is not None:
        gone_after = checked_seconds("gone_after", gone_after, above=True)
    options |= {"queues": _checked_queues(queues), "patience": patience, "gone_after": gone_after}
    return Opening(url, durability, options, chain_key)


@overload
def run(workflow: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, **options: Unpack[RunOptions]) -> R: ...
@overload
def run(workflow: Callable[[*Ts], R], /, *args: *Ts, **options: Unpack[RunOptions]) -> R: ...
@overload
def run(
    workflow: Callable[..., Coroutine[Any, Any, R]],
    /,
    *args: Any,
    kwargs: Mapping[str, Any],
    **options: Unpack[RunOptions],
) -> R: ...
@overload
def run(workflow: Callable[..., R], /, *args: Any, kwargs: Mapping[str, Any], **options: Unpack[RunOptions]) -> R: ...
def run(  # type: ignore[misc]  # mypy does not see that *args: Any takes any *Ts
    workflow: Any,
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    id: str | None = None,
    url: str | None = None,
    on_existing: OnExisting | None = None,
    **unknown: Any,
) -> Any:
    """Run a workflow to its end and return its result. Run the script again after a crash and it resumes.

    With an `id` that exists already it attaches: a finished run gives its result at once, an unfinished one is resumed.

    kwargs: arguments of the workflow by name, beside those by place, such as `kwargs={"topic": "tides"}`.
    """
    refuse_names("everstep.run", unknown)
    _refuse_while_importing(sys._getframe(1))
    _refuse_in_a_workflow("everstep.run()")
    if asyncio._get_running_loop() is not None:
        raise Misuse(
            "everstep.run() blocks, and an event loop is running here: use `async with everstep.open() as app`."
        )

    async def main(sigterm: Sigterm) -> Any:
        sigterm.task = asyncio.current_task()
        async with open(url) as app:
            return await app.run(workflow, *args, kwargs=checked_kwargs(kwargs), id=id, on_existing=on_existing)

    with ending_on_sigterm() as sigterm:
        return asyncio.run(main(sigterm))


def _refuse_in_a_workflow(call: str) -> None:
    """Refuse to start runs from outside in workflow code."""
    loop = asyncio._get_running_loop()
    if getattr(loop, "is_guarded", False):
        raise Misuse(starts_a_run(call).at(persons_line(sys._getframe(2))))


def _refuse_while_importing(frame: Any) -> None:
    if os.environ.get(IMPORTING):
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

        wrong = runs_while_imported()
        raise Misuse(f"{place} {wrong.what}. {wrong.remedy}")


class Sigterm:
    """The effect of SIGTERM: it cancels the task, as Ctrl-C does; a second one does not wait for that."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.has_come = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.has_come:
            os._exit(128 + number)  # an exception would be raised in the code that runs now, which may catch it
        if self.task is None:
            raise SystemExit(128 + number)
        self.has_come = True
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


@contextmanager
def ending_on_sigterm() -> Generator[Sigterm]:
    """Make SIGTERM end a blocking run as Ctrl-C does: runs are given back, then the process ends."""
    sigterm = Sigterm()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield sigterm
        return
    signal.signal(signal.SIGTERM, sigterm)
    try:
        yield sigterm
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sigterm.has_come:
            raise SystemExit(128 + signal.SIGTERM) from None
