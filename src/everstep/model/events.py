"""The events of a history: their kinds and their bodies.

A *command* event records something that workflow code asked for; replay compares it with what the code asks for now.
An *outcome* event is news for workflow code; replay applies it. A *note* tells a reader or recovery something and
never reaches workflow code.

    commands   step_started (first attempt)  step_cancelled  timer_started  signal_awaited  signal_rejected
               child_started  child_cancelled  value_published  witness_taken  witness_released
               call_withheld (at first)  charged  budget_narrowed
               run_completed  run_failed  run_cancelled
    outcomes   run_started  step_completed  step_failed  timer_fired  signal_received  child_ended  cancel_requested
    notes      step_started (later attempts)  attempt_failed  step_doubted  probe_answered  heartbeat  patched
               call_withheld (again)  attempt_charged  run_held  run_resolved  run_retried
"""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from everstep.model import bodies, budget_events
from everstep.model.budgets import Allotment, Amounts, Charge, Limits

Body = bodies.Body
Outcome = bodies.Outcome
NO_PAYLOAD: Final = bodies.NO_PAYLOAD
CallWithheld = budget_events.CallWithheld
Charged = budget_events.Charged
AttemptCharged = budget_events.AttemptCharged
BudgetNarrowed = budget_events.BudgetNarrowed

EventKind = Literal[
    "run_started",
    "step_started",
    "step_completed",
    "step_failed",
    "step_cancelled",
    "attempt_failed",
    "heartbeat",
    "step_doubted",
    "probe_answered",
    "timer_started",
    "timer_fired",
    "signal_awaited",
    "signal_received",
    "signal_rejected",
    "child_started",
    "child_cancelled",
    "child_ended",
    "value_published",
    "witness_taken",
    "witness_released",
    "patched",
    "call_withheld",
    "charged",
    "attempt_charged",
    "budget_narrowed",
    "cancel_requested",
    "run_held",
    "run_resolved",
    "run_retried",
    "run_completed",
    "run_failed",
    "run_cancelled",
]


class EventRow(NamedTuple):
    """An event as it is stored. `at` is microseconds since 1970; `body` is JSON of the kind's body below."""

    seq: int
    kind: str
    step: str
    at: int
    body: bytes
    digest: bytes


class RunStarted(Body):
    """The run begins: what to run, with what, and the 128 random bits that all its keys derive from."""

    workflow: str
    version: str
    semantics: int
    python: str
    entropy: str
    arguments: msgspec.Raw = NO_PAYLOAD
    arguments_ref: str = ""
    parent: str = ""
    timeout: float | None = None
    source: str = ""
    delay: float = 0.0
    """Seconds between the start and the moment when the code begins."""
    budget: Allotment | None = None
    """How much the run may use, with its children."""


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
    `not-done` (a probe or a person said that the last one did not happen). `budget`: it had to wait for room."""
    by: str = ""
    """With `once`: the worker that runs it, so that it is known later whether it can still act."""
    whole: msgspec.Raw = NO_PAYLOAD
    """With `once`: the arguments themselves."""
    ref: str = ""
    cost: Charge | None = None
    """In a run with a budget: the estimate that is reserved, until the outcome says what was really used."""
    part: int = 0
    """The part of the run's budget that it belongs to: the call of a `budget_narrowed`, or 0."""


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
    """A probe or a person gave the outcome; the body did not."""
    charged: Charge | None = None
    """What the body was charged; it takes the place of the estimate."""


class StepFailed(Outcome):
    """A step's failure, raised in workflow code."""

    call: int
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    attempt: int = 1
    seconds: float = 0.0
    charged: Charge | None = None


class AttemptFailed(Body):
    """An attempt failed and another will be made, not before `due` (microseconds since 1970).

    Below zero nothing is made by itself: -1 waits for a person, -2 says that the step's fallback takes its place.
    """

    call: int
    attempt: int
    due: int
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    seconds: float = 0.0
    charged: Charge | None = None


class StepDoubted(Body):
    """A `once` step is in doubt: it was begun, and nobody knows whether its effect happened.

    `because` is `crash` (cut off), `error` (it raised something that does not say), or `outcome` (it did happen, and
    what it returned cannot be stored).
    """

    call: int
    attempt: int
    because: str
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class ProbeAnswered(Body):
    """A probe was asked about a step in doubt: `done`, `not-done` or `unknown`."""

    call: int
    attempt: int
    answer: str
    why: str = ""


class Heartbeat(Body):
    """A step body's own account of how far it is, for its next attempt."""

    call: int
    attempt: int
    details: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class StepCancelled(Body):
    """Workflow code no longer waits for a step: its task was cancelled or timed out."""

    call: int
    step_call: int


