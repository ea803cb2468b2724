"""A light client: it starts, signals and reads runs by the names of their workflows, without their code."""

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

from everstep.engine.app import opening
from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp, BlockingRun
from everstep.engine.app.handles import Run
from everstep.engine.app.opening import Opening
from everstep.engine.code.workflow import NamedWorkflow
from everstep.engine.verbs.approve import Approval
from everstep.engine.verbs.start import start_in, start_named
from everstep.model.chains import ChainKeyOption
from everstep.model.ids import checked_name
from everstep.model.options import checked_seconds, checked_text
from everstep.stores.protocol import RunRow

Existing = Literal["attach", "fail"]


class Client:
    """What `async with everstep.connect() as client:` gives. It drives nothing: workers do."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def start(
        self,
        workflow: str,
        /,
        *args: Any,
        id: str | None = None,
        on_existing: Existing = "attach",
        queue: str = "default",
        priority: int = 0,
        delay: float = 0.0,
        tags: dict[str, str] | None = None,
        timeout: float | timedelta | None = None,
        version: str = "",
        transaction: Any = None,
    ) -> Run[Any]:
        """Start a run of a workflow by its name. It is `queued` until a worker that knows the workflow claims it.

        Nothing checks the name and the arguments here; a worker does. What the workflow's code declares about a start
        (`queue`, `timeout`, `version`, `budget`) is not known here either: say the first three, and start a workflow
        with a budget from where its code is.

        on_existing: `attach` (default: the same workflow and arguments give the same run, others are an `IdConflict`),
            or `fail`.
        delay: seconds before it begins.
        timeout: seconds after which the run is cancelled and fails.
        transaction: as in `App.start`.
        """
        target = _named(workflow, version, queue, timeout)
        options = {"id": id, "queue": queue, "priority": priority, "delay": delay, "tags": tags}
        if transaction is not None:
            run = start_in(self._app, target, args, on_existing, transaction, **options)
        else:
            run = await start_named(self._app, target, args, on_existing, **options)
        return Run(self._app, run, target.signature.result)

    def get(self, run: str) -> Run[Any]:
        """Return a handle on a run by its id: for its status, result, published values, streams, and more."""
        return self._app.get(run)

    async def list(self, **filter: Any) -> Sequence[RunRow]:
        """Return runs, newest first: see `App.list`."""
        return await self._app.list(**filter)

    async def signal(
        self, run: str, name: str, value: Any = None, *, id: str | None = None, transaction: Any = None
    ) -> bool:
        """Send a signal to a run: see `App.signal`."""
        return await self._app.signal(run, name, value, id=id, transaction=transaction)

    async def ask(self, run: str, name: str, value: Any = None, **options: Any) -> Any:
        """Ask a run something and wait for its answer: see `App.ask`."""
        return await self._app.ask(run, name, value, **options)

    async def approvals(self, run: str | None = None) -> "Sequence[Approval]":
        """Return what waits for a person's answer: see `App.approvals`."""
        return await self._app.approvals(run)

    async def approve(self, run: str, answer: Any = True, **options: Any) -> "Approval":
        """Answer what a run waits for: see `App.approve`."""
        return await self._app.approve(run, answer, **options)

    async def cancel(self, run: str, reason: str = "", **options: Any) -> None:
        """Ask a run to stop: see `App.cancel`."""
        await self._app.cancel(run, reason, **options)


class BlockingClient:
    """What `with everstep.connect() as client:` gives: the methods of `Client`, blocking."""

    def __init__(self, app: BlockingApp) -> None:
        self._app = app
        self._client = Client(app.inner)

    def start(self, workflow: str, /, *args: Any, transaction: Any = None, **options: Any) -> BlockingRun[Any]:
        """See `Client.start`."""
        begun = self._client.start(workflow, *args, transaction=transaction, **options)
        return BlockingRun(self._app, self._app.wait_here(begun) if transaction is not None else self._app.wait(begun))

    def get(self, run: str) -> BlockingRun[Any]:
        """See `Client.get`."""
        return self._app.get(run)

    def list(self, **filter: Any) -> Sequence[RunRow]:
        """See `Client.list`."""
        return self._app.list(**filter)

    def signal(self, run: str, name: str, value: Any = None, **options: Any) -> bool:
        """See `Client.signal`."""
        return self._app.signal(run, name, value, **options)

    def ask(self, run: str, name: str, value: Any = None, **options: Any) -> Any:
        """See `Client.ask`."""
        return self._app.ask(run, name, value, **options)

    def approvals(self, run: str | None = None) -> "Sequence[Approval]":
        """See `Client.approvals`."""
        return self._app.approvals(run)

    def approve(self, run: str, answer: Any = True, **options: Any) -> "Approval":
        """See `Client.approve`."""
        return self._app.approve(run, answer, **options)

    def cancel(self, run: str, reason: str = "", **options: Any) -> None:
        """See `Client.cancel`."""
        self._app.cancel(run, reason, **options)


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


def _named(workflow: Any, version: str, queue: str, timeout: float | timedelta | None) -> NamedWorkflow:
    name = getattr(workflow, "name", workflow)  # a declared workflow is named as well
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None:
        checked_seconds("timeout", seconds, above=True)
    queue = checked_name(queue, "queue")
    return NamedWorkflow(name, version=checked_text("version", version), queue=queue, timeout=seconds)
