"""The closed tables of classes that a payload may name. A stored name is only ever a key into them."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, TypeVar, overload

from everstep.codec.annotations import Names, classes_in
from everstep.codec.kinds import Kind, kind_of
from everstep.errors import Misuse
from everstep.model.options import checked_function
from everstep.model.untrusted import is_a, qualified_name

C = TypeVar("C", bound=type)


class Types:
    """The classes that a payload may name in addition to the built-in and the registered ones, found in annotations."""

    __slots__ = ("by_name", "by_type", "classes", "is_loose")

    def __init__(self, classes: Iterable[type] = (), *, is_loose: bool = False) -> None:
        self.is_loose: Final = is_loose
        """Instances of other classes become plain data; the receiver makes them what it declares."""
        self.classes: Final = tuple(dict.fromkeys(classes))
        self.by_type: Final[dict[type, tuple[str, Kind]]] = {}
        self.by_name: Final[dict[str, Kind]] = {}
        short = [cls.__qualname__ for cls in self.classes]
        for cls in self.classes:
            kind = kind_of(cls)
            assert kind is not None, cls
            # The module is part of the name only where it must be, so that moving a class does not make its data
            # unreadable.
            name = cls.__qualname__ if short.count(cls.__qualname__) == 1 else f"{cls.__module__}:{cls.__qualname__}"
            if name not in self.by_name:
                self.by_name[name] = kind
                self.by_type[cls] = (name, kind)

    def __or__(self, other: "Types") -> "Types":
        """Return the table with the classes of both."""
        return self if self is other or not other.classes or self.is_loose else _union(self, other)

    def __repr__(self) -> str:
        return f"Types({', '.join(self.by_name)})"


@lru_cache(maxsize=4096)
def _union(left: Types, right: Types) -> Types:
    return Types((*left.classes, *right.classes))


ANY: Final = Types()
PLAIN: Final = Types(is_loose=True)
"""For what is sent to a receiver that has types of its own, or none."""


def _is_storable(cls: type) -> bool:
    return kind_of(cls) is not None


def types_around(annotation: object, names: Names) -> Types:
    """Return the table of an annotation, with the names that its quoted parts may use."""
    found = classes_in(annotation, names, _is_storable)
    return Types(found) if found else ANY


@lru_cache(maxsize=4096)
def _cached_types_of(annotation: object) -> Types:
    return types_around(annotation, {})


def types_of(annotation: object) -> Types:
    """Return the table of the classes that are reachable from an annotation."""
    try:
        return _cached_types_of(annotation)
    except TypeError:  # not hashable, such as Annotated[int, []]
        return types_around(annotation, {})


class Registered:
    """A registered class: its kind and, computed when first needed, the classes that its own fields may hold."""

    def __init__(self, name: str, kind: Kind, has_own_codec: bool) -> None:
        self.name: Final = name
        self.kind: Final = kind
        self.has_own_codec: Final = has_own_codec
        self._inner: Types | None = None

    @property
    def inner(self) -> Types:
        """The classes that the fields may hold."""
        if self._inner is None:
            self._inner = ANY if self.has_own_codec else types_of(self.kind.cls)
        return self._inner


registered_by_type: Final[dict[type, Registered]] = {}
registered_by_name: Final[dict[str, Registered]] = {}


@overload
def register(cls: C, /) -> C: ...


@overload
def register(
    cls: C, /, *, encode: Callable[[Any], object] | None = None, decode: Callable[[Any], object] | None = None
) -> C: ...


@overload
def register(
    *, encode: Callable[[Any], object] | None = None, decode: Callable[[Any], object] | None = None
) -> Callable[[C], C]: ...


def register(
    cls: Any = None,
    /,
    *,
    encode: Callable[[Any], object] | None = None,
    decode: Callable[[Any], object] | None = None,
) -> Any:
    """Let instances of a class, or an exception, come back as themselves wherever they appear.

    `encode(value)` returns something restorable and `decode` makes the value from it. Dataclasses, msgspec and
    pydantic models, attrs classes, enumerations, named tuples and exceptions need neither. Also a decorator.
    """
    if cls is None:
        return lambda decorated: register(decorated, encode=encode, decode=decode)
    if not is_a(cls, type):
        raise Misuse(f"everstep.register takes a class, not {qualified_name(cls)}.")
    for option, given in (("encode", encode), ("decode", decode)):
        if given is not None:
            checked_function(option, given, "a_function_of_one_value")
    if (encode is None) != (decode is None):
        raise Misuse(f"everstep.register({cls.__qualname__}): give both encode= and decode=, or neither.")
    kind = Kind(cls, encode, decode, False) if encode is not None and decode is not None else kind_of(cls)
    if kind is None and issubclass(cls, BaseException):
        kind = Kind(cls, _by_its_arguments, _by_its_arguments, False)
    if kind is None:
        raise Misuse(
            f"everstep.register({cls.__qualname__}): how its instances are stored cannot be known. "
            "Give encode= (returns something restorable) and decode= (makes the instance from it)."
        )
    _enter(Registered(cls.__qualname__, kind, has_own_codec=encode is not None))
    return cls


def _by_its_arguments(error: Any) -> Any:  # pragma: no cover - exceptions are stored by everstep.codec.exceptions
    raise AssertionError("an exception is stored by its arguments and attributes")


def _enter(entry: Registered) -> None:
    cls = entry.kind.cls
    before = registered_by_name.get(entry.name)
    if before is not None and before.kind.cls is not cls:
        if before.kind.cls.__module__ != cls.__module__:
            raise Misuse(
                f"Two classes named {entry.name} are registered, in {before.kind.cls.__module__} and "
                f"{cls.__module__}. Stored data names them without their module, so rename one."
            )
        del registered_by_type[before.kind.cls]  # the same class, defined again by a reload
    registered_by_name[entry.name] = entry
    registered_by_type[cls] = entry
