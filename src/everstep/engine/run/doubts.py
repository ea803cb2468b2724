"""Steps that failed, and steps in doubt: begun, and it is unknown whether their effect happened.

`Failures` says what follows when a body raises: another attempt, a fallback, a question to a person, the error in the
workflow, or, of an effect that must not happen twice, doubt. `Doubts` settles what is in doubt and never guesses.

A `once` step comes into doubt when a crash cut it off, or when it raised something that does not say whether the effect
happened. Its probe is asked, with patience; without a probe, or when the probe does not know in time, a person is.
Nothing is done again while an earlier attempt may still act. An `atomic` step comes into doubt only when its database
cannot be asked; its marker is its probe, and an attempt that still acts cannot commit a second time.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from everstep.codec import as_declared, error_facts, near
from everstep.effects.answers import Done, Unknown
from everstep.effects.atomic import Undecided
from everstep.effects.step import is_async_callable
from everstep.effects.surroundings import CURRENT
from everstep.engine.code.commands import StepCall
from everstep.engine.code.step_state import DOUBT, EARLIER, FALLBACK, NEVER, StepState
from everstep.engine.code.stops import pass_on, stop_in
from everstep.engine.history.clock import Alarm, microseconds, set_alarm
from everstep.engine.run.acting import process_of, where_in_process, whereabouts
from everstep.engine.run.bodies import Attempt
from everstep.engine.run.holds import exhausted_report, in_doubt_report
from everstep.errors import Fatal, FolderBusy, NotDecodable, NotDone, NotEncodable, StoreError
from everstep.model import events as ev
from everstep.model.contracts import EXPENSIVE_SECONDS, UNSEEN
from everstep.model.crash_points import crash_point
from everstep.model.events import EventRow, decode_body
from everstep.model.secrets import HIDDEN, shown_error
from everstep.model.untrusted import Stopped, attribute, described, is_a, logger, name_of, text_of, type_name
from everstep.stores.brief import Busy, briefly
from everstep.stores.processes import is_of_this_process

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.attempts import StepAttempts
    from everstep.engine.run.driver import Driver


log = logger("everstep.step")

LOOK_SECONDS: Final = 0.05
"""How often a failed attempt checks whether what its body started has ended, in seconds."""
ERROR_CHARACTERS_MAX: Final = 300
FIRST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 60.0
"""The longest pause before a probe that does not know is asked again: 1, 2, 4 … 60 seconds."""


QUESTION_SECONDS_MAX: Final = 60.0
"""A probe that takes longer counts as not knowing (or longer than its `probe_for=`, but 10 seconds in any case)."""
QUESTION_SECONDS_MIN: Final = 10.0


class Question(NamedTuple):
    """A running probe, and the alarm that ends the waiting for it."""

    task: asyncio.Task[None]
    alarm: Alarm


def question_seconds(probe_for: float) -> float:
    """Return how long one question to a probe may take, in seconds."""
    return min(QUESTION_SECONDS_MAX, max(QUESTION_SECONDS_MIN, probe_for))


class Doubts:
    """The steps in doubt of one run."""

    def __init__(self, driver: "Driver", attempts: "StepAttempts", known: dict[int, StepState]) -> None:
        self.asking: dict[int, Question] = {}
        """Calls whose probe is running."""
        self._overdue: dict[int, asyncio.Task[None]] = {}
        """Questions that were not answered in time, and whose probe still runs."""
        self._driver = driver
        self._attempts = attempts
        self._known = known

    def begin(self, call: StepCall, error: BaseException | None, *, happened: bool = False, because: str = "") -> None:
        """Put a step in doubt whose attempt ended, or was cut off, without saying whether its effect happened.

        Or it did happen, and its outcome cannot be stored. Or, with `because`, the history does not know its start, and
        it may have been begun all the same.
        """
        driver, attempts = self._driver, self._known[call.call]
        raw, ref = driver.journal.pack(driver.app.codec.encode_error(error) if error is not None else b"")
        because = because or ("outcome" if happened else "crash" if error is None else "error")
        body = ev.StepDoubted(call.call, attempts.attempt, because, raw, ref, call.is_secret)
        driver.record("step_doubted", call.step, body)
        attempts.due, attempts.doubted_at, attempts.happened = DOUBT, driver.app.clock.now(), happened
        attempts.because, attempts.asked = because, True
        driver.writer.save(waited_for=False)
        self.go_on(call)

    def go_on(self, call: StepCall) -> None:
        """Ask the probe, or a person."""
        attempts = self._known[call.call]
        if attempts.happened:
            self.hold(call, "it happened, but its outcome cannot be stored", is_done=True)
            return
        if attempts.because == "commit":
            self.hold(call, "its database failed while it was committed, so that nothing may be assumed")
            return
        if attempts.because == "database":
            self.hold(call, f"it was begun in {attempts.database}; the code names {call.target.database.name} now")
            return
        if call.target.probe is None:
            self.hold(call, f"it has no probe that could ask the outside{self._and_still_acts(call)}")
            return
        at = max(self._driver.app.clock.now(), attempts.doubted_at + microseconds(call.target.settle))
        self._driver.deadlines.add(at, "probe", call.call)
        self._driver.come_to_rest()

    def is_due(self, call: int) -> bool:
        """Return True if a step waits for the time at which its probe is asked."""
        attempts = self._known.get(call)
        return attempts is not None and attempts.due == DOUBT and call not in self.asking

    # -- asking the outside ----------------------------------------------------------------------------------------
    def ask(self, number: int) -> None:
        """Run the probe. One that does not answer in time counts as not knowing; it is not asked again before it
        has ended.
        """
        driver = self._driver
        call, attempts = driver.execution.steps[number], self._known[number]
        if self._is_overdue(number):
            self._ask_later(call, Unknown("it has not answered the question before"))
            return
        self._note_gone(call)
        crash_point("probe.before")
        context: Context = driver.app.context.copy()
        asked = self._attempts.bodies.attempt_at(call, attempts.attempt)
        context.run(CURRENT.set, asked)
        # Not through the loop's task factory: the task must not begin before it is registered here.
        task = asyncio.Task(self._ask(call, asked), loop=driver.app.loop, context=context)
        until = driver.app.clock.now() + microseconds(question_seconds(call.target.probe_for))
        alarm = set_alarm(
            driver.app.clock, driver.app.loop, until, functools.partial(driver.call, self._stop_waiting, call)
        )
        self.asking[number] = Question(task, alarm)

    def _is_overdue(self, number: int) -> bool:
        task = self._overdue.get(number)
        if task is not None and task.done():
            del self._overdue[number]
        return number in self._overdue or self._driver.app.threads.is_acting(self._driver.run, -number)

    def _stop_waiting(self, call: StepCall) -> None:
        """Stop waiting for a probe that takes too long. A late answer is ignored."""
        if self._driver.is_over:
            return
        task = self._overdue[call.call] = self.asking.pop(call.call).task
        task.cancel()
        seconds = question_seconds(call.target.probe_for)
        self._ask_later(call, Unknown(f"it did not answer within {seconds:g} s"))

    async def _ask(self, call: StepCall, asked: Attempt) -> None:
        args, kwargs = call.arguments.args, call.arguments.kwargs
        probe: Any = call.target.probe
        key = call.idempotency_key()
        while_acting = (
            ""  # what may still have acted when the probe was asked: an answer `NotDone` may be outdated by now
        )
        try:
            await self._look_for_others(call)
            while_acting = "".join(self._where_it_may_act(call))
            if is_async_callable(probe):
                answer = await probe(key, *args, **kwargs)
            else:  # under the call's negative number, which tells it apart from the step's own body, which acts
                answer = await self._attempts.bodies.call_in_thread(asked, probe, (key, *args), kwargs, -call.call)
        except NotDone as certain:
            answer = certain
        except asyncio.CancelledError:
            if self._driver.stopped or call.call not in self.asking:
                return
            answer = Unknown("the probe was cancelled")
        except BaseException as error:  # noqa: BLE001  # a probe that raises does not know
            answer = Unknown(described(error))
            pass_on(error, self._driver.app.loop)
        crash_point("probe.after")
        await self._look_for_others(call)
        if call.call in self.asking:  # too late otherwise; there is no other question while this one was open
            question = self.asking.pop(call.call)
            question.alarm.cancel()
            if not self._driver.is_over and call.call in self._driver.execution.steps:
                self._driver.call(self._take_answer, call, answer, while_acting)

    def _take_answer(self, call: StepCall, answer: Any, while_acting: str) -> None:
        if is_a(answer, Done):
            self._adopt(call, attribute(answer, "value"))
        elif is_a(answer, NotDone):
            self._take_not_done(call, while_acting)
        elif is_a(answer, Unknown):
            self._ask_later(call, Unknown(text_of(attribute(answer, "why", ""))))
        else:
            what = f"the class {name_of(answer)}" if is_a(answer, type) else type_name(answer)
            self._ask_later(call, Unknown(f"the probe returned {what}, not Done(…), NotDone() or Unknown(…)"))

    def _adopt(self, call: StepCall, value: Any) -> None:
        """Record the probe's value as the step's outcome, without running it."""
        driver = self._driver
        try:
            with contextlib.suppress(NotDecodable):  # then it stays as it is
                value = as_declared(value, call.target.signature.annotations.get("return", Any))
            payload = driver.app.codec.encode(value, call.target.signature.result, f"the probe of {call.step}")
        except NotEncodable as refused:
            self._ask_later(call, Unknown(str(refused)))
            return
        attempts = self._known.pop(call.call)
        self._note(call, attempts, "done")
        if call.keyed is not None:
            self._attempts.keys.settle(call, payload)
        if call.compensates:
            self._attempts.note_compensated(call)
        raw, ref = driver.journal.pack(payload)
        body = ev.StepCompleted(call.call, raw, ref, attempts.attempt, adopted=True, secret=call.is_secret)
        driver.deliver("step_completed", call.step, body, expensive=True)

    def _take_not_done(self, call: StepCall, while_acting: str) -> None:
        """Begin the step again, which did not happen, unless the earlier attempt may still act.

        If it may have acted while the probe was asked, and has ended since, the answer may be outdated: ask again.
        """
        attempts = self._known[call.call]
        self._note(call, attempts, "not-done")
        attempts.asked = True
        here, elsewhere = self._where_it_may_act(call)
        still = elsewhere or here
        if still and not elsewhere and not self._is_too_late(call, self._next_question(attempts)):
            self._ask_later(call, Unknown(here))  # it will end, and this process will see that
        elif while_acting and not still:
            self._driver.deadlines.add(self._driver.app.clock.now(), "probe", call.call)
            self._driver.come_to_rest()
        elif (gone_at := self._all_gone_at(call)) is not None and not here:
            self._driver.deadlines.add(gone_at, "probe", call.call)
            self._driver.come_to_rest()
        elif still:
            self.hold(call, f"the probe says that it has not happened, but {still}")
        elif (due := self._repeated_at(call)) <= self._driver.app.clock.now():
            self._attempts.begin_again(call.call, "not-done")
        else:
            attempts.due = due
            self._driver.deadlines.add(due, "attempt", call.call)
            self._driver.come_to_rest()

    def _repeated_at(self, call: StepCall) -> int:
        """Return when a step that has not happened may be done again: with a pause, if it was repeated before.

        Attempts that failed have had their pauses. The pause counts from the doubt, which the history has: a worker
        that resumes the run meanwhile does not begin to wait again.
        """
        attempts = self._known[call.call]
        repeats = attempts.attempt - 1 - attempts.failures
        pause = microseconds(call.target.settle + _pause(repeats)) if repeats > 0 else 0
        return attempts.doubted_at + pause

    def _ask_later(self, call: StepCall, answer: Unknown) -> None:
        driver, attempts = self._driver, self._known[call.call]
        self._note(call, attempts, "unknown", answer.why)
        due = self._next_question(attempts)
        if self._is_too_late(call, due):
            self.hold(call, f"its probe does not know, after {call.target.probe_for:g} s{self._and_still_acts(call)}")
            return
        attempts.probes += 1
        driver.deadlines.add(due, "probe", call.call)
        driver.come_to_rest()

    def _next_question(self, attempts: StepState) -> int:
        return self._driver.app.clock.now() + microseconds(_pause(attempts.probes + 1))

    def _is_too_late(self, call: StepCall, at: int) -> bool:
        """Return True if the time for asking the probe is over before `at`."""
        doubted_at = self._known[call.call].doubted_at
        return at > doubted_at + microseconds(call.target.settle + call.target.probe_for)

    def _note(self, call: StepCall, attempts: StepState, answer: str, why: str = "") -> None:
        shown = HIDDEN if why and call.is_secret else why[:500]
        body = ev.ProbeAnswered(call.call, attempts.attempt, answer, shown)
        self._driver.record("probe_answered", call.step, body)
        self._driver.writer.save(waited_for=False)

    # -- asking a person -------------------------------------------------------------------------------------------
    def hold(self, call: StepCall, why: str, *, is_done: bool = False) -> None:
        """Put the run on hold: a person has to say whether the step happened."""
        attempts, account = self._known[call.call], account_of(self._driver, call.call)
        if attempts.because == EARLIER:
            why = f"it was begun in an earlier generation of this run, and {why}"
        if attempts.because == "left":
            why = f"its body said so while something that it had started was still running, and {why}"
        self._driver.put_on_hold(in_doubt_report(call, attempts, why, account, is_done=is_done))

    def _and_still_acts(self, call: StepCall) -> str:
        here, elsewhere = self._where_it_may_act(call)
        return f", and {elsewhere or here}" if elsewhere or here else ""

    def _where_it_may_act(self, call: StepCall) -> tuple[str, str]:
        """Return what of a `once` step may still act in this process, and elsewhere; "" where it provably cannot."""
        if call.target.effect != "once":
            return "", ""
        return self.acts_here(call), self.acts_elsewhere(call) or self._is_unseen(call)

    def may_still_act(self, call: StepCall) -> str:
        """Return where the last attempt still runs, as far as visible; "" if nowhere."""
        return self.acts_here(call) or self.acts_elsewhere(call)

    def acts_here(self, call: StepCall) -> str:
        """Return what of the step still runs in this process, in this app or another one; "" if nothing does."""
        for worker in self._suspects(call):
            if still := where_in_process(worker, self._driver.run, call.call):
                return f"{still} still runs in this process (worker {worker})"
        return ""

    def acts_elsewhere(self, call: StepCall) -> str:
        """Return which other process began it and still exists; "" if none is known."""
        for worker in sorted(self._others(call)):
            where = self._driver.beside.whereabouts.get(worker)
            if where is not None and where.state == "there" and not self._has_ended(call, worker):
                process = process_of(worker)
                said = f", pid {process['pid']} on {process['host']}" if process else ""
                return f"the process that began it still exists (worker {worker}{said})"
        return ""

    async def _look_for_others(self, call: StepCall) -> None:
        """Ask the store where the other processes are that may have begun a step. If it cannot say, that stays
        unknown.
        """
        driver = self._driver
        if others := {one for one in self._others(call) if not self._is_known_to_have_ended(one)}:
            try:
                found = await driver.app.read(whereabouts, driver.app.store, others)
            except StoreError:
                return
            driver.note_whereabouts(found)

    def _is_known_to_have_ended(self, worker: str) -> bool:
        where = self._driver.beside.whereabouts.get(worker)
        return where is not None and where.state == "ended"

    def _suspects(self, call: StepCall) -> list[str]:
        """Return the workers that may have begun it."""
        by = self._known[call.call].by or self._driver.app.worker
        return sorted({by, self._driver.app.worker} | self._driver.execution.unseen_workers)

    def _others(self, call: StepCall) -> set[str]:
        """Return those of them that are other processes."""
        return {worker for worker in self._suspects(call) if not is_of_this_process(worker)}

    def _is_unseen(self, call: StepCall) -> str:
        """Return which process may still run although it is no longer registered as a worker.

        A person can know that it has ended, and say so; a probe cannot.
        """
        for worker in sorted(self._others(call)):
            if not self._has_ended(call, worker):
                return f"it is not proven that the process that began it has ended (worker {worker})"
        return ""

    def _has_ended(self, call: StepCall, worker: str) -> bool:
        """Return True if a worker cannot act any more: proven, declared, or assumed because `gone_after` is over."""
        where = self._driver.beside.whereabouts.get(worker)
        if where is None or where.state == "ended":
            return where is not None
        if where.host_gone_at is not None:
            account = account_of(self._driver, call.call)
            if account.get("worker") == worker and account["began_at"] <= where.host_gone_at:
                return True
        gone_at = self._gone_at(call, worker)
        return gone_at is not None and gone_at <= self._driver.app.clock.now()

    def _gone_at(self, call: StepCall, worker: str) -> int | None:
        """Return when a worker without a lease counts as gone, if that is configured."""
        app, where = self._driver.app, self._driver.beside.whereabouts.get(worker)
        if app.gone_after is None or where is None or where.has_lease:
            return None
        return self._known[call.call].doubted_at + microseconds(app.gone_after)

    def _all_gone_at(self, call: StepCall) -> int | None:
        """Return when all workers that may still act elsewhere count as gone; None if one of them never does, or
        none may.
        """
        left = [worker for worker in self._others(call) if not self._has_ended(call, worker)]
        times = [self._gone_at(call, worker) for worker in left]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None

    def _note_gone(self, call: StepCall) -> None:
        """Record which workers count as gone from now on because their time is over."""
        app = self._driver.app
        for worker in self._others(call):
            gone_at = self._gone_at(call, worker)
            if (
                gone_at is not None
                and gone_at <= app.clock.now()
                and self._driver.beside.whereabouts[worker].state != "ended"
            ):
                app.note_gone(worker)

    def cancel_all(self) -> None:
        """Stop all probes, because the run leaves this process."""
        asking, self.asking = self.asking, {}
        for question in asking.values():
            question.alarm.cancel()
            question.task.cancel()


def _pause(count: int) -> float:
    """Return the seconds to wait after so many questions, or attempts, that led nowhere."""
    return min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(count - 1, 20))


def account_of(driver: "Driver", call: int) -> dict[str, Any]:
    """Return what is known about the last attempt at a step. Less, if the store cannot be read just now.

    With a crash: its process gave its last sign of life at `last_sign_at`, and was found to be gone at `doubted_at`.
    """
    try:
        stored = briefly(driver.app.store.events, driver.run, driver.journal.generation)
    except (Busy, StoreError):
        stored = []
    last = stored[-1].seq if stored else 0
    told = told_by([*stored, *(event for event in driver.journal.unsaved if event.seq > last)], call)
    known = driver.attempts.of(call)
    if not stored and known is not None and known.by:
        return {"worker": known.by, **process_of(known.by), **told}
    return told


def told_by(events: Iterable[EventRow], call: int) -> dict[str, Any]:
    """Return what events say about the last attempt at a step."""
    account: dict[str, Any] = {}
    last_at = started = 0
    for event in events:
        if event.kind in ("step_started", "step_doubted"):
            body = decode_body(event.kind, event.body)
            if body.call == call and event.kind == "step_started":
                account = {"worker": body.by, **process_of(body.by), "began_at": event.at}
                started = event.seq
            elif body.call == call:
                if body.because in UNSEEN and event.seq == started + 1:
                    account = {"worker": ""}  # it was asked about first, and nobody here has begun it
                account |= {"because": body.because, "doubted_at": event.at}
                if body.because == "crash":
                    account["last_sign_at"] = last_at
                elif error := _error_text(body):
                    account["error"] = error
        last_at = event.at
    return account


def _error_text(body: Any) -> str:
    if body.ref or not bytes(body.error):
        return ""
    try:
        facts = shown_error(error_facts(bytes(body.error)), secret=body.secret)
    except msgspec.MsgspecError:
        return ""
    text = f"{facts.get('type', '')}: {facts.get('message', '')}".strip(": ")
    return text if len(text) <= ERROR_CHARACTERS_MAX else f"{text[: ERROR_CHARACTERS_MAX - 1]}…"


# -- failures ---------------------------------------------------------------------------------------------------------
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
        with near(call.target.function, driver.execution.workflow.function):
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
