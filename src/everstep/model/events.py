"""The events of a history: their kinds and their bodies.

A *command* event records something that workflow code asked for; replay compares it with what the code asks for now.
An *outcome* event is news for workflow code; replay applies it. A *note* tells a reader or recovery something and
never reaches workflow code.

    commands   step_started (first attempt)  key_taken (first time)  step_cancelled  timer_started
               signal_awaited  signal_rejected  child_started  child_cancelled  value_published  witness_taken
               witness_changed  witness_released  call_withheld (at first)  charged  budget_narrowed
               checkpoint_taken  request_awaited  request_answered  stream_appended
               approval_asked  approval_withdrawn  graph_started  graph_moved
               compensation_started  run_continued  run_completed  run_failed  run_cancelled
    outcomes   run_started  step_completed  step_shared  step_failed  timer_fired  signal_received  child_ended
               request_received  cancel_requested  rollback_requested
    notes      step_started (later attempts)  key_taken (later)  attempt_failed  step_doubted  probe_answered
               heartbeat  patched  call_withheld (again)  attempt_charged  checkpoint_damaged  drift_judged  run_held
               run_resolved  run_retried  run_repaired  run_restored  stream_noted
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from everstep.model.budget_events import AttemptCharged, BudgetNarrowed, CallWithheld, Charged
from everstep.model.budgets import Allotment, Amounts, Charge
from everstep.model.event_base import NO_PAYLOAD, Body, EventRow, Outcome
from everstep.model.exchange_events import (
    ApprovalAsked,
    ApprovalWithdrawn,
    RequestAnswered,
    RequestAwaited,
    RequestReceived,
    StreamAppended,
    StreamNoted,
)
from everstep.model.run_events import (
    CancelRequested,
    CompensationStarted,
    GraphMoved,
    GraphStarted,
    RollbackRequested,
    RunCancelled,
    RunCompleted,
    RunContinued,
    RunFailed,
    RunHeld,
    RunRepaired,
    RunResolved,
    RunRestored,
    RunRetried,
    RunStarted,
)
from everstep.model.witness_events import DriftJudged, WitnessChanged, WitnessReleased, WitnessTaken

__all__ = [
    "NO_PAYLOAD",
    "Body",
    "DriftJudged",
    "EventRow",
    "Outcome",
    "WitnessChanged",
    "WitnessReleased",
    "WitnessTaken",
]
"""Names that other modules import from here, although they are defined elsewhere."""

EventKind = Literal[
    "run_started",
    "step_started",
    "step_completed",
    "step_shared",
    "step_failed",
    "step_cancelled",
    "key_taken",
    "attempt_failed",
    "heartbeat",
    "step_doubted",
    "probe_answered",
    "timer_started",
    "timer_fired",
    "signal_awaited",
    "signal_received",
    "signal_rejected",
    "value_converted",
    "child_started",
    "child_cancelled",
    "child_ended",
    "value_published",
    "witness_taken",
    "witness_changed",
    "witness_released",
    "drift_judged",
    "checkpoint_taken",
    "checkpoint_damaged",
    "patched",
    "request_awaited",
    "request_received",
    "request_answered",
    "approval_asked",
    "approval_withdrawn",
    "stream_appended",
    "stream_noted",
    "graph_started",
    "graph_moved",
    "call_withheld",
    "charged",
    "attempt_charged",
    "budget_narrowed",
    "cancel_requested",
    "rollback_requested",
    "compensation_started",
    "run_held",
    "run_resolved",
    "run_retried",
    "run_repaired",
    "run_restored",
    "run_continued",
    "run_completed",
    "run_failed",
    "run_cancelled",
]


class StepStarted(Body):
    """An attempt at a step begins. For contracts other than `read` this is durable before the body starts."""

    call: int
    arguments: str
    effect: str = "repeat"
    preview: str = ""
    source: str = ""
    attempt: int = 1
    because: str = ""
    """Why there is another attempt: `retry` (its policy), `crash` (the last was cut off), `person` (a retried run),
    `not-done` (a probe or a person said that the last one did not happen). Or why the first one comes only now: `freed`
    (another step had the step's key), `budget` (it had to wait for room), `limit` (for a slot). Or why there is none:
    `kept` (the step was done before its run was retried, and its outcome is given again).
    """
    by: str = ""
    """With `once` and `atomic`: the worker that runs it. Recovery needs it to find out whether that worker can still
    act.
    """
    whole: msgspec.Raw = NO_PAYLOAD
    """With `once` and `atomic`, and for a compensation or a step that has one: the arguments themselves."""
    ref: str = ""
    database: str = ""
    """With `atomic`: the database that it writes to, where recovery looks for the marker."""
    key: str = ""
    """With `key=`: the key, which the step has from this event on."""
    round: int = 0
    """With `key=`: how often the key was freed after its action had been done."""
    compensate: str = ""
    """The name of the step's compensation, if it has one."""
    compensates: int = 0
    """In a compensation: the call of the step that it undoes."""
    secret: bool = False
    """Here and below: the arguments, the outcome and the error of the step are stored, and never shown."""
    cost: Charge | None = None
    """In a run with a budget: the estimate that is reserved, until the outcome says what was really used."""
    part: int = 0
    """The part of the run's budget that the step uses: the call of a `budget_narrowed`, or 0."""


class StepCompleted(Outcome):
    """A step's outcome. `key_unused` flags a repeated effect whose body never asked for its key."""

    call: int
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    attempt: int = 1
    seconds: float = 0.0
    key_unused: bool = False
    fallback: bool = False
    adopted: bool = False
    """A probe, a person or the marker of an earlier attempt gave the outcome; this attempt's body did not."""
    skipped: bool = False
    """A person gave the outcome of a step that did not happen, so there is nothing to compensate."""
    secret: bool = False
    charged: Charge | None = None
    """What the body was charged; it replaces the estimate."""


class StepShared(Outcome):
    """A step has the outcome of another one with the same key and arguments, and did not run itself.

    `run`, `generation` and `seq` name the `step_started` of the one that ran. `by`: who gave the outcome by hand.
    """

    call: int
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    run: str = ""
    generation: int = 1
    seq: int = 0
    by: str = ""
    secret: bool = False


class StepFailed(Outcome):
    """A step's failure, raised in workflow code."""

    call: int
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    attempt: int = 1
    seconds: float = 0.0
    secret: bool = False
    charged: Charge | None = None


class KeyTaken(Body):
    """A step does not begin, because another one has its key. `run`, `generation` and `seq` name that one's start.

    What follows is its outcome (`step_shared`), a `KeyConflict` (`step_failed`), or, when the key is free, its own
    `step_started`. `again`: the step was in the history before.
    """

    call: int
    key: str
    arguments: str
    effect: str = "repeat"
    preview: str = ""
    source: str = ""
    run: str = ""
    generation: int = 1
    seq: int = 0
    again: bool = False
    secret: bool = False


class AttemptFailed(Body):
    """An attempt failed and another will be made, not before `due` (microseconds since 1970).

    Below zero no attempt is made automatically: -1 waits for a person, -2 says that the step's fallback takes its
    place.
    """

    call: int
    attempt: int
    due: int
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    seconds: float = 0.0
    secret: bool = False
    charged: Charge | None = None


class StepDoubted(Body):
    """A `once` step is in doubt: it was begun, and whether its effect happened is unknown.

    `because` is `crash` (cut off), `error` (it raised something that does not say), `left` (it said that it has not
    happened while something that it had started still ran), `outcome` (it did happen, and what it returned cannot be
    stored), `repaired` or `restored` (it may have been begun in a part of the history that is
    lost; its body has not been started since), `earlier` (it has a key, and an earlier generation of the run, which was
    restarted, had begun it). An `atomic` step is in doubt only when its database cannot be asked
    (`error`), has failed while it was written to (`commit`), or is another one by now (`database`).
    """

    call: int
    attempt: int
    because: str
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    secret: bool = False


class ProbeAnswered(Body):
    """A probe answered for a step in doubt: `done`, `not-done` or `unknown`."""

    call: int
    attempt: int
    answer: str
    why: str = ""


class Heartbeat(Body):
    """A step body reported how far it is, for its next attempt."""

    call: int
    attempt: int
    details: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    secret: bool = False


class StepCancelled(Body):
    """Workflow code no longer waits for a step: its task was cancelled or timed out."""

    call: int
    step_call: int


class TimerStarted(Body):
    """A timer was still pending when the code had settled. Both figures are microseconds."""

    call: int
    duration: int
    deadline: int
    source: str = ""


class TimerFired(Outcome):
    """A timer's deadline has passed."""

    call: int


class SignalAwaited(Body):
    """Workflow code asked for a signal by name and type."""

    call: int
    name: str
    type: str
    source: str = ""


class SignalReceived(Outcome):
    """A signal was taken from the inbox into the history; `number` is its place in the inbox."""

    number: int
    name: str
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    id: str = ""


class SignalRejected(Body):
    """A signal did not decode as the type that workflow code asked for. It stays visible here."""

    call: int
    name: str
    number: int
    why: str = ""


class ValueConverted(Body):
    """Plain data that was sent to the run became the type that its code asks for. A replay takes it from here."""

    call: int
    what: str
    """What was converted: an argument, a signal, a request."""
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class ChildStarted(Body):
    """A child run was started, in the same transaction as its own first event."""

    call: int
    run: str
    workflow: str
    arguments: str
    on_parent_end: str = "cancel"
    preview: str = ""
    source: str = ""
    allotted: Allotment | None = None
    """The part of the run's budget that it was given. It is reserved until the child ends."""
    part: int = 0
    withheld: bool = False
    """Whether it had to wait for room in the budget: then a `call_withheld` replaces this event."""


class ChildCancelled(Body):
    """Workflow code no longer waits for a child that it called, so the child is asked to stop."""

    call: int
    child_call: int


class ChildEnded(Outcome):
    """A child run ended, or could not be started (`status` is then `refused`)."""

    call: int
    run: str
    status: str
    number: int
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    secret: bool = False
    """The child failed with the error of a secret step."""
    used: Amounts | None = None
    """What the child used of its allotment; the rest is free again."""
    granted: Amounts | None = None
    """What people granted the child beyond its allotment."""


class ValuePublished(Body):
    """Workflow code published a value that anyone can read."""

    call: int
    name: str
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class CheckpointTaken(Body):
    """The code's state was recorded, so that recovery can start from here instead of from the beginning."""

    call: int
    number: int
    """Which call of `checkpoint` it was, counted from 1; calls that recorded nothing count."""
    digest: str
    """The digest of the checkpoint itself, which is stored separately from the history."""
    size: int = 0
    """The bytes of the state."""
    source: str = ""


class CheckpointDamaged(Body):
    """A checkpoint was damaged or missing, so recovery started from an older one, or from the beginning."""

    checkpoint: int
    """The number of its event."""
    why: str = ""
    archived: bool = False
    """Whether there was a row, which is now in the archive."""


class Patched(Body):
    """What `patched(name)` answers in this run, from now on."""

    name: str
    value: bool


BODIES: Final[dict[str, type[Body]]] = {
    "run_started": RunStarted,
    "step_started": StepStarted,
    "step_completed": StepCompleted,
    "step_shared": StepShared,
    "step_failed": StepFailed,
    "step_cancelled": StepCancelled,
    "key_taken": KeyTaken,
    "attempt_failed": AttemptFailed,
    "heartbeat": Heartbeat,
    "step_doubted": StepDoubted,
    "probe_answered": ProbeAnswered,
    "timer_started": TimerStarted,
    "timer_fired": TimerFired,
    "signal_awaited": SignalAwaited,
    "signal_received": SignalReceived,
    "signal_rejected": SignalRejected,
    "value_converted": ValueConverted,
    "child_started": ChildStarted,
    "child_cancelled": ChildCancelled,
    "child_ended": ChildEnded,
    "value_published": ValuePublished,
    "witness_taken": WitnessTaken,
    "witness_changed": WitnessChanged,
    "witness_released": WitnessReleased,
    "drift_judged": DriftJudged,
    "checkpoint_taken": CheckpointTaken,
    "checkpoint_damaged": CheckpointDamaged,
    "patched": Patched,
    "request_awaited": RequestAwaited,
    "request_received": RequestReceived,
    "request_answered": RequestAnswered,
    "approval_asked": ApprovalAsked,
    "approval_withdrawn": ApprovalWithdrawn,
    "stream_appended": StreamAppended,
    "stream_noted": StreamNoted,
    "graph_started": GraphStarted,
    "graph_moved": GraphMoved,
    "call_withheld": CallWithheld,
    "charged": Charged,
    "attempt_charged": AttemptCharged,
    "budget_narrowed": BudgetNarrowed,
    "cancel_requested": CancelRequested,
    "rollback_requested": RollbackRequested,
    "compensation_started": CompensationStarted,
    "run_held": RunHeld,
    "run_resolved": RunResolved,
    "run_retried": RunRetried,
    "run_repaired": RunRepaired,
    "run_restored": RunRestored,
    "run_continued": RunContinued,
    "run_completed": RunCompleted,
    "run_failed": RunFailed,
    "run_cancelled": RunCancelled,
}

ENDS: Final = frozenset({"run_completed", "run_failed", "run_cancelled"})

encode_body = msgspec.json.Encoder().encode


class _Decoders(dict[str, Callable[[bytes], Any]]):
    """The decoder of each kind's body, made when the first body of that kind is decoded: most programs see
    few kinds.
    """

    def __missing__(self, kind: str) -> Callable[[bytes], Any]:
        made = self[kind] = msgspec.json.Decoder(BODIES[kind]).decode
        return made


BODY_DECODERS: Final[dict[str, Callable[[bytes], Any]]] = _Decoders()


def decode_body(kind: str, body: bytes) -> Any:
    """Return an event's body as its kind's struct. Raises `msgspec.MsgspecError` or `KeyError` on damage."""
    try:
        return BODY_DECODERS[kind](body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
