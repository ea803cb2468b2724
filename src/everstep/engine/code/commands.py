"""Commands: what workflow code asks for. Each knows the event that records it, and compares itself with a recorded
one.
"""

import asyncio
from collections.abc import Sequence
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import msgspec

from everstep.codec import Arguments, Codec, Types, converted, is_same, without_internals
from everstep.effects.step import Step
from everstep.engine.code.loop import Timer, WorkflowFuture, WorkflowLoop
from everstep.engine.code.workflow import Workflow
from everstep.errors import NotDecodable
from everstep.model import events as ev
from everstep.model.digests import digest_of, step_key
from everstep.model.secrets import HIDDEN

if TYPE_CHECKING:  # a real cycle: an execution has this, and hands itself to it with each call
    from everstep.engine.code.execution import Execution


PREVIEW_BYTES: Final = 160


class Difference(NamedTuple):
    """Where the code and the history disagree."""

    seq: int
    what: str
    recorded: str
    now: str
    recorded_source: str = ""
    now_source: str = ""
    acceptable: bool = False
    """Only the arguments of one finished call differ, so that a person may accept it."""
    digest: str = ""
    """The new arguments' digest, with `acceptable`."""
    unfinished: str = ""
    """The step or child that was begun with other arguments and has no outcome; then a person cannot accept it."""


class Command:
    """Something that workflow code asked for. `kind` is the event that records it."""

    kind: str
    step = ""
    call = 0
    source = ""
    payload_field: ClassVar[str] = ""
    """The field of its body that is stored outside the event if it is large."""
    crash_point: ClassVar[str] = ""
    """The crash point that is passed when it is recorded."""
    __slots__ = ()

    def body(self) -> ev.Body:
        """Return the body of the event that records this command."""
        raise AssertionError(f"{type(self).__name__} has no body")

    def text(self) -> str:
        """Return the command in words."""
        return self.kind

    def compare(self, recorded: Any) -> tuple[str, bool]:
        """Return what differs from a recorded event of the same kind ("" if nothing), and whether a person may
        accept it.
        """
        return "", False

    def is_plain_start(self, step: str, recorded: Any) -> bool:
        """Return True if this equals a recorded `step_started` without options. If not, `compare` tells."""
        return False

    def digest(self) -> str:
        """Return the arguments' digest, for commands that have one."""
        return ""


class Keyed:
    """The key of a step with `key=`, and the idempotency key that its body presents once the key is the step's."""

    __slots__ = ("key", "presented")

    def __init__(self, key: str) -> None:
        self.key = key
        self.presented = ""


NOT_RETURNED: Final = object()
Variables = Sequence[tuple[ContextVar[Any], Any]]
OWN_VARIABLES: Final = "everstep_"
"""The names of our own context variables begin with this."""
LEFT_OUT: Final[set[str]] = set()
"""Names of context variables of frameworks that belong to workflow code alone."""


def variables_in(context: Context) -> Variables:
    """Return the context variables that workflow code has set in its context."""
    return [
        (variable, value)
        for variable, value in context.items()
        if not variable.name.startswith(OWN_VARIABLES) and variable.name not in LEFT_OUT
    ]


def set_variables(variables: Variables) -> None:
    """Set context variables in the present context."""
    for variable, value in variables:
        variable.set(value)


