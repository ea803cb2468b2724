"""One run in memory, driven.

`drive.py` makes a driver for a run that this process has claimed, verified and replayed. From then on:

    an outcome arrives  →  it is recorded  →  applied to the code (if it was expensive: once it is durable)
    the code asks       →  each command is recorded  →  performed, when the output-commit rule allows it
    the code rests      →  the run waits; after some time it leaves memory
    the code ends       →  the end is recorded; once it is durable, all waiters are told
    the code fails      →  what it did is undone first, by steps of the same run (`saga`, `compensation`)

Nothing leaves a run before what it depends on is durable: bodies of steps that are not `read` start, and ends, children
and cancels become visible, only from `writer.when_durable`. The parts: `attempts` (steps under way), `inbox` (what
arrives), `deadlines` (what is due), `writer` (what is written).
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from everstep.engine.code.commands import BeginCompensation, ChildCall, Command, EndRun, StepCall
from everstep.engine.code.execution import Execution
from everstep.engine.code.generations import ContinueRun
from everstep.engine.code.loop import SpinningWorkflow
from everstep.engine.code.recovery_point import DamagedCheckpoint
from everstep.engine.code.replay import Replayed
from everstep.engine.code.stops import stop_in
from everstep.engine.history.clock import Alarm, microseconds, set_alarm
from everstep.engine.history.journal import Journal
from everstep.engine.history.restored import restores_in
from everstep.engine.run.acting import Whereabouts
from everstep.engine.run.attempts import StepAttempts
from everstep.engine.run.budget import Budgets
from everstep.engine.run.children import Children
from everstep.engine.run.compensation import begin_compensation, force_end, note_undoing, with_undoing
from everstep.engine.run.holds import HoldReport, stuck_report
from everstep.engine.run.host import RunHost
from everstep.engine.run.inbox import Deadlines, Inbox, Told, told_of
from everstep.engine.run.perform import perform, record_continued, record_patches, report_damage
from everstep.engine.run.writer import STATUS_OF_END, RunWriter
from everstep.errors import NotDecodable, StoreError
from everstep.model import events as ev
from everstep.model.budgets import Allotment
from everstep.model.crash_points import crash_point
from everstep.model.status import Status
from everstep.model.untrusted import logger
from everstep.stores.protocol import Delivery, HoldRow, NewRun, RowChange, RunRow
from everstep.stores.rows.answers_and_streams import EntryRow

log = logger("everstep.run")

LOOK_AGAIN_SECONDS: Final = 0.5
"""Delay before a failed inbox read is retried."""


class Beside(msgspec.Struct):
    """What was read about a run in addition to its replay, when it was resumed."""

    allotment: Allotment | None = None
    """The budget that the run was given at its start."""
    first_checkpoint: tuple[int, bytes] | None = None
    """The number and the digest of the first checkpoint's event."""
    damaged_checkpoints: Sequence[DamagedCheckpoint] = ()
    """The checkpoints that recovery could not use."""
    stream_heads: Mapping[str, EntryRow] = {}
    """The newest entries of its streams when it was resumed; a new run has none."""
    whereabouts: Mapping[str, Whereabouts] = {}
    """Where the other processes are that may have begun its open steps, as of when that was last asked."""
    asked_hold: Delivery | None = None
    """The hold that was asked for before the run was claimed: it comes before any body begins."""


