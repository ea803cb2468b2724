"""Reading: everything that a store answers without changing anything, over a separate connection."""

import struct
import threading
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import apsw
import msgspec

from everstep.errors import Damaged
from everstep.model.events import EventRow
from everstep.stores.brief import Busy, refuse_when_brief, wait_until_free
from everstep.stores.protocol import LAST
from everstep.stores.rows.transfer import RunDump
from everstep.stores.sql.moving import Moving
from everstep.stores.sql.queues import QueueReads
from everstep.stores.sql.rows import Row, as_json, event_row
from everstep.stores.sqlite.commits import TEXTS, SqliteStatements
from everstep.stores.sqlite.connections import translated

_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_numbers = msgspec.json.Decoder(list[int]).decode


class Reader:
    """The one connection of a store that only reads. Any thread may use it, one at a time."""

    def __init__(self, connection: apsw.Connection, path: str, lock: threading.Lock) -> None:
        self._connection = connection
        self.where = path
        self._cursor = connection.cursor()
        self._statements = SqliteStatements(connection)
        self._sql = TEXTS
        self._lock = lock
        self._is_slow = False
        """Whether the last query waited longer than a loop may."""

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    def places(self) -> list[Row]:
        """Return the places of workers' locks: see `Place`."""
        return self.all("places")

    def all(self, name: str, *parameters: object) -> list[Row]:
        """Do a statement and return its rows."""
        try:
            with self._lock_when_free():
                rows: list[Row] = self._cursor.execute(self._sql[name], parameters).fetchall()
            self._is_slow = False
            return rows
        except apsw.BusyError as error:
            self._is_slow = True
            refuse_when_brief()
            raise translated(error, self.where, writing=False) from error
        except UnicodeDecodeError as error:
            raise Damaged(f"{self.where} contains a row with invalid UTF-8; the row is damaged.") from error
        except apsw.TooBigError:
            raise
        except apsw.Error as error:
            raise translated(error, self.where, writing=False) from error

    def _lock_when_free(self) -> threading.Lock:
        """Return the lock when it is free. While the file is locked, a loop waits once and not for each query."""
        if self._is_slow:
            refuse_when_brief()
        try:
            return wait_until_free(self._lock)
        except Busy:
            self._is_slow = True
            raise

    def texts(self, values: Sequence[str]) -> str:
        """Return a JSON array."""
        return as_json(values)

    def array(self, name: str, *parameters: object) -> list[Any]:
        """Return the JSON array that a query returns as its only row."""
        found: bytes = self.all(name, *parameters)[0][0]
        # A damaged id must not hide all others; no worker can claim it.
        values: list[Any] = msgspec.json.decode(found.decode("utf-8", "replace"))
        return values

    def tags(self, tags: dict[str, str]) -> str | None:
        """Return a JSON object."""
        return as_json(tags) if tags else None

    @cached_property
    def of_queues(self) -> QueueReads:
        """Reads about queues and limits."""
        return QueueReads(self.all, self.texts)

    # -- what is done otherwise here --------------------------------------------------------------------------------
    def events(self, run: str, generation: int, first: int = 1, last: int = LAST) -> list[EventRow]:
        """Return a history or a part of it, as it is stored. The caller verifies it."""
        try:
            ((lowest, highest, kinds, steps, ats, sizes, packed),) = self.all(
                "events_packed", run, generation, first, last
            )
            if lowest is None:
                return []
            parts = struct.Struct(b"16s%bs" % sizes.replace(b",", b"s16s")).unpack(packed)
            columns = zip(
                range(lowest, highest + 1),
                _decode_texts(kinds),
                _decode_texts(steps),
                _decode_numbers(b"[%b]" % ats),
                parts[1::2],
                parts[::2],
                strict=True,
            )
            return list(map(tuple.__new__, repeat(EventRow), columns))  # what EventRow(…) does internally
        except (msgspec.MsgspecError, struct.error, ValueError, apsw.TooBigError):  # a number may be missing, too
            return self._events_singly(run, generation, first, last)

    def _events_singly(self, run: str, generation: int, first: int, last: int) -> list[EventRow]:
        return [event_row(row) for row in self.all("events", run, generation, first, last)]

    def dump(self, run: str) -> RunDump | None:
        """Return everything of a run, read in one transaction."""
        refuse_when_brief()  # it is many queries
        try:
            with self._lock:
                cursor = self._statements.cursor
                cursor.execute("BEGIN")  # so that all reads see the same moment
                try:
                    return Moving(self._statements).dump(run)
                finally:
                    cursor.execute("COMMIT")
        except (UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise Damaged(f"{self.where} has a row of run {run} that is damaged.") from error
        except apsw.Error as error:
            raise translated(error, self.where, writing=False) from error

    def due(
        self,
        *,
        at: int,
        workflows: Sequence[str],
        worker: str,
        everyone: bool,
        limit: int,
        queues: Sequence[str] | None = None,
    ) -> list[str]:
        """Return ids of runs that want a driver now: by priority, then age.

        When there are more than `limit`, the longest overdue timers and the oldest deliveries are considered first.
        """
        known = as_json(workflows)
        gone = self.array("gone_owners", worker) if everyone else []
        owners = as_json([worker, *gone])
        served = as_json(queues) if queues is not None else None
        timers = self.array("due_timers_owned", known, limit, at, owners, served, worker)
        chosen = self.array("due_deliveries", known, limit, everyone, owners, served, worker)
        if everyone:
            timers += self.array("due_timers_free", known, limit, at, served)
            chosen += self.array("due_ready_free", known, limit, served)
        if gone:
            chosen += self.array("due_ready_owned", known, limit, as_json(gone), served)
        timers.sort(key=lambda timer: (timer[0], timer[3]))
        chosen += [timer[1:] for timer in timers[:limit]]
        chosen.sort(key=lambda found: (-found[0], found[1], found[2]))
        return list(dict.fromkeys(id for _, _, id in chosen))[:limit]

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        gone = self.array("gone_owners", worker) if everyone else []
        wakes = [self.all("next_wake_owned", as_json([worker, *gone]))[0][0]]
        if everyone:
            wakes.append(self.all("next_wake_free")[0][0])
        return min((wake for wake in wakes if wake is not None), default=None)
