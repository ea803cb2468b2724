"""Writing streams: bodies of steps write in small batches, and workflow code by commands.

A body never waits for a commit: its entries are buffered, and written at most `FLUSH_SECONDS` later, or when the buffer
is large, fenced by the run's epoch, together with events that are not durable yet. When its attempt ends, its entries
are written before the outcome, and a note in the history has the stream's newest position.
"""

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from everstep.codec import PLAIN
from everstep.engine.code.streams import AppendEntry, check_size
from everstep.engine.history.journal import packed
from everstep.errors import StoreError, StreamLimit
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.model.digests import entry_digest, stream_start
from everstep.model.untrusted import logger
from everstep.stores.protocol import Store
from everstep.stores.rows.answers_and_streams import EntryRow

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.bodies import Attempt
    from everstep.engine.run.driver import Driver


log = logger("everstep.run")

FLUSH_SECONDS: Final = 0.05
"""Maximum time that entries of a body stay in the buffer before they are written."""
FLUSH_ENTRIES: Final = 200
"""Flush as soon as this many entries are buffered."""
GATHERED_BYTES_MAX: Final = 32_000_000
"""Maximum size of the buffered entries of a run. A body that is quicker than the disk gets an error beyond it."""
ENTRIES_MAX: Final = 1_000_000
"""Maximum number of entries of a stream."""
STREAMS_MAX: Final = 100
"""Maximum number of streams of a run."""
AGAIN_SECONDS: Final = 0.5
"""Delay before a store that could not be read is asked again, in seconds."""
PACKED_BYTES_MIN: Final = 512
"""The minimum size of an entry that is compressed."""


class _Gathered(NamedTuple):
    attempt: "Attempt"
    name: str
    payload: bytes
    at: int


class _Head:
    """The end of a stream."""

    __slots__ = ("digest", "position", "written_by")

    def __init__(self, position: int, digest: bytes) -> None:
        self.position = position
        self.digest = digest
        self.written_by: set[tuple[int, int]] = set()
        """Attempts in progress that have written to it: their calls and numbers."""


