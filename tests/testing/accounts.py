"""Accounts of a small, sound run and its child, made by hand: what the planted bugs are planted into."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from everstep.model import events as ev
from everstep.model.digests import chain_next, chain_start, step_key
from everstep.model.events import EventRow
from everstep.stores.protocol import Delivery, RunRow
from everstep.stores.rows.keys import EffectRow
from everstep.testing.checker import RunHistory, Violation, check

SECOND = 1_000_000
START = 1_800_000_000 * SECOND
ENTROPY = {"order": "0a" * 16, "order.4": "0b" * 16, "trip": "0d" * 16}
ARGUMENTS = {"look": "aa", "charge": "bb", "pack": "dd"}
STATUS_OF_END = {"run_completed": "completed", "run_failed": "failed", "run_cancelled": "cancelled"}

Line = tuple[str, str, int, ev.Body]
"""Kind, step, milliseconds since the start, body."""


def raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


def history(run: str, lines: list[Line], signals: list[Delivery] | None = None, **row: Any) -> RunHistory:
    """Return a history with its digests, and the row that goes with it."""
    digest, events = chain_start(run, 1), []
    for seq, (kind, step, milliseconds, body) in enumerate(lines, 1):
        at, encoded = START + milliseconds * 1000, ev.encode_body(body)
        digest = chain_next(digest, seq, kind, step, at, encoded)
        events.append(EventRow(seq, kind, step, at, encoded, digest))
    status = STATUS_OF_END.get(lines[-1][0], "waiting")
    facts = {"status": status, "head_seq": len(events), "head_digest": digest, "epoch": 2, **row}
    return RunHistory(RunRow(id=run, workflow="order", **facts), 1, events, signals or [])


def entry(kind: str, run: str, step: str, milliseconds: int, arguments: str = "7") -> dict[str, Any]:
    key = step_key(ENTROPY[run], step, ARGUMENTS[step.partition("#")[0]])
    at = START + milliseconds * 1000
    effect = step.partition("#")[0]
    return {"kind": kind, "effect": effect, "key": key, "arguments": arguments, "digest": arguments, "at": at}


def parent_lines() -> list[Line]:
    return [
        ("run_started", "", 0, ev.RunStarted("order", "", 1, "3.11", ENTROPY["order"])),
        ("step_started", "look", 1, ev.StepStarted(1, "aa", "read")),
        ("step_completed", "look", 9, ev.StepCompleted(1, raw('["x"]'))),
        ("step_started", "charge", 10, ev.StepStarted(2, "bb")),
        ("attempt_failed", "charge", 20, ev.AttemptFailed(2, 1, START + 30_000)),
        ("step_started", "charge", 31, ev.StepStarted(2, "bb", attempt=2, because="retry")),
        ("step_completed", "charge", 40, ev.StepCompleted(2, raw('["y"]'), attempt=2)),
        ("timer_started", "", 41, ev.TimerStarted(3, 20_000, START + 61_000)),
        ("timer_fired", "", 62, ev.TimerFired(3)),
        ("child_started", "pack", 63, ev.ChildStarted(4, "order.4", "pack", "cc")),
        ("signal_received", "", 64, ev.SignalReceived(1, "word", raw('["z"]'), id="w1")),
        ("child_ended", "", 70, ev.ChildEnded(4, "order.4", "completed", 2, raw('["p"]'))),
        ("signal_awaited", "", 71, ev.SignalAwaited(5, "word", "str")),
        ("run_completed", "", 72, ev.RunCompleted(raw('["done"]'))),
    ]


def child_lines() -> list[Line]:
    return [
        ("run_started", "", 63, ev.RunStarted("pack", "", 1, "3.11", ENTROPY["order.4"], parent="order")),
        ("step_started", "pack", 64, ev.StepStarted(1, "dd")),
        ("step_completed", "pack", 68, ev.StepCompleted(1, raw('["p"]'))),
        ("run_completed", "", 69, ev.RunCompleted(raw('["p"]'))),
    ]


def saga_lines() -> list[Line]:
    """A run that failed, and undid what it had done."""
    return [
        ("run_started", "", 0, ev.RunStarted("trip", "", 1, "3.11", ENTROPY["trip"])),
        ("step_started", "fly", 1, ev.StepStarted(1, "a1", compensate="unfly")),
        ("step_started", "sleep", 2, ev.StepStarted(2, "a2", compensate="unsleep")),
        ("step_completed", "sleep", 3, ev.StepCompleted(2)),
        ("step_completed", "fly", 4, ev.StepCompleted(1)),
        ("step_started", "drive", 5, ev.StepStarted(3, "a3", compensate="undrive")),
        ("step_failed", "drive", 6, ev.StepFailed(3)),
        ("compensation_started", "", 7, ev.CompensationStarted(4, "failure", [1, 2], cause=3)),
        ("step_started", "unfly", 8, ev.StepStarted(5, "a4", compensates=1)),
        ("step_completed", "unfly", 9, ev.StepCompleted(5)),
        ("step_started", "unsleep", 10, ev.StepStarted(6, "a5", compensates=2)),
        ("step_completed", "unsleep", 11, ev.StepCompleted(6)),
        ("run_failed", "", 12, ev.RunFailed(call=3)),
    ]


def parent_signals() -> list[Delivery]:
    return [
        Delivery(1, "order", "signal", "word", "w1", b'["z"]', START, "consumed"),
        Delivery(2, "order", "child", "order.4", "4", b"{}", START, "consumed"),
    ]


@dataclass
class Accounts:
    """Four accounts that agree, until something is planted."""

    parent: list[Line] = field(default_factory=parent_lines)
    child: list[Line] = field(default_factory=child_lines)
    saga: list[Line] = field(default_factory=saga_lines)
    signals: list[Delivery] = field(default_factory=parent_signals)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)
    earlier: list[RunHistory] = field(default_factory=list)
    more: list[RunHistory] = field(default_factory=list)
    drop_child: bool = False
    settled: bool = True
    now: int | None = None

    def __post_init__(self) -> None:
        self.ledger += [
            entry("request", "order", "look", 5),
            entry("request", "order", "charge", 12),
            entry("applied", "order", "charge", 13),
            entry("request", "order", "charge", 33),
            entry("request", "order.4", "pack", 65),
            entry("applied", "order.4", "pack", 66),
        ]
        done = {"state": "acknowledged", "pid": 1}
        self.journal += [
            {"verb": "start", "run": "order", **done},
            {"verb": "signal", "run": "order", "name": "word", "id": "w1", **done},
            {"verb": "claim", "run": "order", "epoch": 1, "worker": "a", **done},
            {"verb": "append", "run": "order", "epoch": 1, "first": 2, "last": 8, **done},
            {"verb": "claim", "run": "order", "epoch": 2, "worker": "b", **done},
            {"verb": "append", "run": "order", "epoch": 2, "first": 9, "last": 14, **done},
            {"verb": "result", "run": "order", "value": "done", **done},
            {"verb": "result", "run": "order", "value": "done", **done},
        ]
        self.earlier.append(history("order", self.parent[:8], epoch=1))

    def histories(self) -> list[RunHistory]:
        children = [] if self.drop_child else [history("order.4", self.child, epoch=1)]
        saga = history("trip", self.saga, epoch=1)
        return [history("order", self.parent, self.signals, **self.row), *children, saga, *self.more]

    def check(self) -> list[Violation]:
        return check(
            self.histories(),
            journal=self.journal,
            ledger=self.ledger,
            earlier=self.earlier,
            settled=self.settled,
            now=self.now,
        )


KEY = "invoice:7"


def owner(run: str, *more: Line, effect: str = "once", keys: list[EffectRow] | None = None, **row: Any) -> RunHistory:
    """Return the history of a run whose step has the key, and what became of it."""
    started: list[Line] = [
        ("run_started", "", 0, ev.RunStarted("pay", "", 1, "3.11", "0d" * 16)),
        ("step_started", "pay", 1, ev.StepStarted(1, "ee", effect, key=KEY)),
    ]
    made = history(run, [*started, *more], **row)
    made.keys, made.entropy = keys or [], "0e" * 16
    return made


def key_row(run: str, state: Any = "under-way", **fields: Any) -> EffectRow:
    """Return the key's row."""
    owned = {"run": run, "generation": 1, "call": 1, "seq": 2, "step": "pay", "effect": "once", "arguments": "ee"}
    return EffectRow(**{"key": KEY, "state": state, **owned, **fields})


def paid(value: str = '["p"]', **fields: Any) -> Line:
    return ("step_completed", "pay", 5, ev.StepCompleted(1, raw(value), **fields))


def sharer(run: str, owner: str, value: str = '["p"]', **fields: Any) -> RunHistory:
    """Return the history of a run that shares the key's outcome."""
    shared = ev.StepShared(1, raw(value), run=owner, seq=2, **fields)
    lines: list[Line] = [
        ("run_started", "", 0, ev.RunStarted("pay", "", 1, "3.11", "0f" * 16)),
        ("key_taken", "pay", 2, ev.KeyTaken(1, KEY, "ee", "once", run=owner, seq=2)),
        ("step_shared", "pay", 6, shared),
    ]
    made = history(run, lines)
    made.entropy = "0e" * 16
    return made
