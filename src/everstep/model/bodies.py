"""What the bodies of all events have in common."""

from typing import Final

import msgspec

NO_PAYLOAD: Final = msgspec.Raw(b"")


class Body(msgspec.Struct, omit_defaults=True, gc=False):
    """The base of all bodies.

    `call` numbers the commands of a run in the order in which its code gave them; an outcome names the call it is for.
    A payload stands in the body itself, or, when it is large, in `payloads` under the digest in `ref`.
    """


class Outcome(Body, kw_only=True):
    """The base of all news for workflow code.

    `early`: it was recorded before the code had come to rest after the event before it, so the commands that follow
    from that earlier event stand behind this one.
    """

    early: bool = False
