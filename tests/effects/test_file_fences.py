"""File effects are fenced: what has lost its run, or was given up, changes nothing, wherever it was stopped."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import everstep
from everstep import files, workflow
from everstep.effects import folders
from everstep.engine.run.bodies import Attempt
from everstep.errors import RunHeld
from everstep.model.events import decode_body
from everstep.stores.opening import open_store
from tests.effects.test_once_kills import wait_until_stopped
from tests.engine.resume_helpers import PRELUDE, Machine
from tests.forked import Program
from tests.waiting import wait_until

PROGRAM = PRELUDE + textwrap.dedent("""
    import contextlib, fcntl, json, shutil, threading
    from everstep.effects import files as bodies
    from everstep.effects import folders
    from everstep.effects.surroundings import CURRENT

    out, effect, at = sys.argv[2], sys.argv[3], int(sys.argv[4])
    os.chdir(out)
    points = []

    def pass_point(name, is_locked):
        points.append([name, is_locked])
        if len(points) == at:
            with open("../stopped.json", "w") as note:
                json.dump(points[-1], note)
            # Not while another thread has the store's file locked, because that would stop the successor as well.
            writer = getattr(CURRENT.get().bodies._driver.app.store, "_writer", None)
            with getattr(writer, "_lock", contextlib.nullcontext()):
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # else this thread goes on for a moment

    class Watched:
        is_locked = False

        def __init__(self, module):
            self.module = module

        def __getattr__(self, name):
            real = getattr(self.module, name)
            if name not in ("open", "close", "stat", "fstat", "replace", "unlink", "mkdir", "fsync", "fchmod", "flock"):
                return real

            def call(*args, **kwargs):
                pass_point(name, Watched.is_locked)
                value = real(*args, **kwargs)
                if name == "flock":
                    Watched.is_locked = args[1] != fcntl.LOCK_UN
                return value

            return call

    bodies.os = folders.os = Watched(os)
    folders.fcntl = Watched(fcntl)

    @step
    def note_points():
        with open("../points.json", "w") as note:
            json.dump(points, note)

    @step
    def remove(path):
        shutil.rmtree(path)

    @workflow(name="doing")
    async def doing():
        files = everstep.files
        if effect == "write":
            await files.write("a", "1", witness=False)
        elif effect == "append":
            await files.append("a", "x", witness=False)
        elif effect == "move":
            await files.move("a", "b", overwrite=True, witness=False)
        elif effect == "delete":
            await files.delete("a", witness=False)
        else:
            await files.make_folder("x/y")
        await asyncio.to_thread(note_points)
        if effect == "append":
            await files.append("a", "y", witness=False)
        elif effect == "make_folder":
            await asyncio.to_thread(remove, "x")
        else:
            await files.write("a", "2", witness=False)
        return "done"

    print(everstep.run(doing, id="r", url=URL))
