"""What a history says about compensation, without any code: what was done, could be undone, and was undone.

A rollback may be requested by a command that knows no workflow. It learns here whether that makes sense, and what would
remain.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from everstep.engine.history.journal import Journal
from everstep.engine.history.restored import may_lack, newest_note
from everstep.engine.history.verify import Recorded, load_generations, load_now, read_now, refuse_deleted
from everstep.errors import CompensationBegun, CrossesOnce, Damaged, Uncompensated, UnknownRun
from everstep.model import events as ev
from everstep.model.carried import CarriedStep
from everstep.model.contracts import KEPT, may_run_again
from everstep.model.events import ENDS, decode_body
from everstep.model.forked import copied_events
from everstep.stores.protocol import RunRow, Store
from everstep.stores.rows.keys import KeyUndoing

WHAT_IS_LOST: Final = "whatever it did in the part of its history that is lost"


class Account:
    """The effects of one run that matter when it is undone."""

    def __init__(self, history: Sequence[Recorded]) -> None:
        self.is_undone = False
        """Whether it is being undone just now."""
        self.was_undone = False
        """Whether it has ended, and there is nothing left of its compensation."""
        self.compensable: list[str] = []
        """The steps that must not happen twice, happened, have a compensation, and were not compensated."""
        self.uncompensated: list[str] = []
        """The steps that must not happen twice, happened or may have, and have no compensation."""
        self.lost = False
        """Whether what it did may be in a part of its history that is lost, and nobody has said that nothing is."""
        self.undoable: list[str] = []
        """The steps of any contract that happened or may have, and have a compensation that has not completed."""
        self.keyed: dict[int, tuple[str, CarriedStep | None]] = {}
        """The keys (`key=`) of what could be undone, by its call; with what is known of a step of an older generation.
        """
        self.note = newest_note(history) if history else None
        """Which life of its store the history knows of."""
        self._open: dict[int, Recorded] = {}
        self._done: dict[int, str] = {}
        self._undoable: dict[int, str] = {}
        self._todo: set[int] = set()
        self._begun_at: dict[int, int] = {}
        self.was_begun = False
        copied = copied_events(history[0].body) if history else 0  # what another run did is not this one's to undo
        for event in history:
            if event.seq > copied or event.seq == 1:
                self._take(event)
        self.compensable = list(self._done.values())
        begun = {call: event.step for call, event in self._open.items() if event.body.compensate}
        self.undoable = list((self._undoable | begun).values())
        self.unsettled = [event.step for event in self._open.values() if not may_run_again(event.body.effect)]
        """The steps that must not happen twice and of which nobody knows yet whether they have."""
        self.uncompensated += [event.step for event in self._open.values() if _is_left(event.body)]
        self.being_undone = {event.body.compensates for event in self._open.values() if event.body.compensates}
        """The calls whose compensation was begun and has no outcome."""
        if self.lost:
            self.uncompensated.append(WHAT_IS_LOST)

    def _take(self, event: Recorded) -> None:
        kind, body = event.kind, event.body
        if kind == "run_started" and body.carried is not None:
            self.uncompensated += body.carried.uncompensated
            self._undoable = {one.call: one.title for one in body.carried.undoable}
            self._done = {one.call: one.title for one in body.carried.undoable if not may_run_again(one.effect)}
            self.keyed = {one.call: (one.key, one) for one in body.carried.undoable if one.key}
            self.lost = bool(body.carried.caution)
        elif kind == "step_started":
            self._open[body.call] = event
            self._begun_at.setdefault(body.call, event.seq)
        elif kind == "run_retried":  # what was begun in between no longer counts, and is not undone
            voided = {call for call, seq in self._begun_at.items() if body.voids <= seq < event.seq}
            self.keyed = {call: one for call, one in self.keyed.items() if call not in voided}
            self._begun_at = {call: seq for call, seq in self._begun_at.items() if call not in voided}
        elif kind == "step_completed":
            self._settle(self._open.pop(body.call, None), body)
        elif kind in ("step_failed", "step_shared"):  # what was shared is another step's to undo
            self._open.pop(body.call, None)
        elif kind == "run_restored" or (kind == "run_repaired" and body.lost) or getattr(body, "unseen", False):
            self.lost = True
        elif kind == "run_resolved" and body.resolution == "accept" and body.call:
            self.lost = False
        elif kind == "compensation_started":
            self.was_begun = self.is_undone = True
            self._todo = set(body.steps)
        elif kind == "rollback_requested":
            self.was_begun = self.is_undone = True
            self.was_undone = False
        elif kind in ENDS:
            self.is_undone = False
            self.was_undone = self.was_begun and not self._todo

    def _settle(self, started: Recorded | None, outcome: Any) -> None:
        if started is None:
            return
        call, body = outcome.call, started.body
        if body.compensates:
            self._todo.discard(body.compensates)
            self._done.pop(body.compensates, None)
            self._undoable.pop(body.compensates, None)
            self.keyed.pop(body.compensates, None)
            return
        if body.because == KEPT:
            self._forget_kept(started.step)
        if body.compensate and not (outcome.skipped or outcome.fallback):
            self._undoable[call] = started.step
            if body.key:
                self.keyed[call] = (body.key, None)
        if outcome.skipped or outcome.fallback or may_run_again(body.effect):
            pass
        elif body.compensate:
            self._done[call] = started.step
        else:
            self.uncompensated.append(started.step)

    def _forget_kept(self, step: str) -> None:
        """A retried run was given an earlier outcome: it is the same effect, not another one."""
        name = step.partition("#")[0]
        for earlier in self.uncompensated:
            if earlier.partition("#")[0] == name:
                self.uncompensated.remove(earlier)
                return


def change_key(
    journal: "Journal", call: int, key: str, then: Literal["begun", "undone", "kept"], carried: CarriedStep | None
) -> None:
    """Change the key (`key=`) of a compensated step together with the next event."""
    if key:
        place = (carried.own_call, carried.generation) if carried is not None else ()
        journal.key_changes().undoing.append(KeyUndoing(key, call, then, *place))


def note_rollback(journal: "Journal", account: Account) -> None:
    """What a run did is to be undone, as is recorded next: from there on nobody shares the outcomes of its keys."""
    for call, (key, carried) in account.keyed.items():
        change_key(journal, call, key, "begun", carried)


def note_no_rollback(journal: "Journal", account: Account) -> None:
    """A run ends, as is recorded next, before everything was undone: what nobody began to undo is shared again."""
    for call, (key, carried) in account.keyed.items():
        if call not in account.being_undone:
            change_key(journal, call, key, "kept", carried)


def _is_left(started: Any) -> bool:
    return not (started.compensate or started.compensates or may_run_again(started.effect))


def refuse_retry(run: str, account: Account) -> None:
    """Begun compensation rules out a retry: what the run would build upon is gone."""
    if account.was_begun:
        raise CompensationBegun(
            f"The steps of the run {run} were compensated, so it cannot be retried. Start it again: under another id, "
            "or with on_existing='restart'."
        )


def refuse_rollback(store: Store, row: RunRow, account: Account, *, allowed: bool) -> None:
    """Raise if a rollback makes no sense, or if it would leave effects without anybody having said so."""
    if account.is_undone:
        raise CompensationBegun(
            f"What the run {row.id} did is being undone already; `everstep show {row.id}` says how far."
        )
    if account.was_undone:
        raise CompensationBegun(
            f"What the run {row.id} did has been undone already; there is nothing left to roll back."
        )
    refuse_what_is_left(store, row, account, allowed=allowed)


def refuse_what_is_left(store: Store, row: RunRow, account: Account, *, allowed: bool) -> None:
    """Raise if a rollback would leave effects that must not happen twice, unless that is allowed."""
    left = [] if allowed else _left_by(store, row, account) + left_by_children(store, row.id)
    if left:
        raise Uncompensated(
            f"A rollback of {row.id} would leave as they are: {', '.join(left)}. They must not happen twice, and "
            "nothing undoes them (no compensate=; child runs are rolled back by themselves). "
            f"`everstep rollback {row.id} --allow-uncompensated` (allow_uncompensated=True) undoes the rest.",
            left,
        )


def _left_by(store: Store, row: RunRow, account: Account) -> list[str]:
    """Return what nothing undoes of a run, also if it has not been taken up since a backup was restored."""
    if account.lost or account.note is None or not may_lack(store, store.life(), row.id, row.generation, account.note):
        return account.uncompensated
    return [*account.uncompensated, WHAT_IS_LOST]


def left_by_children(store: Store, run: str) -> list[str]:
    """Return the effects of child runs, and of their children: they compensate themselves."""
    left: list[str] = []
    for row in store.children(run):
        try:
            account = Account(load_now(store, row)[1])
        except UnknownRun:  # deleted just now
            left.append(f"everything that the run {row.id} did, which was deleted")
        except Damaged:
            left.append(f"everything that the run {row.id} did, whose history is damaged")
        else:
            steps = _left_by(store, row, account) + account.compensable
            left += [f"{step} of the run {row.id}" for step in steps]
        left += left_by_children(store, row.id)
    return left + [f"everything that the run {child} did, which was deleted" for child in _deleted_children(store, run)]


def _deleted_children(store: Store, run: str) -> list[str]:
    """Return the children that a run has started, in any of its generations, and that do not exist any more."""
    started: dict[tuple[int, int], str] = {}
    for generation in store.generations(run):
        for event in store.events(run, generation):
            if event.kind == "child_started":
                body = decode_body(event.kind, event.body)
                started[generation, body.call] = body.run
            elif event.kind == "child_ended" and decode_body(event.kind, event.body).status == "refused":
                started.pop((generation, decode_body(event.kind, event.body).call), None)
    children = dict.fromkeys(started.values())
    return [child for child in children if store.run(child) is None or store.is_being_deleted(child)]


CLOCKS_APART: Final = 60_000_000
"""How much later than its parent says a child may have begun, because another machine's clock was ahead."""
DELETED: Final = "what its deleted history does not say"
DAMAGED: Final = "what its damaged history does not say"
FORGOTTEN: Final = "its key was forgotten"


