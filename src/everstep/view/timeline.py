"""A history as a person sees it: rows of steps, timers, signals and children, with attempts, waits and crashes.

Events are added one by one, so that the same timeline serves a finished run and a watched one. Nothing here prints, and
nothing fails on a damaged history: unreadable parts are left out.
"""

from collections import defaultdict, deque
from typing import Any, Literal

import msgspec

from everstep.codec import Codec, error_facts, without_internals
from everstep.engine.history.journal import restore_payload
from everstep.errors import Damaged
from everstep.graph.story import Story
from everstep.model.accounts import Accounts, accounts_of
from everstep.model.events import EventRow, decode_body
from everstep.model.exchange_events import APPROVAL
from everstep.model.forked import Forked
from everstep.model.secrets import HIDDEN, shown_error
from everstep.stores.protocol import Store
from everstep.view.money import amounts_text
from everstep.view.words import duration, error_line

VALUE_CHARACTERS_MAX = 200
NO_BUDGET = "no room in the budget"
NO_SLOT = "waits for a slot"
RowKind = Literal["step", "timer", "signal", "request", "approval", "child", "note"]
State = Literal["open", "completed", "failed", "cancelled", "dropped"]


class AttemptView(msgspec.Struct):
    """One attempt at a step. One that was cut off by a crash ended at the run's last sign of life before its next."""

    number: int
    started_at: int
    because: str = ""
    ended_at: int | None = None
    outcome: Literal["open", "completed", "failed", "crashed", "cancelled"] = "open"
    due: int | None = None
    error: dict[str, Any] | None = None


class Row(msgspec.Struct, kw_only=True):
    """Something that takes time in a run."""

    kind: RowKind
    name: str
    seq: int
    started_at: int
    ended_at: int | None = None
    state: State = "open"
    effect: str = ""
    arguments: str = ""
    value: str = ""
    note: str = ""
    source: str = ""
    type: str = ""
    id: str = ""
    """Of an approval."""
    deadline: int | None = None
    attempts: list[AttemptView] = []
    error: dict[str, Any] | None = None
    awaited_key: str = ""
    """The key that the step waits for, and the run that has it."""
    awaited_run: str = ""
    undoes: str = ""
    """In a compensation: the step that it undoes."""
    undone: Literal["", "wanted", "compensated", "skipped"] = ""
    """Of a step: whether it is to be undone, was, or was left as it is by a person."""
    charged: str = ""
    """What its last attempt was charged."""

    @property
    def crashes(self) -> int:
        """How many attempts were cut off."""
        return sum(1 for attempt in self.attempts if attempt.outcome == "crashed")


class Crash(msgspec.Struct):
    """The process that drove the run was gone between these times."""

    last_sign_at: int
    went_on_at: int
    steps: list[str]


class Rejection(msgspec.Struct):
    """A signal, or an answer to an approval, that is not of the type that the code waits for. The code never got it."""

    name: str
    kind: Literal["signal", "approval"]
    why: str
    at: int


