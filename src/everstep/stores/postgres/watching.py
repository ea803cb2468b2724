"""The session that lasts as long as the process: it holds the liveness locks of workers, and listens.

A thread of its own looks after it. When the connection dies with the process, the server frees the locks, and everybody
else sees at once who is gone. When only the connection was lost, or the server was restarted, the thread makes it anew
and takes the locks again, well within the time that others give it: a lock counts as missing only when it is missing
twice, a little while apart, to somebody who has been connected for a second; for a restart drops the locks of all. Only
if there is no such process any more, on the machine on which we are, it is gone at once. While the
session with which it writes is there, its process lives without a lock as well: then only its lease counts.

A lock that cannot be taken again is tried for as long as the worker lives: that another session has it proves nothing.
Mostly it is the worker's own last session, whose other end the server has not noticed to be gone; this one ends it.
Only the missing row says that the worker was declared dead: a worker that renews its lease and finds no row frees its
place.

Changes are announced by NOTIFY, which the same session sends after a commit and never in it, because a transaction with
a NOTIFY keeps all others of the server from committing. Nothing depends on it: a process that misses one looks now and
then.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Final

import psycopg

from everstep.errors import StoreError
from everstep.model.untrusted import logger
from everstep.stores.brief import refuse_when_brief
from everstep.stores.postgres.addresses import Address
from everstep.stores.postgres.connections import (
    Connection,
    Durability,
    Outage,
    Patience,
    Setback,
    close_quietly,
    connect,
    outage_of,
)
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.processes import has_ended

log = logger("everstep.store")

LOOK_SECONDS_HEARING: Final = 10.0
"""How often a process that hears of changes looks all the same, in seconds."""
LOOK_SECONDS_DEAF: Final = 0.5
TELL_SECONDS: Final = 0.02
"""The minimum time between two notifications, in seconds."""
WATCH_SECONDS: Final = 1.0
"""Poll interval for missing liveness locks, while a worker of this process wants to know. A missing one is asked for
again after the grace time, not after another interval."""
NEIGHBOURS: Final = 16
"""The number of other workers that each worker watches. When all of them are gone they are removed, and the next ones
are watched.
"""
INTEREST_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 0.1
TAKE_SECONDS_MIN: Final = 0.005
TAKE_SECONDS_MAX: Final = 0.05
"""The first and the longest pause between attempts to take a lock that another session has: well within the time that
others give its owner.
"""
TAKE_MENTION_SECONDS: Final = 1.0
SETBACKS_MAX: Final = 8
"""How often in a row a statement is tried again in the session that has the locks, before the thread reconnects."""
RETURNS: Final = "returns"
"""The payload of a notification about runs that were put back."""
ANSWER_SECONDS: Final = 15.0
IDLE_SECONDS: Final = 60.0


class Watcher:
    """The session and its thread, which begins at its first use."""

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        places: int,
        durability: Durability,
        settle_seconds: float,
        grace_seconds: float,
        patience: Patience,
    ) -> None:
        self._patience = patience
        self._address = address
        self._name = name
        self._places = places
        self._durability: Durability = durability
        self._settle_seconds = settle_seconds
        self._grace_seconds = grace_seconds
        self._channel = f"everstep_{address.schema}"
        self._held: set[int] = set()
        """The places of this process's workers."""
        self._untaken: dict[int, float] = {}
        """The places whose locks were lost with a session and could not be taken again, and since when."""
        self._take_at = 0.0
        self._take_pause = TAKE_SECONDS_MIN
        self._wishes: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopping = False
        self._failure: Exception | None = None
        self._connection: Connection | None = None
        self._opened_at = 0.0
        """When the session was made, with all its locks; 0 without one."""
        self._setbacks = 0
        self._was_open = False
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._ear.setblocking(False)
        self.on_return: Callable[[], None] = lambda: None
        """Called when runs were put back, here or in another process."""
        # Fields that other threads set and read. Each is one assignment.
        self._has_news = False
        self._has_returns = False
        self._told_at = 0.0
        self._changed = True
        self._hears = False
        self._looked_at = 0.0
        self._wanted_until = 0.0
        self._watched_at = 0.0
        self._missing: dict[str, tuple[int, float]] = {}
        self._gone: dict[str, int] = {}
        self._lapsed: set[str] = set()

    # -- for everybody ----------------------------------------------------------------------------------------------
    def tell(self, *, returns: bool = False) -> None:
        """Notify others soon that something has changed. returns: runs are free that are older than others."""
        if returns:
            self.on_return()
            self._has_returns = True
        self._has_news = True
        self._wake()

    def changed(self) -> bool:
        """Return True if another process has changed something, or it is time to look all the same."""
        if self._thread is None:
            self._listen()
        now = time.monotonic()
        often = LOOK_SECONDS_HEARING if self._hears else LOOK_SECONDS_DEAF
        if self._changed or now - self._looked_at >= often:
            self._changed, self._looked_at = False, now
            return True
        return False

    def _listen(self) -> None:
        """Begin to listen, so that later notifications are heard."""
        try:
            self._ask(lambda: None)
        except StoreError:
            pass  # the thread keeps trying

    def gone(self) -> list[tuple[str, int]]:
        """Return workers whose locks have been missing for long enough, and keep watching for a while."""
        self._wanted_until = time.monotonic() + INTEREST_SECONDS
        if not self._watched_at:
            self._look_at_once()
        gone, self._gone = self._gone, {}
        return list(gone.items())

    def _look_at_once(self) -> None:
        """Look at once after opening, because a program that was killed is often started again on the same machine."""
        try:
            self._ask(lambda: self._watch(time.monotonic()))
        except StoreError:
            pass  # the thread keeps trying

    def take(self, place: int) -> bool:
        """Take the lock of a place, and keep it; False if another session has it."""
        return bool(self._ask(lambda: self._take(place)))

    def free(self, place: int) -> None:
        """Free the lock of a place."""
        self._held.discard(place)
        self._untaken.pop(place, None)
        if self._connection is not None:
            try:
                self._ask(lambda: self._statements().all("free_place", self._places, place))
            except StoreError:
                pass  # without a connection there is no lock

    def close(self) -> None:
        """End the session: its locks are free from now on."""
        if self._thread is None and self._has_news:
            self._wake()
        self._stopping = True
        if self._thread is not None:
            self._wake()
            self._thread.join()
        self._ear.close()
        self._mouth.close()

    def _ask(self, wish: Callable[[], Any]) -> Any:
        """Run a function on the thread, and return its result."""
        refuse_when_brief()
        future: Future[Any] = Future()
        try:
            self._start()
        except (RuntimeError, MemoryError) as error:
            raise StoreError(f"The machine has no thread that could watch {self._address.shown} ({error}).") from error
        self._wishes.put((wish, future))
        self._wake()
        try:
            return future.result(ANSWER_SECONDS)
        except (TimeoutError, psycopg.Error, Outage) as error:
            raise StoreError(f"{self._address.shown} cannot be reached ({error}). Nothing was done.") from error

    def _start(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._work, name="everstep-watcher", daemon=True)
                    thread.start()
                    self._thread = thread

    def _wake(self) -> None:
        try:
            self._start()
            self._mouth.send(b"!")
        except (OSError, RuntimeError, MemoryError):
            pass  # it is awake, because the pipe is full, or it is closed; or the machine has no thread for it

    def check(self) -> None:
        """Raise the thread's error, unless that was an outage or the thread has succeeded since."""
        if self._failure is not None:
            raise self._failure

    # -- the thread -------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        self._patience.is_watched, self._patience.ask_watcher = True, self._wake
        while not self._stopping or self._has_news:
            try:
                if self._connection is None or self._connection.closed:
                    self._open()
                self._turn()
            except Exception as error:  # noqa: BLE001  # whatever it is: without this thread, nothing is heard
                if not isinstance(error, psycopg.Error | Outage | OSError):
                    self._failure = error  # the app says so
                    self._lose(error)
                elif not self._keeps_session(error):
                    self._lose(error)
                if self._stopping:
                    break
                self._ear_waits(RETRY_SECONDS)
        close_quietly(self._connection)
        self._connection = None

    def _keeps_session(self, error: Exception) -> bool:
        """Return True if the session outlived an error, with its locks: the next turn repeats what was cancelled."""
        if self._opened_at == 0.0 or not isinstance(outage_of(error, self._connection), Setback):
            return False
        self._setbacks += 1
        return self._setbacks <= SETBACKS_MAX

    def _open(self) -> None:
        """Make the session: listen, and take the locks of all workers of this process."""
        self._opened_at = 0.0
        self._connection = connect(self._address, self._name, durability=self._durability)
        self._patience.end()
        self._hears = False
        self._missing.clear()
        if not self._address.pooler:
            self._connection.execute(f'LISTEN "{self._channel}"')
            now = time.monotonic()
            self._untaken = {place: self._untaken.get(place, now) for place in sorted(self._held)}
            self._take_pause = TAKE_SECONDS_MIN
            self._take_again()
            self._statements().all("tell", self._channel, "")  # a session that hears itself hears others
        self._changed = self._changed or self._was_open  # notifications meanwhile were missed
        self.on_return()
        self._was_open = True
        self._opened_at = time.monotonic()

    def _take_again(self) -> None:
        """Take the locks again that were lost with the last session, as far as possible."""
        for place, since in sorted(self._untaken.items()):
            if self._has_lock(place):
                self._untaken.pop(place, None)
                continue
            self._end_last_session(place)
            if time.monotonic() - since > TAKE_MENTION_SECONDS:
                self._untaken[place] = inf  # logged once
                log.warning(
                    "The liveness lock %d of this worker cannot be taken again just now. The attempts continue.", place
                )
        self._take_at = time.monotonic() + self._take_pause
        self._take_pause = min(self._take_pause * 1.5, TAKE_SECONDS_MAX)

    def _end_last_session(self, place: int) -> None:
        """End an earlier session of this store object that still has one of our locks: on our side it has ended."""
        try:
            self._statements().all("end_last_session", self._places, place, self._name)
        except psycopg.errors.InsufficientPrivilege:
            pass  # the server ends it when it notices

    def _lose(self, error: Exception) -> None:
        if not self._stopping:
            self._patience.note(error)
        close_quietly(self._connection)
        self._connection = None
        self._hears = False
        while True:
            try:
                _, future = self._wishes.get_nowait()
            except Empty:
                return
            future.set_exception(error)

    def _turn(self) -> None:
        """Do what was requested, announce changes, listen, and look which workers are gone; then wait for the next of
        these.
        """
        assert self._connection is not None
        self._grant_wishes()
        if self._untaken and time.monotonic() >= self._take_at:
            self._take_again()
        if self._patience.seconds():
            self._statements().all("server_time")
            self._patience.end()
        now = time.monotonic()
        if self._has_news and (now - self._told_at >= TELL_SECONDS or self._stopping):
            self._has_news, self._told_at = False, now
            returns, self._has_returns = self._has_returns, False
            try:
                self._statements().all("tell", self._channel, RETURNS if returns else "")
            except psycopg.Error:
                self._has_news, self._has_returns = True, self._has_returns or returns
                raise
        if now < self._wanted_until and now >= self._next_watch():
            self._watch(now)
        self._hear()
        self._setbacks = 0
        self._failure = None
        if not self._stopping:
            self._wait()

    def _grant_wishes(self) -> None:
        while True:
            try:
                wish, future = self._wishes.get_nowait()
            except Empty:
                return
            try:
                future.set_result(self._granted(wish))
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, psycopg.Error | Outage | OSError) or not isinstance(error, Exception):
                    raise  # any other error concerns only the thread that asked

    def _granted(self, wish: Callable[[], Any]) -> Any:
        """Run a requested function, again if that was cancelled."""
        for _ in range(SETBACKS_MAX):
            try:
                return wish()
            except psycopg.Error as error:
                if not isinstance(outage_of(error, self._connection), Setback):
                    raise
        return wish()

    def _hear(self) -> None:
        assert self._connection is not None
        for notice in self._connection.notifies(timeout=0):
            if notice.pid == self._connection.info.backend_pid:
                self._hears = True
            else:
                if notice.payload == RETURNS:
                    self.on_return()
                self._changed = True

    def _wait(self) -> None:
        assert self._connection is not None
        now = time.monotonic()
        times = [IDLE_SECONDS]
        if self._has_news:
            times.append(self._told_at + TELL_SECONDS - now)
        if now < self._wanted_until:
            times.append(self._next_watch() - now)
        if self._untaken:
            times.append(self._take_at - now)
        select.select([self._connection.fileno(), self._ear.fileno()], [], [], max(0.0, min(times)))
        self._ear_waits(0.0)

    def _ear_waits(self, seconds: float) -> None:
        """Wait until another thread wakes this one, and clear all wake-ups."""
        select.select([self._ear], [], [], seconds)
        try:
            while self._ear.recv(4096):
                pass
        except BlockingIOError:
            pass

    # -- who is gone ------------------------------------------------------------------------------------------------
    def _next_watch(self) -> float:
        if self._missing:
            first = min(since for _, since in self._missing.values()) + self._grace_seconds
            return max(first, self._opened_at + self._settle_seconds)
        if self._watched_at < self._opened_at:
            return self._opened_at
        return max(self._watched_at + WATCH_SECONDS, self._opened_at + self._settle_seconds)

    def _watch(self, now: float) -> None:
        # A process that has just begun, or has no worker, watches all; in the long run each worker watches its
        # neighbours.
        count = NEIGHBOURS if self._held and self._watched_at else None
        asked = (round(self._settle_seconds * 1_000_000), count, min(self._held, default=0))
        rows = self._statements().all("silent_workers", self._places, *asked)
        self._watched_at = now
        lockless = [row for row in rows if row[2] and row[1] not in self._held]
        gone = {id: place for id, place, _, _, pid, where, _ in lockless if has_ended(pid, where)}
        if now >= self._opened_at + self._settle_seconds:
            missing = [row[:2] for row in lockless if not row[6]]
            since = {id: (place, self._missing.get(id, (place, now))[1]) for id, place in missing}
            gone |= {id: place for id, (place, first) in since.items() if self._is_long_ago(first, now)}
            self._missing = {id: one for id, one in since.items() if id not in gone}
        lapsed = {id for id, _, _, is_lapsed, *_ in rows if is_lapsed}
        if gone or lapsed - self._lapsed:
            self.on_return()
            self._changed = True
        self._lapsed = lapsed
        self._gone = {**self._gone, **gone}

    def _is_long_ago(self, first: float, now: float) -> bool:
        return first < now and now - first >= self._grace_seconds

    def _take(self, place: int) -> bool:
        if place in self._held:
            return False
        taken = self._has_lock(place)
        if taken:
            self._held.add(place)
        return taken

    def _has_lock(self, place: int) -> bool:
        """Take the lock of a place, if no session has it."""
        try:
            taken: bool = self._statements().all("take_place", self._places, place)[0][0]
        except psycopg.Error:
            # A cancelled statement may have taken it, and a session can take it twice. Freeing a lock that the session
            # does not have is no error.
            self._statements().all("free_place", self._places, place)
            raise
        return taken

    def _statements(self) -> PostgresStatements:
        if self._connection is None:
            raise Outage("it is not connected")
        return PostgresStatements(self._address.schema, self._connection)
