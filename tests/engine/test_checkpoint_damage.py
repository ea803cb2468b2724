"""A damaged checkpoint is archived and passed over for the next older one: the same result, or a person is asked."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import msgspec
import pytest

import everstep
from everstep import step, workflow
from everstep.engine.code.recovery_point import load_past
from everstep.errors import Damaged
from everstep.model.digests import chain_next, chain_start, checkpoint_digest
from everstep.model.events import EventRow
from everstep.stores.protocol import CheckpointRow
from everstep.testing.clock import FakeClock
from tests.engine.checkpoint_helpers import KeepingStore, account, existing, recovered, replayed_whole, with_events
from tests.engine.lives import RUN, cut, live
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import GATES, NOTES, act


@dataclass
class Sum:
    todo: list[int]
    total: int = 0


@step
async def add(number: int) -> int:
    await act(f"add {number}")
    return number


@workflow
async def adding(numbers: list[int]) -> int:
    state = Sum(numbers)
    while state.todo:
        state = await everstep.checkpoint(state)
        state.total += await add(state.todo.pop(0))
    return state.total


# -- every bit --------------------------------------------------------------------------------------------------------


class Damage:
    """A run of a few steps that stands after its newest checkpoints, and stores that differ from it in a bit."""

    def __init__(self) -> None:
        store = KeepingStore()
        life = asyncio.run(live(store, FakeClock(), adding, ([1, 2, 3, 4, 5],)))
        assert life.value == 15
        self.count = [event.seq for event in life.events if event.kind == "checkpoint_taken"][-1] + 1
        self.rows = sorted(store.every)[-3:]
        self.store = cut(store, self.count)
        self.row = existing(self.store, RUN)
        self.put(self.rows)
        past, replayed = recovered(self.store, adding)
        assert past.checkpoint is not None
        assert (past.checkpoint.seq, past.damaged) == (self.rows[-1].seq, [])
        replayed.execution.evict()
        whole = replayed_whole(self.store, adding)
        self.expected = account(whole)
        whole.execution.evict()

    def put(self, rows: list[CheckpointRow]) -> None:
        self.store.put_checkpoints(rows)

    def judge(self, rows: list[CheckpointRow], used: int, damaged: set[int], *, replay: bool) -> None:
        """Recover from these checkpoints: just the one that is meant is used, and the others are told of."""
        self.put(rows)
        past = load_past(self.store, self.row)
        assert (past.checkpoint.seq if past.checkpoint else 0) == used
        assert {one.seq for one in past.damaged} == damaged
        if replay:
            _, replayed = recovered(self.store, adding)
            assert account(replayed) == self.expected
            replayed.execution.evict()


@pytest.fixture(scope="module")
def damage() -> Damage:
    return Damage()


def flipped(value: Any) -> Iterator[Any]:
    """Give a value with each of its bits flipped, one after the other."""
    if isinstance(value, int):
        for bit in range(64):
            other = value ^ (1 << bit)
            yield other - (1 << 64) if other >= 1 << 63 else other
        return
    data = value.encode() if isinstance(value, str) else value
    for place in range(len(data) * 8):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << (place % 8)
        yield changed.decode("latin-1") if isinstance(value, str) else bytes(changed)


@pytest.mark.parametrize("column", CheckpointRow._fields)
def test_whichever_bit_of_the_newest_is_flipped_the_next_older_one_is_used(damage: Damage, column: str) -> None:
    oldest, middle, newest = damage.rows
    flips = list(flipped(getattr(newest, column)))
    assert len(flips) >= 56
    for number, value in enumerate(flips):
        bad = newest._replace(**{column: value})
        if column == "seq" and value in (oldest.seq, middle.seq):
            continue  # a key is there once
        # Under another number the row itself is damaged, if anybody looks there, and the one of its event is missing.
        told = {newest.seq, value} if column == "seq" and value > middle.seq else {newest.seq}
        damage.judge([oldest, middle, bad], middle.seq, told, replay=number % 16 == 0)


@pytest.mark.parametrize("column", ["previous", "engine", "state", "digest", "complete"])
def test_with_two_or_all_three_damaged_the_last_good_one_or_the_whole_history_is_used(
    damage: Damage, column: str
) -> None:
    oldest, middle, newest = damage.rows
    for number, values in enumerate(zip(*(list(flipped(getattr(row, column))) for row in damage.rows), strict=False)):
        bad = [row._replace(**{column: value}) for row, value in zip(damage.rows, values, strict=True)]
        damage.judge([oldest, bad[1], bad[2]], oldest.seq, {middle.seq, newest.seq}, replay=number % 32 == 0)
        if number % 8 == 0:
            damage.judge(bad, 0, {row.seq for row in damage.rows}, replay=number % 32 == 0)


def test_whichever_rows_are_missing_the_newest_that_is_there_is_used(damage: Damage) -> None:
    for count in range(4):
        for left in combinations(damage.rows, count):
            used = max((row.seq for row in left), default=0)
            missing = {row.seq for row in damage.rows if row.seq > used}
            damage.judge(list(left), used, missing, replay=True)


def resealed(row: CheckpointRow, **changes: Any) -> CheckpointRow:
    """Return another checkpoint whose own digest is right."""
    other = row._replace(**changes)
    place = (other.run, other.generation, other.seq)
    return other._replace(digest=checkpoint_digest(*place, other.previous, other.engine, other.state))


def test_a_row_that_agrees_with_itself_but_not_with_its_event_is_passed_over(damage: Damage) -> None:
    oldest, middle, newest = damage.rows
    for bad in (
        resealed(newest, state=middle.state),
        resealed(newest, engine=middle.engine),
        resealed(newest, previous=middle.previous),
        resealed(middle, seq=newest.seq),
        newest._replace(digest=middle.digest),
        middle._replace(seq=newest.seq),
    ):
        damage.judge([oldest, middle, bad], middle.seq, {newest.seq}, replay=True)


def test_a_row_of_nowhere_is_passed_over(damage: Damage) -> None:
    oldest, middle, newest = damage.rows
    for seq in (newest.seq + 1, newest.seq + 50, oldest.seq - 1):
        stray = resealed(newest, seq=seq)
        told = {seq} if seq > newest.seq else set()
        damage.judge([oldest, middle, newest, stray], newest.seq, told, replay=True)


def test_with_any_bit_of_its_event_flipped_no_checkpoint_makes_up_for_the_history(damage: Damage) -> None:
    """What a checkpoint says is never believed against the chain of events."""
    damage.put(damage.rows)
    events = damage.store.events(RUN, 1)
    place = damage.rows[-1].seq - 1
    sound = events[place]
    for column in ("body", "digest", "kind", "at"):
        for value in flipped(getattr(sound, column)):
            events[place] = sound._replace(**{column: value})
            with pytest.raises(Damaged) as found:
                load_past(with_events(damage.store, events), damage.row)
            assert found.value.last_good == sound.seq - 1


def test_a_cut_tail_a_foreign_event_and_an_edited_row_are_found_behind_a_checkpoint(damage: Damage) -> None:
    damage.put(damage.rows)
    sound, row = damage.store.events(RUN, 1), damage.row
    last = sound[-1]
    digest = chain_next(last.digest, last.seq + 1, "heartbeat", "add", last.at, b'{"call":1,"attempt":1}')
    foreign = EventRow(last.seq + 1, "heartbeat", "add", last.at, b'{"call":1,"attempt":1}', digest)
    for tail, changed in (
        (sound[:-1], row),
        ([*sound, foreign], row),
        (sound, msgspec.structs.replace(row, head_seq=row.head_seq + 1)),
        (sound, msgspec.structs.replace(row, head_digest=b"\x00" * 16)),
        (sound, msgspec.structs.replace(row, status="completed")),
        (sound, msgspec.structs.replace(row, workflow="another")),
    ):
        with pytest.raises(Damaged):
            load_past(with_events(damage.store, tail), changed)


def test_a_beginning_that_the_checkpoints_do_not_know_is_not_mixed_with_them(damage: Damage) -> None:
    """Somebody has put another beginning there, with digests that fit each other."""
    damage.put(damage.rows)
    events = damage.store.events(RUN, 1)
    first = next(event.seq for event in events if event.kind == "checkpoint_taken")
    digest = chain_start(RUN, 1)
    for place, (seq, kind, name, at, body, _) in enumerate(events[:first]):
        changed = body.replace(b"[1,2,3,4,5]", b"[1,2,3,4,9]")
        digest = chain_next(digest, seq, kind, name, at, changed)
        events[place] = EventRow(seq, kind, name, at, changed, digest)
    with pytest.raises(Damaged) as found:
        load_past(with_events(damage.store, events), damage.row)
    assert found.value.last_good == first


# -- real stores ------------------------------------------------------------------------------------------------------


async def stopped_in_the_loop(machine: Machine, at: int = 7, run: str = "r") -> list[int]:
    """Leave a run behind whose process died in the middle of its loop; return its checkpoints."""
    gate = GATES[f"add {at}"] = Gate()
    app, _ = await machine.start(adding, list(range(10)), id=run)
    await gate.reached.wait()
    await machine.until(lambda: app.drivers[run].writer.all_is_durable)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    return [event.seq for event in machine.events(run) if event.kind == "checkpoint_taken"]


def kept(machine: Machine, run: str = "r") -> list[CheckpointRow]:
    """Return the checkpoints of a run, the newest first."""
    found: list[CheckpointRow] = []
    while (row := machine.store.checkpoint(run, 1, found[-1].seq if found else 2**62)) is not None:
        found.append(row)
    return found


def flip(machine: Machine, seq: int, column: str, place: int) -> None:
    """Flip a bit of a checkpoint in the file."""
    (row,) = [one for one in kept(machine) if one.seq == seq]
    values = list(flipped(getattr(row, column)))
    machine.sql(
        f"UPDATE checkpoints SET {column} = ? WHERE run = 'r' AND seq = ?",  # a column of ours
        values[place % len(values)],
        seq,
    )


PLACES = [(column, place) for column in ("previous", "engine", "state", "digest", "complete") for place in (0, 7, 61)]


@pytest.mark.parametrize(("column", "place"), PLACES)
async def test_a_damaged_checkpoint_is_archived_whole_with_a_note_and_the_result_is_the_same(
    machine: Machine, column: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    seqs = await stopped_in_the_loop(machine)
    flip(machine, seqs[-1], column, place)
    damaged, second, third = kept(machine)
    with caplog.at_level(logging.WARNING):
        app = await machine.worker()
        assert await app.get("r").result(timeout=60) == 45
    assert f"The checkpoint at event {seqs[-1]} of run r was not used" in caplog.text
    assert NOTES == ["add 7", "add 8", "add 9"], "what had finished after the older one is not done again"
    (archived,) = machine.store.archived("r")
    assert archived[:4] == ("r", 1, "checkpoint", seqs[-1])
    assert archived.columns() == damaged._asdict(), "nothing of it is lost"
    (note,) = machine.bodies("r", "checkpoint_damaged")
    assert (note.checkpoint, note.why, note.archived) == (seqs[-1], archived.why, True)
    assert {second.seq, third.seq} & {row.seq for row in kept(machine)} or len(kept(machine)) == 3
    assert machine.replay("r").differences == []


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("how", ["flipped", "missing"])
async def test_with_one_two_or_all_three_gone_the_result_is_the_same_and_it_is_said_once(
    machine: Machine, how: str, count: int
) -> None:
    seqs = await stopped_in_the_loop(machine)
    for number, seq in enumerate(seqs[-count:]):
        if how == "missing":
            machine.sql("DELETE FROM checkpoints WHERE run = 'r' AND seq = ?", seq)
        else:
            flip(machine, seq, "state", 3 * number)
    GATES["add 7"] = Gate()
    app = await machine.worker()
    await GATES["add 7"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    assert [body.checkpoint for body in machine.bodies("r", "checkpoint_damaged")] == seqs[-count:]
    await machine.kill(app)
    GATES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 45
    assert [body.checkpoint for body in machine.bodies("r", "checkpoint_damaged")] == seqs[-count:], "not again"
    assert len(machine.store.archived("r")) == (count if how == "flipped" else 0)
    assert NOTES == ["add 7", "add 7", "add 8", "add 9"]
    assert machine.replay("r").differences == []
    assert (await app.get("r").verify()).sound


async def test_with_all_three_and_the_history_damaged_the_run_is_held_and_nothing_is_changed(machine: Machine) -> None:
    seqs = await stopped_in_the_loop(machine)
    for seq in seqs[-3:]:
        flip(machine, seq, "engine", 11)
    machine.sql("UPDATE events SET body = x'7b7d' WHERE run = 'r' AND seq = 5")
    before = machine.dump()
    rows = kept(machine)
    await machine.worker()
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "damaged"
    assert machine.report("r")["last_good"] == 4
    assert NOTES == []
    after = machine.dump()
    assert {table: after[table] for table in ("events", "payloads", "signals")} == {
        table: before[table] for table in ("events", "payloads", "signals")
    }
    assert (kept(machine), machine.store.archived("r")) == (rows, [])


async def test_a_damaged_checkpoint_is_told_by_verify_before_anybody_recovers(machine: Machine) -> None:
    seqs = await stopped_in_the_loop(machine)
    flip(machine, seqs[-2], "state", 5)
    app = await machine.boot()
    found = await app.get("r").verify()
    assert not found.sound
    assert found.problem == (f"The checkpoint at event {seqs[-2]} of run r is damaged: it does not match its digest.")


async def test_whoever_only_looks_archives_nothing(machine: Machine) -> None:
    seqs = await stopped_in_the_loop(machine)
    flip(machine, seqs[-1], "state", 5)
    rows, before = kept(machine), machine.dump()
    past, replayed = recovered(machine.store, adding, "r")
    replayed.execution.evict()
    assert [one.seq for one in past.damaged] == [seqs[-1]]
    assert (kept(machine), machine.dump()) == (rows, before)
