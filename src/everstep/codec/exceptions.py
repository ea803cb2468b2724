"""Exceptions to facts and back: built-in, Everstep's and registered ones as themselves, others as `StepError`.

An exception is put together without its class's own constructor, whose parameters are rarely the exception's `args`.
"""

import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from everstep import errors
from everstep.codec.tables import registered_by_name, registered_by_type
from everstep.errors import StepError
from everstep.model.untrusted import (
    attempted,
    cause_of,
    context_of,
    is_a,
    members_of,
    plain,
    qualified_name,
    text_of,
    traceback_of,
)

Facts = dict[str, Any]

TRACEBACK_MAX: Final = 8_000
NOTES_MAX: Final = 100
LEVELS_MAX: Final = 16
"""How deep causes and members of groups are followed."""

_BUILTIN: Final = {
    item.__name__: item
    for item in vars(builtins).values()
    if isinstance(item, type) and issubclass(item, BaseException)
}
# `Evicted` is how the engine unwinds code. It is never an outcome, so stored data must not be able to raise it.
_EVERSTEP: Final = {
    name: item for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, errors.Error)
}
_STANDARD: Final = {
    "CancelledError": "asyncio",
    "InvalidStateError": "asyncio",
    "QueueEmpty": "asyncio",
    "QueueFull": "asyncio",
    "JSONDecodeError": "json",
    "CalledProcessError": "subprocess",
    "TimeoutExpired": "subprocess",
    "gaierror": "socket",
}
"""Common ones of the standard library. Their modules are imported when such an exception comes back, by this table."""

# The slots of exceptions themselves: a class may put properties of its own over their names.
_ARGS: Final = BaseException.__dict__["args"].__get__
_DICT: Final = BaseException.__dict__["__dict__"].__get__
_SUPPRESS: Final = BaseException.__dict__["__suppress_context__"].__get__
_MESSAGE: Final = BaseExceptionGroup.__dict__["message"].__get__

_HIDDEN: Final = {
    ImportError: ("name", "path"),
    NameError: ("name",),
    AttributeError: ("name",),
}
"""Attributes that Python keeps outside an exception's `__dict__` and its `args`."""


def origin_of(cls: type) -> str:
    """Return which table knows an exception class, or an empty text if none does."""
    if attempted(registered_by_type.__contains__, cls, default=False):  # a metaclass may refuse to be hashed
        return "registered"
    if _BUILTIN.get(cls.__name__) is cls:
        return "builtin"
    if _EVERSTEP.get(cls.__name__) is cls:
        return "everstep"
    module = sys.modules.get(_STANDARD.get(cls.__name__, ""))
    return "standard" if module is not None and getattr(module, cls.__name__, None) is cls else ""


def comes_back(error: BaseException) -> bool:
    """Tell whether an exception comes back as itself."""
    return origin_of(type(error)) != ""


def facts_of(error: BaseException, is_storable: Callable[[object], bool], *, with_traceback: bool = True) -> Facts:
    """Return an exception as a dict of what is needed to restore and to show it."""
    return _Describer(is_storable, with_traceback).facts(error, 0)


