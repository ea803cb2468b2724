"""Repair: what is good is kept, what is not is archived, and what must not happen twice does not."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.engine.app.app import App
from everstep.errors import Damaged, HoldConflict, RunActive, RunHeld
from everstep.stores.protocol import Post
from everstep.stores.sqlite import SqliteStore
from tests.damage import shop
from tests.damage.shop import EXPECTED, RESULT, answer_for, counts
from tests.damage.subject import DONE, FAILED, OPEN, File, copy_of, flip
from tests.damage.test_sweep import ROW_COLUMNS
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw
from tests.worlds.ledger import APPLIED, READS

EVENTS = 19


def damage(machine: Machine, seq: int, run: str = "s") -> None:
    """Flip a bit in the body of an event."""
    (body,) = [event.body for event in machine.events(run) if event.seq == seq]
    machine.sql("UPDATE events SET body = ? WHERE run = ? AND seq = ?", flip(body, 8 * (len(body) // 2)), run, seq)


async def go_on(machine: Machine, app: App, run: str = "s") -> list[str]:
    """Answer what is asked, send what is missing, let time pass; return the questions and at last the result."""
    questions: list[str] = []
    for _ in range(200):
        status = machine.status(run)
        if status == "completed":
            return questions
        if status == "held":
            hold = machine.hold(run)
            questions.append(f"{hold.reason} {hold.step}")
            resolution, value = answer_for(hold)
            await app.resolve(run, resolution, value=value)
        elif status == "waiting":
            await machine.advance(31)
        else:
            await asyncio.sleep(0.01)  # somebody is about to take it up
        await machine.rest(app)
    raise AssertionError((machine.status(run), machine.kinds(run)))


async def prepared(machine: Machine) -> list[Any]:
    """Leave a run behind that waits for its last signal, which is in its inbox. Returns its rows of events."""
    app = await machine.boot()
    await shop.left_at_the_end(machine, app)
    await machine.kill(app)
    machine.store.commit([Post("s", "signal", "end", "", b'["over"]', 1)])
    assert len(machine.events("s")) == EVENTS
    return machine.dump()["events"]


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("seq", range(2, EVENTS + 1))
async def test_wherever_the_damage_is_the_run_comes_to_its_end_and_nothing_happens_twice(
    machine: Machine, seq: int, how: str
) -> None:
    before = await prepared(machine)
    if how == "flipped":
        damage(machine, seq)
    else:
        machine.sql("DELETE FROM events WHERE run = 's' AND seq >= ?", seq)
    damaged = machine.dump()["events"]
    worker = await machine.worker()
    await machine.until_status("s", "held")
    assert (machine.hold("s").reason, machine.report("s")["last_good"]) == ("damaged", seq - 1)

    report = await worker.repair("s", note="a bad disk", by="ann")
    archived = [row for row in machine.store.archived("s") if row.what == "event"]
    assert (report.last_good, report.archived) == (seq - 1, len(archived))
    assert len(archived) == (EVENTS - seq + 1 if how == "flipped" else 0)
    kept = [row for row in machine.dump()["events"] if row[0] == "s"][: seq - 1]
    back = [tuple(row.columns().values()) for row in archived]
    assert sorted([*kept, *back]) == sorted(row for row in damaged if row[0] == "s"), "nothing is lost or changed"
    assert kept == [row for row in before if row[0] == "s"][: seq - 1]
    (repaired,) = machine.bodies("s", "run_repaired")
    assert (repaired.archived, repaired.since, repaired.by, repaired.note) == (len(archived), seq, "ann", "a bad disk")
    assert repaired.lost

    questions = await go_on(machine, worker)
    assert await worker.get("s").result() == RESULT
    assert counts() == EXPECTED, APPLIED
    assert len({key for effect, key in APPLIED if effect == "reserve"}) == 3, "the same keys as before"
    assert all(question == "in-doubt mail" for question in questions)
    assert bool(questions) == ("mail" not in finished(before, seq)), "what is known is not asked"
    assert (await worker.get("s").verify()).sound


def finished(events: list[Any], seq: int) -> set[str]:
    """Return the steps whose outcome stands before an event."""
    return {row[4] for row in events if row[0] == "s" and row[2] < seq and row[3] == "step_completed"}


async def test_the_report_names_what_cannot_be_seen_any_more(machine: Machine) -> None:
    await prepared(machine)
    (started,) = [event.seq for event in machine.events("s") if (event.kind, event.step) == ("step_started", "charge")]
    damage(machine, started + 1)
    (broken,) = [event.seq for event in machine.events("s") if (event.kind, event.step) == ("step_completed", "mail")]
    machine.sql("UPDATE events SET body = x'7b' WHERE run = 's' AND seq = ?", broken)
    app = await machine.boot()
    before = machine.dump()
    report = await app.repair("s", dry_run=True)
    assert machine.dump() == before, "a dry run changes nothing"
    assert [(step.step, step.effect) for step in report.unseen] == [("mail", "once"), ("reserve#2", "repeat")]
    assert [(step.step, step.effect) for step in report.open] == [("charge", "once")]
    assert report.unreadable == 2
    keys = dict(APPLIED)
    assert report.unseen[0].key == keys["mail"]
    assert report.open[0].key == keys["charge"]
    assert (report.status, report.last_good) == ("queued", started)


async def test_a_step_that_was_lost_with_its_worker_alive_is_not_done_again_whatever_the_probe_says(
    machine: Machine,
) -> None:
    """The worker that began it in the archived part still exists, so it may still act."""
    await prepared(machine)
    other = "elsewhere-1-0000000000-1.00000001"  # of a process that cannot be seen from here
    machine.store.register_worker(other, 1, "elsewhere", machine.clock.now() + 3_600_000_000)
    (started,) = [event.seq for event in machine.events("s") if (event.kind, event.step) == ("step_started", "charge")]
    (body,) = [event.body for event in machine.events("s") if event.seq == started]
    facts = msgspec.json.decode(body)
    facts["by"] = other
    machine.sql("UPDATE events SET body = ? WHERE run = 's' AND seq = ?", msgspec.json.encode(facts), started)
    APPLIED[:] = [entry for entry in APPLIED if entry[0] != "charge"]
    worker = await machine.worker()
    await machine.until_status("s", "held")
    await worker.resolve("s", "repair", note="again")
    await machine.until(lambda: machine.status("s") == "held" and "run_repaired" in machine.kinds("s"))
    hold = machine.hold("s")
    assert (hold.reason, hold.step) == ("in-doubt", "charge")
    assert other in hold.summary
    assert counts()["charge"] == 0


# -- accepting --------------------------------------------------------------------------------------------------------
async def test_accepting_ends_the_questions_of_a_repaired_run(machine: Machine) -> None:
    await prepared(machine)
    machine.sql("DELETE FROM events WHERE run = 's' AND seq >= 5")
    APPLIED.clear()
    worker = await machine.worker()
    await machine.until_status("s", "held")
    await worker.repair("s")
    await machine.until(lambda: machine.status("s") == "held")
    hold = machine.hold("s")
    assert (hold.reason, hold.step) == ("in-doubt", "mail")
    assert set(hold.resolutions) == {"done", "not-done", "accept", "cancel"}
    assert counts() == {"reserve": 1, "charge": 1}, "its probe was asked, and said that it had not happened"
    await worker.resolve("s", "accept", by="ann")
    await machine.until(lambda: "child_started" in machine.kinds("s"))
    assert counts()["mail"] == 1
    assert machine.replay("s").execution.caution == ""


# -- rows -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("run", [OPEN, DONE, FAILED])
async def test_a_damaged_row_is_made_anew_from_the_events(original: Path, tmp_path: Path, run: str) -> None:
    """Every covered column but the id: afterwards the row says again what it said."""

    async def one(folder: Path, column: str, bit: int) -> None:
        file = File(copy_of(original, folder))
        (row,) = file.rows("runs", "id = ?", run)
        target = "CAST(? AS TEXT)" if isinstance(row[column], str) else "?"
        sql = f"UPDATE runs SET {column} = {target} WHERE rowid = ?"
        file.raw.execute(sql, (flip(row[column], bit), row["rowid_"]))
        events = file.rows("events", "run = ?", run)
        app = App(SqliteStore(file.path), workflows=())
        await app.open()
        report = await app.repair(run, by="ann")
        assert report.problem
        assert (report.archived, report.last_good) == (0, len(events))
        assert (await app.get(run).verify()).sound
        (after,) = file.rows("runs", "id = ?", run)
        same = set(ROW_COLUMNS) - {"head_seq", "head_digest", "status"}
        assert {name: after[name] for name in same} == {name: row[name] for name in same}
        if run == OPEN:
            (event,) = file.rows("events", "run = ? AND seq = ?", run, len(events) + 1)
            assert event["kind"] == "run_repaired"
            # Only a head whose digest fits the last event says for sure that nothing came after it.
            assert (b'"lost":true' in event["body"]) == (column == "head_digest")
        else:
            assert file.rows("events", "run = ?", run) == events, "a history that has ended stays as it is"
            assert (after["status"], after["head_seq"]) == (row["status"], row["head_seq"])
        await app.close()
        file.close()

    file = File(original)
    (row,) = file.rows("runs", "id = ?", run)
    file.close()
    for column in ROW_COLUMNS:
        for bit in (0, 7) if column != "id" and row[column] not in (None, "") else ():
            await one(tmp_path / f"{column}-{bit}", column, bit)


async def test_a_sound_run_is_left_alone(machine: Machine) -> None:
    await prepared(machine)
    app = await machine.boot()
    before = machine.dump()
    report = await app.repair("s")
    assert (report.problem, report.archived) == ("", 0)
    assert machine.dump()["runs"] == before["runs"]
    assert machine.dump()["events"] == before["events"]


async def test_a_run_that_somebody_drives_is_not_repaired_under_their_hands(machine: Machine) -> None:
    driver = await machine.boot()
    await shop.left_at_the_end(machine, driver)
    machine.sql("UPDATE events SET body = x'7b7d' WHERE run = 's' AND seq = 9")
    other = await machine.boot()
    before = machine.dump()
    with pytest.raises(RunActive):
        await driver.repair("s")
    with pytest.raises(RunActive):
        await other.repair("s")
    assert machine.dump() == before


async def test_whoever_drove_the_run_is_fenced_by_the_repair(machine: Machine) -> None:
    await prepared(machine)
    damage(machine, 9)
    app = await machine.boot()
    epoch = machine.row("s").epoch
    await app.repair("s")
    assert machine.row("s").epoch > epoch
    assert machine.row("s").owner is None


# -- what cannot be repaired ------------------------------------------------------------------------------------------
async def test_a_run_without_a_good_first_event_cannot_be_repaired_but_restarted(machine: Machine) -> None:
    await prepared(machine)
    damage(machine, 1)
    worker = await machine.worker()
    await machine.until_status("s", "held")
    assert machine.hold("s").resolutions == ["retry"]
    before = machine.dump()
    with pytest.raises(Damaged, match="restart"):
        await worker.repair("s")
    with pytest.raises(HoldConflict, match="repair"):
        await worker.resolve("s", "repair")
    assert machine.dump()["events"] == before["events"]
    with pytest.raises(RunHeld):
        await (await worker.start(shop.shop, "x", id="s")).result(timeout=60)
    run = await worker.start(shop.shop, "x", id="s", on_existing="restart")
    await machine.until(lambda: "signal_awaited" in machine.kinds("s"))
    assert machine.row("s").generation == 2
    assert machine.store.holds(run="s") == []
    assert [row for row in machine.dump()["events"] if row[1] == 1] == before["events"], "the old history is kept"
    await run.cancel()


# -- payloads ---------------------------------------------------------------------------------------------------------
async def test_a_damaged_payload_is_archived_and_its_step_done_again(machine: Machine) -> None:
    await prepared(machine)
    machine.sql("UPDATE payloads SET value = x'7a00' WHERE run = 's'")
    worker = await machine.worker()
    await machine.until_status("s", "held")
    report = await worker.repair("s")
    assert report.last_good == 2, "before the outcome of the first step"
    (payload,) = [row for row in machine.store.archived("s") if row.what == "payload"]
    assert payload.columns()["value"] == b"z\x00"
    await go_on(machine, worker)
    assert await worker.get("s").result() == RESULT
    assert READS == ["x", "x"]
    assert counts() == EXPECTED


async def test_the_archive_has_the_whole_row_of_the_run_as_it_was(machine: Machine) -> None:
    await prepared(machine)
    machine.sql("UPDATE runs SET workflow = CAST(x'ff00' AS TEXT), status = 'queued' WHERE id = 's'")
    connection = open_raw(machine.path)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    connection.close()
    app = await machine.boot()
    await app.repair("s", by="ann")
    (row,) = [row for row in machine.store.archived("s") if row.what == "run"]
    assert list(row.columns()) == columns
    assert row.columns()["workflow"] == b"\xff\x00"
    assert row.columns()["status"] == "queued"
    assert machine.row("s").workflow == "shop"


async def test_a_run_that_was_held_for_another_reason_stays_held_and_goes_on_when_that_is_resolved(
    machine: Machine,
) -> None:
    await prepared(machine)
    app = await machine.boot()
    await app.hold("s", "wait for ann")
    damage(machine, 9)
    with pytest.raises(Damaged):
        await app.resolve("s", "retry")
    report = await app.repair("s", by="ann")
    assert report.status == machine.status("s") == "held"
    assert machine.hold("s").reason == "asked", "the question stays"
    assert (await app.get("s").verify()).sound
    await app.resolve("s", "retry")
    await machine.stop(app)
    await go_on(machine, await machine.worker())
    assert machine.status("s") == "completed"
    assert counts() == EXPECTED


async def test_a_repaired_run_is_damaged_and_repaired_again(machine: Machine) -> None:
    await prepared(machine)
    app = await machine.boot()
    for seq in (15, 9, 4):
        damage(machine, seq)
        assert (await app.repair("s", note=f"at {seq}")).last_good == seq - 1
        assert (await app.get("s").verify()).sound
        await machine.until(lambda: machine.status("s") in ("held", "waiting"))
        await machine.rest(app)
        await machine.stop(app)
        app = await machine.boot()
    assert len([row for row in machine.store.archived("s") if row.what == "run"]) == 3
    await machine.stop(app)
    worker = await machine.worker()
    await go_on(machine, worker)
    assert await worker.get("s").result() == RESULT
    assert counts() == EXPECTED
