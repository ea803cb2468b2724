"""Holds: what a person is asked, why, and what each answer means."""

import random
from collections.abc import Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from urllib.parse import urlsplit, urlunsplit

import msgspec

from everstep.engine.code.commands import Difference, StepCall
from everstep.engine.code.execution import Execution
from everstep.engine.code.step_state import StepState
from everstep.engine.history.damage import Diagnosis
from everstep.errors import Damaged, FolderBusy, NotDecodable, StoreError
from everstep.model.accounts import Account, as_facts
from everstep.model.budgets import Amounts, Limits
from everstep.model.untrusted import is_a, text_of, type_name
from everstep.stores.protocol import HoldRow
from everstep.stores.rows.keys import EffectRow

ROLLBACK: Final = "compensate what was done, the last first, and end the run as cancelled"

ARGUMENTS_BYTES_MAX: Final = 2000
"""The maximum number of bytes of a step's arguments that a person sees who must say whether it happened."""
STEPS_SHOWN_MAX: Final = 20
"""The maximum number of steps in the report on a budget: those that used most."""

CONSEQUENCES: Final[dict[str, dict[str, str]]] = {
    "diverged": {
        "retry": "compare again with the code as it is then; the run continues if it matches",
        "accept": "keep the recorded outcomes although the arguments differ now, and continue",
        "cancel": "end the run as cancelled, without its code",
    },
    "drift": {
        "retry": "compare again, after you have restored the outside",
        "accept": "remember the outside as it is now, and continue",
        "cancel": "end the run as cancelled, without its code",
        "rollback": ROLLBACK,
    },
    "damaged": {
        "retry": "verify the history again, after you have restored the file",
        "repair": "archive what comes after the last good event, and continue from there; what must not happen twice "
        "is confirmed before it is done",
    },
    "in-doubt": {
        "done": "it happened: take this value (an example: put in what it returned) as the step's outcome and "
        "continue; the step does not run",
        "not-done": "it did not happen: do it again, in a new attempt with the same key",
        "probe": "ask the outside again: if it happened, its outcome is taken; if not, it is done again",
        "accept": "the lost part is checked and this step has not happened: do it, and ask no more in this run",
        "cancel": "end the run as cancelled, without its code; whether the effect happened stays open, and if the step "
        "has a key, that stays taken until a person settles it (`everstep effects`)",
        "rollback": "compensate what was done and end the run; first this is asked again, and it is not done again",
    },
    "restored": {
        "accept": "nothing that happened after the backup is missing here, or you have checked it: do the step, and "
        "ask no more in this run",
        "done": "it happened after the backup: take the given value as its outcome and continue; the step does not run",
        "not-done": "this step has not happened: do it; the next one like it is asked about again",
        "probe": "ask the outside again",
        "cancel": "end the run as cancelled, without its code",
        "rollback": "compensate what was done and end the run; first this is asked again, and it is not done again",
    },
    "exhausted": {
        "retry": "give the step a fresh set of attempts",
        "skip": "take this value (an example: put in the right one) as the step's outcome and continue",
        "cancel": "end the run as cancelled, without its code",
        "rollback": ROLLBACK,
    },
    "budget": {
        "accept": "grant the same budget once more, and continue",
        "skip": "take the given value as the step's outcome and continue; the step does not run",
        "cancel": "end the run as cancelled, without its code",
        "rollback": ROLLBACK,
    },
    "stuck": {
        "retry": "replay the code as it is then, and continue if it can",
        "cancel": "end the run as cancelled, without its code",
        "rollback": ROLLBACK,
    },
    "poisoned": {
        "retry": "drive the run again; its worker may die again",
        "cancel": "end the run as cancelled, without its code",
        "rollback": f"{ROLLBACK}; its worker may die again",
    },
    "asked": {"retry": "go on", "cancel": "end the run as cancelled, without its code", "rollback": ROLLBACK},
}


class HoldReport(msgspec.Struct):
    """The facts that are known when a run is put on hold."""

    reason: str
    summary: str
    step: str = ""
    facts: dict[str, Any] = {}
    without: list[str] = []
    """Resolutions of this reason that do not apply here."""
    consequences: dict[str, str] = {}
    """What a resolution means here, where that differs from the usual."""

    def offers(self, resolution: str) -> bool:
        """Return True if a resolution is among the answers."""
        return resolution in CONSEQUENCES[self.reason] and resolution not in self.without

    def but_not(self, resolution: str) -> "HoldReport":
        """Return the report without an answer."""
        return msgspec.structs.replace(self, without=[*self.without, resolution])

    def row(self, run: str, at: int, randomness: random.Random) -> HoldRow:
        """Return the hold as it is stored."""
        resolutions = [one for one in CONSEQUENCES[self.reason] if self.offers(one)]
        consequences = {one: self.consequences.get(one) or CONSEQUENCES[self.reason][one] for one in resolutions}
        report = msgspec.json.encode({**self.facts, "consequences": consequences})
        return HoldRow(
            id=f"h{randomness.getrandbits(40):010x}",
            run=run,
            reason=self.reason,
            step=self.step,
            summary=self.summary,
            report=report,
            resolutions=resolutions,
            created_at=at,
        )


