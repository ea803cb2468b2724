"""The rules that compare the histories with other accounts: the ledger, the clients, the table of signals."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from everstep.model.status import ENDED
from everstep.testing.histories import RunHistory, Violation
from everstep.testing.ledger import MODEL
from everstep.testing.rules_history import Call, HistoryJudge

LATE_MICROSECONDS: Final = 20_000
"""How much later than the outcome a request may be recorded: two processes do not read their clocks at one instant."""

Entry = Mapping[str, Any]


def judge_effects(
    judges: Sequence[HistoryJudge],
    entries: Iterable[Entry],
    *,
    faults: Sequence[str],
    reads: Collection[str] = (),
) -> list[Violation]:
    """Compare what the ledger received and applied with the histories.

    A step uses the ledger if the ledger has an effect of its name; then each completed one was applied. An effect under
    another name is matched by its step's key: it was applied once at most. A `read` may be unknown to every history: a
    crash may lose it, and the code may then take another branch.
    """
    requests: dict[str, list[Entry]] = defaultdict(list)
    applied: dict[str, list[Entry]] = defaultdict(list)
    effects: set[str] = set()
    for entry in entries:
        effects.add(entry["effect"])
        (applied if entry["kind"] == "applied" else requests)[entry["key"]].append(entry)
    found = [violation for key, asked in requests.items() for violation in _one_question(key, asked)]
    known: dict[str, tuple[HistoryJudge, Call]] = {}
    actions: dict[str, list[tuple[str, Call]]] = defaultdict(list)
    reads = set(reads)
    for judge in judges:
        for call in judge.every_call:
            if call.kind != "step_started" or not call.key:
                continue
            if _effect_of(call) in effects or call.key in requests:
                known[call.key] = (judge, call)
                if call.own_key:
                    actions[call.key].append((judge.run, call))
                if call.effect == "read":
                    reads |= {_effect_of(call), *(entry["effect"] for entry in requests[call.key])}
    for key, (judge, call) in known.items():
        if len(actions[key]) > 1:
            found += _one_action(actions[key], requests[key], applied[key])
        else:
            is_named = _effect_of(call) in effects
            found += _one_step(judge.run, call, requests[key], applied[key], faults, is_named=is_named)
    for key, asked in requests.items():
        if key not in known and asked[0]["effect"] not in reads:
            found.append(
                Violation("D3", "", 0, f"{asked[0]['effect']} was requested, and no history knows its key {key}")
            )
    return found


def _effect_of(call: Call) -> str:
    return call.step.partition("#")[0]


def _one_question(key: str, asked: Sequence[Entry]) -> list[Violation]:
    """Every request with one key asks for the same thing."""
    different = {(entry["effect"], entry["digest"]) for entry in asked if entry["effect"] != MODEL}
    if len(different) <= 1:
        return []
    return [Violation("D7", "", 0, f"requests with the key {key} ask for {len(different)} different things")]


def _one_step(
    run: str,
    call: Call,
    requests: Sequence[Entry],
    applied: Sequence[Entry],
    faults: Sequence[str],
    *,
    is_named: bool,
) -> list[Violation]:
    found = []
    most = {"read": len(applied), "atomic": 1, "once": 1}.get(call.effect, 1)
    was_done = call.outcome == "step_completed" and not call.adopted  # otherwise a probe or a person said so
    least = 1 if was_done and is_named and call.effect != "read" else 0
    if len(applied) > most:
        found.append(Violation("D3", run, call.seq, f"{call.step} ({call.effect}) was applied {len(applied)} times"))
    if len(applied) < least:
        found.append(Violation("D3", run, call.outcome_seq, f"{call.step} is completed and was never applied"))
    if call.effect == "atomic" and call.outcome == "step_failed" and applied:
        found.append(Violation("D3", run, call.outcome_seq, f"{call.step} (atomic) has failed and was applied"))
    if was_done and not requests:
        found.append(Violation("D3", run, call.outcome_seq, f"{call.step} is completed and was never asked for"))
    if call.outcome and not call.cancelled and "zombie" not in faults:
        late = [entry for entry in requests if entry["at"] > call.outcome_at + LATE_MICROSECONDS]
        if late:
            found.append(Violation("L3", run, call.outcome_seq, f"{call.step} was requested again after its outcome"))
    return found


def _one_action(
    steps: Sequence[tuple[str, Call]], requests: Sequence[Entry], applied: Sequence[Entry]
) -> list[Violation]:
    """Several steps had one key, one after the other, and did one action."""
    run, call = next(((run, call) for run, call in steps if call.was_done), steps[0])
    if len(applied) > 1:
        return [Violation("D3", run, call.seq, f"{call.step} was applied {len(applied)} times under one key")]
    if call.was_done and not (requests and applied):
        return [Violation("D3", run, call.outcome_seq, f"{call.step} is completed and was never applied")]
    return []


def judge_inboxes(judges: Sequence[HistoryJudge]) -> list[Violation]:
    """Compare the table of signals with what the histories have consumed."""
    taken: dict[str, dict[int, int]] = defaultdict(dict)
    found = []
    for judge in judges:
        for number, seq in judge.consumed.items():
            if number in taken[judge.run]:
                found.append(Violation("D4", judge.run, seq, f"delivery {number} was taken in two generations"))
            taken[judge.run][number] = seq
    for judge in judges:
        if judge.history.is_newest:
            found += _one_inbox(judge.history, taken[judge.run])
    return found


def _one_inbox(history: RunHistory, taken: Mapping[int, int]) -> list[Violation]:
    run, found = history.row.id, []
    for delivery in history.signals:
        number, seq = delivery.number, taken.get(delivery.number, 0)
        if delivery.state == "consumed" and delivery.kind == "signal" and not seq:
            found.append(Violation("L2", run, 0, f"signal {number} is marked consumed, and no event has it"))
        if delivery.state != "consumed" and seq:
            found.append(Violation("D4", run, seq, f"delivery {number} was taken and is still {delivery.state}"))
        if delivery.state == "pending" and history.row.status in ENDED:
            found.append(Violation("L2", run, 0, f"the run has ended and delivery {number} is still pending"))
    return found


def judge_children(judges: Sequence[HistoryJudge]) -> list[Violation]:
    """Every child that a history has started exists, and ended as its parent received it."""
    histories = {judge.run: judge.history for judge in judges}
    rolled_back = {judge.run for judge in judges if judge.history.is_rolled_back}
    found = []
    for judge in judges:
        for call in judge.calls.values():
            if call.kind != "child_started" or call.is_copied:
                continue
            there = histories.get(call.run)
            if there is None:
                if not _may_be_gone(judge, call):
                    found.append(Violation("L1", judge.run, call.seq, f"the child run {call.run} is not in the store"))
                continue
            child = there.row
            if call.run in rolled_back or not judge.history.may_know(there, call.outcome_at):
                pass  # it was rolled back after its parent received its end; or it is another run
            elif call.outcome in ENDED and child.status != call.outcome and child.generation == 1:
                what = f"the child run {call.run} is {child.status}, and its parent was told {call.outcome}"
                found.append(Violation("L3", judge.run, call.outcome_seq, what))
    return found


def _may_be_gone(judge: HistoryJudge, call: Call) -> bool:
    """Return True if a child that is not in the store may have existed.

    All runs that start a child with a given id share it: it is deleted with the parent that came first, or stays where
    that is when another one is moved. It is never deleted while a parent needs it that has received its end and may
    continue. A child with a generated id is deleted, and moved, only with its parent.
    """
    history = judge.history
    if call.outcome == "refused":  # another run has the id, and nothing keeps that
        return True
    if re.fullmatch(rf"{re.escape(judge.run[:170])}(\.g\d+)?(\.r\d+)?\.\d+", call.run):
        return False
    came = history.arrival
    if came is not None and (history.generation, call.seq) <= (came.generation, came.seq):
        return True
    if not history.is_newest:  # a fresh history follows no child of the previous one
        return True
    was_told = any(one.kind == "child" and one.name == call.run for one in history.signals)
    return was_told and history.row.status in ("completed", "cancelled")


def judge_clients(histories: Sequence[RunHistory], lines: Iterable[Entry], *, settled: bool) -> list[Violation]:
    """Compare what clients were told with the store."""
    newest = {history.row.id: history for history in histories if history.is_newest}
    found: list[Violation] = []
    results: dict[str, Any] = {}
    for line in lines:
        if line["state"] != "acknowledged" or line["verb"] not in ("start", "signal", "result"):
            continue
        run = line["run"]
        history = newest.get(run)
        if history is None:
            found.append(Violation("L1", run, 0, f"its {line['verb']} was acknowledged, and it is not in the store"))
        elif line["verb"] == "signal":
            ids = {(delivery.name, delivery.id) for delivery in history.signals}
            if (line["name"], line["id"]) not in ids:
                found.append(Violation("L2", run, 0, f"the signal {line['name']!r} was acknowledged and is not there"))
        elif line["verb"] == "result":
            if history.row.status not in ENDED and not history.is_rolled_back:
                found.append(Violation("L3", run, 0, "its result was given away, and it has not ended"))
            if results.setdefault(run, line["value"]) != line["value"]:
                found.append(Violation("D1", run, 0, "two callers were given different results"))
        elif settled and history.row.status in ("queued", "running"):
            found.append(Violation("L1", run, 0, f"its start was acknowledged, and it is still {history.row.status}"))
    return found


def judge_epochs(histories: Sequence[RunHistory], lines: Iterable[Entry]) -> list[Violation]:
    """Compare the appends and claims that the stores accepted: their workers, and the order of their epochs."""
    owners: dict[tuple[str, int], str] = {}
    writers: dict[tuple[str, int], int] = {}
    appends: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    found = []
    for line in lines:
        run = line["run"]
        if line["verb"] == "claim" and owners.setdefault((run, line["epoch"]), line["worker"]) != line["worker"]:
            found.append(Violation("D5", run, 0, f"epoch {line['epoch']} has two owners"))
        if line["verb"] == "append":
            appends[run].append((line.get("generation", 1), line["first"], line["last"], line["epoch"]))
            if writers.setdefault((run, line["epoch"]), line["pid"]) != line["pid"]:
                found.append(Violation("D5", run, line["first"], f"two processes wrote in epoch {line['epoch']}"))
    for run, units in appends.items():
        units.sort()
        for (before, _, last, epoch), (generation, first, _, later) in pairwise(units):
            if later < epoch:
                found.append(Violation("D5", run, first, f"was written in epoch {later}, after epoch {epoch}"))
            if first <= last and before == generation:
                found.append(Violation("D5", run, first, "was written twice"))
    newest = {history.row.id: history.row.epoch for history in histories}
    over = {run for (run, epoch) in writers if epoch > newest.get(run, epoch)}
    return found + [Violation("D5", run, 0, "its row's epoch is below one that was written in") for run in sorted(over)]


def judge_ids(histories: Sequence[RunHistory]) -> list[Violation]:
    """There is one history for each generation of each id."""
    seen = Counter((history.row.id, history.generation) for history in histories)
    return [Violation("D6", run, 0, f"there are {count} of it") for (run, _), count in seen.items() if count > 1]
