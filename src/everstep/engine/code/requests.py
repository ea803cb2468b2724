"""Requests for workflow code: those that have arrived and are not taken yet, the waiting calls, and the answers."""

import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from everstep.codec import ANY, Types, is_same, types_of, types_text
from everstep.effects.surroundings import persons_line
from everstep.engine.code.commands import Command
from everstep.engine.code.loop import WorkflowFuture
from everstep.errors import Misuse, NotDecodable, RequestRefused
from everstep.model import events as ev
from everstep.model.digests import digest_of

if TYPE_CHECKING:  # a real cycle: an execution has this, and hands itself to it with each call
    from everstep.engine.code.execution import Execution


Q = TypeVar("Q")


class Asked(NamedTuple):
    """A request that has arrived and that the code has not taken."""

    number: int
    id: str
    payload: bytes


class AwaitRequest(Command):
    """The code waits for the next request of a name."""

    kind = "request_awaited"
    __slots__ = ("answer_text", "answer_types", "call", "future", "name", "source", "type_text", "types")

    def __init__(self, call: int, name: str, type: Any, answer: Any, future: "WorkflowFuture", source: str) -> None:
        self.call = call
        self.name = name
        self.types: tuple[Types, Any] = (_types(type), type)
        self.type_text = types_text(type)
        self.answer_types = _types(answer)
        self.answer_text = types_text(answer)
        self.future = future
        self.source = source

    def body(self) -> ev.RequestAwaited:
        return ev.RequestAwaited(self.call, self.name, self.type_text, self.answer_text, self.source)

    def text(self) -> str:
        return f"requests {self.name!r} as {self.type_text}"

    def compare(self, recorded: ev.RequestAwaited) -> tuple[str, bool]:
        if recorded.name != self.name:
            return "request name", False
        return ("", False) if recorded.type == self.type_text else ("request type", False)


class AnswerRequest(Command):
    """The answer to a request, or its refusal."""

    kind = "request_answered"
    __slots__ = ("call", "id", "name", "number", "payload", "refused", "secret", "source")

    def __init__(
        self,
        call: int,
        name: str,
        asked: Asked,
        payload: bytes,
        *,
        refused: str = "",
        secret: bool = False,
        source: str = "",
    ) -> None:
        self.call = call
        self.name = name
        self.number = asked.number
        self.id = asked.id
        self.payload = payload
        self.refused = refused
        self.secret = secret
        self.source = source

    def body(self) -> ev.RequestAnswered:
        body = ev.RequestAnswered(self.call, self.name, self.number, self.id, source=self.source)
        body.refused, body.secret = self.refused, self.secret
        setattr(body, self.field, msgspec.Raw(self.payload))
        return body

    @property
    def field(self) -> str:
        """The field of the event's body that has its payload."""
        return "error" if self.refused else "value"

    def text(self) -> str:
        return f"{'refusal' if self.refused else 'answer'} of request {self.name!r}"

    def digest(self) -> str:
        return digest_of(self.payload).hex()

    def compare(self, recorded: ev.RequestAnswered) -> tuple[str, bool]:
        if (recorded.number, recorded.refused) != (self.number, self.refused):
            return "request", False
        if self.refused:  # an error contains lines of the code, which may move
            return "", False
        same = self.digest() == recorded.ref if recorded.ref else is_same(recorded.value, self.payload)
        return ("", False) if same else ("answer", True)


