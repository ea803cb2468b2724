"""A run as an application holds it: an id and what can be asked of it."""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from everstep.codec import near
from everstep.engine.code.workflow import DECLARED, Workflow
from everstep.engine.history.verify import (
    Event,
    Recorded,
    public_events,
    refuse_deleted,
    refuse_generation,
    refuse_unreadable,
    unknown_run,
)
from everstep.engine.process.worker_row import is_served, living
from everstep.engine.run.drift import find_drift
from everstep.engine.run.resume import replay_history
from everstep.engine.verbs.approve import Approval
from everstep.engine.verbs.runs import held_error
from everstep.engine.verbs.streams import Entry, read_stream
from everstep.engine.verbs.verify import Verification, verify_run
from everstep.errors import (
    Damaged,
    Misuse,
    NotDecodable,
    RunCancelled,
    RunFailed,
    RunHeld,
    UnknownWorkflow,
)
from everstep.model.durations import Duration
from everstep.model.ids import checked_name
from everstep.model.options import checked_flag, checked_whole
from everstep.model.status import ENDED, Status
from everstep.model.untrusted import described
from everstep.stores.protocol import HoldRow, RunRow

if TYPE_CHECKING:  # a real cycle: an app gives handles, which ask the app
    from everstep.engine.app.app import App


T = TypeVar("T")


def _not_ended(app: "App", run: str, timeout: float) -> str:
    """Return why a run has not ended in time: what it does or waits for, and whether any worker serves it."""
    row = app.store.run(run)
    if row is None:
        return f"The run {run} was deleted."
    since = f"{datetime.fromtimestamp(row.updated_at / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"
    step = f" in {row.current_step}" if row.current_step else ""
    text = f"The run {run} ({row.workflow}) has not ended within {timeout:g} s: it is {row.status}{step} since {since}."
    is_free = row.owner is None and run not in app.drivers and row.status == "queued"
    if is_free and not is_served(row.workflow, row.queue, living(app.store.workers())):
        text += f" No worker serves {row.workflow} in the queue {row.queue}: start one (`everstep worker app.py`)."
    return f"{text} It continues; `everstep show {run}` says what it waits for."


def _workflow_of(app: "App", run: str) -> Workflow | None:
    """Return a run's workflow, if it is declared here."""
    row = app.store.run(run)
    try:
        return DECLARED.named(row.workflow) if row is not None else None
    except Misuse:
        return None


