"""What the sweep damages: a file with runs that have every kind of event, large payloads, and three ways of ending."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import everstep
from everstep import Budget, Done, Retry, Unknown, step, witness, workflow
from everstep.model.events import BODIES
from everstep.stores.sqlite import SqliteStore
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw
from tests.worlds.ledger import ANSWERS, BROKEN, NOTES

TIDES: set[str] = set()
"""Runs whose outside has changed since they looked at it."""

ELSEWHERE = {"run_repaired", "run_restored", "checkpoint_damaged", "rollback_requested", "compensation_started"}
ELSEWHERE |= {kind for kind in BODIES if kind.startswith(("request_", "stream_"))}  # see test_exchange.py
ELSEWHERE |= {kind for kind in BODIES if kind.startswith(("approval_", "graph_"))}  # see test_asked.py
ELSEWHERE |= {"run_continued"}  # what it says is checked by the run's next generation, see test_continue_as.py
"""Kinds of events that come of damage, or that rule out what these runs do."""

Row = dict[str, Any]


@step(effect="read")
async def load_large(number: int) -> str:
    NOTES.append(f"load {number}")
    return f"{number:04} " * 4000


@step(retry=Retry(attempts=3, first=1.0, jitter=0.0))
async def flaky(number: int) -> int:
    NOTES.append(f"flaky {number}")
    everstep.heartbeat({"at": number})
    if "flaky" in BROKEN:
        BROKEN.discard("flaky")
        raise ConnectionError("cut off")
    return number


def ask(key: str, number: int, what: str) -> Done | Unknown:
    answer: Done | Unknown = ANSWERS.pop(0)
    return answer


@step(effect="once", probe=ask)
async def pay(number: int, what: str) -> int:
    NOTES.append(f"pay {number}")
    raise ConnectionError("no answer")


@step
async def refuse() -> None:
    raise ValueError("never")


@step(key="stamp:{name}")
async def stamp(name: str) -> str:
    NOTES.append(f"stamp {name}")
    return name


@step(effect="read")
async def endless() -> None:
    await asyncio.sleep(3600)


@step(effect="read", cost={"usd": 0.05}, fallback="dear")
async def consult() -> str:
    raise AssertionError("there is no room for it")


@step(effect="read", cost={"usd": 0.05})
async def consult_at_length() -> str:
    """It charges more than it was estimated at, which is noted while it runs."""
    NOTES.append("consult")
    everstep.charge(usd=0.07)
    await asyncio.sleep(0.2)
    return "long"


@workflow(budget=Budget(usd=0.10))
async def small_child(number: int) -> int:
    return await flaky(number)


@workflow(budget=Budget(usd=0.10))
async def long_child() -> None:
    await everstep.receive("never", str)


async def give_up(awaitable: Any) -> None:
    try:
        async with asyncio.timeout(5):
            await awaitable
    except TimeoutError:
        pass


def judge_tide(remembered: bool, now: bool) -> str:
    return "accept"


@workflow(budget=Budget(usd=5))
async def wide(name: str) -> str:
    large = await load_large(1)
    await flaky(2)
    paid = await pay(3, "x" * 9000)
    try:
        await refuse()
    except ValueError:
        everstep.publish("refused", True)
    await give_up(endless())
    await everstep.expect(tide := witness.value("tide", lambda: name in TIDES), on_drift=judge_tide)
    approved = await everstep.receive("approved", bool)
    everstep.release(tide)
    await everstep.expect(folder := witness.directory("own"))
    await everstep.files.write("own/note.txt", name, witness=False)
    everstep.release(folder)
    child = await small_child(4)
    await give_up(long_child())
    await everstep.expect(seen := witness.value("seen", lambda: 1))
    everstep.release(seen)
    everstep.patched("wider")
    everstep.charge(usd=0.01)
    with everstep.budget(usd=0.02, then="fallback"):
        await consult()
    await consult_at_length()
    everstep.publish("large", large)
    await stamp(name)
    await stamp(name)
    await everstep.checkpoint(name)
    if "code" in BROKEN:
        raise RuntimeError("a mistake")
    word = await everstep.receive("word", str)
    return f"{large}{paid}{approved}{child}{word}{name}"


RESULT = "0001 " * 4000 + "30" + "True" + "4" + "end"
OPEN, DONE, FAILED, CANCELLED = "the-open-run", "the-done-run", "the-failed-run", "the-cancelled-run"
ENDED = (DONE, FAILED, CANCELLED)


async def let_pass(machine: Machine, app: everstep.App, condition: Callable[[], Any]) -> None:
    """Let time pass until something is so."""
    for _ in range(2000):
        if condition():
            return
        machine.clock.advance(0.25)
        app.pump.nudge()
        await asyncio.sleep(0.002)
    raise AssertionError("it does not become so")


async def build(machine: Machine) -> None:
    """Make the four runs, and leave the file as a process leaves it that ended in good order."""
    Path("own").mkdir()
    app = await machine.boot()
    for run in (OPEN, DONE, FAILED, CANCELLED):
        BROKEN.update({"flaky", "code"})
        ANSWERS[:] = [Unknown("later"), Done(30)]
        await app.start(wide, run, id=run)
        await let_pass(machine, app, lambda: "signal_awaited" in machine.kinds(run))  # noqa: B023
        TIDES.add(run)
        await app.signal(run, "approved", "perhaps")
        await app.signal(run, "approved", True, id="yes")
        await let_pass(machine, app, lambda: machine.status(run) == "failed")  # noqa: B023
        BROKEN.clear()
        if run == FAILED:
            continue
        await app.retry(run)
        await machine.until_status(run, "waiting")
        await app.hold(run, "look at it")
        await app.resolve(run, "retry", note="fine", by="ann")
        await machine.until_status(run, "waiting")
    await app.signal(DONE, "word", "end")
    await app.get(DONE).result()
    await app.cancel(CANCELLED, "no longer wanted", by="ann")
    await machine.until_status(CANCELLED, "cancelled")
    await machine.stop(app)
    kinds = {kind for run in (OPEN, DONE, FAILED, CANCELLED) for kind in machine.kinds(run)}
    assert kinds == set(BODIES) - ELSEWHERE, set(BODIES) - kinds
    assert len(machine.events(OPEN)) >= 40


def make_file(folder: Path) -> Path:
    """Return a file with the four runs."""

    async def main() -> None:
        machine = Machine(folder)
        try:
            await build(machine)
        finally:
            await machine.shut()

    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        asyncio.run(main())
    NOTES.clear()
    return folder / "runs.db"


def copy_of(path: Path, folder: Path) -> Path:
    """Return a copy that a test may damage."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(path, folder / "runs.db"))


