"""A hold as it is told: to a terminal, as JSON, in a notification. With each answer's consequence and command."""

from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict
from urllib.parse import urlsplit, urlunsplit

import msgspec

from everstep.stores.protocol import HoldRow

WITH_A_VALUE: Final = ("skip", "done")
"""Resolutions that need a value."""
NOT_SENT: Final = frozenset({"accepted", "consequences", "facts", "call", "example", "by_verb", "grant", "part"})
"""Of a report: what only the engine needs, and the remembered facts themselves, which may be anything."""
MESSAGE_BYTES_MAX: Final = 100_000
"""A notification that would be larger is sent without the hold's report."""
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
    return report if isinstance(report, dict) else {}


def consequence_of(report: dict[str, Any], resolution: str) -> str:
    """Return what a resolution leads to."""
    consequences = report.get("consequences")
    return str(consequences.get(resolution, "")) if isinstance(consequences, dict) else ""


def hold_facts(hold: HoldRow, url: str | None) -> dict[str, Any]:
    """Return a hold as plain data: what is known, and each possible answer."""
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
    """Return the body of a notification: what `everstep holds --json` says, without what does not leave the store."""
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
    """A variable of the environment is a secret more often than not."""
    if isinstance(drifted, dict) and str(drifted.get("subject", "")).startswith("env:"):
        return {**drifted, "difference": "it has another value now"}
    return drifted


def shareable_url(url: str) -> str | None:
    """Return a store's URL as others may see it: without a password. A store in memory has none that helps."""
    if url.startswith("memory:"):
        return None
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}@{host}"))


# -- lines to paste ----------------------------------------------------------------------------------------------------
def command_line(*words: str, url: str | None) -> str:
    """Return a command line as a person can paste it into a shell."""
    import shlex

    named = ["--url", url] if url else []
    return shlex.join(["everstep", *words, *named])


def resolve_line(hold: HoldRow, resolution: str, url: str | None) -> str:
    """Return the command that resolves a hold in one way. A value in it is an example of the right type."""
    words = ["resolve", hold.run, "--hold", hold.id, f"--{resolution}"]
    if resolution in WITH_A_VALUE:
        words.append(msgspec.json.encode(report_of(hold).get("example")).decode())
    return command_line(*words, url=url)


def example_of(annotation: Any, depth: int = 0) -> Any:
    """Return plain data that shows what a value of a type looks like. What has no obvious example is None."""
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
    """Return the fields that a value of a class cannot be without, and their types."""
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
