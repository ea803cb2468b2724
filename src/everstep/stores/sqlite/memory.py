"""The store in memory, for tests: a SQLite database that no file holds. What it does is what a store in a file does.

One connection writes and reads, under one lock. No other process can see the store, so its liveness locks are a set of
places, and nothing has to be looked at again: `changed` is always False.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import apsw

from everstep.errors import Misuse
from everstep.stores.protocol import Operation, Verdict
from everstep.stores.sqlite.commits import Writer
from everstep.stores.sqlite.connections import Identity, Patience, connect
from everstep.stores.sqlite.liveness import LiveLock, LiveLocks
from everstep.stores.sqlite.opening import OURS, migrate
from everstep.stores.sqlite.queries import query
from everstep.stores.sqlite.reads import Reader
from everstep.stores.sqlite.store import SqliteStore
from everstep.stores.sqlite.workers import Workers

NAME: Final = "memory:"
BESIDE: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI

_numbers: Final = itertools.count(1)


class MemoryStore(SqliteStore):
    """A store in memory. It ends when it is closed, or with its process."""

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        self.path = self.url = NAME
        self.is_new = True
        connection, patience, lock = open_copy(), Patience(), threading.Lock()
        self._reader = Reader(connection, NAME, lock)
        self._begin(clock)
        self._writer = Writer(connection, patience, NAME, Identity(None), lock)
        self._workers = Workers(self._writer, PlacesInMemory(), self._reader.places)
        self._beside = f"file:/everstep-{next(_numbers)}?vfs=memdb"
        self._kept = apsw.Connection(self._beside, flags=BESIDE)

    def close(self) -> None:
        """Close the store. All that was in it is gone."""
        super().close()
        self._kept.close()

    def connect(self) -> apsw.Connection:
        """Return a new connection to a database of its own beside the store, for what atomic steps write.

        It is not the store's, for a body may take as long as it likes and a second connection to a database in memory
        does not even read while the first one writes.
        """
        return apsw.Connection(self._beside, flags=BESIDE)

    def write_in(self, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
        """Refuse: no other connection leads to what is here."""
        raise Misuse("A store in memory shares no database with a caller: for transaction= open a SQLite file.")


class PlacesInMemory(LiveLocks):
    """The places of workers in a store that no other process sees. Each is held until it is released."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._held: set[int] = set()

    def take(self, place: int) -> LiveLock | None:
        """Take a place, or return None if it is held."""
        if place in self._held:
            return None
        self._held.add(place)
        return LiveLock(self, place, -1, NAME)

    def identity(self) -> str:
        """Return what is the same for all places here."""
        return NAME

    def is_held(self, place: int) -> bool:
        """Tell whether a place is held."""
        return place in self._held

    def free_in_process(self, place: int) -> None:
        """Free a place."""
        self._held.discard(place)


def open_copy() -> apsw.Connection:
    """Return a connection to a new store in memory: a copy, which takes a fraction of the time of the migrations."""
    connection = _opened()
    connection.deserialize("main", _template())
    connection.execute(query("draw_entropy"))
    return connection


def _opened() -> apsw.Connection:
    return connect(":memory:", durability="process", patience=Patience(), flags=OURS, vfs=None)


@cache
def _template() -> bytes:
    """Return a store with nothing in it, as the bytes of its file."""
    connection = _opened()
    migrate(connection, NAME, may_migrate=True)
    made = connection.serialize("main")
    connection.close()
    return made
