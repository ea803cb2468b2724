"""What follows when the body of a step does not return: another attempt, a fallback, a person, or the code's error."""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from everstep.effects.atomic import Undecided
from everstep.engine.code.commands import StepCall
from everstep.engine.code.step_state import FALLBACK, NEVER, StepState
from everstep.engine.code.stops import pass_on, stop_in
from everstep.engine.history.clock import microseconds
from everstep.engine.run.bodies import Attempt
from everstep.engine.run.holds import exhausted_report
from everstep.errors import Fatal, FolderBusy, NotDone, NotEncodable
from everstep.model import events as ev
from everstep.model.contracts import EXPENSIVE_SECONDS
from everstep.model.untrusted import Stopped, described, is_a, logger

if TYPE_CHECKING:
    from everstep.engine.run.attempts import StepAttempts
    from everstep.engine.run.driver import Driver


log = logger("everstep.step")

LOOK_SECONDS: Final = 0.05
"""How often a failed attempt looks whether what its body started has ended."""


class Failures:
    """The attempts of one run whose bodies have not returned, or returned what cannot be stored."""

    def __init__(self, driver: "Driver", attempts: "StepAttempts", known: dict[int, StepState]) -> None:
        self._driver = driver
        self._attempts = attempts
        self._known = known

    def not_encodable(self, attempt: Attempt, refused: NotEncodable, seconds: float) -> None:
        """A body returned what cannot be stored."""
        call = attempt.call
        if call.compensates:
            self._attempts.completed(attempt, None, seconds)  # it is done, and nobody needs what it returned
        elif call.target.effect == "once" and not attempt.fallback:
            self._attempts.bodies.charging.write(attempt)
            self._attempts.finish(attempt)
            self._attempts.doubts.begin(call, refused, happened=True)
        else:
            self.failed(attempt, refused, seconds, final=True)

    def raised(self, attempt: Attempt, error: BaseException, seconds: float) -> None:
        """A body raised. A cancellation that the engine wanted does not come here: its attempt runs no more."""
        stop = stop_in(error)
        if stop is None and attempt.task is not None and attempt.task.cancelling():
            stop = asyncio.CancelledError(f"and then {described(error)}")
        if stop is None:
            self.failed(attempt, error, seconds)
        else:
            self._stopped(attempt, stop, error, seconds)

    def _stopped(self, attempt: Attempt, stop: BaseException, error: BaseException, seconds: float) -> None:
        """A body was stopped, which is no outcome: its contract says what that means, as after a crash.

        A `once` is in doubt now, with what it raised. Anything else is settled in the run's next life.
        """
        call, driver = attempt.call, self._driver
        if call.target.effect == "once" and not attempt.fallback:
            self.failed(attempt, error.stop if type(error) is Stopped else error, seconds)
            pass_on(stop, driver.app.loop)
            return
        if attempt.spending is not None:
            self._attempts.bodies.charging.write(attempt)
        self._attempts.bodies.record_heartbeats()
        self._attempts.finish(attempt)
        driver.leave_unfinished(stop, f"the body of {call.step}")

    def failed(self, attempt: Attempt, error: BaseException, seconds: float, *, final: bool = False) -> None:
        """A body raised: another attempt by its policy, a fallback, a person, or the workflow gets the error."""
        call, driver = attempt.call, self._driver
        is_certain = call.target.effect != "once" or attempt.fallback or _is_certain(call, error)
        if is_certain and call.target.effect == "once" and not attempt.fallback:
            left = driver.app.acting.left_behind(driver.run, call.call)
            if left and self._end_later(attempt, error, seconds, left):
                return
            # What it said about the effect, it said before all of it had ended.
            is_certain = not left and (not attempt.failed_at or is_a(error, Fatal, *call.target.retry.never))
        self._attempts.bodies.record_heartbeats()
        self._attempts.finish(attempt)
        if call.call not in driver.execution.steps or driver.is_over:
            return
        if not is_certain:
            self._attempts.bodies.charging.write(attempt)
            self._attempts.doubts.begin(call, error, because="left" if attempt.failed_at else "error")
            return
        if call.target.effect == "atomic" and isinstance(error, Undecided):
            self._attempts.bodies.charging.write(attempt)
            self._attempts.doubts.begin(call, error.error, because="commit" if error.is_lasting else "error")
            return
        attempts = self._known[call.call]
        attempts.failures += 1
        policy = call.target.retry
        if not final and not attempt.fallback:
            if policy.allows(attempts.failures, error):
                delay = policy.delay(attempts.failures, error, driver.app.randomness)
                self._record_failure(attempt, attempts, error, seconds, driver.app.clock.now() + microseconds(delay))
                driver.deadlines.add(attempts.due or 0, "attempt", call.call)
                driver.come_to_rest()
                return
            if call.target.fallback is not None:
                self._attempts.start_fallback(call, self._record_failure(attempt, attempts, error, seconds, FALLBACK))
                return
            if is_a(error, FolderBusy) or (policy.then == "hold" and not is_a(error, Fatal)):
                self._record_failure(attempt, attempts, error, seconds, NEVER)
                driver.put_on_hold(exhausted_report(call, attempts.attempt, error))
                return
        if call.compensates:  # there is no code in which it could be raised
            self._record_failure(attempt, attempts, error, seconds, NEVER)
            driver.put_on_hold(exhausted_report(call, attempts.attempt, error))
            return
        del self._known[call.call]
        self._attempts.finish(attempt, is_settled=True)
        if call.keyed is not None:
            self._attempts.keys.settle(call, None)
        raw, ref = driver.journal.pack(driver.app.codec.encode_error(error))
        body = ev.StepFailed(call.call, raw, ref, attempts.attempt, round(seconds, 3), call.is_secret)
        if attempt.spending is not None:
            body.charged = attempt.spending.take_total()
        is_expensive = seconds > EXPENSIVE_SECONDS or call.target.cost is not None
        driver.deliver("step_failed", call.step, body, expensive=is_expensive)

    def _end_later(self, attempt: Attempt, error: BaseException, seconds: float, left: str) -> bool:
        """A `once` body failed for certain, but something that it started still acts: its attempt has not ended.

        Until that has ended nothing is recorded, so that any other process finds the step begun and in doubt. Returns
        False when it has been waited for as long as a probe would be asked.
        """
        app = self._driver.app
        now = app.clock.now()
        if not attempt.failed_at:
            attempt.failed_at = now
            log.warning("%s of run %s failed, and waits for %s to end.", attempt.step, attempt.run, left)
        if now > attempt.failed_at + microseconds(attempt.call.target.probe_for):
            return False
        app.loop.call_later(LOOK_SECONDS, self._attempts.end, attempt, None, error, time.monotonic() - seconds)
        return True

    def _record_failure(
        self, attempt: Attempt, attempts: StepState, error: BaseException, seconds: float, due: int
    ) -> int:
        call = attempt.call
        attempts.due = due
        raw, ref = self._driver.journal.pack(self._driver.app.codec.encode_error(error))
        body = ev.AttemptFailed(call.call, attempts.attempt, due, raw, ref, round(seconds, 3), call.is_secret)
        if attempt.spending is not None:
            body.charged = attempt.spending.take_total()
        seq = self._driver.record("attempt_failed", call.step, body)
        self._driver.writer.save(waited_for=False)
        return seq


def _is_certain(call: StepCall, error: BaseException) -> bool:
    """Tell whether an error of a `once` step says for sure that the effect did not happen, or has failed for good."""
    return is_a(error, NotDone, Fatal, *call.target.not_done, *call.target.retry.never)