class Requests:
    """The requests of one run. The first request goes to the first waiting call.

    Its methods get the execution as an argument, because a cycle of references would wait for the garbage collector.
    """

    def __init__(self) -> None:
        self.taken: set[int] = set()
        """The numbers of those that the code has taken and not answered."""
        self._waiting: dict[str, deque[AwaitRequest]] = {}
        self._arrived: dict[str, deque[Asked]] = {}

    @property
    def is_awaited(self) -> bool:
        """Whether the code waits for any request."""
        return any(self._waiting.values())

    def arrived(self, execution: "Execution", name: str, asked: Asked) -> None:
        """Add a request, and pass it on if a call waits for it."""
        self._arrived.setdefault(name, deque()).append(asked)
        self._hand_over(execution, name)

    def next(self, execution: "Execution", name: str, type: Any, answer: Any, source: str) -> "WorkflowFuture":
        """Ask for the next request of a name."""
        execution.require_live()
        future = execution.loop.create_future()
        command = AwaitRequest(execution.next_call(), name, type, answer, future, source)
        self._waiting.setdefault(name, deque()).append(command)
        execution.issue(command)
        self._hand_over(execution, name)
        return future

    def _hand_over(self, execution: "Execution", name: str) -> None:
        """Pass requests to waiting calls, the first to the first. One of another type never reaches the code."""
        arrived, waiting = self._arrived.get(name), self._waiting.get(name)
        while arrived and waiting:
            command = waiting[0]
            if command.future.done():  # the code stopped waiting: a timeout, a cancel
                waiting.popleft()
                continue
            asked = arrived.popleft()
            try:
                if asked.number in execution.rejected:
                    raise NotDecodable("the code did not take it")
                types, annotation = command.types
                given = execution.codec.decode(asked.payload, types)
                value = execution.convert(given, types, annotation, f"request {name}")
            except NotDecodable as refused:
                error = RequestRefused(f"The request {name!r} was refused: {refused}")
                payload = execution.codec.encode_error(error)
                execution.issue(AnswerRequest(execution.next_call(), name, asked, payload, refused="type"))
                continue
            waiting.popleft()
            self.taken.add(asked.number)
            command.future.set_result(Request(execution, self, name, asked, value, command.answer_types))

    def awaited(self) -> list[str]:
        """Return the names that the code waits for now."""
        return [name for name, waiting in self._waiting.items() if any(not one.future.done() for one in waiting)]

    def untaken(self) -> list[tuple[str, int, str, msgspec.Raw]]:
        """Return the requests that the code has not taken: names, numbers, ids and values."""
        return [
            (name, asked.number, asked.id, msgspec.Raw(asked.payload))
            for name, arrived in self._arrived.items()
            for asked in arrived
        ]

    def restore(self, requests: Iterable[tuple[str, int, str, msgspec.Raw]]) -> None:
        """Replace the pending requests with these and drop all waiting calls."""
        self._waiting.clear()
        self._arrived.clear()
        self.taken.clear()
        for name, number, id, payload in requests:
            self._arrived.setdefault(name, deque()).append(Asked(number, id, bytes(payload)))

    def forget_stale(self) -> None:
        """Drop calls that the code no longer waits for, so that a settled run knows what it waits for."""
        for name in [name for name, waiting in self._waiting.items() if all(one.future.done() for one in waiting)]:
            del self._waiting[name]


class Request(Generic[Q]):
    """A question sent to the run: `value`, under an `id`. Answer it, or refuse it, once."""

    def __init__(
        self, execution: "Execution", requests: Requests, name: str, asked: Asked, value: Q, types: Types
    ) -> None:
        self.name = name
        self.id = asked.id
        self.value = value
        self._execution = execution
        self._requests = requests
        self._asked = asked
        self._types = types

    def answer(self, value: Any = None) -> None:
        """Answer it. The sender gets the value as soon as everything up to here is durable."""
        execution = self._execution
        self._refuse_twice()
        payload = execution.codec.encode(value, self._types, f"the answer to {self.name!r}")
        self._settle(payload)

    def refuse(self, reason: str | BaseException) -> None:
        """Refuse it. The sender gets `RequestRefused` with the reason; or the error, if it is one."""
        self._refuse_twice()
        error = reason if isinstance(reason, BaseException) else RequestRefused(str(reason))
        failure = self._execution.failures.get(id(error))
        is_secret = failure is not None and failure.error is error and failure.secret
        self._settle(self._execution.codec.encode_error(error), refused="code", secret=is_secret)

    def _refuse_twice(self) -> None:
        self._execution.require_live()
        if self._asked.number not in self._requests.taken:
            raise Misuse(f"The request {self.id!r} ({self.name}) has its answer already: a request has one.")

    def _settle(self, payload: bytes, *, refused: str = "", secret: bool = False) -> None:
        execution, source = self._execution, persons_line(sys._getframe(2))
        self._requests.taken.discard(self._asked.number)
        call = execution.next_call()
        answer = AnswerRequest(call, self.name, self._asked, payload, refused=refused, secret=secret, source=source)
        execution.issue(answer)

    def __repr__(self) -> str:
        return f"<request {self.id} {self.name}>"


class RequestIterator(AsyncIterator[Request[Q]]):
    """What `everstep.requests()` returns: it gives the requests of one name, one after the other."""

    def __init__(self, execution: "Execution", name: str, type: Any, answer: Any) -> None:
        self._execution = execution
        self._name = name
        self._type = type
        self._answer = answer

    def __aiter__(self) -> "RequestIterator[Q]":
        return self

    async def __anext__(self) -> Request[Q]:
        execution, source = self._execution, persons_line(sys._getframe(1))
        requests = execution.receiving.requests_of_run()
        request: Request[Q] = await requests.next(execution, self._name, self._type, self._answer, source)
        return request


def _types(annotation: Any) -> Types:
    return ANY if annotation in (Any, object) else types_of(annotation)
