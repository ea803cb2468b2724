"""The steps of one run that have a key of their own: they get it, wait for it, share an outcome, or conflict.

The store decides which step has a key, in the transaction of that step's `step_started`; what is read here before only
saves useless claims. If another step came first, the store refuses the unit, and the recorded start becomes
`key_taken`: nothing outside has seen it, and no body has begun. From then on the step waits without memory, and the
append that changes the key delivers that to its inbox. What happened to a step is read from the history alone, and
never decided again.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from everstep.engine.code.commands import StepCall
from everstep.engine.code.step_state import KEY, StepState
from everstep.engine.history.journal import packed, unpacked
from everstep.engine.history.verify import Recorded
from everstep.engine.run.holds import key_damaged_report
from everstep.errors import ChainKeyMissing, Damaged, KeyConflict, StoreError
from everstep.model import events as ev
from everstep.model.chains import ChainKeys
from everstep.model.crash_points import crash_point
from everstep.model.digests import shared_key
from everstep.stores.brief import Busy, briefly
from everstep.stores.rows.keys import (
    EffectRow,
    KeyClaim,
    KeyEnd,
    KeyShare,
    KeyUndoing,
    KeyWait,
    is_of_earlier_generation,
    owner_of,
)

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.attempts import StepAttempts
    from everstep.engine.run.driver import Driver


NOT_KNOWN: Final = "not known"
"""Replaces a worker that cannot be read from a history, so that nothing proves that it has ended."""


class Keys:
    """The open steps of one run that have a key."""

    def __init__(self, driver: "Driver", attempts: "StepAttempts", known: dict[int, StepState]) -> None:
        self.waiting: dict[int, StepCall] = {}
        """The steps that wait for their keys."""
        self._driver = driver
        self._attempts = attempts
        self._known = known
        self._claims: dict[int, KeyClaim] = {}
        """The newest claim of each step that was begun here or before, by its call."""
        self._sharing: dict[int, tuple[StepCall, StepState]] = {}
        """The steps that got another step's outcome, which may not be durable yet."""

    # -- beginning -------------------------------------------------------------------------------------------------
    def begin(self, call: StepCall) -> None:
        """Begin a step with a key that the code asked for."""
        if call.cancelled:
            call.keyed = None  # it never begins, so it needs no key
            self._attempts.begin(call)
            return
        self._known[call.call] = StepState()
        self._go(call, "")

    def begin_again(self, call: StepCall, because: str) -> None:
        """Begin another attempt. Another step may have got the key meanwhile, because the step's failure had freed
        it.
        """
        self._go(call, because)

    def _go(self, call: StepCall, because: str) -> None:
        """Begin an attempt if the key is free or the step has it; else do what the owner's state requires."""
        row = self._row_if_readable(call)  # if it cannot be read now, the store checks when it is claimed
        if self._may_be_ours(call, row):
            self._claim(call, row, because)
            return
        self._known[call.call].due = KEY
        self._driver.record("key_taken", call.step, self._taken(call, row, again=because != ""))
        self._look(call, row)

    def _row(self, call: StepCall) -> EffectRow | None:
        assert call.keyed is not None
        return briefly(self._driver.app.store.effect, call.keyed.key)

    def _row_if_readable(self, call: StepCall) -> EffectRow | None:
        try:
            return self._row(call)
        except (Busy, StoreError):
            return None

    def _may_be_ours(self, call: StepCall, row: EffectRow | None) -> bool:
        assert call.keyed is not None
        if any(claim.key == call.keyed.key and number != call.call for number, claim in self._claims.items()):
            return False  # another step of this run has it, or is about to get it
        is_mine = row is not None and (self._is_mine(call, row) or self._is_inherited(call, row))
        return row is None or row.state == "free" or (row.state == "under-way" and is_mine)

    def is_anothers(self, call: StepCall) -> bool:
        """Return True if another step has a step's key now, or has done its action."""
        try:
            return not self._may_be_ours(call, self._row(call))
        except (Busy, StoreError):
            return False  # it cannot be read just now

    def _is_mine(self, call: StepCall, row: EffectRow) -> bool:
        return owner_of(row) == (self._driver.run, self._driver.journal.generation, call.call)

    def _is_inherited(self, call: StepCall, row: EffectRow) -> bool:
        """Return True if this step began in an earlier generation of the run, which ended without settling it."""
        is_same = (row.step, row.arguments) == (call.target.name, call.arguments.digest)
        owner = (self._driver.run, self._driver.journal.generation, call.call)
        return is_same and is_of_earlier_generation(row, owner)

    def _claim(self, call: StepCall, row: EffectRow | None, because: str) -> None:
        """Record that the step begins, and claim its key in the same transaction."""
        assert call.keyed is not None
        if not self._attempts.has_room(call, again=because != ""):
            return
        driver, attempts = self._driver, self._known[call.call]
        attempts.attempt += 1
        attempts.due, attempts.by_person, attempts.by = None, False, driver.app.worker
        attempts.refused = False
        attempts.round = row.round if row is not None else 0
        body = call.body()
        body.attempt, body.because = attempts.attempt, because
        body.key, body.round = call.keyed.key, attempts.round
        if row is not None and row.state == "under-way" and self._is_inherited(call, row):
            attempts.by = body.by = self._beginner(row)
            attempts.inherited = True
        self._present(call, attempts.round)
        seq = self._attempts.record_start(call, body)
        claim = self._claims[call.call] = claim_of(call, seq, attempts.round)
        driver.journal.key_changes().claims.append(claim)
        self._attempts.start_when_allowed(call, seq)

    def _beginner(self, row: EffectRow) -> str:
        """Return the worker that began a step in an earlier generation, whose history may be damaged."""
        try:
            (event,) = self._driver.app.store.events(row.run, row.generation, only=[row.seq])
            return ev.decode_body("step_started", event.body).by or NOT_KNOWN
        except (StoreError, ValueError, msgspec.MsgspecError):
            return NOT_KNOWN

    def _present(self, call: StepCall, round: int) -> None:
        assert call.keyed is not None
        store, target = self._driver.app.store, call.target
        call.keyed.presented = shared_key(store.entropy, call.keyed.key, target.name, call.arguments.digest, round)

    # -- another step has it ---------------------------------------------------------------------------------------
    def lost(self, claims: Sequence[KeyClaim]) -> None:
        """Replace the starts of steps whose claims lost: nothing outside has seen them, and the history gets
        `key_taken`.
        """
        driver = self._driver
        changed: dict[int, tuple[str, ev.Body]] = {}
        recorded = {event.seq: event for event in driver.journal.unsaved}
        rows: dict[str, EffectRow | None] = {}
        for claim in claims:
            try:
                rows[claim.key] = briefly(driver.app.store.effect, claim.key)
            except (Busy, StoreError):
                rows[claim.key] = None  # whichever step has it: this one waits, and the store says when it need not
            begun: ev.StepStarted = ev.decode_body("step_started", recorded[claim.seq].body)
            changed[claim.seq] = ("key_taken", _instead_of(begun, rows[claim.key]))
            self._take_back(claim)
            if driver.budgets is not None:
                driver.budgets.take_back(claim.seq, begun)
        driver.writer.rewrite(changed)
        for claim in claims:
            call = driver.execution.steps.get(claim.call)
            if call is not None and not driver.is_over:
                self._look(call, rows[claim.key])
        if not driver.stopped:
            driver.come_to_rest()

    def _take_back(self, claim: KeyClaim) -> None:
        changes = self._driver.journal.key_changes()
        changes.claims.remove(claim)
        if self._claims.get(claim.call) is claim:
            del self._claims[claim.call]
        self._attempts.starting.pop(claim.call, None)
        if claim.call in self._known:
            attempts = self._known[claim.call]
            attempts.attempt, attempts.due = attempts.attempt - 1, KEY

    def _taken(self, call: StepCall, row: EffectRow | None, *, again: bool) -> ev.KeyTaken:
        body = call.body()
        assert call.keyed is not None
        body.key, body.because = call.keyed.key, "again" if again else ""
        return _instead_of(body, row)

    def _look(self, call: StepCall, row: EffectRow | None) -> None:
        """Act on the state of a key that another step has."""
        if row is not None and row.state != "free" and not self._is_mine(call, row):
            if (row.step, row.arguments) != (call.target.name, call.arguments.digest):
                self._conflict(call, row)
                return
            if row.state == "done":
                self._share(call, row)
                return
        elif row is not None and row.state == "done":
            self._share(call, row)  # its own outcome, from before a retry made it void: what is done is done
            return
        self._wait(call)

    def _wait(self, call: StepCall) -> None:
        """Wait until the key changes. If it has changed since it was read, the store delivers that at once."""
        assert call.keyed is not None
        self.waiting[call.call] = call
        self._driver.journal.key_changes().waits.append(KeyWait(call.keyed.key, call.call))
        self._driver.writer.save(waited_for=False)
        self._driver.come_to_rest()

    def _share(self, call: StepCall, row: EffectRow) -> None:
        driver = self._driver
        try:
            payload = shared_outcome(driver.app.store.chain, row)
        except (ChainKeyMissing, Damaged) as damage:
            driver.put_on_hold(key_damaged_report(call, row, damage))
            return
        crash_point("key.shared")
        self._sharing[call.call] = (call, self._leave(call))
        raw, ref = driver.journal.pack(payload)
        body = ev.StepShared(call.call, raw, ref, row.run, row.generation, row.seq, row.by)
        body.secret = call.is_secret or row.secret
        driver.journal.key_changes().shares.append(KeyShare(row.key, call.call, row.digest))
        # The code sees it when it is durable: until then its owner may begin to undo it.
        driver.deliver("step_shared", call.step, body, expensive=True)

    def unshared(self, shares: Sequence[KeyShare]) -> None:
        """Make steps wait again whose shared outcomes were being undone, or gone, when they were taken over."""
        driver = self._driver
        calls = {share.call for share in shares}
        changed: dict[int, tuple[str, ev.Body]] = {}
        for event in driver.journal.unsaved:
            if event.kind == "step_shared" and (number := ev.decode_body(event.kind, event.body).call) in calls:
                call, attempts = self._sharing[number]
                changed[event.seq] = ("key_taken", self._taken(call, self._row_if_readable(call), again=True))
                attempts.due = KEY
                if number in driver.execution.steps:
                    self._known[number] = attempts
        changes = driver.journal.key_changes()
        changes.shares = [share for share in changes.shares if share.call not in calls]
        driver.writer.rewrite(changed)
        driver.forget_unapplied(changed.keys())
        for number in sorted(calls & driver.execution.steps.keys()):
            self._wait(driver.execution.steps[number])

    def _conflict(self, call: StepCall, row: EffectRow) -> None:
        what = "another step" if row.step != call.target.name else "other arguments"
        error = KeyConflict(
            f"{call.step}: the key {row.key!r} belongs to {row.step} of run {row.run}, {what}. A key names one action: "
            "put into it what makes this one another.",
            row.key,
            row.run,
        )
        attempts = self._leave(call)
        raw, ref = self._driver.journal.pack(self._driver.app.codec.encode_error(error))
        self._driver.deliver("step_failed", call.step, ev.StepFailed(call.call, raw, ref, attempts.attempt))

    def _leave(self, call: StepCall) -> StepState:
        self.waiting.pop(call.call, None)
        more = self._driver.journal.attached
        if more is not None and (changes := more.keys) is not None:
            changes.waits = [wait for wait in changes.waits if wait.call != call.call]
        return self._known.pop(call.call)

    # -- continuing ------------------------------------------------------------------------------------------------
    def woken(self, number: int, row: EffectRow | None) -> None:
        """Act on the change of a key that a step waits for; `row` is its present owner. An outdated change has no
        effect.
        """
        call = self.waiting.get(number)
        if call is None:
            return
        if self._driver.app.draining:
            self._wait(call)  # nothing begins here any more: the next worker is notified again
            return
        crash_point("key.woken")
        if self._may_be_ours(call, row):
            del self.waiting[number]
            self._claim(call, row, "freed")
        else:
            self._look(call, row)

    def take_up(self, call: StepCall) -> None:
        """Resume a step that has its key or waits for it, after a replay.

        A waiting step is registered again: its notification may have come while the run had ended.
        """
        assert call.keyed is not None
        attempts = self._known[call.call]
        self._present(call, attempts.round)
        if attempts.due == KEY:
            self._wait(call)
        elif attempts.attempt:  # otherwise it waits for room, or its fallback replaced it, and it never had the key
            self._claims[call.call] = claim_of(call, 0, attempts.round)

    @property
    def is_claiming(self) -> bool:
        """Whether a step is about to begin whose key may still turn out to be another step's."""
        return any(claim.seq > self._driver.writer.durable for claim in self._claims.values())

    def withdraw_cancelled(self) -> bool:
        """Settle the steps that wait for their keys while the code was cancelled: they have not begun."""
        cancelled = [call for call in self.waiting.values() if call.future.is_cancel_wanted]
        for call in cancelled:
            del self.waiting[call.call]
            self._attempts.settle_as_not_done(call)
        return bool(cancelled)

    # -- ending ----------------------------------------------------------------------------------------------------
    def settle(self, call: StepCall, payload: bytes | None) -> None:
        """Settle the key together with the step's outcome, recorded next: others share it. Without one, the key is
        free.
        """
        self.waiting.pop(call.call, None)
        claim = self._claims.pop(call.call, None)
        if claim is None or self._driver.is_over:
            return
        changes = self._driver.journal.key_changes()
        changes.ends.append(_ended(self._driver.app.store.chain, claim, payload))
        if payload is not None and call.target.compensate is not None and self._driver.execution.rollback is not None:
            changes.undoing.append(KeyUndoing(claim.key, call.call, "begun"))

    def forget(self, number: int) -> None:
        """Forget a step that the code no longer waits for. It may be repeated, so any other step may do it."""
        call = self.waiting.pop(number, None)
        claim = self._claims.pop(number, None)
        if claim is not None and call is None:
            self._driver.journal.key_changes().ends.append(KeyEnd(claim))


