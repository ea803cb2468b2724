"""The store on SQLite, by APSW."""

from everstep.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
