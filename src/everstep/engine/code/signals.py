"""Signals on their way to workflow code: what has arrived and is not received yet, and who waits for one."""

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.codec import ANY, Codec, Types, converted, types_of, types_text
from everstep.engine.code.commands import AwaitSignal, RejectSignal
from everstep.engine.code.loop import WorkflowFuture
from everstep.errors import NotDecodable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from everstep.engine.code.execution import Execution
    from everstep.engine.code.requests import Requests


class Receiving:
    """The signals of one run, the first to the first that waits.

    It is handed its execution, and does not hold it: a circle would wait for the garbage collector.
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

    def requests_of_run(self) -> "Requests":
        """Return what looks after requests."""
        from everstep.engine.code.requests import Requests

        if self.requests is None:
            self.requests = Requests()
        return self.requests

    def arrived(self, execution: "Execution", name: str, number: int, payload: bytes) -> None:
        """Take a signal, and hand it over if somebody waits for it."""
        self._arrived.setdefault(name, deque()).append((number, payload))
        self._hand_over(execution, name)

    def receive(self, execution: "Execution", name: str, annotation: Any, source: str) -> "WorkflowFuture":
        """Ask for the next signal of this name."""
        execution.require_live()
        future = execution.loop.create_future()
        types: Types = ANY if annotation in (Any, object) else types_of(annotation)
        text = types_text(annotation)
        return self.wait_for(
            execution, AwaitSignal(execution.next_call(), name, text, (types, annotation), future, source)
        )

    def wait_for(self, execution: "Execution", command: AwaitSignal) -> "WorkflowFuture":
        """Ask for a signal, and return the future of its value."""
        self._waiting.setdefault(command.name, deque()).append(command)
        execution.issue(command)
        self._hand_over(execution, command.name)
        return command.future

    def follow(self, command: AwaitSignal, name: str) -> None:
        """Wait for a recorded name in place of the own one: an older release made other names for the same."""
        own = self._waiting.get(command.name, ())
        if name != command.name and command in own:
            own.remove(command)  # type: ignore[union-attr]  # it is in it
            self._waiting.setdefault(name, deque()).append(command)
        command.name = name

    def _hand_over(self, execution: "Execution", name: str) -> None:
        """Hand signals to waiting receives, the first to the first."""
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
        """Return what waits for a signal of this name, if anything does."""
        return next((one for one in self._waiting.get(name, ()) if not one.future.done()), None)

    def awaited(self) -> list[str]:
        """Return the names that the code waits for now."""
        return [name for name, waiting in self._waiting.items() if any(not one.future.done() for one in waiting)]

    def unreceived(self) -> list[tuple[str, int, msgspec.Raw]]:
        """Return what has arrived and nobody has received: names, numbers and values."""
        return [
            (name, number, msgspec.Raw(payload))
            for name, arrived in self._arrived.items()
            for number, payload in arrived
        ]

    def restore(self, signals: "Iterable[tuple[str, int, msgspec.Raw]]") -> None:
        """Let just this have arrived, and let nobody wait."""
        self._waiting.clear()
        self._arrived.clear()
        for name, number, payload in signals:
            self._arrived.setdefault(name, deque()).append((number, bytes(payload)))

    def forget_stale(self) -> None:
        """Drop receives that the code no longer waits for, so that a run at rest knows what it waits for."""
        for name in [name for name, waiting in self._waiting.items() if all(one.future.done() for one in waiting)]:
            del self._waiting[name]
        if self.requests is not None:
            self.requests.forget_stale()


def decode_signal(codec: Codec, payload: bytes, types: Types, annotation: Any) -> Any:
    """Decode what was sent, as the type that is asked for. Raises `NotDecodable` if it cannot be that."""
    return converted(codec.decode(payload, types), annotation).value
