"""Ends without the code: it was not waited for, and no effect is under way or in doubt any more."""

from typing import TYPE_CHECKING

import msgspec

from everstep.engine import compensating
from everstep.errors import RunTimedOut
from everstep.model import events as ev

if TYPE_CHECKING:
    from everstep.engine.driver import Driver


def force(driver: "Driver") -> None:
    """The grace is over, or was not given: the run ends without its code. No effect is in doubt."""
    execution = driver.execution
    cancel = execution.cancel
    if execution.rollback is not None and not (cancel is not None and cancel.now):
        if not compensating.begin_without_code(driver, "rollback"):
            driver.record_end("run_cancelled", ev.RunCancelled(forced=True, rolled_back=True), None)
    elif driver.failure is not None:
        _fail_with(driver, driver.failure)
    elif cancel is not None and cancel.timeout:
        seconds = execution.workflow.timeout
        _fail_with(driver, RunTimedOut(f"The run took longer than {seconds} s and did not stop."))
    else:
        if execution.is_undone:
            compensating.note_kept(driver)
        driver.record_end("run_cancelled", ev.RunCancelled(forced=True), None)


def _fail_with(driver: "Driver", error: BaseException) -> None:
    """End the run as failed, without its code; but first undo what was done."""
    payload = driver.app.codec.encode_error(error)
    if not compensating.begin_without_code(driver, "failure", payload):
        driver.record_end("run_failed", ev.RunFailed(msgspec.Raw(payload), forced=True), payload)
