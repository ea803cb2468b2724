"""Instances of an application's plain data types, built from stored values without running code of their classes.

Stored bytes name the class, and anyone who can write the database chooses them. So for a class that the application has
not allowed by name, no constructor, `__post_init__`, `_missing_` or validator is called, because it may do anything
with its arguments. Dataclasses and named tuples are filled field by field, as Everstep's own codec does; an enumeration
is looked up; and a pydantic model is validated by its own types alone, without the functions that were added to them.
"""

from enum import Enum
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel
from pydantic.v1 import BaseModel as OldModel
from pydantic_core import SchemaValidator

from everstep.adapters import kind_of, private_values
from everstep.errors import Damaged

FUNCTIONS: Final = frozenset({"function-before", "function-after", "function-wrap"})
"""The parts of a pydantic schema that wrap a check in a function."""
CALLED_BY: Final[dict[Any, tuple[str, ...]]] = {
    "model": ("custom_init", "post_init"),
    "dataclass": ("post_init",),
    "enum": ("missing",),
}
"""Keys of other parts that lead to code of a class."""
PARTS: Final = frozenset({"choices", "definitions", "fields", "steps"})
"""The keys of a pydantic schema with several schemas in them. (Keys of a single one end in `schema`.) All else is
data.
"""


def built(cls: type, given: Any) -> Any:
    """Return an instance with these fields, or of this value. Raises `Damaged` if it cannot be built like that."""
    try:
        if issubclass(cls, Enum):
            return _member(cls, given)
        if issubclass(cls, BaseModel):
            # Values that were valid may fail a strict check: MessagePack has no tuples.
            return _validator(cls).validate_python(given, strict=False)
        if issubclass(cls, OldModel):
            return _old_model(cls, given)
        kind = kind_of(cls)
        if kind is not None:
            return kind.load(given)
    except Exception as error:  # stored values may not fit the class
        raise _refusal(cls) from error
    raise _refusal(cls)


def validated(cls: type[BaseModel], given: Any) -> BaseModel:
    """Return a model of an allowed class: its own functions are called with stored values."""
    made: BaseModel = _validator(cls, is_allowed=True).validate_python(given, strict=False)
    return made


def _refusal(cls: type) -> Damaged:
    return Damaged(
        f"A saved {cls.__module__}.{cls.__qualname__} cannot be built without running code of its class. If "
        f"that code may run with what is stored, say allowed=[{cls.__qualname__}]."
    )


def _member(cls: type[Enum], value: Any) -> Any:
    found = cls._value2member_map_.get(value)
    if found is None:
        kind = kind_of(cls)
        assert kind is not None
        return kind.load(value)  # a combination of flags; of other values there is no member
    return found


@lru_cache(maxsize=1024)
def _validator(cls: type[BaseModel], *, is_allowed: bool = False) -> Any:
    if not cls.__pydantic_complete__:
        cls.model_rebuild()
    changes: list[str] = []
    schema = _as_saved(cls.__pydantic_core_schema__, changes, is_allowed)
    if not changes:
        return cls.__pydantic_validator__
    try:
        return SchemaValidator(schema, _use_prebuilt=False)  # validators that were made before call the functions
    except TypeError:
        return SchemaValidator(schema)  # this pydantic does not reuse validators


def _as_saved(schema: Any, changes: list[str], is_allowed: bool, by_alias: bool = False) -> Any:
    """Return a pydantic schema for stored values of a type.

    Unless the type is allowed, it calls no function but pydantic's own, and no `__init__` or `model_post_init`. Its
    fields have the names under which they are saved: their own, unless the model says otherwise (by_alias).
    """
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if not is_allowed and _is_function(kind) and not _is_pydantics(schema.get("function")):
        changes.append(str(kind))
        return _as_saved(schema["schema"], changes, is_allowed, by_alias) if kind in FUNCTIONS else {"type": "any"}
    called = [name for name in CALLED_BY.get(kind, ()) if schema.get(name) and not is_allowed]
    changes += called
    if "config" in schema:
        by_alias = bool((schema["config"] or {}).get("serialize_by_alias"))
    kept = {
        name: _part(name, one, changes, is_allowed, by_alias) if name in PARTS or name.endswith("schema") else one
        for name, one in schema.items()
        if name not in called and name not in ("serialization", "metadata", "validation_alias")
    }
    if "validation_alias" in schema:
        changes.append("validation_alias")
        if by_alias and "serialization_alias" in schema:
            kept["validation_alias"] = schema["serialization_alias"]
    if kind != "model" or "post_init" not in called:
        return kept
    ref = {"ref": kept.pop("ref")} if "ref" in kept else {}
    return {"type": "function-after", "function": {"type": "no-info", "function": _complete}, "schema": kept, **ref}


def _part(name: str, part: Any, changes: list[str], is_allowed: bool, by_alias: bool) -> Any:
    """Return a part of a schema for stored values: a schema or several.

    Several are in a list, or by the names of fields, or by what tells one choice from another. Such names are an
    application's own: a field may be called like a key of a schema.
    """
    if isinstance(part, list):
        return [_part("", one, changes, is_allowed, by_alias) for one in part]
    if isinstance(part, tuple):  # a choice, and its label
        return (_as_saved(part[0], changes, is_allowed, by_alias), *part[1:])
    if isinstance(part, dict) and name in PARTS:
        return {key: _as_saved(one, changes, is_allowed, by_alias) for key, one in part.items()}
    return _as_saved(part, changes, is_allowed, by_alias)


def _is_function(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("function-")


def _complete(model: Any) -> Any:
    """Set a model's private attributes: pydantic does that in `model_post_init`, together with the class's own code."""
    object.__setattr__(model, "__pydantic_private__", private_values(type(model), {}))
    return model


def _is_pydantics(given: Any) -> bool:
    function = given.get("function") if isinstance(given, dict) else given
    module = getattr(function, "__module__", "") or getattr(type(function), "__module__", "")
    return str(module).partition(".")[0] in ("pydantic", "pydantic_core")


def _old_model(cls: Any, given: Any) -> Any:
    """Build a model of pydantic 1, if neither it nor a model within it adds code to its fields."""
    seen, models = set(), [cls]
    while models:
        one = models.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.__init__ is not OldModel.__init__ or one.__pre_root_validators__ or one.__post_root_validators__:
            raise _refusal(cls)
        for field in one.__fields__.values():
            if field.class_validators or field.pre_validators or field.post_validators:
                raise _refusal(cls)
            models += [field.type_] if isinstance(field.type_, type) and issubclass(field.type_, OldModel) else []
    return cls(**given)
