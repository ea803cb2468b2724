"""Every bit and every row of a history, damaged one at a time in the file: each is found, none gives a wrong result.

Each push breaks every covered column of every row: all eight bits of its first, its last and some other bytes, and of
integers low, high and some other bits. `make soak` breaks every bit.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from everstep.codec import Codec
from everstep.engine.app.app import App
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.verify import load_verified, verify_payloads
from everstep.engine.run.resume import replay
from everstep.engine.verbs.verify import every_run, strays, verify_run
from everstep.errors import Damaged, RunCancelled, UnknownRun
from everstep.stores.protocol import RunRow, Store
from tests.damage.subject import CANCELLED, DONE, ENDED, FAILED, NOTES, OPEN, RESULT, Cell, File, bits_of, copy_of, flip

EVENT_COLUMNS = ("run", "generation", "seq", "kind", "step", "at", "body", "digest")
PAYLOAD_COLUMNS = ("run", "digest", "value")
ROW_COLUMNS = (
    "id", "workflow", "version", "semantics", "status", "generation", "head_seq", "head_digest", "parent", "arguments",
    "created_at", "ended_at", "preview", "published", "outcome", "budget",
)  # fmt: skip
"""What of a run's row its history vouches for."""
NOT_COVERED = {
    "epoch", "owner", "wake_at", "queue", "priority", "deaths", "updated_at",  # when and by whom it is driven
    "tags", "current_step",  # labels
}  # fmt: skip
EVENTS_MAX = 68
SAMPLED_INTEGER_BITS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 31, 32, 33, 47, 48, 61, 62, 63)


def sampled_bits(cell: Cell, value: Any, middle: int = 4) -> Sequence[int]:
    """Return the bits of a value that each push flips: all eight bits of some bytes, the same in each test run."""
    count = bits_of(value)
    if isinstance(value, int):
        return possible(cell, value, SAMPLED_INTEGER_BITS)
    if count <= 64:
        return range(count)
    seed = hashlib.sha256(f"{cell}".encode()).digest()
    places = {0, count // 8 - 1, *(int.from_bytes(seed[n : n + 4]) % (count // 8) for n in range(0, 4 * middle, 4))}
    return [8 * place + bit for place in sorted(places) for bit in range(8)]


def possible(cell: Cell, value: Any, bits: Sequence[int]) -> Sequence[int]:
    """Leave out bits that make an event's number that of another event, which the table does not allow."""
    if cell.column != "seq":
        return bits
    return [bit for bit in bits if not 1 <= flip(value, bit) <= EVENTS_MAX]


def cells_of(file: File, runs: Sequence[str]) -> Iterator[Cell]:
    for run in runs:
        for row in file.rows("events", "run = ?", run):
            for column in EVENT_COLUMNS:
                yield Cell("events", row["rowid_"], column, f"{run} event {row['seq']} {column}")
        for row in file.rows("payloads", "run = ?", run):
            for column in PAYLOAD_COLUMNS:
                yield Cell("payloads", row["rowid_"], column, f"{run} payload {column}")
        (row,) = file.rows("runs", "id = ?", run)
        for column in ROW_COLUMNS:
            yield Cell("runs", row["rowid_"], column, f"{run} row {column}")


def is_found_at_load(store: Store, run: str) -> bool:
    """Tell whether a damaged run is found out before anything is done with it."""
    row = store.run(run)
    if row is None:
        return True  # nobody can take up what has no row; `verify --all` tells of its events
    try:
        history = load_verified(store, row)
        verify_payloads(store, row, history)
    except Damaged:
        return True
    return False


def sweep(
    file: File, runs: Sequence[str], bits: Callable[[Cell, Any], Sequence[int]], check: Callable[[str], Any]
) -> int:
    """Flip bits one at a time; `check` returns what is wrong while a bit of a run is flipped. Returns how many."""
    count, wrong = 0, []
    before = file.dump()
    for cell in list(cells_of(file, runs)):
        value = file.value(cell)
        for bit in bits(cell, value) if value is not None else ():
            with file.flipped(cell, bit):
                problem = check(cell.label.split(" ")[0])
            count += 1
            if problem:
                wrong.append(f"{cell.label} bit {bit}: {problem}")
    assert file.dump() == before, "the sweep itself left something behind"
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:30])
    return count


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Iterator[File]:
    file = File(copy_of(original, tmp_path))
    NOTES.clear()
    yield file
    file.close()
    assert NOTES == [], "no body ran"


def test_every_column_is_covered_or_said_not_to_be(file: File) -> None:
    (row, *_) = file.rows("runs")
    assert {*ROW_COLUMNS, *NOT_COVERED} == set(row) - {"rowid_"}
    (row, *_) = file.rows("events")
    assert set(EVENT_COLUMNS) == set(row) - {"rowid_"}
    (row, *_) = file.rows("payloads")
    assert set(PAYLOAD_COLUMNS) == set(row) - {"rowid_"}


def test_undamaged_nothing_is_found(file: File) -> None:
    for run in (OPEN, *ENDED):
        assert not is_found_at_load(file.store, run)
    assert all(verify_run(file.store, row)[0].sound for row in every_run(file.store))
    assert strays(file.store) == []


