"""Plain data made into a declared type: what a person or another program sends, as what the code asks for.

A type with a pydantic model in it is pydantic's to judge, with the rules that its users know; every other type is
msgspec's, which takes what JSON can say of it and nothing that only resembles it. What is of the type already stays as
it is.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

import msgspec

from everstep.codec import arrays
from everstep.codec.annotations import classes_in, types_text
from everstep.codec.tables import registered_by_type
from everstep.codec.writer import is_plain
from everstep.errors import NotDecodable
from everstep.model.untrusted import described, is_a, raise_if_no_answer

PROBLEMS_MAX: Final = 5
"""How many wrong parts of one value an error names."""


class Converted(NamedTuple):
    """A value of the declared type."""

    value: Any
    ran_code: bool
    """Whether code of the type may have had a say: a validator, a default. Its answer may differ another time."""


def converted(value: Any, annotation: Any) -> Converted:
    """Return a value as the declared type. Raises `NotDecodable`, with the path, if a part of it cannot be that."""
    if annotation in (Any, object, None) and (annotation is not None or value is None):
        return Converted(value, ran_code=False)
    try:
        if _asks_pydantic(annotation):
            return _by_pydantic(value, annotation)
        return _by_msgspec(value, annotation)
    except _Unfit as unfit:
        raise NotDecodable(f"not a {types_text(annotation)}: {unfit}") from None


def as_declared(value: Any, annotation: Any) -> Any:
    """Return what Python code gives for a declared type, as that type. What is of the type already stays as it is.

    That is more than what JSON can say of it: an object of a subclass, a tuple for a sequence, an `int` for a `float`.
    """
    if type(value) is annotation:
        return value
    is_one = _is_one(value, get_origin(annotation) or annotation)
    try:
        made = converted(value, annotation).value
    except NotDecodable:
        if is_one and not is_a(value, dict, list, tuple, set, frozenset):
            return value
        raise
    if made is value or (type(value) is int and type(made) is float):
        return value
    if is_one and (made == value or (is_a(value, tuple, set, frozenset) and list(value) == made)):
        return value
    return made


def _is_one(value: Any, kind: Any) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a TypedDict, a protocol, `Any`: nothing is an instance of these
        return False


class _Unfit(Exception):
    """The text says what is wrong, and where."""


# -- pydantic ----------------------------------------------------------------------------------------------------------
def _asks_pydantic(annotation: Any) -> bool:
    if "pydantic" not in sys.modules:  # a type of pydantic can only be where it was imported
        return False
    try:
        return _has_pydantic(annotation)
    except TypeError:  # not hashable, such as Annotated[int, []]
        return _has_pydantic.__wrapped__(annotation)


@lru_cache(maxsize=4096)
def _has_pydantic(annotation: Any) -> bool:
    return bool(classes_in(annotation, {}, _is_pydantic)) or _is_constrained(annotation)


def _is_pydantic(cls: type) -> bool:
    """Tell whether a class is a model, or a dataclass of pydantic."""
    return "__pydantic_validator__" in vars(cls)


def _is_constrained(annotation: Any) -> bool:
    """Tell whether an annotation has a constraint that pydantic knows, such as `Annotated[int, Field(gt=0)]`."""
    if get_origin(annotation) is Annotated:
        roots = {type(one).__module__.partition(".")[0] for one in get_args(annotation)[1:]}
        if not roots.isdisjoint(("pydantic", "pydantic_core", "annotated_types")):
            return True
    return any(_is_constrained(part) for part in get_args(annotation) if not isinstance(part, list | str))


@lru_cache(maxsize=1024)
def _adapter(annotation: Any) -> Any:
    pydantic = sys.modules["pydantic"]
    try:
        return pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    except pydantic.PydanticUserError:  # a model has its own configuration
        return pydantic.TypeAdapter(annotation)


def _by_pydantic(value: Any, annotation: Any) -> Converted:
    pydantic = sys.modules["pydantic"]
    try:
        adapter = _adapter(annotation)
    except TypeError:
        adapter = _adapter.__wrapped__(annotation)
    try:
        if is_plain(value):  # as JSON, of which a strict model takes a date that is written as a text
            made = adapter.validate_json(msgspec.json.encode(value))
        else:
            made = adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise _Unfit(_problems(error)) from None
    except Exception as error:  # noqa: BLE001  # code of the user's type may raise anything
        raise_if_no_answer(error)
        raise _Unfit(f"its validation failed ({described(error)})") from None
    return Converted(made, ran_code=made is not value)


def _problems(error: Any) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = [f"{_path(one['loc'])}{one['msg']}" for one in found[:PROBLEMS_MAX]]
    if len(found) > PROBLEMS_MAX:
        told.append(f"and {len(found) - PROBLEMS_MAX} more")
    return "; ".join(told)


def _path(parts: tuple[str | int, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return f"`${path}`: " if path else ""


# -- msgspec -----------------------------------------------------------------------------------------------------------
def _by_msgspec(value: Any, annotation: Any) -> Converted:
    ran: list[type] = []

    def make(cls: Any, given: Any) -> Any:
        made, ran_code = _made(cls, given)
        if ran_code:
            ran.append(cls)
        return made

    try:
        return Converted(msgspec.convert(value, annotation, strict=True, str_keys=True, dec_hook=make), bool(ran))
    except msgspec.ValidationError as refused:
        raise _Unfit(str(refused)) from None
    except TypeError:  # msgspec does not know the type: a union of several classes, or something else
        return _by_parts(value, annotation)
    except Exception as error:  # noqa: BLE001  # code of the user's type may raise anything
        raise_if_no_answer(error)
        raise _Unfit(f"its class refused it ({described(error)})") from None


def _by_parts(value: Any, annotation: Any) -> Converted:
    """Return a value as a type that msgspec does not know as a whole; what has no parts stays as it is."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _one_of(value, parts)
    if origin is list and type(value) is list:
        made = [_part(one, parts[0], f"[{place}]") for place, one in enumerate(value)]
        return Converted(made, ran_code=bool(made))
    if origin is dict and type(value) is dict:
        named = {key: _part(one, parts[1], f"[{key!r:.40}]") for key, one in value.items()}
        return Converted(named, ran_code=bool(named))
    return Converted(value, ran_code=False)


