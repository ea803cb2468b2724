"""Reading: over a few separate connections, so that several threads may read at once."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, TypeVar

import msgspec
import psycopg

from everstep.errors import Damaged
from everstep.model.events import EventRow
from everstep.stores.brief import QUICK_SECONDS, Busy, acquire, refuse_when_brief, waits_until
from everstep.stores.postgres.addresses import Address
from everstep.stores.postgres.connections import (
    BEGIN_TO_READ,
    PAUSE_SECONDS_MIN,
    Durability,
    Outage,
    Patience,
    Setback,
    Slow,
    begin,
    close_quietly,
    connect,
    outage_of,
    refused,
    translated,
)
from everstep.stores.postgres.fronts import BEHIND_MICROSECONDS, LEAST, MOST, Due, Inboxes, Line, Lines
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.protocol import LAST
from everstep.stores.rows.queues import QueueRoom, room_of
from everstep.stores.rows.transfer import RunDump
from everstep.stores.sql.moving import Moving
from everstep.stores.sql.queues import QueueReads
from everstep.stores.sql.rows import Row

CONNECTIONS_MAX: Final = 4
PATIENT_SECONDS: Final = 1.0
"""How long a reader waits for the end of an outage, in seconds. The application's own loop may be waiting."""

FOR_PEOPLE: Final = frozenset({"runs", "runs_of_status", "runs_tagged", "effects"})
"""Lists whose conditions are optional in any combination."""

R = TypeVar("R")


