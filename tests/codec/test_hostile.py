"""Bytes that no encoder wrote: imitated tags, damage, and names of classes that nobody allowed."""

import dataclasses
import datetime as dt
import decimal
import enum
import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep.codec import ANY, Codec, Signature, types_of
from everstep.errors import NotDecodable, NotEncodable, StepError
from tests.codec.test_values import TYPED, Author, Basket, Book, Colour, Item, Node, Order, Point

codec = Codec()
EVERYTHING = types_of(Author | Book | Order | Item | Basket | Node)

scalars: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())  # with surrogates
    | st.binary()
    | st.datetimes(timezones=st.none() | st.timezones() | st.just(dt.UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.ip_addresses()
    | st.sampled_from(Colour)
)
keys = scalars | st.tuples(scalars, scalars) | st.frozensets(scalars, max_size=3)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.dictionaries(st.text(st.characters()), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Author, st.text(), st.none() | st.dates(), st.sets(st.text(), max_size=2))
        | st.builds(Book, st.text(), st.just([]), st.sampled_from(Colour))
        | st.builds(Order, st.integers(), st.decimals(allow_nan=False), st.none() | st.builds(Point, st.integers()))
        | st.builds(Node, inner)
    ),
    max_leaves=12,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
tags = st.sampled_from(
    [
        "tuple",
        "set",
        "dict",
        "bytes",
        "int",
        "str",
        "datetime",
        "time",
        "Decimal",
        "error",
        "range",
        "deque",
        "timezone",
        "@Author",
        "@Item",
        "@Order",
        "@Point",
        "@Colour",
        "!Author",
        "@os.system",
        "PosixPath",
        "ZoneInfo",
        "unknown",
    ]
)
trees = st.recursive(
    st.none() | tags,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from(["0", "1", "a", "-1"]), inner, max_size=3)
        | st.tuples(tags, inner).map(list)
        | st.tuples(tags, inner, st.just(0)).map(list)
    ),
    max_leaves=6,
)