class TimerStarted(Body):
    """A timer was still pending when the code came to rest. Both figures are microseconds."""

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
    """What of the run's budget it was given; that is reserved until it ends."""
    part: int = 0
    withheld: bool = False
    """Whether it had to wait for room in the budget: then a `call_withheld` stands in its place."""


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
    used: Amounts | None = None
    """What it used of its allotment; the rest is free again."""
    granted: Amounts | None = None
    """What persons granted it beyond its allotment."""


class ValuePublished(Body):
    """Workflow code published a value that anyone can read."""

    call: int
    name: str
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class WitnessTaken(Body):
    """The run remembers a fact about the outside, and is held when it no longer holds (or as `on_drift` says)."""

    call: int
    subject: str
    on_drift: str = "hold"
    fact: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    source: str = ""


class WitnessReleased(Body):
    """The run no longer cares about a fact."""

    call: int
    subject: str
    source: str = ""


class Patched(Body):
    """What `patched(name)` answers in this run, from now on."""

    name: str
    value: bool


class CancelRequested(Outcome):
    """Somebody, or the run's own timeout, asked the run to stop. `grace` is in seconds."""

    reason: str = ""
    by: str = ""
    grace: float = 30.0
    now: bool = False
    timeout: bool = False
    number: int = 0


class RunHeld(Body):
    """The run waits for a person."""

    hold: str
    reason: str
    summary: str = ""
    number: int = 0


class RunResolved(Body):
    """A person (or the engine, when the cause is gone) decided about a hold."""

    hold: str
    resolution: str
    by: str = ""
    note: str = ""
    accepted: dict[int, str] = {}
    """With `accept`: event number to the new arguments' digest that counts as equal."""
    facts: dict[str, msgspec.Raw] = {}
    """With `accept` of drift: what the run remembers from now on, by subject."""
    call: int = 0
    """With `retry` of an exhausted step: the call that gets new attempts."""
    granted: Limits | None = None
    """With `accept` of a budget: how much more may be used; its seconds count from here."""
    part: int = 0
    """The part of the budget to which it was granted."""


class RunRetried(Body):
    """A failed run goes on from what failed.

    What the code did between the event `voids` and this one no longer counts; outcomes of calls that were open before
    do, except that steps which failed meanwhile are open again. `entropy` keys the calls that the code asks for from
    `voids` on, so that they share no key with those that no longer count.
    """

    voids: int
    entropy: str
    call: int = 0
    by: str = ""


class RunCompleted(Body):
    """The run's result."""

    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class RunFailed(Body):
    """The run's failure. `call`: the step or child whose failure it is, if it is one's; `forced` as in a cancel."""

    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    call: int = 0
    forced: bool = False


class RunCancelled(Body):
    """The run ended because it was cancelled; `forced` when its code was not waited for."""

    forced: bool = False


BODIES: Final[dict[str, type[Body]]] = {
    "run_started": RunStarted,
    "step_started": StepStarted,
    "step_completed": StepCompleted,
    "step_failed": StepFailed,
    "step_cancelled": StepCancelled,
    "attempt_failed": AttemptFailed,
    "heartbeat": Heartbeat,
    "step_doubted": StepDoubted,
    "probe_answered": ProbeAnswered,
    "timer_started": TimerStarted,
    "timer_fired": TimerFired,
    "signal_awaited": SignalAwaited,
    "signal_received": SignalReceived,
    "signal_rejected": SignalRejected,
    "child_started": ChildStarted,
    "child_cancelled": ChildCancelled,
    "child_ended": ChildEnded,
    "value_published": ValuePublished,
    "witness_taken": WitnessTaken,
    "witness_released": WitnessReleased,
    "patched": Patched,
    "call_withheld": CallWithheld,
    "charged": Charged,
    "attempt_charged": AttemptCharged,
    "budget_narrowed": BudgetNarrowed,
    "cancel_requested": CancelRequested,
    "run_held": RunHeld,
    "run_resolved": RunResolved,
    "run_retried": RunRetried,
    "run_completed": RunCompleted,
    "run_failed": RunFailed,
    "run_cancelled": RunCancelled,
}

ENDS: Final = frozenset({"run_completed", "run_failed", "run_cancelled"})

encode_body = msgspec.json.Encoder().encode
BODY_DECODERS: Final[dict[str, Callable[[bytes], Any]]] = {
    kind: msgspec.json.Decoder(body).decode for kind, body in BODIES.items()
}


def decode_body(kind: str, body: bytes) -> Any:
    """Return an event's body as its kind's struct. Raises `msgspec.MsgspecError` or `KeyError` on damage."""
    return BODY_DECODERS[kind](body)
