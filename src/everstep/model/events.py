"""The events of a history: their kinds and their bodies.

A *command* event records something that workflow code asked for; replay compares it with what the code asks for now.
An *outcome* event is news for workflow code; replay applies it. A *note* tells a reader or recovery something and
never reaches workflow code.

    commands   step_started (first attempt)  step_cancelled  timer_started  signal_awaited  signal_rejected
               child_started  child_cancelled  value_published  witness_taken  witness_released
               run_completed  run_failed  run_cancelled
    outcomes   run_started  step_completed  step_failed  timer_fired  signal_received  child_ended  cancel_requested
    notes      step_started (later attempts)  attempt_failed  step_doubted  probe_answered  heartbeat  patched
               run_held  run_resolved  run_retried  run_repaired  run_restored
"""

from typing import Any, Final, Literal, NamedTuple

import msgspec

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
    "cancel_requested",
    "run_held",
    "run_resolved",
    "run_retried",
    "run_repaired",
    "run_restored",
    "run_completed",
    "run_failed",
    "run_cancelled",
]

NO_PAYLOAD: Final = msgspec.Raw(b"")


class EventRow(NamedTuple):
    """An event as it is stored. `at` is microseconds since 1970; `body` is JSON of the kind's body below."""

    seq: int
    kind: str
    step: str
    at: int
    body: bytes
    digest: bytes


class Body(msgspec.Struct, omit_defaults=True, gc=False):
    """The base of all bodies.

    `call` numbers the commands of a run in the order in which its code gave them; an outcome names the call it is for.
    A payload stands in the body itself, or, when it is large, in `payloads` under the digest in `ref`.
    """


class Outcome(Body, kw_only=True):
    """The base of all news for workflow code.

    `early`: it was recorded before the code had come to rest after the event before it, so the commands that follow
    from that earlier event stand behind this one.
    """

    early: bool = False


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
    digest: str = ""
    """The digest of the arguments, which a `start` with this run's id compares."""
    restored: int = 0
    """How often the store had been restored from a backup when the run was started."""
    chain: str = ""
    """The id of the chain key that the run's digests are made with, if they are."""
    unseen: bool = False
    """The parent that started it may have done so before, in a part of its history that is lost."""


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
    `not-done` (a probe or a person said that the last one did not happen)."""
    by: str = ""
    """With `once`: the worker that runs it, so that it is known later whether it can still act."""
    whole: msgspec.Raw = NO_PAYLOAD
    """With `once`: the arguments themselves."""
    ref: str = ""
    secret: bool = False
    """Here and below: what the step is given, returns and raises is stored, and never shown."""


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
    secret: bool = False


class StepFailed(Outcome):
    """A step's failure, raised in workflow code."""

    call: int
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    attempt: int = 1
    seconds: float = 0.0
    secret: bool = False


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
    secret: bool = False


class StepDoubted(Body):
    """A `once` step is in doubt: it was begun, and nobody knows whether its effect happened.

    `because` is `crash` (cut off), `error` (it raised something that does not say), `outcome` (it did happen, and what
    it returned cannot be stored), `repaired` or `restored` (it may have been begun in a part of the history that is
    lost; its body has not been started since).
    """

    call: int
    attempt: int
    because: str
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    secret: bool = False


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
    secret: bool = False


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
    """It failed with the error of a secret step."""


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


class RunRepaired(Body):
    """The history was damaged. What came after the last good event was archived, and the run goes on from there.

    What was begun in the archived part cannot be seen any more. So from here on a step that must not happen twice is in
    doubt when the code asks for it, until a person accepts that nothing is missing; unless the damage was only in the
    run's row, and nothing is `lost`.
    """

    archived: int = 0
    """How many events were archived."""
    since: int = 0
    """The number of the first of them."""
    lost: bool = False
    """Whether there was, or may have been, anything after the last good event."""
    why: str = ""
    steps: list[str] = []
    """Steps that were begun in the archived part, as far as it could be read."""
    workers: list[str] = []
    """Who began them."""
    status: str = "queued"
    """What the run was after the repair: `queued`, or `held` if it was held before."""
    by: str = ""
    note: str = ""


class RunRestored(Body):
    """The store was restored from a backup, so what the run did after the backup is forgotten here.

    From here on a step that must not happen twice is in doubt when the code asks for it, until a person accepts that
    nothing is missing. `number` counts the restores of the store.
    """

    number: int = 0


class RunCompleted(Body):
    """The run's result."""

    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class RunFailed(Body):
    """The run's failure. `call`: the step or child whose failure it is, if it is one's; `forced` as in a cancel.

    `secret`: it came from a secret step, so of the error only its type is shown.
    """

    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    call: int = 0
    forced: bool = False
    secret: bool = False


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
    "cancel_requested": CancelRequested,
    "run_held": RunHeld,
    "run_resolved": RunResolved,
    "run_retried": RunRetried,
    "run_repaired": RunRepaired,
    "run_restored": RunRestored,
    "run_completed": RunCompleted,
    "run_failed": RunFailed,
    "run_cancelled": RunCancelled,
}

ENDS: Final = frozenset({"run_completed", "run_failed", "run_cancelled"})

encode_body = msgspec.json.Encoder().encode
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(body) for kind, body in BODIES.items()
}


def decode_body(kind: str, body: bytes) -> Any:
    """Return an event's body as its kind's struct. Raises `msgspec.MsgspecError` or `KeyError` on damage."""
    try:
        return _DECODERS[kind].decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