class StepCall(Command, msgspec.Struct, eq=False):
    """A call of a step, from the code's request to its outcome."""

    kind = "step_started"

    call: int
    step: str
    target: Step
    arguments: Arguments
    entropy: str
    """The entropy from which its key derives: the one in force when the code asked for it."""
    future: "CallFuture"
    source: str
    keyed: Keyed | None = None
    cancelled: bool = False
    returned: Any = NOT_RETURNED
    """The body's return value, if its payload would decode to an equal one."""
    compensates: int = 0
    """The call that this one compensates; 0 if it is no compensation."""
    undoes: str = ""
    """The name of the compensated step."""
    variables: Variables = ()
    """The context variables that the code had set, for the body."""

    def idempotency_key(self) -> str:
        """Return the value of `everstep.key()` in the step's body."""
        if self.keyed is not None:
            return self.keyed.presented
        return step_key(self.entropy, self.step, self.arguments.digest)

    @property
    def own_key(self) -> str:
        """The key that the step declares (`key=`), if any."""
        return self.keyed.key if self.keyed is not None else ""

    def follow(self, recorded: str) -> None:
        """Use the key that the history has: a step that was begun without one has none."""
        self.keyed = Keyed(recorded) if recorded else None

    @property
    def is_secret(self) -> bool:
        """Whether its arguments, outcome and errors are never shown."""
        return self.target.secret

    def body(self) -> ev.StepStarted:
        payload, digest, _, _ = self.arguments
        target = self.target
        if target.secret:
            return ev.StepStarted(self.call, digest, target.effect, "", self.source, secret=True)
        preview = payload[:PREVIEW_BYTES].decode("utf-8", "replace")
        return ev.StepStarted(self.call, digest, target.effect, preview, self.source)

    def text(self) -> str:
        return f"step {self.step}({self.shown_arguments()}) [{self.target.effect}]"

    def shown_arguments(self, most: int = PREVIEW_BYTES) -> str:
        """Return the arguments as a person may see them."""
        return HIDDEN if self.is_secret else without_internals(preview_of(self.arguments, most))

    def digest(self) -> str:
        return self.arguments.digest

    def is_plain_start(self, step: str, recorded: ev.StepStarted) -> bool:
        if self.step != step or recorded.arguments != self.arguments.digest or recorded.effect != self.target.effect:
            return False
        self.source = self.source or recorded.source
        return self.target.is_plain and not (recorded.key or recorded.compensate or recorded.compensates)

    def compare(self, recorded: ev.StepStarted | ev.KeyTaken) -> tuple[str, bool]:
        if recorded.effect != self.target.effect:
            return "contract", False
        if getattr(recorded, "compensate", "") and self.target.compensate is None:
            return "compensation", True
        if recorded.arguments != self.arguments.digest:
            return "arguments", True
        if recorded.key and (self.keyed is None or recorded.key != self.keyed.key):
            return "key", False
        return "", False


class CompensationCall(StepCall, eq=False, kw_only=True):
    """A step that compensates another one, when the run has failed or is rolled back. No code waits for it."""

    hides: bool
    """Whether its first argument is the outcome of a secret step."""

    @property
    def is_secret(self) -> bool:
        return self.hides or self.target.secret

    def body(self) -> ev.StepStarted:
        body = super().body()
        body.compensates = self.compensates
        if self.hides:
            body.preview, body.secret = "", True
        return body

    def text(self) -> str:
        return f"compensation {self.step}({self.shown_arguments()}) [{self.target.effect}] of {self.undoes}"

    def compare(self, recorded: ev.StepStarted | ev.KeyTaken) -> tuple[str, bool]:
        if getattr(recorded, "compensates", 0) != self.compensates:
            return "compensation", False
        return super().compare(recorded)


class CancelStep(Command):
    """The code no longer waits for a step."""

    kind = "step_cancelled"
    __slots__ = ("call", "step", "target")

    def __init__(self, call: int, target: StepCall) -> None:
        self.call = call
        self.target = target
        self.step = target.step

    def body(self) -> ev.StepCancelled:
        return ev.StepCancelled(self.call, self.target.call)

    def text(self) -> str:
        return f"cancel of step {self.step}"

    def compare(self, recorded: ev.StepCancelled) -> tuple[str, bool]:
        return ("", False) if recorded.step_call == self.target.call else ("step", False)


class StartTimer(Command):
    """A timer that is still pending when the code has settled."""

    kind = "timer_started"
    __slots__ = ("call", "source", "timer")

    def __init__(self, call: int, timer: Timer) -> None:
        self.call = call
        self.timer = timer
        self.source = timer.source
        timer.call = call

    def body(self) -> ev.TimerStarted:
        return ev.TimerStarted(self.call, self.timer.duration, self.timer.deadline, self.source)

    def text(self) -> str:
        return f"timer of {self.timer.duration / 1e6:g} s"

    def compare(self, recorded: ev.TimerStarted) -> tuple[str, bool]:
        return ("", False) if recorded.duration == self.timer.duration else ("duration", False)


