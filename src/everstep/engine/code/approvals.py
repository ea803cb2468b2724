"""Approvals as workflow code sees them: a person's answer about exactly these arguments.

The question is an event that contains the arguments. Its answer is a signal under a name that derives from the
arguments' digest: durable, taken once, in the order of the log. So an approval of one thing cannot be used for another
one.
"""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any, Final, TypeVar, Union, overload

import msgspec

from everstep.codec import ANY, Codec, Types, converted, is_equal, meaning_digest, types_of, types_text
from everstep.effects.surroundings import persons_line
from everstep.engine.code.calls import within
from everstep.engine.code.commands import AwaitSignal, Command
from everstep.engine.code.dropped import awaited
from everstep.engine.code.execution import Execution, current_execution
from everstep.engine.code.loop import WorkflowFuture
from everstep.errors import Misuse, NotDecodable
from everstep.model import events as ev
from everstep.model.digests import derived_key, digest_of
from everstep.model.durations import Duration
from everstep.model.exchange_events import APPROVAL
from everstep.model.options import checked_seconds, checked_type
from everstep.model.untrusted import is_a

T = TypeVar("T")
WHAT_MAX: Final = 200
ID_DIGITS: Final = 12


class AskApproval(AwaitSignal):
    """The code waits for a person's answer."""

    kind = "approval_asked"
    payload_field = "value"
    __slots__ = ("arguments", "id", "payload", "secret", "timeout", "what", "whole")

    def __init__(
        self,
        call: int,
        id: str,
        what: str,
        payload: bytes,
        answer: Any,
        future: "WorkflowFuture",
        source: str,
        *,
        timeout: float | None,
        secret: bool,
        whole: bool,
    ) -> None:
        types: Types = ANY if answer in (Any, object) else types_of(answer)
        super().__init__(call, APPROVAL + id, types_text(answer), (types, answer), future, source)
        self.id = id
        self.what = what
        self.payload = payload
        self.arguments = meaning_digest(payload)
        self.timeout = None if timeout is None else round(timeout * 1e6)
        self.secret = secret
        self.whole = whole

    def decode(self, codec: Codec, payload: bytes) -> Any:
        given = self._given(codec, payload)
        return self._told(given, converted(given["answer"], self.types[1]).value)

    def value_of(self, execution: Execution, number: int, payload: bytes) -> Any:
        if number in execution.rejected:
            raise NotDecodable("the code did not take it")
        types, annotation = self.types
        given = self._given(execution.codec, payload)
        return self._told(given, execution.convert(given["answer"], types, annotation, f"approval {self.what}"))

    def _given(self, codec: Codec, payload: bytes) -> dict[str, Any]:
        given = codec.decode(payload, self.types[0])
        if not isinstance(given, dict) or "answer" not in given:
            raise NotDecodable("not an answer to an approval: `everstep approve` sends one")
        return given

    def _told(self, given: dict[str, Any], answer: Any) -> Any:
        return {**given, "answer": answer} if self.whole else answer

    def body(self) -> ev.ApprovalAsked:
        body = ev.ApprovalAsked(self.call, self.id, self.what, self.arguments, self.type_text, self.timeout)
        body.secret, body.source = self.secret, self.source
        if not self.secret:
            body.value = msgspec.Raw(self.payload)
        return body

    def text(self) -> str:
        return f"approval of {self.what!r}"

    def compare(self, recorded: Any) -> tuple[str, bool]:
        if recorded.what != self.what:
            return "what is to be approved", False
        if not is_about(recorded.arguments, self.payload) and not is_equal(recorded.value, self.payload):
            return "arguments", False  # a person has seen, or may have approved, the recorded ones
        return ("", False) if recorded.type == self.type_text else ("type of the answer", False)


class WithdrawApproval(Command):
    """The code no longer waits for an answer."""

    kind = "approval_withdrawn"
    __slots__ = ("call", "id", "what")

    def __init__(self, call: int, asked: AskApproval) -> None:
        self.call = call
        self.id = asked.id
        self.what = asked.what

    def body(self) -> ev.ApprovalWithdrawn:
        return ev.ApprovalWithdrawn(self.call, self.id, self.what)

    def text(self) -> str:
        return f"withdrawal of approval {self.what!r}"

    def compare(self, recorded: ev.ApprovalWithdrawn) -> tuple[str, bool]:
        return ("", False) if recorded.id == self.id else ("approval", False)