""")
EFFECTS: dict[str, dict[str, str]] = {
    # name: what is in the folder when the run has ended; before, there is only "a" with "old" in it
    "write": {"a": "2"},
    "append": {"a": "oldxy"},
    "move": {"a": "2", "b": "old"},
    "delete": {"a": "2"},
    "make_folder": {"a": "old"},
}


class Point(NamedTuple):
    """A system call before which a process is stopped, and whether others wait for its lock there."""

    number: int
    name: str
    is_locked: bool


class Life:
    """A folder, a store and the processes of one run."""

    def __init__(self, folder: Path, effect: str, url: str = "") -> None:
        self.folder, self.effect = folder, effect
        self.url = url or str(folder / "runs.db")
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        (self.out / "a").write_text("old")
        (folder / "program.py").write_text(PROGRAM)

    def spawn(self, at: int = 0) -> Program:
        command = [sys.executable, str(self.folder / "program.py"), self.url, str(self.out), self.effect, str(at)]
        with open(self.folder / "said.txt", "ab") as output:
            return Program(command, stdout=output, stderr=output)

    def content(self) -> dict[str, str]:
        """Return what is in the folder, with the files of ours that lie about."""
        return {str(one.relative_to(self.out)): one.read_text() if one.is_file() else "" for one in self.out.rglob("*")}

    def attempts(self) -> int:
        """Return how many attempts were begun at the newest step."""
        with opened(self.url) as store:
            bodies = [decode_body(one.kind, one.body) for one in store.events("r", 1) if one.kind == "step_started"]
            return sum(body.call == bodies[-1].call for body in bodies)

    def take_away(self) -> None:
        """Free the run of its worker, as a lapsed lease or a lost session does."""
        with opened(self.url) as store:
            row = store.run("r")
            assert row is not None
            assert row.owner is not None
            store.leave(row.owner)


@contextmanager
def opened(url: str) -> Iterator[Any]:
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


def points_of(folder: Path, effect: str) -> list[Point]:
    """Return every point inside an effect, from a process that is left alone."""
    life = Life(folder, effect)
    assert life.spawn().wait(60) == 0, (folder / "said.txt").read_text()
    assert life.content() == EFFECTS[effect]
    passed = json.loads((folder / "points.json").read_text())
    points = [Point(number, name, is_locked) for number, (name, is_locked) in enumerate(passed, 1)]
    if effect != "make_folder":
        return points
    # When a folder is there, its successor has nothing to do about it, and does not wait.
    return [one._replace(is_locked=one.is_locked and _makes_a_folder(points[one.number - 1 :])) for one in points]


def _makes_a_folder(coming: list[Point]) -> bool:
    return next(one.name for one in coming if one.name in ("mkdir", "flock")) == "mkdir"


def stop_and_wake(life: Life, point: Point, *, kill: bool = False) -> str:
    """Stop a process at a point, let another one do the run, and wake the first. Returns what is wrong."""
    first = life.spawn(point.number)
    second: Program | None = None
    try:
        wait_until_stopped(first.pid)
        before = life.content()
        life.take_away()
        second = life.spawn()
        if point.is_locked:
            wait_until(lambda: life.attempts() == 2 or second.poll() is not None)
            if second.poll() is not None or life.content() != before:
                return f"{point}: it was written beside the holder: {before} {life.content()}"
            os.kill(first.pid, signal.SIGKILL if kill else signal.SIGCONT)
        if second.wait(60) != 0:
            return f"{point}: {(life.folder / 'said.txt').read_text()[-2000:]}"
        if not point.is_locked:
            if life.content() != EFFECTS[life.effect]:
                return f"{point}: the successor did not finish: {life.content()}"
            os.kill(first.pid, signal.SIGCONT)
        first.wait(60)
        found = life.content()
        return f"{point}: {found}" if found != EFFECTS[life.effect] else ""
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("effect", EFFECTS)
def test_stopped_at_any_point_of_a_file_effect_it_changes_nothing_when_another_has_its_run(
    tmp_path: Path, effect: str
) -> None:
    points = points_of(tmp_path / "undisturbed", effect)
    assert {True, False} == {point.is_locked for point in points}
    with ThreadPoolExecutor(2) as pool:
        lives = [Life(tmp_path / f"{point.number}", effect) for point in points]
        problems = [problem for problem in pool.map(stop_and_wake, lives, points) if problem]
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("effect", ["write", "append"])
def test_a_holder_that_is_killed_frees_the_folder_for_its_successor(tmp_path: Path, effect: str) -> None:
    points = [point for point in points_of(tmp_path / "undisturbed", effect) if point.is_locked]
    (point,) = [point for point in points if point.name == "replace"][:1]
    assert stop_and_wake(Life(tmp_path / "killed", effect), point, kill=True) == ""


# -- in one process ----------------------------------------------------------------------------------------------------
@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    return out


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a folder, as another writer does."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


class Tried:
    """Counts the attempts that came to the lock, and those that were given up and refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = 0
        self.refused: list[str] = []
        wait_for, refuse_given_up = folders._wait_for, Attempt.refuse_given_up

        def counted(*args: Any) -> None:
            self.waiting += 1
            wait_for(*args)

        def noted(attempt: Attempt) -> None:
            try:
                refuse_given_up(attempt)
            except everstep.errors.NotDone as error:
                self.refused.append(str(error))
                raise

        monkeypatch.setattr(folders, "_wait_for", counted)
        monkeypatch.setattr(Attempt, "refuse_given_up", noted)


