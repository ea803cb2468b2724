"""Damage under a worker: it holds the run, or leaves it alone; it changes nothing else, and drives all others."""

import logging
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import RunHeld
from tests.damage.subject import NOTES, OPEN, File, copy_of, flip, wide
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw

TEXT = 7
"""The highest bit of the first byte: the text is no longer one."""
ROW: dict[str, tuple[int, str]] = {
    # column: (bit to flip, what becomes of the run)
    "id": (0, "nobody takes it up"),
    "workflow": (0, "nobody takes it up"),
    "semantics": (1, "nobody takes it up"),
    "status": (0, "held"),
    "generation": (1, "held"),
    "head_seq": (0, "held"),
    "head_digest": (5, "held"),
    "arguments": (0, "held"),
    "created_at": (30, "held"),
    "preview": (40, "held"),
    "published": (90, "held"),
    "tags": (TEXT, "held"),
    "queue": (TEXT, "held"),
}
SEND = "INSERT INTO signals (run, kind, name, id, value, at, state) VALUES (?, 'signal', 'word', '', ?, 1, 'pending')"


def dump(machine: Machine) -> dict[str, list[Any]]:
    """Return everything in the file, texts as bytes, for they may be damaged."""
    connection = open_raw(machine.path)
    try:
        found: dict[str, list[Any]] = {}
        for table in ("runs", "events", "payloads", "signals", "followers"):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            columns = ", ".join(f"CAST({name} AS BLOB)" for name in names)
            found[table] = connection.execute(f"SELECT {columns} FROM {table} ORDER BY 1, 2, 3").fetchall()
        return found
    finally:
        connection.close()


@pytest.mark.parametrize("column", ROW)
async def test_a_worker_drives_no_run_whose_row_is_damaged(machine: Machine, original: Path, column: str) -> None:
    bit, becomes = ROW[column]
    file = File(copy_of(original, machine.folder))
    (row,) = file.rows("runs", "id = ?", OPEN)
    target = "CAST(? AS TEXT)" if isinstance(row[column], str) else "?"
    file.raw.execute(f"UPDATE runs SET {column} = {target} WHERE rowid = ?", (flip(row[column], bit), row["rowid_"]))
    file.raw.execute(SEND, (OPEN, b'["x"]'))
    file.close()
    before = dump(machine)
    worker = await machine.worker()
    if becomes == "held":
        await machine.until(machine.store.holds)
        (hold,) = machine.store.holds()
        assert hold.reason == "damaged"
        with pytest.raises(RunHeld, match="damaged"):
            await worker.get(hold.run).result(timeout=60)
    else:
        await machine.advance(60)
        assert machine.store.holds() == []
    after = dump(machine)
    assert NOTES == []
    for table in ("events", "payloads", "signals", "followers"):
        assert after[table] == before[table], table
    changed = [row for row in after["runs"] if row not in before["runs"]]
    assert len(changed) <= 1, "nothing but the one row was changed"


async def test_a_row_that_cannot_even_be_claimed_keeps_nobody_from_anything(
    machine: Machine, original: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An epoch that cannot go up, in a run that comes before the healthy one."""
    caplog.set_level(logging.ERROR)
    file = File(copy_of(original, machine.folder))
    file.raw.execute(
        "UPDATE runs SET epoch = 9223372036854775807, status = 'queued', wake_at = NULL, priority = 9 WHERE id = ?",
        (OPEN,),
    )
    file.close()
    app, _ = await machine.start(wide, "x", id="healthy")
    await machine.kill(app)
    worker = await machine.worker()
    await machine.until(lambda: "healthy" in worker.drivers)
    for _ in range(5):
        machine.clock.advance(1)
        worker.pump.nudge()
        await machine.until(lambda: not worker.pump._nudged)
    said = [record.getMessage() for record in caplog.records if OPEN in record.getMessage()]
    assert len(said) == 1, "it is told once"
    assert "cannot be resumed" in said[0]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("what", ["a bit of an event", "a cut tail"])
async def test_whoever_starts_a_damaged_run_again_is_told_that_it_is_held(
    machine: Machine, original: Path, what: str
) -> None:
    file = File(copy_of(original, machine.folder))
    if what == "a cut tail":
        file.raw.execute("DELETE FROM events WHERE run = ? AND seq > 19", (OPEN,))
    else:
        (row,) = file.rows("events", "run = ? AND seq = 20", OPEN)
        file.raw.execute("UPDATE events SET body = ? WHERE rowid = ?", (flip(row["body"], 80), row["rowid_"]))
    file.close()
    _, run = await machine.start(wide, OPEN, id=OPEN)
    with pytest.raises(RunHeld) as held:
        await run.result(timeout=60)
    assert held.value.reason == "damaged"
    assert (await run.verify()).last_good == 19
    assert NOTES == []