def same(left: object, right: object) -> bool:
    """Compare values and all types in them."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))  # type: ignore[arg-type, call-overload]
    if isinstance(left, dict):
        return len(left) == len(right) and all(  # type: ignore[arg-type]
            same(a, b)
            for a, b in zip(left.items(), right.items(), strict=True)  # type: ignore[attr-defined]
        )
    return repr(left) == repr(right) if isinstance(left, float | decimal.Decimal | uuid.UUID) else left == right


def read_anything(payload: bytes) -> None:
    """Decode in every way; only NotDecodable may come out."""
    for decode in (
        lambda: codec.decode(payload, EVERYTHING),
        lambda: codec.decode(payload),
        lambda: codec.decode_error(payload),
        lambda: codec.decode_arguments(Signature(lambda a, b: a), payload),
    ):
        try:
            decode()
        except NotDecodable:
            pass
    assert isinstance(codec.preview(payload, 50), str)
    assert len(codec.preview(payload, 50)) <= 50
    assert codec.error_facts(payload).keys() >= {"type", "message", "traceback"}


@given(values)
def test_every_restorable_value_comes_back_as_itself(value: Any) -> None:
    payload = codec.encode(value, EVERYTHING)
    json.loads(payload)
    assert same(codec.decode(payload, EVERYTHING), value)


@given(json_values)
def test_plain_data_that_imitates_an_envelope_or_a_tag_stays_data(value: Any) -> None:
    for imitation in (value, [value], [value, "tuple"], {"@": value}, [{"0": "@Author"}, value]):
        assert same(codec.decode(codec.encode(imitation)), imitation)
        wrapped = codec.encode([imitation, (imitation,)])
        assert same(codec.decode(wrapped), [imitation, (imitation,)])


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2], "tuple"], {"__class__": "Author"}, {"@Author": {}}, ["!", "@"], {"": {"private": 1}},
        [["tuple", ["set"]]],
        {"type": "KeyError", "message": "", "from": "builtin", "args": []}, {"args": [1], "kwargs": {}},
        {"lc": 1, "type": "c"},
    ],
)  # fmt: skip
def test_our_own_tags_imitated_by_data_stay_data(value: Any) -> None:
    assert codec.decode(codec.encode(value, EVERYTHING), EVERYTHING) == value
    assert codec.decode(codec.encode({"a": (value,)}), EVERYTHING) == {"a": (value,)}
    signature = Signature(lambda a: a)
    arguments = codec.encode_arguments(signature, (value,), {}, "f")
    assert arguments.args == (value,)
    assert codec.decode_arguments(signature, arguments.payload) == ((value,), {})


@given(st.binary())
def test_random_bytes_only_ever_raise_not_decodable(data: bytes) -> None:
    read_anything(data)
    read_anything(b"[" + data + b"]")


@given(json_values, trees)
def test_a_wrong_type_tree_only_ever_raises_not_decodable(value: Any, tree: Any) -> None:
    read_anything(json.dumps([value, tree]).encode())


@given(st.sampled_from(TYPED), st.data())
def test_a_payload_with_a_changed_byte_only_ever_raises_not_decodable(value: Any, data: st.DataObject) -> None:
    payload = bytearray(codec.encode(value))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] = data.draw(st.integers(0, 255))
    read_anything(bytes(payload))
    read_anything(bytes(payload[:place]))


FACTS = ["type", "message", "from", "args", "state", "cause", "members", "notes", "encoded"]
NAMES = ["KeyError", "OSError", "builtin", "everstep", "registered", "standard", "ExceptionGroup"]


@given(st.dictionaries(st.sampled_from(FACTS), json_values | st.sampled_from(NAMES)))
def test_damaged_facts_of_an_exception_only_ever_raise_not_decodable(facts: Any) -> None:
    read_anything(json.dumps([facts]).encode())
    read_anything(json.dumps([facts, "error"]).encode())


HOSTILE = [
    b"[" * 10**5, b"[" * 900 + b"]" * 900, b'[{"a":' * 300 + b"1" + b"}]" * 300, b"[1,%b1%b]" % (b"[" * 400,
    b"]" * 400), b"",
    b"null", b"{}", b"[]", b"[1,2,3]", b"[1e999]", b'["\\ud800"]', b"[[1],[\"set\",[\"set\",[\"set\"]]]]",
    b'[[[1]],["set"]]',
    b'["x","@posix.system"]', b'["x","!eval"]', b'["x","error"]', b'["../../etc/passwd","ZoneInfo"]', b'["zz","int"]',
    b'[[1,2],"datetime"]', b'[{},"@Point"]', b'[[],{"99999999999999999999":"set"}]', b'[[],{"-1":"set"}]',
    b'[1,{"a":null}]',
    b'[[[1,2]],"dict"]', b'[["ab"],"dict"]', b'[[[[1],2]],"dict"]', b'["12","float"]', b'[[1],"range"]', b'["\xff"]',
]  # fmt: skip


@pytest.mark.parametrize("payload", HOSTILE, ids=lambda payload: repr(payload)[:40])
def test_hostile_bytes_only_ever_raise_not_decodable(payload: bytes) -> None:
    read_anything(payload)


def test_a_stored_name_is_never_imported_or_called() -> None:
    for name in ("os.system", "subprocess.Popen", "builtins.eval", "tests.codec.test_values.Author", "Author"):
        for mark in ("@", "!", ""):
            with pytest.raises(NotDecodable):
                codec.decode(json.dumps([{"name": "x"}, mark + name]).encode(), ANY)
        with pytest.raises(NotDecodable):
            codec.decode_error(json.dumps([{"type": name, "message": "", "from": "builtin", "args": []}]).encode())
        unknown = codec.decode_error(json.dumps([{"type": name, "message": "m"}]).encode())
        assert type(unknown) is StepError


def test_the_engines_own_unwinding_cannot_be_raised_by_stored_data() -> None:
    for origin in ("everstep", "builtin", "registered"):
        with pytest.raises(NotDecodable):
            codec.decode_error(json.dumps([{"type": "Evicted", "message": "", "from": origin, "args": []}]).encode())


# --- previews


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        ("a", '"a"'),
        ([1, "x"], '[1,"x"]'),
        ((1, 2), "[1,2]"),
        ("ü", '"ü"'),
        ("x" * 500, '"' + "x" * 158 + "…"),
    ],
)
def test_a_preview_is_the_beginning_of_the_value(value: Any, text: str) -> None:
    assert codec.preview(codec.encode(value)) == text


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 200))
def test_a_preview_is_bounded_and_holds_nothing_that_a_terminal_obeys(text: str, limit: int) -> None:
    shown = codec.preview(codec.encode(text), limit)
    assert shown.isprintable()
    assert len(shown) <= max(limit, 1)


def test_escape_codes_and_reversed_text_are_neutralised() -> None:
    shown = codec.preview(codec.encode("\x1b[31m\x9b\x7f\u202egnp.exe\u2028\u200b"))
    assert shown.isprintable()
    assert "\\u202e" in shown


def raise_it(*args: Any) -> Any:
    raise KeyboardInterrupt


class Mean(type):
    """A metaclass that answers nothing about its classes."""

    __getattribute__ = raise_it  # type: ignore[assignment]


ASKED = {
    "__getattribute__": type("Asked", (), {"__getattribute__": raise_it}),
    "__class__": type("Asked", (), {"__class__": property(raise_it)}),
    "__getattribute__ of a dict": type("Asked", (dict,), {"__getattribute__": raise_it}),
    "__getattribute__ of an error": type("Asked", (ValueError,), {"__getattribute__": raise_it}),
    "its metaclass": Mean("Asked", (), {}),
    "its metaclass, of an error": Mean("Asked", (ValueError,), {}),
}


@pytest.mark.parametrize("which", ASKED)
def test_a_value_that_is_refused_is_not_asked_for_its_class(which: str) -> None:
    value = type.__call__(ASKED[which])
    for stored in (value, [value], {"a": (value,)}):
        with pytest.raises(NotEncodable, match="Asked"):
            codec.encode(stored)
    restored = codec.decode_error(codec.encode_error(ValueError(value, 1)))
    assert (type(restored), restored.args[1]) == (ValueError, 1)


# -- code of one's own classes -----------------------------------------------------------------------------------------
HANDED: list[Any] = []


class Watchful(Exception):
    """An exception whose class would like to see what it is given."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self._amount = 0

    @property
    def amount(self) -> int:
        return self._amount

    @amount.setter
    def amount(self, value: int) -> None:
        HANDED.append(value)
        self._amount = value

    def __setattr__(self, name: str, value: Any) -> None:
        HANDED.append((name, value))
        super().__setattr__(name, value)


