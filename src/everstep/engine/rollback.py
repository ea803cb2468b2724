"""What a history says about undoing, without any code: what was done, what could be undone, what was.

Whoever asks for a rollback may be a command that knows no workflow. It learns here whether that makes sense, and what
would stay as it is.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from everstep.engine.history import Recorded, load_now
from everstep.engine.restoring import may_lack, newest_note
from everstep.errors import CompensationBegun, Damaged, Uncompensated, UnknownRun
from everstep.model.carried import CarriedStep
from everstep.model.contracts import KEPT, may_run_again
from everstep.model.events import ENDS, decode_body
from everstep.model.forked import copied_events
from everstep.stores.keys import KeyUndoing
from everstep.stores.protocol import RunRow, Store

if TYPE_CHECKING:
    from everstep.engine.journal import Journal

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
    """Say what becomes of the key (`key=`) of a step that is undone, with the event that is recorded next."""
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
    """Return the effects of child runs, and of theirs: their compensations are their own."""
    left: list[str] = []
    for row in store.children(run):
        try:
            account = Account(load_now(store, row)[1])
        except UnknownRun:  # deleted just now
            left.append(f"whatever the run {row.id} did, which was deleted")
        except Damaged:
            left.append(f"whatever the run {row.id} did, whose history is damaged")
        else:
            steps = _left_by(store, row, account) + account.compensable
            left += [f"{step} of the run {row.id}" for step in steps]
        left += left_by_children(store, row.id)
    return left + [f"whatever the run {child} did, which was deleted" for child in _deleted_children(store, run)]


def _deleted_children(store: Store, run: str) -> list[str]:
    """Return the children that a run has started, in any of its generations, and that are not there any more."""
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
