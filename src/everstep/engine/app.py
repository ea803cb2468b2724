"""An App: what an application may ask of Everstep. How runs are driven stands in `driving.py`."""

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

from everstep.codec import ANY
from everstep.engine import later
from everstep.engine.by_name import new_run_id
from everstep.engine.clock import microseconds
from everstep.engine.driving import Driving
from everstep.engine.handles import Run
from everstep.engine.schedule_verbs import ScheduleVerbs
from everstep.engine.starting import Origin, new_run, refuse_start_options
from everstep.engine.tending import TendingVerbs
from everstep.engine.workflow import DECLARED, ON_EXISTING, OnExisting, Workflow, workflow_of
from everstep.errors import Misuse, StoreError
from everstep.model.budgets import allotment_of
from everstep.model.ids import checked_run_id
from everstep.model.options import (
    check_optional_texts,
    check_texts,
    checked_choice,
    checked_tags,
    checked_text,
    checked_whole,
    refused,
)
from everstep.model.status import STATUSES
from everstep.model.untrusted import is_a
from everstep.stores.protocol import Existing, RunFilter, RunRow, StartRun
from everstep.stores.queues import DEFAULT_QUEUE

if TYPE_CHECKING:
    from everstep.engine.approving import Approval

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class App(TendingVerbs, ScheduleVerbs, Driving):
    """Starts runs, drives those it started (and with `recover` those whose owner is gone), and answers questions."""

    # -- starting --------------------------------------------------------------------------------------------------
    @overload
    async def start(
        self,
        workflow: Callable[[*Ts], Coroutine[Any, Any, R]],
        /,
        *args: *Ts,
        id: str | None = ...,
        on_existing: OnExisting | None = ...,
        queue: str | None = ...,
        priority: int = ...,
        delay: float = ...,
        tags: dict[str, str] | None = ...,
        transaction: Any = ...,
    ) -> Run[R]: ...
    @overload
    async def start(
        self,
        workflow: Callable[[*Ts], R],
        /,
        *args: *Ts,
        id: str | None = ...,
        on_existing: OnExisting | None = ...,
        queue: str | None = ...,
        priority: int = ...,
        delay: float = ...,
        tags: dict[str, str] | None = ...,
        transaction: Any = ...,
    ) -> Run[R]: ...
    async def start(  # type: ignore[misc]  # mypy does not see that *args: Any takes any *Ts
        self,
        workflow: Any,
        /,
        *args: Any,
        id: str | None = None,
        on_existing: OnExisting | None = None,
        queue: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        tags: dict[str, str] | None = None,
        transaction: Any = None,
    ) -> Run[Any]:
        """Start a run, or with the id of an existing one do what `on_existing` says. The start is durable on return.

        on_existing: `attach` (default: the same workflow and arguments give the same run, and if its owner is gone it
            goes on here; others are an `IdConflict`), `retry` (attach, and a failed run goes on from what failed),
            `restart` (an ended run begins again; its old history is kept), or `fail`.
        queue: which queue it waits in (default: its workflow's). In the queue `default` nothing waits: this app begins
            it at once. See `queue`.
        priority: of the runs that wait in one queue, those with a higher one begin first; then the oldest.
        delay: seconds before it begins.
        tags: what it is found by later. The tag `key` is what `per_key` of a queue counts by.
        transaction: a connection to the store's database with an open transaction of yours (an `apsw.Connection` to its
            file): the run is there if and only if you commit. It is `queued` then, for a worker.
        """
        target = workflow_of(workflow)
        policy = target.on_existing if on_existing is None else checked_choice("on_existing", on_existing, ON_EXISTING)
        refuse_start_options(priority, delay, tags, queue)
        if transaction is not None:
            options: Any = {"id": id, "queue": queue, "priority": priority, "delay": delay, "tags": tags}
            return later.start_in(self, target, args, policy, transaction, **options)
        run, is_new = checked_run_id(id) if id is not None else self._new_id(target), id is None
        arguments = self.codec.encode_arguments(target.signature, args, {}, target.name)
        if not self.worker:
            await self.become_worker()
        self.refuse_when_failed()
        at = self.clock.now()
        in_line = (queue := queue or target.queue) != DEFAULT_QUEUE
        new = new_run(
            target,
            run,
            arguments,
            at=at,
            randomness=self.randomness,
            owner=None if in_line else self.worker,
            tags=tags,
            priority=priority,
            queue=queue,
            wake_at=at + microseconds(delay) if delay > 0 else None,
            origin=Origin(self.store.chain.writing, self.life),
            budget=allotment_of(target.budget),
        )
        begun = self.committer.submit(StartRun(new))
        if is_new and delay <= 0 and not in_line:
            # Nobody else has this id, so the code may begin at once: its first events share the start's commit.
            self.drive_new(new, target)
        try:
            verdict = await begun
        except StoreError:
            self._drop(run)
            raise
        if isinstance(verdict, Existing):
            await later.existing_run(self, verdict.row, target, arguments, policy)
        elif in_line or delay > 0:
            self.queueing.expect(new.row)
            self.pump.nudge()
        elif not is_new:
            self.drive_new(new, target)
        return Run(self, run, target.signature.result)

    def _drop(self, run: str) -> None:
        """The start of a run cannot be durable: if its driver has begun already, that is dropped."""
        if run in self.drivers:
            self.let_go(self.drivers[run])

    def _new_id(self, workflow: Workflow) -> str:
        return new_run_id(workflow, self.clock.now(), self.randomness)

    @overload
    async def run(
        self, workflow: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, id: str | None = ..., **options: Any
    ) -> R: ...
    @overload
    async def run(self, workflow: Callable[[*Ts], R], /, *args: *Ts, id: str | None = ..., **options: Any) -> R: ...
    async def run(self, workflow: Any, /, *args: Any, id: str | None = None, **options: Any) -> Any:  # type: ignore[misc]  # as in App.start
        """Start a run and wait for its result. The options are those of `start`."""
        return await (await self.start(workflow, *args, id=id, **options)).result()

    # -- asking and telling ----------------------------------------------------------------------------------------
    def get(self, run: str) -> Run[Any]:
        """Return a handle on a run by its id."""
        return Run(self, checked_run_id(run))

    def result_types(self, run: Run[Any]) -> Any:
        """Return what a run's result may decode to: its workflow's return type, if that is declared here."""
        row = self.store.run(run.id)
        try:
            return DECLARED.named(row.workflow).signature.result if row is not None else ANY
        except Misuse:
            return ANY

    async def list(
        self,
        *,
        status: str | Sequence[str] = (),
        workflow: str | None = None,
        parent: str | None = None,
        tags: dict[str, str] | None = None,
        text: str = "",
        before: RunRow | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Sequence[RunRow]:
        """Return runs, newest first.

        tags: all of these. They are found by an index.
        text: in the id, the workflow, the arguments' preview or a tag (`name=value`); capital letters do not matter.
        before: the last run of the page before, to page on also while new runs arrive.
        """
        if not is_a(status, str, list, tuple, set, frozenset):
            raise refused("status", status, 'it is a status, or a list of them, such as status=["held", "failed"]')
        wanted = (status,) if isinstance(status, str) else tuple(status)
        check_optional_texts(workflow=workflow, parent=parent)
        if before is not None and not is_a(before, RunRow):
            raise refused("before", before, "it is a run of the page before, as `list` returned it")
        for one in wanted:
            checked_choice("status", one, STATUSES)
        return await self.read(
            self.store.runs,
            RunFilter(
                status=wanted,  # type: ignore[arg-type]
                workflow=workflow,
                parent=parent,
                tags=checked_tags(tags) or {},
                text=checked_text("text", text),
                before=(before.created_at, before.id) if before is not None else None,
                limit=checked_whole("limit", limit),
                offset=checked_whole("offset", offset),
            ),
        )

    async def signal(
        self, run: str, name: str, value: Any = None, *, id: str | None = None, transaction: Any = None
    ) -> bool:
        """Send a signal to a run. It is durable on return. Raises `RunEnded` or `UnknownRun`.

        With an `id`, the run gets the signal once, however often it is sent: this returns False if it has been sent
        before, and raises `IdConflict` if that had another name or value. A run that is restarted may get it again.

        transaction: as in `start`: the signal is sent if and only if you commit.
        """
        if transaction is not None:
            from everstep.engine import outbox

            return outbox.signal_in(self, run, name, value, id, transaction)
        from everstep.engine import operations

        return await operations.signal(self, run, name, value, id)

    async def ask(
        self,
        run: str,
        name: str,
        value: Any = None,
        *,
        id: str | None = None,
        answer: Any = Any,
        timeout: float | None = None,
    ) -> Any:
        """Ask a run something and wait for its answer, which is durable then.

        id: asking again with the same one, also after a crash, gives the same answer and is one request to the run.
        answer: the type that the answer must have.
        timeout: after so many seconds `NoAnswer`, a `TimeoutError`; the run keeps the request.

        Raises `RequestRefused` or the error with which the run refused it, `RunEnded` when the run has ended without
        an answer, `RunHeld` when it waits for a person, `UnknownRun`, and `IdConflict` when the id belongs to another
        request.
        """
        from everstep.engine import asking

        return await asking.ask(self, run, name, value, id=id, answer=answer, timeout=timeout)

    async def approvals(self, run: str | None = None) -> "Sequence[Approval]":
        """Return what waits for a person's answer (`everstep.approval`), in one run or in all, the oldest first."""
        from everstep.engine import approving

        return await approving.approvals(self, None if run is None else checked_run_id(run))

    async def approve(
        self,
        run: str,
        answer: Any = True,
        *,
        what: str | None = None,
        id: str | None = None,
        arguments: Any = ...,
        by: str = "",
        note: str = "",
    ) -> "Approval":
        """Answer what a run waits for with `everstep.approval`, and return what was asked. It is durable on return.

        answer: any JSON value; `True` by default.
        what, id: which one is meant, if the run waits for more than one. An id is bound to the arguments that it was
            shown with.
        arguments: those that you have seen: if the run asks about others, nothing is answered.
        by, note: who says so, and why, for the history.

        Raises `ApprovalConflict` if there is no such approval, more than one, if it has its answer or has expired, or
        if it is about other arguments; `RunEnded` or `UnknownRun`.
        """
        from everstep.engine import approving

        check_optional_texts(what=what, id=id)
        check_texts(by=by, note=note)
        return await approving.approve(self, run, answer, what=what, id=id, arguments=arguments, by=by, note=note)
