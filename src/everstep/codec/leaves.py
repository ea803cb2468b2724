"""Built-in types that JSON does not have: each with a short tag, a writer and a reader.

The tags are a closed set and part of the stored format: one may be added, none may change its meaning.
"""

import binascii
import collections
import datetime as dt
import decimal
import sys
import uuid
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from everstep.codec import arrays
from everstep.model.untrusted import name_of


class Leaf(NamedTuple):
    """A tag, and the functions that turn a value of its type into simpler data and back."""

    tag: str
    dump: Callable[[Any], Any]


class Unstorable(Exception):
    """A value of a storable type that is itself not storable, such as a time of a foreign time zone."""


def _text(value: Any) -> str:
    """Return stored text. Any other type is damage."""
    if type(value) is not str:
        raise ValueError("not a text")
    return value


def _items(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("not a list")
    return value


def _bytes_text(value: bytes | bytearray) -> str:
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def _bytes_of(text: Any) -> bytes:
    return binascii.a2b_base64(_text(text), strict_mode=True)


def _zone(zone: dt.tzinfo | None) -> Any:
    """Return a time zone as text (a name of the time zone database) or list (a fixed offset with its name)."""
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        offset = zone.utcoffset(None)
        seconds = [offset.days, offset.seconds, offset.microseconds]
        return seconds if zone.tzname(None) == dt.timezone(offset).tzname(None) else [*seconds, zone.tzname(None)]
    key = getattr(zone, "key", None)
    if type(zone).__module__ in ("zoneinfo", "zoneinfo._zoneinfo") and isinstance(key, str):
        return key
    raise Unstorable("a time with a time zone that is neither a fixed offset nor a zoneinfo.ZoneInfo with a key")


def _zone_of(stored: Any) -> dt.tzinfo | None:
    if stored is None:
        return None
    if type(stored) is list:
        offset = dt.timedelta(*stored[:3])
        if len(stored) > 3:
            return dt.timezone(offset, _text(stored[3]))
        return dt.timezone(offset) if offset else dt.UTC
    import zoneinfo

    return zoneinfo.ZoneInfo(_text(stored))  # which refuses names that would leave the database's folder


def _dump_time(value: dt.datetime | dt.time) -> Any:
    text = value.replace(tzinfo=None, fold=0).isoformat()
    if value.tzinfo is None and not value.fold:
        return text
    return [text, _zone(value.tzinfo), value.fold]


def _load_datetime(stored: Any) -> dt.datetime:
    if type(stored) is str:
        return dt.datetime.fromisoformat(stored)
    text, zone, fold = stored
    return dt.datetime.fromisoformat(_text(text)).replace(tzinfo=_zone_of(zone), fold=fold)


def _load_time(stored: Any) -> dt.time:
    if type(stored) is str:
        return dt.time.fromisoformat(stored)
    text, zone, fold = stored
    return dt.time.fromisoformat(_text(text)).replace(tzinfo=_zone_of(zone), fold=fold)


def _load_complex(stored: Any) -> complex:
    real, imaginary = _text(stored).split(" ")
    return complex(float(real), float(imaginary))


def _load_float(stored: Any) -> float:
    if stored not in ("nan", "inf", "-inf"):
        raise ValueError("not one of the floats that JSON lacks")
    return float(stored)


def _load_pairs(stored: Any) -> dict[Any, Any]:
    return {key: value for key, value in map(_items, _items(stored))}  # noqa: C416 - dict() would take texts for pairs


def _load_deque(stored: Any) -> collections.deque[Any]:
    items, most = _items(stored)
    return collections.deque(_items(items), most)


def _load_path(name: str) -> Callable[[Any], Any]:
    def load(stored: Any) -> Any:
        import pathlib

        try:
            return getattr(pathlib, name)(_text(stored))
        except NotImplementedError:  # a path of another system comes back as the part of it that works everywhere
            return getattr(pathlib, f"Pure{name}")(_text(stored))

    return load


def _load_address(name: str) -> Callable[[Any], Any]:
    def load(stored: Any) -> Any:
        import ipaddress

        return getattr(ipaddress, name)(_text(stored))

    return load


LEAVES: Final[dict[type, Leaf]] = {
    bytes: Leaf("bytes", _bytes_text),
    bytearray: Leaf("bytearray", _bytes_text),
    complex: Leaf("complex", lambda value: f"{value.real!r} {value.imag!r}"),
    range: Leaf("range", lambda value: [value.start, value.stop, value.step]),
    dt.datetime: Leaf("datetime", _dump_time),
    dt.date: Leaf("date", dt.date.isoformat),
    dt.time: Leaf("time", _dump_time),
    dt.timedelta: Leaf("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    dt.timezone: Leaf("timezone", _zone),
    decimal.Decimal: Leaf("Decimal", str),
    uuid.UUID: Leaf("UUID", str),
    collections.deque: Leaf("deque", lambda value: [list(value), value.maxlen]),
    collections.OrderedDict: Leaf("OrderedDict", lambda value: [list(pair) for pair in value.items()]),
    collections.Counter: Leaf("Counter", lambda value: [list(pair) for pair in value.items()]),
}

_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_ADDRESSES: Final = (
    "IPv4Address",
    "IPv6Address",
    "IPv4Network",
    "IPv6Network",
    "IPv4Interface",
    "IPv6Interface",
)
_BY_MODULE: Final = {
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "ipaddress": _ADDRESSES,
    "zoneinfo": ("ZoneInfo",),
    "numpy": arrays.NAMES,
}
_NAMES: Final = frozenset(name for names in _BY_MODULE.values() for name in names)
"""Names are compared first, because asking a class for its module may run code of its metaclass."""


def leaf_of(cls: type) -> Leaf | None:
    """Return how a built-in type is written, without importing the module of a type that is not in use."""
    found = LEAVES.get(cls)
    if found is None and (name := name_of(cls)) in _NAMES and name in _BY_MODULE.get(cls.__module__, ()):
        module = sys.modules.get(cls.__module__)
        if getattr(module, name, None) is cls:  # not another class of the same name
            found = LEAVES[cls] = _leaf_named(name, cls.__module__)
    return found


def _leaf_named(name: str, module: str) -> Leaf:
    if module == "numpy":
        return Leaf("ndarray", _dump_array) if name == "ndarray" else Leaf("numpy", arrays.dump_scalar)
    return Leaf(name, _zone if name == "ZoneInfo" else str)


def _dump_array(value: Any) -> Any:
    try:
        return arrays.dump_array(value)
    except arrays.NoArray as refused:
        raise Unstorable(str(refused)) from None


LOADERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": lambda stored: tuple(_items(stored)),
    "set": lambda stored: set(_items(stored)),
    "frozenset": lambda stored: frozenset(_items(stored)),
    "dict": _load_pairs,
    "int": lambda stored: int(_text(stored), 16),
    "float": _load_float,
    "str": lambda stored: _bytes_of(stored).decode("utf-8", "surrogatepass"),
    "bytes": _bytes_of,
    "bytearray": lambda stored: bytearray(_bytes_of(stored)),
    "complex": _load_complex,
    "range": lambda stored: range(*_items(stored)),
    "datetime": _load_datetime,
    "date": lambda stored: dt.date.fromisoformat(_text(stored)),
    "time": _load_time,
    "timedelta": lambda stored: dt.timedelta(*_items(stored)),
    "timezone": lambda stored: _zone_of(_items(stored)),
    "ZoneInfo": lambda stored: _zone_of(_text(stored)),
    "Decimal": lambda stored: decimal.Decimal(_text(stored)),
    "UUID": lambda stored: uuid.UUID(_text(stored)),
    "deque": _load_deque,
    "OrderedDict": lambda stored: collections.OrderedDict(_load_pairs(stored)),
    "Counter": lambda stored: collections.Counter(_load_pairs(stored)),
    "ndarray": arrays.load_array,
    "numpy": arrays.load_scalar,
    **{name: _load_path(name) for name in _PATHS},
    **{name: _load_address(name) for name in _ADDRESSES},
}


def surrogates_text(value: str) -> str:
    """Return a text with lone surrogates, which UTF-8 cannot encode, as base64."""
    return _bytes_text(value.encode("utf-8", "surrogatepass"))
