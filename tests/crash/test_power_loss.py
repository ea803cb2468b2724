"""The power goes. Of what was written and not synced, each 512 bytes are kept, lost, or garbled.

A file system under SQLite notes every write, sync and promise in its order. For any moment of that, what a disk may
show afterwards is made up from the notes, and the store must find there all that had been promised by then.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

import everstep
from everstep import STORE, step, transaction, workflow
from everstep.engine.app.app import App
from everstep.engine.history.verify import load_verified
from everstep.stores.protocol import RunFilter, RunRow
from everstep.stores.sqlite import SqliteStore
from tests.crash.figures import FIGURES

SECTOR = 512
RUNS = 6
PUSH_LOSSES = 200
SOAK_LOSSES = 20_000

APPLIED: dict[str, str] = {}
"""What a receiver that honours keys has applied."""


class Note(NamedTuple):
    """Something that happened to a file, or, with the kind `promise`, that somebody was told."""

    kind: str
    file: str = ""
    offset: int = 0
    data: Any = b""


class NotingFile(apsw.VFSFile):
    """A file whose changes are noted."""

    def __init__(self, disk: "Disk", name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "").name

    def xWrite(self, data: Any, offset: int) -> None:
        super().xWrite(data, offset)
        self._disk.notes.append(Note("write", self._name, offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        self._disk.notes.append(Note("truncate", self._name, size))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._disk.notes.append(Note("sync", self._name))


class Disk(apsw.VFS):
    """A file system that notes."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        super().__init__("noting", "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return NotingFile(self, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:
        super().xDelete(name, sync)
        self.notes.append(Note("delete", Path(name).name))

    def promise(self, *what: Any) -> None:
        """Note that somebody was told something."""
        self.notes.append(Note("promise", data=what))


DISK: list[Disk] = []


def promise(*what: Any) -> None:
    if DISK:
        DISK[-1].promise(*what)


@step
async def apply(what: str) -> str:
    promise("begun", everstep.current().run, everstep.current().step)
    APPLIED[everstep.key()] = what
    return what * 40


@step(effect="read")
async def look(number: int) -> int:
    return number + 1


@transaction(STORE)
def keep(connection: apsw.Connection, number: int) -> str:
    """Exactly one row for each run, whatever the power takes."""
    connection.execute("CREATE TABLE IF NOT EXISTS kept (number INTEGER)")
    connection.execute("INSERT INTO kept VALUES (?)", (number,))
    return f"kept {number}"


@workflow
async def leaf(number: int) -> str:
    return await apply(f"leaf {number}")


@workflow
async def tree(number: int) -> list[Any]:
    seen = [await look(number)]
    both = await asyncio.gather(apply(f"a{number}"), apply(f"b{number}"))
    kept = await asyncio.to_thread(keep, number)
    word = await everstep.receive("word", str)
    return [seen, both, kept, word, await leaf(number), await apply(f"z{number}")]


async def work(app: App) -> dict[str, Any]:
    """Start or go on with all runs, and return their results."""

    async def one(number: int) -> tuple[str, Any]:
        run = await app.start(tree, number, id=f"tree-{number}")
        promise("started", run.id)
        await run.signal("word", f"w{number}", id="only")
        promise("signalled", run.id)
        value = await run.result(timeout=60)
        promise("result", run.id, value)
        return run.id, value

    return dict(await asyncio.gather(*(one(number) for number in range(RUNS))))


@dataclass
class Recorded:
    notes: list[Note]
    results: dict[str, Any]
    applied: dict[str, str]
    first: int
    """Where the notes begin that come after the store was made."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("disk")
    disk = Disk()
    DISK.append(disk)
    APPLIED.clear()
    store = SqliteStore(folder / "store.db", vfs="noting")
    store._writer.connection.pragma("wal_autocheckpoint", 12)  # so that pages move into the file all the time
    first = len(disk.notes)

    async def main() -> dict[str, Any]:
        app = App(store, lease=1.0)  # beside an image there is no file of liveness locks, so its lease has to lapse
        await app.open()
        try:
            return await work(app)
        finally:
            await app.close()

    results = asyncio.run(main())
    DISK.clear()
    yield Recorded(disk.notes, results, dict(APPLIED), first)
    disk.unregister()


class Image:
    """The files as a disk may show them when the power comes back."""

    def __init__(self, notes: list[Note], cut: int, chance: random.Random) -> None:
        self.files: dict[str, bytearray] = {}
        self._chance = chance
        synced = {note.file: index for index, note in enumerate(notes[:cut]) if note.kind == "sync"}
        for index, note in enumerate(notes[:cut]):
            self._take(note, certain=index < synced.get(note.file, -1))
        for name in [name for name in self.files if name not in synced and chance.random() < 0.5]:
            del self.files[name]  # its entry in the folder was not synced either

    def _take(self, note: Note, *, certain: bool) -> None:
        if note.kind == "write":
            content = self.files.setdefault(note.file, bytearray())
            for start in range(0, len(note.data), SECTOR):
                self._put(content, note.offset + start, note.data[start : start + SECTOR], certain)
        elif note.kind == "truncate" and (certain or self._chance.random() < 0.5):
            del self.files.setdefault(note.file, bytearray())[note.offset :]
        elif note.kind == "delete":
            self.files.pop(note.file, None)  # SQLite has the folder synced with it

    def _put(self, content: bytearray, offset: int, data: bytes, certain: bool) -> None:
        fate = "kept" if certain else self._chance.choice(("kept", "lost", "garbled"))
        if fate == "lost":
            return
        if fate == "garbled":
            data = self._chance.randbytes(len(data))
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder / "store.db"


def histories(store: SqliteStore) -> dict[str, tuple[RunRow, list[Any]]]:
    """Return all runs with their histories, verified."""
    return {row.id: (row, load_verified(store, row)) for row in store.runs(RunFilter(limit=1000))}


def broken_promises(store: SqliteStore, promises: list[Any]) -> list[str]:
    """Return what was promised and is not there."""
    runs = histories(store)
    broken = []
    for what, run, *rest in promises:
        row, history = runs.get(run, (None, []))
        if what == "started":
            kept = row is not None
        elif what == "signalled":
            taken = any(event.kind == "signal_received" for event in history)
            kept = taken or any(one.kind == "signal" for one in store.inbox(run))
        elif what == "begun":
            kept = any(event.kind == "step_started" and event.step == rest[0] for event in history)
        else:
            kept = row is not None and row.status == "completed"
        if not kept:
            broken.append(f"{what} {run} {rest}")
    return broken


def lose_power(recorded: Recorded, folder: Path, seed: int, *, go_on: bool) -> list[str]:
    chance = random.Random(seed)
    cut = chance.randint(recorded.first, len(recorded.notes))
    path = Image(recorded.notes, cut, chance).write(folder)
    promises = [note.data for note in recorded.notes[:cut] if note.kind == "promise"]
    store = SqliteStore(path)
    try:
        problems = broken_promises(store, promises)
        check = store._writer.connection.pragma("integrity_check")
        problems += [] if check == "ok" else [str(check)]
        if go_on and not problems:
            problems += asyncio.run(finish(store, recorded))
    finally:
        store.close()
    return [f"seed {seed}, after {cut} of {len(recorded.notes)} notes: {problem}" for problem in problems]


async def finish(store: SqliteStore, recorded: Recorded) -> list[str]:
    """Go on with what is left, and compare results and effects with those of the undisturbed runs."""
    APPLIED.clear()
    app = App(store)
    await app.open()
    try:
        results = await work(app)
        kept = sorted(store._writer.connection.execute("SELECT number FROM kept"))
    finally:
        await app.close()
    problems = [] if results == recorded.results else [f"the results are {results}"]
    problems += [] if kept == [(number,) for number in range(RUNS)] else [f"kept are {kept}"]
    foreign = {what for what in APPLIED.values() if what not in recorded.applied.values()}
    return problems + [f"applied {what}, which nobody did before" for what in foreign]


@pytest.mark.parametrize("part", range(4))
def test_whatever_the_power_takes_every_promise_is_kept(recorded: Recorded, tmp_path: Path, part: int) -> None:
    seeds = range(part, PUSH_LOSSES, 4)
    problems = [
        problem
        for seed in seeds
        for problem in lose_power(recorded, tmp_path / str(seed), seed, go_on=seed % 20 == part)
    ]
    FIGURES.losses += len(seeds)
    assert not problems, "\n".join(problems[:20])


@pytest.mark.soak
def test_whatever_the_power_takes_thousands_of_times_every_promise_is_kept(recorded: Recorded, tmp_path: Path) -> None:
    for seed in range(SOAK_LOSSES):
        problems = lose_power(recorded, tmp_path / str(seed), seed, go_on=seed % 20 == 0)
        assert not problems, "\n".join(problems)


def test_without_full_syncs_a_promise_is_broken(recorded: Recorded, tmp_path: Path) -> None:
    """The test itself is tested: without the syncs of the log, the same losses break promises."""
    notes = [note for note in recorded.notes[recorded.first :] if not (note.kind == "sync" and "-wal" in note.file)]
    careless = Recorded(recorded.notes[: recorded.first] + notes, recorded.results, recorded.applied, recorded.first)
    seen = 0
    for seed in range(80):
        try:
            seen += bool(lose_power(careless, tmp_path / str(seed), seed, go_on=False))
        except (everstep.Error, apsw.Error):
            seen += 1
    assert seen > 10
