"""Kinds of classes whose instances are restored as themselves: how each is split into fields, and rebuilt.

Instances are rebuilt from their fields and not by their constructor, so that a `__post_init__` does not process the
same data twice, and so that no code of a class gets stored data, which anyone who can write the database chooses. The
empty name in a record holds what is not a field: attributes that were added to the instance.
"""

import enum
import sys
from collections.abc import Callable
from functools import cached_property
from types import MemberDescriptorType
from typing import Any, Final, NamedTuple, cast

import msgspec

Record = dict[str, Any]
NOT_FIELDS: Final = ""
"""Where a record keeps what an instance has besides the fields of its class."""
UNSET: Final = "unset"
"""The name there of the fields of a pydantic model that have their defaults."""


class Unfit(Exception):
    """Stored data does not fit the class as it is now. `part` names the field."""

    def __init__(self, why: str, part: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.part = part


class Kind(NamedTuple):
    """A class with functions for both directions. `is_record`: it becomes a dict of fields."""

    cls: type
    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]
    is_record: bool
    to_plain: Callable[[Any], Any] | None = None
    """What `conversion` makes an instance of again; None if that is its dump, without what is not a field."""

    def plain(self, value: Any) -> Any:
        """Return an instance as data that does not name its class."""
        if self.to_plain is not None:
            return self.to_plain(value)
        simpler = self.dump(value)
        return {name: part for name, part in simpler.items() if name != NOT_FIELDS} if self.is_record else simpler


def kind_of(cls: type) -> Kind | None:
    """Return how instances of a class are stored, or None if only a registration can tell."""
    found = _kinds.get(cls)
    if found is None:
        found = _find_kind(cls)
        if found is not None:  # a class without a kind is not cached, because it may still become a dataclass
            _kinds[cls] = found
    return found


_kinds: Final[dict[type, Kind]] = {}


def _find_kind(cls: type) -> Kind | None:
    if issubclass(cls, enum.Enum):
        return _enum_kind(cls) if cls.__members__ else None
    if issubclass(cls, tuple):
        return _named_tuple_kind(cls) if hasattr(cls, "_fields") else None
    if issubclass(cls, msgspec.Struct):
        return _struct_kind(cls)
    if _is_pydantic_model(cls):
        return _pydantic_kind(cls)
    if issubclass(cls, BaseException) or _inherits_data(cls):
        return None
    if hasattr(cls, "__dataclass_fields__"):
        return _dataclass_kind(cls)
    if "__attrs_attrs__" in vars(cls):
        return _attrs_kind(cls)
    return None


def _inherits_data(cls: type) -> bool:
    """Return True if instances hold data outside their fields, as those of a subclass of dict do."""
    return issubclass(cls, dict | list | set | frozenset | str | bytes | bytearray | int | float | complex)


def _as_record(data: Any) -> Record:
    if type(data) is not dict:
        raise Unfit("the stored value is not a record of fields")
    return data


def _enum_kind(cls: type[enum.Enum]) -> Kind:
    if issubclass(cls, enum.Flag):  # combinations have no name of their own
        return Kind(cls, _value_of, lambda value: _flag(cls, value), False)

    def load(name: Any) -> enum.Enum:
        if type(name) is not str or name not in cls.__members__:
            raise Unfit("the enumeration has no member of the stored name")
        return cls.__members__[name]

    return Kind(cls, lambda member: member.name, load, False, _value_of)


def _value_of(member: enum.Enum) -> Any:
    return member.value


def _flag(cls: type[enum.Flag], value: Any) -> enum.Flag:
    """Return a combination of members, without calling a `_missing_` of the class or of Python."""
    if type(value) is not int:
        raise Unfit("the enumeration has no member of the stored value")
    found = cls._value2member_map_.get(value) or enum.Flag._missing_.__func__(cls, value)  # type: ignore[attr-defined]
    return cast("enum.Flag", found)


def _named_tuple_kind(cls: type) -> Kind:
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    defaults: Record = getattr(cls, "_field_defaults", {})

    def dump(value: Any) -> Record:
        return dict(zip(names, value, strict=True))

    def load(data: Any) -> Any:
        record = {**defaults, **_as_record(data)}
        _demand(record, names)
        return tuple.__new__(cls, [record[name] for name in names])

    return Kind(cls, dump, load, True, list)


