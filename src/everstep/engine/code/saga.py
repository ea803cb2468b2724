"""The saga of one run: which of its steps can be compensated, and, once it has failed or is rolled back, how far it is.

Pure, like the execution that it belongs to: what happens follows from the history alone. Steps are noted in the order
of the log in which they completed. `compensation_started` names those to be compensated, the last one first; each
compensation is a step of the run, and the next is asked for when the previous one has an outcome. Then comes the end.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everstep.codec import Arguments
from everstep.effects.saga import declared_step, knowing, place_of
from everstep.effects.step import Step
from everstep.engine.code.commands import BeginCompensation, CompensationCall, EndRun, StepCall, call_future
from everstep.errors import NotDecodable, NotEncodable
from everstep.model import events as ev
from everstep.model.carried import CarriedStep
from everstep.model.digests import compensation_entropy

if TYPE_CHECKING:  # a real cycle: an execution has this, and hands itself to it with each call
    from everstep.engine.code.execution import Execution


NAMED_MAX: Final = 20
"""The number of steps without a compensation that a checkpoint remembers by name, for a later rollback."""


class Compensable(msgspec.Struct):
    """A completed step that has a compensation, with what the compensation needs."""

    call: int
    step: str
    target: Any
    """The step as the code called it; None if that was in an older generation."""
    arguments: Arguments
    value: msgspec.Raw
    ref: str
    key: str = ""
    """Its own key (`key=`), if it has one."""
    secret: bool = False
    """Whether its arguments and outcome are never shown, not even as arguments of its compensation."""
    carried: CarriedStep | None = None
    """For a step of an older generation: what is known of it."""

    @property
    def title(self) -> str:
        """Its name, as people see it."""
        return self.step if self.carried is None else self.carried.title


class Saga:
    """What is known of the effects of one run, and how far their compensation is."""

    __slots__ = (
        "begun",
        "completed",
        "end",
        "is_copied",
        "is_wanted",
        "names",
        "skipped",
        "todo",
        "uncompensated",
        "undone",
    )

    def __init__(self) -> None:
        self.completed: dict[int, Compensable] = {}
        """The completed steps with a compensation that has not completed, in the order of the log."""
        self.uncompensated: list[str] = []
        """The completed steps that must not happen twice and have no compensation."""
        self.is_copied = False
        """Whether the events that are being applied were copied from another run."""
        self.is_wanted = False
        """Whether the code has failed and asked for compensation."""
        self.begun = False
        """Whether compensation has begun. Then the code is gone."""
        self.todo: list[int] = []
        """The calls that are still to be compensated, in order; the first is in progress."""
        self.undone: list[str] = []
        self.skipped: list[str] = []
        self.end: EndRun | None = None
        """The end of the run after all of this."""
        self.names: dict[int, str] = {}
        """The names of the compensations by the calls that they undo. Their keys derive from them, also if they
        begin again.
        """

    # -- what the history says -------------------------------------------------------------------------------------
    def settled(self, execution: "Execution", call: StepCall, body: ev.StepCompleted | ev.StepShared) -> None:
        """Note that an effect has completed."""
        if self.is_copied:
            pass  # its effect belongs to the run from which this one was forked
        elif isinstance(body, ev.StepShared):
            pass  # its effect belongs to another step, which alone may compensate it
        elif call.compensates:
            self._compensated(execution, call, body)
        elif body.skipped or body.fallback:
            pass  # its effect did not happen: there is nothing to compensate
        elif call.target.compensate is not None:
            kept = Compensable(call.call, call.step, call.target, call.arguments, body.value, body.ref)
            kept.key, kept.secret = call.own_key, call.is_secret or body.secret
            self.completed[call.call] = kept
        else:
            self.uncompensated.append(call.step)

    def remembered(self) -> list[str]:
        """Return what a checkpoint keeps of the steps without a compensation: some of their names.

        Those with a compensation are not kept, because recovery does not use a checkpoint after one of them.
        """
        return self.uncompensated[:NAMED_MAX]

    def plan(self) -> list[int]:
        """Return the calls to be undone, in the reverse order of their completion."""
        return list(reversed(self.completed))

    def instead_of(self, end: EndRun, execution: "Execution") -> EndRun | BeginCompensation:
        """Return what follows the code's end: the end itself, or a compensation that comes before it."""
        if end.kind != "run_failed" or not self.completed:
            return end
        self.is_wanted = True
        return BeginCompensation(execution.next_call(), end, self.plan())

    # -- undoing ---------------------------------------------------------------------------------------------------
    def begin(self, execution: "Execution", body: ev.CompensationStarted) -> None:
        """Ask for the first compensation, in the recorded order."""
        self.begun = True
        self.todo = list(body.steps)
        if body.because == "rollback":
            self.end = EndRun("run_cancelled", rolled_back=True)
        else:
            self.end = EndRun("run_failed", execution.payload(body.error, body.ref), body.cause, secret=body.secret)
        self._ask_for_next(execution)

    def _ask_for_next(self, execution: "Execution") -> None:
        if self.todo:
            execution.undo(self._call(execution, self.todo[0]))
        else:
            execution.end_undone(self._end(execution))

    def _call(self, execution: "Execution", number: int) -> CompensationCall:
        done = self.completed.get(number)
        if done is None:
            raise NotDecodable(f"call {number} is to be compensated, and the code has no compensation for it")
        target, args, kwargs = self._as_called(execution, done)
        undoing: Step = target.compensate
        try:
            outcome = execution.codec.decode(execution.payload(done.value, done.ref), target.signature.result)
            try:
                arguments = execution.codec.encode_arguments(undoing.signature, (outcome, *args), kwargs, undoing.name)
            except NotEncodable:  # the step's own error has said the same
                undoing = knowing(undoing, target)
                arguments = execution.codec.encode_arguments(undoing.signature, (outcome, *args), kwargs, undoing.name)
        except (NotEncodable, TypeError) as error:
            raise NotDecodable(f"{undoing.name} cannot be called to undo {done.title}: {error}") from error
        name = self._name(done, undoing.name)
        entropy = compensation_entropy(execution.entropy, number) if done.carried is None else done.carried.entropy
        future = call_future(execution.loop, execution)
        next_call, source = execution.next_call(), f"undoes {done.title}"
        call = CompensationCall(next_call, name, undoing, arguments, entropy, future, source, hides=done.secret)
        call.compensates, call.undoes = number, done.title
        return call

    @staticmethod
    def _as_called(execution: "Execution", done: Compensable) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return a step to compensate, and its arguments. One of an older generation is looked up by name."""
        carried = done.carried
        if carried is None:
            return done.target, done.arguments.args, done.arguments.kwargs
        target = declared_step(carried.step.partition("#")[0], carried.where)
        if target is None:
            raise NotDecodable(
                f"{carried.title} is to be compensated, and no step of that name with a compensation is declared here "
                f"(it was {carried.where})"
            )
        whole = execution.payload(carried.whole, carried.whole_ref)
        return target, *execution.codec.decode_arguments(target.signature, whole)

    def _name(self, done: Compensable, name: str) -> str:
        """Return the name of a compensation in the history: numbered like its step, if that number is free."""
        if done.call not in self.names:
            visit = int(done.step.partition("#")[2] or 1)
            while (numbered := name if visit == 1 else f"{name}#{visit}") in self.names.values():
                visit += 1
            self.names[done.call] = numbered
        return self.names[done.call]

    def _compensated(self, execution: "Execution", call: StepCall, body: ev.StepCompleted) -> None:
        self.todo.remove(call.compensates)
        done = self.completed.pop(call.compensates)
        (self.skipped if body.skipped else self.undone).append(done.title)
        self._ask_for_next(execution)

    def _end(self, execution: "Execution") -> EndRun:
        """Return the end of the run; a failure says what was compensated."""
        assert self.end is not None
        if self.end.kind == "run_failed":
            notes = [f"Compensated: {', '.join(self.undone)}."] if self.undone else []
            if self.skipped:
                notes.append(f"Not compensated, as a person decided: {', '.join(self.skipped)}.")
            self.end.payload = execution.codec.with_notes(self.end.payload, notes)
        return self.end

    def remaining(self) -> list[str]:
        """Return the names of the steps that are not compensated yet, the next one first."""
        return [self.completed[call].title for call in self.todo if call in self.completed]

    # -- generations -----------------------------------------------------------------------------------------------
    @property
    def needs_its_code(self) -> bool:
        """Whether a step of this generation can be compensated, for which its code is needed."""
        return any(done.carried is None for done in self.completed.values())

    def take_along(self, steps: "list[CarriedStep]") -> None:
        """Note the steps of older generations that can be compensated, as a new generation begins."""
        for one in steps:
            kept = Compensable(one.call, one.step, None, _NO_ARGUMENTS, one.value, one.ref)
            kept.key, kept.secret, kept.carried = one.key, one.secret, one
            self.completed[one.call] = kept

    def carried(self, execution: "Execution", pack: "Callable[[bytes], tuple[msgspec.Raw, str]]") -> list[CarriedStep]:
        """Return what the next generation needs to compensate the steps of this one and of those before it."""
        steps = [done.carried or _carried(execution, done, pack) for done in self.completed.values()]
        return [msgspec.structs.replace(one, call=place - len(steps)) for place, one in enumerate(steps)]


_NO_ARGUMENTS: Final = Arguments(b"", "", (), {})


def _carried(
    execution: "Execution", done: Compensable, pack: "Callable[[bytes], tuple[msgspec.Raw, str]]"
) -> CarriedStep:
    target: Step = done.target
    assert target.compensate is not None
    entropy = compensation_entropy(execution.entropy, done.call)
    place = (execution.generation, done.call, target.effect, target.compensate.name, entropy, place_of(target))
    whole, whole_ref = pack(done.arguments.payload)
    return CarriedStep(0, done.step, *place, whole, whole_ref, done.value, done.ref, key=done.key, secret=done.secret)


def cannot_be_carried(done: Compensable) -> str:
    """Return why a later generation could not compensate a step; "" if it can."""
    if done.carried is not None:
        return ""
    target: Step = done.target
    if target.signature.has_live or target.compensate is None or target.compensate.signature.has_live:
        return "is given things that are not stored (everstep.Live, or the object of a method)"
    if declared_step(target.name, place_of(target)) is not target:
        return "is not declared where every process finds it: it is bound to an object, or made by the code itself"
    return ""
