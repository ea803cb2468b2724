"""The heads that this process saw durable, to compare a server with that may have lost what it promised.

A standby that was promoted has everything up to some moment. With asynchronous replication, or `durability="process"`
and a crash, what came later is gone, and the histories end earlier. So after each new connection of the writer, before
anything is written, the heads are compared with the server, unless that is the same server process as before. So are
those of runs whose appends were refused.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from everstep.model.events import EventRow
from everstep.model.status import ENDED
from everstep.stores.moving import Deleted, DeletePart
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
from everstep.stores.tails import LostTail

HEADS_MAX: Final = 100_000
"""So many runs are remembered, those that were written last."""
APPENDS_MAX: Final = 2_000
"""Of so many appends the events are kept, to say what was begun in a part that is lost."""
PAGE: Final = 10_000
"""So many heads are compared in one statement."""
MISSING_MICROSECONDS: Final = 3_600_000_000
"""An ended run that is gone is worth a word for so long; after that somebody has deleted it."""


class Head(NamedTuple):
    """The newest event of a run that was seen durable."""

    generation: int
    seq: int
    digest: bytes
    at: int
    status: str


class Heads:
    """What the writer of a store remembers. Used under the writer's lock; `take` by anybody."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, Head] = OrderedDict()
        self._appends: deque[tuple[str, int, Sequence[EventRow]]] = deque(maxlen=APPENDS_MAX)
        self._lost: deque[LostTail] = deque()
        self._server: Any = None
        self.comparisons = 0
        """How often all heads were compared."""

    # -- remembering ------------------------------------------------------------------------------------------------
    def note(self, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> list[str]:
        """Remember the heads of what was accepted, and return the runs whose appends were refused for theirs."""
        refused: list[str] = []
        for operation, verdict in zip(operations, verdicts, strict=True):
            if type(verdict) is Accepted:
                if type(operation) is Append:
                    self._note_append(operation)
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
                self._seen.pop(operation.run, None)
        return refused

    def _note_append(self, append: Append) -> None:
        if append.renewal is not None:
            self._note_row(append.renewal.row)
        elif append.events:
            seq, _, _, at, _, digest = append.events[-1]
            self._keep(append.run, Head(append.generation, seq, digest, at, append.row.status))
        self._appends.append((append.run, append.generation, append.events))

    def _note_claim(self, row: RunRow) -> None:
        """A run whose head is behind what was seen stays remembered by that: its tail is lost."""
        head = self._seen.get(row.id)
        if head is None or (head.generation, head.seq) <= (row.generation, row.head_seq):
            self._note_row(row)

    def _note_row(self, row: RunRow) -> None:
        self._keep(row.id, Head(row.generation, row.head_seq, row.head_digest, row.updated_at, row.status))

    def _keep(self, run: str, head: Head) -> None:
        seen = self._seen
        seen[run] = head
        seen.move_to_end(run)
        if len(seen) > HEADS_MAX:
            seen.popitem(last=False)

    # -- comparing --------------------------------------------------------------------------------------------------
    def compare_if_other(self, statements: PostgresStatements) -> None:
        """Compare all heads, unless the server is the one that this was asked of the last time."""
        server = statements.all("server_process")
        if server != self._server:
            self.compare(statements, list(self._seen))
            self.comparisons += 1
        self._server = server

    def forget_server(self) -> None:
        """Compare all heads at the next connection, whatever that leads to."""
        self._server = None

    def compare(self, statements: PostgresStatements, runs: Sequence[str]) -> set[str]:
        """Return the runs, among these, that have lost their tails. They are told of once, and then forgotten."""
        lost: set[str] = set()
        runs = [run for run in runs if run in self._seen]
        for first in range(0, len(runs), PAGE):
            asked = [(run, *self._seen[run][:4]) for run in runs[first : first + PAGE]]
            for run, *facts in statements.all("heads_behind", *columns(5, asked)):
                self._judge(run, self._seen.pop(run), *facts)
                lost.add(run)
        return lost

    def _judge(
        self, run: str, head: Head, generation: int | None, there: int | None, at: int | None, status: Any, now: int
    ) -> None:
        """Note that a run has lost its tail; unless it had ended, and was deleted or begun anew since."""
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
        for one, of_generation, events in self._appends:
            if one == run and of_generation == generation:
                yield from events

    def take(self) -> list[LostTail]:
        """Return what was found since the last call."""
        taken: list[LostTail] = []
        while self._lost:
            taken.append(self._lost.popleft())
        return taken
