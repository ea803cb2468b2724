"""The state of a graph: its fields, what a node changes in it, and how changes are merged."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_type_hints, is_typeddict

import msgspec

from everstep.errors import GraphStuck, Misuse

Reducer = Callable[[Any, Any], Any]


class Shape:
    """How states of one class are split into fields and rebuilt."""

    def __init__(self, cls: Any, reduce: Mapping[str, Reducer]) -> None:
        self.cls = cls
        self.reduce = dict(reduce)
        self.is_dict = cls is dict or is_typeddict(cls)
        self.fields = _fields_of(cls)
        """The names of the fields; None if any name is allowed."""
        for name in self.reduce:
            if self.fields is not None and name not in self.fields:
                raise Misuse(f"reduce= names {name!r}, which is no field of {self.name}.")

    @property
    def name(self) -> str:
        """The name of the class."""
        return getattr(self.cls, "__qualname__", str(self.cls))

    def values(self, state: Any) -> dict[str, Any]:
        """Return the fields of a state, with their values."""
        if self.is_dict:
            return dict(state)
        assert self.fields is not None
        return {name: getattr(state, name) for name in self.fields if hasattr(state, name)}

    def check(self, state: Any, graph: str) -> None:
        """Refuse a value that is not a state of this graph."""
        if not isinstance(state, dict if self.is_dict else self.cls):
            raise Misuse(f"The graph {graph} begins with a {self.name}, not with a {type(state).__qualname__}.")

    def changes(self, node: str, given: Any, returned: Any) -> dict[str, Any]:
        """Return what a node changes: the fields that it returned, or those in which the state it returned differs."""
        if returned is None:
            return {}
        if not self.is_dict and isinstance(returned, self.cls):
            before = self.values(given)
            changed = {
                name: value
                for name, value in self.values(returned).items()
                if name not in before or before[name] != value
            }
            if both := [name for name in changed if name in self.reduce]:
                raise Misuse(
                    f"The node {node} returned a whole state in which {', '.join(both)} differs, which has a reducer. "
                    f"Return only what is to be added: {{{both[0]!r}: …}}."
                )
            return changed
        if not isinstance(returned, Mapping):
            raise Misuse(
                f"The node {node} returned a {type(returned).__qualname__}. A node returns what it changes: a dict of "
                f"fields, a {self.name}, or nothing."
            )
        if self.fields is not None and (unknown := [name for name in returned if name not in self.fields]):
            raise Misuse(
                f"The node {node} returned {unknown[0]!r}, which is no field of {self.name}: {', '.join(self.fields)}."
            )
        return dict(returned)

    def updated(self, state: Any, changes: Mapping[str, Any], replaced: Collection[str] = ()) -> Any:
        """Return the state with these changes: reduced where there is a reducer, replaced elsewhere.

        replaced: fields that are replaced although they have a reducer.
        """
        if not changes:
            return state
        before = self.values(state)
        new = {
            # A reducer may add in place, but nodes in progress still have the state that they began with.
            name: self.reduce[name](copy.copy(before[name]), value)
            if name in self.reduce and name in before and name not in replaced
            else value
            for name, value in changes.items()
        }
        if self.is_dict:
            return {**state, **new}
        if issubclass(self.cls, msgspec.Struct):
            return msgspec.structs.replace(state, **new)
        if hasattr(self.cls, "__pydantic_fields__"):
            return _updated_model(state, before, new)
        if hasattr(self.cls, "__dataclass_fields__"):
            import dataclasses

            return dataclasses.replace(state, **new)
        import attr

        return attr.evolve(state, **new)

    def shared_with(self, other: "Shape") -> Iterable[str]:
        """Return the fields that two states have in common."""
        if self.fields is None or other.fields is None:
            raise Misuse(f"The states {self.name} and {other.name} have no fields in common that could be known.")
        return [name for name in self.fields if name in other.fields]


class Changes:
    """Which visit changed which field when, so that two nodes that ran at the same time do not silently overwrite each
    other.

    It is cleared whenever nothing is in progress, because then nothing can be overwritten.
    """

    def __init__(self) -> None:
        self._now = 0
        self._begun: dict[str, int] = {}
        self._last: dict[str, tuple[int, str]] = {}

    def begin(self, visit: str) -> None:
        """Record that a visit begins, with the state as it is now."""
        self._begun[visit] = self._now

    def note(self, visit: str, changes: Mapping[str, Any], state: Mapping[str, Any], reduced: Iterable[str]) -> None:
        """Record that a visit has changed these fields."""
        begun = self._begun.pop(visit, self._now)
        self._now += 1
        for name, value in changes.items():
            when, who = self._last.get(name, (0, ""))
            if when > begun and name not in reduced and state.get(name) != value:
                raise GraphStuck(
                    f"{who} and {visit} ran at the same time and both changed {name!r}, each in its own way. Say how "
                    f"they are put together: everstep.Graph(…, reduce={{{name!r}: function}})."
                )
            self._last[name] = (self._now, visit)


def _updated_model(state: Any, before: dict[str, Any], new: dict[str, Any]) -> Any:
    """Return a pydantic model with changes, validated as a whole: by the names of its fields, not by their aliases."""
    cls = type(state)
    has_aliases = any(one.validation_alias is not None for one in cls.__pydantic_fields__.values())
    how = {"by_alias": False, "by_name": True} if has_aliases else {}
    made = cls.__pydantic_validator__.validate_python({**(state.__pydantic_extra__ or {}), **before, **new}, **how)
    object.__setattr__(made, "__pydantic_fields_set__", state.__pydantic_fields_set__ | new.keys())
    if state.__pydantic_private__ is not None:
        object.__setattr__(made, "__pydantic_private__", {**state.__pydantic_private__})
    return made


def _fields_of(cls: Any) -> tuple[str, ...] | None:
    if cls is dict:
        return None
    if is_typeddict(cls):
        return tuple(get_type_hints(cls))
    if isinstance(cls, type):
        if issubclass(cls, msgspec.Struct):
            return cls.__struct_fields__
        for attribute in ("__pydantic_fields__", "__dataclass_fields__"):
            if hasattr(cls, attribute):
                return tuple(getattr(cls, attribute))
        if hasattr(cls, "__attrs_attrs__"):
            return tuple(one.name for one in cls.__attrs_attrs__)
    raise Misuse(f"state={cls!r}: it is a dataclass, a TypedDict, a msgspec or pydantic model, or dict.")