class Crossed(NamedTuple):
    """An effect that a retry would go back over. `seq` is its outcome's event; 0 if its end is unknown."""

    run: str
    step: str
    seq: int
    why: str = ""
    """Why it counts although it has a key of its own, which guards it as long as it is kept."""


def crossed_by(store: Store, run: str, history: Sequence[Recorded], voids: int, relied: set[str]) -> list[Crossed]:
    """Return the effects that happened, or may have, in what no longer counts from the event `voids` on.

    Not those that a compensation has undone: they may happen again. Nor those whose key is kept, which `relied` gets.
    """
    begun: dict[int, str] = {}
    keys: dict[int, str] = {}
    undoing: dict[int, int] = {}
    done: dict[int, Crossed] = {}
    children: dict[int, Recorded] = {}

    def is_kept(call: int, owner: str) -> bool:
        is_guarding = is_guarded(store, keys.get(call), owner)
        relied.update([keys[call]] if is_guarding else ())
        return is_guarding

    for event in history[voids - 1 :]:
        kind, body = event.kind, event.body
        if kind == "step_started" and body.compensates:
            undoing[body.call] = body.compensates
        elif kind == "step_started" and body.attempt == 1 and _must_be_kept(body):
            begun[body.call] = event.step
            keys |= {body.call: body.key} if body.key else {}
        elif kind == "key_taken" and not may_run_again(body.effect):
            keys[body.call] = body.key
        elif kind == "step_completed" and body.call in begun:
            step = begun.pop(body.call)
            if not (body.skipped or body.fallback or is_kept(body.call, run)):
                done[body.call] = Crossed(run, step, event.seq, FORGOTTEN if body.call in keys else "")
        elif kind == "step_shared" and body.call in keys and not is_kept(body.call, body.run):
            done[body.call] = Crossed(run, event.step, event.seq, FORGOTTEN)
        elif kind == "step_completed" and body.call in undoing and not body.skipped:
            done.pop(undoing[body.call], None)
        elif kind == "step_failed":  # it has certainly not happened, or failed for good
            begun.pop(body.call, None)
        elif kind == "child_started":
            children[body.call] = event
        elif kind == "child_ended" and body.status == "refused":  # its id belonged to another run
            children.pop(body.call, None)
    unknown = [Crossed(run, step, 0) for call, step in begun.items() if call not in keys]
    return [*done.values(), *(one for child in children.values() for one in _done_by(store, child, relied)), *unknown]


