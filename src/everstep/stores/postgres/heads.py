"""The newest events that this process saw durable, to detect a server that has lost what it promised.

A standby that was promoted has everything up to some moment. With asynchronous replication, or `durability="process"`
and a crash, later events are gone, and the histories end earlier. So after each new connection of the writer, before
anything is written, the heads are compared with the server, unless that is the same server process as before. So are
those of runs whose appends were refused.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from everstep.model.events import EventRow
from everstep.model.status import ENDED
from everstep.stores.postgres.transaction import PostgresStatements, columns
from everstep.stores.protocol import (
    Accepted,
    Append,
    Claimed,
    Operation,
    Refused,
    RepairRun,
    RestartRun,
    RunRow,
    StartRun,
    Verdict,
)
from everstep.stores.rows.runs import LostTail
from everstep.stores.rows.transfer import Deleted, DeletePart

HEADS_MAX: Final = 100_000
"""The maximum number of runs that are remembered, the most recently written ones."""
APPENDS_MAX: Final = 2_000
"""The number of newest appends whose events are kept, to say what was begun in a part that is lost."""
APPENDS_BYTES_MAX: Final = 16_000_000
"""The maximum size of the bodies of those events together."""
PAGE: Final = 10_000
"""The number of heads that are compared in one statement."""
MISSING_MICROSECONDS: Final = 3_600_000_000
"""Report a missing ended run only within this time; later assume that it was deleted."""


class Head(NamedTuple):
    """The newest event of a run that was seen durable."""

    generation: int
    seq: int
    digest: bytes
    at: int
    status: str


_Facts = tuple[int, int, bytes, int, str]
"""A head as it is stored: a plain tuple is made in a fifth of the time."""


class Heads:
    """What the writer of a store remembers. Used under the writer's lock; any thread may call `take`."""

    def __init__(self) -> None:
        # Two halves: the newest heads, and the ones before when there are too many. That is cheaper than to sort all by
        # time.
        self._newest: dict[str, _Facts] = {}
        self._older: dict[str, _Facts] = {}
        self._appends: deque[tuple[str, int, Sequence[EventRow], int]] = deque()
        self._bytes = 0
        self._lost: deque[LostTail] = deque()
        self._server: Any = None
        self.comparisons = 0
        """How often all heads were compared."""

    # -- remembering ------------------------------------------------------------------------------------------------
    def note(self, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> list[str]:
        """Remember the heads of what was accepted, and return the runs whose appends were refused for their heads."""
        refused: list[str] = []
        for operation, verdict in zip(operations, verdicts, strict=True):
            if type(verdict) is Accepted:
                if type(operation) is Append:
                    events = operation.events
                    if events and operation.renewal is None:
                        seq, _, _, at, _, digest = events[-1]
                        self._newest[operation.run] = (operation.generation, seq, digest, at, operation.row.status)
                        self._keep(operation.run, operation.generation, events)
                    elif operation.renewal is not None:
                        self._note_row(operation.renewal.row)
                elif isinstance(operation, StartRun | RestartRun):
                    self._note_row(operation.new.row)
                elif isinstance(operation, RepairRun):
                    self._note_row(operation.row)
            elif type(verdict) is Claimed:
                self._note_claim(verdict.row)
            elif type(verdict) is Refused and type(operation) is Append:
                if verdict.why in ("head", "fenced", "missing"):
                    refused.append(operation.run)
            elif type(verdict) is Deleted and isinstance(operation, DeletePart):
                self._forget(operation.run)
        if len(self._newest) > HEADS_MAX // 2:
            self._older, self._newest = self._newest, {}
        return refused

    def _keep(self, run: str, generation: int, events: Sequence[EventRow]) -> None:
        """Keep the newest events, within the limits."""
        size = sum([len(event[4]) for event in events])
        self._appends.append((run, generation, events, size))
        self._bytes += size
        while len(self._appends) > APPENDS_MAX or self._bytes > APPENDS_BYTES_MAX:
            self._bytes -= self._appends.popleft()[3]

    def _head_of(self, run: str) -> Head | None:
        facts = self._newest.get(run) or self._older.get(run)
        return Head(*facts) if facts is not None else None

    def _forget(self, run: str) -> None:
        self._newest.pop(run, None)
        self._older.pop(run, None)

    def _note_claim(self, row: RunRow) -> None:
        """Remember a claimed run, unless its head is behind what was seen: then its tail is lost."""
        head = self._head_of(row.id)
        if head is None or (head.generation, head.seq) <= (row.generation, row.head_seq):
            self._note_row(row)

    def _note_row(self, row: RunRow) -> None:
        self._newest[row.id] = (row.generation, row.head_seq, row.head_digest, row.updated_at, row.status)

    # -- comparing --------------------------------------------------------------------------------------------------
    def compare_if_other(self, statements: PostgresStatements) -> None:
        """Compare all heads, unless this is the same server process as at the last comparison."""
        server = statements.all("server_process")
        if server != self._server:
            self.compare(statements, [*self._newest, *(self._older.keys() - self._newest.keys())])
            self.comparisons += 1
        self._server = server

    def forget_server(self) -> None:
        """Compare all heads at the next connection, whichever server that reaches."""
        self._server = None

    def compare(self, statements: PostgresStatements, runs: Sequence[str]) -> set[str]:
        """Return the runs, among these, that have lost their tails. Each is reported once and then forgotten."""
        lost: set[str] = set()
        heads = {run: head for run in runs if (head := self._head_of(run)) is not None}
        for page in _pages(list(heads.items())):
            asked = [(run, *head[:4]) for run, head in page]
            for run, *facts in statements.all("heads_behind", *columns(5, asked)):
                self._forget(run)
                self._judge(run, heads[run], *facts)
                lost.add(run)
        return lost

    def _judge(
        self, run: str, head: Head, generation: int | None, there: int | None, at: int | None, status: Any, now: int
    ) -> None:
        """Record that a run has lost its tail, unless it had ended and was deleted or restarted since."""
        if head.status in ENDED:
            if generation is None and now - head.at > MISSING_MICROSECONDS:
                return
            if generation is not None and generation > head.generation:
                return
        events = [event for event in self._events(run, head.generation) if event.seq <= head.seq]
        self._lost.append(
            LostTail(
                run=run,
                generation=head.generation,
                seen=head.seq,
                seen_at=head.at,
                seen_status=head.status,
                there=there if generation is None or generation >= head.generation else 0,
                there_at=at or 0,
                status=status,
                events=events,
            )
        )

    def _events(self, run: str, generation: int) -> Iterable[EventRow]:
        for one, of_generation, events, _ in self._appends:
            if one == run and of_generation == generation:
                yield from events

    def take(self) -> list[LostTail]:
        """Return what was found since the last call."""
        taken: list[LostTail] = []
        while self._lost:
            taken.append(self._lost.popleft())
        return taken


def _pages(heads: list[tuple[str, Head]]) -> Iterator[list[tuple[str, Head]]]:
    for first in range(0, len(heads), PAGE):
        yield heads[first : first + PAGE]
