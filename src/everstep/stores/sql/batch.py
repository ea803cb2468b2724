"""Which operations of a batch can be done together, with the result of doing them in order."""

from collections.abc import Iterator, Sequence, Set
from typing import Final

from everstep.model.status import ENDED
from everstep.stores.protocol import (
    Append,
    Claim,
    MarkRestored,
    Operation,
    Post,
    Release,
    RepairRun,
    RestartRun,
    StartRun,
    check_events,
)
from everstep.stores.rows.keys import ForgetKeys, SettleKey
from everstep.stores.rows.notifications import SettleNotification, TakeNotification
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, TakeSlot
from everstep.stores.rows.schedules import ChangeSchedule
from everstep.stores.rows.transfer import ClaimFamily, DeletePart, ImportRuns

NONE: Final[Set[str]] = frozenset()
SIMPLE: Final = frozenset((Append, StartRun))
"""The kinds of operations that may be done together with others."""
NOBODY_IS_TOLD = (Claim, Release, StartRun, TakeNotification, SettleNotification, ChangeQueue, TakeSlot, FreeSlot)


def is_simple(append: Append) -> bool:
    """Return True if an append changes only its own run. (An end may still concern followers and an inbox.)"""
    if append.plain:
        return True
    if append.starts or append.posts or append.hold is not None or not append.events:
        return False
    if append.keys is not None or append.archive or append.renewal is not None or append.redeliver:
        return False
    return not (append.consumed and append.row.status in ENDED)


def has_more(append: Append) -> bool:
    """Return True if a simple append has anything besides events."""
    if append.plain:
        return False
    if append.payloads or append.consumed or append.checkpoints:
        return True
    return append.beside is not None or append.row.budget is not None


class Batch:
    """A batch, split into what is done together (`appends`, `starts`) and the `others`, which are done in order.

    An operation is done together with others only if it is simple and no other operation of the batch mentions its
    run: then it makes no difference when in the batch it is done. The start of a run and its first append, which often
    come together, are the exception: starts are done before appends anyway.
    """

    __slots__ = ("_places", "appends", "ends", "followed", "has_keys", "others", "starts")

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.appends: list[Append] = []
        self.starts: list[StartRun] = []
        self.others: list[tuple[int, Operation]] = []
        self.ends: list[str] = []
        """The runs that `appends` end."""
        self.followed: list[Append] = []
        self.has_keys = False
        """Whether any operation concerns keys of effects."""
        self._places: dict[str, int] = {}
        is_alone = len(operations) == 1
        mentioned: dict[str, int] = {}
        begun: Set[str] = NONE
        if not is_alone and not SIMPLE.isdisjoint(map(type, operations)):
            mentioned, begun = _mentions(operations)
        for place, operation in enumerate(operations):
            if type(operation) is Append:
                run = operation.run
                is_simple_here = is_alone or mentioned[run] == (2 if run in begun else 1)
                if is_simple_here and (operation.plain or is_simple(operation)):
                    check_events(operation)
                    self.appends.append(operation)
                    self._places[run] = place
                    if not operation.plain and operation.row.status in ENDED:
                        self.ends.append(run)
                    continue
            elif type(operation) is StartRun:
                new = operation.new
                is_simple_here = (is_alone or mentioned[new.row.id] == 1) and new.follower is None
                if new.row.id in begun or (is_simple_here and operation.needs is None):
                    check_events(new)
                    self.starts.append(operation)
                    continue
            self.others.append((place, operation))
            self.has_keys |= isinstance(operation, SettleKey) or getattr(operation, "keys", None) is not None

    def set_apart(self, entangled: set[str], with_inbox: set[str]) -> None:
        """Take out ends of runs with deliveries in their inbox, and ends of followed runs if other operations post as
        well.

        Followers receive deliveries, whose numbers are in the order of the batch, so both ways of posting cannot be
        mixed.
        """
        if not entangled:
            return
        others_post = bool(with_inbox) or not all(isinstance(operation, NOBODY_IS_TOLD) for _, operation in self.others)
        apart = entangled if others_post else with_inbox
        self.others += [(self._places[append.run], append) for append in self.appends if append.run in apart]
        self.others.sort(key=lambda other: other[0])
        self.appends = [append for append in self.appends if append.run not in apart]
        self.followed = [append for append in self.appends if append.run in entangled]


def _mentions(operations: Sequence[Operation]) -> tuple[dict[str, int], Set[str]]:
    """Return how often each run is mentioned, and the runs that are started and appended to: see
    `_begun_with_an_append`.
    """
    mentioned: dict[str, int] = {}
    has_starts = False
    for operation in operations:
        if type(operation) is Append and (operation.plain or not (operation.starts or operation.posts)):
            mentioned[operation.run] = mentioned.get(operation.run, 0) + 1  # most of them mention just their own run
        else:
            has_starts = has_starts or type(operation) is StartRun
            for run in runs_mentioned(operation):
                mentioned[run] = mentioned.get(run, 0) + 1
    return mentioned, _begun_with_an_append(operations, mentioned) if has_starts else NONE


def _begun_with_an_append(operations: Sequence[Operation], mentioned: dict[str, int]) -> Set[str]:
    """Return the runs that are mentioned only by their start and one simple append that does not end them."""
    started: set[str] = set()
    both: set[str] = set()
    for operation in operations:
        if type(operation) is StartRun:
            is_alone = operation.new.follower is None and operation.needs is None
            if is_alone and mentioned[operation.new.row.id] == 2:
                started.add(operation.new.row.id)
        elif type(operation) is not Append or operation.run not in started:
            continue
        elif is_simple(operation) and operation.row.status not in ENDED:
            both.add(operation.run)
    return both


def runs_mentioned(operation: Operation) -> Iterator[str]:
    """Return the runs that an operation names; empty texts may be among them."""
    match operation:
        case Append():
            yield operation.run
            for new in operation.starts:
                yield new.row.id
                yield new.follower or ""
            for post in operation.posts:
                yield post.run
        case Post() | Claim() | Release() | DeletePart():
            yield operation.run
        case ClaimFamily():
            yield from operation.epochs
        case ImportRuns():
            for dump in operation.dumps:
                yield dump.row.id
        case SettleKey() | ForgetKeys() | MarkRestored() | TakeNotification() | SettleNotification():
            pass
        case ChangeQueue() | TakeSlot() | FreeSlot():
            pass
        case RepairRun():
            yield operation.row.id
        case ChangeSchedule():
            for new in operation.starts:
                yield new.row.id
                yield new.follower or ""
            for post in operation.posts:
                yield post.run
        case StartRun() | RestartRun():
            yield operation.new.row.id
            yield operation.new.follower or ""
            if isinstance(operation, StartRun) and operation.needs is not None:
                yield from operation.needs.runs
        case _:
            pass  # what frameworks save concerns no run
