"""The signature of a function: what its arguments and its result may hold, and one normal form for each call of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
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
"""`Live[Client]`: the argument is passed through as it is, and not stored. Type checkers see plain `Client`."""

_UNLIMITED: Final = 1 << 30


class _Seen:
    """The result of inspecting a function."""

    def __init__(self, function: Callable[..., Any], *, is_method: bool) -> None:
        self.signature: inspect.Signature | None = None
        self.arguments = self.result = ANY
        self.live: frozenset[str] = frozenset()
        self.live_positions = frozenset({0}) if is_method else frozenset()
        self.spread_is_live = False
        self.has_live = is_method
        self.annotations: dict[str, Any] = {"return": Any}
        self.positional: tuple[str, ...] = ()
        self.only_positional = 0
        self.least, self.most = 0, _UNLIMITED
        try:
            self.signature = inspected(function)
        except (TypeError, ValueError):  # some functions in C do not say what they take
            return
        self._look(self.signature, names_around_function(_underlying(function)), is_method=is_method)

    def _look(self, signature: "inspect.Signature", names: Names, *, is_method: bool) -> None:
        live: set[str] = set()
        positional: list[str] = []
        tables = []
        for parameter in signature.parameters.values():
            annotation = _annotation(parameter.annotation, names)
            self.annotations[parameter.name] = annotation
            if _is_live(annotation):
                live.add(parameter.name)
                self.spread_is_live |= parameter.kind is parameter.VAR_POSITIONAL
            else:
                tables.append(types_around(annotation, names))
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                positional.append(parameter.name)
                self.only_positional += parameter.kind is parameter.POSITIONAL_ONLY
        required = [p for p in signature.parameters.values() if p.default is p.empty]
        self.least = sum(p.name in positional for p in required)
        if any(p.kind is p.KEYWORD_ONLY for p in required):
            self.least = _UNLIMITED  # no call without keywords can be right
        spreads = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        self.most = _UNLIMITED if spreads else len(positional)
        self.positional = tuple(positional)
        self.live = frozenset(live)
        self.live_positions = frozenset(
            index for index, name in enumerate(positional) if name in live or (is_method and index == 0)
        )
        self.has_live = bool(live or self.live_positions or self.spread_is_live)
        for table in tables:
            self.arguments = self.arguments | table if self.arguments.classes else table
        self.annotations["return"] = _annotation(signature.return_annotation, names)
        self.result = types_around(self.annotations["return"], names)


class Signature:
    """What a function takes and returns. It is inspected at the first use, when all names that it uses exist."""

    def __init__(self, function: Callable[..., Any], *, is_method: bool = False) -> None:
        self.function: Final = function
        self.is_method: Final = is_method

    @cached_property
    def _seen(self) -> _Seen:
        return _Seen(self.function, is_method=self.is_method)

    @cached_property
    def arguments(self) -> Types:
        """The classes that arguments may hold."""
        return self._seen.arguments

    @cached_property
    def result(self) -> Types:
        """The classes that the result may hold."""
        return self._seen.result

    @cached_property
    def annotations(self) -> dict[str, Any]:
        """The resolved annotations by parameter, and of the result as `return`. `Any` where there is none."""
        return self._seen.annotations

    @cached_property
    def live(self) -> frozenset[str]:
        """The names of the `Live` parameters."""
        return self._seen.live

    @cached_property
    def live_positions(self) -> frozenset[int]:
        """The positions of the `Live` parameters; a method's receiver is one of them."""
        return self._seen.live_positions

    @cached_property
    def has_live(self) -> bool:
        """Whether any parameter is `Live`."""
        return self._seen.has_live

    @cached_property
    def least(self) -> int:
        """The least number of positional arguments of a call without keywords."""
        return self._seen.least

    @cached_property
    def most(self) -> int:
        """The greatest number of positional arguments."""
        return self._seen.most

    def with_types(self, arguments: Types, result: Types) -> "Signature":
        """Return the same signature for a call whose arguments and result may hold other classes."""
        other = Signature(self.function, is_method=self.is_method)
        other.__dict__.update(_seen=self._seen, arguments=arguments, result=result)
        return other

    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the normal form of a call: by position where possible, the rest by name and sorted.

        Raises `TypeError` for a call that the function would not accept.
        """
        if not kwargs and self.least <= len(args) <= self.most:
            return args, kwargs
        rest = dict(kwargs)
        placed = list(args)
        if len(args) >= self._seen.only_positional:
            for name in self._seen.positional[len(args) :]:
                if name not in rest:
                    break
                placed.append(rest.pop(name))
        if (rest or not self.least <= len(placed) <= self.most) and (wrong := self._mistake(len(placed), rest)):
            name = getattr(self.function, "__qualname__", None) or type(self.function).__qualname__
            raise TypeError(f"{name}() {wrong}")
        return tuple(placed), {name: rest[name] for name in sorted(rest)}

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by the names of the parameters, with the defaults of the missing ones."""
        if self._seen.signature is None:
            return dict(kwargs)
        bound = self._seen.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _mistake(self, placed: int, named: dict[str, Any]) -> str:
        """Return what is wrong with a call, or an empty text. `inspect` itself is wrong about some calls before
        3.13.
        """
        if self._seen.signature is None:
            return ""
        if placed > self.most:
            return f"takes at most {self.most} positional arguments but {placed} were given"
        parameters = self._seen.signature.parameters.values()
        takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for name in named:
            if name in by_name and name in self._seen.positional[:placed]:
                return f"got multiple values for argument {name!r}"
            if name not in by_name and not takes_any_name:
                return f"got an unexpected keyword argument {name!r}"
        given = {*self._seen.positional[:placed], *(named.keys() & by_name)}
        for p in parameters:
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given:
                is_method = ". A workflow is a function and not a method: write it outside of the class"
                return f"is missing the required argument {p.name!r}{is_method if p.name == 'self' else ''}"
        return ""

    def declared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, str, Any]]:
        """Yield each argument of a call: its place or name in the call, its parameter, and what that is declared as."""
        seen = self._seen
        spread, named = self._spreads
        for place in range(len(args)):
            name = seen.positional[place] if place < len(seen.positional) else spread
            yield place, name, seen.annotations.get(name, Any)
        for name in kwargs:
            yield name, name, seen.annotations.get(name if name in seen.annotations else named, Any)

    def may_be_none(self, name: str) -> bool:
        """Tell whether a parameter is None if it is not given, whatever it is declared as."""
        signature = self._seen.signature
        return signature is not None and name in signature.parameters and signature.parameters[name].default is None

    @cached_property
    def _spreads(self) -> tuple[str, str]:
        """The names of `*arguments` and `**arguments`, or empty texts."""
        parameters = self._seen.signature.parameters.values() if self._seen.signature is not None else ()
        kinds = {one.kind.name: one.name for one in parameters}
        return kinds.get("VAR_POSITIONAL", ""), kinds.get("VAR_KEYWORD", "")

    def is_live_position(self, index: int) -> bool:
        """Return True if the positional argument at this position is `Live`."""
        return index in self.live_positions or (self._seen.spread_is_live and index >= len(self._seen.positional))

    def is_live_name(self, name: str) -> bool:
        """Return True if the argument of this name is `Live`, also one that `**names: Live[…]` takes."""
        if name in self.live:
            return True
        return bool(self.live) and name not in self.annotations and self._names_are_live()

    def _names_are_live(self) -> bool:
        assert self._seen.signature is not None
        return any(p.kind is p.VAR_KEYWORD and p.name in self.live for p in self._seen.signature.parameters.values())


def inspected(function: Callable[..., Any]) -> "inspect.Signature":
    """Return what a function takes, without looking up the names in its annotations."""
    import inspect
    import sys

    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _underlying(function: Any) -> Callable[..., Any]:
    """Return the function that has the annotations: beneath partials, bound methods, wrappers and objects."""
    import inspect

    for _ in range(100):  # a limit, in case wrappers form a cycle
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
