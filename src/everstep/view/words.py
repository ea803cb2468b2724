"""Durations and errors in words."""

from typing import Any, Final

_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"))


def duration(seconds: float) -> str:
    """Return a duration as a person says it: `340 ms`, `2.5 s`, `3 min 20 s`, `2 d 4 h`."""
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts = []
    for size, unit in _UNITS:
        if rest >= size:
            parts.append(f"{rest // size} {unit}")
            rest %= size
    if rest and seconds < 3600:
        parts.append(f"{rest} s")
    return " ".join(parts[:2])


def between(start: int, end: int) -> str:
    """Return the duration between two times in microseconds."""
    return duration((end - start) / 1e6)


def counted(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: `1 step`, `2 steps`; `many` is the plural that is not made by an `s`."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {many or one + 's'}"


def error_line(error: dict[str, Any]) -> str:
    """Return an error's type and the first line of its message."""
    message = str(error.get("message", "")).split("\n")[0]
    kind = str(error.get("type", ""))
    return f"{kind}: {message}" if message else kind
