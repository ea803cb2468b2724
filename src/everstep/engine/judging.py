"""What drift leads to: the witness's policy says so, or a function of the user's decides. Its decision is an event.

It is asked once for each new fact, like a step that reads: what it said is in the history, and holds in every replay.
"""

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Final

from everstep.effects.body import StepBody
from everstep.effects.step import declared_name, is_async_callable
from everstep.effects.surroundings import CURRENT
from everstep.engine.drift import drift_report, find_drift
from everstep.engine.stops import contained_in
from everstep.errors import Drift
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import described, is_refusal, type_name

if TYPE_CHECKING:
    from everstep.effects.witnesses import Judge
    from everstep.engine.drift import Drifted
    from everstep.engine.driver import Driver
    from everstep.engine.execution import Execution

DECISIONS: Final = ("hold", "fail", "ignore", "accept")


async def compare_outside(driver: "Driver") -> None:
    """Compare the outside with what the run remembers of it; what differs puts the run on hold, or fails it.

    Nothing else has been done yet. A run that fails settles first what is in doubt, and undoes what it did.
    """
    drifted = await find_drift(driver.app, driver.execution)
    for one in drifted:
        judge = driver.execution.witnesses[one.subject].judge
        if judge is not None:
            await _judge(driver, one, judge)
    drifted = [one for one in drifted if one.on_drift not in ("ignore", "accept")]  # nobody to judge: hold
    failing = next((one for one in drifted if one.on_drift == "fail"), None)
    if failing is not None:
        driver.fail_when_settled(Drift(f"{failing.subject} is not as the run remembers it.", failing.subject))
    elif drifted:
        driver.put_on_hold(drift_report(drifted))


async def _judge(driver: "Driver", drifted: "Drifted", judge: "Judge") -> None:
    """Let a function decide about one fact, and write down what it says."""
    decision, why = "hold", ""
    if drifted.payload:
        try:
            decision = await _asked(driver, judge, drifted.remembered, drifted.now)
            if type(decision) is not str or decision not in DECISIONS:
                decision, why = "hold", f"it returned {type_name(decision)}, not one of {', '.join(DECISIONS)}"
        except Exception as error:  # a function that cannot decide leaves it to a person
            if is_refusal(error):
                raise  # it could not even be asked: the run is tried again later
            decision, why = "hold", f"it raised {described(error)}"
    else:
        why = "there is nothing to compare with"
    drifted.on_drift = decision
    drifted.judged = f"{declared_name(judge)}() said {decision}" if not why else f"{declared_name(judge)}(): {why}"
    crash_point("drift.judged")
    raw, ref = driver.journal.pack(drifted.payload)
    body = ev.DriftJudged(drifted.subject, decision, declared_name(judge), why[:500], raw, ref)
    driver.record("drift_judged", "", body)
    note_judgement(driver.execution, body)


async def _asked(driver: "Driver", judge: "Judge", remembered: Any, now: Any) -> Any:
    """Call the function as the body of a step is called: on the loop, or on a thread."""
    app, execution = driver.app, driver.execution
    context = app.context.copy()
    body = StepBody(driver.run, execution.workflow.name, f"on_drift={declared_name(judge)}", "", "", 1, None)
    context.run(CURRENT.set, body)
    if is_async_callable(judge):
        return await app.loop.create_task(contained_in(judge(remembered, now)), context=context)
    future: asyncio.Future[tuple[Any, BaseException | None]] = app.loop.create_future()

    def done(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((value, error))

    app.threads.start(driver.run, functools.partial(context.run, judge, remembered, now), done)
    value, error = await future
    if error is not None:
        raise error
    return value


def note_judgement(execution: "Execution", body: ev.DriftJudged) -> None:
    """Take a recorded decision into what the run remembers."""
    taken = execution.witnesses.get(body.subject)
    if taken is None:
        return  # it was taken between a failure and its retry
    if body.decision == "accept":
        taken.remember(execution.payload(body.fact, body.ref))
    elif body.decision == "ignore":
        taken.ignored = execution.payload(body.fact, body.ref)
