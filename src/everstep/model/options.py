"""Options are checked where they are declared: a wrong one is `Misuse`, with its name, its type and what to write."""

import inspect
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final

from everstep.errors import Misuse
from everstep.model.untrusted import is_a, text_of, type_name

LONGEST_SECONDS: Final = 100 * 366 * 86_400
"""The longest duration that is taken for one: a hundred years. A longer one is a mistake, or means None."""
SHOWN_MAX: Final = 60


def refused(option: str, value: object, wanted: str) -> Misuse:
    """Return the error for an option: what was given, of which type, and what it should be."""
    return Misuse(f"{option}={text_of(value, by=repr, most=SHOWN_MAX)} ({type_name(value)}): {wanted}.")


def checked_seconds(option: str, value: Any, *, least: float = 0.0, above: bool = False, example: float = 5) -> float:
    """Return a duration in seconds, or an error: not a text, not a truth, not endless, not below `least`."""
    is_number = is_a(value, int, float) and not is_a(value, bool)
    if is_number and isfinite(value) and least <= value <= LONGEST_SECONDS and not (above and value <= least):
        return value  # type: ignore[no-any-return]
    bound = f"above {least:g}" if above else f"of at least {least:g}"
    raise refused(option, value, f"it is a finite number of seconds {bound}, such as {option}={example:g}")


def checked_timeout(value: Any) -> float | None:
    """Return how long to wait, or None for as long as it takes. One that is over already (below 0) is fine."""
    return None if value is None else checked_seconds("timeout", value, least=-LONGEST_SECONDS)


def checked_number(option: str, value: Any, *, least: float, most: float = float("inf")) -> float:
    """Return a finite number between two others."""
    is_number = is_a(value, int, float) and not is_a(value, bool)
    if is_number and isfinite(value) and least <= value <= most:
        return value  # type: ignore[no-any-return]
    between = f"between {least:g} and {most:g}" if isfinite(most) else f"of at least {least:g}"
    raise refused(option, value, f"it is a finite number {between}")


def checked_whole(option: str, value: Any, *, least: int = 0, most: int = 2**53) -> int:
    """Return a whole number between two others."""
    if is_a(value, int) and not is_a(value, bool) and least <= value <= most:
        return value  # type: ignore[no-any-return]
    wanted = f"of at least {least}" if most >= 2**53 else f"between {least} and {most}"
    raise refused(option, value, f"it is a whole number {wanted}, such as {option}={max(least, 3)}")


def checked_flag(option: str, value: Any) -> bool:
    """Return a truth."""
    if value is True or value is False:
        return value
    raise refused(option, value, "it is True or False")


def checked_text(option: str, value: Any) -> str:
    """Return a text."""
    if is_a(value, str):
        return str.__str__(value)
    raise refused(option, value, "it is a text")


def checked_errors(option: str, value: Any) -> tuple[type[BaseException], ...]:
    """Return types of exceptions: one, or several."""
    if is_a(value, type):
        given: tuple[Any, ...] = (value,)
    else:
        given = tuple(value) if isinstance(value, Iterable) and not is_a(value, str, bytes, dict) else (value,)
    for one in given:
        if not (is_a(one, type) and BaseException in type.mro(one)):
            wanted = f"it is a type of exception, or a tuple of them, such as {option}=(TimeoutError,)"
            raise refused(option, one, wanted)
    return given


def checked_function(option: str, value: Any, example: str) -> Callable[..., Any]:
    """Return a function that is called for one value: no generator."""
    if not callable(value):
        raise refused(option, value, f"it is a function, such as {option}={example}")
    refuse_generator(f"{option}=", value)
    function: Callable[..., Any] = value
    return function


def refuse_generator(what: str, function: Any) -> None:
    """Refuse a function with `yield`: calling it runs nothing of it, and it has no one result."""
    called = getattr(type(function), "__call__", None)  # noqa: B004  # it may be an object with such a method
    for one in (function, called):
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            name = getattr(function, "__qualname__", None) or type_name(function)
            raise Misuse(
                f"{what} {name} is a generator (it has a `yield`), and has to be a function with one result. To hand "
                'on values while it runs, use everstep.stream: `everstep.stream("tokens").append(token)`.'
            )


def checked_tags(value: Any) -> dict[str, str] | None:
    """Return tags: texts by name."""
    if value is None:
        return None
    if not is_a(value, dict):
        raise refused("tags", value, 'it is a dict of texts, such as tags={"customer": "17"}')
    for name, one in value.items():
        if not (is_a(name, str) and is_a(one, str)):
            wrong = one if is_a(name, str) else name
            raise refused("tags", wrong, 'names and values of tags are texts, such as tags={"customer": "17"}')
    return {str.__str__(name): str.__str__(one) for name, one in value.items()}


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that there are not."""
    listed = sorted(known)
    for one in given:
        if one not in listed:
            raise Misuse(f"{what} has no option {one}=. It has: {', '.join(listed)}.")
