"""What the tests of stores share: runs and appends made by hand, and a harness for each kind of store."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import apsw

import everstep
from everstep.model.digests import chain_next, chain_start
from everstep.model.events import EventRow
from everstep.stores.protocol import (
    LAST,
    Append,
    CheckpointRow,
    Claimed,
    NewRun,
    Operation,
    RowChange,
    RunRow,
    StartRun,
    Store,
    Verdict,
)
from everstep.stores.sqlite import MemoryStore, SqliteStore
from tests.stores.model_reads import ModelStore
from tests.waiting import open_raw

if TYPE_CHECKING:
    from everstep.stores.postgres import PostgresStore


def events_after(seq: int, digest: bytes, count: int, body: bytes = b"{}") -> list[EventRow]:
    """Return events that follow a head."""
    events = []
    for number in range(seq + 1, seq + 1 + count):
        digest = chain_next(digest, number, "step_started", "fetch", number, body)
        events.append(EventRow(number, "step_started", "fetch", number, body, digest))
    return events


def new_run(id: str, **fields: Any) -> NewRun:
    """Return a run with its first event. Fields of `NewRun` and of its row may be given."""
    extra = {name: fields.pop(name) for name in ("payloads", "follower", "follower_call") if name in fields}
    generation = fields.get("generation", 1)
    event = EventRow(
        1, "run_started", "", 1, b"{}", chain_next(chain_start(id, generation), 1, "run_started", "", 1, b"{}")
    )
    row = RunRow(id=id, head_seq=1, head_digest=event.digest, **{"workflow": "order", **fields})
    return NewRun(row, event, **extra)


def with_history(new: NewRun, count: int) -> NewRun:
    """Return a run that begins with so many more events."""
    new.more = events_after(1, new.event.digest, count)
    new.row.head_seq, new.row.head_digest = new.more[-1].seq, new.more[-1].digest
    return new


def append_to(row: RunRow, count: int = 1, status: str = "running", at: int = 10, **fields: Any) -> Append:
    """Return an append that fits a run's row. Fields of `Append` and of its `RowChange` may be given."""
    names = ("wake_at", "current_step", "published", "outcome", "progress", "budget", "stays")
    change = {name: fields.pop(name) for name in names if name in fields}
    body, kind = fields.pop("body", b"{}"), fields.pop("kind", None)
    events = events_after(row.head_seq, row.head_digest, count, body)
    expected: dict[str, Any] = {
        "run": row.id,
        "generation": row.generation,
        "epoch": row.epoch,
        "expected_seq": row.head_seq,
        "expected_digest": row.head_digest,
        "events": events if kind is None else [event._replace(kind=kind) for event in events],
        "row": RowChange(status, at, **change),  # type: ignore[arg-type]
    }
    return Append(**(expected | fields))


def checkpoint_for(append: Append, place: int = -1, **columns: Any) -> CheckpointRow:
    """Return a checkpoint for an event of an append."""
    row = CheckpointRow(append.run, append.generation, append.events[place].seq, b"p", b"e", b"s", b"d")
    return row._replace(**columns)


class Harness:
    """A store under test, with a clock, and workers that a test can kill."""

    def __init__(self) -> None:
        self.now = 1_000

    store: Store

    def enter(self, worker: str, lease_until: int = 10_000) -> None:
        """Enter a worker of another process."""
        self.store.register_worker(worker, 1, "host", lease_until)

    def kill(self, worker: str) -> None:
        """Let a worker's process be gone."""
        raise NotImplementedError

    def caller(self) -> Any:
        """Return a caller's own connection to the store's database, or None if it has none."""
        return None

    def close(self) -> None:
        """Close everything."""
        self.store.close()

    # -- shorthands -------------------------------------------------------------------------------------------------
    def do(self, *operations: Operation) -> list[Verdict]:
        """Commit operations in one batch."""
        return self.store.commit(operations)

    def one(self, operation: Operation) -> Verdict:
        """Commit one operation."""
        return self.store.commit([operation])[0]

    def start(self, id: str, **fields: Any) -> RunRow:
        """Start a run and return its row."""
        self.one(StartRun(new_run(id, **fields)))
        return self.row(id)

    def row(self, id: str) -> RunRow:
        """Return a run that is there."""
        row = self.store.run(id)
        assert row is not None
        return row

    def end(self, id: str, status: str = "completed", **fields: Any) -> Verdict:
        """End a run."""
        return self.one(append_to(self.row(id), status=status, **fields))

    def checkpoints(self, id: str, generation: int = 1) -> list[CheckpointRow]:
        """Return the checkpoints of a run, the newest first."""
        found: list[CheckpointRow] = []
        while (row := self.store.checkpoint(id, generation, found[-1].seq if found else LAST)) is not None:
            found.append(row)
        return found

    def due(self, worker: str = "me", at: int = 1_000, everyone: bool = True, limit: int = 100) -> list[str]:
        """Return what is due for a worker that knows the workflow `order`."""
        return self.store.due(at=at, workflows=["order"], worker=worker, everyone=everyone, limit=limit)


