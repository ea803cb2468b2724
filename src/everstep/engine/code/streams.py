"""Streams as workflow code and bodies of steps append to them."""

import sys
from typing import Any, Final

from everstep.codec import PLAIN
from everstep.effects.body import StepBody
from everstep.effects.surroundings import CURRENT, persons_line
from everstep.engine.code.commands import Command
from everstep.engine.code.execution import Execution
from everstep.errors import Misuse, StreamLimit
from everstep.model import events as ev
from everstep.model.ids import checked_name


class Stream:
    """Append-only output of a run that others read while it runs."""

    def __init__(self, name: str) -> None:
        self.name = checked_name(name, "stream")

    def append(self, value: Any) -> None:
        """Append an entry. It does not wait: readers get it when it is durable."""
        current = CURRENT.get()
        if isinstance(current, StepBody):
            current.take_entry(self.name, value)
        elif isinstance(current, Execution):
            current.require_live()
            payload = current.codec.encode(value, PLAIN, f"an entry of the stream {self.name!r}")
            check_size(self.name, payload)
            current.issue(AppendEntry(current.next_call(), self.name, payload, persons_line(sys._getframe(1))))
        else:
            raise Misuse("everstep.stream() is for code inside a run; it was called outside of one.")

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


def stream(name: str) -> Stream:
    """Return a stream of the run, to append to: `everstep.stream("tokens").append(token)`.

    In the body of a step, on any thread that has its context, entries are written in small batches and the body never
    waits for them; they carry the step's attempt. In workflow code each is an event, and is not written again in a
    replay. `run.stream(name)` reads them.
    """
    return Stream(name)


ENTRY_BYTES_MAX: Final = 1_000_000
"""Maximum size of one stream entry, as JSON."""


class AppendEntry(Command):
    """Workflow code appends to a stream."""

    kind = "stream_appended"
    __slots__ = ("call", "name", "payload", "source")

    def __init__(self, call: int, name: str, payload: bytes, source: str) -> None:
        self.call = call
        self.name = name
        self.payload = payload
        self.source = source

    def text(self) -> str:
        return f"entry of stream {self.name!r}"

    def compare(self, recorded: ev.StreamAppended) -> tuple[str, bool]:
        return ("", False) if recorded.name == self.name else ("stream", False)


def check_size(name: str, payload: bytes) -> None:
    """Refuse an entry that is too large."""
    if len(payload) > ENTRY_BYTES_MAX:
        raise StreamLimit(
            f"An entry of the stream {name!r} has {len(payload)} bytes; at most {ENTRY_BYTES_MAX} are allowed. "
            "Split it, or store it elsewhere and append where it is."
        )
