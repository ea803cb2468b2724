"""Operations, done one by one inside an open transaction: the specification of what each of them does.

A store may do many of them together with fewer statements, as long as the result is the same.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.protocol import (
    Accepted,
    Append,
    Claim,
    Claimed,
    Existing,
    HoldRow,
    MarkRestored,
    Needs,
    NewRun,
    NotClaimed,
    NotPosted,
    Operation,
    Post,
    Posted,
    Refused,
    Release,
    RepairRun,
    RestartRun,
    StartRun,
    Verdict,
    check_events,
    child_value,
)
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import ForgetKeys, SettleKey
from everstep.stores.rows.notifications import SettleNotification, TakeNotification
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, TakeSlot
from everstep.stores.rows.schedules import ChangeSchedule
from everstep.stores.rows.transfer import ClaimFamily, DeletePart, ImportRuns
from everstep.stores.sql.batch import has_more
from everstep.stores.sql.keys import KeyTable
from everstep.stores.sql.moving import Moving
from everstep.stores.sql.queues import QueueTable
from everstep.stores.sql.repairs import Repairs
from everstep.stores.sql.rows import (
    Row,
    as_json,
    change_values,
    notification_values,
    resolved_values,
    run_row,
    run_values,
    tag_values,
    text,
)
from everstep.stores.sql.saved import SavedTables
from everstep.stores.sql.schedules import schedule_values
from everstep.stores.sql.statements import Statements

ACCEPTED: Final = Accepted()


class Operations:
    """A connection's operations within a transaction, which the caller begins and ends."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._all = statements.all
        self._run = statements.run
        self._insert = statements.insert

    # Parts that most programs never use are loaded and made at their first use.
    @cached_property
    def _keys(self) -> "KeyTable":

        return KeyTable(self._statements)

    @cached_property
    def _repairs(self) -> "Repairs":

        return Repairs(self._statements)

    @cached_property
    def _moving(self) -> "Moving":

        return Moving(self._statements)

    @cached_property
    def _queues(self) -> "QueueTable":

        return QueueTable(self._statements)

    @cached_property
    def _saved(self) -> "SavedTables":

        return SavedTables(self._statements)

    # -- one operation --------------------------------------------------------------------------------------------
    def one(self, operation: Operation) -> Verdict:
        """Do one operation, or refuse it and change nothing."""
        match operation:
            case Append():
                return self._append(operation)
            case StartRun():
                return self._start(operation.new, operation.needs)
            case Post():
                return self._post(operation)
            case Claim():
                return self._claim(operation)
            case Release():
                return self._release(operation)
            case RestartRun():
                return self._restart(operation)
            case TakeNotification():
                return self._take_notification(operation)
            case SettleNotification():
                return self._settle_notification(operation)
            case SettleKey():
                return self._keys.settle(operation)
            case ForgetKeys():
                return self._keys.forget(operation)
            case RepairRun():
                return self._repairs.repair(operation)
            case MarkRestored():
                return self._repairs.mark_restored(operation)
            case ImportRuns():
                return self._moving.accept(operation)
            case ClaimFamily():
                return self._moving.claim(operation)
            case DeletePart():
                return self._moving.delete(operation)
            case ChangeSchedule():
                return self._change_schedule(operation)
            case ChangeQueue():
                return self._queues.change(operation)
            case TakeSlot():
                return self._queues.take(operation)
            case FreeSlot():
                return self._queues.free(operation)
            case _:
                return self._saved.do(operation)

    def _append(self, append: Append) -> Verdict:
        check_events(append)
        ended = append.row.status in ENDED
        refusal = self._refusal(append, ended)
        if refusal is not None:
            return refusal
        assert self._run("change_row", *change_values(append)) == 1, "the run's row is as it was a moment ago"
        self._insert("append_events", 8, [(append.run, append.generation, *event) for event in append.events])
        if has_more(append):
            self._keep_more([append])
        self._start_children(append.starts, append.row.at)
        for post in append.posts:
            if isinstance(verdict := self._post(post), NotPosted) and verdict.status is not None:
                self._deliver(post)
        if append.hold is not None:
            self._hold(append.hold)
            self._insert("add_notifications", 10, [notification_values(row) for row in append.notifications])
        if append.keys is not None:
            self._keys.apply(append.keys, append.run, append.generation, append.row.at)
        if append.archive:
            self._archive(append.archive)
        if append.redeliver:
            self._run("redeliver", append.run)
        if append.renewal is not None:
            self._renew(append, append.renewal)
        if ended:
            value = child_value(append.row.status, append.row.outcome, append.row.budget)
            self._insert("tell_followers", 4, [(0, append.run, value, append.row.at)])
            self._run("forget_followers", self._statements.texts([append.run]))
            self._keys.end_run(append.run, append.generation, append.row.at)
            self._run("settle_inbox", append.run)
        return ACCEPTED

    def _renew(self, append: Append, new: NewRun) -> None:
        check_events(new)
        self._keys.end_run(append.run, append.generation, append.row.at)
        self._run("stop_following", append.run)
        self._statements.replace_run(new.row)
        self._begin_histories([new])

    def _refusal(self, append: Append, ended: bool) -> Refused | None:
        state = self._all("run_head", append.run)
        if not state:
            return Refused("missing")
        generation, epoch, head_seq, head_digest, _ = state[0]
        if (generation, epoch) != (append.generation, append.epoch):
            return Refused("fenced")
        if (head_seq, head_digest) != (append.expected_seq, append.expected_digest):
            return Refused("head")
        if ended:
            cancels = {number for (number,) in self._all("pending_cancels", append.run)}
            if not cancels <= set(append.consumed):
                return Refused("inbox")
        if append.keys is not None and (calls := self._keys.lost(append.keys, append.run, append.generation)):
            return Refused("key", calls)
        if append.keys is not None and not self._keys.has_all(append.keys.relies):
            return Refused("key")
        return None

    def _start(self, new: NewRun, needs: Needs | None = None) -> Verdict:
        check_events(new)
        if needs is not None and not self._all("run_head", new.row.id):
            if any(not self._all("run_head", run) or self._all("is_being_deleted", run) for run in needs.runs):
                return Refused("missing")
            if not self._keys.has_all(needs.keys):
                return Refused("key")
        if not self._insert("create_runs", 25, [run_values(new.row)]):
            return Existing(run_row(self._all("run", new.row.id)[0]))
        self._begin_histories([new])
        self._follow([new])
        if needs is not None:
            self._keys.rely(needs.keys, new.row.id)
        return ACCEPTED

    def _start_children(self, news: Sequence[NewRun], at: int) -> None:
        """Create the children that do not exist yet, all at once; follow or refuse the others."""
        if not news:
            return
        there = self._states_of(news)
        created: dict[str, NewRun] = {}
        others: list[NewRun] = []
        for new in news:
            check_events(new)
            if new.row.id in there or new.row.id in created:
                others.append(new)
            else:
                created[new.row.id] = new
        self._insert("create_runs", 25, [run_values(new.row) for new in created.values()])
        self._begin_histories(list(created.values()))
        self._follow(list(created.values()))
        if others:
            there = self._states_of(others)
            for new in others:
                self._follow_or_refuse(new, there[new.row.id], at)

    def _states_of(self, news: Sequence[NewRun]) -> dict[str, Row]:
        rows = self._all("children_states", self._statements.texts([new.row.id for new in news]))
        return {
            run: (run, text(workflow), text(arguments), text(status), outcome, budget)
            for run, workflow, arguments, status, outcome, budget in rows
        }

    def _follow_or_refuse(self, new: NewRun, there: Row, at: int) -> None:
        if new.follower is None:
            return
        _, workflow, arguments, status, outcome, budget = there
        if (workflow, arguments) != (new.row.workflow, new.row.arguments):
            value = child_value("refused", None)
        elif status in ENDED:
            value = child_value(status, outcome, budget)
        else:
            self._follow([new])
            return
        self._deliver(Post(new.follower, "child", new.row.id, str(new.follower_call), value, at))

    def _restart(self, operation: RestartRun) -> Verdict:
        new = operation.new
        check_events(new)
        state = self._all("run_head", new.row.id)
        if not state:
            return Refused("missing")
        generation, epoch, _, _, status = state[0]
        may_begin_again = text(status) in ENDED or (text(status) == "held" and operation.hold is not None)
        if epoch != operation.epoch or not may_begin_again or new.row.generation != generation + 1:
            return Refused("fenced")
        if operation.hold is not None:
            self._hold(operation.hold)
        self._keys.end_run(new.row.id, generation, new.row.updated_at)
        self._run("leave_inbox", new.row.id)
        self._run("stop_following", new.row.id)
        self._statements.replace_run(new.row)
        self._begin_histories([new])
        self._follow([new])
        return ACCEPTED

    def _change_schedule(self, change: ChangeSchedule) -> Verdict:

        for new in change.starts:
            check_events(new)
        if change.row is None:
            changed = self._run("delete_schedule", change.name, change.expected)
        elif change.expected == 0:
            changed = self._run("create_schedule", *schedule_values(change.row))
        else:
            changed = self._run("change_schedule", *schedule_values(change.row), change.expected)
        if not changed:
            return Refused("taken")
        for new in change.starts:
            self._start(new)
        for post in change.posts:
            self._post(post)
        return ACCEPTED

    def _post(self, post: Post) -> Verdict:
        numbers = self._all("post", post.run, post.kind, post.name, post.id, post.value, post.at)
        if numbers:
            return Posted(numbers[0][0])
        there = self._all("duplicate", post.run, post.kind, post.id)
        if there and text(there[0][1]) != "undelivered":
            return Posted(there[0][0], duplicate=True)
        if there and self._all("post_again", there[0][0], post.run, post.name, post.value, post.at):
            return Posted(there[0][0])
        state = self._all("run_head", post.run)
        return NotPosted(text(state[0][4]) if state else None)  # type: ignore[arg-type]  # a status, unless damaged

    def _deliver(self, post: Post) -> None:
        self._run("deliver", post.run, post.kind, post.name, post.id, post.value, post.at)

    def _claim(self, claim: Claim) -> Verdict:
        rows = self._claimed(claim)
        if rows:
            return Claimed(run_row(rows[0]))
        there = self._all("run", claim.run)
        return NotClaimed(run_row(there[0]) if there else None)

    def _claimed(self, claim: Claim) -> list[Row]:
        """Claim a run if it is free, and if its queue has room."""
        may_have_ended = not UNFINISHED.issuperset(claim.statuses)
        if may_have_ended and bool(self._all("is_being_deleted", claim.run)) != claim.deleting:
            return []
        token = self._queues.may_claim(claim) if claim.queued else ()
        if token is None:
            return []
        rows = self._all("claim", claim.run, claim.worker, *self._statements.statuses(claim.statuses))
        if rows and claim.queued:
            self._queues.note_claimed(token)
        return rows

    def _release(self, release: Release) -> Verdict:
        if self._run("release", release.run, release.epoch, release.status, int(release.died)):
            return ACCEPTED
        return Refused("fenced" if self._all("run_head", release.run) else "missing")

    def _hold(self, hold: HoldRow) -> None:
        if hold.resolved_at is None:
            facts = (hold.id, hold.run, hold.reason, hold.step, hold.summary, hold.report)
            self._run("open_hold", *facts, as_json(hold.resolutions), hold.created_at)
        else:
            if self._run("resolve_hold", *resolved_values(hold)):
                self._run("drop_notifications", hold.id)

    def _take_notification(self, take: TakeNotification) -> Verdict:
        taken = self._run("take_notification", take.id, take.attempt, take.worker, take.at, take.until)
        return ACCEPTED if taken else Refused("taken")

    def _settle_notification(self, settle: SettleNotification) -> Verdict:
        if settle.state == "sent":
            settled = self._run("notification_sent", settle.id)
        else:
            facts = (settle.id, settle.attempt, settle.state, settle.next_at, settle.error)
            settled = self._run("notification_not_sent", *facts)
        return ACCEPTED if settled else Refused("taken")

    # -- parts ------------------------------------------------------------------------------------------------------
    def _begin_histories(self, news: Sequence[NewRun]) -> None:
        """Insert the events of new runs, and their entries and payloads."""
        events: list[Row] = []
        payloads: list[Row] = []
        tags: list[Row] = []
        for new in news:
            events += [(new.row.id, new.row.generation, *event) for event in (new.event, *new.more)]
            if new.payloads:
                payloads += [(new.row.id, digest, value) for digest, value in new.payloads]
            if new.row.tags:
                tags += tag_values(new.row)
            if new.entries:
                self._insert("keep_entries", 12, new.entries)
        self._insert("append_events", 8, events)
        self._insert("keep_payloads", 3, payloads)
        self._insert("keep_tags", 4, tags)

    def _keep_more(self, appends: Sequence[Append]) -> None:
        """Write what appends have in addition to their events."""
        payloads = [(append.run, digest, value) for append in appends for digest, value in append.payloads]
        self._insert("keep_payloads", 3, payloads)
        for append in appends:
            if append.row.budget is not None:
                self._run("set_budget", append.row.budget, append.run)
            if append.checkpoints:
                self._keep_checkpoints(append)
            if append.beside is not None:
                self._insert("keep_answers", 4, append.beside.answers)
                self._insert("keep_entries", 12, append.beside.entries)
            if append.consumed:
                self._run("consume", append.run, self._statements.numbers(append.consumed))

    def _keep_checkpoints(self, append: Append) -> None:
        """Insert new checkpoints, and delete those that are now too old."""
        self._insert("keep_checkpoints", 8, append.checkpoints)
        self._run("drop_checkpoints", append.run, append.generation, append.checkpoints_kept)

    def _archive(self, rows: Sequence[ArchiveRow]) -> None:
        """Move damaged rows to the archive, where they can do no harm."""
        self._insert("archive", 7, rows)
        for row in rows:
            if row.what == "checkpoint":
                self._run("remove_checkpoint", row.run, row.generation, row.seq)

    def _follow(self, news: Sequence[NewRun]) -> None:
        followed = [(new.row.id, new.follower, new.follower_call) for new in news if new.follower is not None]
        self._insert("follow", 3, followed)