class ModelHarness(Harness):
    """The model that the differential tests compare every store with."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._model = ModelStore(lambda: self.now)
        self.store = cast(Store, self._model)

    def kill(self, worker: str) -> None:
        self._model.dead.add(worker)


class MemoryHarness(Harness):
    """The in-memory store."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.store = self._memory = MemoryStore(clock=lambda: self.now)

    def kill(self, worker: str) -> None:
        self._memory._workers._held.pop(worker).release()


class SqliteHarness(Harness):
    """The SQLite store; each worker that enters has a store object of its own, which dies with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "runs.db"
        self.store = self.sqlite = SqliteStore(self.path, durability="process", clock=lambda: self.now)
        self._others: dict[str, SqliteStore] = {}

    def enter(self, worker: str, lease_until: int = 10_000) -> None:
        other = SqliteStore(self.path, durability="process", clock=lambda: self.now)
        other.register_worker(worker, 1, "host", lease_until)
        self._others[worker] = other

    def kill(self, worker: str) -> None:
        self._others.pop(worker).close()

    def caller(self) -> apsw.Connection:
        return open_raw(self.path)

    def close(self) -> None:
        for other in self._others.values():
            other.close()
        super().close()


class PostgresHarness(Harness):
    """The PostgreSQL store, in a schema of its own; each worker that enters has a store object of its own."""

    def __init__(self, folder: Path, durability: str = "process") -> None:
        super().__init__()
        from tests.postgres.server import server

        self._durability = durability
        self.server = server()
        self.schema = self.server.fresh_schema()
        self._others: dict[str, PostgresStore] = {}
        self.store = self.postgres = self.another()

    def another(self, **options: Any) -> "PostgresStore":
        """Return one more store object on the same schema."""
        from everstep.stores.postgres import PostgresStore

        settings = {
            "durability": self._durability,
            "clock": lambda: self.now,
            "settle_seconds": 0.0,
            "grace_seconds": 0.0,
            "whole_seconds": 0.0,
        }
        return PostgresStore(self.server.url(self.schema), **(settings | options))

    def enter(self, worker: str, lease_until: int = 10_000) -> None:
        other = self.another()
        other.register_worker(worker, 1, "host", lease_until)
        self._others[worker] = other

    def kill(self, worker: str) -> None:
        other = self._others.pop(worker)
        other.close()
        self.server.wait_for_sessions_to_end(other.name)

    def caller(self) -> Any:
        import psycopg

        return psycopg.connect(self.server.uri, autocommit=True)

    def close(self) -> None:
        for other in self._others.values():
            other.close()
        super().close()
        self.server.drop(self.schema)


HARNESSES: dict[str, Callable[[Path], Harness]] = {
    "memory": MemoryHarness,
    "sqlite": SqliteHarness,
    "postgres": PostgresHarness,
}
"""A further store adds its harness here and must pass the whole conformance suite."""


def begin_python(code: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Begin a process with pipes. `everstep` is the one under test."""
    path = os.pathsep.join([str(Path(everstep.__file__).parents[1]), str(Path(__file__).parents[2])])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def python(code: str, *arguments: str, **environment: str) -> str:
    """Run a process to its end and return what it printed."""
    with begin_python(code, *arguments, **environment) as process:
        out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out


def claimed(verdict: Verdict) -> RunRow:
    """Return the row of a claim that was accepted."""
    assert isinstance(verdict, Claimed), verdict
    return verdict.row


def numbers(deliveries: Sequence[Any]) -> list[int]:
    """Return the numbers of deliveries."""
    return [delivery.number for delivery in deliveries]
