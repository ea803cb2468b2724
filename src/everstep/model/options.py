"""Options are checked where they are declared: a wrong one is `Misuse`, with its name, its type and what to write."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from sys import float_info
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

from everstep.errors import Misuse
from everstep.model.durations import seconds_in
from everstep.model.untrusted import attempted, bases_of, is_a, is_encodable, text_of, type_name

LONGEST_SECONDS: Final = 100 * 366 * 86_400
"""The longest duration that is accepted: a hundred years. A longer one is a mistake, or means None."""
SHOWN_MAX: Final = 60


def refused(option: str, value: object, wanted: str) -> Misuse:
    """Return the error for an option: its value, the value's type, and what it should be."""
    return Misuse(f"{option}={text_of(value, by=repr, most=SHOWN_MAX)} ({type_name(value)}): {wanted}.")


def checked_seconds(option: str, value: Any, *, least: float = 0.0, above: bool = False, example: float = 5) -> float:
    """Return a duration in seconds. Refuses truth values, infinity, and values below `least`."""
    number = seconds_in(value)
    if number is not None and least <= number <= LONGEST_SECONDS and not (above and number <= least):
        return number
    bound = f"above {least:g}" if above else f"of at least {least:g}"
    said = f'such as {option}={example:g}, or a duration such as "{example:g}s", "1h30m" or a timedelta'
    raise refused(option, value, f"it is a finite number of seconds {bound}, {said}")


def _number(value: Any) -> int | float | None:
    """Return a plain number, whatever methods its own class has, or None. (A truth value is not a number here.)"""
    if is_a(value, int):
        return None if is_a(value, bool) else int.__index__(value)
    return float.__float__(value) if is_a(value, float) else None


def checked_timeout(value: Any) -> float | None:
    """Return how long to wait, or None for no limit. A deadline in the past (below 0) is fine."""
    return None if value is None else checked_seconds("timeout", value, least=-LONGEST_SECONDS)


def checked_number(option: str, value: Any, *, least: float, most: float = float_info.max) -> float:
    """Return a finite number between two others."""
    number = _number(value)
    if number is not None and least <= number <= most:
        return number
    between = f"between {least:g} and {most:g}" if most < float_info.max else f"of at least {least:g}"
    raise refused(option, value, f"it is a finite number {between}")


def checked_whole(option: str, value: Any, *, least: int = 0, most: int = 2**53) -> int:
    """Return a whole number between two others."""
    number = _number(value)
    if type(number) is int and least <= number <= most:
        return number
    wanted = f"of at least {least}" if most >= 2**53 else f"between {least} and {most}"
    raise refused(option, value, f"it is a whole number {wanted}, such as {option}={max(least, 3)}")


def checked_flag(option: str, value: Any) -> bool:
    """Return a truth value."""
    if value is True or value is False:
        return value
    raise refused(option, value, "it is True or False")


def checked_text(option: str, value: Any) -> str:
    """Return a text that can be stored. A lone surrogate cannot."""
    if is_a(value, str) and is_encodable(value):
        return str.__str__(value)
    raise refused(option, value, "it is a text" + (" that UTF-8 can encode" if is_a(value, str) else ""))


def check_texts(**options: Any) -> None:
    """Refuse options that are not storable texts."""
    for option, value in options.items():
        checked_text(option, value)


def check_optional_texts(**options: Any) -> None:
    """Refuse options that are neither None nor storable texts."""
    check_texts(**{option: value for option, value in options.items() if value is not None})


def check_flags(**options: Any) -> None:
    """Refuse options that are neither True nor False."""
    for option, value in options.items():
        checked_flag(option, value)


def checked_path(option: str, value: Any) -> str:
    """Return the path of a file."""
    path = attempted(os.fspath, value)
    if is_a(path, str) and path and is_encodable(path):
        return str.__str__(path)
    raise refused(option, value, f'it is the path of a file, such as {option}="runs.everstep"')


