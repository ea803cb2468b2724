"""Workflow code of one run, driven by the events of its history. Pure: no I/O, no clock, no threads.

`apply` takes one event, in the order of the log, and drains the loop; `take_commands` gives what the code asked for
since. Live and replay are the same code: replay compares the commands with recorded ones, live records them.
"""

import asyncio
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextvars import Context, copy_context
from random import Random
from types import FrameType, MappingProxyType
from typing import Any, ClassVar, TypeVar

import msgspec

from everstep.codec import PLAIN, Codec, Types, converted, is_same, near
from everstep.effects.step import Step
from everstep.effects.surroundings import CURRENT, code_here, persons_line, where_is
from everstep.effects.witnesses import Taken
from everstep.engine.code import calls
from everstep.engine.code.budget import Books, charge_usage
from everstep.engine.code.calls import Failure, end_of
from everstep.engine.code.checkpoints import Checkpoints
from everstep.engine.code.commands import (
    NOT_RETURNED,
    CallFuture,
    CancelChild,
    CancelStep,
    ChildCall,
    Command,
    ConvertValue,
    Keyed,
    PublishValue,
    StartTimer,
    StepCall,
    call_future,
    variables_in,
)
from everstep.engine.code.conversions import adopted_outcome, declared_arguments
from everstep.engine.code.dropped import Unawaited
from everstep.engine.code.generations import take_along
from everstep.engine.code.greenlets import in_greenlet, on_greenlet, wait_in_greenlet
from everstep.engine.code.loop import WorkflowFuture, WorkflowLoop
from everstep.engine.code.requests import Asked
from everstep.engine.code.saga import Saga
from everstep.engine.code.signals import Receiving
from everstep.engine.code.unwinding import refuse, unwind
from everstep.engine.code.workflow import Workflow
from everstep.engine.history.kept import Kept
from everstep.errors import IdConflict, Misuse, NotDecodable, NotEncodable, RunCancelled
from everstep.model import events as ev
from everstep.model.digests import derived_key
from everstep.model.ids import child_id
from everstep.model.untrusted import is_a, is_refusal, text_of

_NONE: frozenset[Any] = frozenset()
_NO_CHILDREN: Mapping[int, str] = MappingProxyType({})
_NO_CONVERSIONS: Mapping[int, ev.ValueConverted] = MappingProxyType({})
PayloadLookup = Callable[[str], bytes]
_C = TypeVar("_C")


class Followed:
    """The recorded definition of a run's graph, and its recorded moves by the visits that they came after."""

    def __init__(self, started: ev.GraphStarted) -> None:
        self.started = started
        self.moves: dict[str, ev.GraphMoved] = {}


