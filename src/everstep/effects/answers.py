"""What a probe answers about an effect whose outcome is unknown.

`Done(value)`: it happened, and this is the step's outcome. `everstep.NotDone()` (returned or raised): it certainly did
not happen. `Unknown()`: the outside cannot tell yet; it is asked again later.
"""

from typing import Any

import msgspec


class Done(msgspec.Struct, frozen=True):
    """The effect happened; `value` becomes the step's outcome."""

    value: Any = None


class Unknown(msgspec.Struct, frozen=True):
    """The outside cannot tell whether the effect happened."""

    why: str = ""