class Run(Generic[T]):
    """A handle on one run. It holds no connection and no lease: make as many as you like."""

    def __init__(self, app: "App", id: str, result_types: Any = None) -> None:
        self._app = app
        self._result_types = result_types
        self.id = id

    async def result(self, timeout: Duration | None = None) -> T:
        """Wait for the run's end and return its result, or raise its failure.

        Raises `RunHeld` when the run waits for a person, `RunCancelled` when it was cancelled, `TimeoutError` after
        `timeout` seconds; the run continues then.
        """
        try:
            status, outcome = await self._app.watchers.wait_for_end(self.id, timeout)
        except TimeoutError as error:
            if timeout is None or error.args:
                raise
            raise TimeoutError(await self._app.read(_not_ended, self._app, self.id, timeout)) from None
        if status == "completed":
            return self._app.codec.decode(outcome or b"[null]", await self._types())  # type: ignore[no-any-return]
        if status == "failed":
            with near(await self._app.read(_workflow_of, self._app, self.id)):
                failure = self._app.codec.decode_error(outcome or b"")
            raise self._failure(failure)
        if status == "held":
            raise await self._held()
        raise RunCancelled(f"The run {self.id} was cancelled.")

    def _failure(self, error: BaseException) -> BaseException:
        """Return the error to raise. A run's `SystemExit` must not end its waiter's process, nor its cancel cancel
        the waiter.
        """
        if isinstance(error, Exception):
            return error
        failed = RunFailed(f"The run {self.id} failed with {described(error)}")
        failed.__cause__ = error
        return failed

    async def _types(self) -> Any:
        if self._result_types is not None:
            return self._result_types
        return await self._app.read(self._app.result_types, self)

    async def _held(self) -> RunHeld:
        return held_error(self.id, await self.holds())

    async def row(self) -> RunRow:
        """Return the run's row of the store."""
        row = await self._app.read(self._app.store.run, self.id)
        if row is None:
            raise unknown_run(self._app.store, self.id)
        return row

    async def status(self) -> Status:
        """Return the run's status: `queued`, `running`, `waiting`, `held`, `completed`, `failed` or `cancelled`."""
        row = await self.row()
        refuse_unreadable(row)
        return row.status

    async def history(self, generation: int | None = None) -> "list[Event]":
        """Return the run's events. An earlier `generation` is the history from before a restart."""
        if generation is not None:
            checked_whole("generation", generation, least=1)
        row = await self.row()
        if generation is not None:
            refuse_generation(row, generation)
        events = await self._app.read(self._app.store.events, self.id, generation or row.generation)
        await self._app.read(refuse_deleted, self._app.store, row)  # checked after the events, which may be incomplete
        return public_events(events)

    async def published(self) -> dict[str, Any]:
        """Return the values that the run has published, by name."""
        row = await self.row()
        try:
            values = msgspec.json.decode(row.published or b"{}", type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise Damaged(f"The published values of run {self.id} cannot be read.") from None
        return {name: self._app.codec.decode(bytes(payload)) for name, payload in values.items()}

    async def holds(self, *, open_only: bool = True) -> list[HoldRow]:
        """Return the run's holds, open ones only by default."""
        return await self._app.read(self._holds_now, checked_flag("open_only", open_only))

    def _holds_now(self, open_only: bool) -> list[HoldRow]:
        return self._app.store.holds(run=self.id, open_only=open_only)

    async def children(self) -> list["Run[Any]"]:
        """Return the run's child runs."""
        rows = await self._app.read(self._app.store.children, self.id)
        return [Run(self._app, row.id) for row in rows]

    async def signal(self, name: str, value: Any = None, *, id: str | None = None) -> bool:
        """Send a signal. It is durable when this returns; with an `id`, sending again delivers it once.

        Returns False if it has been sent before: see `App.signal`.
        """
        return await self._app.signal(self.id, name, value, id=id)

    async def ask(
        self, name: str, value: Any = None, *, id: str | None = None, answer: Any = Any, timeout: Duration | None = None
    ) -> Any:
        """Send a request to the run and wait for its answer: see `App.ask`."""
        return await self._app.ask(self.id, name, value, id=id, answer=answer, timeout=timeout)

    async def approvals(self) -> Sequence[Approval]:
        """Return what the run waits for a person to answer."""
        return await self._app.approvals(self.id)

    async def approve(self, /, answer: Any = True, **options: Any) -> Approval:
        """Answer what the run waits for with `everstep.approval`: see `App.approve`."""
        return await self._app.approve(self.id, answer, **options)

    def stream(self, name: str, *, after: int = 0) -> "AsyncIterator[Entry]":
        """Give the entries of a stream, each as soon as it is durable, until the run has ended.

        after: the position of the last entry that you have; you get those after it. From the beginning by default.

        Each entry has its `value`, `position`, `step` and `attempt`. The first one that an attempt at a step writes
        says so (`entry.first`): what you have of the same step and `generation` came from an attempt that was cut off
        or failed. Positions continue with a fresh history (`continue_as`), and when the run is restarted.
        """
        name = checked_name(name, "stream")
        return read_stream(self._app, self.id, name, checked_whole("after", after))

    async def cancel(self, reason: str = "", *, grace: Duration = 30.0, now: bool = False) -> None:
        """Ask the run to stop: see `App.cancel`."""
        await self._app.cancel(self.id, reason, grace=grace, now=now)

    async def verify(self, *, outside: bool = False) -> Verification:
        """Check the run's histories, of all its generations, against their digests. Changes nothing.

        outside: compare the outside with what the run remembers of it as well, and list every difference in `drift`.
        """
        checked_flag("outside", outside)
        row = await self.row()
        found, history = await self._app.read(verify_run, self._app.store, row)
        if outside and found.sound and row.status not in ENDED:
            await self._compare_outside(row, history, found)
        return found

    async def _compare_outside(self, row: RunRow, history: "list[Recorded]", found: Verification) -> None:
        """Replay the code silently to get its witnesses, and observe their facts."""
        try:
            replayed = await replay_history(self._app, row, DECLARED.named(row.workflow), history, quiet=True)
        except (UnknownWorkflow, Misuse, NotDecodable) as error:
            found.problem = f"The outside was not compared, because the code cannot be replayed: {error}"
            return
        try:
            if replayed.differences:
                found.problem = "The outside was not compared, because the code does not match the history."
                return
            drifted = await find_drift(self._app, replayed.execution, ignored=True)
            found.drift = [{"subject": one.subject, "difference": one.difference} for one in drifted]
        finally:
            replayed.execution.evict()

    def __repr__(self) -> str:
        return f"<run {self.id}>"
