"""Golden histories: what a run did, in a file, against which later code is replayed.

    save_history(app, "order-17", "golden/order-17.json", payloads=True)      # once, from a store
    replay_golden("golden/order-17.json", order)                              # in a test, ever after

Nothing is done in such a replay: no step runs. The code must ask for the same things in the same order, with the same
arguments, and end in the same way; otherwise `GoldenDiffers` says where it does not.

Without payloads a file has only what was asked for: kinds, steps, digests, times. It may be in a repository when the
data must not. The test then says what the run was given and what its steps returned:

    replay_golden("golden/order-17.json", order, "lamp", outcomes={"charge": "receipt-1"}, signals={"approved": True})
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from everstep.codec import PLAIN, Codec, Types, converted
from everstep.engine.code import asyncio_parts
from everstep.engine.code.budget import Books
from everstep.engine.code.commands import Difference
from everstep.engine.code.execution import Execution
from everstep.engine.code.replay import Replay
from everstep.engine.code.start import start_arguments
from everstep.engine.code.workflow import ANYTHING, Workflow, workflow_of
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.verify import Recorded, load_verified, refs_of
from everstep.errors import Misuse, NotDecodable, UnknownRun
from everstep.model.digests import digest_of
from everstep.model.event_base import NO_PAYLOAD
from everstep.model.events import decode_body, encode_body
from everstep.model.own_files import replace
from everstep.stores.protocol import Store

__all__ = ["GoldenDiffers", "replay_golden", "save_history"]

FORMAT: Final = 1
_SAID: Final = ("preview", "note", "by", "reason", "why", "summary")
"""Texts of people and programs outside of payloads. They are left out together with the payloads."""


class GoldenDiffers(AssertionError):
    """The code no longer does what a golden history says. `differences` lists the differences."""

    def __init__(self, message: str, differences: Sequence[Difference] = ()) -> None:
        super().__init__(message)
        self.differences = list(differences)


class _Line(msgspec.Struct):
    seq: int
    kind: str
    step: str
    at: int
    body: msgspec.Raw


class _Golden(msgspec.Struct):
    everstep: int
    workflow: str
    run: str
    generation: int
    whole: bool
    events: list[_Line]
    payloads: dict[str, bytes] = {}

    @property
    def is_unchecked(self) -> bool:
        """Whether the run was started by its workflow's name, with plain data."""
        return bool(decode_body("run_started", self.events[0].body).unchecked)


# -- saving ---------------------------------------------------------------------------------------------------------
def save_history(app: Any, run: str, path: str | Path, *, payloads: bool = False) -> Path:
    """Write the history of a run into a file, for `replay_golden`.

    app: what `everstep.open()` gives, or a store.
    payloads: also what the run was given and what its steps returned. Otherwise only digests of it, kinds and names; a
        short or guessable value can be guessed from its digest.
    """
    store: Store = getattr(getattr(app, "inner", app), "store", app)
    row = store.run(run)
    if row is None:
        raise UnknownRun(f"There is no run {run!r} in {store.url}.")
    history = load_verified(store, row)
    secret = next((event.step for event in history if getattr(event.body, "secret", False)), None)
    carried = history[0].body.carried
    secret = secret or next((one.step for one in carried.undoable if one.secret), None) if carried else secret
    if payloads and secret is not None:
        raise Misuse(f"The run {run} has a secret step ({secret}): save its history with payloads=False.")
    kept: dict[str, bytes] = {}
    lines = []
    for event in history:
        body = event.body if payloads else _without_payloads(event.body)
        for ref in refs_of(body) if payloads else ():
            kept[ref] = restore_payload(store.payload(run, ref), ref)
        lines.append(_Line(event.seq, event.kind, event.step, event.at, msgspec.Raw(encode_body(body))))
    golden = _Golden(FORMAT, row.workflow, run, row.generation, payloads, lines, kept)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace(target, _written(golden))
    return target


