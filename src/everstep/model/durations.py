"""Durations as users say them: seconds, a text with units such as "1h30m", or a `timedelta`."""

import re
from datetime import timedelta
from typing import Any, Final

from everstep.model.untrusted import is_a

Duration = float | str | timedelta
"""`2`, `"2s"` or `timedelta(seconds=2)`."""

UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PART: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(ms|[smhdw])", re.ASCII)
_WHOLE: Final = re.compile(rf"(-?)((?:{_PART.pattern})+)", re.ASCII)
TEXT_MAX: Final = 100


def seconds_in(value: Any) -> int | float | None:
    """Return a duration in seconds, or None if the value is none. (A truth value is none, and nor is a bare "2".)"""
    if is_a(value, int):
        return None if is_a(value, bool) else int.__index__(value)
    if is_a(value, float):
        return float.__float__(value)
    if is_a(value, timedelta):
        return timedelta.total_seconds(value)
    return _seconds_of_text(str.__str__(value)) if is_a(value, str) else None


def _seconds_of_text(text: str) -> int | float | None:
    whole = _WHOLE.fullmatch(text) if len(text) <= TEXT_MAX else None
    if whole is None:
        return None
    parts = _PART.findall(whole[2])
    total = sum((float(number) if "." in number else int(number)) * UNITS[unit] for number, unit in parts)
    return -total if whole[1] else total
