"""The bodies of events about what a run exchanges while it runs: requests and their answers, approvals, and streams."""

from typing import Final

import msgspec

from everstep.model.event_base import NO_PAYLOAD, Body, Outcome

APPROVAL: Final = "approval:"
"""The prefix of signal names that answer approvals."""


class RequestAwaited(Body):
    """Workflow code asked for the next request of a name, of this type."""

    call: int
    name: str
    type: str
    answer: str = ""
    """The type that its answers have."""
    source: str = ""


class RequestReceived(Outcome):
    """A request was taken from the inbox into the history; `number` is its place in the inbox."""

    number: int
    name: str
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    id: str = ""


class RequestAnswered(Body):
    """A request has its answer, which the sender gets as soon as this is durable. The first one counts.

    `refused` is `code` when the code refused it, and `type` when its value was not of the type that the code asked
    for; then the sender gets `error`. `secret`: the error came from a secret step, so it is not shown.
    """

    call: int
    name: str
    number: int
    id: str = ""
    value: msgspec.Raw = NO_PAYLOAD
    error: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    refused: str = ""
    secret: bool = False
    source: str = ""


class ApprovalAsked(Body):
    """Workflow code waits for a person's answer about exactly these arguments.

    The answer is a signal whose name is `approval:` and this id, which derives from the arguments' digest. So an answer
    to other arguments has another name.
    """

    call: int
    id: str
    what: str
    arguments: str
    """The digest of the arguments."""
    type: str = "Any"
    """The type that the answer must have."""
    timeout: int | None = None
    """Microseconds after which the approval expires."""
    value: msgspec.Raw = NO_PAYLOAD
    """The arguments themselves, unless they are secret."""
    ref: str = ""
    secret: bool = False
    source: str = ""


class ApprovalWithdrawn(Body):
    """Workflow code no longer waits for an answer: the time is over, or it was cancelled."""

    call: int
    id: str
    what: str = ""


class StreamAppended(Body):
    """Workflow code appended an entry to a stream. The entry itself is in `streams`, under this position."""

    call: int
    name: str
    position: int
    digest: str = ""
    """The entry's digest, which covers all entries of the stream before it."""
    source: str = ""


class StreamNoted(Body):
    """An attempt at a step that wrote to a stream has ended: the newest position of the stream, and the
    digest there.
    """

    call: int
    attempt: int
    name: str
    position: int
    digest: str = ""