async def test_an_attempt_that_was_cancelled_while_it_waited_for_the_folder_writes_nothing(
    machine: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried(monkeypatch)

    @workflow(name="flow")
    async def flow() -> str:
        try:
            async with asyncio.timeout(5):
                await files.write("a", "late", witness=False)
        except TimeoutError:
            return "gave up"
        return "written"

    app = await machine.boot()
    with locked(here):
        run = await app.start(flow, id="r")
        await machine.until(lambda: tried.waiting == 1)
        await machine.until(lambda: "timer_started" in machine.kinds("r"))
        machine.clock.advance(5)
        assert await run.result(timeout=60) == "gave up"
    await machine.until(lambda: len(tried.refused) == 1)
    assert "was given up" in tried.refused[0]
    assert list(here.iterdir()) == []


async def test_an_attempt_whose_app_has_closed_writes_nothing(
    machine: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried(monkeypatch)

    @workflow(name="flow")
    async def flow() -> None:
        await files.append("a", "x", witness=False)

    first = await machine.boot()
    with locked(here):
        await first.start(flow, id="r")
        await machine.until(lambda: tried.waiting == 1)
        await machine.stop(first)
        second = await machine.worker()
        # The first attempt's thread may end a moment after its app: then a sweep of the second finds the run free.
        await machine.until(lambda: tried.waiting == 2 or machine.clock.advance(1))
    await second.get("r").result(timeout=60)
    await machine.until(lambda: len(tried.refused) == 1)
    assert {one.name: one.read_text() for one in here.iterdir()} == {"a": "x"}


async def test_of_two_apps_in_one_process_the_one_that_lost_the_run_writes_nothing(
    machine: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first does not know that its run was taken over: only the store does."""
    tried = Tried(monkeypatch)

    @workflow(name="flow")
    async def flow() -> None:
        await files.write("a", "1", witness=False)
        await files.write("a", "2", witness=False)

    overtaken = threading.Event()
    proven = threading.Event()
    first = await machine.boot()
    refused: list[str] = []
    real = Attempt.refuse_overtaken

    def refuse_overtaken(attempt: Attempt) -> None:
        if proven.is_set():
            real(attempt)
            return
        proven.set()
        assert overtaken.wait(20)
        try:
            real(attempt)
        except everstep.errors.NotDone as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(Attempt, "refuse_overtaken", refuse_overtaken)
    await first.start(flow, id="r")
    await asyncio.to_thread(proven.wait, 20)
    machine.store.leave(first.worker)
    second = await machine.worker()
    await machine.until(lambda: tried.waiting == 2)
    overtaken.set()
    assert await second.get("r").result(timeout=60) is None
    assert (here / "a").read_text() == "2"
    await machine.until(lambda: refused)
    assert refused[0].endswith("Nothing was changed.")


async def test_a_folder_that_was_replaced_while_its_lock_was_awaited_is_locked_anew(
    machine: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried(monkeypatch)
    folder = here / "d"
    folder.mkdir()

    @workflow(name="flow")
    async def flow() -> None:
        await files.write("d/a", "new", witness=False)

    app = await machine.boot()
    with locked(folder):
        run = await app.start(flow, id="r")
        await machine.until(lambda: tried.waiting == 1)
        os.rename(folder, here / "away")
        folder.mkdir()
        other = os.open(folder, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
    await machine.until(lambda: tried.waiting == 2)
    assert list(folder.iterdir()) == [], "the folder that is there now has a lock of its own"
    fcntl.flock(other, fcntl.LOCK_UN)
    os.close(other)
    await run.result(timeout=60)
    assert (folder / "a").read_text() == "new"
    assert list((here / "away").iterdir()) == []


def test_a_process_that_was_forked_under_the_lock_does_not_keep_it(here: Path, tmp_path: Path) -> None:
    code = """
    import multiprocessing, threading
    from everstep.effects import files as bodies

    context = multiprocessing.get_context("fork")
    children = []
    replace = os.replace

    def forking(*args, **kwargs):
        child = context.Process(target=time.sleep, args=(600,), daemon=True)
        child.start()
        children.append(child)
        replace(*args, **kwargs)

    @workflow(name="flow")
    async def flow():
        await everstep.files.write("a", "1", witness=False)
        await everstep.files.write("a", "2", witness=False)

    bodies.os.replace = forking
    everstep.run(flow, id="r", url=URL)
    assert len(children) == 2 and all(child.is_alive() for child in children)
    for child in children:
        child.kill()
    """
    (tmp_path / "program.py").write_text(PRELUDE + textwrap.dedent(code))
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "runs.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert (here / "a").read_text() == "2"


HOLDER = (
    "import fcntl, os, sys, time; f = os.open('.', 0); fcntl.flock(f, 2); print('held', flush=True); time.sleep(600)"
)


async def test_a_folder_that_is_held_for_too_long_is_asked_about_and_the_holder_is_named(
    machine: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PATIENCE_SECONDS", 0.2)

    @workflow(name="flow")
    async def flow() -> None:
        await files.write("a", "new", witness=False)

    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        wait_until_stopped(holder.pid)
        app, run = await machine.start(flow, id="r")
        with pytest.raises(RunHeld):
            await run.result(timeout=60)
        hold = machine.hold("r")
        assert hold.resolutions == ["retry", "cancel"]
        assert hold.summary.startswith("files.write: ")
        assert "has been locked for 0.2 s by" in hold.summary
        if Path("/proc/locks").exists():
            assert f"process {holder.pid} (" in hold.summary
            assert ", which is stopped)" in hold.summary
        assert list(here.iterdir()) == []
    finally:
        holder.kill()
        holder.communicate()
    await app.resolve("r", "retry")
    await run.result(timeout=60)
    assert (here / "a").read_text() == "new"


async def test_while_the_store_cannot_be_asked_nothing_is_written_and_the_folder_is_free(
    machine: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.boot()
    outage = threading.Event()
    asked = threading.Event()
    real = app.store.run

    def run_row(id: str) -> Any:
        if threading.get_ident() != app.thread and not outage.is_set():
            asked.set()
            raise everstep.errors.StoreError("the server is away")
        return real(id)

    monkeypatch.setattr(app.store, "run", run_row)

    @workflow(name="flow")
    async def flow() -> None:
        await files.write("a", "new", witness=False)

    run = await app.start(flow, id="r")
    await asyncio.to_thread(asked.wait, 20)
    with locked(here):
        assert list(here.iterdir()) == []
    outage.set()
    await run.result(timeout=60)
    assert (here / "a").read_text() == "new"
