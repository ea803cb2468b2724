"""Workers: registering with a liveness lock, renewing the lease, leaving, and removing those whose session is gone."""

import os
from collections.abc import Sequence

from everstep.errors import Misuse
from everstep.stores.brief import refuse_when_brief
from everstep.stores.postgres.commits import Writer
from everstep.stores.postgres.reads import Reader
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.postgres.watching import Watcher
from everstep.stores.processes import machine, worker_has_ended
from everstep.stores.protocol import WorkerRow
from everstep.stores.rows.workers import ENDED_KEPT_MICROSECONDS, GoneRow
from everstep.stores.sql.rows import as_json, worker_row


class Workers:
    """The table `workers` and the locks that tell which of them live."""

    def __init__(
        self, writer: Writer, reader: Reader, watcher: Watcher, *, places: int, has_locks: bool, waits: bool
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._watcher = watcher
        self._places = places
        self._has_locks = has_locks
        self._waits = waits
        """Whether a lock must be missing for a while before its worker is gone: always, except in tests."""
        self._held: dict[str, int] = {}

    def register(
        self, worker: str, pid: int, host: str, at: int, lease_until: int, targets: Sequence[str], about: bytes
    ) -> WorkerRow:
        """Register a worker. It takes its lock before its row is visible, so that no other process removes it in
        between.
        """
        tried: set[int] = set()

        def enter(statements: PostgresStatements) -> WorkerRow:
            self._free(tried)  # of a transaction that was not committed, or whose commit is unknown
            statements.all("lock_workers", self._places)
            taken = {row.place for row in self._rows_but(worker, statements)}
            place = 1
            # A place without a row may still be locked, by a worker that is just leaving.
            while place in taken or (self._has_locks and not self._take(place, tried)):
                place += 1
            row = WorkerRow(worker, place, pid, host, at, lease_until, list(targets), about)
            facts = (worker, place, pid, host, at, lease_until, as_json(row.targets), about)
            here = machine() if pid == os.getpid() else ""
            statements.run("enter_worker", *facts, self._has_locks, here)
            if self._has_locks:
                self._writer.name_session(statements, f"{self._places}.{place}")
            return row

        try:
            row = self._writer.transact("register_worker", enter)
        except BaseException:
            self._free(tried)
            self._writer.session_name = self._writer.name
            raise
        self._held[worker] = row.place
        return row

    def _take(self, place: int, tried: set[int]) -> bool:
        """Take the lock of a place, and record the attempt: an error does not say whether it was taken."""
        if place in self._held.values():
            return False
        tried.add(place)
        if self._watcher.take(place):
            return True
        tried.discard(place)
        return False

    def _free(self, tried: set[int]) -> None:
        while tried:
            self._watcher.free(tried.pop())

    def _rows_but(self, worker: str, statements: PostgresStatements) -> list[WorkerRow]:
        """Return the rows of all other workers. A dead worker of the same name is replaced; a living one is
        an error.
        """
        others: list[WorkerRow] = []
        for row in map(worker_row, statements.all("workers")):
            if row.id != worker:
                others.append(row)
            elif self._has_locks and statements.all("is_place_taken", self._places, row.place)[0][0]:
                raise Misuse(f"There is a live worker {worker} already.")
            else:
                statements.run("forget_worker", worker)
        return others

    def renew(self, worker: str, lease_until: int, at: int, about: bytes | None) -> int | None:
        """Renew a worker's lease, and return the server's time; None if the worker was removed."""
        rows = self._writer.transact("renew", lambda do: do.all("renew", lease_until, worker, at, about))
        if rows:
            server: int = rows[0][0]
            return server
        if (place := self._held.pop(worker, None)) is not None:
            self._watcher.free(place)  # it was given up for dead: another worker may have its place
            self._writer.transact("renew", self._writer.name_session)
        return None

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Mark a lease as lapsed, unless it was renewed since it was read."""
        is_marked = self._writer.transact("renew", lambda do: do.run("lapse", worker, lease_until) > 0)
        if is_marked:
            self._watcher.tell(returns=True)  # its runs are free
        return is_marked

    def bury(self, at: int) -> list[str]:
        """Remove workers whose locks have been free for long enough, and return their ids.

        A lost session does not prove that a process has ended. Where the kernel proves it, that is recorded.
        """
        refuse_when_brief()  # the watcher reports each worker once
        candidates = self._watcher.gone() if self._waits else self._missing_now()
        if not candidates:
            return []

        def bury(statements: PostgresStatements) -> list[str]:
            statements.all("lock_workers", self._places)
            buried: list[str] = []
            for worker, place in candidates:
                # Checked again, now that no worker can register: another one may have got the place of one that left.
                if statements.all("is_place_free", self._places, place)[0][0]:
                    removed = statements.run("remove_worker", worker, place)
                    buried += [worker] * removed
                    if removed and worker_has_ended(worker):
                        _note_end(statements, worker, at)
            return buried

        buried = self._writer.transact("bury", bury)
        if buried:
            self._watcher.tell(returns=True)  # their runs and slots are free
        return buried

    def _missing_now(self) -> list[tuple[str, int]]:
        rows = self._reader.ask(lambda statements: statements.all("silent_workers", self._places, 0, None, 0))
        return [(worker, place) for worker, place, is_lockless, *_ in rows if is_lockless]

    def are_any_alive(self) -> bool:
        """Return True if any session holds a lock on any place, with or without a row for it."""
        taken: bool = self._reader.ask(lambda statements: statements.all("any_place_taken", self._places))[0][0]
        return taken

    def is_alive(self, worker: WorkerRow) -> bool:
        """Return True if a worker's lock is held; for a worker without a lock, if its lease has not lapsed."""
        if not self._has_locks:
            return worker.has_lease
        asked = (self._places, worker.place)
        held: bool = self._reader.ask(lambda statements: statements.all("is_place_taken", *asked))[0][0]
        return held

    def declare_gone(self, gone: GoneRow, workers: Sequence[str]) -> None:
        """Record that a worker or host is gone, and fence these workers."""

        def declare(statements: PostgresStatements) -> None:
            for worker in workers:
                statements.run("fence_runs", worker)
                statements.run("forget_worker", worker)
            statements.run("declare_gone", *gone)

        self._writer.transact("bury", declare)
        self._watcher.tell(returns=True)

    def leave(self, worker: str, at: int) -> None:
        """Give back all runs of a worker, remove it, record that it has ended, and only then free its lock."""

        def give_back(statements: PostgresStatements) -> None:
            statements.run("give_back", worker)
            statements.run("forget_worker", worker)
            _note_end(statements, worker, at)
            if self._has_locks:
                self._writer.name_session(statements)

        self._writer.transact("leave", give_back)
        place = self._held.pop(worker, None)
        if place is not None:
            self._watcher.free(place)
        self._watcher.tell(returns=True)


def _note_end(statements: PostgresStatements, worker: str, at: int) -> None:
    statements.run("forget_ended_workers", at - ENDED_KEPT_MICROSECONDS)
    statements.run("note_ended_worker", worker, at)