class AwaitSignal(Command):
    """A call of `receive`."""

    kind = "signal_awaited"
    __slots__ = ("call", "future", "name", "source", "type_text", "types")

    def __init__(self, call: int, name: str, type_text: str, types: Any, future: WorkflowFuture, source: str) -> None:
        self.call = call
        self.name = name
        self.type_text = type_text
        self.types = types
        self.future = future
        self.source = source

    def decode(self, codec: Codec, payload: bytes) -> Any:
        """Return the value of a signal. Raises `NotDecodable` if it cannot be what the code asked for."""
        return decode_signal(codec, payload, *self.types)

    def value_of(self, execution: Any, number: int, payload: bytes) -> Any:
        """Return what the code is given for a signal; what plain data became is recorded. Raises `NotDecodable`."""
        if number in execution.rejected:
            raise NotDecodable("the code did not take it")
        types, annotation = self.types
        return execution.convert(execution.codec.decode(payload, types), types, annotation, f"signal {self.name}")

    def body(self) -> ev.Body:
        return ev.SignalAwaited(self.call, self.name, self.type_text, self.source)

    def text(self) -> str:
        return f"receive {self.name!r} as {self.type_text}"

    def compare(self, recorded: ev.SignalAwaited) -> tuple[str, bool]:
        if recorded.name != self.name:
            return "signal name", False
        return ("", False) if recorded.type == self.type_text else ("signal type", False)


class RejectSignal(Command):
    """A signal that does not decode as the type asked for."""

    kind = "signal_rejected"
    __slots__ = ("call", "name", "number", "why")

    def __init__(self, call: int, name: str, number: int, why: str) -> None:
        self.call = call
        self.name = name
        self.number = number
        self.why = why

    def body(self) -> ev.SignalRejected:
        return ev.SignalRejected(self.call, self.name, self.number, self.why)

    def text(self) -> str:
        return f"rejection of signal {self.name!r}"

    def compare(self, recorded: ev.SignalRejected) -> tuple[str, bool]:
        return ("", False) if recorded.number == self.number else ("signal", False)


class ConvertValue(Command):
    """Plain data became the type that the code asks for, and code of that type may have had a say."""

    kind = "value_converted"
    payload_field = "value"
    __slots__ = ("call", "payload", "what")

    def __init__(self, call: int, what: str, payload: bytes) -> None:
        self.call = call
        self.what = what
        self.payload = payload

    def body(self) -> ev.ValueConverted:
        return ev.ValueConverted(self.call, self.what, msgspec.Raw(self.payload))

    def text(self) -> str:
        return f"conversion of {self.what}"

    def compare(self, recorded: ev.ValueConverted) -> tuple[str, bool]:
        return ("", False) if recorded.what == self.what else ("converted value", False)


class ChildCall(Command):
    """A child run, from its start to its end."""

    kind = "child_started"
    __slots__ = ("arguments", "call", "future", "is_told_to_stop", "run", "source", "step", "target")

    def __init__(
        self, call: int, run: str, target: Workflow, arguments: Arguments, future: "CallFuture", source: str
    ) -> None:
        self.call = call
        self.run = run
        self.target = target
        self.step = target.name
        self.arguments = arguments
        self.future = future
        self.source = source
        self.is_told_to_stop = False
        """Whether the code has asked it to stop, perhaps before the budget had room for it."""

    def body(self) -> ev.ChildStarted:
        target = self.target
        digest, preview = self.arguments.digest, preview_of(self.arguments)
        return ev.ChildStarted(self.call, self.run, target.name, digest, target.on_parent_end, preview, self.source)

    def text(self) -> str:
        return f"child run {self.run} of {self.target.name}({without_internals(preview_of(self.arguments))})"

    def digest(self) -> str:
        return self.arguments.digest

    def compare(self, recorded: ev.ChildStarted) -> tuple[str, bool]:
        if recorded.workflow != self.target.name:
            return "child workflow", False
        if recorded.run != self.run:
            return "child id", False
        return ("", False) if recorded.arguments == self.arguments.digest else ("arguments", True)


class CancelChild(Command):
    """The code no longer waits for a child that it called directly."""

    kind = "child_cancelled"
    __slots__ = ("call", "step", "target")

    def __init__(self, call: int, target: ChildCall) -> None:
        self.call = call
        self.target = target
        self.step = target.step

    def body(self) -> ev.ChildCancelled:
        return ev.ChildCancelled(self.call, self.target.call)

    def text(self) -> str:
        return f"cancel of child run {self.target.run}"

    def compare(self, recorded: ev.ChildCancelled) -> tuple[str, bool]:
        return ("", False) if recorded.child_call == self.target.call else ("child", False)


class PublishValue(Command):
    """A call of `publish`."""

    kind = "value_published"
    payload_field = "value"
    __slots__ = ("call", "name", "payload", "source")

    def __init__(self, call: int, name: str, payload: bytes, source: str) -> None:
        self.call = call
        self.name = name
        self.payload = payload
        self.source = source

    def body(self) -> ev.ValuePublished:
        return ev.ValuePublished(self.call, self.name, msgspec.Raw(self.payload))

    def text(self) -> str:
        return f"publish {self.name!r}"

    def compare(self, recorded: ev.ValuePublished) -> tuple[str, bool]:
        return ("", False) if recorded.name == self.name else ("name", False)


