"""Verified replay: the code runs against its history, without effects, and every command must match.

Kind, callee, arguments' digest, order, durations, names and types of signals, child workflows and results are compared.
A difference is found before anything new is done; the caller then holds the run.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, Final

import msgspec

from everstep.engine.code.checkpoints import Checkpoint, Checkpoints, Jump
from everstep.engine.code.commands import ChildCall, Command, Difference, EndRun, StartTimer, StepCall
from everstep.engine.code.execution import OUTCOMES, Execution, Followed
from everstep.engine.code.guard import Silence
from everstep.engine.code.loop import SpinningWorkflow
from everstep.engine.code.step_state import DOUBT, FALLBACK, KEY, ROOM, SLOT, StepState
from everstep.engine.code.witnesses import note_judgement
from everstep.engine.history.calls import Calls
from everstep.engine.history.describe import COMMANDS, FIRST, asks_for_something, recorded_text, stands_for
from everstep.engine.history.kept import Kept, kept_by
from everstep.engine.history.verify import Recorded, kinds_of, published_before
from everstep.errors import Misuse, NotDecodable
from everstep.model.contracts import UNSEEN
from everstep.model.events import ENDS
from everstep.model.exchange_events import APPROVAL
from everstep.model.forked import copied_events, switches
from everstep.model.untrusted import described

LOOKED_FOR: Final = frozenset(
    {
        *("patched", "run_resolved", "run_retried", "checkpoint_taken", "graph_started"),
        *("value_converted", "signal_rejected", "request_answered"),
    }
)
"""Events that say something about earlier ones, or that the code is told before it comes there."""

COMPARED: Final = frozenset({"approval_asked", "request_answered", "run_completed"})
"""Events whose value is compared with the code's, even if it is large and stored outside its event."""


class Replayed(msgspec.Struct):
    """The result of a replay."""

    execution: Any
    differences: list[Difference]
    fresh: list[Command]
    """The commands of the code beyond the end of the history."""
    attempts: dict[int, StepState]
    published: dict[str, msgspec.Raw]
    cancel_at: int = 0
    """When the cancel was requested, if it was."""
    retried: bool = False
    """Whether the run was ever retried."""
    spins: bool = False
    """Whether the code did not settle."""
    accepted: dict[int, str] = {}
    """The differences that a person has accepted."""
    first_checkpoint: int = 0
    """The number of the first checkpoint's event, if there is one."""


def first_run(execution: Execution, started: Recorded) -> Replayed:
    """Run the code of a new run until it first settles: there is nothing to compare it with yet."""
    try:
        execution.begin(started.body, started.at)
        return Replayed(execution, [], execution.take_commands(), {}, published_before(started))
    except SpinningWorkflow:
        return Replayed(execution, [], [], {}, {}, spins=True)
    except BaseException:  # it was stopped: the code must not run again when it is dropped
        execution.evict()
        raise


def followed_by(history: Sequence[Recorded], void: Set[int]) -> Followed | None:
    """Return what a history says of its graph, without voided events; None if it has none."""
    found: Followed | None = None
    for seq, kind, _, _, body in history:
        if kind == "graph_started":
            found = Followed(body)
        elif kind == "graph_moved" and found is not None and seq not in void:
            found.moves[body.after] = body
    return found


def is_rejection(event: Recorded) -> bool:
    """Tell whether what was sent is no value of the type that the code asked for."""
    return event.kind == "signal_rejected" or (event.kind == "request_answered" and event.body.refused == "type")


def follow_id(execution: Execution, asked: Any, id: str) -> None:
    """Give an approval its recorded id, because an older release derived another one from equal arguments."""
    asked.id = id
    execution.receiving.follow(asked, APPROVAL + id)


def branches_of(copied: Sequence["Recorded"], forks: Mapping[int, str]) -> dict[int, tuple[int, str]]:
    """Return the events after which keys differ because the run is a fork: number of the branch and entropy."""
    retried = [one.seq for one in copied if one.kind == "run_retried"]
    return {seq: (sum(one <= seq for one in retried), entropy) for seq, entropy in forks.items() if seq > 1}


