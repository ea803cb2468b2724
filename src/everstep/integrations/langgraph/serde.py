"""Values to bytes and back, by LangGraph's own serializer in its strict mode: stored bytes never become code.

LangGraph lets stored bytes name any callable unless it is configured otherwise. Here they may name what LangGraph
itself considers safe, what the application allows, and plain data types of modules that are loaded already:
dataclasses, pydantic models, enums and named tuples. Nothing is imported, nothing else is called, and of such a type no
code is run either: see `building`.
"""

import dataclasses
import importlib
import sys
import threading
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde import jsonplus
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel
from pydantic.v1 import BaseModel as OldModel

from everstep.errors import Damaged, NotDecodable
from everstep.integrations.langgraph.building import built, validated

MODELS = (jsonplus.EXT_PYDANTIC_V1, jsonplus.EXT_PYDANTIC_V2)
CONSTRUCTORS = frozenset(
    {
        jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG,
        jsonplus.EXT_CONSTRUCTOR_POS_ARGS,
        jsonplus.EXT_CONSTRUCTOR_KW_ARGS,
        *MODELS,
    }
)
"""The extensions of MessagePack by which LangGraph writes instances: module, name, and the arguments of the type."""
KINDS = frozenset({"null", "bytes", "bytearray", "msgpack"})
"""The kinds that are written. Bytes that claim another kind are not read."""


def plain_data(module: Any, name: Any) -> type | None:
    """Return a plain data type of a loaded module, or None."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(found, type):
        return None
    is_plain = issubclass(found, BaseModel | OldModel | Enum) or dataclasses.is_dataclass(found)
    return found if is_plain or (issubclass(found, tuple) and hasattr(found, "_fields")) else None


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer, for bytes that an attacker may have written."""

    def __init__(self, allowed: Iterable[tuple[str, ...] | type] = ()) -> None:
        self._types: set[tuple[str, ...]] = jsonplus._normalize_module_keys(tuple(allowed))
        super().__init__(
            allowed_msgpack_modules=tuple(self._types) or None,
            __unpack_ext_hook__=self._extension,
        )
        self._found = threading.local()
        self._by_langgraph = jsonplus._create_msgpack_ext_hook(self._types)

    def _extension(self, code: int, data: bytes) -> Any:
        """Return a value that MessagePack itself does not have: by LangGraph, unless its type is of a loaded module.

        LangGraph reads nested values by its own hook, so what it calls is called here.
        """
        if code not in CONSTRUCTORS and code != jsonplus.EXT_DELTA_SNAPSHOT:
            return self._by_langgraph(code, data)
        content = ormsgpack.unpackb(data, ext_hook=self._extension, option=ormsgpack.OPT_NON_STR_KEYS)
        if code == jsonplus.EXT_DELTA_SNAPSHOT:
            return jsonplus._DeltaSnapshot(content)  # type: ignore[attr-defined]
        module, name, given = content[:3]
        if (module, name) in SAFE_MSGPACK_TYPES or (module, name) in self._types:
            return _called(code, module, name, given)
        if (cls := plain_data(module, name)) is not None:
            try:
                return built(cls, given)
            except Damaged as damage:
                self._found.damage = damage  # `ormsgpack` only reports that there was an error
                raise
        if code in MODELS and _is_lost(module, name):
            return given  # a model of pydantic that is defined in a function: the schema of its graph makes it again
        self._found.damage = _not_read(module, name)
        raise self._found.damage

    def with_msgpack_allowlist(self, extra_allowlist: Iterable[tuple[str, ...] | type]) -> "StrictSerializer":
        """Return a serializer that also allows these."""
        return StrictSerializer([*self._types, *extra_allowlist])

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return a value."""
        if data[0] not in KINDS:
            raise Damaged(f"A saved value claims to be {data[0][:20]!r}, which is never written: it is not read.")
        self._found.damage = None
        try:
            return super().loads_typed(data)
        except ValueError as error:
            raise self._found.damage or error from error


def _called(code: int, module: str, name: str, given: Any) -> Any:
    """Call an allowed type, as LangGraph does: with one value, several or named ones."""
    if (module, name) == ("langgraph.types", "Send"):
        return jsonplus._send_from_args(given)
    called = getattr(importlib.import_module(module), name)
    try:
        if code == jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG:
            return called(given)
        if code == jsonplus.EXT_PYDANTIC_V2 and issubclass(called, BaseModel):
            return validated(called, given)
        return called(*given) if code == jsonplus.EXT_CONSTRUCTOR_POS_ARGS else called(**given)
    except Exception as error:  # noqa: BLE001 - as LangGraph does with what no longer fits its type
        if code == jsonplus.EXT_PYDANTIC_V2:
            return called.model_construct(**given)
        if code == jsonplus.EXT_PYDANTIC_V1:
            return called.construct(**given)
        return jsonplus._reconstruction_fallback((module, name, given), error)


def _is_lost(module: Any, name: Any) -> bool:
    """Return True if a loaded module has no such name."""
    return module in sys.modules and name not in vars(sys.modules[module])


def _not_read(module: Any, name: Any) -> NotDecodable:
    """Return the error for a type that LangGraph would replace by a plain value, and log it."""
    known = f"{module}.{name}"[:200]
    if module not in sys.modules:
        why = f"The module {str(module)[:200]} is not imported, and stored bytes import nothing: import it first"
    elif _is_lost(module, name):
        why = f"The module {str(module)[:200]} has no such name: define it there, at the top, and not in a function"
    else:
        why = "It is not a plain data type (dataclass, pydantic model, enum or named tuple)"
    return NotDecodable(
        f"A saved value is of type {known}. {why}, or allow it: allowed=[({module!r}, {name!r})].", known
    )


Allowed = Collection[tuple[str, ...] | type]