def claim_of(call: StepCall, seq: int, round: int) -> KeyClaim:
    """Return a step's claim of its key."""
    assert call.keyed is not None
    target = call.target
    return KeyClaim(
        call.keyed.key, call.call, seq, target.name, call.arguments.digest, target.effect, round, call.is_secret
    )


def key_end(chain: ChainKeys, begun: Recorded, payload: bytes | None) -> KeyEnd:
    """Return the end of a step's key, from its `step_started`: with the payload of its outcome, or without one."""
    body = begun.body
    name = begun.step.partition("#")[0]
    claim = KeyClaim(body.key, body.call, begun.seq, name, body.arguments, body.effect, body.round, body.secret)
    return _ended(chain, claim, payload)


def _ended(chain: ChainKeys, claim: KeyClaim, payload: bytes | None) -> KeyEnd:
    if payload is None:
        return KeyEnd(claim)
    return KeyEnd(claim, packed(payload), chain.seal(payload, claim.key, claim.step, claim.arguments))


def shared_outcome(chain: ChainKeys, row: EffectRow) -> bytes:
    """Return the outcome that is kept under a key, verified: it belongs to this step with these arguments."""
    what = f"The outcome under the key {row.key!r}"
    if row.outcome is None and row.secret:
        raise Damaged(f"{what} is secret, and was left out when run {row.run} was exported.")
    if row.outcome is None:
        raise Damaged(f"{what} is missing.")
    payload = unpacked(row.outcome, f"outcome under the key {row.key!r}")
    chain.check(payload, row.digest, what, row.key, row.step, row.arguments)
    return payload


def _instead_of(begun: ev.StepStarted, row: EffectRow | None) -> ev.KeyTaken:
    """Return the event that replaces the start of a step, because another one has its key."""
    body = ev.KeyTaken(begun.call, begun.key, begun.arguments, begun.effect, begun.preview, begun.source)
    body.again = begun.attempt > 1 or begun.because != ""
    body.secret = begun.secret
    if row is not None:
        body.run, body.generation, body.seq = row.run, row.generation, row.seq
    return body