def _part(value: Any, annotation: Any, place: str) -> Any:
    try:
        return _by_msgspec(value, annotation).value
    except _Unfit as unfit:
        raise _Unfit(f"`${place}`: {unfit}") from None


def _one_of(value: Any, members: tuple[Any, ...]) -> Converted:
    """Return a value as the first member of a union that takes it."""
    for member in members:
        if isinstance(member, type) and type(value) is member:
            return Converted(value, ran_code=False)
    told = []
    for member in members:
        try:
            return Converted(_by_msgspec(value, member).value, ran_code=True)
        except _Unfit as unfit:
            told.append(f"as {types_text(member)}: {unfit}")
    raise _Unfit("; ".join(told))


def _made(cls: Any, given: Any) -> tuple[Any, bool]:
    """Return what a class that msgspec does not know makes of plain data, and whether its code was asked."""
    kind = get_origin(cls) or cls
    if not isinstance(kind, type) or isinstance(given, kind):
        return given, False
    make = _maker(kind)
    if make is None:
        raise msgspec.ValidationError(f"Expected `{types_text(cls)}`, got `{type(given).__name__}`")
    try:
        return make(given), True
    except Exception as error:  # noqa: BLE001  # code of the user's type may raise anything
        raise_if_no_answer(error)
        raise msgspec.ValidationError(f"`{types_text(cls)}` does not accept it ({described(error)})") from None


def _maker(cls: type) -> Callable[[Any], Any] | None:
    if (registered := registered_by_type.get(cls)) is not None and registered.has_own_codec:
        return registered.kind.load
    make: Any = cls
    pathlib = sys.modules.get("pathlib")  # a path can only be declared where it was imported
    if pathlib is not None and issubclass(cls, pathlib.PurePath):
        return lambda given: make(_text(given))
    if cls.__module__ == "numpy" and cls.__name__ in arrays.NAMES:
        return _array if cls.__name__ == "ndarray" else lambda given: make(_number(given))
    return None


def _text(given: Any) -> str:
    if not is_a(given, str):
        raise TypeError(f"a text is needed, not {type(given).__name__}")
    return str(given)


def _array(given: Any) -> Any:
    if not is_a(given, list, int, float):
        raise TypeError(f"a list of numbers is needed, not {type(given).__name__}")
    made = sys.modules["numpy"].asarray(given)
    if made.dtype.kind not in "biufcSU":
        raise TypeError("a list of numbers is needed, and lists in it are of one length")
    return made


def _number(given: Any) -> Any:
    if not is_a(given, int, float):
        raise TypeError(f"a number is needed, not {type(given).__name__}")
    return given