def checked_choice(option: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return the value if it is one of the choices."""
    if is_a(value, str) and str.__str__(value) in choices:
        return str.__str__(value)
    raise refused(option, value, f"it is one of {', '.join(choices)}")


def checked_errors(option: str, value: Any) -> tuple[type[BaseException], ...]:
    """Return types of exceptions: one, or several."""
    if is_a(value, type):
        given: tuple[Any, ...] = (value,)
    else:
        given = (value,) if is_a(value, str, bytes, dict) else attempted(tuple, value, default=(value,))
    for one in given:
        bases = bases_of(one) if is_a(one, type) else ()
        if not any(base is BaseException for base in bases):
            wanted = f"it is a type of exception, or a tuple of them, such as {option}=(TimeoutError,)"
            raise refused(option, one, wanted)
        if not any(base is Exception for base in bases):
            _refuse_stop(option, one, bases)
    return given


def _refuse_stop(option: str, cls: Any, bases: tuple[type, ...]) -> None:
    """Refuse a type of exception that stops a program or a task, and every base class of such a type."""
    from asyncio import CancelledError

    stops = (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError)
    if cls is BaseException or any(base is stop for base in bases for stop in stops):
        wanted = (
            "it is a type of error, and stopping is never the outcome of a step: what was under way is settled later"
        )
        raise refused(option, cls, f"{wanted}. For all errors, write {option}=(Exception,)")


def checked_type(option: str, value: Any, *, within: bool = False) -> Any:
    """Return a type that values can be checked against: a class, a generic, a union. A quoted name is refused."""
    origin = attempted(get_origin, value)
    if origin is Literal:
        parts: tuple[Any, ...] = ()
        is_one = all(is_encodable(one) for one in get_args(value) if is_a(one, str))
    else:
        parts = get_args(value)[:1] if origin is Annotated else get_args(value) if origin is not None else ()
        is_one = origin is not None or value is None or value is Any or is_a(value, type, TypeVar)
        is_one = is_one or hasattr(value, "__supertype__") or hasattr(value, "__value__")  # NewType; `type X = …`
    if within and (value is ... or is_a(value, list)):  # tuple[int, ...], Callable[[int], str]
        is_one, parts = True, tuple(value) if is_a(value, list) else ()
    if not is_one:
        raise refused(option, value, f"it is a type, such as {option}=int or {option}=list[str], and not in quotes")
    for part in parts:
        checked_type(option, part, within=True)
    return value


def checked_function(option: str, value: Any, example: str) -> Callable[..., Any]:
    """Return a function that is called for one value: not a generator."""
    if not callable(value):
        raise refused(option, value, f"it is a function, such as {option}={example}")
    refuse_generator(f"{option}=", value)
    function: Callable[..., Any] = value
    return function


def refuse_generator(what: str, function: Any) -> None:
    """Refuse a function with `yield`: calling it runs none of it, and it does not have one result."""
    called = getattr(type(function), "__call__", None)  # noqa: B004  # it may be an object with such a method
    for one in (function, called):
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            name = getattr(function, "__qualname__", None) or type_name(function)
            raise Misuse(
                f"{what} {name} is a generator (it has a `yield`), and has to be a function with one result. To hand "
                'on values while it runs, use everstep.stream: `everstep.stream("tokens").append(token)`.'
            )


def checked_kwargs(value: Any) -> dict[str, Any]:
    """Return a workflow's arguments by their names."""
    if value is None:
        return {}
    given = attempted(dict, value) if attempted(isinstance, value, Mapping) is True else None
    if type(given) is not dict or not all(type(name) is str for name in given):
        raise refused("kwargs", value, 'it is a dict of arguments by name, such as kwargs={"topic": "tides"}')
    return given


def checked_tags(value: Any) -> dict[str, str] | None:
    """Return tags: texts by name."""
    if value is None:
        return None
    if not is_a(value, dict):
        raise refused("tags", value, 'it is a dict of texts, such as tags={"customer": "17"}')
    for text in (text for pair in dict.items(value) for text in pair):
        if not (is_a(text, str) and is_encodable(text)):
            raise refused("tags", text, 'names and values of tags are texts, such as tags={"customer": "17"}')
    return {str.__str__(name): str.__str__(one) for name, one in dict.items(value)}


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names of options that do not exist."""
    listed = sorted(known)
    for one in given:
        if one not in listed:
            raise Misuse(f"{what} has no option {one}=. It has: {', '.join(listed)}.")


def refuse_names(what: str, given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that are no options: they may be meant for the workflow."""
    for name in given:
        raise Misuse(
            f"{what} has no option {name}=. An argument of the workflow is given by its place, or by its name in "
            f'kwargs={{"{name}": …}}.'
        )
