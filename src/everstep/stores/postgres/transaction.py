"""Operations inside an open transaction, and many simple ones at once in a single round trip.

`Operations.one` does an operation by itself and is the specification; before it, `prepare` locks all runs, keys and
queues that a batch may concern, always in the same order. `simple` does the appends, starts and claims that concern
only their own runs, for all runs at once, and reports which of them were accepted; the others are then done one by one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final

from psycopg.pq import TransactionStatus

from everstep.errors import Damaged
from everstep.model.events import EventRow
from everstep.model.status import ENDED, Status
from everstep.stores.postgres.connections import Connection, begin, pipelined, said_by
from everstep.stores.postgres.direct import Direct, done_together, rows_of
from everstep.stores.postgres.queries import statements
from everstep.stores.protocol import (
    Append,
    Claim,
    Claimed,
    ClaimedPast,
    Delivery,
    Existing,
    MarkRestored,
    NewRun,
    NotClaimed,
    Operation,
    Refused,
    RestartRun,
    RunRow,
    StartRun,
    Verdict,
)
from everstep.stores.rows.keys import SettleKey
from everstep.stores.rows.queues import ChangeQueue, TakeSlot
from everstep.stores.rows.transfer import ImportRuns
from everstep.stores.sql.batch import runs_mentioned
from everstep.stores.sql.operations import ACCEPTED, Operations
from everstep.stores.sql.rows import Row, change_values, run_row, run_values, tag_values

IDLE: Final = TransactionStatus.IDLE
TAG_COLUMNS: Final = 4
FEW_EVENTS: Final = 16
"""Up to this many events are read with the claim of a run, to save a round trip. A run that has not begun has one."""
# The types of the arrays' columns, see direct.py.
RUNS: Final = "tttntnnbntntnttttnnnntbbb"
CHANGES: Final = "tnnnbntbnbtnbnnnbn"
ONE: Final = "tnnnbntbnbtnnn"
EVENTS: Final = "tnnttnbb"
PAYLOADS: Final = "ttb"
TAGS: Final = "ttnt"
HEADS: Final = "tnb"
BESIDE: Final = "tn" + "tnnn" + "tntnntnnnnbb" + "tnnbbbbn"
"""The columns of consumed deliveries, answers, entries of streams, and checkpoints."""


class PostgresStatements:
    """The statements of a schema on one connection, which may be replaced by another."""

    def __init__(self, schema: str, connection: Connection) -> None:
        self.connection = connection
        self.schema = schema
        self._texts = statements(schema)
        self._append_one = self._direct("append_one", ONE + EVENTS[2:].upper())
        self.start_simple = self._direct("start_simple", (RUNS + EVENTS + PAYLOADS + TAGS).upper())
        self.append_simple = self._direct("append_simple", (CHANGES + EVENTS + PAYLOADS).upper())
        self.beside_simple = self._direct("beside_simple", (HEADS + BESIDE).upper())
        self.drop_checkpoints_of = self._direct("drop_checkpoints_of", "tnnnb")
        self.lock_runs = self._direct("lock_runs", "T")
        self.claim_simple = self._direct("claim_simple", "TtT")
        self.events_of_claimed = self._direct("events_of_claimed", "Tn")
        self.inboxes = self._direct("inboxes", "T")
        self.change_thread = self._direct("change_thread", "ttnTTTNBBTTTTBBNTTTNTTBB")

    def _direct(self, name: str, kinds: str) -> Direct:
        return Direct(name, self._texts[name], kinds)

    def execute(self, name: str, parameters: Sequence[Any] = ()) -> Any:
        """Do a statement, and return the cursor. Behind a pooler it is a transaction of its own, if none is open."""
        if said_by(self.connection) and self.connection.info.transaction_status == IDLE:
            with pipelined(self.connection):
                begin(self.connection)
                cursor = self.connection.execute(self._texts[name], parameters, binary=True)
                self.connection.execute("COMMIT")
            return cursor
        return self.connection.execute(self._texts[name], parameters, prepare=self._prepares(), binary=True)

    def append_one(self, append: Append) -> int:
        """Do the statement of most steps, and return how many events it has written."""
        return self._append_one.changed(self.connection, [*one_values(append), *zip(*append.events, strict=True)])

    def all(self, name: str, *parameters: Any) -> list[Row]:
        """Do a statement and return its rows."""
        rows: list[Row] = self.execute(name, parameters).fetchall()
        return rows

    def all_with_plan_of_its_own(self, name: str, *parameters: Any) -> list[Row]:
        """The same for a statement of which most conditions are left out in turn: its plan is made for these values."""
        with pipelined(self.connection):
            begin(self.connection)
            self.execute("plan_for_values")
            cursor = self.execute(name, parameters)
            self.connection.execute("COMMIT")
        rows: list[Row] = cursor.fetchall()
        return rows

    def run(self, name: str, *parameters: Any) -> int:
        """Do a statement and return how many rows it has changed."""
        changed: int = self.execute(name, parameters).rowcount
        return changed

    def many(self, name: str, rows: Sequence[Row]) -> None:
        """Do a statement once for each row of parameters."""
        if rows:
            self.connection.cursor().executemany(self._texts[name], [tuple(row) for row in rows])

    def insert(self, name: str, width: int, rows: Sequence[Row]) -> int:
        """Insert rows, passed column by column, and return how many were new."""
        return self.run(name, *columns(width, rows)) if rows else 0

    def replace_run(self, row: RunRow) -> None:
        """Replace a run's row, with its tags."""
        self.run("restart_run", *run_values(row))
        self.run("untag", row.id)
        self.insert("keep_tags", TAG_COLUMNS, tag_values(row))

    def lock_keys(self, keys: Sequence[str]) -> None:
        """Wait for every transaction that has one of these keys locked. Later statements see what was
        committed before.
        """
        if keys:
            self.all("lock_keys", list(keys), self.schema)

    def texts(self, values: Sequence[str]) -> list[str]:
        """Return an array."""
        return list(values)

    def numbers(self, values: Sequence[int]) -> list[int]:
        """Return an array."""
        return list(values)

    def statuses(self, values: Sequence[Status]) -> Sequence[Any]:
        """Return one array."""
        return (list(values),)

    def _prepares(self) -> bool | None:
        return None if self.connection.prepare_threshold is None else True