def _without_payloads(body: Any) -> Any:
    """Return a body in which each payload is only named by its digest, as large ones are in any history."""
    changes: dict[str, Any] = {}
    fields = {one.name: one for one in msgspec.structs.fields(body)}
    for name, field in fields.items():
        value = getattr(body, name)
        if name in _SAID and value:
            changes[name] = ""
        elif field.type is msgspec.Raw and bytes(value):
            ref = f"{name}_ref" if f"{name}_ref" in fields else "ref"
            changes[name] = NO_PAYLOAD
            if ref in fields and not getattr(body, ref):
                changes[ref] = digest_of(bytes(value)).hex()
        elif name == "facts":
            changes[name] = {}
        elif name == "carried" and value is not None and value.undoable:
            changes[name] = msgspec.structs.replace(value, undoable=[_without_payloads(one) for one in value.undoable])
    return msgspec.structs.replace(body, **changes) if changes else body


def _written(golden: _Golden) -> bytes:
    """Return a file's text with one event a line, so that two files can be compared by eye."""
    head = msgspec.json.encode(msgspec.structs.replace(golden, events=[]))
    lines = b",\n".join(map(msgspec.json.encode, golden.events))
    return head.replace(b'"events":[]', b'"events":[\n' + lines + b"\n]", 1) + b"\n"


# -- replaying ------------------------------------------------------------------------------------------------------
def replay_golden(
    path: str | Path,
    workflow: Any,
    *arguments: Any,
    outcomes: Mapping[str, Any] | None = None,
    signals: Mapping[str, Any] | None = None,
) -> None:
    """Replay a workflow against a file of `save_history`, and raise `GoldenDiffers` if it does something else now.

    For a file without payloads, say what is not in it:

    arguments: what the workflow is given; the same as recorded, which the digest tells.
    outcomes: what steps and children return, by name: a value, an exception to raise, or a function that is called with
        the same arguments.
    signals: the values of signals, by name: a value, or a function that is called with the number of the signal.
    """
    golden = _read(path)
    target = workflow_of(workflow)
    if target.name != golden.workflow:
        raise GoldenDiffers(f"{path} is the history of a run of {golden.workflow}, and this is {target.name}.")
    asyncio_parts.install()
    codec = Codec()
    given = _Given(codec, golden, target, arguments, outcomes or {}, signals or {})
    history = [Recorded(one.seq, one.kind, one.step, one.at, decode_body(one.kind, one.body)) for one in golden.events]
    started = history[0]
    execution = _Rehearsal(
        target,
        run=golden.run,
        generation=golden.generation,
        codec=codec,
        lookup=given.lookup,
        books=Books(started.body, started.at) if started.body.budget is not None else None,
    )
    execution.rehearse(given)
    given.take("run_started", history[0].body, None)
    try:
        replayed = Replay(execution, history).go(quiet=True)
    except NotDecodable as error:
        raise GoldenDiffers(f"{path}: the arguments no longer decode: {error}") from None
    finally:
        execution.evict()
    if replayed.differences:
        raise GoldenDiffers(_told(path, replayed.differences, given.others), replayed.differences)


def _read(path: str | Path) -> _Golden:
    try:
        golden = msgspec.json.decode(Path(path).read_bytes(), type=_Golden)
    except msgspec.MsgspecError as error:
        raise Misuse(f"{path} is not a file of everstep.testing.golden.save_history: {error}") from None
    if golden.everstep != FORMAT or not golden.events:
        raise Misuse(f"{path} was saved by another release of Everstep, or is empty.")
    return golden


def _told(path: str | Path, differences: Sequence[Difference], others: Sequence[str]) -> str:
    lines = [f"The code no longer does what {path} says:"]
    for one in differences:
        lines.append(f"  event {one.seq} ({one.what})")
        lines.append(f"    recorded: {one.recorded}{f'  at {one.recorded_source}' if one.recorded_source else ''}")
        lines.append(f"    now:      {one.now}{f'  at {one.now_source}' if one.now_source else ''}")
    if others:
        lines.append("  It was given other outcomes than those recorded, which may be why:")
        lines += [f"    {one}" for one in dict.fromkeys(others)]
    return "\n".join(lines)


