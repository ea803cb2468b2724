"""What all events have in common. Their kinds and bodies are in `events.py`."""

from typing import Final, NamedTuple

import msgspec

NO_PAYLOAD: Final = msgspec.Raw(b"")


class EventRow(NamedTuple):
    """An event as it is stored. `at` is microseconds since 1970; `body` is JSON of the kind's body below."""

    seq: int
    kind: str
    step: str
    at: int
    body: bytes
    digest: bytes


class Body(msgspec.Struct, omit_defaults=True, gc=False):
    """The base of all bodies.

    `call` numbers the commands of a run in the order in which its code gave them; an outcome names the call it is for.
    A payload is in the body itself, or, when it is large, in `payloads` under the digest in `ref`.
    """


class Outcome(Body, kw_only=True):
    """The base of all outcomes: events that workflow code sees.

    `early`: it was recorded before the code had settled after the event before it, so commands that follow from that
    earlier event come after this one in the history.
    """

    early: bool = False