def columns(width: int, rows: Sequence[Row]) -> list[list[Any]]:
    """Return rows as one list for each of their columns."""
    return list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]


class UnitFails(Exception):
    """An operation fails because of its own content, before it has changed anything. `error` is what its
    verdict says.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Transaction(Operations):
    """A connection's operations within a transaction, which the caller begins and ends."""

    _statements: PostgresStatements

    def __init__(self, schema: str, places: int, connection: Connection) -> None:
        self._schema = schema
        self._places = places
        super().__init__(PostgresStatements(schema, connection))

    def entropy(self) -> str:
        """Return the store's entropy, which identifies it."""
        rows = self._all("store_entropy")
        return str(rows[0][0]) if rows else ""

    def take_names(self) -> Row:
        """Set the names' `search_path` to that of the store's own sessions, and return what the caller's transaction
        had set.
        """
        return self._all("take_names")[0][:2]

    def give_names_back(self, before: Row) -> None:
        """Restore the settings of the caller's transaction."""
        self._all("give_names_back", *before)

    def tell(self, channel: str) -> None:
        """Notify other processes of a change, when this transaction is committed."""
        self._all("tell", channel, "")

    # -- locks ------------------------------------------------------------------------------------------------------
    def prepare(self, operations: Sequence[Operation]) -> None:
        """Lock everything that operations may concern: runs in the order of their ids, then keys, then queues and
        limits.

        The followers of a run and the waiters for a key are read before the locks are taken, so that they are locked in
        order, too; and once more afterwards, when they can no longer change.
        """
        self._queues.counted = {} if all(isinstance(operation, Claim) for operation in operations) else None
        runs = {run for operation in operations for run in runs_mentioned(operation) if run}
        ends, keys = _ends_and_keys(operations)
        if ends or keys:
            runs |= self._concerned(ends, keys)
        if len(runs) > 0:
            self._all("lock_runs", sorted(runs))
        if ends:
            keys = sorted({*keys, *(key for (key,) in self._all("keys_under_way", ends))})
        if keys:
            self._statements.lock_keys(keys)
        if (ends or keys) and (more := self._concerned(ends, keys) - runs):
            self._all("lock_runs", sorted(more))
        if queues := self._queues_to_lock(operations):
            self._all("lock_queues", queues, self._schema)
        if any(isinstance(operation, ImportRuns) for operation in operations):
            self._run("lock_numbers")
        if any(isinstance(operation, MarkRestored) for operation in operations):
            self._all("lock_workers", self._places)

    def _queues_to_lock(self, operations: Sequence[Operation]) -> list[str]:
        """Return the queues and limits whose slots, tokens or settings the operations may change."""
        names: set[tuple[str, str]] = set()
        claimed: list[str] = []
        for operation in operations:
            if isinstance(operation, Claim):
                claimed += [operation.run] * operation.queued
            elif isinstance(operation, TakeSlot):
                names.add(("limit", operation.name))
            elif isinstance(operation, ChangeQueue):
                names.add((operation.kind, operation.name))
        if claimed:
            names |= {("queue", queue) for (queue,) in self._all("queues_of_runs", claimed)}
            names |= {
                ("queue", start.new.row.queue) for start in operations if isinstance(start, StartRun | RestartRun)
            }
        return [f"{kind} {name}" for kind, name in sorted(names)]

    def _concerned(self, ends: list[str], keys: list[str]) -> set[str]:
        return {run for (run,) in self._all("concerned", ends, keys)}

    def _refusal(self, append: Append, ended: bool) -> Refused | None:
        refusal = super()._refusal(append, ended)
        hold = append.hold
        if refusal is None and hold is not None and hold.resolved_at is None and self._all("is_hold_taken", hold.id):
            raise UnitFails(Damaged(f"There is a hold {hold.id} already, so run {append.run} was not written."))
        return refusal

    # -- at once ----------------------------------------------------------------------------------------------------
    def simple(
        self, appends: Sequence[Append], starts: Sequence[StartRun], claims: Sequence[Claim] = ()
    ) -> dict[int, Verdict]:
        """Do simple operations in one transaction and one round trip; return the verdicts that were reached.

        Their positions are counted through the starts, the appends, then the claims.
        """
        if not starts and not claims and len(appends) == 1 and _is_plain(appends[0]):
            return {0: ACCEPTED} if self._statements.append_one(appends[0]) else {}
        do = self._statements
        asked: list[tuple[Direct, Sequence[Any]]] = []
        if starts:
            asked.append((do.start_simple, _start_values([start.new for start in starts])))
        if claims or len(appends) > 1 or any(append.row.status in ENDED for append in appends):
            asked.append((do.lock_runs, [[*(one.run for one in appends), *(one.run for one in claims)]]))
        if appends:
            asked.append((do.append_simple, _append_values(appends, {start.new.row.id for start in starts})))
            asked += self._beside(appends)
        if claims:
            runs = [claim.run for claim in claims]
            asked.append((do.claim_simple, _claim_values(claims)))
            asked.append((do.events_of_claimed, [runs, FEW_EVENTS]))
            asked.append((do.inboxes, [runs]))
        results = done_together(do.connection, asked)
        found = {statement: result for (statement, _), result in zip(asked, results, strict=True)}
        new = _accepted(found.get(do.start_simple), [start.new.row.id for start in starts])
        verdicts: dict[int, Verdict] = dict.fromkeys(new, ACCEPTED)
        if len(new) < len(starts):
            made = {starts[place].new.row.id for place in new}
            verdicts |= self._existing(starts, {*made, *(append.run for append in appends)})
        written = _accepted(found.get(do.append_simple), [append.run for append in appends])
        verdicts |= dict.fromkeys([len(starts) + place for place in written], ACCEPTED)
        if claims:
            answers = _claim_answers(*results[-3:])
            first = len(starts) + len(appends)
            verdicts |= {place: answers[one.run] for place, one in enumerate(claims, first) if one.run in answers}
        return verdicts

    def _existing(self, starts: Sequence[StartRun], others: Set[str]) -> dict[int, Verdict]:
        """Return the verdicts on starts of runs that exist, except those whose verdict needs more."""
        ids = [one.new.row.id for one in starts if one.new.row.id not in others]
        rows = {row.id: row for row in map(run_row, self._all("rows_of_runs", ids))} if ids else {}
        found = ((place, rows.get(one.new.row.id)) for place, one in enumerate(starts))
        return {place: Existing(row) for place, row in found if row is not None}

    def _beside(self, appends: Sequence[Append]) -> list[tuple[Direct, Sequence[Any]]]:
        """Return the statements that write what accepted appends have in addition to their events and payloads."""
        more = [a for a in appends if not a.plain and (a.consumed or a.beside is not None or a.checkpoints)]
        if not more:
            return []
        heads = columns(3, [(a.run, a.epoch, a.events[-1].digest) for a in more])
        consumed = columns(2, [(a.run, number) for a in more for number in a.consumed])
        answers = columns(4, [row for a in more if a.beside is not None for row in a.beside.answers])
        entries = columns(12, [row for a in more if a.beside is not None for row in a.beside.entries])
        checkpoints = columns(8, [row for a in more for row in a.checkpoints])
        asked: list[tuple[Direct, Sequence[Any]]] = [
            (self._statements.beside_simple, [*heads, *consumed, *answers, *entries, *checkpoints])
        ]
        for a in more:
            if a.checkpoints:
                kept = (a.run, a.generation, a.checkpoints_kept, a.epoch, a.events[-1].digest)
                asked.append((self._statements.drop_checkpoints_of, kept))
        return asked