class BeginCompensation(Command):
    """The code has failed, and its steps are compensated before the run ends."""

    kind = "compensation_started"
    __slots__ = ("call", "end", "steps")

    def __init__(self, call: int, end: "EndRun", steps: list[int]) -> None:
        self.call = call
        self.end = end
        self.steps = steps

    def body(self) -> ev.CompensationStarted:
        end = self.end
        error = msgspec.Raw(end.payload)
        return ev.CompensationStarted(self.call, "failure", self.steps, error, cause=end.cause, secret=end.secret)

    def text(self) -> str:
        return "raise an error, and compensate"


class EndRun(Command):
    """The code is done: a result, an error, or a cancel that it followed. Or it was rolled back."""

    __slots__ = ("cause", "kind", "otherwise", "payload", "rolled_back", "secret")

    def __init__(
        self, kind: str, payload: bytes = b"", cause: int = 0, *, rolled_back: bool = False, secret: bool = False
    ) -> None:
        self.kind = kind
        self.payload = payload
        self.cause = cause
        self.rolled_back = rolled_back
        self.secret = secret
        self.otherwise: EndRun | None = None
        """How an earlier release would have ended the run."""

    def body(self) -> ev.Body:
        if self.kind == "run_completed":
            return ev.RunCompleted(msgspec.Raw(self.payload))
        if self.kind == "run_failed":
            return ev.RunFailed(msgspec.Raw(self.payload), "", self.cause, secret=self.secret)
        return ev.RunCancelled(rolled_back=self.rolled_back)

    def compare(self, recorded: Any) -> tuple[str, bool]:
        if self.kind != "run_completed":
            return "", False
        same = digest_of(self.payload).hex() == recorded.ref if recorded.ref else is_same(recorded.value, self.payload)
        return ("", False) if same else ("result", False)

    def text(self) -> str:
        return {"run_completed": "return", "run_failed": "raise an error", "run_cancelled": "stop, cancelled"}[
            self.kind
        ]


class CallFuture(WorkflowFuture):
    """The future of a step or child call. When the code stops waiting for it, that is a command too."""

    __slots__ = ("_cancel_wanted", "execution", "is_cancel_wanted", "target")
    execution: "Execution"
    target: StepCall | ChildCall | None
    is_cancel_wanted: bool
    """Whether the code was cancelled, and learns that only after the step is settled."""
    _cancel_wanted: tuple[Any] | None

    def cancel(self, msg: Any = None) -> bool:
        """Stop waiting. An effect that must not happen twice is settled first; the code is cancelled after that."""
        if self.done():
            return False
        if isinstance(self.target, StepCall) and self.execution.must_settle(self.target):
            self._cancel_wanted, self.is_cancel_wanted = (msg,), True
            return True
        if self.target is not None:
            self.execution.stop_waiting(self.target)
        return super().cancel(msg)

    def cancel_if_wanted(self) -> bool:
        """Cancel now if the code had been cancelled while the step was not settled."""
        return self._cancel_wanted is not None and asyncio.Future.cancel(self, *self._cancel_wanted)


_new_future: Final = asyncio.Future.__new__
_init_future: Final = asyncio.Future.__init__


def call_future(loop: WorkflowLoop, execution: "Execution") -> CallFuture:
    """Return the future of a call. A constructor in Python would take twice the time, so it is called through C."""
    future: CallFuture = _new_future(CallFuture)
    loop.created = future.number = loop.created + 1
    future.execution = execution
    future.target = future._cancel_wanted = None
    future.is_cancel_wanted = False
    if loop.is_guarded:  # it is the running loop, which a future finds faster by itself than as an argument
        _init_future(future)
    else:
        _init_future(future, loop=loop)
    return future


def preview_of(arguments: Arguments, most: int = PREVIEW_BYTES) -> str:
    """Return the bounded text of a call's arguments that the history keeps."""
    return arguments.payload[:most].decode("utf-8", "replace")


def decode_signal(codec: Codec, payload: bytes, types: Types, annotation: Any) -> Any:
    """Decode what was sent, as the type that is asked for. Raises `NotDecodable` if it cannot be that."""
    return converted(codec.decode(payload, types), annotation).value