class Driver:
    """Takes one claimed run as far as it can go."""

    def __init__(
        self, app: "RunHost", row: RunRow, replayed: Replayed, journal: Journal, clock_started: int, beside: Beside
    ) -> None:
        self.app = app
        self.row = row
        self.run = row.id
        self.execution: Execution = replayed.execution
        self.fresh: Sequence[Command] = replayed.fresh
        """The commands of the code beyond its history."""
        self.outcome: bytes | None = None
        self.end_recorded: tuple[str, ev.Body, bytes | None] | None = None
        self.failure: BaseException | None = None
        """With `end_wanted`: why it is to fail."""
        self.stopped_by: tuple[BaseException, str] | None = None
        """What stopped its code or a body, and where: the run leaves memory unfinished, once nothing is in progress
        that must not be cut off.
        """
        self._is_leaving = False
        self._is_reading = False
        """Whether the inbox is being read; `_reads_again` if something has arrived since that began."""
        self._reads_again = False
        self._alarm: Alarm | None = None
        self._deadlines: Deadlines | None = None
        self._inbox: Inbox | None = None
        self._children: Children | None = None
        self.journal = journal
        self.attempts = StepAttempts(self, replayed.attempts)
        self.writer = RunWriter(self)
        books = self.execution.books
        self.budgets = Budgets(self, books, replayed.attempts) if books is not None else None
        self.stopped = False
        self.ending = ""
        self.hold: HoldRow | None = None
        self.hold_wanted: HoldReport | None = None
        """The report for the hold that begins as soon as nothing is in progress that must not be cut off."""
        self._hold_deliveries: list[int] = []
        """The numbers of the deliveries that asked for the hold. They stay in the inbox until the hold is in the
        history: if the process is killed before, the next one finds them again.
        """
        self.end_wanted = False
        """Whether the run is to end without its code, as soon as no effect is in progress or in doubt."""
        self.status: Status = "running"
        self.published = replayed.published
        self.publishes = False
        self._alarm_at: int | None = None
        self._unapplied: deque[tuple[int, bool, str, Any, int]] = deque()
        self._applying = False
        self._retried = replayed.retried
        self.accepted = replayed.accepted
        self.clock_started = clock_started
        self.beside = beside
        self.execution.note_unapplied(self._unapplied)
        self.renewal: NewRun | None = None
        """The next generation, once the code has said `continue_as`."""
        self._set_deadlines(replayed, clock_started)

    def _set_deadlines(self, replayed: Replayed, clock_started: int) -> None:
        if timers := self.execution.loop.timers:
            for call, timer in timers.items():
                if timer.deadline:
                    self.deadlines.add(timer.deadline, "timer", call)
        timeout, cancel = self.execution.workflow.timeout, self.execution.cancel
        now = self.app.clock.now() if timeout is not None or cancel is not None else 0  # events may be ahead of it
        if self.execution.rollback is not None:
            self.end_wanted = True
        elif cancel is not None:
            self.end_wanted = cancel.now
            self.deadlines.add(min(replayed.cancel_at, now) + microseconds(cancel.grace), "grace")
        elif timeout is not None:
            self.deadlines.add(min(clock_started, now) + microseconds(timeout), "run")

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of the run: most runs end before there is any."""
        if self._deadlines is None:
            self._deadlines = Deadlines()
        return self._deadlines

    @property
    def inbox(self) -> "Inbox":
        """The inbox of the run: most runs end before there are deliveries."""
        if self._inbox is None:
            self._inbox = Inbox(self)
        return self._inbox

    @property
    def children(self) -> "Children":
        """The children of the run: most runs have none."""
        if self._children is None:
            self._children = Children(self.app, self.run, self.execution, self.journal, self.writer.when_durable)
        return self._children

    @property
    def starts_nothing(self) -> bool:
        """Whether no more bodies start: the run is over, is about to be held, or the app stops."""
        return self.takes_nothing or self.app.draining

    @property
    def takes_nothing(self) -> bool:
        """Whether nothing due and no delivery is taken any more: the run is over, or about to be held."""
        return bool(self.is_over or self.hold_wanted is not None or self.stopped_by is not None)

    @property
    def lets_bodies_end(self) -> bool:
        """Whether the run is about to be held for its budget: work in progress was paid for, and is not cut off."""
        return self.hold_wanted is not None and self.hold_wanted.reason == "budget"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is done for this run here: it ends, is held, or has left."""
        return bool(self.stopped or self.ending or self.hold)

    # -- continuing after a replay ---------------------------------------------------------------------------------
    def go_on(self, *, is_new: bool = False, arrived: "Sequence[Delivery] | None" = None) -> None:
        """Settle the steps that are open by their contracts, then do what the code asks for beyond its history.

        A hold that was asked for before comes first, so that no body begins that it would have to wait for. Unless the
        run is new, the inbox comes next, before any deadline: whatever arrived before a timer was due comes
        first. `arrived` is what is in it, if the claim has read it.
        """
        self._applying = True
        if self.beside.asked_hold is not None:
            self.inbox.take([self.beside.asked_hold], fire=False)
        if not is_new:
            self._settle_open()
        if not (self.takes_nothing or self.end_wanted):  # otherwise it would be recorded as begun and never done
            self._perform(self.fresh)
        self.fresh = ()
        self._applying = False
        if self._unapplied:
            self._apply_outcomes()
        if is_new or self.hold_wanted is not None or self.failure is not None:
            self.come_to_rest()
        else:
            self.take_inbox_and_deadlines(arrived)

    def _settle_open(self) -> None:
        if self.beside.damaged_checkpoints:
            report_damage(self)
        if self.execution.is_undone:
            note_undoing(self, self.execution.saga.completed)
        new = {command.call for command in self.fresh if isinstance(command, (StepCall, ChildCall))}
        for call in [call for number, call in self.execution.steps.items() if number not in new]:
            if self.end_wanted and not call.target.is_accounted_for:
                continue  # the code no longer waits for it
            if not self.takes_nothing:  # a step in doubt may put the run on hold
                self.attempts.settle_open(call)
        old = [child for number, child in self.execution.children.items() if number not in new]
        if self.budgets is not None:
            old = [child for child in old if child.call not in self.budgets.withheld]
        if old and self.hold is None:
            self.children.take_up(old, tell_again=self._retried)

    def note_whereabouts(self, found: Mapping[str, Whereabouts]) -> None:
        """Note where other processes are, from a new read of the store."""
        self.beside.whereabouts = {**self.beside.whereabouts, **found}

    def note_checkpoint(self, seq: int, digest: bytes) -> None:
        """The run has taken a checkpoint."""
        self.beside.first_checkpoint = self.beside.first_checkpoint or (seq, digest)

    def take_damaged_checkpoints(self) -> Sequence[DamagedCheckpoint]:
        """Return the checkpoints that recovery could not use, once, to report them."""
        damaged, self.beside.damaged_checkpoints = self.beside.damaged_checkpoints, ()
        return damaged

    def note_restored(self, life: str) -> None:
        """Note that the store was restored from a backup: what this run did after that is missing here, and has
        happened.
        """
        self.execution.note_lost("restored")
        self.attempts.ask_again()
        self.record("run_restored", "", ev.RunRestored(restores_in(life), life))
        self.writer.save(waited_for=False)

    # -- outcomes --------------------------------------------------------------------------------------------------
    def deliver(self, kind: str, step: str, body: Any, *, expensive: bool = False) -> None:
        """Record an outcome and give it to the code, in the order of the log."""
        if self.stopped or self.ending or self.hold:
            return
        is_applying = self._applying
        if is_applying or self._unapplied:
            body.early = True
        if self.budgets is not None and self.attempts.has_keys and self.attempts.keys.is_claiming:
            expensive = True  # the code must not see a reservation that may be taken back
        seq = self.record(kind, step, body)
        self._unapplied.append((seq, expensive, kind, body, self.journal.at))
        crash_point("outcome.recorded")
        if expensive:
            self.writer.when_durable(seq, self._apply_outcomes)
        if not is_applying:
            self._apply_outcomes()
        if not self.stopped:
            app = self.app
            if not self.writer.is_queued:
                app.committer.ready(self.writer, waited_for=False)
            if not is_applying and len(app.drivers) == 1:
                app.committer.commit_now()

    def _apply_outcomes(self) -> None:
        """Apply what may be applied: outcomes in order, an expensive one only when it is durable."""
        if self._applying:
            return
        self._applying = True
        try:
            unapplied, execution = self._unapplied, self.execution
            while unapplied and not (self.stopped or self.ending or self.hold or self.end_wanted or self.hold_wanted):
                if self.app.draining or self.stopped_by is not None:
                    break  # the next worker gives it to the code, and begins its commands
                seq, expensive, kind, body, at = unapplied[0]
                if expensive and seq > self.writer.durable:
                    break
                unapplied.popleft()
                if self.budgets is not None:
                    self.budgets.show(seq)
                execution.apply(kind, body, at)
                if seq <= self.writer.durable and (ref := getattr(body, "ref", "")):
                    self.journal.undurable.pop(ref, None)
                crash_point("outcome.applied")
                self._perform(execution.take_commands())
        except (SpinningWorkflow, NotDecodable, RecursionError) as error:
            self.put_on_hold(stuck_report(self.execution, error))
        except StoreError as error:
            self._take_again(error)
        except BaseException as error:  # noqa: BLE001  # what is no stop is raised again
            self._note_stop(error)
        finally:
            self._applying = False
        self.come_to_rest()

    def unapplied_refs(self) -> set[str]:
        """Return the digests of stored payloads of outcomes that the code has not seen yet."""
        return {body.ref for _, _, _, body, _ in self._unapplied if getattr(body, "ref", "")}

    def _note_stop(self, error: BaseException) -> None:
        """Note a stop of the code, by what it raised or by a signal. Its commands of this turn are not executed."""
        stop = stop_in(error)
        if stop is None:
            raise error
        self.stopped_by = self.stopped_by or (stop, "workflow code")

    def leave_unfinished(self, stop: BaseException, where: str) -> None:
        """Leave memory because something was stopped that is no outcome. Recorded events are written first."""
        self.stopped_by = self.stopped_by or (stop, where)
        self.come_to_rest()

    def _take_again(self, error: StoreError) -> None:
        log.error("A payload of run %s cannot be read just now; the run is resumed later. %s", self.run, error)
        self.app.take_again(self)

    # -- commands --------------------------------------------------------------------------------------------------
    def _perform(self, commands: Sequence[Command]) -> None:
        """Record what the code asked for, and do it when the output-commit rule allows."""
        if self.execution.new_patches:
            record_patches(self)
        for command in commands:
            if isinstance(command, StepCall):
                self.attempts.begin(command)
            elif isinstance(command, EndRun):
                self._end(command)
            elif isinstance(command, BeginCompensation):
                begin_compensation(self, command.body())
                return  # the code's other commands no longer matter
            else:
                perform(self, command)

    def call(self, callback: Callable[..., None], *args: Any) -> None:
        """Call back for this run. An error evicts and resumes only this run."""
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001  # see above
            self.app.stumbling.leave(self, error)

    # -- deadlines -------------------------------------------------------------------------------------------------
    def take_inbox_and_deadlines(self, arrived: "Sequence[Delivery] | None" = None) -> None:
        """Do what is due by now, after what arrived before that."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._alarm_at = None
        if self.is_over:
            return
        if self._is_reading:
            self._reads_again = True  # the present read may miss what has arrived meanwhile
        elif arrived is not None and not arrived:
            self._take((arrived, None))
        else:
            self._is_reading = True
            self.app.read_then(self.run, self._take, self._look_again, self._read_inbox, arrived)

    def _read_inbox(self, arrived: "Sequence[Delivery] | None") -> "tuple[Sequence[Delivery], Told | None]":
        """Return the deliveries, with what is needed to take them. It changes nothing, and any thread may call it."""
        app = self.app
        deliveries = app.store.inbox(self.run) if arrived is None else arrived
        return deliveries, told_of(app.store, deliveries, app.recent_ends) if deliveries else None

    def _look_again(self, error: StoreError) -> None:
        self._is_reading = False
        log.error("The inbox of run %s cannot be read just now: %s", self.run, error)
        if not self.is_over and self._alarm is None:
            self._alarm = self.app.loop.call_later(LOOK_AGAIN_SECONDS, self.take_inbox_and_deadlines)

    def _take(self, found: "tuple[Sequence[Delivery], Told | None]") -> None:
        self._is_reading = False
        self.call(self._take_and_fire, *found)
        if self._reads_again:
            self._reads_again = False
            self.take_inbox_and_deadlines()

    def _take_and_fire(self, deliveries: "Sequence[Delivery]", told: "Told | None") -> None:
        if self.is_over:
            return
        try:
            if told is not None:
                self.inbox.take(deliveries, told)
        except StoreError as error:
            self._look_again(error)
            return
        self.deadlines.fire(self, self.app.clock.now())
        self.come_to_rest()

    def wake_at(self) -> int | None:
        """Return when the run has something to do by itself."""
        top = self._deadlines.next(self) if self._deadlines is not None else None
        return top.at if top is not None else None

    def request_cancel(self, request: ev.CancelRequested) -> None:
        """Cancel the code; after its grace, or at once if the caller gave none, the run ends without it.

        The grace counts from now, not from when the cancel was sent: also after downtime the code can clean up.
        """
        if request.now:
            self.end_wanted = True
            self.execution.note_cancel(request)
            self.deliver("cancel_requested", "", request)
            return
        self.deadlines.add(self.app.now() + microseconds(request.grace), "grace")
        self.deliver("cancel_requested", "", request)

    # -- compensation: see compensation.py ------------------------------------------------------------------------
    def take_unapplied(self) -> list[tuple[str, Any, int]]:
        """Return the outcomes that the code has not seen, because it never will."""
        taken = [(kind, body, at) for _, _, kind, body, at in self._unapplied]
        self._unapplied.clear()
        return taken

    def forget_unapplied(self, events: Collection[int]) -> None:
        """Forget outcomes that were not written: something else is recorded under their numbers."""
        kept = [one for one in self._unapplied if one[0] not in events]
        self._unapplied.clear()
        self._unapplied.extend(kept)

    def go_on_without_code(self, started: ev.CompensationStarted) -> None:
        """Do what follows when compensation begins: the first compensation, and later the others."""
        was_applying, self._applying = self._applying, True
        self.end_wanted = False
        try:
            self.execution.begin_compensation(started)
            self._perform(self.execution.take_commands())
        except NotDecodable as error:
            self.put_on_hold(stuck_report(self.execution, error))
        except StoreError as error:
            self._take_again(error)
        except BaseException as error:  # noqa: BLE001  # what is no stop is raised again
            self._note_stop(error)
        finally:
            self._applying = was_applying
        self.come_to_rest()

    # -- ends and holds --------------------------------------------------------------------------------------------
    def _end(self, command: EndRun) -> None:
        """End the run after its code."""
        if isinstance(command, ContinueRun):
            record_continued(self, command)
            return
        body = command.body()
        if command.kind != "run_cancelled":
            body = self.journal.pack_into(body, "value" if command.kind == "run_completed" else "error")
        self.record_end(command.kind, body, command.payload or None)

    def end_generation(self, command: ContinueRun) -> None:
        """The run continues with a fresh history; nothing more is done in this one."""
        self.attempts.cancel_all()
        self.children.cancel_those_that_end_with_it()
        self.ending = command.kind
        self.record(command.kind, "", command.body())

    def renew(self, renewal: NewRun) -> None:
        """Write the next generation with the end of this one."""
        self.renewal = renewal
        self.writer.save(waited_for=True)

    def roll_back(self, request: ev.RollbackRequested) -> None:
        """Compensate what the run did, without its code."""
        self.end_wanted = True
        self.execution.note_rollback(request)

    def end_after_grace(self) -> None:
        """End the run without its code, which was cancelled and has not ended in time."""
        self.end_wanted = True
        self.come_to_rest()

    def fail_when_settled(self, error: BaseException) -> None:
        """End the run as failed, without its code, as soon as no effect is in progress or in doubt."""
        self.end_wanted, self.failure = True, error

    def record_end(self, kind: str, body: ev.Body, outcome: bytes | None) -> None:
        """Record the end. Children that should not outlive the run are asked to stop, in the same transaction."""
        crash_point("run.end")
        self.attempts.cancel_all()
        if self.execution.children:
            self.children.cancel_those_that_end_with_it()
        self.ending, self.outcome = kind, outcome
        self.end_recorded = (kind, body, outcome)
        self.record(kind, "", body)
        self.writer.save(waited_for=True)

    def take_back_end(self) -> None:
        """Take back an end because a cancel came first. If the run is being cancelled already, the end counts."""
        if not self.stopped:
            self.app.read_then(self.run, self._take_cancels, self._take_back_later, self.app.store.inbox, self.run)

    def _take_back_later(self, error: StoreError) -> None:
        log.error("The inbox of run %s cannot be read just now: %s", self.run, error)
        self.app.loop.call_later(LOOK_AGAIN_SECONDS, self.call, self.take_back_end)

    def _take_cancels(self, deliveries: "Sequence[Delivery]") -> None:
        self.call(self._put_cancels_first, [one for one in deliveries if one.kind == "cancel"])

    def _put_cancels_first(self, cancels: "Sequence[Delivery]") -> None:
        if self.stopped:
            return
        assert self.end_recorded is not None
        self.ending, self.outcome, was_undone = "", None, self.execution.is_undone
        self.inbox.take(cancels, fire=False)  # the code has ended, so timers no longer matter
        if not self.is_over and self.execution.is_undone == was_undone:
            self.record_end(*self.end_recorded)

    def take_back_row(self, change: RowChange, events: int) -> None:
        """The store refused this change of the row and its `events` events: restore what they held."""
        self.publishes = self.publishes or change.published is not None
        if self.budgets is not None:
            self.budgets.forget_news()
        if not change.progress:
            self.attempts.restarts += events

    def put_on_hold(self, report: "HoldReport", delivery: int = 0) -> None:
        """Stop here and ask a person, once no body runs any more that must not be cut off.

        delivery: the number of the one in the inbox that asks for it.
        """
        if self.is_over:
            return
        if delivery:
            self._hold_deliveries.append(delivery)
        report = self.hold_wanted or report  # the first; a step in doubt is found again when that is resolved
        goes_on = report.reason == "budget" and (self.attempts.running or self.attempts.starting)
        if self._applying or goes_on or self.attempts.must_not_be_cut_off():  # what the code asked for comes first
            self.hold_wanted = report
            return
        report = with_undoing(report, self)
        self.attempts.cancel_all()
        self.hold = report.row(self.run, self.app.clock.now(), self.app.randomness)
        self.record("run_held", report.step, ev.RunHeld(self.hold.id, report.reason, report.summary))
        if self._hold_deliveries:
            self.journal.attachments().consumed += self._hold_deliveries
        self.writer.save(waited_for=True)

    # -- resting and leaving ---------------------------------------------------------------------------------------
    def come_to_rest(self) -> None:
        """Record the run's status, set the alarm, and hold the run if its code can never continue."""
        if self._applying or self.stopped or self.ending or self.hold:
            return
        if self.stopped_by is not None:
            self._leave()
            return
        if self.attempts.has_keys and self.attempts.keys.withdraw_cancelled():
            return
        if self.hold_wanted is not None:
            self.put_on_hold(self.hold_wanted)
            return
        if self.end_wanted and not self.attempts.has_unsettled():
            force_end(self)
            return
        attempts, is_deciding = self.attempts, self.budgets is not None and self.budgets.look_again()
        if attempts.starting or self._unapplied or attempts.are_under_way or is_deciding:
            self.status = "running"
        else:
            if self.execution.is_receiving:
                self.execution.receiving.forget_stale()
            if not self.execution.is_waiting:
                self.put_on_hold(stuck_report(self.execution, None))
                return
            self.status = "waiting"
            self.writer.save_status()
            self.app.resting.add(self)
        if self._alarm_at is not None or self._deadlines is not None:
            self._set_alarm()

    def _leave(self) -> None:
        assert self.stopped_by is not None
        if self.attempts.must_not_be_cut_off():
            return  # the end comes through here
        if self.writer.all_is_durable:
            self.app.interrupted.leave(self, *self.stopped_by)
        elif not self._is_leaving:
            self._is_leaving = True
            self.writer.when_durable(self.journal.seq, self._leave_when_durable)

    def _leave_when_durable(self) -> None:
        self._is_leaving = False
        self.come_to_rest()

    def _set_alarm(self) -> None:
        if self.stopped:  # a run that remembers facts leaves memory as soon as it rests
            return
        wake_at = self.wake_at()
        if wake_at == self._alarm_at:
            return
        self._alarm_at = wake_at
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake_at is not None:
            self._alarm = set_alarm(self.app.clock, self.app.loop, wake_at, self.take_inbox_and_deadlines)

    def record(self, kind: str, step: str, body: ev.Body) -> int:
        """Append an event to the history and return its number."""
        seq = self.journal.record(kind, step, body, self.app.now())
        if self.budgets is not None:
            self.budgets.record(seq, kind, step, body)
        return seq

    def publish(self, name: str, payload: bytes) -> None:
        """Publish a value: the row has it once it is durable."""
        self.published[name] = msgspec.Raw(payload)
        self.publishes = True

    def published_json(self) -> bytes:
        """Return the published values, some of which are new since the last unit."""
        self.publishes = False
        return msgspec.json.encode(self.published)

    def stop(self) -> None:
        """Leave memory. Nothing is recorded; the code is unwound."""
        if self.stopped:
            return
        self.stopped = True
        self.attempts.cancel_all()
        if self.attempts.has_doubts:
            self.attempts.doubts.cancel_all()
        if self._alarm is not None:
            self._alarm.cancel()
        self._unapplied.clear()
        self.execution.evict()
        # They point back here: see Execution.evict.
        self.attempts.let_go()
        del self.attempts, self.writer
        if self._inbox is not None or self._children is not None:
            self._inbox = self._children = None
        self.budgets = None

    @property
    def ends_secretly(self) -> bool:
        """Whether the run ended with an error that is not shown."""
        return self.end_recorded is not None and getattr(self.end_recorded[1], "secret", False)

    def ended_as(self) -> Status | None:
        """Return the final status in which the run left this process: an end, or held; None if it only left."""
        if not self.writer.all_is_durable or self.renewal is not None:
            return None
        return STATUS_OF_END[self.ending] if self.ending else "held" if self.hold else None

    @property
    def is_idle(self) -> bool:
        """Whether the run waits and everything about it is durable, so that it can leave memory."""
        quiet = not (self.attempts.are_under_way or self._unapplied)
        return self.status == "waiting" and quiet and self.writer.all_is_durable and self.writer.status_is_durable
