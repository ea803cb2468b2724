"""The signature of a function: what its arguments and its result may hold, and one form for each call of it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args, get_origin

from everstep.codec.annotations import Names, names_around_function, resolved
from everstep.codec.tables import ANY, Types, types_around

if TYPE_CHECKING:
    import inspect

T = TypeVar("T")


class _LiveMark:
    def __repr__(self) -> str:
        return "live"


_LIVE: Final = _LiveMark()

Live = Annotated[T, _LIVE]
"""`Live[Client]`: the parameter is handed through as it is, and not stored. Type checkers see plain `Client`."""

_UNLIMITED: Final = 1 << 30


class Signature:
    """What a function takes and returns. It is looked at when first needed, when all names that it uses exist."""

    def __init__(self, function: Callable[..., Any], *, is_method: bool = False) -> None:
        self.function: Final = function
        self.is_method: Final = is_method

    def __new__(cls, *_: Any, **__: Any) -> "Signature":
        """Return one that is looked at with the first question."""
        return object.__new__(_Unseen)

    if TYPE_CHECKING:
        arguments: Types
        """The classes that arguments may hold."""
        result: Types
        """The classes that the result may hold."""
        live: frozenset[str]
        """The names of the parameters that are handed through."""
        annotations: dict[str, Any]
        """The resolved annotations by parameter, and of the result as `return`. What has none is `Any`."""
        live_positions: frozenset[int]
        """The places of the positional parameters that are handed through; a method's receiver is one of them."""
        has_live: bool
        """Whether anything is handed through."""
        least: int
        """The least number of positional arguments of a call without keywords."""
        most: int
        """The greatest number of positional arguments."""
        _positional: tuple[str, ...]
        _only_positional: int
        _signature: inspect.Signature | None
        _spread_is_live: bool

    def _look(self) -> None:
        import inspect

        self._set_nothing()
        try:
            self._signature = inspected(self.function)
        except (TypeError, ValueError):  # some functions in C do not say what they take
            return
        names = names_around_function(_underlying(self.function))
        live: set[str] = set()
        positional: list[str] = []
        tables = []
        for parameter in self._signature.parameters.values():
            annotation = _annotation(parameter.annotation, names)
            self.annotations[parameter.name] = annotation
            if _is_live(annotation):
                live.add(parameter.name)
                self._spread_is_live |= parameter.kind is parameter.VAR_POSITIONAL
            else:
                tables.append(types_around(annotation, names))
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                positional.append(parameter.name)
                self._only_positional += parameter.kind is parameter.POSITIONAL_ONLY
        required = [p for p in self._signature.parameters.values() if p.default is p.empty]
        self.least = sum(p.name in positional for p in required)
        if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in required):
            self.least = _UNLIMITED  # no call without keywords can be right
        spreads = any(p.kind is p.VAR_POSITIONAL for p in self._signature.parameters.values())
        self.most = _UNLIMITED if spreads else len(positional)
        self._positional = tuple(positional)
        self.live = frozenset(live)
        self.live_positions = frozenset(
            index for index, name in enumerate(positional) if name in live or (self.is_method and index == 0)
        )
        self.has_live = bool(live or self.live_positions or self._spread_is_live)
        for table in tables:
            self.arguments = self.arguments | table if self.arguments.classes else table
        self.annotations["return"] = _annotation(self._signature.return_annotation, names)
        self.result = types_around(self.annotations["return"], names)

    def _set_nothing(self) -> None:
        """Set what holds for a function of which nothing is known."""
        self._signature = None
        self.arguments = self.result = ANY
        self.live = frozenset()
        self.annotations = {"return": Any}
        self.live_positions = frozenset({0}) if self.is_method else frozenset()
        self.has_live = self.is_method
        self.least, self.most = 0, _UNLIMITED
        self._positional = ()
        self._only_positional = 0
        self._spread_is_live = False

    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the one form of a call: by position where possible, the rest by name and sorted.

        Raises `TypeError` for a call that the function would not accept.
        """
        if not kwargs and self.least <= len(args) <= self.most:
            return args, kwargs
        rest = dict(kwargs)
        placed = list(args)
        if len(args) >= self._only_positional:
            for name in self._positional[len(args) :]:
                if name not in rest:
                    break
                placed.append(rest.pop(name))
        if (rest or not self.least <= len(placed) <= self.most) and (wrong := self._mistake(len(placed), rest)):
            name = getattr(self.function, "__qualname__", None) or type(self.function).__qualname__
            raise TypeError(f"{name}() {wrong}")
        return tuple(placed), {name: rest[name] for name in sorted(rest)}

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by the names of the parameters, with the defaults of those not given."""
        if self._signature is None:
            return dict(kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _mistake(self, placed: int, named: dict[str, Any]) -> str:
        """Return what is wrong with a call, or an empty text. `inspect` itself is mistaken about some before 3.13."""
        if self._signature is None:
            return ""
        if placed > self.most:
            return f"takes at most {self.most} positional arguments but {placed} were given"
        parameters = self._signature.parameters.values()
        takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for name in named:
            if name in by_name and name in self._positional[:placed]:
                return f"got multiple values for argument {name!r}"
            if name not in by_name and not takes_any_name:
                return f"got an unexpected keyword argument {name!r}"
        given = {*self._positional[:placed], *(named.keys() & by_name)}
        for p in parameters:
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given:
                return f"is missing the required argument {p.name!r}"
        return ""

    def is_live_position(self, index: int) -> bool:
        """Tell whether the positional argument at this place is handed through."""
        return index in self.live_positions or (self._spread_is_live and index >= len(self._positional))

    def is_live_name(self, name: str) -> bool:
        """Tell whether the argument of this name is handed through, also one that `**names: Live[…]` takes."""
        if name in self.live:
            return True
        return bool(self.live) and name not in self.annotations and self._names_are_live()

    def _names_are_live(self) -> bool:
        assert self._signature is not None
        return any(p.kind is p.VAR_KEYWORD and p.name in self.live for p in self._signature.parameters.values())


class _Unseen(Signature):
    """A signature that nobody has asked about. It becomes a plain one, whose attributes cost no detour."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Looked at aside and then entered at once, for other threads may ask at the same time.
        aside = object.__new__(Signature)
        aside.__dict__.update(function=self.function, is_method=self.is_method)
        aside._look()
        self.__dict__.update(aside.__dict__)
        self.__class__ = Signature  # type: ignore[assignment]  # it has the same attributes
        return getattr(self, name)


def inspected(function: Callable[..., Any]) -> "inspect.Signature":
    """Return what a function takes, without looking up the names in its annotations."""
    import inspect
    import sys

    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _underlying(function: Any) -> Callable[..., Any]:
    """Return the function in which annotations were written: beneath partials, bound methods, wrappers, objects."""
    import inspect

    for _ in range(100):  # wrappers may be many, and never that many
        if isinstance(function, partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, type):
            function = vars(function).get("__init__", function)
            break
        elif hasattr(function, "__code__"):
            break
        else:
            function = getattr(type(function), "__call__", function)  # noqa: B004 - an object that can be called
            if not hasattr(function, "__code__"):
                break
    underlying: Callable[..., Any] = function
    return underlying


def _annotation(annotation: object, names: Names) -> Any:
    import inspect

    return Any if annotation is inspect.Parameter.empty else resolved(annotation, names)


def _is_live(annotation: object) -> bool:
    if get_origin(annotation) is Annotated:
        return any(part is _LIVE for part in get_args(annotation)[1:])
    return any(map(_is_live, get_args(annotation)))  # Live[Client] | None
