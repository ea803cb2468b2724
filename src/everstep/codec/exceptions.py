"""Exceptions to facts and back: built-in, Everstep's, registered and nearby ones as themselves, others as `StepError`.

An exception is rebuilt without its class's own constructor, whose parameters are rarely the exception's `args`, and
without its properties: no code of the class gets stored data.
"""

import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from everstep import errors
from everstep.codec import nearby
from everstep.codec.tables import registered_by_name, registered_by_type
from everstep.errors import Misuse, StepError
from everstep.model.untrusted import (
    attempted,
    bases_of,
    cause_of,
    context_of,
    is_a,
    members_of,
    name_of,
    plain,
    qualified_name,
    qualified_name_of,
    text_of,
    traceback_of,
    type_name,
)

Facts = dict[str, Any]

TRACEBACK_MAX: Final = 8_000
NOTES_MAX: Final = 100
LEVELS_MAX: Final = 16
"""The depth to which causes, members of groups, and exceptions in arguments and attributes are followed."""
ERRORS_MAX: Final = 5_000
"""The maximum number of exceptions that are kept with one, itself included."""
MEMBERS_MAX: Final = 1_000
"""The maximum number of members of a group that are kept. A note says how many there were."""
TRACEBACKS_MAX: Final = 100
LOST_MAX: Final = 100
"""The maximum number of attributes of which it is kept that they could not be stored."""
PARTS_MAX: Final = 200_000
"""The maximum number of parts of the arguments and attributes of an exception, and of those kept with it."""
VALUE_DEPTH_MAX: Final = 33
"""The maximum depth of an argument or an attribute, which leaves room for the exceptions around it."""
SIZED: Final = (list, dict, tuple, set, frozenset)
_VALUES: Final = ("args", "state", "encoded")
"""The facts with a user's values."""

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
"""Common ones of the standard library. Their modules are imported only when such an exception is decoded."""

# The attributes of exceptions themselves: a class may define properties of the same names.
_ARGS: Final = BaseException.__dict__["args"].__get__
_DICT: Final = BaseException.__dict__["__dict__"].__get__
_SUPPRESS: Final = BaseException.__dict__["__suppress_context__"].__get__
_MESSAGE: Final = BaseExceptionGroup.__dict__["message"].__get__
_SET_CAUSE: Final = BaseException.__dict__["__cause__"].__set__
_SET_CONTEXT: Final = BaseException.__dict__["__context__"].__set__
_SET_SUPPRESS: Final = BaseException.__dict__["__suppress_context__"].__set__

_HIDDEN: Final = {
    ImportError: ("name", "path"),
    NameError: ("name",),
    AttributeError: ("name",),
}
"""Attributes that Python keeps outside an exception's `__dict__` and its `args`."""


def origin_of(cls: type) -> str:
    """Return the name of the table that knows an exception class, or an empty text."""
    if attempted(registered_by_type.__contains__, cls, default=False):  # a metaclass may refuse to be hashed
        return "registered"
    name = name_of(cls)
    if _BUILTIN.get(name) is cls:
        return "builtin"
    if _EVERSTEP.get(name) is cls:
        return "everstep"
    module = sys.modules.get(_STANDARD.get(name, ""))
    return "standard" if module is not None and getattr(module, name, None) is cls else ""


def _near(error: BaseException) -> tuple[type, tuple[str, str]] | None:
    """Return the class that a nearby exception comes back as, and its place: its own, or the nearest base that has one.

    A class that was made at run time, such as those of botocore, has no place; a base of it has.
    """
    around = nearby.current()
    if not around.modules:
        return None
    for cls in bases_of(type(error)):
        if origin_of(cls):
            return None
        if (place := around.name_of(cls)) is not None:
            return cls, place
    return None


def _remedy(cls: type) -> str:
    """Return what to write so that an exception comes back as itself."""
    module = attempted(cls.__dict__.__getitem__, "__module__", default="")
    name = qualified_name_of(cls)
    if "<locals>" in name:
        return f"defined in a function; to catch it as itself, define {name_of(cls)} in a module"
    shown = f"{plain(module)}.{name}" if type(module) is str and module not in ("", "__main__") else name
    return f"to catch it as itself, declare the step with raises=({shown},), or use everstep.register({shown})"


def comes_back(error: BaseException) -> bool:
    """Return True if an exception is restored as itself."""
    return origin_of(type(error)) != ""


class Written(NamedTuple):
    """A part of an exception that is already written: a JSON value, its type tree, and the original."""

    value: Any
    tree: Any
    given: Any