def test_a_flipped_bit_is_found_when_the_run_is_loaded(file: File) -> None:
    count = sweep(file, [OPEN], sampled_bits, lambda run: "" if is_found_at_load(file.store, run) else "not found")
    assert count > 5000


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_flipped_bit_is_found_when_the_run_is_loaded(file: File) -> None:
    def every(cell: Cell, value: Any) -> Sequence[int]:
        return possible(cell, value, range(bits_of(value)))

    sweep(file, [OPEN, *ENDED], every, lambda run: "" if is_found_at_load(file.store, run) else "not found")


# -- results --------------------------------------------------------------------------------------------------------
def with_app(file: File, check: Callable[[App], Awaitable[Any]]) -> Any:
    """Run a check with an app on the file that drives nothing."""

    async def main() -> Any:
        app = App(file.store, workflows=())
        await app.open()
        try:
            return await check(app)
        finally:
            await app.pump.stop()
            await app.committer.close()
            app.threads.close()

    return asyncio.run(main())


async def what_is_given(app: App, run: str) -> str:
    """Ask for a run's result as a program does: by its handle, and by starting it again. Returns what is wrong."""
    rights: dict[str, Any] = {DONE: RESULT + DONE, FAILED: RuntimeError, CANCELLED: RunCancelled}
    starts = (lambda: asyncio.sleep(0, app.get(run)), lambda: app.start(DECLARED.named("wide"), run, id=run))
    for start in starts:
        try:
            given: Any = await (await start()).result(timeout=60)  # type: ignore[operator]
        except (Damaged, UnknownRun):
            continue
        except (RuntimeError, RunCancelled) as error:
            given = type(error)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        if given != rights[run]:
            return f"it gives {given!r:.80}"
    return ""


def few_bits(cell: Cell, value: Any) -> Sequence[int]:
    """All columns of the rows; of events and payloads, which a result does not come from, one bit each."""
    seq = int(cell.label.split(" ")[2]) if cell.table == "events" else 0
    if cell.table == "runs" or (cell.table == "events" and seq in (1, 2, 61, 62, 67, 68)):
        return sampled_bits(cell, value, 1)
    bits = sampled_bits(cell, value, 1)
    return [bits[len(cell.label) % len(bits)]] if bits else []


def test_a_damaged_run_never_gives_a_wrong_result(file: File) -> None:
    """Each of the three ends, asked for by its handle and by its id: the right one, or an error that says it all."""

    async def check(app: App) -> None:
        loop = asyncio.get_running_loop()
        before = file.dump()
        wrong: list[str] = []
        count = damaged = 0
        for run in ENDED:
            for cell in list(cells_of(file, [run])):
                value = file.value(cell)
                for bit in few_bits(cell, value) if value is not None else ():
                    with file.flipped(cell, bit):
                        problem = await what_is_given(app, run)
                        damaged += is_found_at_load(file.store, run)
                    count += 1
                    wrong += [f"{cell.label} bit {bit}: {problem}"] if problem else []
        assert loop.is_running()
        assert file.dump() == before, "asking for a result changes nothing"
        assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:30])
        assert damaged == count > 1500

    with_app(file, check)


def test_the_result_of_a_run_that_is_whole_is_given(file: File) -> None:
    async def check(app: App) -> None:
        assert [await what_is_given(app, run) for run in ENDED] == ["", "", ""]
        assert await app.get(DONE).result() == RESULT + DONE

    with_app(file, check)


def test_forged_ends_in_the_row_are_not_believed(file: File) -> None:
    """A row that was edited, and not only damaged: another outcome, another end, an end of a run that goes on."""
    edits = {
        DONE: [
            "UPDATE runs SET outcome = CAST('[\"forged\"]' AS BLOB) WHERE id = '{run}'",
            "UPDATE runs SET outcome = NULL WHERE id = '{run}'",
            "UPDATE runs SET status = 'failed' WHERE id = '{run}'",
            "UPDATE runs SET status = 'cancelled', outcome = NULL WHERE id = '{run}'",
            "UPDATE runs SET status = 'waiting', outcome = NULL, ended_at = NULL WHERE id = '{run}'",
            "UPDATE runs SET arguments = (SELECT arguments FROM runs WHERE id = 'the-failed-run') WHERE id = '{run}'",
            "UPDATE runs SET workflow = 'small_child' WHERE id = '{run}'",
        ],
        OPEN: [
            "UPDATE runs SET status = 'completed', outcome = CAST('[1]' AS BLOB), ended_at = 5 WHERE id = '{run}'",
            "UPDATE runs SET status = 'cancelled', ended_at = updated_at WHERE id = '{run}'",
            "UPDATE runs SET outcome = CAST('[1]' AS BLOB) WHERE id = '{run}'",
        ],
    }

    async def check(app: App) -> None:
        for run, statements in edits.items():
            for statement in statements:
                with file.changed(statement.format(run=run)):
                    with pytest.raises(Damaged):
                        await app.get(run).result(timeout=60)
                    assert is_found_at_load(file.store, run), statement

    with_app(file, check)


