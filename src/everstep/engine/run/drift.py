"""Before a run continues, the outside is compared with what the run remembers of it. That changes nothing.

Observations are made after the replay, which touches nothing, and before anything is settled or done: so the witnesses
are those of the code itself, with their functions. See docs/decisions/0013.
"""

import asyncio
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from everstep.effects.body import StepBody
from everstep.effects.files import as_bytes
from everstep.effects.step import declared_name, is_async_callable
from everstep.effects.surroundings import CURRENT
from everstep.effects.witnesses import (
    FOLDER,
    Judge,
    Taken,
    file_fact,
    file_subject,
    name_within,
    read_file,
    with_changes,
)
from everstep.engine.code.execution import Execution
from everstep.engine.code.stops import contained_in
from everstep.engine.code.witnesses import note_judgement
from everstep.engine.run.driver import Driver
from everstep.engine.run.holds import HoldReport
from everstep.engine.run.host import RunHost
from everstep.errors import Drift
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import described, is_refusal, text_of, type_name


class Drifted(msgspec.Struct):
    """A fact that is no longer true."""

    subject: str
    on_drift: str
    remembered: Any
    now: Any
    difference: str
    payload: bytes = b""
    judged: str = ""
    """What the deciding function returned, or why it could not decide."""


MayBe = Callable[[str | None, str | None], bool]
"""Whether a file may have changed like this (remembered, now) because a begun step was about to change it."""


async def find_drift(app: "RunHost", execution: "Execution", *, ignored: bool = False) -> list[Drifted]:
    """Observe every fact that the run remembers and return those that differ now; with `ignored`, also ignored ones."""
    begun = _begun_changes(execution)
    drifted: list[Drifted] = []
    for subject, taken in list(execution.witnesses.items()):
        if taken.on_drift == "ignore" and not ignored:
            continue
        found = await _compare(app, execution, subject, taken, begun)
        if found is not None and (ignored or found.payload != taken.ignored or not found.payload):
            drifted.append(found)
    return drifted


def _begun_changes(execution: "Execution") -> list[tuple[str, MayBe]]:
    """Return which files begun steps of this run were about to change, and how the files may look because of that."""
    changes: list[tuple[str, MayBe]] = []
    for call in execution.steps.values():
        name, args = call.target.name, call.arguments.args
        if call.call not in execution.begun or not name.startswith("files."):
            continue
        if name == "files.write":
            changes.append((args[0], partial(_is_now, file_fact(as_bytes(args[1]))["digest"])))
        elif name == "files.append":
            changes.append((args[0], partial(_is_appended, args[0], as_bytes(args[1]))))
        elif name in ("files.delete", "files.move"):
            changes.append((args[0], partial(_is_now, None)))
        if name == "files.move":
            changes.append((args[1], partial(_is_now, args[3])))
        elif name == "files.make_folder":
            changes.append((args[0], partial(_is_now, FOLDER)))
    return changes


def _is_now(wanted: str | None, remembered: str | None, now: str | None) -> bool:
    return now == wanted


def _is_appended(path: str, added: bytes, remembered: str | None, now: str | None) -> bool:
    data = read_file(path) or b""
    before = data[: len(data) - len(added)]
    was = file_fact(before)["digest"] if remembered is not None or before else None
    return data.endswith(added) and was == remembered


def _as_intended(subject: str, taken: "Taken", remembered: Any, now: Any, begun: list[tuple[str, MayBe]]) -> Any:
    """Return the remembered fact with the changes of begun steps that the outside shows already."""
    for path, may_be in begun:
        if file_subject(path) == subject:
            remembered = now if may_be(remembered.get("digest"), now.get("digest")) else remembered
        elif (covered := taken.witness.covered) is not None and (name := name_within(path, covered)) is not None:
            files, new_files = remembered.get("files", {}), now.get("files", {})
            if may_be(files.get(name), new_files.get(name)):
                remembered = with_changes(remembered, covered, {path: new_files.get(name)})
            elif now["exists"] and may_be(None, FOLDER):
                remembered = with_changes(remembered, covered, {path: FOLDER})
    return remembered