def _ends_and_keys(operations: Sequence[Operation]) -> tuple[list[str], list[str]]:
    """Return the runs that operations end, in this generation or for good, and the keys that they name."""
    ends: list[str] = []
    keys: set[str] = set()
    for operation in operations:
        if isinstance(operation, SettleKey):
            keys.add(operation.key)
        elif isinstance(operation, StartRun):
            keys.update(operation.needs.keys if operation.needs is not None else ())
        elif isinstance(operation, RestartRun):
            ends.append(operation.new.row.id)
        elif isinstance(operation, Append):
            if operation.row.status in ENDED or operation.renewal is not None:
                ends.append(operation.run)
            if operation.keys is not None:
                keys.update(operation.keys.named())
    return ends, sorted(keys)


def _is_plain(append: Append) -> bool:
    """Return True if an append has only events and a head."""
    if append.payloads or append.consumed or append.beside is not None or append.checkpoints:
        return False
    row = append.row
    return row.status not in ENDED and row.budget is None and row.outcome is None


def one_values(append: Append) -> Row:
    """Return the parameters of `append_one`, except the events."""
    values = change_values(append)
    return (*values[:12], *values[14:])


def _append_values(appends: Sequence[Append], made: Set[str]) -> list[Any]:
    """Return the parameters of `append_simple`. `made`: runs that the same batch starts."""
    rows = [(*change_values(a), a.row.budget, a.run in made) for a in appends]
    events = [(a.run, a.generation, *event) for a in appends for event in a.events]
    payloads = [(a.run, digest, value) for a in appends for digest, value in a.payloads]
    return [*columns(len(CHANGES), rows), *columns(len(EVENTS), events), *columns(len(PAYLOADS), payloads)]