class Streams:
    """The streams of one run, while it is driven here."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._heads: dict[str, _Head] = _heads(driver)
        self._gathered: list[_Gathered] = []
        self._bytes = 0
        self._counts = {name: head.position for name, head in self._heads.items()}
        """The number of entries of each stream, including unwritten ones."""
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()

    # -- bodies: on any thread -------------------------------------------------------------------------------------
    def take(self, attempt: "Attempt", name: str, value: Any) -> None:
        """Buffer an entry of a body."""
        app = self._driver.app
        payload = app.codec.encode(value, PLAIN, f"an entry of the stream {name!r}")
        check_size(name, payload)
        entry = _Gathered(attempt, name, payload, app.clock.now())
        with self._lock:
            if self._bytes + len(payload) > GATHERED_BYTES_MAX:
                raise StreamLimit(
                    f"{self._bytes} bytes of the stream {name!r} wait to be written: the body of {attempt.step} is "
                    "quicker than the disk. Append less, or pause."
                )
            self._counts[name] = self._counted(name)
            self._gathered.append(entry)
            self._bytes += len(payload)
            count = len(self._gathered)
        if count == 1 or count == FLUSH_ENTRIES:
            if threading.get_ident() == app.thread:
                self._set_timer(count)
            else:
                app.loop.call_soon_threadsafe(self._driver.call, self._set_timer, count)

    def _counted(self, name: str) -> int:
        count = self._counts.get(name, 0) + 1
        if count == 1 and len(self._counts) >= STREAMS_MAX:
            raise StreamLimit(f"The run has {STREAMS_MAX} streams, so there is none for {name!r}. Use fewer names.")
        if count > ENTRIES_MAX:
            raise StreamLimit(f"The stream {name!r} has {ENTRIES_MAX} entries, and no more are allowed.")
        return count

    # -- on the app's loop -----------------------------------------------------------------------------------------
    def _set_timer(self, count: int) -> None:
        if self._driver.stopped:
            return
        if count >= FLUSH_ENTRIES:
            self.flush()
        elif self._timer is None:
            self._timer = self._driver.app.loop.call_later(FLUSH_SECONDS, self._driver.call, self._time_is_over)

    def _time_is_over(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        """Write the buffered entries. If the store cannot be read now, retry later."""
        try:
            self._write_gathered()
        except StoreError as error:
            log.error("The streams of run %s cannot be written just now: %s", self._driver.run, error)
            if self._timer is None:
                self._timer = self._driver.app.loop.call_later(AGAIN_SECONDS, self._driver.call, self._time_is_over)

    def _write_gathered(self) -> None:
        driver = self._driver
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            gathered, self._gathered, self._bytes = self._gathered, [], 0
        if not gathered or driver.is_over:
            return
        done = 0
        try:
            for attempt, name, payload, at in gathered:
                call, head = attempt.call, self._head(name)
                by = (call.call, attempt.attempt)
                is_first = by not in head.written_by
                head.written_by.add(by)
                self._write(head, name, payload, call.step, attempt.attempt, is_first, call.is_secret, at)
                done += 1
        finally:
            if done < len(gathered):
                with self._lock:
                    self._gathered[:0] = gathered[done:]
                    self._bytes = sum(len(entry.payload) for entry in self._gathered)
        crash_point("stream.gathered")
        driver.writer.save(waited_for=False)

    def end(self, attempt: "Attempt") -> None:
        """Write the entries of an attempt that ends, and record the positions of its streams."""
        self.flush()
        if self._driver.is_over:
            return
        by = (attempt.call.call, attempt.attempt)
        for name, head in self._heads.items():
            if by in head.written_by:
                head.written_by.discard(by)
                body = ev.StreamNoted(*by, name, head.position, head.digest.hex())
                self._driver.record("stream_noted", attempt.call.step, body)

    def append(self, command: AppendEntry) -> None:
        """Write an entry of workflow code in one transaction with its event."""
        driver, name = self._driver, command.name
        self._write_gathered()  # earlier entries of bodies come before it
        head = self._head(name)
        at, seq = driver.app.clock.now(), driver.journal.seq + 1
        self._write(head, name, command.payload, "", 0, False, False, at, seq)
        body = ev.StreamAppended(command.call, name, head.position, head.digest.hex(), command.source)
        driver.record(command.kind, "", body)
        driver.writer.save(waited_for=False)

    def _head(self, name: str) -> _Head:
        head = self._heads.get(name)
        if head is None:
            driver = self._driver
            head = self._heads[name] = _Head(0, stream_start(driver.run, driver.journal.generation, name))
        return head

    def _write(
        self,
        head: _Head,
        name: str,
        payload: bytes,
        step: str,
        attempt: int,
        first: bool,
        secret: bool,
        at: int,
        seq: int = 0,
    ) -> None:
        journal = self._driver.journal
        value = b"r" + payload if len(payload) < PACKED_BYTES_MIN else packed(payload)
        position, seq = head.position + 1, seq or journal.seq
        facts = (position, seq, step, attempt, int(first), int(secret), at, value)
        head.digest, head.position = entry_digest(head.digest, *facts, key=journal.key), position
        row = EntryRow(self._driver.run, journal.generation, name, *facts, head.digest)
        journal.beside_events().entries.append(row)

    def stop(self) -> None:
        """The run leaves memory."""
        if self._timer is not None:
            self._timer.cancel()


def newest_entries(store: "Store", run: str, generation: int) -> dict[str, EntryRow]:
    """Return the newest entry of each stream of a run."""
    found = [store.stream_head(run, generation, name) for name, _ in store.streams(run, generation)]
    return {entry.name: entry for entry in found if entry is not None}


def _heads(driver: "Driver") -> dict[str, _Head]:
    """Return the end of each stream of a run when it was resumed."""
    return {name: _Head(entry.position, entry.digest) for name, entry in driver.beside.stream_heads.items()}
