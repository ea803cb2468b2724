"""Signals for workflow code: those that have arrived and are not received yet, and the waiting calls."""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.codec import ANY, Types, types_of, types_text
from everstep.engine.code.commands import AwaitSignal, RejectSignal
from everstep.engine.code.loop import WorkflowFuture
from everstep.engine.code.requests import Requests
from everstep.errors import NotDecodable

if TYPE_CHECKING:  # a real cycle: an execution has this, and hands itself to it with each call
    from everstep.engine.code.execution import Execution


class Receiving:
    """The signals of one run. The first signal goes to the first waiting call.

    Its methods get the execution as an argument, because a cycle of references would wait for the garbage collector.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[AwaitSignal]] = {}
        self._arrived: dict[str, deque[tuple[int, bytes]]] = {}
        self.requests: Requests | None = None
        """The requests of the run: most runs have none."""

    @property
    def is_awaited(self) -> bool:
        """Whether the code waits for any signal or request."""
        return any(self._waiting.values()) or (self.requests is not None and self.requests.is_awaited)

    def requests_of_run(self) -> Requests:
        """Return what looks after requests."""
        if self.requests is None:
            self.requests = Requests()
        return self.requests

    def arrived(self, execution: "Execution", name: str, number: int, payload: bytes) -> None:
        """Add a signal, and pass it on if a call waits for it."""
        self._arrived.setdefault(name, deque()).append((number, payload))
        self._hand_over(execution, name)

    def receive(self, execution: "Execution", name: str, annotation: Any, source: str) -> WorkflowFuture:
        """Ask for the next signal of this name."""
        execution.require_live()
        future = execution.loop.create_future()
        types: Types = ANY if annotation in (Any, object) else types_of(annotation)
        text = types_text(annotation)
        return self.wait_for(
            execution, AwaitSignal(execution.next_call(), name, text, (types, annotation), future, source)
        )

    def wait_for(self, execution: "Execution", command: AwaitSignal) -> WorkflowFuture:
        """Ask for a signal, and return the future of its value."""
        self._waiting.setdefault(command.name, deque()).append(command)
        execution.issue(command)
        self._hand_over(execution, command.name)
        return command.future

    def follow(self, command: AwaitSignal, name: str) -> None:
        """Wait for a recorded name instead of its own, because an older release derived another one."""
        own = self._waiting.get(command.name, ())
        if name != command.name and command in own:
            own.remove(command)  # type: ignore[union-attr]  # it is in it
            self._waiting.setdefault(name, deque()).append(command)
        command.name = name

    def _hand_over(self, execution: "Execution", name: str) -> None:
        """Pass signals to waiting calls, the first to the first."""
        signals, waiting = self._arrived.get(name), self._waiting.get(name)
        while signals and waiting:
            command = waiting[0]
            if command.future.done():  # the code stopped waiting: a timeout, a cancel
                waiting.popleft()
                continue
            number, payload = signals.popleft()
            try:
                value = command.value_of(execution, number, payload)
            except NotDecodable as refused:
                execution.issue(RejectSignal(execution.next_call(), name, number, str(refused)))
                continue
            waiting.popleft()
            command.future.set_result(value)

    def waiting_for(self, name: str) -> AwaitSignal | None:
        """Return the call that waits for a signal of this name, or None."""
        return next((one for one in self._waiting.get(name, ()) if not one.future.done()), None)

    def awaited(self) -> list[str]:
        """Return the names that the code waits for now."""
        return [name for name, waiting in self._waiting.items() if any(not one.future.done() for one in waiting)]

    def unreceived(self) -> list[tuple[str, int, msgspec.Raw]]:
        """Return the signals that the code has not received: names, numbers and values."""
        return [
            (name, number, msgspec.Raw(payload))
            for name, arrived in self._arrived.items()
            for number, payload in arrived
        ]

    def restore(self, signals: Iterable[tuple[str, int, msgspec.Raw]]) -> None:
        """Let just this have arrived, and let nobody wait."""
        self._waiting.clear()
        self._arrived.clear()
        for name, number, payload in signals:
            self._arrived.setdefault(name, deque()).append((number, bytes(payload)))

    def forget_stale(self) -> None:
        """Drop calls that the code no longer waits for, so that a settled run knows what it waits for."""
        for name in [name for name, waiting in self._waiting.items() if all(one.future.done() for one in waiting)]:
            del self._waiting[name]
        if self.requests is not None:
            self.requests.forget_stale()
