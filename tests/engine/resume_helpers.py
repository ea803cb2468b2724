"""What the tests of resume and recovery share: one store file, a clock, and processes that are started and killed.

A process is here an `App` with a store object of its own on the same file. `kill` lets it vanish as the kernel does:
nothing more is written, its liveness lock is free. Where a real process matters, tests start one (`Program`).
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from everstep.engine.app.app import App
from everstep.engine.app.handles import Run
from everstep.engine.code.replay import Replayed
from everstep.engine.code.workflow import DECLARED, Workflow
from everstep.engine.history.verify import load_verified
from everstep.engine.run.resume import replay
from everstep.engine.verbs.runs import signal_post
from everstep.model.events import EventRow, decode_body
from everstep.stores.protocol import HoldRow, RunRow, Store
from everstep.stores.sqlite import SqliteStore
from everstep.testing.clock import FakeClock
from tests import forked
from tests.waiting import DEADLINE_SECONDS, open_raw

PATIENCE_SECONDS = DEADLINE_SECONDS


def freeze(app: App) -> None:
    """Let a process be stopped as by SIGSTOP, as far as its lease is concerned."""
    task = app.background.let_end("pump")
    assert task is not None
    task.cancel()


class Machine:
    """One file, one clock, and the apps on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "runs.db"
        self.clock = FakeClock()
        self.notes: list[str] = []
        """What bodies of steps write down: an account that is not the engine's."""
        self._apps: list[App] = []
        self._reader: SqliteStore | None = None

    # -- processes -------------------------------------------------------------------------------------------------
    def open_store(self) -> SqliteStore:
        """Open the file once more."""
        return SqliteStore(self.path, durability="process", clock=self.clock.now)

    async def boot(self, *, store: Store | None = None, **options: Any) -> App:
        """Start a process."""
        app = App(store or self.open_store(), **{"clock": self.clock, **options})
        await app.open()
        self._apps.append(app)
        return app

    async def worker(self, **options: Any) -> App:
        """Start a process that takes up what others left behind."""
        return await self.boot(recover=True, **options)

    async def start(self, workflow: Any, *arguments: Any, **options: Any) -> tuple[App, Run]:
        """Start a process, and a run in it."""
        app = await self.boot()
        return app, await app.start(workflow, *arguments, **options)

    async def kill(self, app: App) -> None:
        """Let a process vanish: it writes nothing more, and the kernel frees its lock."""
        self._apps.remove(app)
        app.draining = True
        app.committer._closed = True
        app.notifier._is_closed = True
        for _, sending in app.notifier._under_way.values():
            sending.cancel()
        for task in [*app._tasks, *app.background.close()]:
            task.cancel()
        for driver in list(app.drivers.values()):
            driver.stop()
        if app.committer._thread is not None:
            app.committer._batches.put(None)
            await asyncio.to_thread(app.committer._thread.join)
        app.threads.close()
        await asyncio.sleep(0)
        app.store.close()

    async def stop(self, app: App) -> None:
        """Stop a process in good order."""
        self._apps.remove(app)
        await app.close()

    async def shut(self) -> None:
        """Stop everything that is left."""
        for app in list(self._apps):
            await self.stop(app)
        if self._reader is not None:
            self._reader.close()

    async def send_unseen(self, app: App, run: str, name: str, value: Any) -> None:
        """Send a signal as a process does that cannot know what the run waits for."""
        await app.committer.submit(signal_post(app, run, name, value, None))
        app.wake(run)

    # -- looking ---------------------------------------------------------------------------------------------------
    @property
    def store(self) -> SqliteStore:
        """The file, seen by somebody who only reads."""
        if self._reader is None:
            self._reader = self.open_store()
        return self._reader

    def row(self, run: str) -> RunRow:
        row = self.store.run(run)
        assert row is not None, run
        return row

    def status(self, run: str) -> str:
        return self.row(run).status

    def events(self, run: str, generation: int | None = None) -> list[EventRow]:
        return self.store.events(run, generation or self.row(run).generation)

    def kinds(self, run: str, *only: str) -> list[str]:
        return [event.kind for event in self.events(run) if not only or event.kind.startswith(only)]

    def bodies(self, run: str, kind: str) -> list[Any]:
        return [decode_body(kind, event.body) for event in self.events(run) if event.kind == kind]

    def hold(self, run: str) -> HoldRow:
        """Return the one open hold of a run."""
        (hold,) = self.store.holds(run=run)
        return hold

    def report(self, run: str) -> dict[str, Any]:
        report: dict[str, Any] = msgspec.json.decode(self.hold(run).report)
        return report

    def replay(self, run: str) -> Replayed:
        """Replay a run's history against the code as it is declared now. Changes nothing."""
        row = self.row(run)
        from everstep.codec import Codec

        done = replay(
            self.store, Codec(), row, DECLARED.named(row.workflow), load_verified(self.store, row), quiet=True
        )
        done.execution.evict()
        return done

    def dump(self) -> dict[str, list[Any]]:
        """Return everything in the file, for tests that nothing was changed."""
        connection = open_raw(self.path)
        try:
            tables = (
                "runs",
                "events",
                "payloads",
                "signals",
                "followers",
                "holds",
                "effects",
                "waiters",
                "answers",
                "streams",
            )
            return {table: list(connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3")) for table in tables}
        finally:
            connection.close()

    def sql(self, statement: str, *parameters: Any) -> None:
        """Change the file behind everybody's back."""
        connection = open_raw(self.path)
        try:
            connection.execute(statement, parameters)
        finally:
            connection.close()

    # -- waiting ---------------------------------------------------------------------------------------------------
    async def until(self, condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until something is so."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "it does not become so"
            await asyncio.sleep(0.001)

    async def until_status(self, run: str, *statuses: str) -> None:
        def is_there() -> bool:
            row = self.store.run(run)
            return row is not None and row.status in statuses

        await self.until(is_there)

    async def rest(self, *apps: App) -> None:
        """Wait until nothing moves without time."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.clock.rest(*(apps or self._apps))

    async def advance(self, seconds: float) -> None:
        """Let time pass, and everything that it causes happen."""
        self.clock.advance(seconds)
        for app in self._apps:
            app.pump.nudge()
        await self.rest()

    async def watch(self, app: App, seconds: float) -> None:
        """Let an app watch the others for so long."""
        await self.until(lambda: app.pump._watch.next_at)  # it has seen them once
        self.clock.advance(seconds)
        app.pump.nudge()


def declared(workflow: Any) -> Workflow:
    """Return what the decorator really made of a function."""
    assert isinstance(workflow, Workflow)
    return workflow


class Gate:
    """Where a body waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.opened.wait()


PRELUDE = """
import asyncio, os, signal, sys, time
import everstep
from everstep import Retry, step, workflow
URL = sys.argv[1]
"""


class Program:
    """A real process with code of its own."""

    def __init__(self, folder: Path, code: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        path = folder / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(code))
        self.process = forked.Program(
            [sys.executable, str(path), str(folder / "runs.db"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self, seconds: float = DEADLINE_SECONDS) -> tuple[int, str, str]:
        """Wait for its end; return its exit status and what it said."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"it does not end:\n{out}\n{err}") from None
        return self.process.returncode, out, err


def run_program(folder: Path, code: str, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a process to its end; return its exit status and what it printed."""
    status, out, err = Program(folder, code, *arguments, environment=environment).end()
    assert status in (0, -signal.SIGKILL, -signal.SIGSEGV, 7), err
    return status, out


def steps_of(kinds: Sequence[str]) -> list[str]:
    """Return the kinds that are about steps."""
    return [kind for kind in kinds if kind.startswith("step_")]