def _demand(record: Record, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in record:
            raise Unfit("the class now has this field, and it has no default", name)


def _struct_kind(cls: type[msgspec.Struct]) -> Kind:
    names = cls.__struct_fields__
    required = tuple(field.name for field in msgspec.structs.fields(cls) if field.required)

    def dump(value: Any) -> Record:
        return {name: getattr(value, name) for name in names}

    def load(data: Any) -> Any:
        record = _as_record(data)
        _demand(record, required)
        # msgspec offers no other way to make one: a `__post_init__` gets what was stored.
        return cls(**{name: record[name] for name in names if name in record})

    def to_plain(value: Any) -> Any:
        members = {said: getattr(value, name) for name, said in zip(names, cls.__struct_encode_fields__, strict=True)}
        config = cls.__struct_config__
        if config.array_like:
            return [*([config.tag] if config.tag is not None else []), *members.values()]
        return {**({config.tag_field: config.tag} if config.tag is not None else {}), **members}

    return Kind(cls, dump, load, True, to_plain)


class _Field(NamedTuple):
    name: str
    required: bool
    default: Callable[[], Any] | None


def _dataclass_kind(cls: type) -> Kind:
    import dataclasses

    fields = []
    for field in dataclasses.fields(cls):
        default: Callable[[], Any] | None = None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory
        elif field.default is not dataclasses.MISSING:
            default = _constant(field.default)
        fields.append(_Field(field.name, field.init and default is None, default))
    return _fields_kind(cls, tuple(fields))


def _attrs_kind(cls: type) -> Kind:
    attr = sys.modules["attr"]
    fields = []
    for attribute in cls.__attrs_attrs__:  # type: ignore[attr-defined]
        given = attribute.default
        default: Callable[[], Any] | None = None
        if isinstance(given, attr.Factory):
            default = None if given.takes_self else given.factory
        elif given is not attr.NOTHING:
            default = _constant(given)
        fields.append(_Field(attribute.name, attribute.init and default is None, default))
    return _fields_kind(cls, tuple(fields))


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


def _fields_kind(cls: type, fields: tuple[_Field, ...]) -> Kind:
    """Return the kind of a class with declared fields, whose instances are filled directly."""
    names = frozenset(field.name for field in fields)
    asked = frozenset(name for name in names if _has_setter(cls, name))

    def dump(value: Any) -> Record:
        record = {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}
        if len(attributes := getattr(value, "__dict__", {})) and not names.issuperset(attributes):
            added = {name: part for name, part in attributes.items() if name not in names and not _is_cache(cls, name)}
            if added:
                record[NOT_FIELDS] = added
        return record

    def load(data: Any) -> Any:
        record = _as_record(data)
        instance: Any = object.__new__(cls)
        for name, required, default in fields:
            if name in asked:
                continue
            if name in record:
                object.__setattr__(instance, name, record[name])
            elif default is not None:
                object.__setattr__(instance, name, default())
            elif required:
                raise Unfit("the class now has this field, and it has no default", name)
        added = record.get(NOT_FIELDS)
        if added is not None and hasattr(instance, "__dict__"):
            instance.__dict__.update(_as_record(added))
        return instance

    return Kind(cls, dump, load, True)


def _has_setter(cls: type, name: str) -> bool:
    """Return True if setting an attribute runs code of a class: that of a property, not that of a slot.

    What a property keeps elsewhere in the instance is not a field, and so is stored in addition to the fields.
    """
    found = next((one.__dict__[name] for one in cls.__mro__ if name in one.__dict__), None)
    return hasattr(type(found), "__set__") and not isinstance(found, MemberDescriptorType)


def _is_cache(cls: type, name: str) -> bool:
    """Return True if an attribute is a cached `cached_property`, which is computed again when it is needed."""
    return isinstance(getattr(cls, name, None), cached_property)


def _is_pydantic_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")  # a model can only exist where pydantic was imported
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def _pydantic_kind(cls: Any) -> Kind:
    def dump(value: Any) -> Record:
        fields = cls.__pydantic_fields__
        record = {name: part for name, part in value.__dict__.items() if name in fields}
        private = getattr(value, "__pydantic_private__", None) or {}
        rest = {
            UNSET: [name for name in record if name not in value.__pydantic_fields_set__],
            "extra": getattr(value, "__pydantic_extra__", None) or {},
            "private": private,
        }
        if any(rest.values()):
            record[NOT_FIELDS] = {name: part for name, part in rest.items() if part}
        return record

    def load(data: Any) -> Any:
        record = dict(_as_record(data))
        rest = _as_record(record.pop(NOT_FIELDS, {}))
        values, given = {}, set()
        for name, field in cls.__pydantic_fields__.items():
            if name in record:
                values[name] = record[name]
                if name not in rest.get(UNSET, ()):
                    given.add(name)
            elif field.is_required():
                raise Unfit("the class now has this field, and it has no default", name)
            else:
                values[name] = field.get_default(call_default_factory=True, validated_data=values)
        instance = cls.__new__(cls)
        allows_extra = cls.model_config.get("extra") == "allow"
        object.__setattr__(instance, "__dict__", values)
        object.__setattr__(instance, "__pydantic_fields_set__", given)
        object.__setattr__(instance, "__pydantic_extra__", _as_record(rest.get("extra", {})) if allows_extra else None)
        object.__setattr__(instance, "__pydantic_private__", private_values(cls, _as_record(rest.get("private", {}))))
        return instance

    def to_plain(value: Any) -> Record:
        fields = cls.__pydantic_fields__
        named = {_taken_as(name, fields[name]): part for name, part in value.__dict__.items() if name in fields}
        return {**named, **(getattr(value, "__pydantic_extra__", None) or {})}

    return Kind(cls, dump, load, True, to_plain)


def _taken_as(name: str, field: Any) -> str:
    """Return the name under which a model takes a field."""
    alias = field.validation_alias
    return alias if isinstance(alias, str) else name


def private_values(cls: Any, stored: Record) -> Record | None:
    """Return a model's private attributes: the stored ones, else their defaults."""
    if not cls.__private_attributes__:
        return None
    undefined = sys.modules["pydantic_core"].PydanticUndefined
    values = {name: stored.get(name, private.get_default()) for name, private in cls.__private_attributes__.items()}
    return {name: value for name, value in values.items() if value is not undefined}
