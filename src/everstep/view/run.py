"""One run: what happened, what it waits for, what is wrong with it, and what to do about it."""

import ast
import json
from typing import Any, Final

import msgspec

from everstep.engine.history.verify import verify_now
from everstep.engine.run.holds import command_line
from everstep.errors import Damaged, NotReadable
from everstep.graph.story import EdgeStory, NodeStory
from everstep.model.accounts import ROOT, as_facts
from everstep.model.events import decode_body
from everstep.model.status import ENDED
from everstep.stores.protocol import RunRow, Store
from everstep.stores.rows.keys import UNSETTLED
from everstep.view.fields import made_of
from everstep.view.holds import HoldView, hold_view
from everstep.view.keys import state_of
from everstep.view.money import amounts_text, budget_text, standing_of
from everstep.view.plain import payload_json
from everstep.view.store import place_of, unserved_among
from everstep.view.summary import RunSummary, facts_of
from everstep.view.timeline import Crash, Rejection, Row, Timeline, timeline_of


class Wait(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that a run waits for: one of the first six says what."""

    signal: str = ""
    approval: str = ""
    request: str = ""
    timer: int = 0
    """When it fires."""
    child: str = ""
    key: str = ""
    """The key of an effect (`key=`) that another step has."""
    type: str = ""
    """Of a value that is to be sent."""
    id: str = ""
    """Of an approval."""
    arguments: str = ""
    expires_at: int | msgspec.UnsetType | None = msgspec.UNSET
    certain: bool = True
    """False if the code may have given it up by now."""
    step: str = ""
    """Of a key: the step that waits."""
    run: str = ""
    """Of a key: the run that has it."""
    state: str = ""
    held: str = ""
    """Of a key: why that run does not go on."""
    command: str = ""
    """The line that ends the wait, or says more."""


class ChildView(msgspec.Struct):
    """A child run."""

    id: str
    status: str


class Undelivered(msgspec.Struct):
    """A signal or a request that an ended run did not take. A retry delivers it."""

    kind: str
    name: str
    id: str


class ForkedFrom(msgspec.Struct):
    """Where a run was forked from."""

    run: str
    generation: int
    seq: int
    at: int
    edited: str
    by: str
    note: str
    origin: str
    """The event that it was forked at, in words."""


class GraphView(msgspec.Struct):
    """What happened in the graph of a run."""

    name: str
    nodes: list[NodeStory]
    edges: list[EdgeStory]
    under_way: list[str]


TOLD = (
    "steps",
    "crashes",
    "rejected",
    "patches",
    "checkpoints",
    "rolled_back",
    "is_undone",
    "error",
    "started_at",
    "last_at",
)
"""The fields that are as the timeline has them."""


class RunView(RunSummary, kw_only=True):
    """A run, as `everstep show --json` says it."""

    store: str
    completed_steps: list[str]
    """In the order in which they were finished."""
    attempts: dict[str, int]
    steps: list[Row]
    others: list[Row]
    """Timers, signals, requests, approvals, child runs, and notes."""
    crashes: list[Crash]
    rejected: list[Rejection]
    """What was sent and is not of the type that the code waits for."""
    waits_for: list[Wait]
    holds: list[HoldView]
    children: list[ChildView]
    undelivered: list[Undelivered]
    patches: dict[str, bool]
    graph: GraphView | None
    streams: dict[str, int]
    checkpoints: list[int]
    """The numbers of their events."""
    rolled_back: bool
    is_undone: bool
    """Whether its compensation has begun, or was asked for."""
    forked: ForkedFrom | None
    compensations: dict[str, str]
    """What was to be undone, and whether it was."""
    used: dict[str, Any]
    used_by_step: dict[str, dict[str, Any]]
    budget_text: str
    """What it has used, of how much, in words."""
    result: Any
    error: dict[str, Any] | None
    problem: str
    """Why its history cannot be believed; nothing if it is sound."""
    is_unserved: bool
    """Whether it waits for a worker that serves its workflow, and there is none."""
    started_at: int
    last_at: int
    """When its newest event was written."""
    now: int

    @property
    def rows(self) -> list[Row]:
        """Everything that takes time in it, in the order of the history."""
        return sorted([*self.steps, *self.others], key=lambda row: row.seq)


def run_view(store: Store, row: RunRow, url: str | None = None, timeline: Timeline | None = None) -> RunView:
    """Return all that is known of a run. `url` is that of the store, as commands are to name it."""
    timeline = timeline or timeline_of(store, row.id, row.generation)
    story, forked, accounts, now = timeline.graph, timeline.forked, timeline.accounts, store.now()
    under_way = [] if story is None or row.status == "completed" else story.under_way
    return made_of(
        RunView,
        row,
        **facts_of(row),
        **{name: getattr(timeline, name) for name in TOLD},
        store=place_of(store),
        completed_steps=timeline.completed_steps(),
        attempts={step.name: len(step.attempts) for step in timeline.steps},
        others=[one for one in timeline.rows if one.kind != "step"],
        waits_for=_waits(store, row, timeline, url) if row.status == "waiting" else [],
        holds=[hold_view(hold, url) for hold in store.holds(run=row.id)],
        children=[made_of(ChildView, child) for child in store.children(row.id)],
        undelivered=_undelivered(store, row),
        graph=GraphView(story.name, story.nodes(), story.edges(), under_way) if story is not None else None,
        streams=dict(store.streams(row.id, row.generation)),
        forked=made_of(ForkedFrom, forked) if forked is not None else None,
        compensations={step.name: step.undone for step in timeline.compensations()},
        used=as_facts(accounts.parts[ROOT].used) if accounts is not None else {},
        used_by_step={name: as_facts(one) for name, one in accounts.by_step.items()} if accounts is not None else {},
        budget_text=_budget_text(row, timeline, now),
        result=payload_json(row.outcome or b"[null]") if row.status == "completed" else None,
        problem=_problem(store, row.id),
        is_unserved=bool(unserved_among(store, [row])),
        now=now,
    )


def _problem(store: Store, run: str) -> str:
    try:
        verify_now(store, run)
    except Damaged as damage:
        return f"damaged: {damage}"
    except NotReadable as missing:
        return f"not verified: {missing}"
    return ""


def _undelivered(store: Store, row: RunRow) -> list[Undelivered]:
    sent = store.signals(row.id) if row.status in ENDED else ()
    lost = [one for one in sent if one.state == "undelivered" and one.kind in ("signal", "request")]
    return [made_of(Undelivered, one) for one in lost]


def _budget_text(row: RunRow, timeline: Timeline, now: int) -> str:
    """Return what the run has used; without a budget only if it was charged anything."""
    standing = standing_of(row)
    if standing is not None:
        return f"budget {budget_text(standing, row, now)}"
    used = timeline.accounts.parts[ROOT].used if timeline.accounts is not None else None
    return f"used {amounts_text(used)}" if used is not None and (used.microdollars or used.tokens) else ""


def why_rejected(store: Store, run: str, number: int) -> str:
    """Return why a run has rejected the signal with this number; nothing if it did not."""
    row = store.run(run)
    for event in reversed(store.events(run, row.generation)) if row is not None else ():
        if event.kind == "signal_rejected" and (body := decode_body(event.kind, event.body)).number == number:
            return str(body.why)
    return ""


# -- what it waits for -------------------------------------------------------------------------------------------------
def _waits(store: Store, row: RunRow, timeline: Timeline, url: str | None) -> list[Wait]:
    waits: list[Wait] = []
    for one in timeline.awaited_signals():
        line = command_line("signal", row.id, one.name, example_value(one.type), url=url)
        waits.append(Wait(signal=one.name, type=one.type, command=line, certain=not timeline.went_on_after(one)))
    for one in timeline.awaited_approvals():
        line = command_line(*approve_words(row.id, one.id, one.type), url=url)
        asked = Wait(approval=one.name, id=one.id, type=one.type, arguments=one.arguments, command=line)
        asked.expires_at = one.deadline
        waits.append(asked)
    for one in timeline.awaited_requests():
        line = command_line("ask", row.id, one.name, example_value(one.type), url=url)
        waits.append(Wait(request=one.name, type=one.type, command=line, certain=not timeline.went_on_after(one)))
    if row.wake_at is not None:
        waits.append(Wait(timer=row.wake_at))
    waits += [Wait(child=one.name) for one in timeline.rows if one.kind == "child" and one.state == "open"]
    return waits + [_key_wait(store, one, url) for one in timeline.steps if one.awaited_key and one.state == "open"]


def _key_wait(store: Store, step: Row, url: str | None) -> Wait:
    """Return which run has a key that a step waits for, as it is now, and why that run does not go on if it is held."""
    line, effect = command_line("effects", "--key", step.awaited_key, url=url), store.effect(step.awaited_key)
    wait = Wait(key=step.awaited_key, step=step.name, run=step.awaited_run, command=line)
    if effect is None or effect.state not in UNSETTLED:
        return wait
    wait.run, wait.state = effect.run, state_of(store, effect)
    if hold := next(iter(store.holds(run=effect.run)), None):
        wait.held, wait.command = hold.summary, command_line("show", effect.run, url=url)
    return wait


EXAMPLES: Final[dict[str, Any]] = {
    "bool": True,
    "int": 1,
    "float": 1.0,
    "str": "text",
    "Any": None,
    "None": None,
    "Decimal": "1.50",
    "list": [],
    "tuple": [],
    "set": [],
    "frozenset": [],
    "Sequence": [],
    "date": "2030-01-31",
    "datetime": "2030-01-31T09:00:00Z",
    "time": "09:00:00",
    "timedelta": "PT1H",
    "UUID": "00000000-0000-4000-8000-000000000000",
}
"""An example of a value of a type, by the type's name; of any other it is an object."""


def approve_words(run: str, id: str, type_text: str) -> list[str]:
    """Return the words of the command that answers an approval: one that says yes, where that is an answer."""
    example = "true" if type_text == "Any" else example_value(type_text)
    return ["approve", run, example, "--id", id]


def example_value(type_text: str) -> str:
    """Return JSON that shows what a value of a type looks like on a command line."""
    try:
        return json.dumps(_example(ast.parse(type_text, mode="eval").body), ensure_ascii=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "{}"


def _example(type_: ast.expr) -> Any:
    if isinstance(type_, ast.BinOp):  # of a union the first that is not None
        sides = (type_.left, type_.right)
        return _example(next((one for one in sides if ast.unparse(one) != "None"), type_.left))
    if isinstance(type_, ast.Constant):
        return None if isinstance(type_.value, bytes) else type_.value
    name = ast.unparse(type_.value if isinstance(type_, ast.Subscript) else type_).rpartition(".")[2]
    inside: list[ast.expr] = []
    if isinstance(type_, ast.Subscript):
        inside = type_.slice.elts if isinstance(type_.slice, ast.Tuple) else [type_.slice]
    if name in ("Literal", "Optional", "Union", "Annotated") and inside:
        return _example(inside[0])
    if name in ("list", "set", "frozenset", "Sequence") and inside:
        return [_example(inside[0])]
    if name == "tuple" and inside:
        return [_example(one) for one in inside if ast.unparse(one) != "..."]
    if name in ("dict", "Mapping") and len(inside) == 2:
        return {str(_example(inside[0])): _example(inside[1])}
    return EXAMPLES.get(name, {})