class Cell(NamedTuple):
    """A value in the file: its table, its row, its column."""

    table: str
    rowid: int
    column: str
    label: str


class File:
    """A damaged file: a raw connection that writes whatever it is told, and a store that reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = open_raw(path)
        self.raw.execute("PRAGMA synchronous = OFF")
        self.store = SqliteStore(path, durability="process")

    def close(self) -> None:
        self.raw.close()
        self.store.close()

    def rows(self, table: str, where: str = "1", *values: Any) -> list[Row]:
        cursor = self.raw.execute(f"SELECT rowid AS rowid_, * FROM {table} WHERE {where} ORDER BY rowid", values)
        found = cursor.fetchall()
        if not found:
            return []
        cursor = self.raw.execute(f"SELECT rowid AS rowid_, * FROM {table} WHERE {where} ORDER BY rowid", values)
        names = [name for name, _ in cursor.get_description()]
        return [dict(zip(names, row, strict=True)) for row in found]

    def value(self, cell: Cell) -> Any:
        ((value,),) = self.raw.execute(f"SELECT {cell.column} FROM {cell.table} WHERE rowid = ?", (cell.rowid,))
        return value

    @contextmanager
    def flipped(self, cell: Cell, bit: int) -> Iterator[None]:
        """Flip one bit of a value, and put it right afterwards."""
        before = self.value(cell)
        target = "CAST(? AS TEXT)" if isinstance(before, str) else "?"
        sql = f"UPDATE {cell.table} SET {cell.column} = {target} WHERE rowid = ?"
        self.raw.execute(sql, (flip(before, bit), cell.rowid))
        try:
            yield
        finally:
            stored = before.encode() if isinstance(before, str) else before
            self.raw.execute(sql, (stored, cell.rowid))

    @contextmanager
    def changed(self, *statements: str) -> Iterator[None]:
        """Change the file by statements, and put it back row by row afterwards."""
        before = self.dump()
        for statement in statements:
            self.raw.execute(statement)
        try:
            yield
        finally:
            for table, rows in before.items():
                self.raw.execute(f"DELETE FROM {table}")
                for row in rows:
                    names = ["rowid" if name == "rowid_" else name for name in row]
                    marks = ", ".join("?" * len(row))
                    self.raw.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", tuple(row.values()))

    def dump(self) -> dict[str, list[Row]]:
        return {table: self.rows(table) for table in ("runs", "events", "payloads")}


def flip(value: Any, bit: int) -> Any:
    """Return a value with one bit flipped: of an integer as SQLite has it, or of the bytes of a text or blob."""
    if isinstance(value, int):
        number = (value & (2**64 - 1)) ^ (1 << bit)
        return number - 2**64 if number >= 2**63 else number
    data = bytearray(value.encode() if isinstance(value, str) else value)
    data[bit // 8] ^= 1 << (bit % 8)
    return bytes(data)


def bits_of(value: Any) -> int:
    """Return how many bits a value has."""
    if value is None:
        return 0
    if isinstance(value, int):
        return 64
    return 8 * len(value.encode() if isinstance(value, str) else value)
