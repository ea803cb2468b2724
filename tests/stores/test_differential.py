"""Random operations give equal verdicts and equal reads on every store, with a model as the reference."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from everstep.model.forked import TAG
from everstep.model.status import ENDED, STATUSES
from everstep.stores.protocol import (
    LAST,
    Append,
    Claim,
    Claimed,
    Failed,
    HoldRow,
    MarkRestored,
    Needs,
    NewRun,
    Operation,
    Post,
    Release,
    RepairRun,
    RestartRun,
    RunFilter,
    RunRow,
    StartRun,
    Store,
    Verdict,
)
from everstep.stores.rows.answers_and_streams import AnswerRow, Beside, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import (
    EffectFilter,
    ForgetKeys,
    KeyChanges,
    KeyClaim,
    KeyEnd,
    KeyShare,
    KeyUndoing,
    KeyWait,
    SettleKey,
)
from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, TakeSlot
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow
from everstep.stores.rows.transfer import ClaimFamily, DeletePart
from everstep.stores.sqlite.commits import Transaction
from tests.stores.kit import (
    HARNESSES,
    Harness,
    ModelHarness,
    SqliteHarness,
    append_to,
    checkpoint_for,
    events_after,
    new_run,
    with_history,
)

TARGETS = ["t1", "t2"]
QUEUES = ["mail", "else"]
RUNS = ["a", "b", "c", "d", "e"]
WORKERS = ["w0", "w1", "w2"]
Draw = Callable[[st.SearchStrategy[Any]], Any]

runs = st.sampled_from(RUNS)
statuses = st.sampled_from(STATUSES)
times = st.integers(0, 40)
maybe_times = st.none() | times
small_bytes = st.sampled_from([b"", b"1", b"\x00\xff"])


@st.composite
def posts(draw: Draw) -> Post:
    kind = draw(st.sampled_from(["signal", "signal", "cancel", "hold", "request"]))
    return Post(draw(runs), kind, "n", draw(st.sampled_from(["", "", "i", "j"])), draw(small_bytes), draw(times))


tagged = st.dictionaries(st.sampled_from(["t", "u", "key"]), st.sampled_from(["1", "2"]))
forked = st.just({}) | st.builds(lambda run, seq: {TAG: f"{run}@{seq}"}, runs, st.integers(1, 9))


@st.composite
def new_runs(draw: Draw, follower: str | None = None) -> NewRun:
    new = new_run(
        draw(runs),
        workflow=draw(st.sampled_from(["order", "order", "other"])),
        status=draw(st.sampled_from(["queued", "running", "waiting"])),
        owner=draw(st.none() | st.sampled_from(WORKERS)),
        wake_at=draw(maybe_times),
        priority=draw(st.integers(-1, 1)),
        queue=draw(st.sampled_from(["default", "default", *QUEUES])),
        created_at=draw(times),
        arguments=draw(st.sampled_from(["x", "x", "y"])),
        parent=draw(st.none() | runs),
        budget=draw(st.none() | st.just(b'{"used":0}')),
        tags={**draw(tagged), **draw(forked)},
        follower=follower or draw(st.none() | runs),
        follower_call=draw(st.integers(1, 2)),
        payloads=draw(st.lists(st.tuples(st.sampled_from(["p", "q"]), small_bytes), max_size=2)),
    )
    more = draw(st.integers(0, 2))
    return with_history(new, more) if more else new


@st.composite
def notifications(draw: Draw, hold: str, run: str) -> NotificationRow:
    target = draw(st.sampled_from(TARGETS))
    next_at, created_at = draw(times), draw(times)
    return NotificationRow(
        id=f"{hold}-{target}", hold=hold, run=run, target=target, next_at=next_at, created_at=created_at
    )


def drawn_notifying(draw: Draw) -> Operation:
    """Take or settle a notification that may be there."""
    id = f"{draw(st.sampled_from(['h', 'i']))}-{draw(st.sampled_from(TARGETS))}"
    attempt = draw(st.integers(1, 3))
    if draw(st.booleans()):
        return TakeNotification(id, attempt, draw(st.sampled_from(WORKERS)), draw(times), draw(times))
    state = draw(st.sampled_from(["sent", "pending", "pending", "given up"]))
    return SettleNotification(id, attempt, state, draw(times), draw(st.sampled_from(["", "HTTP 500"])))


@st.composite
def schedule_changes(draw: Draw) -> ChangeSchedule:
    """Create, change or delete a schedule that may be there."""
    name, revision = draw(st.sampled_from("st")), draw(st.integers(0, 2))
    row = ScheduleRow(
        name=name,
        workflow=draw(st.sampled_from(["order", "other"])),
        revision=revision + 1,
        next_at=draw(maybe_times),
        waits=draw(st.booleans()),
        state=draw(small_bytes),
    )
    starts, sent = draw(st.lists(new_runs(), max_size=2)), draw(st.lists(posts(), max_size=2))
    return ChangeSchedule(name, revision, draw(st.sampled_from([row, row, row, None])), starts, sent)


KEYS = ["k", "l"]
keys = st.sampled_from(KEYS)
calls = st.integers(1, 3)


@st.composite
def claims(draw: Draw) -> KeyClaim:
    effect = draw(st.sampled_from(["repeat", "once"]))
    return KeyClaim(
        draw(keys), draw(calls), draw(times), "charge", draw(st.sampled_from("xy")), effect, draw(st.integers(0, 1))
    )


@st.composite
def key_changes(draw: Draw) -> KeyChanges:
    def some(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return list(draw(st.lists(strategy, max_size=2)))

    outcomes = st.sampled_from([None, None, b"1", b"\x00"])
    ends = st.builds(KeyEnd, claims(), outcomes, st.just("h"))
    waits = st.builds(KeyWait, keys, calls)
    undoing = st.builds(KeyUndoing, keys, calls, st.sampled_from(["begun", "undone", "kept"]))
    shares = some(st.builds(KeyShare, keys, calls, st.just("h"))) if draw(st.integers(0, 3)) == 0 else []
    relies = some(keys) if draw(st.integers(0, 3)) == 0 else []
    return KeyChanges(some(claims()), some(ends), some(waits), shares, some(undoing), relies)


def drawn_append(draw: Draw, harness: Harness) -> Append | None:
    row = harness.store.run(draw(runs))
    if row is None:
        return None
    if draw(st.booleans()):
        return drawn_move(draw, row)
    fields: dict[str, Any] = {}
    if draw(st.integers(0, 4)) == 0:
        fields["hold"] = HoldRow(
            id=draw(st.sampled_from(["h", "i"])),
            run=row.id,
            reason=draw(st.sampled_from(["diverged", "drift"])),
            created_at=draw(times),
            resolved_at=draw(maybe_times),
        )
        fields["notifications"] = draw(st.lists(notifications(fields["hold"].id, row.id), max_size=2))
    if draw(st.integers(0, 3)) == 0:
        fields["starts"] = draw(st.lists(new_runs(follower=row.id), max_size=3))
        fields["posts"] = draw(st.lists(posts(), max_size=2))
    if draw(st.integers(0, 1)) == 0:
        fields["keys"] = draw(key_changes())
    status = draw(statuses)
    append = append_to(
        row,
        draw(st.integers(0, 3)),
        status,
        draw(times),
        wake_at=draw(maybe_times),
        published=draw(st.none() | small_bytes),
        budget=draw(st.none() | st.sampled_from([b"{}", b'{"used":1}'])),
        outcome=draw(st.none() | st.sampled_from([b"1", b"null"])) if status in ENDED else None,
        payloads=draw(st.lists(st.tuples(st.sampled_from(["p", "q"]), small_bytes), max_size=2)),
        consumed=draw(st.lists(st.integers(1, 9), max_size=3)),
        release=draw(st.booleans()),
        **fields,
    )
    if append.events and draw(st.booleans()):
        places = draw(st.lists(st.integers(0, len(append.events) - 1), unique=True, max_size=3))
        append.checkpoints = [checkpoint_for(append, place, state=draw(small_bytes)) for place in places]
        append.checkpoints_kept = draw(st.integers(1, 3))
    if draw(st.integers(0, 5)) == 0:
        what, seq = draw(st.sampled_from(["checkpoint", "event"])), draw(st.integers(1, 8))
        append.archive = [ArchiveRow(row.id, row.generation, what, seq, draw(small_bytes), "why", draw(times))]
    if draw(st.integers(0, 2)) == 0:
        append.beside = drawn_beside(draw, row)
    if status == "running" and not append.release and draw(st.integers(0, 2)) == 0:
        append.renewal = new_run(row.id, generation=row.generation + 1, status="running", arguments="x")
    append.epoch += draw(st.sampled_from([0] * 9 + [1]))
    append.generation += draw(st.sampled_from([0] * 12 + [1]))
    return append


def drawn_move(draw: Draw, row: RunRow) -> Append:
    """An append that brings nothing but events, as most do."""
    status = draw(st.sampled_from(["running", "running", "running", "waiting", "completed"]))
    append = append_to(
        row,
        draw(st.integers(1, 5)),
        status,
        draw(times),
        wake_at=draw(maybe_times) if status == "waiting" else None,
        published=draw(st.none() | small_bytes),
        progress=draw(st.sampled_from([True, True, True, False])),
        stays=draw(st.booleans()),
        outcome=b"1" if status == "completed" else None,
    )
    append.epoch += draw(st.sampled_from([0] * 9 + [1]))
    append.plain = status == "running" and append.row.stays and append.row.progress and draw(st.booleans())
    return append


def drawn_beside(draw: Draw, row: RunRow) -> Beside:
    """Answers and entries, some of which are there already."""
    numbers = draw(st.lists(st.integers(1, 4), max_size=2))
    places = draw(st.lists(st.tuples(st.sampled_from(["s", "t"]), st.integers(1, 5)), max_size=3))
    facts = draw(st.integers(1, 6)), draw(st.sampled_from(["", "ask"])), draw(st.integers(0, 2)), 0, 1, draw(times)
    return Beside(
        [AnswerRow(row.id, number, row.generation, draw(st.integers(1, 6))) for number in numbers],
        [EntryRow(row.id, row.generation, *place, *facts, draw(small_bytes), b"d") for place in places],
    )


def drawn_repair(draw: Draw, harness: Harness, row: RunRow | None) -> RepairRun | None:
    if row is None or row.generation > 3:
        return None
    kept = harness.store.events(row.id, row.generation)[: draw(st.integers(1, 4))]
    event = None if draw(st.booleans()) else events_after(kept[-1].seq, kept[-1].digest, 1, b"repaired")[0]
    last = event or kept[-1]
    status = draw(statuses)
    ended_at = 7 if status in ENDED else None
    new = msgspec.structs.replace(row, head_seq=last.seq, head_digest=last.digest, status=status, ended_at=ended_at)
    return RepairRun(
        epoch=row.epoch - draw(st.sampled_from([0, 0, 0, 1])),
        worker=draw(st.sampled_from(WORKERS)),
        at=draw(times),
        row=new,
        keep=len(kept),
        event=event,
        payloads=draw(st.lists(st.sampled_from("pqr"), max_size=2)),
        pending=draw(st.lists(st.integers(1, 9), max_size=3)),
        why="why",
    )


def drawn_queueing(draw: Draw) -> Operation:
    """Change a queue or limit, or take or free a slot."""
    kind = draw(st.sampled_from(["change", "change", "take", "take", "free"]))
    name, worker = draw(st.sampled_from(QUEUES)), draw(st.sampled_from(WORKERS))
    if kind == "take":
        return TakeSlot(name, draw(runs), draw(calls), worker, draw(times))
    if kind == "free":
        return FreeSlot(name, draw(runs), draw(calls), worker)
    counts = st.none() | st.integers(0, 2)
    changes = {
        "concurrency": counts,
        "per_worker": counts,
        "per_key": counts,
        "rate": st.none() | st.integers(1, 2),
        "seconds": st.sampled_from([0.00001, 0.00002]),
        "paused": st.sampled_from([False, False, False, True]),
    }
    named = draw(st.lists(st.sampled_from(sorted(changes)), unique=True, max_size=3))
    return ChangeQueue(
        draw(st.sampled_from(["queue", "queue", "limit"])),
        name,
        {one: draw(changes[one]) for one in named},
        draw(times),
    )


def drawn_operation(draw: Draw, harness: Harness) -> "Operation | None":
    others = ["start", "start", "post", "post", "claim", "release", "restart", "settle", "forget", "repair", "mark"]
    others += ["notify"] * 3 + ["delete"] + ["family"] * 2 + ["schedule"] * 2 + ["queue"] * 3 + ["claim"] * 2
    kind = draw(st.sampled_from(["append"] * 6 + others))
    if kind == "notify":
        return drawn_notifying(draw)
    if kind == "schedule":
        change: ChangeSchedule = draw(schedule_changes())
        return change
    if kind == "queue":
        return drawn_queueing(draw)
    if kind == "append":
        return drawn_append(draw, harness)
    if kind == "start":
        needs = st.builds(Needs, st.lists(runs, max_size=2), st.lists(keys, max_size=1))
        return StartRun(draw(new_runs()), draw(st.none() | st.none() | needs))
    if kind == "post":
        post: Post = draw(posts())
        return post
    if kind == "settle":
        return SettleKey(draw(keys), draw(times), draw(st.sampled_from([None, b"2"])), "h", "ann")
    if kind == "forget":
        return ForgetKeys(draw(times), draw(st.integers(0, 2)))
    if kind == "mark":
        return MarkRestored(draw(st.integers(0, 2)))
    if kind == "family":
        named = draw(st.lists(runs, min_size=1, max_size=3, unique=True))
        epochs = {one.id: one.epoch for one in harness.store.rows(named)}
        return ClaimFamily(epochs, draw(st.sampled_from(WORKERS)), draw(times), draw(times)) if epochs else None
    row = harness.store.run(draw(runs))
    if kind == "repair":
        return drawn_repair(draw, harness, row)
    if kind == "claim":
        wanted = draw(st.lists(statuses, max_size=7))
        how = draw(st.booleans()), draw(st.sampled_from([None, None, ["mail"]]))
        is_deleting = draw(st.sampled_from([False, False, True]))
        return Claim(
            draw(runs), draw(st.sampled_from(WORKERS)), draw(times), wanted or list(STATUSES), *how, is_deleting
        )
    if row is None:
        return Release("none", 0, "queued")
    epoch = row.epoch - draw(st.sampled_from([0, 0, 0, 1]))
    if kind == "delete":
        return DeletePart(row.id, epoch, draw(times), 1_000)
    if kind == "release":
        return Release(row.id, epoch, draw(st.sampled_from(["queued", "running", "waiting", "held"])))
    return RestartRun(
        epoch, new_run(row.id, generation=row.generation + 1, arguments="x", follower=draw(st.none() | runs))
    )


def drawn_change_of_workers(draw: Draw, harnesses: Sequence[Harness], living: set[str]) -> None:
    """Let workers come, go, die and be buried, in all stores alike."""
    worker, lease = draw(st.sampled_from(WORKERS)), draw(times)
    action = draw(st.sampled_from(["enter", "kill", "leave", "renew", "bury"]))
    if action == "enter" and worker not in living:
        living.add(worker)
        for harness in harnesses:
            harness.enter(worker, lease)
    elif action == "kill" and worker in living:
        living.remove(worker)
        for harness in harnesses:
            harness.kill(worker)
    elif action == "renew":
        same([harness.store.renew(worker, lease) for harness in harnesses])
    elif action == "bury":
        same([harness.store.bury_dead(0) for harness in harnesses])
    elif action == "leave" and worker not in living:
        for harness in harnesses:
            harness.store.bury_dead(0)
            harness.store.leave(worker)


def same(results: Sequence[Any]) -> None:
    """Assert that all stores said the same."""
    for result in results[1:]:
        assert result == results[0]


def comparable(verdicts: list[Verdict], store: Store) -> list[Any]:
    """Return verdicts, without the texts of errors, and without what claims have read, which is compared here."""
    for verdict in verdicts:
        if isinstance(verdict, Claimed) and verdict.past is not None:
            row, past = verdict.row, verdict.past
            assert past == (store.events(row.id, row.generation), store.inbox(row.id))
    shown = ["failed" if isinstance(verdict, Failed) else verdict for verdict in verdicts]
    return [Claimed(one.row) if isinstance(one, Claimed) else one for one in shown]


def everything(store: Store) -> dict[str, Any]:
    """Return all that a store tells."""
    told: dict[str, Any] = {"counts": store.counts(), "workers": store.workers(), "strays": store.strays()}
    told["restores"] = store.restores()
    told["rows"] = sorted(store.rows(["none", *RUNS[1:]]), key=lambda row: row.id)
    told["holds"] = [store.holds(), store.holds(open_only=False)]
    told["notifications"] = [store.notifications(), store.notifications(undelivered_only=False)]
    for target in TARGETS:
        told[f"next {target}"] = store.next_notification(target=target)
        told[f"due {target}"] = [store.due_notifications(target=target, at=at, limit=2) for at in (5, 20, 40)]
    told["schedules"] = [store.schedules(), store.schedules(name="s")]
    told["due schedules"] = [store.due_schedules(at=at, workflows=["order"], limit=1) for at in (5, 20, 40)]
    told["next schedule"] = [store.next_schedule(workflows=names) for names in ([], ["order"], ["order", "other"])]
    told["asking"] = store.asking()
    told["deletions"] = [store.deletions(), [store.is_being_deleted(run) for run in RUNS]]
    told["needed"] = [store.is_needed(family) for family in ([], *map(list, RUNS), RUNS[:2], RUNS[1:4], RUNS)]
    told["diverged"] = store.diverged(["order", "other"], 2)
    told["keys"] = [(store.effect(key), store.waiters(key)) for key in KEYS]
    told["old keys"] = [store.old_keys(at) for at in (5, 20, 40)]
    told["effects"] = [store.effects(EffectFilter(**wanted)) for wanted in ({}, {"run": "a"}, {"state": "done"})]
    for run in RUNS:
        told[run] = [
            store.run(run),
            [store.events(run, generation) for generation in range(1, 4)],
            [store.events(run, 1, first, last) for first, last in ((1, 1), (2, 3), (3, 99), (5, 4))],
            [store.events(run, 1, only=[1, 3, 2]), store.events(run, 1, 2, 3, only=[1, 3, 4]), store.generations(run)],
            [store.payload(run, digest) for digest in "pq"],
            [store.checkpoint(run, generation, before) for generation in (1, 2) for before in (3, 5, LAST)],
            store.archived(run),
            store.inbox(run),
            store.signals(run),
            store.children(run),
            store.holds(run=run),
            store.archived(run),
            store.notifications(run=run),
            [store.answer(run, number) for number in range(1, 5)],
            [store.streams(run, generation) for generation in range(1, 3)],
            [store.stream(run, 1, "s"), store.stream(run, 1, "t", 1, 2), store.stream_head(run, 1, "s")],
            store.dump(run),
            store.ties(run),
        ]
    for wanted in (
        {},
        {"status": ["queued", "completed"]},
        {"tags": {"t": "1"}},
        {"workflow": "other"},
        {"parent": "a"},
        {"text": "A"},
        {"tags": {"t": "1"}, "status": ["queued"], "before": (20, "b")},
    ):
        told[f"runs {wanted}"] = store.runs(RunFilter(limit=3, offset=1, **wanted))
    told["queues"] = [store.queues(), store.queue_counts(), store.slots()]
    for worker in WORKERS:
        told[f"room {worker}"] = [store.queue_room(at=at, worker=worker) for at in (5, 20, 40)]
        told[f"served {worker}"] = [
            store.queue_room(at=20, worker=worker, queues=["mail"]),
            store.due(at=20, workflows=["order"], worker=worker, everyone=True, limit=9, queues=["mail"]),
        ]
        told[f"pending {worker}"] = store.pending(worker)
        for everyone in (False, True):
            told[f"wake {worker} {everyone}"] = store.next_wake(worker=worker, everyone=everyone)
            for at, limit in ((5, 9), (20, 2), (40, 9)):
                told[f"due {worker} {everyone} {at}"] = store.due(
                    at=at, workflows=["order"], worker=worker, everyone=everyone, limit=limit
                )
    for queue in QUEUES:
        for at, limit in ((5, 9), (20, 2), (40, 9)):
            told[f"queued {queue} {at}"] = store.queued(queue, at=at, workflows=["order"], limit=limit)
    return told


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_operations_give_equal_verdicts_and_equal_reads(data: st.DataObject) -> None:
    compare(data, [SqliteHarness])


# Without shrinking, which would take many minutes: a second failure under another seed is often shorter.
@settings(max_examples=30, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_operations_give_equal_verdicts_and_equal_reads_on_every_store(data: st.DataObject) -> None:
    compare(data, list(HARNESSES.values()))


def drawn_batch(draw: Draw, harness: Harness) -> list[Operation]:
    """Any operations or, as most batches are, a move of each of several runs."""
    if draw(st.integers(0, 2)) == 0:
        rows = [harness.store.run(run) for run in RUNS]
        return [drawn_move(draw, row) for row in rows if row is not None and draw(st.booleans())]
    drawn = [drawn_operation(draw, harness) for _ in range(draw(st.integers(1, 6)))]
    return [operation for operation in drawn if operation is not None]


def compare(data: st.DataObject, stores: Sequence[Callable[[Path], Harness]]) -> None:
    """Do random operations on the model and on stores, and compare all that they say."""
    # Also what could be done together is done one by one.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(Transaction, "together", lambda self, operations: None)
        harnesses = [make(Path(folder)) for make in (ModelHarness, *stores)]
        reference = harnesses[0]
        living: set[str] = set()
        try:
            for harness in harnesses:
                harness.now = 15
                harness.do(*[StartRun(new_run(run, status="running", arguments="x")) for run in RUNS[:3]])
            for _ in range(data.draw(st.integers(1, 7), "batches")):
                if data.draw(st.booleans()):
                    drawn_change_of_workers(data.draw, harnesses, living)
                batch = drawn_batch(data.draw, reference)
                verdicts = [harness.store.commit(batch) for harness in harnesses]
                same([comparable(said, harness.store) for said, harness in zip(verdicts, harnesses, strict=True)])
                same([everything(harness.store) for harness in harnesses])
        finally:
            for harness in harnesses:
                harness.close()
