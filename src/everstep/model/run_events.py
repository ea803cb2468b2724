"""The bodies of events about a run as a whole: how it begins and ends, and what happens to it in between."""

import msgspec

from everstep.model.budgets import Allotment, Limits
from everstep.model.carried import Carried
from everstep.model.event_base import NO_PAYLOAD, Body, Outcome
from everstep.model.forked import Forked


class RunStarted(Body):
    """The run begins: what to run, with what, and the 128 random bits that all its keys derive from."""

    workflow: str
    version: str
    semantics: int
    python: str
    entropy: str
    arguments: msgspec.Raw = NO_PAYLOAD
    arguments_ref: str = ""
    parent: str = ""
    timeout: float | None = None
    source: str = ""
    delay: float = 0.0
    """Seconds between the start and the moment when the code begins."""
    digest: str = ""
    """The digest of the arguments, which a `start` with this run's id compares."""
    restored: int = 0
    """How often the store had been restored from a backup when the run was started."""
    life: str = ""
    """The store's life at that time. Each restored backup begins a new one, and no two stores share one."""
    chain: str = ""
    """The id of the chain key that the run's digests are made with; empty without a key."""
    unseen: bool = False
    """True if the parent may already have started this run before, in a part of its history that is lost."""
    unchecked: bool = False
    """The run was started by its workflow's name, where the types of the workflow's parameters were not known."""
    budget: Allotment | None = None
    """How much the run may use, with its children."""
    carried: Carried | None = None
    """What the run takes with it from its previous history, if its code said `continue_as`."""
    forked: Forked | None = None
    """The run and the event that it was forked from."""


class CancelRequested(Outcome):
    """A person, a program or the run's own timeout asked the run to stop. `grace` is in seconds."""

    reason: str = ""
    by: str = ""
    grace: float = 30.0
    now: bool = False
    timeout: bool = False
    number: int = 0


class RollbackRequested(Outcome):
    """A rollback was requested. The run's code does not run; steps in doubt are settled first.

    `uncompensated`: the caller allowed effects to stay that must not happen twice and have no compensation.
    """

    by: str = ""
    note: str = ""
    uncompensated: bool = False
    number: int = 0


class CompensationStarted(Body):
    """The run failed or is rolled back: from here on it only compensates `steps` (calls), in this order.

    `because` is `failure`, with the error and the call whose failure it is, or `rollback`. `forced` when the code did
    not end by itself.
    """

    call: int
    because: str
    steps: list[int] = []
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    cause: int = 0
    forced: bool = False
    secret: bool = False
    """The error came from a secret step, so of it only its type is shown."""


class RunHeld(Body):
    """The run waits for a person."""

    hold: str
    reason: str
    summary: str = ""
    number: int = 0


class RunResolved(Body):
    """A person (or the engine, when the cause is gone) decided about a hold."""

    hold: str
    resolution: str
    by: str = ""
    note: str = ""
    accepted: dict[int, str] = {}
    """With `accept`: event number to the new arguments' digest that counts as equal."""
    facts: dict[str, msgspec.Raw] = {}
    """With `accept` of drift: what the run remembers from now on, by subject."""
    call: int = 0
    """With `retry` of an exhausted step: the call that gets new attempts."""
    granted: Limits | None = None
    """With `accept` of a budget: how much more may be used; its seconds count from here."""
    part: int = 0
    """The part of the budget to which it was granted."""


class RunRetried(Body):
    """A failed run continues from what failed.

    What the code did between the event `voids` and this one no longer counts; outcomes of calls that were open before
    do, except that steps which failed meanwhile are open again. `entropy` keys the calls that the code asks for from
    `voids` on, so that they share no key with those that no longer count.
    """

    voids: int
    entropy: str
    call: int = 0
    by: str = ""
    crossed: list[int] = []
    """Outcomes of `once` steps that no longer count and did happen: each is given to the next identical call."""


class RunRepaired(Body):
    """The history was damaged. What came after the last good event was archived, and the run continues from there.

    What was begun in the archived part is unknown. So from here on a step that must not happen twice is in doubt when
    the code asks for it, until a person accepts that nothing is missing; unless the damage was only in the run's row,
    and nothing is `lost`.
    """

    archived: int = 0
    """How many events were archived."""
    since: int = 0
    """The number of the first of them."""
    lost: bool = False
    """Whether there was, or may have been, anything after the last good event."""
    why: str = ""
    steps: list[str] = []
    """Steps that were begun in the archived part, as far as it could be read."""
    workers: list[str] = []
    """The workers that began them."""
    status: str = "queued"
    """The run's status after the repair: `queued`, or `held` if it was held before."""
    by: str = ""
    note: str = ""


class RunRestored(Body):
    """The store was restored from a backup, so what the run did after the backup is missing here.

    Or that is true of the store from which the run was imported or forked. From here on a step that must not happen
    twice is in doubt when the code asks for it, until a person accepts that nothing is missing. `number` counts the
    restores of the store, and `life` is its life since.
    """

    number: int = 0
    life: str = ""


class RunContinued(Body):
    """This history ends, and the run continues with a fresh one, with other `arguments` (their digest)."""

    arguments: str


class RunCompleted(Body):
    """The run's result."""

    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""


class RunFailed(Body):
    """The run's failure. `call`: the step or child that failed, if one did; `forced` as in a cancel.

    `secret`: it came from a secret step, so of the error only its type is shown.
    """

    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    call: int = 0
    forced: bool = False
    secret: bool = False


class RunCancelled(Body):
    """The run was cancelled or rolled back; `forced` when the engine did not wait for its code to end."""

    forced: bool = False
    rolled_back: bool = False


class GraphStarted(Body):
    """A run of a graph begins, with this definition: its nodes, their contracts and its edges.

    A resumed run is compared with it, so that a changed graph is noticed before anything is done.
    """

    call: int
    graph: str
    nodes: dict[str, dict[str, str]]
    """What each node is: its `kind`, and where it says so its `effect` and its `join`."""
    edges: list[list[str]]
    """Source, target, and how it is taken: `if`, `each`, or nothing."""
    source: str = ""


class GraphMoved(Body):
    """A visit of a node has finished, and its graph continues: the edges that were taken, and the visits that begin.

    This is durable before any of them begins. A resumed run takes the recorded edges, and asks no condition again.
    """

    call: int
    after: str = ""
    """The finished visit, such as `check#2`. Empty at the start."""
    took: list[list[str]] = []
    """Source and target of each edge; in a fan-out over a list also how many items it had."""
    begins: list[str] = []
    queued: list[str] = []
    """Visits that could begin now, and wait for a place (`max_concurrency`)."""
    awaits: list[str] = []
    """Nodes that have been reached, and wait for other branches before they begin."""
    items: msgspec.Raw = NO_PAYLOAD
    """The items of a fan-out over a list, by the node that is visited for each of them."""
    ref: str = ""
    source: str = ""