class Reader:
    """The connections of a store that only read."""

    def __init__(
        self, address: Address, *, name: str, durability: Durability, patience: Patience, whole_seconds: float
    ) -> None:
        self.where = address.shown
        self._address = address
        self._name = name
        self._durability: Durability = durability
        self._patience = patience
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._idle: list[PostgresStatements] = []
        self._unanswered: list[PostgresStatements] = []
        """Connections on which a loop has asked something that is not answered yet."""
        self._lock = threading.Lock()
        self._due = Due(whole_seconds)
        self._inboxes = Inboxes(whole_seconds)
        self._whole_seconds = whole_seconds
        self._looking = threading.Lock()

    def close(self) -> None:
        """Close the idle connections; the others are closed when they are given back."""
        with self._lock:
            idle, self._idle = [*self._idle, *self._unanswered], []
            self._unanswered = []
        for one in idle:
            close_quietly(one.connection)

    # -- asking -----------------------------------------------------------------------------------------------------
    def ask(self, question: Callable[[PostgresStatements], R]) -> R:
        """Run a query on one of the connections. A lost connection is made again, within a moment."""
        if waits_until() is not None:
            return self._ask_briefly(question)
        began = time.monotonic()
        answer = self._ask_patiently(question)
        self._patience.is_slow = time.monotonic() - began > QUICK_SECONDS
        return answer

    def _ask_briefly(self, question: Callable[[PostgresStatements], R]) -> R:
        """Run a query on the thread of a loop. It waits once while the server is slow, and not again for each query."""
        if self._patience.is_slow:
            raise Busy
        try:
            acquire(self._room)
            try:
                return self._ask_once(question)
            finally:
                self._room.release()
        except (Busy, Outage) as error:
            self._patience.is_slow = True
            raise Busy from error

    def _ask_patiently(self, question: Callable[[PostgresStatements], R]) -> R:
        until, pause = 0.0, PAUSE_SECONDS_MIN / 4
        with self._room:
            while True:
                try:
                    return self._ask_once(question)
                except Setback as setback:
                    until = until or time.monotonic() + PATIENT_SECONDS
                    if self._patience.is_over or time.monotonic() > until:
                        raise translated(setback, self.where) from setback
                    time.sleep(pause)
                    pause *= 2
                except Outage as outage:
                    if self._patience.is_over or self._patience.seconds() > PATIENT_SECONDS:
                        raise translated(outage, self.where) from outage
                    self._patience.wait(outage)

    def _ask_once(self, question: Callable[[PostgresStatements], R]) -> R:
        statements = self._take()
        try:
            answer = question(statements)
        except Slow:
            with self._lock:
                self._unanswered.append(statements)
            raise
        except psycopg.Error as error:
            outage = outage_of(error, statements.connection)
            if isinstance(outage, Setback):
                self._give_back_idle(statements)
            else:
                close_quietly(statements.connection)  # it may be inside a transaction
            if outage is not None and not isinstance(outage, Setback):
                self.close()  # the others are lost as well
            raise outage or refused(error, self.where) from error
        except BaseException:
            close_quietly(statements.connection)
            raise
        self._give_back(statements)
        return answer

    def _take(self) -> PostgresStatements:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        if self._patience.is_over:
            raise translated(psycopg.InterfaceError("closed"), self.where)
        refuse_when_brief()  # a connection takes several round trips, and looking up a name cannot be interrupted
        if (unanswered := self._take_unanswered()) is not None:
            return unanswered
        if self._patience.is_watched and self._patience.seconds() > PATIENT_SECONDS:
            self._patience.ask_watcher()
            raise Outage("it is being tried again")  # by another thread: it may take long where no server answers
        connection = connect(self._address, self._name, durability=self._durability)
        self._patience.end()
        return PostgresStatements(self._address.schema, connection)

    def _take_unanswered(self) -> PostgresStatements | None:
        """Return a connection that a loop has left, once its answer has come."""
        with self._lock:
            if not self._unanswered:
                return None
            statements = self._unanswered.pop()
        statements.connection.take_answer()
        if statements.connection.closed:
            raise Outage("the connection was lost")
        return statements

    def _give_back_idle(self, statements: PostgresStatements) -> None:
        """Give a connection back after a cancelled statement, without its transaction."""
        try:
            statements.connection.execute("ROLLBACK")
        except psycopg.Error:
            close_quietly(statements.connection)
        else:
            self._give_back(statements)

    def _give_back(self, statements: PostgresStatements) -> None:
        if self._patience.is_over:
            close_quietly(statements.connection)
            return
        with self._lock:
            self._idle.append(statements)

    def all(self, name: str, *parameters: Any) -> list[Row]:
        """Do a statement and return its rows."""
        if name in FOR_PEOPLE:
            refuse_when_brief()  # it is several statements
            return self.ask(lambda statements: statements.all_with_plan_of_its_own(name, *parameters))
        return self.ask(lambda statements: statements.all(name, *parameters))

    def array(self, name: str, *parameters: Any) -> list[Any]:
        """Do a statement and return the values of its only column."""
        return [value for (value,) in self.all(name, *parameters)]

    def texts(self, values: Sequence[str]) -> list[str]:
        """Return an array."""
        return list(values)

    def tags(self, tags: dict[str, str]) -> list[str]:
        """Return an array of names and values in turn."""
        return [part for tag in tags.items() for part in tag]

    # -- what is done otherwise here --------------------------------------------------------------------------------
    def events(self, run: str, generation: int, first: int = 1, last: int = LAST) -> list[EventRow]:
        """Return a history or a part of it, as it is stored. The caller verifies it."""
        new_tuple = tuple.__new__  # what EventRow(…) does internally, in a third of the time
        return [new_tuple(EventRow, row) for row in self.all("events", run, generation, first, last)]

    def dump(self, run: str) -> RunDump | None:
        """Return everything of a run, read in one transaction."""
        refuse_when_brief()  # it is several statements

        def whole(statements: PostgresStatements) -> RunDump | None:
            begin(statements.connection, BEGIN_TO_READ)
            try:
                return Moving(statements).dump(run)
            finally:
                if not statements.connection.closed:
                    statements.connection.execute("ROLLBACK")

        try:
            return self.ask(whole)
        except msgspec.MsgspecError as error:
            raise Damaged(f"{self.where} has a row of run {run} that is damaged.") from error

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
        with self._looking:
            found = self._look_for_due(at, list(workflows), worker, everyone, limit, queues)
        timers = sorted((row for row in found if row[0]), key=lambda row: (row[1], row[4]))[:limit]
        chosen = [row for row in found if not row[0]] + timers
        chosen.sort(key=lambda row: (-row[2], row[3], row[4]))
        return list(dict.fromkeys(row[4] for row in chosen))[:limit]

    def _look_for_due(
        self, at: int, workflows: list[str], worker: str, everyone: bool, limit: int, queues: Sequence[str] | None
    ) -> list[Row]:
        """Return what `due` finds, from the places where the last look found the first of each kind."""
        known = self._due
        is_whole = self._begins_at_the_front(worker, everyone)
        if known.gone_wake is not None and known.gone_wake <= at:
            known.gone_wake = None
        gone = known.gone_owners if known.gone_wake is None else known.gone
        places = (*known.free.known(), *known.free.gaps(), known.free_from, known.own_from, gone)
        served = None if queues is None else list(queues)
        pending = self._pending()
        inboxes = [run for _, run in pending], [number for number, _ in pending]
        rows = self.all("due", worker, at, workflows, limit, everyone, served, *places, *inboxes)
        known.at = at
        if everyone:
            known.free.note(at, [row[2:5] for row in rows if row[0] == 2])
        found = [row for row in rows if row[0] != 2]
        owners = {row[5] for row in found if row[5] is not None}
        known.gone = [owner for owner in gone if owner in owners or len(found) >= limit]
        if is_whole:
            known.looks.took_place()
        return found

    def _begins_at_the_front(self, worker: str, everyone: bool) -> bool:
        """Return True if a look begins at the front of all lines; then also read which owners are gone."""
        known = self._due
        if not (known.looks.are_due() or known.asked_by != (worker, everyone)):
            return False
        known.begin_anew(worker, everyone)
        known.gone_owners = [id for (id,) in self.all("gone_owners", worker)] if everyone else []
        known.gone_wake = None
        return True

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        with self._looking:
            known = self._due
            if self._begins_at_the_front(worker, everyone):
                known.looks.took_place()
            gone = known.gone_owners if known.gone_wake is None else []
            asked = (worker, everyone, known.free_from, known.own_from, gone)
            free, own, left = self.all("next_wake", *asked)[0]
            if gone:
                known.gone_wake = MOST if left is None else left
            behind = known.at - BEHIND_MICROSECONDS
            if everyone:
                known.free_from = max(known.free_from, min(behind, MOST if free is None else free))
            known.own_from = max(known.own_from, min(behind, MOST if own is None else own))
            times = [time for time in (free, own, known.gone_wake) if time is not None and time < MOST]
            return min(times, default=None)

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, whatever their status."""
        with self._looking:
            runs = list(dict.fromkeys(run for _, run in self._pending()))
        owned = set(self.array("owned_among", worker, runs)) if runs else set()
        return [run for run in runs if run in owned]

    def _pending(self) -> list[tuple[int, str]]:
        """Return the numbers and runs of all pending deliveries, in order."""
        known = self._inboxes
        if known.looks.are_due():
            rows = self.all("pending")
            known.looks.took_place()
        else:
            rows = self.all("pending_since", known.since, known.older)
        found = sorted((number, run) for number, run in rows if run is not None)
        known.note(next(number or 0 for number, run in rows if run is None), [number for number, _ in found])
        return found

    def begin_anew(self) -> None:
        """Make the next looks begin at the front of all lines, because runs were put back."""
        self._due.looks.begin_anew()
        self._inboxes.looks.begin_anew()
        self.of_queues.lines.looks.begin_anew()

    @cached_property
    def of_queues(self) -> "PostgresQueueReads":
        """Reads about queues and limits."""
        return PostgresQueueReads(self.all, self.texts, self._whole_seconds)

    def server_time(self) -> int:
        """Return the server's time."""
        now: int = self.all("server_time")[0][0]
        return now


