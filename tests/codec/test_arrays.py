"""Arrays and scalars of numpy come back as themselves, bit by bit; what cannot is refused before it is stored."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from everstep.codec import Codec, as_declared, converted
from everstep.errors import NotDecodable, NotEncodable

ARRAYS: list[Any] = [
    np.array([1.5, -2.0, np.nan, np.inf]),
    np.arange(24, dtype=np.int32).reshape(2, 3, 4),
    np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
    np.array([[True, False]]),
    np.array([], dtype=np.float32),
    np.array(7),
    np.array([1 + 2j]),
    np.array(["a", "ü"]),
    np.array([b"a", b"bc"]),
    np.array(["2026-01-02", "NaT"], dtype="datetime64[D]"),
    np.array([1, 2], dtype="timedelta64[ms]"),
    np.arange(10)[::2],
]
SCALARS: list[Any] = [
    *(np.float64(1.5), np.float32(0.1), np.float16(2), np.float64("nan"), np.float64("-inf"), np.int8(-3)),
    *(np.uint64(2**64 - 1), np.int64(-(2**63)), np.bool_(True), np.complex128(1 + 2j), np.str_("ü"), np.bytes_(b"x")),
    *(np.datetime64("2026-01-02T03:04:05.000006"), np.timedelta64(3, "D"), np.str_(""), np.bytes_(b"")),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda one: f"{one.dtype}{one.shape}")
def test_an_array_comes_back_with_its_dtype_shape_and_bits(value: Any) -> None:
    back = Codec().decode(Codec().encode(value))
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert back.flags.writeable


@pytest.mark.parametrize("value", SCALARS, ids=lambda one: f"{one.dtype} {one}")
def test_a_scalar_comes_back_with_its_dtype_and_bits(value: Any) -> None:
    back = Codec().decode(Codec().encode([value]))[0]
    assert type(back) is type(value)
    assert (back.dtype, back.tobytes()) == (value.dtype, value.tobytes())


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.array([(1, 2)], dtype="i4,i4"), np.longdouble(1), np.ma.array([1])]
)
def test_what_has_no_bytes_of_its_own_is_refused(value: Any) -> None:
    with pytest.raises(NotEncodable):
        Codec().encode(value)


@pytest.mark.parametrize(
    "payload",
    [
        b'[["|O",[1],"AAAAAAAAAAA="],"ndarray"]',
        b'[["<f8",[3],"AAAA"],"ndarray"]',
        b'[["<f8",[-1],"AAAAAAAAAAA="],"ndarray"]',
        b'[["<f8",["x"],"AAAAAAAAAAA="],"ndarray"]',
        b'[[8,[1],"AAAAAAAAAAA="],"ndarray"]',
        b'[["<f8",[2],"AAAAAAAAAAA="],"ndarray"]',
        b'[["<i1",300],"numpy"]',
        b'[["os",1],"numpy"]',
        b'[["<f8"],"numpy"]',
        b'[3,"numpy"]',
    ],
)
def test_damaged_arrays_are_no_arrays(payload: bytes) -> None:
    with pytest.raises(NotDecodable):
        Codec().decode(payload)


def test_plain_numbers_become_arrays_and_scalars_where_they_are_declared() -> None:
    made = converted([[1, 2], [3, 4]], np.ndarray).value
    assert made.shape == (2, 2)
    assert type(converted(3, np.int16).value) is np.int16
    for wrong in ("x", {"a": 1}, [[1], [2, 3]], [None]):
        with pytest.raises(NotDecodable):
            converted(wrong, np.ndarray)
    array = np.arange(3.0)
    assert as_declared(array, np.ndarray) is array
    assert as_declared(array, NDArray[np.float64]) is array
    assert as_declared([array], list[np.ndarray])[0] is array


def test_numpy_is_not_imported_for_who_has_no_array() -> None:
    text = "import sys, everstep; from everstep.codec import Codec; Codec().decode(Codec().encode([1, b'x'])); "
    subprocess.run([sys.executable, "-c", text + "assert 'numpy' not in sys.modules"], check=True)


def test_an_array_in_an_object_comes_back_with_it() -> None:
    @dataclass
    class Batch:
        values: np.ndarray

    from everstep.codec import types_of

    back = Codec().decode(Codec().encode(Batch(np.arange(3)), types_of(Batch)), types_of(Batch))
    assert back.values.tolist() == [0, 1, 2]
