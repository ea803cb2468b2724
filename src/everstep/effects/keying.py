"""`key=`: a user's own key for an action, made from the arguments of the call."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from string import Formatter
from typing import Any, Final

from everstep.codec import Arguments, Signature
from everstep.errors import Misuse
from everstep.model.ids import checked_key
from everstep.model.options import checked_text
from everstep.model.untrusted import is_a

UNORDERED: Final = (set, frozenset)


class KeyMaker:
    """Makes a step's key from its arguments: by a format string over its parameters, or by a function of them."""

    def __init__(self, declared: str | Callable[..., str], function: Callable[..., Any], step: str) -> None:
        self._declared = declared
        self._step = step
        if is_a(declared, str):
            _check_fields(checked_text("key", declared), function, step)
        elif not callable(declared):
            raise Misuse(
                f"key= of {step} is a {type(declared).__name__}. It is a text such as 'invoice:{{invoice.id}}', or a "
                "function of the step's arguments that returns one."
            )
        elif inspect.iscoroutinefunction(declared):
            raise Misuse(f"key= of {step} is `async`. It is computed by workflow code, so make it a plain function.")

    def make(self, signature: "Signature", arguments: "Arguments") -> str:
        """Return the key of a call. The arguments are those of the body, so a replay makes the same key."""
        if isinstance(self._declared, str):
            given = signature.bound(arguments.args, arguments.kwargs)
            return checked_key(_KeyFormatter(self._step, signature.live).vformat(self._declared, (), given), self._step)
        return checked_key(self._declared(*arguments.args, **arguments.kwargs), self._step)


class _KeyFormatter(Formatter):
    """Formats a key, and refuses parts that do not identify anything."""

    def __init__(self, step: str, live: frozenset[str]) -> None:
        self._step = step
        self._live = live

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        if key in self._live:
            raise Misuse(f"The key of {self._step} uses {key}, which is handed through and not stored (`Live`).")
        if key not in kwargs:
            raise Misuse(f"The key of {self._step} uses {key}, which this call of it does not have.")
        return kwargs[str(key)]

    def format_field(self, value: Any, format_spec: str) -> str:
        kind: Any = type(value)
        if value is None or value == "":
            raise Misuse(f"The key of {self._step} has a part that is {value!r}, which does not name anything.")
        if kind.__repr__ is object.__repr__ and kind.__str__ is object.__str__ and kind.__format__ is object.__format__:
            raise Misuse(f"The key of {self._step} has a part of type {kind.__name__}, whose text is its address.")
        if (unordered := _unordered_in(value)) is not None:
            raise Misuse(f"The key of {self._step} has a part that is a {unordered} or has one: it has no order.")
        return str(super().format_field(value, format_spec))


def _unordered_in(value: Any, depth: int = 8) -> str | None:
    """Return the type of a set in a value: its text differs in every process."""
    if isinstance(value, UNORDERED):
        return type(value).__name__
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        inside = value
    elif is_dataclass(value):
        inside = vars(value).values() if hasattr(value, "__dict__") else ()
    found = (_unordered_in(one, depth - 1) for one in inside) if depth > 0 else iter(())
    return next((one for one in found if one is not None), None)


def _check_fields(declared: str, function: Callable[..., Any], step: str) -> None:
    """Refuse a wrong format string at its declaration: its form, or a name that is no parameter."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(declared) if name is not None]
    except ValueError as error:
        raise Misuse(f"key={declared!r} of {step} is no format string: {error}.") from None
    names = [field.partition(".")[0].partition("[")[0] for field in fields]
    if not names:
        raise Misuse(
            f"key={declared!r} of {step} is the same for all arguments. Name what the action is about: "
            "key='invoice:{invoice.id}'."
        )
    if any(name == "" or name.isdigit() for name in names):
        raise Misuse(f"key={declared!r} of {step}: name the parameters, as in '{{invoice.id}}'.")
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions in C do not say what they take
        return
    if unknown := [name for name in names if name not in known]:
        raise Misuse(f"key={declared!r} of {step}: it has no parameter {unknown[0]}. It has: {', '.join(known)}.")