class Timeline:
    """The state of a run according to the events so far."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._codec = Codec()
        self.rows: list[Row] = []
        self.crashes: list[Crash] = []
        self.rejected: list[Rejection] = []
        self.published: dict[str, str] = {}
        self.patches: dict[str, bool] = {}
        self.checkpoints: list[int] = []
        """The numbers of the checkpoints' events."""
        self.started_at = 0
        self.last_at = 0
        self.last_seq = 0
        self.end = ""
        self.error: dict[str, Any] | None = None
        self.cancel_requested = False
        self.is_undone = False
        """Whether compensation has begun, or was requested."""
        self.rolled_back = False
        self.accounts: Accounts | None = None
        """What the run has used, with or without a budget."""
        self.forked: Forked | None = None
        """The origin of a fork."""
        self._calls: dict[int, Row] = {}
        self._awaited: defaultdict[str, deque[Row]] = defaultdict(deque)
        self._unasked: defaultdict[str, deque[tuple[int, str]]] = defaultdict(deque)
        self._timed_receives: deque[Row] = deque()
        self._timers_of: dict[int, Row] = {}
        self._last_sign_at = 0
        self._undone_by: dict[int, Row] = {}
        self._carried: list[Row] = []
        """Steps of older generations that can be undone."""
        self._said_done: set[int] = set()
        self.graph: Story | None = None
        """The events of its graph, if the run is one of a graph."""
        self._taken: dict[int, Row] = {}
        """The waits that signals have ended, by the signals' numbers."""

    # reading ------------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> list[Row]:
        """The rows that are steps."""
        return [row for row in self.rows if row.kind == "step"]

    def completed_steps(self) -> list[str]:
        """Return the names of the steps that are done, in the order in which they were finished."""
        done = [row for row in self.steps if row.state == "completed"]
        return [row.name for row in sorted(done, key=lambda row: row.ended_at or 0)]

    def compensations(self) -> list[Row]:
        """Return the steps to compensate, in the order in which they were done."""
        return [row for row in [*self._carried, *self.steps] if row.undone]

    def awaited_signals(self) -> list[Row]:
        """Return the signals that the code has asked for and not received."""
        return [row for row in self.rows if row.kind == "signal" and row.state == "open"]

    def went_on_after(self, awaited: Row) -> bool:
        """Return True if the code received news after it asked for this, and then asked for more.

        It may have given up waiting for this.
        """
        told = [row.ended_at for row in self.rows if row.ended_at is not None and row.ended_at > awaited.started_at]
        rows = (row for row in self.rows if row.seq > awaited.seq and row.kind != "note")
        return bool(told) and any(row.started_at >= min(told) for row in rows)

    def awaited_requests(self) -> list[Row]:
        """Return the requests that the code waits for."""
        return [row for row in self.rows if row.kind == "request" and row.state == "open"]

    def awaited_approvals(self) -> list[Row]:
        """Return the approvals that the code waits for."""
        return [row for row in self.rows if row.kind == "approval" and row.state == "open"]

    # adding events ------------------------------------------------------------------------------------------------
    def add(self, event: EventRow) -> None:
        """Add the next event."""
        self.last_seq = event.seq
        try:
            body = decode_body(event.kind, event.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
            return
        self.last_at = max(self.last_at, event.at)
        self._count(event, body)
        take = getattr(self, f"_take_{event.kind}", None)
        if take is not None:
            take(event, body)
        if self.graph is not None:
            self.graph.take(event.seq, event.kind, event.step, body)
        if not (event.kind == "step_started" and body.because == "crash"):
            self._last_sign_at = event.at

    def _count(self, event: EventRow, body: Any) -> None:
        if self.accounts is not None:
            try:
                self.accounts.take(event.kind, event.step, body, event.at)
            except LookupError:
                self.accounts = None  # the history is damaged, so its sums are worthless

    def _payload(self, raw: msgspec.Raw, ref: str) -> bytes:
        if not ref:
            return bytes(raw)
        try:
            return restore_payload(self._store.payload(self._run, ref), ref)
        except Damaged:
            return b""

    def _value(self, body: Any) -> str:
        if getattr(body, "secret", False):
            return HIDDEN
        payload = self._payload(body.value, body.ref)
        return self._codec.preview(payload, VALUE_CHARACTERS_MAX) if payload else ""

    def _error(self, body: Any) -> dict[str, Any]:
        return shown_error(error_facts(self._payload(body.error, body.ref)), secret=body.secret)

    def _new(self, row: Row, call: int = 0) -> Row:
        self.rows.append(row)
        if call:
            self._calls[call] = row
        return row

    def _note(self, event: EventRow, name: str, note: str, state: State = "completed") -> Row:
        at = event.at
        return self._new(Row(kind="note", name=name, seq=event.seq, started_at=at, ended_at=at, state=state, note=note))

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _take_step_started(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.call)
        if row is None or (body.attempt == 1 and body.because not in ("budget", "limit")):
            row = Row(kind="step", name=event.step, seq=event.seq, started_at=event.at)
            row.effect, row.source, row.arguments = (
                body.effect,
                body.source,
                HIDDEN if body.secret else without_internals(body.preview),
            )
            if body.compensates and body.compensates in self._calls:
                row.undoes = self._calls[body.compensates].name
                self._undone_by[body.call] = self._calls[body.compensates]
            self._new(row, body.call)
        elif body.because == "crash":
            self._crashed(event, row)
        row.state, row.ended_at, row.error = "open", None, None
        if row.awaited_key or row.note.startswith((NO_BUDGET, NO_SLOT)):
            row.awaited_key = row.awaited_run = row.note = ""
        row.attempts.append(AttemptView(body.attempt, event.at, body.because))

    def _crashed(self, event: EventRow, row: Row) -> None:
        if row.attempts and row.attempts[-1].ended_at is None:
            row.attempts[-1].ended_at = max(self._last_sign_at, row.attempts[-1].started_at)
            row.attempts[-1].outcome = "crashed"
        if self.crashes and self.crashes[-1].last_sign_at == self._last_sign_at:
            self.crashes[-1].steps.append(row.name)
        else:
            self.crashes.append(Crash(self._last_sign_at, event.at, [row.name]))

    def _take_attempt_failed(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.call)
        if row is not None and row.attempts:
            attempt = row.attempts[-1]
            attempt.ended_at, attempt.outcome, attempt.due = event.at, "failed", body.due
            attempt.error = self._error(body)

    def _take_step_completed(self, event: EventRow, body: Any) -> None:
        row = self._end_step(event, body.call, "completed")
        if row is not None:
            row.value = self._value(body)
            row.charged = amounts_text(body.charged) if body.charged is not None else ""
            if body.call in self._undone_by:
                self._undone_by[body.call].undone = "skipped" if body.skipped else "compensated"
            if body.skipped:
                row.note = "skipped by a person"
            elif body.fallback:
                row.note = f"{row.note}; by its fallback" if row.note.startswith(NO_BUDGET) else "by its fallback"
            elif body.key_unused and len(row.attempts) > 1:
                row.note = "repeated, and its body never used its key"
            elif self.forked is not None and self.forked.edited == "outcome" and event.seq == self.forked.seq:
                row.note = "given when the run was forked"
            elif body.adopted:
                source = "its marker" if row.effect == "atomic" else "its probe"
                row.note = "adopted from " + ("a person" if body.call in self._said_done else source)

    def _take_step_shared(self, event: EventRow, body: Any) -> None:
        row = self._end_step(event, body.call, "completed")
        if row is not None:
            row.value = self._value(body)
            row.note = f"done by {body.run}" + (f", says {body.by}" if body.by else "")

    def _take_key_taken(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.call)
        if row is None or not body.again:
            row = Row(kind="step", name=event.step, seq=event.seq, started_at=event.at)
            row.effect, row.source, row.arguments = (
                body.effect,
                body.source,
                HIDDEN if body.secret else without_internals(body.preview),
            )
            self._new(row, body.call)
        row.note = f"waits for the key {body.key}" + (f" of run {body.run}" if body.run else "")
        row.awaited_key, row.awaited_run = body.key, body.run

    def _take_step_failed(self, event: EventRow, body: Any) -> None:
        row = self._end_step(event, body.call, "failed")
        if row is not None:
            row.error = self._error(body)
            if row.attempts:
                row.attempts[-1].error = row.error

    def _take_step_cancelled(self, event: EventRow, body: Any) -> None:
        self._end_step(event, body.step_call, "cancelled")

    def _end_step(self, event: EventRow, call: int, state: Literal["completed", "failed", "cancelled"]) -> Row | None:
        row = self._calls.get(call)
        if row is None:
            return None
        row.state, row.ended_at = state, event.at
        if row.awaited_key:
            row.awaited_key = row.awaited_run = row.note = ""
        if row.attempts and row.attempts[-1].ended_at is None:
            row.attempts[-1].ended_at, row.attempts[-1].outcome = event.at, state
        return row

    def _take_call_withheld(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.call)
        if row is None or not body.again:
            is_step = body.instead_of == "step_started"
            name = event.step if is_step else body.run
            row = Row(kind="step" if is_step else "child", name=name, seq=event.seq, started_at=event.at)
            row.effect, row.source, row.arguments = (
                body.effect,
                body.source,
                HIDDEN if body.secret else without_internals(body.preview),
            )
            self._new(row, body.call)
        row.state, row.ended_at, row.note = "open", None, f"{NO_BUDGET} ({body.over})"
        if body.limit:
            row.note = f"{NO_SLOT} of the limit {body.limit}"

    def _take_heartbeat(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.call)
        if row is not None:
            details = b"" if body.secret else self._payload(body.details, body.ref)
            row.note = f"heartbeat {self._codec.preview(details, 60)}" if details else "heartbeat"

    # -- timers, signals, children -------------------------------------------------------------------------------------
    def _take_timer_started(self, event: EventRow, body: Any) -> None:
        row = Row(kind="timer", name=duration(body.duration / 1e6), seq=event.seq, started_at=event.at)
        row.deadline = body.deadline
        self._new(row, body.call)
        if self._timed_receives:
            receive = self._timed_receives.popleft()
            self._timers_of[receive.seq] = row
            row.note = f"timeout of the signal {receive.name}"

    def _take_timer_fired(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.call)
        if row is not None:
            row.state, row.ended_at = "completed", event.at
            for awaited in self.awaited_signals():
                if self._timers_of.get(awaited.seq) is row:
                    awaited.state, awaited.ended_at, awaited.note = "dropped", event.at, "timed out"
                    self._awaited[awaited.name].remove(awaited)

    def _take_signal_awaited(self, event: EventRow, body: Any) -> None:
        row = Row(kind="signal", name=body.name, seq=event.seq, started_at=event.at)
        row.type, row.source = body.type, body.source
        self._new(row, body.call)
        if "timeout" in body.source:
            self._timed_receives.append(row)
        if self._unasked[body.name]:
            number, row.value = self._unasked[body.name].popleft()
            self._taken[number] = row
            row.state, row.ended_at = "completed", event.at
        else:
            self._awaited[body.name].append(row)

    def _take_signal_received(self, event: EventRow, body: Any) -> None:
        value = self._value(body)
        if not self._awaited[body.name]:
            self._unasked[body.name].append((body.number, value))
            return
        row = self._taken[body.number] = self._awaited[body.name].popleft()
        row.state, row.ended_at, row.value = "completed", event.at, value
        timer = self._timers_of.get(row.seq)
        if timer is not None and timer.state == "open":
            timer.state, timer.ended_at = "dropped", event.at

    def _take_signal_rejected(self, event: EventRow, body: Any) -> None:
        row = self._taken.pop(body.number, None)
        kind: Literal["signal", "approval"] = "signal"
        name = body.name
        if row is not None and row.kind == "approval":
            kind, name = "approval", row.name
        self._note(event, f"{kind} {name}", f"rejected: {body.why}", "failed")
        self.rejected.append(Rejection(name, kind, body.why, event.at))
        if row is not None and row.kind in ("signal", "approval") and row.state == "completed":
            row.state, row.ended_at, row.value = "open", None, ""
            self._awaited[body.name].appendleft(row)

    def _take_approval_asked(self, event: EventRow, body: Any) -> None:
        row = Row(kind="approval", name=body.what, seq=event.seq, started_at=event.at)
        row.type, row.source, row.id = body.type, body.source, body.id
        row.arguments = HIDDEN if body.secret else self._value(body)
        row.deadline = None if body.timeout is None else event.at + body.timeout
        self._new(row, body.call)
        self._awaited[APPROVAL + body.id].append(row)

    def _take_approval_withdrawn(self, event: EventRow, body: Any) -> None:
        for row in self._awaited.pop(APPROVAL + body.id, ()):
            is_late = row.deadline is not None and row.deadline <= event.at
            row.state, row.ended_at, row.note = "dropped", event.at, "expired" if is_late else "withdrawn"

    def _take_request_awaited(self, event: EventRow, body: Any) -> None:
        row = Row(kind="request", name=body.name, seq=event.seq, started_at=event.at)
        row.type, row.source = body.type, body.source
        self._new(row, body.call)
        if asked := self._unasked[f"request {body.name}"]:
            row.value = asked.popleft()[1]
            row.state, row.ended_at = "completed", event.at
        else:
            self._awaited[f"request {body.name}"].append(row)

    def _take_request_received(self, event: EventRow, body: Any) -> None:
        waiting = self._awaited[f"request {body.name}"]
        if not waiting:
            self._unasked[f"request {body.name}"].append((event.at, self._value(body)))
            return
        row = waiting.popleft()
        row.state, row.ended_at, row.value = "completed", event.at, self._value(body)

    def _take_request_answered(self, event: EventRow, body: Any) -> None:
        if body.refused:
            error = error_line(self._error(body))
            self._note(event, f"request {body.name}", f"refused: {error}", "failed")
        else:
            self._note(event, f"request {body.name}", "answered")

    def _take_child_started(self, event: EventRow, body: Any) -> None:
        row = self._calls[body.call] if body.withheld and body.call in self._calls else None
        if row is None:
            row = self._new(Row(kind="child", name=body.run, seq=event.seq, started_at=event.at), body.call)
        row.note, row.source, row.arguments = body.workflow, body.source, without_internals(body.preview)

    def _take_child_ended(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.call)
        if row is not None:
            row.ended_at = event.at
            row.state = body.status if body.status in ("completed", "cancelled") else "failed"
            payload = self._payload(body.value, body.ref)
            if row.state == "completed" and payload:
                row.value = self._codec.preview(payload, VALUE_CHARACTERS_MAX)
            elif body.status == "failed":
                row.error = shown_error(error_facts(payload), secret=body.secret)

    def _take_child_cancelled(self, event: EventRow, body: Any) -> None:
        row = self._calls.get(body.child_call)
        if row is not None:
            row.note = f"{row.note} (asked to stop)"

    # -- the run itself ------------------------------------------------------------------------------------------------
    def _take_run_started(self, event: EventRow, body: Any) -> None:
        self.started_at = event.at
        self.accounts = accounts_of(body, event.at)
        self.forked = body.forked
        for one in body.carried.undoable if body.carried is not None else ():
            row = Row(kind="step", name=one.title, seq=0, started_at=0, ended_at=0, state="completed")
            row.effect = one.effect
            self._calls[one.call] = row
            self._carried.append(row)

    def _take_value_converted(self, event: EventRow, body: Any) -> None:
        """Show the value that the code got, in place of the plain data that was sent."""
        last = next(reversed(self._taken.values()), None)
        if (
            last is not None
            and last.state == "completed"
            and body.what in (f"signal {last.name}", f"approval {last.name}")
        ):
            last.value = self._value(body)

    def _take_value_published(self, event: EventRow, body: Any) -> None:
        self.published[body.name] = self._value(body)

    def _take_checkpoint_taken(self, event: EventRow, body: Any) -> None:
        self.checkpoints.append(event.seq)
        self._note(event, "checkpoint", f"{body.number}, {body.size} bytes")

    def _take_checkpoint_damaged(self, event: EventRow, body: Any) -> None:
        self._note(event, "checkpoint", f"the one at event {body.checkpoint} was not used: {body.why}", "failed")

    def _take_graph_started(self, event: EventRow, body: Any) -> None:
        self.graph = Story(body)

    def _take_patched(self, event: EventRow, body: Any) -> None:
        self.patches[body.name] = body.value

    def _take_cancel_requested(self, event: EventRow, body: Any) -> None:
        self.cancel_requested = True
        why = body.reason or ("timeout" if body.timeout else "")
        self._note(event, "cancel", " by ".join(filter(None, [why, body.by])), "cancelled")

    def _take_rollback_requested(self, event: EventRow, body: Any) -> None:
        self.end, self.is_undone = "", True
        why = f"{body.note} (by {body.by})" if body.note and body.by else body.note or (body.by and f"by {body.by}")
        self._note(event, "rollback", why, "cancelled")

    def _take_compensation_started(self, event: EventRow, body: Any) -> None:
        """Drop what the code still waited for, because the run is being undone."""
        self.is_undone = True
        self._drop_open(event)
        for call in body.steps:
            if call in self._calls:
                self._calls[call].undone = "wanted"
        why = "it was requested" if body.because == "rollback" else error_line(self._error(body))
        self._note(event, "compensation", f"{len(body.steps)} to undo, because {why}", "cancelled")

    def _take_drift_judged(self, event: EventRow, body: Any) -> None:
        text = f"{body.subject}: {body.by}() {'said ' + body.decision if not body.why else body.why}"
        self._note(event, "drift", text, "failed" if body.decision in ("hold", "fail") else "completed")

    def _take_run_held(self, event: EventRow, body: Any) -> None:
        self._note(event, "held", f"{body.reason}: {body.summary}", "failed")

    def _take_run_resolved(self, event: EventRow, body: Any) -> None:
        by = f" by {body.by}" if body.by else ""
        if body.resolution == "done":
            self._said_done.add(body.call)
        self._note(event, "resolved", f"{body.resolution}{by}" + (f": {body.note}" if body.note else ""))

    def _take_run_retried(self, event: EventRow, body: Any) -> None:
        self.end, self.error, self.cancel_requested = "", None, False
        self._note(event, "retried", f"by {body.by}" if body.by else "")

    def _take_run_repaired(self, event: EventRow, body: Any) -> None:
        what = f"{body.archived} events from {body.since} on were archived" if body.archived else "from its events"
        by = f" by {body.by}" if body.by else ""
        self._note(event, "repaired", f"{what}{by}" + (f": {body.note}" if body.note else ""), "failed")

    def _take_run_restored(self, event: EventRow, body: Any) -> None:
        self._note(event, "restored", "the store was restored from a backup", "failed")

    def _take_run_continued(self, event: EventRow, body: Any) -> None:
        self._note(event, "continued", "with a fresh history")

    def _take_run_completed(self, event: EventRow, body: Any) -> None:
        self._ended(event)

    def _take_run_cancelled(self, event: EventRow, body: Any) -> None:
        self.rolled_back = body.rolled_back
        self._ended(event)

    def _take_run_failed(self, event: EventRow, body: Any) -> None:
        self.error = self._error(body)
        self._ended(event)

    def _ended(self, event: EventRow) -> None:
        self.end = event.kind
        self._drop_open(event)

    def _drop_open(self, event: EventRow) -> None:
        for row in self.rows:
            if row.state == "open":
                row.state, row.ended_at = "dropped", event.at
                if row.attempts and row.attempts[-1].ended_at is None:
                    row.attempts[-1].ended_at, row.attempts[-1].outcome = event.at, "cancelled"


def timeline_of(store: Store, run: str, generation: int) -> Timeline:
    """Return the timeline of all events of a run."""
    timeline = Timeline(store, run)
    for event in store.events(run, generation):
        timeline.add(event)
    return timeline
