"""Arrays and scalars of numpy as data, without importing numpy: who has one has imported it.

An array is stored as its dtype, its shape, and its bytes in base64. Only dtypes whose bytes are the value have a place
here: never `object`, of which the bytes are addresses, and which could only be pickled.
"""

import binascii
import math
import re
from typing import Any, Final

SCALARS: Final = (
    *("bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "datetime64", "timedelta64", "str_", "bytes_"),
)
NAMES: Final = ("ndarray", *SCALARS)
_DTYPE: Final = re.compile(r"[<>|=](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?)")


class NoArray(ValueError):
    """An array whose bytes are not its value."""


def dump_array(value: Any) -> list[Any]:
    """Return an array as its dtype, its shape and its bytes."""
    dtype: str = value.dtype.str
    if _DTYPE.fullmatch(dtype) is None:
        raise NoArray(f"an array of dtype {value.dtype!s:.40}")
    return [dtype, list(value.shape), _text(value.tobytes())]


def dump_scalar(value: Any) -> list[Any]:
    """Return a scalar as its dtype and a number, or its bytes where JSON has no such number."""
    dtype: str = value.dtype.str
    if value.dtype.kind in "biuf":
        number = value.item()
        if type(number) in (bool, int) or math.isfinite(number):
            return [dtype, number]
    return [dtype, _text(value.tobytes())]


def load_array(stored: Any) -> Any:
    """Return a stored array. Raises `ValueError` or `TypeError` for anything else."""
    dtype, shape, data = stored
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError("not the shape of an array")
    numpy = _numpy()
    return numpy.frombuffer(_bytes(data), dtype=_dtype(numpy, dtype)).reshape(shape).copy()


def load_scalar(stored: Any) -> Any:
    """Return a stored scalar, of its dtype."""
    dtype, value = stored
    numpy = _numpy()
    kind = _dtype(numpy, dtype)
    if type(value) in (bool, int, float) and kind.kind in "biuf":
        return kind.type(value)
    if kind.itemsize == 0:  # an empty text
        return kind.type()
    return numpy.frombuffer(_bytes(value), dtype=kind)[0]


def _dtype(numpy: Any, text: Any) -> Any:
    if type(text) is not str or _DTYPE.fullmatch(text) is None:
        raise ValueError("not the dtype of an array")
    return numpy.dtype(text)


def _numpy() -> Any:
    try:
        import numpy as np  # only who reads an array needs it
    except ImportError:
        raise ValueError("it is an array of numpy, which is not installed here") from None
    return np


def _text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _bytes(text: Any) -> bytes:
    if type(text) is not str:
        raise ValueError("not a text")
    return binascii.a2b_base64(text, strict_mode=True)