def is_about(digest: str, payload: bytes) -> bool:
    """Return True if a recorded digest is that of these arguments. (Older releases made it of the payload itself.)"""
    return digest in (meaning_digest(payload), digest_of(payload).hex())


def arguments_payload(codec: Codec, arguments: object, what: str) -> bytes:
    """Return the payload of what a person will see. It may contain objects of any class that can be stored."""
    classes = dict.fromkeys(_classes_in(arguments))
    types = types_of(Union[tuple(classes)]) if classes else ANY  # noqa: UP007  # they are known only now
    return codec.encode(arguments, types, f"the arguments of the approval {what!r}")


def _classes_in(value: Any) -> Iterator[type]:
    if is_a(value, dict):
        for one in value.values():
            yield from _classes_in(one)
    elif is_a(value, list, tuple, set, frozenset) and type(value).__module__ == "builtins":
        for one in value:
            yield from _classes_in(one)
    elif type(value).__module__ != "builtins":
        yield type(value)


def checked_what(what: object) -> str:
    """Return what is to be approved, if it is a line of text."""
    if isinstance(what, str) and 0 < len(what) <= WHAT_MAX and what.isprintable():
        return what
    raise Misuse(f"What is to be approved is a text of 1 to {WHAT_MAX} characters, without control characters.")


@overload
async def approval(
    what: str, arguments: object, *, answer: type[T], timeout: Duration | None = ..., secret: bool = ...
) -> T: ...
@overload
async def approval(
    what: str, arguments: object, *, answer: Any = ..., timeout: Duration | None = ..., secret: bool = ...
) -> Any: ...
@awaited
async def approval(
    what: str, arguments: object, *, answer: Any = Any, timeout: Duration | None = None, secret: bool = False
) -> Any:
    """Wait for a person's answer about just these arguments, and return it.

        if await everstep.approval("pay", {"to": "ann", "usd": 120}, answer=bool, timeout=86400):
            await pay("ann", 120)

    `everstep approvals` lists what waits, and `everstep approve` (or `run.approve`) answers. An answer is any JSON
    value, also `false`, `0`, `""` and `null`; the first one counts. It is bound to the arguments: what is answered is
    what was shown.

    answer: the type that the answer must have. One of another type is rejected, and the run keeps waiting.
    timeout: seconds after which no answer is accepted and this raises `TimeoutError`.
    secret: the arguments are neither shown nor stored; only their digest is stored.
    """
    execution = current_execution("everstep.approval()")
    return await ask(execution, what, arguments, answer, timeout, persons_line(sys._getframe(1)), secret=secret)


async def ask(
    execution: "Execution",
    what: str,
    arguments: object,
    answer: Any,
    timeout: Duration | None,
    source: str,
    *,
    secret: bool,
    whole: bool = False,
) -> Any:
    """Ask for an approval, wait, and return the answer; with `whole` also who gave it, and why."""
    execution.require_live()
    if timeout is not None:
        timeout = checked_seconds("timeout", timeout)
    what, answer = checked_what(what), checked_type("answer", answer)
    payload = arguments_payload(execution.codec, arguments, what)
    call = execution.next_call()
    name = f"{APPROVAL}{execution.generation}\0{call}\0{what}\0{meaning_digest(payload)}"
    id = f"{call}-{derived_key(execution.entropy, name)[:ID_DIGITS]}"
    future = execution.loop.create_future()
    command = AskApproval(call, id, what, payload, answer, future, source, timeout=timeout, secret=secret, whole=whole)
    execution.receiving.wait_for(execution, command)
    try:
        if timeout is None:
            return await future
        return await within(future, timeout, f"the approval of {what!r}", source)
    except (asyncio.CancelledError, TimeoutError):
        if not execution.unwinding:
            execution.issue(WithdrawApproval(execution.next_call(), command))
        raise
