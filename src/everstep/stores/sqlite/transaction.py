"""Operations, done inside an open transaction.

`Transaction.one` does an operation by itself and is the specification. `Transaction.together` does the same for a whole
batch with a handful of statements, provided that all of it is accepted, which is the rule; if it is not, the caller
rolls back and does the operations one by one.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import apsw

from everstep.model.status import ENDED
from everstep.stores.archive import ArchiveRow
from everstep.stores.keys import ForgetKeys, SettleKey
from everstep.stores.moving import DeletePart, ImportRuns
from everstep.stores.notifications import SettleNotification, TakeNotification
from everstep.stores.protocol import (
    Accepted,
    Append,
    Claim,
    Claimed,
    Existing,
    HoldRow,
    MarkRestored,
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
from everstep.stores.queues import ChangeQueue, FreeSlot, TakeSlot
from everstep.stores.sqlite.batch import Batch, has_more, is_move
from everstep.stores.sqlite.keys import KeyTable
from everstep.stores.sqlite.moving import Moving
from everstep.stores.sqlite.queries import batches, query
from everstep.stores.sqlite.queues import NO_TOKEN, QueueTable
from everstep.stores.sqlite.repairs import Repairs
from everstep.stores.sqlite.rows import (
    Row,
    as_json,
    change_values,
    head_values,
    move_values,
    notification_values,
    resolved_values,
    run_row,
    run_values,
    stays,
    tag_values,
    text,
)

ACCEPTED: Final = Accepted()
WITH_KEYS: Final = 2
"""What `entangled` says of a run whose steps have keys."""


class Transaction:
    """What a connection does within a transaction. The caller begins and ends it."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._cursor = connection.cursor()
        self._keys = KeyTable(connection)
        self._repairs = Repairs(self._cursor)
        self._moving = Moving(self._cursor)
        self._queues = QueueTable(connection, self._cursor)

    # -- a whole batch --------------------------------------------------------------------------------------------
    def at_once(self, operations: Sequence[Operation]) -> bool:
        """Do a batch with one statement, which is a transaction by itself. If that cannot be, nothing was done."""
        append = operations[0]
        if len(operations) > 1 or type(append) is not Append or not is_move(append):
            return False
        check_events(append)
        try:
            self._run("move", move_values(append))
        except apsw.ConstraintError:
            return False
        return True

    def together(self, operations: Sequence[Operation]) -> list[Verdict] | None:
        """Do a batch with few statements, or return None if some would be refused; then roll back."""
        batch = Batch(operations)
        if batch.has_keys and self._keys.concern_others(operations):
            return None
        if ends := batch.ending_runs():
            entangled = self._all("entangled", (as_json(ends),))
            if any(kind == WITH_KEYS for _, kind in entangled):
                return None
            batch.set_apart({run for run, _ in entangled}, {run for run, is_followed in entangled if not is_followed})
        if not self._write_simple(batch):
            return None
        verdicts: list[Verdict] = [ACCEPTED] * len(operations)
        for place, operation in batch.others:
            verdicts[place] = self.one(operation)
        return verdicts

    def _write_simple(self, batch: Batch) -> bool:
        """Write the simple operations of a batch; False if not all of them found their run as expected."""
        runs = [run_values(start.new.row) for start in batch.starts]
        if self._insert("create_runs", 25, runs) != len(runs):
            return False
        self._begin_histories([start.new for start in batch.starts])
        if not self._move(batch.appends):
            return False
        self._keep_more(batch.appends)
        if batch.followed:
            told = [
                (place, a.run, child_value(a.row.status, a.row.outcome, a.row.budget), a.row.at)
                for place, a in enumerate(batch.followed)
            ]
            self._insert("tell_followers", 4, told)
            self._run("forget_followers", (as_json([append.run for append in batch.followed]),))
        return True

    def _move(self, appends: Sequence[Append]) -> bool:
        """Move heads and append events; False if not all runs were as expected."""
        heads: list[Row] = []
        changes: list[Row] = []
        events: list[Any] = []
        for append in appends:
            if stays(append):
                heads.append(head_values(append))
            else:
                changes.append(change_values(append))
            whose = append.run, append.generation
            for event in append.events:
                events += whose + event
        if self._update("move_head", heads) + self._update("change_row", changes) != len(appends):
            return False
        self._insert_flat("append_events", 8, events)
        return True

    # -- one operation --------------------------------------------------------------------------------------------
    def one(self, operation: Operation) -> Verdict:
        """Do one operation, or refuse it and change nothing."""
        match operation:
            case Append():
                return self._append(operation)
            case StartRun():
                return self._start(operation.new)
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
            case DeletePart():
                return self._moving.delete(operation)
            case ChangeQueue():
                return self._queues.change(operation)
            case TakeSlot():
                return self._queues.take(operation)
            case FreeSlot():
                return self._queues.free(operation)

    def _append(self, append: Append) -> Verdict:
        check_events(append)
        ended = append.row.status in ENDED
        refusal = self._refusal(append, ended)
        if refusal is not None:
            return refusal
        assert self._update("change_row", [change_values(append)]) == 1, "the run's row is as it was a moment ago"
        self._insert("append_events", 8, [(append.run, append.generation, *event) for event in append.events])
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
        if append.renewal is not None:
            self._renew(append, append.renewal)
        if ended:
            value = child_value(append.row.status, append.row.outcome, append.row.budget)
            self._insert("tell_followers", 4, [(0, append.run, value, append.row.at)])
            self._run("forget_followers", (as_json([append.run]),))
            self._keys.end_run(append.run, append.generation, append.row.at)
            self._run("settle_inbox", (append.run,))
        return ACCEPTED

    def _renew(self, append: Append, new: NewRun) -> None:
        check_events(new)
        self._keys.end_run(append.run, append.generation, append.row.at)
        self._run("stop_following", (append.run,))
        self._run("restart_run", run_values(new.row))
        self._begin_histories([new])

    def _refusal(self, append: Append, ended: bool) -> Refused | None:
        state = self._all("run_head", (append.run,))
        if not state:
            return Refused("missing")
        generation, epoch, head_seq, head_digest, _ = state[0]
        if (generation, epoch) != (append.generation, append.epoch):
            return Refused("fenced")
        if (head_seq, head_digest) != (append.expected_seq, append.expected_digest):
            return Refused("head")
        if ended:
            cancels = {number for (number,) in self._all("pending_cancels", (append.run,))}
            if not cancels <= set(append.consumed):
                return Refused("inbox")
        if append.keys is not None and (calls := self._keys.lost(append.keys, append.run, append.generation)):
            return Refused("key", calls)
        return None

    def _start(self, new: NewRun) -> Verdict:
        check_events(new)
        if not self._insert("create_runs", 25, [run_values(new.row)]):
            return Existing(run_row(self._all("run", (new.row.id,))[0]))
        self._begin_histories([new])
        self._follow([new])
        return ACCEPTED

    def _start_children(self, news: Sequence[NewRun], at: int) -> None:
        """Create the children that are not there yet, all at once; follow or refuse the others."""
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
        rows = self._all("children_states", (as_json([new.row.id for new in news]),))
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
        state = self._all("run_head", (new.row.id,))
        if not state:
            return Refused("missing")
        generation, epoch, _, _, status = state[0]
        may_begin_again = text(status) in ENDED or (text(status) == "held" and operation.hold is not None)
        if epoch != operation.epoch or not may_begin_again or new.row.generation != generation + 1:
            return Refused("fenced")
        if operation.hold is not None:
            self._hold(operation.hold)
        self._run("settle_inbox", (new.row.id,))
        self._run("stop_following", (new.row.id,))
        self._run("restart_run", run_values(new.row))
        self._begin_histories([new])
        self._follow([new])
        return ACCEPTED

    def _post(self, post: Post) -> Verdict:
        numbers = self._all("post", (post.run, post.kind, post.name, post.id, post.value, post.at))
        if numbers:
            return Posted(numbers[0][0])
        there = self._all("duplicate", (post.run, post.kind, post.id))
        if there:
            return Posted(there[0][0], duplicate=True)
        state = self._all("run_head", (post.run,))
        return NotPosted(text(state[0][4]) if state else None)  # type: ignore[arg-type]  # a status, unless damaged

    def _deliver(self, post: Post) -> None:
        self._run("deliver", (post.run, post.kind, post.name, post.id, post.value, post.at))

    def _claim(self, claim: Claim) -> Verdict:
        statuses = [*dict.fromkeys(claim.statuses), *[None] * 7][:7]
        rows = self._claimed(claim, statuses)
        if rows:
            return Claimed(run_row(rows[0]))
        there = self._all("run", (claim.run,))
        return NotClaimed(run_row(there[0]) if there else None)

    def _claimed(self, claim: Claim, statuses: Sequence[str | None]) -> list[Row]:
        """Claim a run if it is free, and if its queue has room."""
        token = self._queues.may_claim(claim) if claim.queued else NO_TOKEN
        if token is None:
            return []
        rows = self._all("claim", (claim.run, claim.worker, claim.at, *statuses))
        if rows:
            self._queues.take_token(token)
        return rows

    def _release(self, release: Release) -> Verdict:
        self._run("release", (release.run, release.epoch, release.status))
        if self._connection.changes():
            return ACCEPTED
        return Refused("fenced" if self._all("run_head", (release.run,)) else "missing")

    def _hold(self, hold: HoldRow) -> None:
        if hold.resolved_at is None:
            facts = (hold.id, hold.run, hold.reason, hold.step, hold.summary, hold.report)
            self._run("open_hold", (*facts, as_json(hold.resolutions), hold.created_at))
        else:
            self._run("resolve_hold", resolved_values(hold))
            if self._connection.changes():
                self._run("drop_notifications", (hold.id,))

    def _take_notification(self, take: TakeNotification) -> Verdict:
        self._run("take_notification", (take.id, take.attempt, take.worker, take.at, take.until))
        return ACCEPTED if self._connection.changes() else Refused("taken")

    def _settle_notification(self, settle: SettleNotification) -> Verdict:
        if settle.state == "sent":
            self._run("notification_sent", (settle.id,))
        else:
            facts = (settle.id, settle.attempt, settle.state, settle.next_at, settle.error)
            self._run("notification_not_sent", facts)
        return ACCEPTED if self._connection.changes() else Refused("taken")

    # -- parts ------------------------------------------------------------------------------------------------------
    def _begin_histories(self, news: Sequence[NewRun]) -> None:
        """Insert the events of new runs, and what comes with them."""
        events: list[Row] = []
        payloads: list[Row] = []
        tags: list[Row] = []
        for new in news:
            events += [(new.row.id, new.row.generation, *event) for event in (new.event, *new.more)]
            payloads += [(new.row.id, digest, value) for digest, value in new.payloads]
            if new.row.tags:
                tags += tag_values(new.row)
            if new.entries:
                self._insert("keep_entries", 12, new.entries)
        self._insert("append_events", 8, events)
        self._insert("keep_payloads", 3, payloads)
        self._insert("keep_tags", 4, tags)

    def _keep_more(self, appends: Sequence[Append]) -> None:
        """Write what some appends have beside their events."""
        appends = [append for append in appends if has_more(append)]
        payloads = [(append.run, digest, value) for append in appends for digest, value in append.payloads]
        self._insert("keep_payloads", 3, payloads)
        for append in appends:
            if append.row.budget is not None:
                self._run("set_budget", (append.row.budget, append.run))
            if append.checkpoints:
                self._keep_checkpoints(append)
            if append.beside is not None:
                self._insert("keep_answers", 4, append.beside.answers)
                self._insert("keep_entries", 12, append.beside.entries)
            if append.consumed:
                self._run("consume", (append.run, as_json(append.consumed)))

    def _keep_checkpoints(self, append: Append) -> None:
        """Insert new checkpoints, and drop those that are too old by now."""
        self._insert("keep_checkpoints", 8, append.checkpoints)
        self._run("drop_checkpoints", (append.run, append.generation, append.checkpoints_kept))

    def _archive(self, rows: Sequence[ArchiveRow]) -> None:
        """Move damaged rows to where they can do no harm."""
        self._insert("archive", 7, rows)
        for row in rows:
            if row.what == "checkpoint":
                self._run("remove_checkpoint", (row.run, row.generation, row.seq))

    def _follow(self, news: Sequence[NewRun]) -> None:
        followed = [(new.row.id, new.follower, new.follower_call) for new in news if new.follower is not None]
        self._insert("follow", 3, followed)

    def _insert(self, name: str, width: int, rows: Sequence[Row]) -> int:
        """Insert rows and return how many were new."""
        return self._insert_flat(name, width, list(chain.from_iterable(rows))) if rows else 0

    def _insert_flat(self, name: str, width: int, values: Sequence[Any]) -> int:
        """Insert rows that stand one behind the other, and return how many were new."""
        inserted = 0
        for sql, parameters in batches(name, width, values):
            self._cursor.execute(sql, parameters)
            inserted += self._connection.changes()
        return inserted

    def _update(self, name: str, rows: Sequence[Row]) -> int:
        """Update a row of `runs` for each row of parameters, and return how many were as expected.

        One by one: a join with all of them takes twice as long.
        """
        if not rows:
            return 0
        before = self._connection.total_changes()
        self._cursor.executemany(query(name), rows)
        changed: int = self._connection.total_changes() - before
        return changed

    def _run(self, name: str, parameters: Row) -> None:
        self._cursor.execute(query(name), parameters)

    def _all(self, name: str, parameters: Row) -> list[Row]:
        rows: list[Row] = self._cursor.execute(query(name), parameters).fetchall()
        return rows
