"""A light client: it starts, signals and reads runs by the names of their workflows, without their code."""

from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from everstep.engine.app import opening
from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp, BlockingRun, blocking
from everstep.engine.app.handles import Run
from everstep.engine.app.opening import Opening
from everstep.engine.code.workflow import NamedWorkflow
from everstep.engine.verbs.start import start_in, start_named
from everstep.model.chains import ChainKeyOption
from everstep.model.durations import Duration
from everstep.model.ids import checked_name
from everstep.model.options import checked_kwargs, checked_seconds, checked_text, refuse_names

P = ParamSpec("P")
R = TypeVar("R")
Existing = Literal["attach", "fail"]


def passed_on(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Make the method of a client that asks its app the same."""

    @wraps(method)
    async def ask(client: "Client", /, *args: Any, **options: Any) -> Any:
        return await method(client._app, *args, **options)

    return ask


class Client:
    """What `async with everstep.connect() as client:` gives. It drives nothing: workers do."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def start(
        self,
        workflow: str,
        /,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        id: str | None = None,
        on_existing: Existing = "attach",
        queue: str = "default",
        priority: int = 0,
        delay: Duration = 0.0,
        tags: dict[str, str] | None = None,
        timeout: Duration | None = None,
        version: str = "",
        transaction: Any = None,
        **unknown: Any,
    ) -> Run[Any]:
        """Start a run of a workflow by its name. It is `queued` until a worker that knows the workflow claims it.

        Nothing checks the name and the arguments here; a worker does. What the workflow's code declares about a start
        (`queue`, `timeout`, `version`, `budget`) is not known here either: say the first three, and start a workflow
        with a budget from where its code is.

        kwargs: arguments of the workflow by name, such as `kwargs={"topic": "tides"}`.
        on_existing: `attach` (default: the same workflow and arguments give the same run, others are an `IdConflict`),
            or `fail`.
        delay: seconds before it begins.
        timeout: seconds after which the run is cancelled and fails.
        transaction: as in `App.start`.
        """
        refuse_names("client.start", unknown)
        target, named = _named(workflow, version, queue, timeout), checked_kwargs(kwargs)
        options = {"id": id, "queue": queue, "priority": priority, "delay": delay, "tags": tags}
        if transaction is not None:
            run = start_in(self._app, target, args, named, on_existing, transaction, **options)
        else:
            run = await start_named(self._app, target, args, named, on_existing, **options)
        return Run(self._app, run, target.signature.result)

    def get(self, run: str) -> Run[Any]:
        """Return a handle on a run by its id: for its status, result, published values, streams, and more."""
        return self._app.get(run)

    list = passed_on(App.list)
    signal = passed_on(App.signal)
    ask = passed_on(App.ask)
    approvals = passed_on(App.approvals)
    approve = passed_on(App.approve)
    cancel = passed_on(App.cancel)


class BlockingClient:
    """What `with everstep.connect() as client:` gives: the methods of `Client`, blocking."""

    def __init__(self, app: BlockingApp) -> None:
        self._blocking = app
        self.inner = Client(app.inner)
        """The client that is waited for."""

    def get(self, run: str) -> BlockingRun[Any]:
        """See `Client.get`."""
        return self._blocking.get(run)

    start = blocking(Client.start, BlockingRun)
    list = blocking(Client.list)
    signal = blocking(Client.signal)
    ask = blocking(Client.ask)
    approvals = blocking(Client.approvals)
    approve = blocking(Client.approve)
    cancel = blocking(Client.cancel)


class Connecting:
    """What `everstep.connect()` returns: use it with `async with`, or with `with` in blocking code."""

    def __init__(self, made: Opening) -> None:
        self._opening = made

    async def __aenter__(self) -> Client:
        return Client(await self._opening.__aenter__())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._opening.__aexit__(kind, error, traceback)

    def __enter__(self) -> BlockingClient:
        return BlockingClient(self._opening.__enter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opening.__exit__(kind, error, traceback)


def connect(
    url: str | None = None,
    *,
    durability: Literal["power", "process"] = "power",
    codec: Any = None,
    chain_key: ChainKeyOption = None,
    **testing: Any,
) -> Connecting:
    """Open a store for a program that has none of the workflows' code, and return a client for it: it starts, signals
    and reads runs by name, and drives nothing. `async with everstep.connect() as client:`, or `with` in blocking code.

    The options are those of `everstep.open`.
    """
    options = {"workflows": (), **testing}
    return Connecting(opening.open(url, durability=durability, codec=codec, chain_key=chain_key, **options))


def _named(workflow: Any, version: str, queue: str, timeout: Duration | None) -> NamedWorkflow:
    name = getattr(workflow, "name", workflow)  # a declared workflow is named as well
    seconds = None if timeout is None else checked_seconds("timeout", timeout, above=True)
    queue = checked_name(queue, "queue")
    return NamedWorkflow(name, version=checked_text("version", version), queue=queue, timeout=seconds)
