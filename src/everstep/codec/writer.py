"""Values to a JSON value and a type tree beside it.

The tree is sparse and mirrors the value:

    null              plain JSON, all the way down
    "tag"             a value of this type, made of plain JSON
    {"3": tree, …}    a plain list or dict, some of whose members are not plain
    [tree]            the same, and each member has this tree
    ["tag", members]  a value of this type whose members are not all plain; members is one of the two above

A tag is a built-in one, `@Name` for a class from an annotation, or `!Name` for a registered class. Types are never
marked inside the value, so no data of a user can be mistaken for a mark.
"""

from collections.abc import Callable, Iterable
from math import isfinite
from types import NoneType
from typing import Any, Final

from everstep.codec import exceptions, nearby
from everstep.codec.canonical import Tree, canonical_bytes
from everstep.codec.kinds import NOT_FIELDS, Kind, kind_of
from everstep.codec.leaves import Unstorable, leaf_of, surrogates_text
from everstep.codec.tables import ANY, Types, registered_by_type
from everstep.errors import NotEncodable
from everstep.model.mistakes import not_storable
from everstep.model.untrusted import (
    attempted,
    bases_of,
    is_a,
    qualified_name,
    qualified_name_of,
    raise_if_no_answer,
    type_name,
)

DEPTH_MAX: Final = 100
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1


Within = exceptions.Describer | None