def report_facts(hold: HoldRow) -> dict[str, Any]:
    """Return the facts of a hold."""
    try:
        facts = msgspec.json.decode(hold.report)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        facts = None
    if not _is_report(hold.report):
        raise Damaged(f"The report of hold {hold.id} is damaged, so it cannot be resolved.")
    return Facts(facts, hold=hold.id)


class Facts(dict[str, Any]):
    """The facts of a report, for a resolution. A missing fact is damage."""

    def __init__(self, facts: dict[str, Any], hold: str) -> None:
        super().__init__(facts)
        self._hold = hold

    def __missing__(self, name: str) -> Any:
        raise Damaged(f"The report of hold {self._hold} is damaged: it does not say {name!r}, so this cannot be done.")


class _Report(msgspec.Struct):
    """The fields of reports that the engine and its commands read. A report with a field of another type is damaged."""

    call: int = 0
    attempts: int = 0
    part: int = 0
    accepted: dict[int, str] = {}
    facts: dict[str, msgspec.Raw] = {}
    grant: Limits | None = None
    unfinished: list[str] = []
    by_verb: list[str] = []
    exported: str | None = None
    seen: int = 0
    begun: list[str] = []
    workers: list[str] = []
    consequences: dict[str, str] = {}
    differences: list[dict[str, Any]] = []
    drift: list[dict[str, Any]] = []
    began_at: int = 0
    last_sign_at: int = 0
    doubted_at: int = 0


_decode_report: Final = msgspec.json.Decoder(_Report).decode


def _is_report(report: bytes) -> bool:
    try:
        _decode_report(report)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def diverged_report(differences: Sequence[Difference]) -> HoldReport:
    """Return the report that the code and the history disagree."""
    first = differences[0]
    acceptable = all(one.acceptable for one in differences)
    recorded, now = first.recorded, first.now
    if first.what != "definition":  # the definition of a graph has names in it, and no arguments
        recorded, now = _without_arguments(recorded), _without_arguments(now)
    summary = f"event {first.seq} ({first.what}): recorded {recorded}; the code now would {_verb(now)}"
    if len(differences) > 1:
        summary += f" (and {len(differences) - 1} more)"
    unfinished = [f"{one.unfinished} (event {one.seq})" for one in differences if one.unfinished]
    if unfinished:
        summary += f"; {' and '.join(unfinished)} has no outcome, so this cannot be accepted"
    facts = {
        "differences": [one._asdict() for one in differences],
        "accepted": {str(one.seq): one.digest for one in differences} if acceptable else {},
        "unfinished": unfinished,
    }
    return HoldReport("diverged", summary, facts=facts, without=[] if acceptable else ["accept"])


def cannot_accept(unfinished: Sequence[str]) -> str:
    """Return why a difference in the arguments of these steps cannot be accepted, and what to do."""
    return (
        f"`accept` keeps recorded outcomes, and {' and '.join(unfinished)} has none: it may have acted, and with other "
        "arguments it would act again, under another key. Bring back code that calls it as recorded "
        "(`everstep.patched` keeps the old way next to the new one); the run then continues by itself."
    )


def _without_arguments(text: str) -> str:
    """Return a summary without payloads, which do not belong into logs and messages; the report has the whole text."""
    return text.partition("(")[0].partition(":")[0]


def _verb(text: str) -> str:
    verbs = ("fail", "return", "raise", "wait", "stop", "publish", "receive")
    return text if text.startswith(verbs) else f"ask for {text}"


def arguments_report(error: NotDecodable) -> HoldReport:
    """The run's arguments cannot be given to the code as it is now."""
    return HoldReport("diverged", f"the arguments do not fit the code: {error}", without=["accept"])


def damaged_report(error: Damaged, diagnosis: "Diagnosis") -> HoldReport:
    """Return the report that the history does not match its digests."""
    without = [] if diagnosis.is_repairable else ["repair"]
    return HoldReport("damaged", str(error), facts={"last_good": diagnosis.last_good}, without=without)