class Execution:
    """The code of one run in memory."""

    place: ClassVar[str] = "workflow"

    def __init__(
        self,
        workflow: Workflow,
        *,
        run: str,
        generation: int,
        codec: Codec,
        lookup: PayloadLookup,
        books: Books | None = None,
    ) -> None:
        self.workflow = workflow
        self.run = run
        self.generation = generation
        self.codec = codec
        self.lookup = lookup
        self.loop = WorkflowLoop(self)  # type: ignore[abstract]  # the rest is forbidden, in a loop
        self.entropy = ""
        self.steps: dict[int, StepCall] = {}
        self.children: dict[int, ChildCall] = {}
        self.patches: dict[str, bool] = {}
        self.witnesses: dict[str, Taken] = {}
        """The facts that the run remembers, by subject."""
        self.kept: Kept | None = None
        """Outcomes that a retry went back over, for identical calls."""
        self.checkpoints: Checkpoints | None = None
        self.unapplied: Collection[Any] = ()
        """Outcomes that are recorded and not seen by the code yet: the driver's own list."""
        self.books = books
        """What the run has used, if it has a budget."""
        self.branch = 0
        """How often the run had been retried when the code came here. Ids of children and keys depend on it."""
        self.begun: Set[int] = _NONE
        """The open steps that were begun when the replay had ended."""
        self.rollback: ev.RollbackRequested | None = None
        self.cancel: ev.CancelRequested | None = None
        self.unseen_workers: Set[str] = _NONE
        """The workers that began steps in a part of the history that was archived."""
        self.copied_children: Mapping[int, str] = _NO_CHILDREN
        """In a fork: the ids that the other run gave its children."""
        self.followed: Followed | None = None
        """In the replay of a graph: its recorded definition, and the edges that it took."""
        self.conversions: Mapping[int, ev.ValueConverted] = _NO_CONVERSIONS
        """In a replay: what plain data became when it was first converted, by call."""
        self.rejected: Set[int] = _NONE
        """In a replay: the numbers of the signals that the code did not take."""
        self.new_patches: Sequence[str] = ()
        """Names that the code has asked `patched` about since it last settled."""
        self.refusal: BaseException | None = None
        """The machine's refusal of a resource when the code called something. The run is then resumed from its
        history.
        """
        self._receiving: Receiving | None = None
        self._random: Random | None = None
        self._cancel_came_too_late = False
        self._saga: Saga | None = None
        self.failures: dict[int, Failure] = {}
        """Failures that the code has seen, by the identity of their errors."""
        self.replaying = False
        self.unwinding = False
        self.wants_places = True
        """Whether the code's lines are looked up: not in the part of a replay that is neither recorded nor shown."""
        self.ended = False
        self.caution = ""
        """`repaired` or `restored`: steps that must not happen twice may have been begun in a part that is lost."""
        self.main: asyncio.Task[Any] | None = None
        self.unawaited = Unawaited()
        self._calls = 0
        self._visits: dict[str, int] = {}
        self._issued: list[Command] = []

    # -- the history moves the code --------------------------------------------------------------------------------
    def begin(self, started: ev.RunStarted, at: int) -> None:
        """Apply `run_started`: create the main task and let it run until it first settles."""
        self.entropy = started.entropy
        self.caution = "restored" if started.unseen else ""
        self.loop.now = at
        if started.carried is not None:
            take_along(self, started.carried)
        payload = self.payload(started.arguments, started.arguments_ref)
        args, kwargs = self.codec.decode_arguments(self.workflow.signature, payload)
        calls.check_arguments(self.workflow.signature, args, kwargs)
        if started.unchecked and (self.conversions or not self.replaying):
            args, kwargs = declared_arguments(self, args, kwargs)
        context = self._new_context()
        if self.workflow.is_async:
            coroutine = self.workflow.function(*args, **kwargs)
        else:
            coroutine = on_greenlet(functools.partial(self.workflow.function, *args, **kwargs))
        self.main = self.loop.create_main(coroutine, "main", context)
        self.loop.drain()

    def convert(self, value: Any, types: Types, annotation: Any, what: str, *, always: bool = False) -> Any:
        """Return a decoded value as the type that the code declares. Raises `NotDecodable` if it cannot be that.

        If code of the type has a say in it (a validator, a default), its answer is recorded: it need not be the same in
        a replay. `always`: what became another value is recorded in any case.
        """
        recorded = self.next_conversion()
        if recorded is not None:
            payload = self.payload(recorded.value, recorded.ref)
        else:
            if always and self.replaying:
                return value  # nothing is recorded of it, so it is as it was given
            made = converted(value, annotation)
            if not (made.ran_code or always):
                return made.value
            try:
                payload = self.codec.encode(made.value, types, what)
                if is_same(self.codec.encode(value, types, what), payload):
                    return made.value
            except NotEncodable as refused:
                raise NotDecodable(str(refused)) from None
        self.issue(ConvertValue(self.next_call(), what, payload))
        return self.codec.decode(payload, types)

    def next_conversion(self) -> ev.ValueConverted | None:
        """Return what the history says of a conversion that would be the code's next call."""
        return self.conversions.get(self._calls + 1)

    @property
    def receiving(self) -> "Receiving":
        """The signals and requests of the run: most runs have none."""
        if self._receiving is None:
            self._receiving = Receiving()
        return self._receiving

    @property
    def is_receiving(self) -> bool:
        """Whether the code waits for any signal or request."""
        return self._receiving is not None and self._receiving.is_awaited

    @property
    def saga(self) -> "Saga":
        """The compensations of the run: most runs have none."""
        if self._saga is None:
            self._saga = Saga()
        return self._saga

    def _new_context(self) -> Context:
        context = Context()
        context.run(CURRENT.set, self)
        return context

    def apply(self, kind: str, body: Any, at: int) -> None:
        """Apply one outcome and let the code run until it can only wait."""
        self.loop.now = at
        if self.checkpoints is not None:
            self.checkpoints.saw(kind, body, self.steps)
        _APPLY[kind](self, body)
        self.loop.drain()

    def let_arrive(self, kind: str, body: Any) -> None:
        """Take a signal or request although the code no longer runs, for a later generation or a retry."""
        _APPLY[kind](self, body)

    def take_commands(self) -> list[Command]:
        """Return what the code asked for since the last call; timers that are still pending come last."""
        if self.loop.new_timers:
            for timer in self.loop.timers_at_rest():
                self.issue(StartTimer(self.next_call(), timer))
                self.loop.timers[timer.call] = timer
        if not self.ended and self.main is not None and self.main.done():
            self.loop.forget_task(self.main)
            if not self._waits_before_its_end():
                self.ended = True
                end = end_of(self, cancelled_late=self._cancel_came_too_late)
                self._issued.append(end if self._saga is None else self._saga.instead_of(end, self))
        if self.refusal is not None:
            raise self.refusal
        issued, self._issued = self._issued, []
        return issued

    def note_refusal(self, error: BaseException) -> None:
        """Note that the machine had no room for a value of the code: whatever the code does then, this turn is
        discarded.
        """
        if is_refusal(error):
            self.refusal = error

    def _awaited(self, calls: dict[int, _C], body: Any) -> _C | None:
        """Take the call that an outcome is for. Only for an early one the code may no longer wait."""
        if body.early:
            return calls.pop(body.call, None)
        return calls.pop(body.call)

    def _step_completed(self, body: ev.StepCompleted | ev.StepShared) -> None:
        call = self.steps.pop(body.call, None) if body.early else self.steps.pop(body.call)
        if call is None:
            return
        if call.target.is_accounted_for:
            self.saga.settled(self, call, body)
        future = call.future
        if not future.done():
            future.target = None  # they refer to each other, and a cycle would wait for the garbage collector
            if not (future.is_cancel_wanted and future.cancel_if_wanted()):
                value = call.returned
                if value is NOT_RETURNED:
                    payload = self.lookup(body.ref) if body.ref else body.value
                    value = self.codec.decode(payload, call.target.signature.result)
                is_adopted = body.__class__ is ev.StepCompleted and body.adopted
                future.set_result(adopted_outcome(self, value, call.target) if is_adopted else value)

    def _step_failed(self, body: ev.StepFailed) -> None:
        call = self._awaited(self.steps, body)
        if call is not None and not call.future.done() and not call.future.cancel_if_wanted():
            with near(call.target.function, self.workflow.function):
                error = self.codec.decode_error(self.payload(body.error, body.ref))
            self._fail(call.future, body.call, error, secret=body.secret)

    def _timer_fired(self, body: ev.TimerFired) -> None:
        timer = self._awaited(self.loop.timers, body)
        if timer is not None:
            self.loop.fire(timer)

    def _signal_received(self, body: ev.SignalReceived) -> None:
        self.receiving.arrived(self, body.name, body.number, self.payload(body.value, body.ref))

    def _request_received(self, body: ev.RequestReceived) -> None:

        asked = Asked(body.number, body.id, self.payload(body.value, body.ref))
        self.receiving.requests_of_run().arrived(self, body.name, asked)

    def _child_ended(self, body: ev.ChildEnded) -> None:
        call = self._awaited(self.children, body)
        if call is None or call.future.done():
            return
        if body.status == "completed":
            payload = self.payload(body.value, body.ref)
            call.future.set_result(self.codec.decode(payload, call.target.signature.result))
            return
        error: BaseException = RunCancelled(f"The child run {body.run} was cancelled.")
        if body.status == "failed":
            with near(call.target.function, self.workflow.function):
                error = self.codec.decode_error(self.payload(body.value, body.ref))
        elif body.status == "refused":
            error = IdConflict(f"The run {body.run} exists already, of another workflow or with other arguments.")
        self._fail(call.future, body.call, error, secret=body.secret)

    def _cancel_requested(self, body: ev.CancelRequested) -> None:
        if self.main is None or (self._saga is not None and self._saga.is_wanted):  # the run is being compensated
            self.cancel = body if body.now else self.cancel
            return
        self.cancel = body
        if self.main.done():
            # The code had finished, but its end was not durable, so nothing outside has seen it: the cancel still takes
            # effect.
            self._cancel_came_too_late = True
            self.ended = False
        else:
            self.main.cancel(body.reason or "the run was cancelled")

    def _rollback_requested(self, body: ev.RollbackRequested) -> None:
        """Compensate what the run did, as soon as its doubts are settled, without running its code."""
        self.rollback, self.cancel = body, None
        self.saga.begun = self.saga.is_wanted = self.ended = False
        self.abandon()

    def begin_compensation(self, body: ev.CompensationStarted) -> None:
        """Apply `compensation_started`: the code is gone, and everything that it still waited for."""
        self.abandon()
        self.steps.clear()
        self.cancel = self.rollback = None
        self._calls = body.call
        self.saga.begin(self, body)

    def _fail(self, future: WorkflowFuture, call: int, error: BaseException, *, secret: bool = False) -> None:
        if is_a(error, StopIteration):
            error = RuntimeError(f"StopIteration: {text_of(error)}")  # a future cannot carry it
        self.failures[id(error)] = Failure(error, call, secret)
        future.set_exception(error)

    def payload(self, value: msgspec.Raw, ref: str) -> bytes:
        """Return a payload from a body, or from the store by its digest."""
        return self.lookup(ref) if ref else bytes(value)

    # -- the code's end --------------------------------------------------------------------------------------------
    def _waits_before_its_end(self) -> bool:
        """Return True if the code is done, but its end must wait for children, or for effects that must be settled."""
        if not (self.steps or self.children):
            return False
        return self._waits_for_children() or self.unsettled() is not None

    def unsettled(self) -> StepCall | None:
        """Return a begun step whose effect must be known before the run may end, if there is one."""
        return next((call for call in self.steps.values() if call.target.is_accounted_for), None)

    def _waits_for_children(self) -> bool:
        return any(child.target.on_parent_end == "wait" for child in self.children.values()) and not self.cancel

    @property
    def is_undone(self) -> bool:
        """Whether the run is being compensated, or is about to be: nothing else matters then."""
        return (self._saga is not None and self._saga.begun) or self.rollback is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the code waits for anything that can still happen."""
        return bool(self.steps or self.loop.timers or self.children or self.is_receiving)

    # -- the code asks ---------------------------------------------------------------------------------------------
    def next_call(self) -> int:
        """Return the number of the next call: calls are counted in the order in which the code makes them."""
        self._calls += 1
        return self._calls

    def issue(self, command: Command) -> None:
        """Add a command."""
        self._issued.append(command)

    def require_live(self) -> None:
        """Raise `Evicted` when the code is being unwound: then every command does."""
        if self.unwinding:
            refuse(self.loop)

    def call_step(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
        """A step called by workflow code is a durable call."""
        source = where_is(frame) if frame is not None else ""
        if step.is_async:
            if not self.workflow.is_async and in_greenlet():
                raise calls.cannot_await("step", step.name, frame or sys._getframe(2))
            self.unawaited.made = made = self.unawaited.made + 1
            awaited = self._await_step(made, step, args, kwargs, source)
            self.unawaited.noted[made] = awaited, step.name, source
            return awaited
        if in_greenlet():
            return wait_in_greenlet(self.issue_step(step, args, kwargs, source))
        raise calls.blocks("step", step.name, source or where_is(sys._getframe(2)))

    async def _await_step(
        self, made: int, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], source: str
    ) -> Any:
        del self.unawaited.noted[made]
        return await self.issue_step(step, args, kwargs, source)

    def issue_step(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], source: str) -> CallFuture:
        """Ask for a step and return the future of its outcome."""
        if self.unwinding:
            refuse(self.loop)
        if not self.loop.is_guarded:
            raise calls.not_running(step.name, self.run)
        name = step.name
        try:
            arguments = self.codec.encode_arguments(step.signature, args, kwargs, name)
        except (MemoryError, OSError) as error:
            self.note_refusal(error)
            raise
        keyed = Keyed(step.key.make(step.signature, arguments)) if step.key is not None else None
        visit = self._visits[name] = self._visits.get(name, 0) + 1
        self._calls = number = self._calls + 1
        future = call_future(self.loop, self)
        called = name if visit == 1 else f"{name}#{visit}"
        call = future.target = StepCall(number, called, step, arguments, self.entropy, future, source, keyed)
        if len(context := copy_context()) > 1:  # almost all code has set no variable
            call.variables = variables_in(context)
        self.steps[number] = call
        self._issued.append(call)
        if self.books is not None:
            self.books.enter(number)
        return future

    def must_settle(self, target: StepCall) -> bool:
        """Return True if a step has begun and must be settled before the code may see that it was cancelled."""
        if self.unwinding or target.call not in self.steps or not target.target.is_accounted_for:
            return False
        return target not in self._issued  # otherwise it has not begun yet

    def stop_waiting(self, target: StepCall | ChildCall) -> None:
        """The code was cancelled while it waited for a step or child."""
        if self.unwinding:
            return
        if isinstance(target, StepCall):
            target.cancelled = True
            self.steps.pop(target.call, None)
            self.issue(CancelStep(self.next_call(), target))
        elif target.target.on_parent_end == "cancel":
            self.issue(CancelChild(self.next_call(), target))

    def cancel_child(self, target: StepCall | ChildCall | None) -> None:
        """Ask a child to stop, while the code may still wait for its end."""
        self.require_live()
        assert isinstance(target, ChildCall)
        target.is_told_to_stop = True
        self.issue(CancelChild(self.next_call(), target))

    def is_outcome(self, error: BaseException) -> bool:
        """Return True if an error is the recorded failure of a call. Older releases recorded errors such as
        `SystemExit`.
        """
        return id(error) in self.failures

    def call_in_executor(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`asyncio.to_thread(step, …)`: the way in which an `async` workflow calls a `def` step."""
        handed, given = function, args
        function, args, kwargs = calls.unwrap_to_thread(function, args)
        if calls.is_inline(function):
            return calls.called_inline(self.loop, handed, given)
        line = persons_line(sys._getframe(2))
        if isinstance(function, Step) and not function.is_async:
            if function.asks:
                tool: Any = function
                return self.loop.create_task(tool.approved(self, args, kwargs))
            return self.issue_step(function, args, kwargs, line or "asyncio.to_thread")
        if isinstance(function, Workflow) and not function.is_async:
            return self.issue_child(function, args, kwargs, None, line or "asyncio.to_thread")
        raise calls.plain_function_on_thread(function, line)

    def call_workflow(
        self, workflow: Workflow, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """A workflow called by workflow code is a child run."""
        if workflow.is_async:
            if not self.workflow.is_async and in_greenlet():
                raise calls.cannot_await("workflow", workflow.name, frame)
            source = where_is(frame)
            return self.unawaited.note(self._await_child(workflow, args, kwargs, source), workflow.name, source)
        if in_greenlet():
            return wait_in_greenlet(self.issue_child(workflow, args, kwargs, None, where_is(frame)))
        raise calls.blocks("workflow", workflow.name, where_is(frame))

    async def _await_child(self, workflow: Workflow, args: tuple[Any, ...], kwargs: dict[str, Any], source: str) -> Any:
        return await self.issue_child(workflow, args, kwargs, None, source)

    def issue_child(
        self, workflow: Workflow, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None, source: str
    ) -> CallFuture:
        """Ask for a child run and return the future of its outcome."""
        self.require_live()
        if not self.loop.is_guarded:
            raise calls.not_running(workflow.name, self.run)
        try:
            arguments = self.codec.encode_arguments(workflow.signature, args, kwargs, workflow.name)
        except (MemoryError, OSError) as error:
            self.note_refusal(error)
            raise
        future = call_future(self.loop, self)
        if self.books is not None:
            self.books.enter_child(self._calls + 1, workflow, self.children)
        number = self.next_call()
        run = id or self.copied_children.get(number) or child_id(self.run, self.generation, number, self.branch)
        call = ChildCall(number, run, workflow, arguments, future, source)
        future.target = call
        self.children[number] = call
        self.issue(call)
        return future

    def publish(self, name: str, value: Any, source: str) -> None:
        """Publish a value that anyone can read once it is durable."""
        self.require_live()
        try:
            payload = self.codec.encode(value, PLAIN, f"publish({name!r})")
        except (MemoryError, OSError) as error:
            self.note_refusal(error)
            raise
        self.issue(PublishValue(self.next_call(), name, payload, source))

    def take_charge(self, nanos: int | None, tokens: int | None) -> None:
        """Count what workflow code used by itself."""
        self.require_live()
        self.issue(charge_usage(self.books, self.next_call(), nanos, tokens, persons_line(sys._getframe(2))))

    def patched(self, name: str) -> bool:
        """Return the same answer for a name throughout a run: whether its code had this patch when it came here
        first.
        """
        self.require_live()
        if name not in self.patches:
            self.patches[name] = not self.replaying
            self.new_patches = [*self.new_patches, name]
        return self.patches[name]

    def random(self) -> Random:
        """Return the run's own source of randomness, the same in every replay."""
        if self._random is None:
            self._random = Random(derived_key(self.entropy, "#random"))
        return self._random

    def forget_random(self) -> None:
        """Draw other numbers from here on, by the present entropy."""
        self._random = None

    def take_new_patches(self) -> Sequence[str]:
        """Return the names that the code has asked `patched` about since the last call."""
        names, self.new_patches = self.new_patches, ()
        return names

    # -- what other modules tell the execution --------------------------------------------------------------------
    def set_replaying(self, is_replaying: bool) -> None:
        """Start or stop comparing the code's commands with its history and silencing its log."""
        self.replaying = is_replaying
        self.loop.quiet = is_replaying or self.unwinding

    def set_wants_places(self, wants_places: bool) -> None:
        """Start or stop looking up the code's lines."""
        self.wants_places = wants_places

    def read_payloads_with(self, lookup: PayloadLookup) -> None:
        """Read payloads outside of events from another place."""
        self.lookup = lookup

    def note_ahead(self, checkpoints: Checkpoints | None, followed: Followed | None) -> None:
        """Later events of the history say which checkpoints the code takes, and which edges of its graph."""
        self.checkpoints, self.followed = checkpoints or self.checkpoints, followed

    def note_conversions(self, conversions: Mapping[int, ev.ValueConverted], rejected: Set[int]) -> None:
        """What the history says of the values that were sent: what they became, and which the code did not take."""
        self.conversions, self.rejected = conversions, rejected

    def note_begun(self, calls: Set[int]) -> None:
        """Note the open steps that were begun, at the end of the replay."""
        self.begun = calls

    def note_unapplied(self, outcomes: Collection[Any]) -> None:
        """Use this list of outcomes that are recorded and not applied."""
        self.unapplied = outcomes

    def checkpoints_of_run(self) -> Checkpoints:
        """Return what takes checkpoints: most runs have none."""
        if self.checkpoints is None:
            self.checkpoints = Checkpoints()
        return self.checkpoints

    def keep_outcomes(self, kept: Kept | None) -> None:
        """Note outcomes that a retry went back over: identical calls get them."""
        self.kept = kept

    def copy_children(self, ids: Mapping[int, str]) -> None:
        """Note that children which the code starts now have the ids of the run from which this one was forked."""
        self.copied_children = ids

    def branch_off(self, branch: int, entropy: str) -> None:
        """Derive ids of children, and keys, from other entropy from here on."""
        self.branch, self.entropy = branch, entropy

    def note_lost(self, caution: str, workers: Set[str] = _NONE) -> None:
        """Note that a part of the history is lost (`repaired` or `restored`), in which these workers may have begun
        steps.
        """
        self.caution = caution
        self.unseen_workers = self.unseen_workers | workers

    def accept_lost(self) -> None:
        """Note that a person has checked everything in the lost part."""
        self.caution = ""

    def set_ended(self, ended: bool) -> None:
        """Note that the code has ended, or that a retry opens the run again."""
        self.ended = ended

    def note_cancel(self, request: ev.CancelRequested) -> None:
        """Note that the run is cancelled; its code sees that next."""
        self.cancel = request

    def note_rollback(self, request: ev.RollbackRequested) -> None:
        """Note that a rollback was requested; it is recorded next."""
        self.rollback, self.cancel = request, None

    def remember(self, subject: str, taken: Taken) -> None:
        """Remember a fact. A newer one about the same subject replaces it."""
        self.witnesses[subject] = taken

    def go_on_from(self, calls: int, visits: Mapping[str, int], source: Random | None) -> None:
        """Continue counting calls, and drawing random numbers, from a checkpoint."""
        self._calls, self._visits = calls, dict(visits)
        self._random = source or self._random

    def undo(self, call: StepCall) -> None:
        """Ask for a compensation."""
        self.steps[call.call] = call
        self.issue(call)

    def end_undone(self, end: Command) -> None:
        """End the run after everything is compensated."""
        self.ended = True
        self.issue(end)

    # -- leaving memory --------------------------------------------------------------------------------------------
    def abandon(self) -> None:
        """Drop the code for good, while its run continues without it to compensate what it did."""
        self.evict()
        self.loop.timers.clear()
        self.loop.forget_new_timers()
        self.witnesses.clear()
        self.new_patches = ()
        self._issued.clear()

    def evict(self) -> None:
        """Unwind the code: every command raises `Evicted`, nothing is recorded."""
        if not self.unwinding:
            self.unwinding = True
            if self.loop.tasks or self.loop.has_asyncgens:
                unwind(self.loop, self._new_context(), self.run)
            self.loop.quiet = True
            self.unawaited.noted.clear()
            self.main = None  # its context refers back here, and a cycle would wait for the garbage collector
            self.loop.forget_executor()


def current_execution(what: str) -> Execution:
    """Return the execution whose code is running, else say where `what` may be used."""
    current = CURRENT.get() or code_here()
    if isinstance(current, Execution):
        return current
    raise Misuse(f"{what} is for workflow code; it was called outside of one.")


_APPLY: dict[str, Callable[[Execution, Any], None]] = {
    "step_completed": Execution._step_completed,
    "step_shared": Execution._step_completed,
    "step_failed": Execution._step_failed,
    "timer_fired": Execution._timer_fired,
    "signal_received": Execution._signal_received,
    "request_received": Execution._request_received,
    "child_ended": Execution._child_ended,
    "cancel_requested": Execution._cancel_requested,
    "rollback_requested": Execution._rollback_requested,
}
OUTCOMES = frozenset(_APPLY)
