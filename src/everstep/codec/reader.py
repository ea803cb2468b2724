"""A JSON value and its type tree back to the value. Every name in the tree is a key into a closed table."""

from typing import Any

from everstep.codec import exceptions
from everstep.codec.kinds import Unfit
from everstep.codec.leaves import LOADERS
from everstep.codec.tables import Types, registered_by_name
from everstep.codec.writer import DEPTH_MAX
from everstep.errors import NotDecodable
from everstep.model.untrusted import raise_if_no_answer


class Misfit(Exception):
    """A stored part does not fit. On its way up it collects the path to that part, innermost first."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path: list[str] = []

    def as_error(self) -> NotDecodable:
        """Return the error for the user."""
        path = "value" + "".join(reversed(self.path))
        return NotDecodable(f"{path[:300]} cannot be restored: {self.why}.", path[:300])


def read(value: Any, tree: Any, types: Types, depth: int = DEPTH_MAX) -> Any:
    """Return the value that was written. Containers in `value` are changed in place. Raises `Misfit`."""
    if tree is None:
        return value
    if depth <= 0:
        raise Misfit(f"it is nested deeper than {DEPTH_MAX} levels")
    if type(tree) is str:
        return _load(tree, value, types)
    if type(tree) is dict or (type(tree) is list and len(tree) == 1):
        return _read_members(value, tree, types, depth)
    if type(tree) is list and len(tree) in (2, 3) and type(tree[0]) is str:
        tag, members = tree[0], tree[1]
        inner = types
        if tag[:1] == "!" and (registered := registered_by_name.get(tag[1:])) is not None:
            inner = types | registered.inner
        if len(tree) == 3:
            value = read(value, members, inner, depth - 1)
        else:
            value = _read_members(value, members, inner, depth)
        return _load(tag, value, types)
    raise Misfit("its type tree is damaged")


def _read_members(value: Any, members: Any, types: Types, depth: int) -> Any:
    kind = type(value)
    if type(members) is list and len(members) == 1:
        tree = members[0]
        if kind is list:
            pairs: Any = enumerate(value)
        elif kind is dict:
            pairs = list(value.items())
        else:
            raise Misfit("its type tree does not fit its value")
        for key, member in pairs:
            value[key] = _read_member(key, member, tree, types, depth)
        return value
    if type(members) is not dict or (kind is not list and kind is not dict):
        raise Misfit("its type tree does not fit its value")
    for name, tree in members.items():
        key = int(name) if kind is list and name.isdecimal() and len(name) < 12 else name
        if not (key in value if kind is dict else type(key) is int and key < len(value)):
            raise Misfit("its type tree does not fit its value")
        value[key] = _read_member(key, value[key], tree, types, depth)
    return value


def _read_member(key: Any, member: Any, tree: Any, types: Types, depth: int) -> Any:
    try:
        return read(member, tree, types, depth - 1)
    except Misfit as misfit:
        misfit.path.append(f"[{key!r:.40}]")
        raise


def _load(tag: str, value: Any, types: Types) -> Any:
    load = LOADERS.get(tag)
    if load is None:
        load = exceptions.error_from if tag == "error" else _class_loader(tag, types)
    try:
        return load(value)
    except Unfit as unfit:
        misfit = Misfit(unfit.why)
        if unfit.part:
            misfit.path.append(f".{unfit.part}")
        raise misfit from None
    except Exception as error:  # damaged data and a user's decode= may raise anything
        raise_if_no_answer(error)
        raise Misfit(f"{tag[:80]!r} does not accept what is stored ({type(error).__name__})") from error


def _class_loader(tag: str, types: Types) -> Any:
    mark, name = tag[:1], tag[1:]
    if mark not in ("@", "!"):
        raise Misfit("its type tag is unknown")
    entry = registered_by_name.get(name)
    registered = entry.kind if entry is not None else None
    annotated = types.by_name.get(name)
    # The class may have been registered, or named by an annotation instead, since the value was stored.
    found = registered or annotated if mark == "!" else annotated or registered
    if found is None:
        raise Misfit(f"its class {name[:80]!r} is neither named by the annotation nor registered")
    return found.load