def _must_be_kept(body: ev.StepStarted) -> bool:
    """Tell whether a begun step must not happen twice."""
    return body.because != KEPT and not may_run_again(body.effect)  # type: ignore[arg-type]


def is_guarded(store: Store, key: str | None, owner: str) -> bool:
    """Return True if a step's key keeps it from happening again: other steps with the key share its outcome.

    Not if the key was forgotten. Nor if it is free, unless the run that did it then freed it: it was forgotten, and
    what another one did under it since was undone.
    """
    row = store.effect(key) if key else None
    return row is not None and (row.state != "free" or row.run == owner)


def histories_of_child(store: Store, started: Recorded) -> tuple[list[list[Recorded]], str]:
    """Return the histories of a child that a run has started, of all its generations; or the reason why they are
    unknown.

    A missing child did exist once. A run that has got its id since then is not the child.
    """
    row = store.run(started.body.run)
    if row is None:
        return [], DELETED
    try:
        refuse_deleted(store, row)
        histories = read_now(store, row, lambda now: load_generations(store, now))[1]
    except UnknownRun:  # including one that is being deleted
        return [], DELETED
    except Damaged:
        return [], DAMAGED
    return ([], DELETED) if histories[0][0].at > started.at + CLOCKS_APART else (histories, "")


def _done_by(store: Store, started: Recorded, relied: set[str]) -> list[Crossed]:
    """Return the effects of a child run, and of its own children."""
    child: str = started.body.run
    histories, lost = histories_of_child(store, started)
    if lost:
        return [Crossed(child, lost, 0)]
    return [one for history in histories for one in crossed_by(store, child, history, 1, relied)]