class _Rehearsal(Execution):
    """An execution that announces what it is about to apply, so that the right payload can be supplied."""

    given: "_Given"

    def rehearse(self, given: "_Given") -> None:
        """Take payloads from `given`."""
        self.given = given

    def convert(self, value: Any, types: Types, annotation: Any, what: str, *, always: bool = False) -> Any:
        """Convert again what the file has only the digest of."""
        if self._calls + 1 in self.conversions:
            self.given.convert_with(what, lambda: self.codec.encode(converted(value, annotation).value, types, what))
        return super().convert(value, types, annotation, what, always=always)

    def apply(self, kind: str, body: Any, at: int) -> None:
        call = getattr(body, "call", 0)
        self.given.take(kind, body, self.steps.get(call) or self.children.get(call))
        super().apply(kind, body, at)


class _Given:
    """The source of payloads: the file, or the test's arguments."""

    def __init__(
        self,
        codec: Codec,
        golden: _Golden,
        workflow: Workflow,
        arguments: tuple[Any, ...],
        outcomes: Mapping[str, Any],
        signals: Mapping[str, Any],
    ) -> None:
        self.others: list[str] = []
        """Outcomes that differ from the recorded ones."""
        self._codec = codec
        self._golden = golden
        self._workflow = workflow
        self._arguments = arguments
        self._outcomes = outcomes
        self._signals = signals
        self._now: tuple[str, Any, Any] = ("", None, None)
        self._conversion: tuple[str, Callable[[], bytes]] | None = None
        if golden.whole and (arguments or outcomes or signals):
            raise Misuse("This file has its payloads, so no arguments, outcomes or signals are needed.")

    def take(self, kind: str, body: Any, call: Any) -> None:
        """Record what is applied next."""
        self._now = kind, body, call

    def convert_with(self, what: str, convert: Callable[[], bytes]) -> None:
        """Make the next payload that the replay needs, the one of a conversion, like this."""
        self._conversion = what, convert

    def lookup(self, digest: str) -> bytes:
        """Return a payload that the replay needs."""
        conversion, self._conversion = self._conversion, None
        if self._golden.whole:
            return self._golden.payloads[digest]
        if conversion is not None:
            return self._compared(f"{conversion[0]}, converted", conversion[1](), digest)
        kind, body, call = self._now
        if kind == "run_started":
            return self._run_arguments(digest)
        if kind == "signal_received":
            return self._compared(f"signal {body.name!r}", self._signal(body), digest)
        name = getattr(call.target, "name", "")
        failed = kind == "step_failed" or getattr(body, "status", "") == "failed"
        return self._compared(name, self._outcome(name, call, failed=failed), digest, is_error=failed)

    def _run_arguments(self, digest: str) -> bytes:
        if self._golden.is_unchecked:
            found = self._codec.encode_arguments(ANYTHING, self._arguments, {}, self._workflow.name)
        else:
            found = start_arguments(self._codec, self._workflow, self._arguments)
        if digest_of(found.payload).hex() != digest:
            raise Misuse(
                f"{self._workflow.name} was started with other arguments than those given to replay_golden. "
                "The file has no payloads, so say with which."
            )
        return found.payload

    def _signal(self, body: Any) -> bytes:
        if body.name not in self._signals:
            raise Misuse(f"The file has no payloads. Say what was sent: signals={{{body.name!r}: …}}")
        value = self._signals[body.name]
        return self._codec.encode(value(body.number) if callable(value) else value, PLAIN)

    def _outcome(self, name: str, call: Any, *, failed: bool) -> bytes:
        if name not in self._outcomes:
            raise Misuse(f"The file has no payloads. Say what {name} gave: outcomes={{{name!r}: …}}")
        value = self._outcomes[name]
        try:
            if isinstance(value, BaseException) or (isinstance(value, type) and issubclass(value, BaseException)):
                raise value
            if callable(value):
                args, kwargs = self._codec.decode_arguments(call.target.signature, call.arguments.payload)
                value = value(*args, **kwargs)
        except Exception as error:
            if not failed:
                raise Misuse(f"{name} is recorded as completed, and the given outcome raises {error!r}.") from error
            return self._codec.encode_error(error)
        if failed:
            raise Misuse(f"{name} is recorded as failed, so its outcome is an exception: outcomes={{{name!r}: …}}")
        return self._codec.encode(value, call.target.signature.result, name)

    def _compared(self, what: str, payload: bytes, digest: str, *, is_error: bool = False) -> bytes:
        if not is_error and digest_of(payload).hex() != digest:  # an error has a traceback, which is never the same
            self.others.append(what)
        return payload
