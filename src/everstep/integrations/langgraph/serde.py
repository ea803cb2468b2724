"""Values to bytes and back, by LangGraph's own serializer in its strict mode: stored bytes never become code.

LangGraph lets stored bytes name any callable unless it is told otherwise. Here they may name what LangGraph itself
holds for safe, what the application allows, and plain data types of modules that are loaded already: dataclasses,
pydantic models, enums and named tuples. Nothing is imported, and nothing else is called.
"""

import dataclasses
import sys
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any

from langgraph.checkpoint.serde import jsonplus
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel
from pydantic.v1 import BaseModel as OldModel

from everstep.errors import Damaged

KINDS = frozenset({"null", "bytes", "bytearray", "msgpack"})
"""What is written. Bytes that claim to be of another kind are not read."""


class DataTypes(set[tuple[str, ...]]):
    """What stored bytes may name: what was allowed, and plain data types of modules that are loaded."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, tuple) and len(key) == 2 and _is_plain_data(*key))

    def __bool__(self) -> bool:
        return True


def _is_plain_data(module: Any, name: Any) -> bool:
    if not isinstance(module, str) or not isinstance(name, str):
        return False
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(found, type):
        return False
    if issubclass(found, BaseModel | OldModel | Enum):
        return True
    return dataclasses.is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer, for bytes that somebody else may have written."""

    def __init__(self, allowed: Iterable[tuple[str, ...] | type] = ()) -> None:
        given = jsonplus._normalize_module_keys(tuple(allowed))
        self._types = DataTypes(given)
        super().__init__(
            allowed_msgpack_modules=tuple(given) or None,
            __unpack_ext_hook__=jsonplus._create_msgpack_ext_hook(self._types),
        )

    def with_msgpack_allowlist(self, extra_allowlist: Iterable[tuple[str, ...] | type]) -> "StrictSerializer":
        """Return one that also allows these."""
        return StrictSerializer([*set(self._types), *extra_allowlist])

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return a value."""
        if data[0] not in KINDS:
            raise Damaged(f"A saved value claims to be {data[0][:20]!r}, which is never written: it is not read.")
        return super().loads_typed(data)


Allowed = Collection[tuple[str, ...] | type]