class _Describer:
    """Turns one exception, its causes and its members into facts. Each is described once, so that circles end."""

    def __init__(self, is_storable: Callable[[object], bool], with_traceback: bool) -> None:
        self._is_storable = is_storable
        self._with_traceback = with_traceback
        self._seen: set[int] = set()

    def facts(self, error: BaseException, level: int) -> Facts:
        self._seen.add(id(error))
        facts: Facts = {"type": qualified_name(error), "message": text_of(error)}
        if self._with_traceback:
            facts["traceback"] = traceback_text(error, TRACEBACK_MAX if level == 0 else TRACEBACK_MAX // 4)
        self._add_relatives(facts, error, level)
        restorable = attempted(self._restorable, error, level)
        if restorable is None:
            return facts
        whole: Facts = facts | restorable
        # What cannot be put together now could not be later.
        return whole if attempted(error_from, whole) is not None else facts

    def _add_relatives(self, facts: Facts, error: BaseException, level: int) -> None:
        notes = attempted(_attributes_of, error, default={}).get("__notes__")
        if type(notes) is list and notes:
            facts["notes"] = [text_of(note) for note in notes[:NOTES_MAX]]
        if level >= LEVELS_MAX:
            return
        cause, context, is_suppressed = cause_of(error), context_of(error), _SUPPRESS(error)
        if cause is not None and id(cause) not in self._seen:
            facts["cause"] = self.facts(cause, level + 1)
        elif context is not None and not is_suppressed and id(context) not in self._seen:
            facts["context"] = self.facts(context, level + 1)
        if is_suppressed and cause is None:
            facts["suppress"] = True

    def _restorable(self, error: BaseException, level: int) -> Facts | None:
        cls = type(error)
        origin = origin_of(cls)
        if not origin:
            return None
        registered = registered_by_type.get(cls)
        if registered is not None and registered.has_own_codec:
            return self._by_own_codec(error, registered.kind.dump)
        facts: Facts = {"from": origin}
        if is_a(error, BaseExceptionGroup):
            if level >= LEVELS_MAX:
                return None
            facts["args"] = [plain(_MESSAGE(error))]
            facts["members"] = [self.facts(member, level + 1) for member in members_of(error)]
        else:
            facts["args"] = [self._stored(argument) for argument in _arguments(error)]
        state = {
            name: value
            for name, value in _attributes(error).items()
            if type(name) is str and not name.startswith("__") and self._is_kept(value)
        }
        if state:
            facts["state"] = state
        return facts

    def _by_own_codec(self, error: BaseException, dump: Callable[[Any], Any]) -> Facts | None:
        encoded = dump(error)  # a user's encode= may raise anything, and the error is stored as text then
        return {"from": "registered", "encoded": encoded} if self._is_kept(encoded) else None

    def _stored(self, argument: object) -> object:
        return argument if self._is_kept(argument) else text_of(argument, by=repr)

    def _is_kept(self, value: object) -> bool:
        return attempted(self._is_storable, value, default=False) is True


def traceback_text(error: BaseException, most: int) -> str:
    """Return where an exception was raised: file, line and function, the innermost last. A restored one remembers."""
    import traceback

    earlier = attempted(_attributes_of, error, default={}).get("__everstep_traceback__", "")
    frames = traceback_of(error)
    text = "".join(attempted(traceback.format_tb, frames, -40, default=[])) if frames else ""
    if type(earlier) is str and earlier:
        text = f"{earlier}\n{text}" if text else earlier
    return plain(text if len(text) <= most else f"…\n{text[-most:]}")


def _arguments(error: BaseException) -> tuple[Any, ...]:
    """Return what restores an exception. `OSError` keeps its file names outside `args`."""
    if is_a(error, OSError):
        reduced = OSError.__reduce__(error)
        if isinstance(reduced, tuple) and isinstance(reduced[1], tuple):
            return reduced[1]
    arguments: tuple[Any, ...] = _ARGS(error)
    return arguments


def _attributes_of(error: BaseException) -> dict[str, Any]:
    """Return an exception's own attributes, whatever its class says that they are."""
    attributes: dict[str, Any] = dict.copy(_DICT(error))
    return attributes


def _attributes(error: BaseException) -> dict[str, Any]:
    attributes = _attributes_of(error)
    for cls, names in _HIDDEN.items():
        if is_a(error, cls):
            attributes |= {name: value for name in names if (value := cls.__dict__[name].__get__(error)) is not None}
    return attributes


def _class_named(origin: str, name: str) -> type[BaseException]:
    found: Any = None
    if origin == "builtin":
        found = _BUILTIN.get(name)
    elif origin == "everstep":
        found = _EVERSTEP.get(name)
    elif origin == "registered" and (registered := registered_by_name.get(name)) is not None:
        found = registered.kind.cls
    elif origin == "standard" and name in _STANDARD:
        found = getattr(importlib.import_module(_STANDARD[name]), name)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise ValueError("not an exception that can come back as itself")
    return found


def _built_in_base(cls: type[BaseException]) -> type[BaseException]:
    """Return the nearest built-in class, whose constructor is known to make an exception and to do nothing else."""
    return next(base for base in cls.__mro__ if _BUILTIN.get(base.__name__) is base)


def error_from(facts: Any) -> BaseException:
    """Return the exception of some facts. Raises anything if they are damaged."""
    if type(facts) is not dict:
        raise ValueError("not the facts of an exception")
    origin = facts.get("from")
    if origin is None:
        error: BaseException = StepError(_checked_text(facts["type"]), _checked_text(facts["message"]))
    elif "encoded" in facts:
        error = registered_by_name[facts["type"]].kind.load(facts["encoded"])
        if not isinstance(error, BaseException):
            raise ValueError("decode= did not return an exception")
    else:
        error = _put_together(_class_named(origin, facts["type"]), facts)
    if "notes" in facts:
        error.__notes__ = [_checked_text(note) for note in facts["notes"]]
    if "cause" in facts:
        error.__cause__ = error_from(facts["cause"])
    if "context" in facts:
        error.__context__ = error_from(facts["context"])
    if "suppress" in facts:
        error.__suppress_context__ = True
    if traceback := facts.get("traceback"):
        error.__everstep_traceback__ = _checked_text(traceback)  # type: ignore[attr-defined]
    return error


def _put_together(cls: type[BaseException], facts: Facts) -> BaseException:
    base: Any = _built_in_base(cls)
    arguments = list(facts["args"])
    if issubclass(cls, BaseExceptionGroup):
        arguments = [_checked_text(arguments[0]), [error_from(member) for member in facts["members"]]]
    error: BaseException = base.__new__(cls, *arguments)
    if not isinstance(error, cls):
        raise ValueError("the arguments are those of another exception")
    base.__init__(error, *arguments)
    for name, value in facts.get("state", {}).items():
        if name.startswith("__"):
            raise ValueError("not an attribute of an exception")
        object.__setattr__(error, name, value)
    return error


def _checked_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("not a text")
    return value