Write = Callable[[object, int, "Describer"], tuple[Any, Any]]
"""Returns a value as JSON value and type tree, at most this deep. Raises if it cannot be stored."""


class Describer:
    """Turns an exception, and every one that it leads to, into facts: in one walk, in which each is described once.

    It leads to causes, members, and exceptions within arguments and attributes. One that is met again is written
    without its causes, and with the exceptions that it holds as texts. So cycles end, and an exception that wraps
    another in two ways takes at most twice its room at any depth.
    """

    def __init__(self, write: Write, depth: int, *, with_traceback: bool) -> None:
        self._write = write
        self._depth = depth
        self._tracebacks = TRACEBACKS_MAX if with_traceback else 0
        self._level = 0
        self._errors = 0
        self._parts = 0
        self._is_too_large = False
        self._again = 0
        self._open: set[int] = set()
        self._seen: set[int] = set()
        self._texts: dict[int, tuple[BaseException, str]] = {}
        self._made: dict[int, tuple[Facts, BaseException]] = {}

    def facts(self, error: BaseException) -> Facts:
        """Return the facts that restore an exception and show it."""
        self._errors += 1
        key, again = id(error), self._again
        is_first = key not in self._seen
        self._seen.add(key)
        if is_first:
            self._open.add(key)
        else:
            self._again += 1
        try:
            return self._facts(error)
        finally:
            self._again = again
            if is_first:
                self._open.discard(key)

    def held(self, error: BaseException, depth: int) -> Facts | str:
        """Return the facts of an exception within an argument or attribute, or a text if they would never end."""
        if id(error) in self._open:
            return f"<{qualified_name(error)}: an error that holds itself>"
        if self._again or not self._has_room:
            return self._text(error)
        kept = self._level, self._depth, self._tracebacks
        self._level, self._depth, self._tracebacks = self._level + 1, depth, 0
        try:
            return self.facts(error)
        finally:
            self._level, self._depth, self._tracebacks = kept

    def takes(self, value: object) -> bool:
        """Return True if there is room for the parts of a value, and count them."""
        parts = len(value) if type(value) in SIZED else 1  # type: ignore[arg-type]
        if self._parts + parts > PARTS_MAX:
            self._is_too_large = True
            return False
        self._parts += parts
        return True

    def _text(self, error: BaseException) -> str:
        """Return an exception's text, which is read once. (The exception is kept alive, so that its id is not
        reused.)
        """
        if id(error) not in self._texts:
            kept = attempted(_attributes_of, error, default={}).get("__everstep_text__")
            self._texts[id(error)] = error, kept if type(kept) is str else text_of(error)
        return self._texts[id(error)][1]

    @property
    def _has_room(self) -> bool:
        return self._level < LEVELS_MAX and self._errors < ERRORS_MAX

    def _facts(self, error: BaseException) -> Facts:
        facts: Facts = {"type": qualified_name(error), "message": self._text(error)}
        if self._tracebacks > 0:
            self._tracebacks -= 1
            facts["traceback"] = traceback_text(error, TRACEBACK_MAX if self._level == 0 else TRACEBACK_MAX // 4)
        self._add_relatives(facts, error)
        restorable = attempted(self._restorable, error, facts)
        made = None
        if restorable is not None:
            # An exception that cannot be rebuilt now could not be rebuilt later.
            restored_by = {name: _as_given(part) if name in _VALUES else part for name, part in restorable.items()}
            made = attempted(error_from, facts | restored_by, self._member)
        if made is None:
            if nearby.current().modules:
                facts["remedy"] = _remedy(type(error))
            made = error_from(facts, self._member)
        else:
            facts |= restorable
            if restorable["from"] == "nearby":
                self._add_what_is_lost(facts, error, made)
        self._made[id(facts)] = facts, made
        return facts

    def _add_what_is_lost(self, facts: Facts, error: BaseException, made: BaseException) -> None:
        """Note what a nearby exception comes back without: see `NotStored`. Its text is kept if it is another one."""
        lost = [name for name in attempted(_attributes, error, default={}) if name not in facts.get("state", {})]
        lost = sorted(plain(name) for name in lost if type(name) is str and not name.startswith("__"))[:LOST_MAX]
        if lost:
            facts["lost"] = lost
            _put_placeholders(made, lost)
        if type(made) is not type(error):
            note = f"Everstep: it was a {qualified_name(error)}, which is not in any module."
            facts["notes"] = [*facts.get("notes", []), note]
            _DICT(made)["__notes__"] = facts["notes"]
        if facts["message"] != text_of(made):
            facts["text"] = facts["message"]

    def _member(self, facts: Facts) -> BaseException:
        return self._made[id(facts)][1]

    def _relative(self, error: BaseException, levels: int) -> Facts:
        """Return the facts of a cause or a member, `levels` deeper."""
        self._level, self._depth = self._level + 1, self._depth - levels
        try:
            return self.facts(error)
        finally:
            self._level, self._depth = self._level - 1, self._depth + levels

    def _add_relatives(self, facts: Facts, error: BaseException) -> None:
        notes = attempted(_attributes_of, error, default={}).get("__notes__")
        if type(notes) is list and notes:
            facts["notes"] = [text_of(note) for note in notes[:NOTES_MAX]]
        if not self._has_room:
            return
        cause, context, is_suppressed = cause_of(error), context_of(error), _SUPPRESS(error)
        if cause is not None and id(cause) not in self._seen:
            facts["cause"] = self._relative(cause, 1)
        elif context is not None and not is_suppressed and id(context) not in self._seen:
            facts["context"] = self._relative(context, 1)
        if is_suppressed and cause is None:
            facts["suppress"] = True

    def _restorable(self, error: BaseException, facts: Facts) -> Facts | None:
        cls = type(error)
        more: Facts = {"from": origin_of(cls)}
        if not more["from"]:
            found = _near(error)
            if found is None:
                return None
            more = {"from": "nearby", "module": found[1][0], "class": found[1][1]}
        registered = registered_by_type.get(cls)
        if registered is not None and registered.has_own_codec:
            return self._by_own_codec(error, registered.kind.dump)
        if is_a(error, BaseExceptionGroup):
            more["args"] = [plain(_MESSAGE(error))]
            more["members"] = self._members(error, facts)
            if not more["members"]:
                return None
        else:
            more["args"] = [self._argument(argument) for argument in _arguments(error)]
        state = {
            name: written
            for name, value in _attributes(error).items()
            if type(name) is str and not name.startswith("__") and (written := self._written(value)) is not None
        }
        if state:
            more["state"] = state
        return more

    def _members(self, error: BaseException, facts: Facts) -> list[Facts]:
        members = members_of(error)
        found: list[Facts] = []
        for member in members[:MEMBERS_MAX]:
            if not self._has_room or self._again > 1:
                break
            found.append(self._relative(member, 2))
        if found and len(found) < len(members):
            note = f"Everstep has kept the first {len(found)} of the {len(members)} members of this group."
            facts["notes"] = [*facts.get("notes", []), note]
        return found

    def _by_own_codec(self, error: BaseException, dump: Callable[[Any], Any]) -> Facts | None:
        encoded = self._written(dump(error))  # a user's encode= may raise anything: the error is stored as text then
        return {"from": "registered", "encoded": encoded} if encoded is not None else None

    def _argument(self, argument: object) -> "Written | str":
        self._is_too_large = False
        written = self._written(argument)
        if written is not None:
            return written
        if self._is_too_large:
            return f"<{qualified_name(argument)}: too large to be kept with an error>"
        return text_of(argument, by=repr)

    def _written(self, value: object) -> Written | None:
        written: tuple[Any, Any] | None = attempted(self._write, value, min(self._depth - 2, VALUE_DEPTH_MAX), self)
        return None if written is None else Written(written[0], written[1], value)


def _as_given(part: Any) -> Any:
    """Return a part of some facts with the originals in place of what is written."""
    if type(part) is Written:
        return part.given
    if type(part) is list:
        return [_as_given(one) for one in part]
    return {name: _as_given(one) for name, one in part.items()} if type(part) is dict else part


def traceback_text(error: BaseException, most: int) -> str:
    """Return the traceback as text: file, line and function, the innermost last. A restored exception remembers it."""
    import traceback

    earlier = attempted(_attributes_of, error, default={}).get("__everstep_traceback__", "")
    frames = traceback_of(error)
    text = "".join(attempted(traceback.format_tb, frames, -40, default=[])) if frames else ""
    if type(earlier) is str and earlier:
        text = f"{earlier}\n{text}" if text else earlier
    return plain(text if len(text) <= most else f"…\n{text[-most:]}")


def _arguments(error: BaseException) -> tuple[Any, ...]:
    """Return the arguments that restore an exception. `OSError` keeps its file names outside `args`."""
    if is_a(error, OSError):
        reduced = OSError.__reduce__(error)
        if isinstance(reduced, tuple) and isinstance(reduced[1], tuple):
            return reduced[1]
    arguments: tuple[Any, ...] = _ARGS(error)
    return arguments


def _attributes_of(error: BaseException) -> dict[str, Any]:
    """Return an exception's own attributes, read without its class's code."""
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
    """Return the nearest built-in class, whose constructor is known to do nothing but make an exception."""
    return next(base for base in cls.__mro__ if _BUILTIN.get(base.__name__) is base)


def error_from(facts: Any, inner: Callable[[Any], BaseException] | None = None) -> BaseException:
    """Return the exception of some facts, its causes and members by `inner`. Raises anything if they are damaged."""
    inner = inner or error_from
    if type(facts) is not dict:
        raise ValueError("not the facts of an exception")
    origin = facts.get("from")
    if origin is None:
        error: BaseException = _step_error(facts, facts.get("remedy", ""))
    elif origin == "nearby":
        error = _nearby_error(facts, inner)
    elif "encoded" in facts:
        error = registered_by_name[facts["type"]].kind.load(facts["encoded"])
        if not isinstance(error, BaseException):
            raise ValueError("decode= did not return an exception")
    else:
        error = _put_together(_class_named(origin, facts["type"]), facts, inner)
    if "notes" in facts:
        _DICT(error)["__notes__"] = [_checked_text(note) for note in facts["notes"]]
    if "cause" in facts:
        _SET_CAUSE(error, inner(facts["cause"]))
    if "context" in facts:
        _SET_CONTEXT(error, inner(facts["context"]))
    if "suppress" in facts:
        _SET_SUPPRESS(error, True)
    if traceback := facts.get("traceback"):
        _DICT(error)["__everstep_traceback__"] = _checked_text(traceback)
    return error


def _step_error(facts: Facts, remedy: Any) -> StepError:
    return StepError(_checked_text(facts["type"]), _checked_text(facts["message"]), _checked_text(remedy))


def _nearby_error(facts: Facts, inner: Callable[[Any], BaseException]) -> BaseException:
    """Return an exception of a class that was near when it was raised; a `StepError` if it is not near here."""
    module, name = _checked_text(facts["module"]), _checked_text(facts["class"])
    cls = nearby.current().find(module, name)
    if cls is None:
        shown = f"{module}.{name}" if module else name
        remedy = (
            f"{shown} came back as itself where it was raised; here no module of the step or the workflow has imported "
            f"it: import it there, or use everstep.register({shown})"
        )
        return _step_error(facts, remedy)
    error = _put_together(cls, facts, inner)
    _put_placeholders(error, facts.get("lost", ()))
    if "text" in facts:
        _DICT(error)["__everstep_text__"] = _checked_text(facts["text"])
    return error


def _put_together(cls: type[BaseException], facts: Facts, inner: Callable[[Any], BaseException]) -> BaseException:
    base: Any = _built_in_base(cls)
    arguments = list(facts["args"])
    if issubclass(cls, BaseExceptionGroup):
        arguments = [_checked_text(arguments[0]), [inner(member) for member in facts["members"]]]
    error: BaseException = base.__new__(cls, *arguments)
    if not isinstance(error, cls):
        raise ValueError("the arguments are those of another exception")
    base.__init__(error, *arguments)
    for name, value in facts.get("state", {}).items():
        if name.startswith("__"):
            raise ValueError("not an attribute of an exception")
        _put(error, name, value)
    return error


class NotStored:
    """Takes the place of an attribute of an exception that cannot be stored, such as a response of an HTTP client.

    It can be formatted, because the exception's text may need it. Whoever uses it otherwise is told what it is.
    """

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> "NotStored":
        if name.startswith("__"):
            raise AttributeError(name)
        return NotStored(f"{self._name}.{name}")

    def _refuse(self, *_: object) -> Any:
        raise Misuse(
            f"{self._name} is not stored, because it cannot be: an exception reaches the workflow from the history. "
            "Read it in the step, and return it or put it into the exception's arguments."
        )

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __call__ = __getitem__ = __iter__ = __len__ = __contains__ = __int__ = __float__ = __add__ = __setattr__ = _refuse

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"<{self._name} is not stored>"


def _put_placeholders(error: BaseException, lost: Any) -> None:
    for name in lost:
        if _checked_text(name).startswith("__"):
            raise ValueError("not an attribute of an exception")
        _put(error, name, NotStored(f"{type_name(error)}.{name.lstrip('_')}"))


def _put(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute of an exception without any code of its class, because the value was stored."""
    for cls, names in _HIDDEN.items():
        if name in names and is_a(error, cls):
            cls.__dict__[name].__set__(error, value)
            return
    _DICT(error)[name] = value


def _checked_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("not a text")
    return value
