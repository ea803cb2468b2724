"""A transaction in a SQLite file that a step's body and its marker share.

It works with a connection of the standard library and one of APSW, which are only opened differently.
"""

import contextlib
import os
from typing import Any

from everstep.model.markers import Marker
from everstep.stores.sqlite.guard import ENDED, WENT_ON, Guard
from everstep.stores.sqlite.queries import statements


class MarkedTransaction:
    """An open transaction. It belongs to the thread that opened it; only `interrupt` may be called from another."""

    def __init__(self, connection: Any, *, is_store: bool) -> None:
        self.connection = connection
        self._guard = Guard(self._is_open, is_store=is_store)
        self._mark = int.from_bytes(os.urandom(3), "big") + 1
        """What only this transaction has: the number of its savepoint, and the version of its temporary database."""

    def begin(self) -> None:
        """Begin the transaction as a writer, so that no other connection writes before it ends."""
        self.connection.execute("BEGIN IMMEDIATE")
        self._execute("create_markers")

    # -- the body -------------------------------------------------------------------------------------------------
    def lend(self) -> Any:
        """Return the connection for the body. From now on it can neither commit nor roll back."""
        if hasattr(self.connection, "set_commit_hook"):
            self.connection.set_commit_hook(lambda: True)  # a commit by the body becomes a rollback
        # A body can replace the guard. So `take_back` checks for what no other transaction has: a savepoint, and a
        # version of the temporary database, which a rollback undoes and a commit keeps.
        self.connection.execute(f"PRAGMA temp.user_version = {self._mark}")
        self.connection.execute(f"SAVEPOINT everstep_{self._mark}")
        self.connection.set_authorizer(self._guard)
        return self.connection

    def take_back(self, *, returned: bool) -> str:
        """Take the connection back. Returns the forbidden thing that the body did to the transaction, or an
        empty text.
        """
        try:
            is_open = self._is_open()
            self.connection.set_authorizer(None)
            if hasattr(self.connection, "set_commit_hook"):
                self.connection.set_commit_hook(None)
        except Exception as error:  # noqa: BLE001 - each library has its own error for a closed connection
            return f"its body closed the connection ({error})"
        if self._guard.broke:
            return self._guard.broke
        if is_open:
            return "" if self._ends_savepoint(returned=returned) else ENDED
        if self._was_committed():
            return ENDED
        return WENT_ON if returned else ""

    def _ends_savepoint(self, *, returned: bool) -> bool:
        """Return whether the transaction is the one in which the body began."""
        try:
            self.connection.execute(f"RELEASE everstep_{self._mark}")
        except Exception as error:
            if "no such savepoint" in str(error):
                return False
            if returned:
                raise
        return True

    def _was_committed(self) -> bool:
        """Return whether the transaction that is over was committed."""
        try:
            ((version,),) = self.connection.execute("PRAGMA temp.user_version").fetchall()
        except Exception:  # noqa: BLE001 - nothing can be asked any more
            return False
        return bool(version == self._mark)

    def _is_open(self) -> bool:
        return bool(self.connection.in_transaction)

    # -- the marker -----------------------------------------------------------------------------------------------
    def read_marker(self, key: str) -> Marker | None:
        """Return the marker under a key."""
        for row in self._execute("read_marker", key):
            return Marker(*row)
        return None

    def write_marker(self, marker: Marker) -> None:
        """Write a marker. The same transaction has found no marker with an outcome under its key."""
        cursor = self._execute("write_marker", *marker)
        changed = self.connection.changes() if hasattr(self.connection, "changes") else cursor.rowcount
        assert changed == 1, "a marker with an outcome is never replaced"

    def marked_runs(self, before: int) -> list[str]:
        """Return the runs whose markers are all from before a time."""
        return [run for (run,) in self._execute("marked_runs", before).fetchall()]

    def forget_markers(self, run: str, before: int) -> int:
        """Delete the markers of a run from before a time, and return how many there were."""
        cursor = self._execute("forget_markers", run, before)
        return int(self.connection.changes() if hasattr(self.connection, "changes") else cursor.rowcount)

    def _execute(self, name: str, *parameters: Any) -> Any:
        return self.connection.execute(statements("markers.sql")[name], parameters)

    # -- the end --------------------------------------------------------------------------------------------------
    def commit(self) -> None:
        """Commit. An error does not say whether the transaction is durable."""
        self.connection.execute("COMMIT")

    def close(self) -> None:
        """Close the connection. What is not committed is rolled back: here, or when the file is opened next."""
        with contextlib.suppress(Exception):  # what cannot be rolled back now is undone when the file is opened next
            self.connection.close()

    def interrupt(self) -> None:
        """Interrupt the statement that is running, if any. May be called from any thread."""
        with contextlib.suppress(Exception):  # it is closed already
            self.connection.interrupt()