@dataclasses.dataclass
class Counted:
    """A dataclass with a field that is a property."""

    amount: int = 0
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        HANDED.append(self.amount)
        self.total = self.amount * 2


def _amount(self: Any) -> int:
    return self._amount  # type: ignore[no-any-return]


def _set_amount(self: Any, value: int) -> None:
    HANDED.append(value)
    self._amount = value


Counted.amount = property(_amount, _set_amount)  # type: ignore[assignment]


class Loose(enum.Flag):
    RED = 1
    BLUE = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        HANDED.append(value)
        return super()._missing_(value)


def test_stored_attributes_of_an_exception_are_not_handed_to_its_class() -> None:
    everstep.register(Watchful)
    error = Watchful("text")
    error.amount = 3
    error.__cause__ = ValueError("why")
    error.add_note("a note")
    stored = json.loads(codec.encode_error(error))
    stored[0]["state"]["amount"] = 666
    HANDED.clear()
    back = codec.decode_error(json.dumps(stored).encode())
    assert HANDED == []
    assert isinstance(back, Watchful)
    assert (back.args, back._amount, back.amount) == (("text",), 3, 3), "it is as it was"
    assert (back.__notes__, repr(back.__cause__)) == (["a note"], "ValueError('why')")


def test_names_that_python_keeps_elsewhere_come_back() -> None:
    back = codec.decode_error(codec.encode_error(ImportError("no", name="x", path="/y")))
    assert isinstance(back, ImportError)
    assert (back.name, back.path) == ("x", "/y")


def test_stored_fields_are_not_handed_to_properties_and_post_init() -> None:
    types = types_of(Counted)
    value = Counted(3)
    HANDED.clear()
    back = codec.decode(codec.encode(value, types), types)
    assert HANDED == []
    assert (type(back), back.amount, back.total) == (Counted, 3, 6)


def test_a_stored_flag_is_not_handed_to_missing() -> None:
    types = types_of(Loose)
    payload = codec.encode(Loose.RED | Loose.BLUE, types)
    HANDED.clear()
    assert codec.decode(payload, types) is Loose.RED | Loose.BLUE
    assert codec.decode(codec.encode(Loose.RED, types), types) is Loose.RED
    with pytest.raises(NotDecodable):
        codec.decode(payload.replace(b"3", b"64"), types)
    assert HANDED == []
