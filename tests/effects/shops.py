"""What the tests of atomic steps share: a shop's database, accounts of what is in it, and databases that fail."""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw

from everstep.effects.databases import SqliteFile
from tests.waiting import open_raw, open_sqlite


class Shop:
    """A SQLite file with one table, as a user's program has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.open() as connection:
            connection.execute("CREATE TABLE sales (key TEXT, item TEXT)")

    @contextlib.contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        connection = open_sqlite(self.path)
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    def sales(self) -> list[str]:
        """Return what was sold, in order: an account that is not the engine's."""
        with self.open() as connection:
            return [item for (item,) in connection.execute("SELECT item FROM sales ORDER BY rowid")]

    def markers(self) -> list[dict[str, Any]]:
        """Return the markers."""
        with self.open() as connection:
            connection.row_factory = sqlite3.Row
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'everstep_markers'").fetchall():
                return []
            return [dict(row) for row in connection.execute("SELECT * FROM everstep_markers ORDER BY at")]

    def outcomes(self) -> list[bytes]:
        """Return the outcomes of the markers that are not void."""
        return [marker["outcome"] for marker in self.markers() if marker["outcome"] is not None]


def store_rows(path: Path, table: str = "sales") -> list[str]:
    """Return the items in a user's table in a store."""
    connection = open_raw(path, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchall():
            return []
        return [item for (item,) in connection.execute(f"SELECT item FROM {table} ORDER BY rowid")]
    finally:
        connection.close()


class Troubled(SqliteFile):
    """A SQLite file whose transactions do what a test wants instead."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.before_begin: Callable[[], None] = lambda: None
        self.instead_of_commit: Callable[[Callable[[], None]], None] = lambda commit: commit()
        self.marker_errors: list[Exception] = []
        self.begun = 0

    def begin(self, store: Any) -> Any:
        self.begun += 1
        self.before_begin()
        transaction = super().begin(store)
        commit = transaction.commit
        transaction.commit = lambda: self.instead_of_commit(commit)  # type: ignore[method-assign]
        if self.marker_errors:
            error = self.marker_errors.pop(0)

            def refuse(marker: Any) -> None:
                raise error

            transaction.write_marker = refuse  # type: ignore[method-assign]
        return transaction


class Stop:
    """Where a thread waits until the test lets it go on. Only the first one that comes here waits."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(20)


def sqlite_error(code: int, text: str = "trouble") -> sqlite3.OperationalError:
    """Return an error as SQLite raises it."""
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