class Refused(Exception):
    """A part of a value cannot be stored. On its way up it collects the path to that part, innermost first."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.why = why
        self.remedy = remedy
        self.path: list[str] = []

    def as_error(self, where: str) -> NotEncodable:
        """Return the error for the user. Its path begins with what the value is called there."""
        path = where + "".join(reversed(self.path))
        if len(path) > 300:
            path = f"{path[:200]} … {path[-80:]}"
        return NotEncodable(f"{path} {self.why}, so it cannot be stored and restored. {self.remedy}", path)


def is_plain(value: object, depth: int = DEPTH_MAX) -> bool:
    """Return True if a value is the same after a round trip through JSON. Lone surrogates are left to the encoder."""
    kind = type(value)
    if kind is int:
        return INT_MIN <= value <= INT_MAX  # type: ignore[operator]
    if kind is str or kind is bool or value is None:
        return True
    if kind is float:
        return isfinite(value)  # type: ignore[arg-type]
    if depth <= 0:
        return False
    if kind is dict:
        for key, member in value.items():  # type: ignore[attr-defined]
            if type(key) is not str or not (type(member) is str or is_plain(member, depth - 1)):
                return False
        return True
    if kind is not list:
        return False
    if len(value) > 16 and _is_plain_list(value):  # type: ignore[arg-type]
        return True
    for member in value:  # type: ignore[attr-defined]  # noqa: SIM110 - a generator takes twice as long
        if type(member) is not str and not is_plain(member, depth - 1):
            return False
    return True


def _is_plain_list(members: list[Any]) -> bool:
    """Return True if a long list has only one plain type, as most have, without a loop in Python."""
    kinds = set(map(type, members))
    if kinds == {int}:
        return bool(min(members) >= INT_MIN and max(members) <= INT_MAX)
    if kinds == {float}:
        return all(map(isfinite, members))
    return kinds <= {str, bool, NoneType}


def write(value: Any, types: Types, depth: int = DEPTH_MAX, within: Within = None) -> tuple[Any, Tree]:
    """Return a value as JSON value and type tree. Raises `Refused`. `within` describes the exception that holds it."""
    kind = type(value)
    if kind is str:
        return (surrogates_text(value), "str") if _has_surrogates(value) else (value, None)
    if kind is bool or value is None:
        return value, None
    if kind is int:
        return (value, None) if INT_MIN <= value <= INT_MAX else (format(value, "x"), "int")
    if kind is float:
        return (value, None) if isfinite(value) else (repr(value), "float")
    if depth <= 0:
        raise Refused(f"is nested deeper than {DEPTH_MAX} levels or contains itself", "Make it flatter.")
    if within is not None and not within.takes(value):
        raise Refused("is too large to be kept with an error", "Keep what is needed of it.")
    if kind is list:
        return _write_members(value, types, depth, within)
    if kind is dict:
        return _write_dict(value, types, depth, within)
    if kind is tuple:
        members, tree = _write_members(value, types, depth, within)
        return members, _tagged("tuple", tree)
    if kind is set or kind is frozenset:
        members, tree = _write_unordered(value, types, depth, within)
        return members, _tagged(kind.__name__, tree)
    return _write_instance(value, kind, types, depth, within)


def _write_part(value: object, depth: int, within: exceptions.Describer) -> tuple[Any, Tree]:
    return write(value, ANY, depth, within)


def describer(*, with_traceback: bool, depth: int = DEPTH_MAX) -> exceptions.Describer:
    """Return a describer that turns an exception into facts with written values."""
    return exceptions.Describer(_write_part, depth, with_traceback=with_traceback)


def _has_surrogates(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _tagged(tag: str, members: Tree) -> Tree:
    return tag if members is None else [tag, members]


def _write_members(members: Iterable[Any], types: Types, depth: int, within: Within) -> tuple[list[Any], Tree]:
    written: list[Any] = []
    trees: dict[str, Tree] = {}
    index = 0
    try:
        for member in members:
            plain, tree = write(member, types, depth - 1, within)
            written.append(plain)
            if tree is not None:
                trees[str(index)] = tree
            index += 1
    except Refused as refused:
        refused.path.append(f"[{index}]")
        raise
    return written, _shortest(trees, len(written))


def _write_unordered(members: Iterable[Any], types: Types, depth: int, within: Within) -> tuple[list[Any], Tree]:
    """Return the members of a set in the order of their canonical bytes, because a set's own order differs by
    process.
    """
    each: list[tuple[Any, Tree]] = []
    try:
        for member in members:
            each.append(write(member, types, depth - 1, within))  # noqa: PERF401  # the place is told if one is refused
    except Refused as refused:
        refused.path.append(f"[{len(each)}]")
        raise
    each.sort(key=lambda one: canonical_bytes(*one))
    trees: dict[str, Tree] = {str(index): tree for index, (_, tree) in enumerate(each) if tree is not None}
    return [written for written, _ in each], _shortest(trees, len(each))


def _shortest(trees: dict[str, Tree], count: int) -> Tree:
    """Return the members' trees, or one tree if all are equal."""
    if not trees:
        return None
    if len(trees) == count:
        first, *others = trees.values()
        if all(tree == first for tree in others):
            return [first]
    return trees


def _write_dict(
    value: dict[Any, Any], types: Types, depth: int, within: Within, attributes: bool = False
) -> tuple[Any, Tree]:
    written: dict[str, Any] = {}
    trees: dict[str, Tree] = {}
    key: Any = None
    try:
        for key, member in value.items():
            if type(key) is not str or _has_surrogates(key):
                break
            written[key], tree = write(member, types, depth - 1, within)
            if tree is not None:
                trees[key] = tree
        else:
            return written, _shortest(trees, len(written))
    except Refused as refused:
        if not attributes:
            refused.path.append(f"[{_bounded(key)}]")
        elif key != NOT_FIELDS:
            refused.path.append(f".{key}")
        raise
    return _write_pairs(value, types, depth, within)


def _write_pairs(value: dict[Any, Any], types: Types, depth: int, within: Within) -> tuple[Any, Tree]:
    """Return a dict whose keys JSON does not have as a list of pairs."""
    written: list[Any] = []
    trees: dict[str, Tree] = {}
    for index, (key, member) in enumerate(value.items()):
        try:
            pair, tree = _write_members((key, member), types, depth - 1, within)
        except Refused as refused:
            inside = refused.path.pop()
            refused.path.append(f"[{_bounded(key)}]" if inside == "[1]" else f".keys()[{index}]")
            raise
        written.append(pair)
        if tree is not None:
            trees[str(index)] = tree
    return written, _tagged("dict", _shortest(trees, len(written)))


