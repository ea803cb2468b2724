"""Compensation of a run: how its driver begins it, and what a person is asked on the way.

    the code fails         →  `compensation_started`, a command like any other
    the run must fail      →  its doubts are settled  →  `compensation_started`, without the code
    a rollback is wanted   →  `rollback_requested`  →  its doubts are settled  →  `compensation_started`

What comes then follows from the history alone: see `saga.py`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from everstep.engine.code.execution import Execution
from everstep.engine.history.calls import WHAT_IS_LOST
from everstep.engine.history.effects import change_key, left_by_children
from everstep.engine.history.journal import Journal
from everstep.engine.run.holds import HoldReport
from everstep.errors import RunTimedOut, StoreError
from everstep.model import events as ev
from everstep.model.carried import CarriedStep
from everstep.model.contracts import may_run_again
from everstep.model.crash_points import crash_point

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.driver import Driver


WHILE_ROLLING_BACK: Final[dict[str, str]] = {
    "done": "take the given value as the step's outcome; it is compensated with the others, if it can be",
    "not-done": "it is not done again; the others are compensated",
    "cancel": "end the run as cancelled; nothing is compensated",
}
"""The meaning of answers when a rollback waits for a step in doubt."""


def request_rollback(driver: "Driver", request: ev.RollbackRequested) -> None:
    """Stop without the code, and compensate what was done; or ask a person, if that would not be everything."""
    execution = driver.execution
    if execution.is_undone:
        driver.writer.save(waited_for=False)
        return
    left = left_as_it_is(driver)
    if left and not request.uncompensated:
        driver.put_on_hold(uncompensated_report(left, request))
        return
    driver.roll_back(request)
    note_undoing(driver, execution.saga.completed)
    driver.deliver("rollback_requested", "", request)


def left_as_it_is(driver: "Driver") -> list[str]:
    """Return the steps, done or in progress, that must not happen twice and have no compensation."""
    execution = driver.execution
    open_steps = [call for call in driver.attempts.begun_steps() if not may_run_again(call.target.effect)]
    left = execution.saga.uncompensated + [call.step for call in open_steps if call.target.compensate is None]
    if execution.kept is not None:
        left += [outcome.step for outcome in execution.kept.outcomes]
    return [*left, WHAT_IS_LOST] if execution.caution else left


def begin_without_code(driver: "Driver", because: str, payload: bytes = b"") -> bool:
    """Begin compensation without waiting for the code; False if there is nothing to compensate."""
    execution = driver.execution
    execution.abandon()
    for kind, body, at in driver.take_unapplied():
        if kind in ("step_completed", "step_shared", "rollback_requested"):
            execution.apply(kind, body, at)
    plan = execution.saga.plan()
    if plan:
        call = execution.next_call()
        error = msgspec.Raw(payload) if payload else ev.NO_PAYLOAD
        begin_compensation(driver, ev.CompensationStarted(call, because, plan, error, forced=True))
    return bool(plan)


def begin_compensation(driver: "Driver", started: ev.CompensationStarted) -> None:
    """Begin compensation: from here on nothing else is done. Children that end with the run are asked to stop."""
    crash_point("compensation.begin")
    driver.children.cancel_those_that_end_with_it()
    driver.attempts.forget_all()
    note_undoing(driver, started.steps)
    driver.record("compensation_started", "", driver.journal.pack_into(started, "error"))
    driver.writer.save(waited_for=False)
    driver.go_on_without_code(started)


def note_undoing(driver: "Driver", calls: Iterable[int]) -> None:
    """Mark the keys of steps that are to be compensated, with the next event, so that their outcomes are no longer
    shared.
    """
    completed = driver.execution.saga.completed
    for done in [completed[call] for call in calls if call in completed]:
        change_key(driver.journal, done.call, done.key, "begun", done.carried)


def note_compensated(journal: "Journal", call: int, key: str, carried: CarriedStep | None = None) -> None:
    """Note a completed compensation: everything that depends on its step, call `call`, changes with its outcome.

    In the same transaction its own key (`key=`), if it has one, is freed: any run may do the action again.

    carried: the step, if an older generation did it.
    """
    change_key(journal, call, key, "undone", carried)


def note_kept(driver: "Driver") -> None:
    """Share the outcomes again whose compensation was not begun, because the run ends before everything was
    compensated.

    A step whose compensation was begun and is not settled keeps its key, until a person decides about that.
    """
    execution = driver.execution
    begun = {call.compensates for call in driver.attempts.begun_steps()}
    for done in execution.saga.completed.values():
        if done.call not in begun:
            change_key(driver.journal, done.call, done.key, "kept", done.carried)


# -- asking a person ---------------------------------------------------------------------------------------------------
def with_undoing(report: HoldReport, driver: "Driver") -> HoldReport:
    """Return a report that names what can be compensated; during compensation, with other answers and consequences."""
    execution = driver.execution
    if not execution.is_undone:
        left = functools.partial(_all_that_stays, driver)
        return offering_rollback(report, driver.run, undoable_steps(driver), left)
    report = report.but_not("rollback")
    if execution.saga.begun:
        _explain_compensation(report, execution)
    else:
        report.consequences = {**report.consequences, **WHILE_ROLLING_BACK}
    return report


def _all_that_stays(driver: "Driver") -> list[str]:
    try:
        return left_as_it_is(driver) or left_by_children(driver.app.store, driver.run)
    except StoreError:
        return []  # the rollback's caller gets that


def _explain_compensation(report: HoldReport, execution: "Execution") -> None:
    remaining = execution.saga.remaining()
    undone = next((call.undoes for call in execution.steps.values() if call.step == report.step), "")
    report.consequences = {"cancel": f"end the run as cancelled; not compensated: {', '.join(remaining) or 'nothing'}"}
    report.facts = {**report.facts, "undoes": undone, "not_compensated_yet": remaining}
    if undone and report.reason == "exhausted":
        report.summary = f"the compensation of {undone} failed: {report.summary}"
        report.consequences["retry"] = "give the compensation a fresh set of attempts"
        report.consequences["skip"] = f"leave {undone} as it is, and continue with the other compensations"
    elif undone and report.reason in ("in-doubt", "restored"):
        report.summary = f"the compensation of {undone} is in doubt: {report.summary}"
        report.consequences["done"] = f"{undone} is compensated; continue with the others"
        report.consequences["not-done"] = "do the compensation again, in a new attempt with the same key"


def uncompensated_report(left: Sequence[str], request: ev.RollbackRequested) -> HoldReport:
    """Return the report on a rollback that would not undo something which happened meanwhile."""
    names = ", ".join(left)
    summary = f"a rollback was asked for, but nothing undoes {names}, which must not happen twice"
    facts = {"by": request.by, "note": request.note, "not_compensated": list(left)}
    return HoldReport("asked", summary, facts=facts, consequences={"retry": "continue; nothing is rolled back"})


def offering_rollback(
    report: HoldReport, run: str, undoable: Sequence[str], left: Callable[[], list[str]]
) -> HoldReport:
    """Add rollback to the answers where it would work: something can be undone, and nothing else would remain.

    Otherwise it needs the verb, which says what would remain: `everstep rollback`.
    """
    stays = left() if undoable else []
    if not report.offers("rollback") or (undoable and not stays):
        return report
    report = report.but_not("rollback")
    report.facts = {**report.facts, "by_verb": ["rollback"]}
    if undoable:
        report.facts["rollback"] = (
            f"`everstep rollback {run} --allow-uncompensated` undoes {', '.join(undoable)} and leaves as they are: "
            f"{', '.join(stays)}"
        )
    return report


def undoable_steps(driver: "Driver") -> list[str]:
    """Return the steps, done or in progress, that have a compensation."""
    done = [one.title for one in driver.execution.saga.completed.values()]
    return done + [call.step for call in driver.attempts.begun_steps() if call.target.compensate is not None]


def force_end(driver: "Driver") -> None:
    """End the run without its code, because its grace is over or was not given. No effect is in doubt."""
    execution = driver.execution
    cancel = execution.cancel
    if execution.rollback is not None and not (cancel is not None and cancel.now):
        if not begin_without_code(driver, "rollback"):
            driver.record_end("run_cancelled", ev.RunCancelled(forced=True, rolled_back=True), None)
    elif driver.failure is not None:
        _fail_with(driver, driver.failure)
    elif cancel is not None and cancel.timeout:
        seconds = execution.workflow.timeout
        _fail_with(driver, RunTimedOut(f"The run took longer than {seconds} s and did not stop."))
    else:
        if execution.is_undone:
            note_kept(driver)
        driver.record_end("run_cancelled", ev.RunCancelled(forced=True), None)


def _fail_with(driver: "Driver", error: BaseException) -> None:
    """End the run as failed, without its code, after compensating what was done."""
    payload = driver.app.codec.encode_error(error)
    if not begin_without_code(driver, "failure", payload):
        driver.record_end("run_failed", ev.RunFailed(msgspec.Raw(payload), forced=True), payload)