def in_doubt_report(
    call: StepCall, attempts: "StepState", why: str, account: dict[str, Any], *, is_done: bool = False
) -> HoldReport:
    """Return the report that a step was begun, and it is unknown whether its effect happened (or only its value is
    missing).

    account: what is known about the last attempt.
    """
    summary = _DOUBTS.get(attempts.because, "{} was begun and may or may not have happened").format(call.step)
    summary = f"{call.step}: {why}" if is_done else f"{summary}: {why}"
    facts = {
        "call": call.call,
        "attempts": attempts.attempt,
        "key": call.idempotency_key(),
        "arguments": call.shown_arguments(ARGUMENTS_BYTES_MAX),
        "worker": attempts.by,
        **account,
        "source": call.source,
        "example": example_of(call.target.signature.annotations.get("return")),
    }
    if call.keyed is not None:
        facts["effect"] = call.keyed.key
    without = ["not-done", "probe"] if is_done else [] if call.target.probe is not None else ["probe"]
    without += [] if attempts.because in _DOUBTS else ["accept"]
    reason = "restored" if attempts.because == "restored" else "in-doubt"
    return HoldReport(reason, summary, step=call.step, facts=facts, without=without)


_DOUBTS: Final = {
    "repaired": "{} may have happened in the part of the history that was archived",
    "restored": "{} may have happened after the backup that was restored",
}


def key_damaged_report(call: StepCall, row: EffectRow, damage: StoreError) -> HoldReport:
    """Return the report that the outcome which a step should share cannot be read."""
    summary = f"{call.step} shares the outcome kept under its key, and that cannot be believed: {damage}"
    facts = {"call": call.call, "effect": row.key, "owner": row.run}
    return HoldReport("stuck", summary, step=call.step, facts=facts)


def exhausted_report(call: StepCall, attempt: int, error: BaseException) -> HoldReport:
    """Return the report that a step has failed as often as its policy allows."""
    summary = f"{call.step} failed {attempt} times, last with {type_name(error)}"
    facts: dict[str, Any] = {"call": call.call, "attempts": attempt}
    facts["example"] = example_of(call.target.signature.annotations.get("return"))
    if is_a(error, FolderBusy):  # the holder of the folder may still write, so the run must not continue without it
        return HoldReport("exhausted", f"{call.step}: {error}", step=call.step, facts=facts, without=["skip"])
    return HoldReport("exhausted", summary, step=call.step, facts=facts)


def budget_report(
    summary: str, step: str, facts: dict[str, Any], part: int, account: Account, by_step: dict[str, Amounts]
) -> HoldReport:
    """Return the report that the budget has no room for a step, or its time is over."""
    spent = sorted(by_step.items(), key=lambda one: (-one[1].microdollars, -one[1].tokens, -one[1].steps, one[0]))
    facts |= {
        "part": part,
        "grant": account.again,
        "used": as_facts(account.used),
        "reserved": as_facts(account.reserved),
        "limits": as_facts(account.limits),
        "by_step": {name: as_facts(amounts) for name, amounts in spent[:STEPS_SHOWN_MAX]},
    }
    return HoldReport("budget", summary, step=step, facts=facts, without=[] if step else ["skip"])


def stuck_report(execution: "Execution", error: BaseException | None) -> HoldReport:
    """Return the report that the code waits for something that can never happen, or does not settle."""
    lines = execution.loop.spun_at or execution.loop.places()
    if error is None:
        summary = "the code waits for something that can never happen: no step, timer, signal or child is open"
    else:
        why = text_of(error) or "it loops without waiting for anything"
        summary = f"the code does not come to rest: {why}"
    if error is not None and execution.saga.begun:
        summary = f"a compensation cannot begin: {text_of(error)}"
    without = ["rollback"] if error is not None else []  # a replay would come to the same place
    return HoldReport("stuck", summary, facts={"waiting_at": lines}, without=without)


def poisoned_report(deaths: int, cause: str) -> HoldReport:
    """Return the report that the process of this run dies, or is stopped, again and again. `cause`: the last stop
    here, if any.
    """
    summary = f"the process that drove this run died {deaths} times in a row without getting any further"
    if cause:
        summary = f"this run was stopped {deaths} times in a row without getting any further; at last, {cause}"
    return HoldReport("poisoned", summary, facts={"deaths": deaths, "cause": cause} if cause else {"deaths": deaths})


def asked_report(note: str, by: str) -> HoldReport:
    """Return the report for a hold that a person or a rule requested."""
    return HoldReport("asked", note or "somebody asked for it", facts={"by": by})


WITH_A_VALUE: Final = ("skip", "done")
"""Resolutions that need a value."""
NOT_SENT: Final = frozenset({"accepted", "consequences", "facts", "call", "example", "by_verb", "grant", "part"})
"""Fields of a report that are not sent: those that only the engine needs, and the remembered facts, which may be
anything.
"""
MESSAGE_BYTES_MAX: Final = 100_000
"""The maximum size of a notification. A larger one is sent without the hold's report."""
_EXAMPLES: Final[dict[Any, Any]] = {
    None: None, type(None): None, bool: True, int: 1, float: 1.0, str: "text", bytes: "",
    list: [], tuple: [], set: [], frozenset: [], dict: {},
}  # fmt: skip


