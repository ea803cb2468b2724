"""Making the structs of the read model from rows."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def made_of(cls: type[T], source: Any, **more: Any) -> T:
    """Return a struct whose fields are those of the same name in `source`, except for what is given."""
    names = (name for name in cls.__struct_fields__ if name not in more and hasattr(source, name))
    return cls(**{name: getattr(source, name) for name in names}, **more)