def begin_with_copies(execution: "Execution", copied: Iterable["Recorded"]) -> None:
    """Mark copied steps as not to be compensated by this run, and note the children's ids, which the other run gave
    them.
    """
    execution.saga.is_copied = True
    execution.copy_children({one.body.call: one.body.run for one in copied if one.kind == "child_started"})


def refuse_copied(run: str, started: Any, voids: int) -> None:
    """Raise `Misuse` if a retry would repeat what belongs to another run, because it has that run's keys."""
    if voids <= copied_events(started) and voids > 1:
        raise Misuse(
            f"What failed in {run} was copied from {started.forked.run} (event {voids}), and is that run's to retry. "
            f"Fork {started.forked.run} at an event before it: then the step is done by the fork."
        )


def end_of_copies(execution: "Execution") -> None:
    """From here on the events belong to this run."""
    execution.saga.is_copied = False
    execution.copy_children({})


def fork_off(execution: "Execution", queue: Iterable[Command], entropy: str) -> None:
    """From here on the run is a fork: commands that have not begun get keys of the fork, and random numbers differ."""
    execution.forget_random()
    for command in queue:
        if isinstance(command, StepCall):
            command.entropy = entropy


class Replay:
    """One replay of one history.

    With a checkpoint, the history lacks the events between the first checkpoint and this one.
    """

    def __init__(
        self, execution: Execution, history: Sequence[Recorded], checkpoint: "Checkpoint | None" = None
    ) -> None:
        self.history = history
        self._checkpoint = checkpoint
        self._is_in_flight = checkpoint is not None
        """Whether the checkpoint's event is still ahead."""
        self._left_out = max(0, checkpoint.seq - checkpoint.part.first - 1) if checkpoint is not None else 0
        self._first_checkpoint = checkpoint.part.first if checkpoint is not None else 0
        self._retried = 0
        """The number of retries so far in the look ahead."""
        self.execution = execution
        self.differences: list[Difference] = []
        self.attempts: dict[int, StepState] = {}
        self.published: dict[str, msgspec.Raw] = published_before(history[0])
        self.cancel_at = 0
        self._queue: deque[Command] = deque()
        self._accepted: dict[int, str] = {}
        self._void: set[int] = set()
        self._kept: set[int] = set()
        """Outcomes that arrived between a failure and its retry. Their consequences are recorded after the retry."""
        self._branches: dict[int, tuple[int, str]] = {}
        self._reopened: dict[int, set[int]] = {}
        self._position = 0
        self._forks = dict(switches(history[0].body))
        self._copied = copied_events(history[0].body)
        if self._copied:
            self._branches |= branches_of(history[: self._copied], self._forks)
        self._look_ahead()
        if self._copied:
            begin_with_copies(execution, (one for one in history[: self._copied] if one.seq not in self._void))

    def go(self, *, quiet: bool = False) -> Replayed:
        """Replay everything and return the settled execution, with the differences."""
        last_silent = len(self.history) if quiet else self._count_silent()
        self.execution.set_replaying(len(self.history) > 1)
        try:
            with self.execution.loop.entered():
                if last_silent:
                    with Silence():
                        self._take_until(min(self._count_answered(), last_silent))
                        self.execution.set_wants_places(True)
                        self._take_until(last_silent)
                self.execution.set_wants_places(True)
                self._take_until(len(self.history))
        except (NotDecodable, SpinningWorkflow) as error:
            self._differ(self._position, "outcome", str(error) or "the code does not come to rest")
        self.execution.set_replaying(False)
        if self._copied:
            end_of_copies(self.execution)
        self.execution.note_begun({call for call, attempts in self.attempts.items() if attempts.attempt})
        return Replayed(
            self.execution,
            self.differences,
            list(self._queue),
            self.attempts,
            self.published,
            self.cancel_at,
            self._retried > 0,
            accepted=self._accepted,
            first_checkpoint=self._first_checkpoint,
        )

    # -- looking ahead ---------------------------------------------------------------------------------------------
    def _look_ahead(self) -> None:
        """Find what later events say about earlier ones: patches, accepted differences, failures that were retried."""
        checkpoint, taken = self._checkpoint, []
        if checkpoint is not None:
            self.execution.patches.update(checkpoint.part.patches)
            self._accepted.update(checkpoint.part.accepted)
        if kinds_of(self.history).isdisjoint(LOOKED_FOR):
            return
        for event in self.history:
            if event.kind == "patched":
                self.execution.patches.update({event.body.name: event.body.value})
            elif event.kind == "run_resolved":
                self._accepted.update(event.body.accepted)
            elif event.kind == "run_retried":
                self._void_before(event)
            elif event.kind == "checkpoint_taken":
                taken.append(event)
                if checkpoint is not None and event.seq == checkpoint.seq:
                    self._retried = checkpoint.part.branch  # also those that are left out
        counting = [event for event in self.history if event.seq not in self._void]
        self.execution.note_conversions(
            {event.body.call: event.body for event in counting if event.kind == "value_converted"},
            {event.body.number for event in counting if is_rejection(event)},
        )
        checkpoints: Checkpoints | None = None
        if taken := [event for event in taken if event.seq not in self._void]:
            self._first_checkpoint = self._first_checkpoint or taken[0].seq
            checkpoints = Checkpoints({event.body.number for event in taken}, checkpoint)
        self.execution.note_ahead(checkpoints, followed_by(self.history, self._void))

    def _place(self, seq: int) -> int:
        """Return the position of an event in the history that was read."""
        return seq - 1 if seq <= self._first_checkpoint else seq - 1 - self._left_out

    def _void_before(self, retried: Recorded) -> None:
        """Void what the code did between a failure and its retry; what arrived from outside still counts.

        Steps that were open and failed meanwhile are open again as well: a retry is about everything that failed.
        """
        begun_after: set[int] = set()
        reopened = self._reopened[retried.seq] = {retried.body.call}
        self._retried += 1
        # An earlier retry within the voided events began a branch that no longer counts, nor do its keys.
        self._branches = {
            seq: one for seq, one in self._branches.items() if seq < retried.body.voids or seq >= retried.seq
        }
        self._branches[retried.body.voids] = (self._retried, retried.body.entropy)
        for event in self.history[self._place(retried.body.voids) : self._place(retried.seq)]:
            kind, call = event.kind, getattr(event.body, "call", 0)
            if kind in ENDS or event.seq == retried.body.voids or kind == "cancel_requested":
                self._void.add(event.seq)
            elif asks_for_something(event):
                self._void.add(event.seq)
                begun_after.add(call)
            elif call in begun_after:
                self._void.add(event.seq)
            elif kind == "step_failed":
                self._void.add(event.seq)
                reopened.add(call)
            elif kind in OUTCOMES:
                self._kept.add(event.seq)

    def _count_silent(self) -> int:
        """Return how many events were certainly followed by the code's own output already.

        The output of the code after the newest outcome was seen if the commands that followed are recorded; otherwise
        the process may have died before, and the code prints again.
        """
        for event in reversed(self.history):
            if event.kind in OUTCOMES or event.kind == "run_started":
                return self._place(event.seq)
            begun = ("step_started", "key_taken", "call_withheld", "compensation_started")
            if event.kind in COMMANDS or event.kind in ENDS or event.kind in begun:
                return len(self.history)
        return len(self.history)

    def _count_answered(self) -> int:
        """Return how many events precede the newest outcome: the code's commands until then are recorded."""
        for place in range(len(self.history) - 1, 0, -1):
            event = self.history[place]
            if event.kind in OUTCOMES and not event.body.early:
                return place
        return 0

    # -- one event -------------------------------------------------------------------------------------------------
    @property
    def _is_broken(self) -> bool:
        return bool(self.differences) and not self.differences[-1].acceptable

    def _take_until(self, end: int) -> None:
        """Apply events, up to a position in the history or to the first difference."""
        history, differences, attempts = self.history, self.differences, self.attempts
        is_straight = not (self._void or self._branches or self._copied or self._is_in_flight)
        is_straight = is_straight and self.execution.books is None
        last = len(history) - 1
        for position, event in enumerate(islice(history, self._position, end), self._position):
            if differences and self._is_broken:
                return
            self._position = position
            if position == last:
                self.execution.set_replaying(False)
            if not is_straight and self._passes_over(event):
                continue
            _, kind, step, _, body = event
            if kind == "step_started":
                queue = self._queue
                if queue and body.attempt == 1 and not body.because and queue[0].is_plain_start(step, body):
                    queue.popleft()
                    attempts[body.call] = StepState(1, by=body.by)
                else:
                    self._begin_attempt(event)
            elif kind == "step_completed" and not self._queue:
                self._apply_outcome(event)
                attempts.pop(body.call, None)
            elif kind in OUTCOMES:
                self._apply(event)
            elif kind in COMMANDS:
                self._match_command(event)
            else:
                self._take_other(event)
        self._position = end

    def _passes_over(self, event: Recorded) -> bool:
        """Note what an event implies; return True if the code does not see it."""
        execution, seq = self.execution, event.seq
        if self._is_in_flight and self._flies_over(event):
            return True
        if self._copied and seq > self._copied:
            self._copied = 0
            end_of_copies(execution)
        if seq in self._branches:
            execution.branch_off(*self._branches[seq])
            if seq in self._forks:
                fork_off(execution, self._queue, self._forks[seq])
        if execution.books is not None and not execution.books.is_ahead:
            execution.books.replay(event, is_void=seq in self._void)
        return seq in self._void

    def _take_other(self, event: Recorded) -> None:
        if event.kind == "run_started":
            self.execution.begin(event.body, event.at)
            self._queue.extend(self.execution.take_commands())
        elif event.kind == "key_taken":
            self.attempts.setdefault(event.body.call, StepState()).due = KEY
            if not event.body.again:
                self._match(event)
        elif event.kind in ENDS or event.kind == "run_continued":
            self._match_end(event)
        elif event.kind == "compensation_started":
            self._begin_compensation(event)
        elif event.kind == "call_withheld":
            self._withhold(event)
        elif event.kind not in ("attempt_charged", "stream_noted"):  # they are for the accounts, and for readers
            self._note(event)

    def _apply(self, event: Recorded) -> None:
        seq, kind, _, at, body = event
        if kind == "cancel_requested":
            self._drop_overtaken_end()
            self.cancel_at = at
        elif kind == "rollback_requested":
            self._drop_unbegun()
            self.cancel_at = 0
        if self._queue and not body.early and seq not in self._kept:
            extra = self._queue[0]
            self._add(event, "extra call", recorded_text(event), extra)
            return
        self._apply_outcome(event)
        if kind in ("step_completed", "step_failed", "step_shared"):
            self.attempts.pop(body.call, None)

    def _apply_outcome(self, event: Recorded) -> None:
        _, kind, _, at, body = event
        try:
            self.execution.apply(kind, body, at)
        except KeyError:
            self._add(event, "outcome", recorded_text(event), None)
        else:
            self._queue.extend(self.execution.take_commands())

    def _drop_overtaken_end(self) -> None:
        """Drop an end if a cancel arrived after the code had finished and before its end was recorded: the cancel
        takes effect.
        """
        if self.execution.saga.begun:
            return  # unless the run is being compensated: that is not cut off, and its end counts
        if any(isinstance(command, EndRun) for command in self._queue):
            self._queue = deque(command for command in self._queue if not isinstance(command, EndRun))

    def _drop_unbegun(self) -> None:
        """Drop the code's last commands that have not begun, because the code is gone."""
        for command in self._queue:
            if isinstance(command, StepCall):
                self.execution.steps.pop(command.call, None)
            elif isinstance(command, ChildCall):
                self.execution.children.pop(command.call, None)
        self._queue.clear()

    def _begin_compensation(self, event: Recorded) -> None:
        """Begin compensation, which follows from the code's failure and is compared with it, unless the code was
        not waited for.
        """
        if not event.body.forced:
            self._match(event)
        if self._is_broken:
            return
        self._drop_unbegun()
        self.attempts.clear()
        self.cancel_at = 0
        self.execution.begin_compensation(event.body)
        self._queue.extend(self.execution.take_commands())

    def _match_command(self, event: Recorded) -> None:
        if event.kind == "child_started" and event.body.withheld:
            self.attempts.pop(event.body.call, None)  # the command was matched when it had to wait
        else:
            self._match(event)

    def _withhold(self, event: Recorded) -> None:
        """Note that the budget, or a named limit, had no room for a call: it waits, or its fallback takes its place."""
        body = event.body
        if not body.again:
            self._match(event)
        attempts = self.attempts.setdefault(body.call, StepState())
        attempts.refused = body.then == "fallback"
        attempts.due = FALLBACK if attempts.refused else SLOT if body.limit else ROOM

    def _match(self, event: Recorded) -> None:
        if not self._queue:
            self._add(event, "missing call", recorded_text(event), None)
            return
        command = self._queue.popleft()
        if isinstance(command, EndRun) and command.otherwise is not None and event.kind != command.kind:
            command = command.otherwise
        if command.kind != event.kind and not stands_for(event, command.kind):
            self._add(event, "kind", recorded_text(event), command)
            return
        if command.step != event.step:
            self._add(event, "callee", recorded_text(event), command)
            return
        what, acceptable = command.compare(event.body)
        if what and event.kind in COMPARED and event.body.ref:  # perhaps only the order of its keys differs
            whole = msgspec.Raw(self.execution.lookup(event.body.ref))
            what, acceptable = command.compare(msgspec.structs.replace(event.body, value=whole, ref=""))
        is_begun = acceptable and isinstance(command, StepCall | ChildCall)
        if is_begun and event.body.call not in Calls(self.history).finished():
            self._add(event, what, recorded_text(event), command, unfinished=event.step)
        elif what and not (acceptable and self._accepted.get(event.seq) == command.digest()):
            self._add(event, what, recorded_text(event), command, acceptable=acceptable)
        elif what and isinstance(command, StepCall) and command.target.is_accounted_for:
            self._keep_arguments(command, event.body)
        if isinstance(command, StepCall):
            command.source = command.source or event.body.source
            if command.keyed is not None or event.body.key:
                command.follow(event.body.key)
        elif isinstance(command, StartTimer):
            command.timer.deadline = event.body.deadline
        elif event.kind == "approval_asked" and not what:
            follow_id(self.execution, command, event.body.id)
        elif event.kind == "value_published":
            self.published[event.body.name] = msgspec.Raw(self.execution.payload(event.body.value, event.body.ref))

    # -- jumping to a checkpoint -----------------------------------------------------------------------------------
    def _flies_over(self, event: Recorded) -> bool:
        """Return True if an event is between the jump and the checkpoint, or the checkpoint's own.

        The code's commands before the jump are compared; nothing else that happened until the checkpoint matters,
        because all of it is in the checkpoint.
        """
        checkpoints, newest = self.execution.checkpoints, self._checkpoint
        assert checkpoints is not None
        assert newest is not None
        if checkpoints.unreadable:
            now = f"fail: its state does not decode any more: {checkpoints.unreadable}"
            self.differences.append(Difference(newest.seq, "state", f"checkpoint {newest.part.number}", now))
            return True
        if not checkpoints.has_jumped:
            return False
        if not isinstance(self._queue[0], Jump):
            return not asks_for_something(event)
        if event.seq == newest.seq:
            self._queue.popleft()
            self._is_in_flight = False
            self.attempts.clear()
            self.published = dict(newest.part.published)
            if self.execution.books is not None:
                self.execution.books.land()
        return True

    def _keep_arguments(self, call: StepCall, recorded: Any) -> None:
        """Keep the recorded arguments when a person accepted others: the effect, its key and its compensation are
        still those.
        """
        payload = self.execution.payload(recorded.whole, recorded.ref)
        if payload:
            call.arguments = self.execution.codec.kept_arguments(call.target.signature, payload, call.arguments)

    def _match_end(self, event: Recorded) -> None:
        self.execution.set_ended(True)
        if not getattr(event.body, "forced", False):
            self._match(event)

    def _begin_attempt(self, event: Recorded) -> None:
        body = event.body
        if body.attempt == 1 and body.because in FIRST:
            self.attempts[body.call] = StepState(1, by=body.by, database=body.database, round=body.round)
            self._match(event)
            if body.because and self.execution.kept is not None:
                self.execution.kept.take(event.step, body.arguments)
            return
        attempts = self.attempts.setdefault(body.call, StepState())
        attempts.attempt, attempts.by, attempts.database = body.attempt, body.by, body.database
        attempts.due = None
        attempts.by_person = attempts.refused = False
        attempts.round = body.round

    def _note(self, event: Recorded) -> None:
        kind, body = event.kind, event.body
        attempts = self.attempts.setdefault(body.call, StepState()) if getattr(body, "call", 0) else None
        if kind == "attempt_failed" and attempts is not None:
            attempts.failures += 1
            attempts.due = body.due
        elif kind == "heartbeat" and attempts is not None:
            attempts.details = self.execution.payload(body.details, body.ref)
        elif kind == "step_doubted" and attempts is not None:
            attempts.due, attempts.doubted_at, attempts.probes = DOUBT, event.at, 0
            attempts.happened, attempts.because = body.because == "outcome", body.because
            attempts.asked = True
        elif kind == "probe_answered" and attempts is not None:
            attempts.probes += 1
        elif kind == "run_resolved":
            for subject, fact in body.facts.items():
                if subject in self.execution.witnesses:  # not if it was taken between a failure and its retry
                    self.execution.witnesses[subject].remember(bytes(fact))
            if attempts is not None and body.granted is None:
                self._note_resolution(attempts, body.resolution, event.at)
        elif kind == "drift_judged":
            note_judgement(self.execution, body)
        elif kind == "run_retried":
            self._retry(event)
        elif kind == "run_restored" or (kind == "run_repaired" and body.lost):
            self.execution.note_lost(kind.removeprefix("run_"), set(getattr(body, "workers", ())))
            for one in self.attempts.values():
                one.asked = False

    def _note_resolution(self, attempts: StepState, resolution: str, at: int) -> None:
        """Apply a person's decision about one step: fresh attempts, another one, or another round of questions."""
        if resolution == "retry":
            attempts.failures, attempts.due, attempts.by_person = 0, at, True
        elif resolution == "not-done":
            attempts.due, attempts.by_person, attempts.asked = at, True, True
        elif resolution == "accept":
            self._accept_what_is_lost(at)
        elif resolution == "probe":
            attempts.due, attempts.doubted_at, attempts.probes = DOUBT, at, 0
            if attempts.because not in UNSEEN:
                attempts.because = ""

    def _accept_what_is_lost(self, at: int) -> None:
        """Note that a person has checked everything that is lost: steps in doubt only because of that are done."""
        self.execution.accept_lost()
        for attempts in self.attempts.values():
            if attempts.due == DOUBT and attempts.because in UNSEEN:
                attempts.due, attempts.by_person = at, True

    def _retry(self, event: Recorded) -> None:
        """Apply a person's retry: what failed is open again, with all its attempts."""
        self.execution.set_ended(False)
        if event.body.crossed or self.execution.kept is not None:
            voids = event.body.voids
            kept = self.execution.kept or Kept()
            self.execution.keep_outcomes(kept)
            kept.forget_since(voids)
            kept.add(kept_by(self.history[self._place(voids) : self._place(event.seq)], event))
        self.cancel_at = 0
        for call in self._reopened[event.seq] & self.execution.steps.keys():
            attempts = self.attempts.setdefault(call, StepState())
            attempts.failures, attempts.due, attempts.by_person = 0, event.at, True
        if len(self._queue) == 1 and isinstance(self._queue[0], EndRun):
            # The code's own error, raised again by the same code. Its end counts as new.
            self.execution.set_ended(True)

    # -- differences -----------------------------------------------------------------------------------------------
    def _add(
        self,
        event: Recorded,
        what: str,
        recorded: str,
        command: Command | None,
        *,
        acceptable: bool = False,
        unfinished: str = "",
    ) -> None:
        now = command.text() if command is not None else self._what_the_code_does()
        self.differences.append(
            Difference(
                seq=event.seq,
                what=what,
                recorded=recorded,
                now=now,
                recorded_source=getattr(event.body, "source", ""),
                now_source=command.source if command is not None else "",
                acceptable=acceptable,
                digest=command.digest() if command is not None and acceptable else "",
                unfinished=unfinished,
            )
        )

    def _differ(self, position: int, what: str, now: str) -> None:
        event = self.history[position]
        what = "arguments" if event.kind == "run_started" else what
        self.differences.append(Difference(event.seq, what, recorded_text(event), f"fail: {now}"))

    def _what_the_code_does(self) -> str:
        main = self.execution.main
        if main is not None and main.done() and not main.cancelled():
            error = main.exception()
            return f"raise {described(error)}" if error is not None else "return"
        return "wait"