async def _compare(
    app: "RunHost", execution: "Execution", subject: str, taken: "Taken", begun: list[tuple[str, MayBe]]
) -> Drifted | None:
    remembered = execution.codec.decode(taken.payload)
    if taken.changes and taken.witness.covered is not None:
        remembered = with_changes(remembered, taken.witness.covered, taken.changes)
    try:
        payload = execution.codec.encode(await _observed(app, execution.run, taken), where=subject)
        now = execution.codec.decode(payload)
    except Exception as error:  # what cannot be observed cannot be relied upon
        if is_refusal(error):
            raise  # nothing was observed: the run is tried again later
        why = f"cannot be observed: {described(error)}"
        return Drifted(subject, taken.on_drift, remembered, None, why)
    if (payload == taken.payload and not taken.changes) or now == remembered:
        return None
    if begun and now == _as_intended(subject, taken, remembered, now, begun):
        return None
    return Drifted(subject, taken.on_drift, remembered, now, readable_difference(remembered, now), payload)


async def _observed(app: "RunHost", run: str, taken: "Taken") -> Any:
    """Observe on a thread: a large file or a slow server must not block the loop."""
    future: asyncio.Future[tuple[Any, BaseException | None]] = app.loop.create_future()

    def done(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((value, error))

    app.threads.start(run, taken.witness.observe, done)
    value, error = await future
    if error is not None:
        raise error
    return value


def readable_difference(before: Any, after: Any) -> str:
    """Return a difference for a person: for texts, folders and several rows a diff, else both values."""
    old, new = _text_of(before), _text_of(after)
    if _are_rows(before) and _are_rows(after) and max(len(before), len(after)) > 1:
        old, new = _lines_of(before), _lines_of(after)
    if old is not None and new is not None:
        both = old.splitlines(), new.splitlines()
        from difflib import unified_diff

        lines = unified_diff(*both, "as remembered", "as it is now", lineterm="", n=2)
        if difference := "\n".join(lines)[:20_000]:  # none if only the end of a line differs
            return difference
    return f"remembered {_short(before)}, now {_short(after)}"


def _text_of(fact: Any) -> str | None:
    if isinstance(fact, dict) and "exists" in fact:
        if isinstance(files := fact.get("files"), dict):  # of a folder: a line for each file
            return "".join(f"{name}  {str(digest)[:12]}\n" for name, digest in files.items())
        return fact.get("text") if fact["exists"] else ""
    return fact if isinstance(fact, str) and "\n" in fact else None


def _are_rows(fact: Any) -> bool:
    return isinstance(fact, list) and all(isinstance(row, list) for row in fact)


def _lines_of(rows: list[list[Any]]) -> str:
    return "".join(", ".join(map(repr, row)) + "\n" for row in rows)


def _short(value: Any) -> str:
    return text_of(value, by=repr, most=300)


def drift_report(drifted: list[Drifted]) -> HoldReport:
    """Return the report that the outside differs from what the run remembers."""
    subjects = ", ".join(one.subject for one in drifted[:3]) + (" …" if len(drifted) > 3 else "")
    facts = {
        "drift": [
            {"subject": one.subject, "difference": one.difference} | ({"judged": one.judged} if one.judged else {})
            for one in drifted
        ],
        "facts": {one.subject: msgspec.Raw(one.payload) for one in drifted if one.payload},
    }
    without = [] if all(one.payload for one in drifted) else ["accept"]
    return HoldReport("drift", f"{subjects}: not as the run remembers", facts=facts, without=without)


DECISIONS: Final = ("hold", "fail", "ignore", "accept")


async def compare_outside(driver: Driver) -> None:
    """Compare the outside with what the run remembers of it; what differs puts the run on hold, or fails it.

    Nothing else has been done yet. A run that fails settles first what is in doubt, and undoes what it did.
    """
    drifted = await find_drift(driver.app, driver.execution)
    for one in drifted:
        judge = driver.execution.witnesses[one.subject].judge
        if judge is not None:
            await _judge(driver, one, judge)
    drifted = [one for one in drifted if one.on_drift not in ("ignore", "accept")]  # no function decides: hold
    failing = next((one for one in drifted if one.on_drift == "fail"), None)
    if failing is not None:
        driver.fail_when_settled(Drift(f"{failing.subject} is not as the run remembers it.", failing.subject))
    elif drifted:
        driver.put_on_hold(drift_report(drifted))


async def _judge(driver: Driver, drifted: "Drifted", judge: "Judge") -> None:
    """Let a function decide about one fact, and write down what it says."""
    decision, why = "hold", ""
    if drifted.payload:
        try:
            decision = await _asked(driver, judge, drifted.remembered, drifted.now)
            if type(decision) is not str or decision not in DECISIONS:
                decision, why = "hold", f"it returned {type_name(decision)}, not one of {', '.join(DECISIONS)}"
        except Exception as error:  # if the function cannot decide, a person must
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


async def _asked(driver: Driver, judge: "Judge", remembered: Any, now: Any) -> Any:
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
