"""What `everstep doctor` finds."""

from typing import Literal

import msgspec

Verdict = Literal["ok", "warning", "wrong"]


class Finding(msgspec.Struct):
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    text: str