# -- rows -----------------------------------------------------------------------------------------------------------
COPY = "INSERT INTO events SELECT {run}, generation, {seq}, kind, step, at, body, digest FROM events WHERE {where}"


def row_damages(events: int) -> Iterator[tuple[str, list[str]]]:
    where = f"run = '{OPEN}' AND seq ="
    for seq in range(1, events + 1):
        yield f"{seq} is missing", [f"DELETE FROM events WHERE {where} {seq}"]
        other = seq % events + 1
        yield (
            f"{seq} and {other} are swapped",
            [
                f"UPDATE events SET seq = 999 WHERE {where} {seq}",
                f"UPDATE events SET seq = {seq} WHERE {where} {other}",
                f"UPDATE events SET seq = {other} WHERE {where} 999",
            ],
        )
        yield (
            f"{seq} is another run's",
            [
                f"DELETE FROM events WHERE {where} {seq}",
                COPY.format(run=f"'{OPEN}'", seq="seq", where=f"run = '{DONE}' AND seq = {seq}"),
            ],
        )
        for target in (seq % events + 1, events + 1):
            yield (
                f"{seq} stands at {target} as well",
                [
                    f"DELETE FROM events WHERE {where} {target}",
                    COPY.format(run="run", seq=target, where=f"{where} {seq}"),
                ],
            )
        yield (
            f"{seq} stands in another generation",
            [f"UPDATE events SET generation = 2 WHERE {where} {seq}"],
        )
        yield f"the tail is cut at {seq}", [f"DELETE FROM events WHERE run = '{OPEN}' AND seq >= {seq}"]
        yield (
            f"the tail is cut at {seq} and the row's number with it",
            [
                f"DELETE FROM events WHERE run = '{OPEN}' AND seq >= {seq}",
                f"UPDATE runs SET head_seq = {seq - 1} WHERE id = '{OPEN}'",
            ],
        )
    for number in (1, 2):
        which = f"rowid = (SELECT rowid FROM payloads WHERE run = '{OPEN}' LIMIT 1 OFFSET {number - 1})"
        yield f"payload {number} is missing", [f"DELETE FROM payloads WHERE {which}"]
        yield (
            f"payload {number} is another",
            [f"UPDATE payloads SET value = (SELECT value FROM payloads WHERE NOT {which} LIMIT 1) WHERE {which}"],
        )
    yield "the run's row is missing", [f"DELETE FROM runs WHERE id = '{OPEN}'"]


def test_missing_swapped_foreign_and_doubled_rows_and_cut_tails_are_found(file: File) -> None:
    count = len(file.rows("events", "run = ?", OPEN))
    before = file.dump()
    missed, told = [], 0
    for what, statements in row_damages(count):
        with file.changed(*statements):
            if not is_found_at_load(file.store, OPEN):
                missed.append(what)
            row = file.store.run(OPEN)
            verified = [verify_run(file.store, row)[0]] if row is not None else strays(file.store)
            told += any(not one.sound and OPEN in one.problem for one in verified)
    assert file.dump() == before
    assert not missed
    assert told == len(list(row_damages(count)))


def test_an_extra_row_in_a_generation_that_is_not_there_is_found_by_verify(file: File) -> None:
    copied = f"SELECT run, 2, seq, kind, step, at, body, digest FROM events WHERE run = '{OPEN}' AND seq = 1"
    with file.changed(f"INSERT INTO events {copied}"):
        row = file.store.run(OPEN)
        assert row is not None
        assert "generations" in verify_run(file.store, row)[0].problem


def test_a_run_without_its_row_is_not_started_anew(file: File) -> None:
    """Its events are there, so an id that looks free is not."""
    before = file.rows("events")

    async def check(app: App) -> None:
        with pytest.raises(Damaged, match="verify --all"):
            await app.start(DECLARED.named("wide"), OPEN, id=OPEN)
        await asyncio.sleep(0.05)

    with file.changed(f"DELETE FROM runs WHERE id = '{OPEN}'"):
        with_app(file, check)
        assert file.rows("events") == before


# -- replay ---------------------------------------------------------------------------------------------------------
def replays(store: Store, row: RunRow) -> None:
    done = replay(store, Codec(), row, DECLARED.named("wide"), load_verified(store, row), quiet=True)
    done.execution.evict()
    assert not done.differences


def test_a_payload_that_the_code_needs_is_verified_when_it_is_read(file: File) -> None:
    """Whatever bit of it is flipped, the replay ends before the code could see another value."""
    (cell,) = [
        Cell("payloads", row["rowid_"], "value", OPEN)
        for row in file.rows("payloads", "run = ?", OPEN)
        if row["digest"] in file.store.events(OPEN, 1)[2].body.decode()
    ]
    row = file.store.run(OPEN)
    assert row is not None
    replays(file.store, row)
    for bit in range(0, bits_of(file.value(cell)), 3):
        with file.flipped(cell, bit), pytest.raises(Damaged):
            replays(file.store, row)