def _bounded(key: object) -> str:
    text = repr(key) if type(key) in (str, int, bool, NoneType) else type(key).__qualname__
    return text if len(text) <= 40 else f"{text[:40]}…"


def _write_instance(value: Any, cls: type, types: Types, depth: int, within: Within) -> tuple[Any, Tree]:
    if cls is exceptions.Written:
        return value.value, value.tree
    registered = registered_by_type.get(cls)
    if is_a(value, BaseException) and (registered is None or not registered.has_own_codec):
        return _write_error(value, types, depth, within)
    if registered is not None:
        return _write_kind(value, f"!{registered.name}", registered.kind, types | registered.inner, depth, within)
    if (entry := types.by_type.get(cls)) is not None:
        return _write_kind(value, f"@{entry[0]}", entry[1], types, depth, within)
    leaf = leaf_of(cls)
    if leaf is None and types.is_loose and (kind := attempted(kind_of, cls)) is not None:
        return write(_taken_apart(value, kind.plain), types, depth - 1, within)
    if leaf is None:
        raise _refusal(cls)
    try:
        simpler = leaf.dump(value)
    except Unstorable as error:
        raise Refused(f"is {error}", "Use datetime.timezone or zoneinfo.ZoneInfo.") from None
    written, tree = write(simpler, types, depth - 1, within)
    return written, _combined(leaf.tag, tree)


def _write_kind(value: Any, tag: str, kind: Kind, types: Types, depth: int, within: Within) -> tuple[Any, Tree]:
    simpler = _taken_apart(value, kind.dump)
    if kind.is_record:
        written, tree = _write_dict(simpler, types, depth, within, attributes=True)
    else:
        written, tree = write(simpler, types, depth - 1, within)
    return written, _combined(tag, tree)


def _taken_apart(value: Any, dump: Callable[[Any], Any]) -> Any:
    try:
        return dump(value)
    except BaseException as error:
        raise_if_no_answer(error)
        raise Refused(
            f"is a {qualified_name(value)} that could not be taken apart ({type_name(error)})",
            "See its encode= or its fields.",
        ) from error


def _combined(tag: str, tree: Tree) -> Tree:
    """Return the tree of a value that is stored as simpler data, which may have a tag itself."""
    if tree is None:
        return tag
    # The simpler data counts as the only member of a value that has a tag.
    return [tag, tree, 0] if isinstance(tree, str) or (isinstance(tree, list) and len(tree) > 1) else [tag, tree]


def _write_error(value: BaseException, types: Types, depth: int, within: Within) -> tuple[Any, Tree]:
    if not exceptions.comes_back(value) and not (within is not None and nearby.current().modules):
        raise _refusal(type(value))
    if within is None:
        facts = describer(with_traceback=False, depth=depth).facts(value)
        written, tree = write(facts, types, depth - 1)
    elif type(held := within.held(value, depth)) is str:
        return held, None
    else:
        written, tree = write(held, types)  # its values are written, in what room there is: the rest is not deep
    return written, _tagged("error", tree)


def _refusal(cls: type) -> Refused:
    name = qualified_name_of(cls)
    if issubclass(cls, BaseException):
        return Refused(f"is a {name}, an exception that is not registered", f"Use everstep.register({name}).")
    if attempted(kind_of, cls) is not None:  # a metaclass may refuse to be asked
        return Refused(
            f"is a {name}, which no annotation here names",
            f"Annotate the parameter or the return type with {name}, or use everstep.register({name}).",
        )
    if issubclass(cls, dict | list | tuple | set | frozenset | str | int | float | bytes):
        base = next(base for base in bases_of(cls) if base.__module__ == "builtins")
        return Refused(
            f"is a {name}, a subclass of {base.__name__}",
            f"Use a plain {base.__name__}, or everstep.register({name}, encode=…, decode=…).",
        )
    return Refused(*not_storable(name))