class PostgresQueueReads(QueueReads):
    """Reads about queues, from the place where the last look found the first run of each."""

    def __init__(
        self, ask: Callable[..., list[Row]], texts: Callable[[Sequence[str]], Any], whole_seconds: float
    ) -> None:
        super().__init__(ask, texts)
        self.lines = Lines(whole_seconds)
        self._looking = threading.Lock()

    def room(self, at: int, worker: str, only: Sequence[str] | None) -> list[QueueRoom]:
        """Return the queues in which runs wait, and how many of each a worker may begin now."""
        found: list[QueueRoom] = []
        for name, (is_any, due_at) in sorted(self._fronts(at).items()):
            if only is not None and name not in only:
                continue
            if not is_any and due_at > at:
                found.append(QueueRoom(name, 0, due_at))
                continue
            row = self.row("queue", name)
            room, next_at = room_of(row, at, *self.used(row, name, worker))
            if next_at is None and at < due_at < MOST:
                next_at = due_at
            found.append(QueueRoom(name, room, next_at))
        return found

    def _fronts(self, at: int) -> dict[str, tuple[bool, int]]:
        """Return the queues in which runs wait: whether any waits only for a slot, and when the next delay is over."""
        with self._looking:
            lines = self.lines
            is_whole = lines.looks.are_due()
            if is_whole:
                lines.begin_anew()
                lines.add(row.name for row in self.rows() if row.kind == "queue")
            while True:
                rows = self._all("fronts", *lines.asked())
                if not lines.add({name for kind, name, *_ in rows if kind == 2}):
                    break
            lines.note(at, rows)
            if is_whole:
                lines.looks.took_place()
        due = {name: due_at for kind, name, _, due_at, _ in rows if kind == 1}
        waiting = {name for kind, name, *_ in rows if kind == 0}
        return {name: (name in waiting, due.get(name, MOST)) for name in waiting | due.keys()}

    def _waiting(self, queue: str, at: int, *asked: Any) -> list[Row]:
        line, due_from = self.lines.lines.get(queue) or Line(), self.lines.delayed.get(queue, LEAST)
        in_line = self._all("waiting", queue, *asked, *line.known(), *line.gaps())
        return [*in_line, *self._all("come_due", queue, *asked, at, due_from)]
