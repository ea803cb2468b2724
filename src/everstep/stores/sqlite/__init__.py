"""The stores on SQLite, by APSW: in a file, and in memory."""

from everstep.stores.sqlite.memory import MemoryStore
from everstep.stores.sqlite.store import SqliteStore

__all__ = ["MemoryStore", "SqliteStore"]