def _accepted(result: Any, runs: Sequence[str]) -> Sequence[int]:
    """Return the positions of the runs whose ids a result has. Nearly always it has all."""
    if result is None:
        return ()
    if result.ntuples == len(runs):
        return range(len(runs))
    accepted = {id for (id,) in rows_of(result, "t")}
    return [place for place, run in enumerate(runs) if run in accepted]


def _claim_answers(taken: Any, events: Any, inboxes: Any) -> dict[str, Verdict]:
    """Return the verdicts on claims by their runs, from the answers to `claim_simple` and `_read_past`."""
    histories: defaultdict[str, list[EventRow]] = defaultdict(list)
    for run, *event in sorted(rows_of(events, EVENTS[0] + EVENTS[2:])):
        histories[run].append(EventRow(*event))
    pending: defaultdict[str, list[Delivery]] = defaultdict(list)
    for delivery in (Delivery(*row) for row in sorted(rows_of(inboxes, "nttttbnt"))):
        pending[delivery.run].append(delivery)
    verdicts: dict[str, Verdict] = {}
    for is_claimed, *values in rows_of(taken, "n" + RUNS):
        row = run_row(tuple(values))
        past = ClaimedPast(histories[row.id], pending[row.id]) if row.id in histories else None
        verdicts[row.id] = Claimed(row, past) if is_claimed else NotClaimed(row)
    return verdicts


def _claim_values(claims: Sequence[Claim]) -> list[Any]:
    """Return the parameters of `claim_simple`. All are of one worker, and for the same statuses."""
    return [[claim.run for claim in claims], claims[0].worker, claims[0].statuses]


def _start_values(news: Sequence[NewRun]) -> list[Any]:
    """Return the parameters of `start_simple`."""
    rows = [run_values(new.row) for new in news]
    events = [(new.row.id, new.row.generation, *event) for new in news for event in (new.event, *new.more)]
    payloads = [(new.row.id, digest, value) for new in news for digest, value in new.payloads]
    tags = list(_tags(news))
    return [
        *columns(len(RUNS), rows),
        *columns(len(EVENTS), events),
        *columns(len(PAYLOADS), payloads),
        *columns(len(TAGS), tags),
    ]


def _tags(news: Sequence[NewRun]) -> Iterator[Row]:
    for new in news:
        if new.row.tags:
            yield from tag_values(new.row)