def lost_child(store: Store, history: Sequence[Recorded], child: str) -> list[Crossed]:
    """Return a child whose failure is to be retried, if it is not there any more: a retry would start it anew."""
    started = [event for event in history if event.kind == "child_started" and event.body.run == child]
    if not started or histories_of_child(store, started[-1])[1] != DELETED:
        return []
    return [Crossed(child, DELETED, 0)]


def refuse_crossing(run: str, crossed: Sequence[Crossed], *, across_once: bool) -> None:
    """Raise `CrossesOnce`, unless it was allowed and every effect has a known end."""
    unknown = [one for one in crossed if not one.seq and one.run == run]
    if not crossed or (across_once and not unknown):
        return
    listed = ", ".join(_text(one, run) for one in crossed)
    advice = "How it ended is not known, so it cannot be allowed; `everstep show` says more."
    if not unknown:
        advice = (
            "If that is right, `everstep retry --across-once` (across_once=True) continues: outcomes of the run's own "
            "steps are kept and not done again, child runs are started anew."
        )
    what = f"A retry of {run} would go back over effects that must not happen twice"
    raise CrossesOnce(f"{what}: {listed}. {advice}", crossed)


def _text(one: Crossed, run: str) -> str:
    whose = f" of {one.run}" if one.run != run else ""
    why = f", {one.why}" if one.why else ""
    return f"{one.step}{whose} (event {one.seq or '?'}{why})"