def report_of(hold: HoldRow) -> dict[str, Any]:
    """Return the facts that a hold carries."""
    try:
        report = msgspec.json.decode(hold.report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return report if _is_report(hold.report) else {}


def consequence_of(report: dict[str, Any], resolution: str) -> str:
    """Return the consequence of a resolution."""
    consequences = report.get("consequences")
    return str(consequences.get(resolution, "")) if isinstance(consequences, dict) else ""


def hold_facts(hold: HoldRow, url: str | None) -> dict[str, Any]:
    """Return a hold as plain data: its facts, and each possible answer."""
    report = report_of(hold)
    facts: dict[str, Any] = {"id": hold.id, "run": hold.run, "workflow": hold.workflow, "reason": hold.reason}
    facts |= {"step": hold.step, "summary": hold.summary, "created_at": hold.created_at, "report": report}
    facts["resolutions"] = {
        one: {"consequence": consequence_of(report, one), "command": resolve_line(hold, one, url)}
        for one in hold.resolutions
    }
    if hold.resolved_at is not None:
        facts["resolved"] = {"at": hold.resolved_at, "resolution": hold.resolution, "by": hold.by, "note": hold.note}
    return facts


def hold_message(hold: HoldRow, store_url: str) -> bytes:
    """Return the body of a notification: the output of `everstep holds --json`, without what must not leave the
    store.
    """
    facts = hold_facts(hold, shareable_url(store_url))
    facts["report"] = {name: one for name, one in facts["report"].items() if name not in NOT_SENT}
    if isinstance(drift := facts["report"].get("drift"), list):
        facts["report"]["drift"] = [_without_variables(one) for one in drift]
    message = msgspec.json.encode({"type": "hold", **facts})
    if len(message) > MESSAGE_BYTES_MAX:
        facts["report"] = {"left_out": f"{len(message)} bytes; `everstep holds --run {hold.run}` has it"}
        message = msgspec.json.encode({"type": "hold", **facts})
    return message


def _without_variables(drifted: Any) -> Any:
    """Hide the values of environment variables, which are often secrets."""
    if isinstance(drifted, dict) and str(drifted.get("subject", "")).startswith("env:"):
        return {**drifted, "difference": "it has another value now"}
    return drifted


def shareable_url(url: str) -> str | None:
    """Return a store's URL without its password. A store in memory has no useful URL."""
    if url.startswith("memory:"):
        return None
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}@{host}"))


# -- lines to paste ----------------------------------------------------------------------------------------------------
def command_line(*words: str, url: str | None) -> str:
    """Return a command line that can be pasted into a shell."""
    import shlex

    named = ["--url", url] if url else []
    return shlex.join(["everstep", *words, *named])


def resolve_line(hold: HoldRow, resolution: str, url: str | None) -> str:
    """Return the command for one resolution of a hold. A value in it is an example of the right type."""
    words = ["resolve", hold.run, "--hold", hold.id, f"--{resolution}"]
    if resolution in WITH_A_VALUE:
        words.append(msgspec.json.encode(report_of(hold).get("example")).decode())
    return command_line(*words, url=url)


def example_of(annotation: Any, depth: int = 0) -> Any:
    """Return plain data as an example of a type's values. None without an obvious example."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return example_of(parts[0], depth)
    known = origin or annotation
    if known is None or (isinstance(known, type) and known in _EXAMPLES):
        return _EXAMPLES[known]
    if origin is Literal:
        return parts[0]
    if origin is Union or type(annotation).__name__ == "UnionType":
        return example_of(next(one for one in parts if one is not type(None)), depth)
    if depth < 3 and isinstance(annotation, type):
        names = _needed_fields(annotation)
        if names:
            return {name: example_of(one, depth + 1) for name, one in names.items()}
    return None


def _needed_fields(cls: type) -> dict[str, Any]:
    """Return the required fields of a class, and their types."""
    try:
        hints = get_type_hints(cls)
    except Exception:  # noqa: BLE001  # an annotation may hold any expression
        return {}
    if hasattr(cls, "__dataclass_fields__"):
        import dataclasses

        missing = dataclasses.MISSING
        fields = dataclasses.fields(cls)
        return {one.name: hints[one.name] for one in fields if one.default is missing is one.default_factory}
    if is_typeddict(cls):
        return {name: hints[name] for name in getattr(cls, "__required_keys__", ()) if name in hints}
    if issubclass(cls, msgspec.Struct):
        return {one.name: one.type for one in msgspec.structs.fields(cls) if one.required}
    return {}
