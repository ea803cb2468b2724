"""What the body of an atomic step may do with its connection: everything except ending the transaction and touching
Everstep's tables.

SQLite asks an authorizer about each part of a statement before it is prepared. A refused part raises in the body and is
remembered: a body that swallows the error is refused as well, and everything that it wrote is rolled back.
"""

from collections.abc import Callable
from typing import Any, Final

MARKERS: Final = "everstep_markers"

STORE_TABLES: Final = frozenset(
    {
        *("meta", "runs", "events", "payloads", "signals", "slots", "followers", "holds", "workers", "ended_workers"),
        *("gone_workers",),
        *("answers", "archive", "budgets", "checkpoints", "effects", "notifications", "queues", "schedules", "streams"),
        *("waiters", "witnesses", "sqlite_sequence", "deletions", "relied", "tagged", "arrivals"),
        *("saved_threads", "saved_states", "saved_parts", "saved_writes", "saved_items"),
    }
)
"""The tables of a store, and names that later releases may need for theirs."""

READING_PRAGMAS: Final = frozenset(
    {
        *("defer_foreign_keys", "foreign_key_check", "foreign_key_list", "index_info", "index_list", "index_xinfo"),
        *("integrity_check", "quick_check", "table_info", "table_list", "table_xinfo"),
    }
)
"""Pragmas that a body may read with an argument."""

WENT_ON: Final = "an error rolled its transaction back, and its body went on: let that error pass"
ENDED: Final = (
    "its body took the guard of its connection away and ended the transaction, but the step itself begins and commits "
    "it, with its marker in it (nothing undoes what a body commits by itself)"
)

# SQLite's action codes, as in its manual. The standard library and APSW name them too, with the same numbers.
DENY: Final = 1
ALLOW: Final = 0
PRAGMA: Final = 19
TRANSACTION: Final = 22
FILES: Final = frozenset({24, 25})
"""ATTACH, DETACH."""
ON_FIRST: Final = frozenset({2, 4, 6, 8, 9, 11, 18, 23, 29, 30})
"""Actions whose first argument is a table: CREATE TABLE, TEMP TABLE, VIEW, VTABLE; DELETE, INSERT, UPDATE, DROP."""
ON_SECOND: Final = frozenset({1, 3, 5, 7, 10, 12, 14, 16, 26})
"""Actions whose second argument is a table: CREATE and DROP of indexes and triggers, ALTER TABLE."""


class Guard:
    """The authorizer of a connection while a body has it."""

    def __init__(self, is_open: Callable[[], bool], *, is_store: bool) -> None:
        self.broke = ""
        """The first forbidden thing that the body did; empty if none."""
        self._is_open = is_open
        self._is_store = is_store
        self._protected = STORE_TABLES | {MARKERS} if is_store else frozenset({MARKERS})

    def __call__(self, action: int, first: str | None, second: str | None, database: Any, trigger: Any) -> int:
        """Answer SQLite's question about one action."""
        why = self._objection(action, first or "", second or "")
        if not why:
            return ALLOW
        self.broke = self.broke or why
        return DENY

    def _objection(self, action: int, first: str, second: str) -> str:
        if action == TRANSACTION:
            return (
                f"its body said {first}, but the step itself begins and commits the transaction, with its marker in it "
                "(`with connection:` and `executescript` commit as well)"
            )
        if not self._is_open():
            return WENT_ON
        if action in FILES:
            return "its body attached another file, which the transaction does not cover"
        table = first if action in ON_FIRST else second if action in ON_SECOND else ""
        if table.lower() in self._protected:
            return f"its body wrote to {table}, which belongs to Everstep"
        if action == PRAGMA and second and first.lower() == "foreign_keys":
            return "its body set foreign_keys, which does nothing here: say so in the URL, sqlite:///…?foreign_keys=on"
        if self._is_store and action == PRAGMA and second and first.lower() not in READING_PRAGMAS:
            return f"its body set the pragma {first} of the store"
        return ""
