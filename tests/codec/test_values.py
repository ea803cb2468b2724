"""Values come back as they were, and what could not is refused with its path."""

# ruff: noqa: DTZ001, DTZ901, UP045 - naive times and old spellings are among what must come back

import collections
import datetime as dt
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import threading
import uuid
import zoneinfo
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar

import msgspec
import pydantic
import pytest

from everstep.codec import ANY, Codec, is_immutable_scalar, types_of, types_text
from everstep.errors import NotDecodable, NotEncodable

codec = Codec()
T = TypeVar("T")


def round_trip(value: Any, annotation: Any = None) -> Any:
    types = types_of(annotation) if annotation is not None else ANY
    payload = codec.encode(value, types)
    envelope = json.loads(payload)
    assert isinstance(envelope, list)
    assert len(envelope) in (1, 2)
    return codec.decode(payload, types)


def is_encodable(value: Any) -> bool:
    try:
        codec.encode(value, types_of(Box))
    except NotEncodable:
        return False
    return True


def name_of(value: Any) -> str:
    """Return a value's name in the names of tests: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", ascii(value))[:30]


def comes_back(value: Any, annotation: Any = None) -> None:
    restored = round_trip(value, annotation)
    assert restored == value
    assert type(restored) is type(value)


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Size(enum.IntEnum):
    SMALL = 1


class Mood(enum.StrEnum):
    GOOD = "good"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int = 7


@dataclass
class Author:
    name: str
    born: dt.date | None = None
    tags: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Book:
    title: str
    authors: list[Author]
    colour: Colour = Colour.RED


@dataclass
class Node:
    value: int
    next: Optional["Node"] = None


class Order(msgspec.Struct, frozen=True):
    id: int
    total: decimal.Decimal
    point: Point | None = None


class Item(pydantic.BaseModel):
    name: str
    price: decimal.Decimal = decimal.Decimal("1.50")
    tags: tuple[str, ...] = ()
    _secret: int = pydantic.PrivateAttr(default=3)


class Basket(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    items: list[Item]


@dataclass
class Box(Generic[T]):
    inside: T


class Movie(TypedDict, total=False):
    author: Author


UserId = NewType("UserId", int)


# --- what comes back by itself

PLAIN = [
    None, True, False, 0, 5, -1, 2**63 - 1, -(2**63), 1.5, -0.0, 5e-324, 1e308, "", "text", "\x00", "ü€😀", "\u2028",
    [], {}, [1, [2, {"a": None}]], {"b": 1, "a": 2}, {"": 0}, list(range(100)), [0.5] * 50, ["x"] * 50, [None,
    1, "a"] * 20,
]  # fmt: skip

TYPED = [
    (), (1, 2), ((1,), [(2,)]), set(), {1, 2}, {(1, 2)}, frozenset({"a"}), b"", b"\x00\xff", bytearray(b"x"),
    2**63, 10**400,
    -(10**400), float("inf"), float("-inf"), 1 + 2j, complex(-0.0, float("inf")), "\ud800", "\udc00\ud800",
    "a\ud800\udc00b",
    {1: 2}, {(1, 2): {3}}, {None: 1, True: 2, 1.5: 3}, {"\ud800": 1}, {b"k": {"plain": (1,)}}, range(1, 9, 2),
    range(10**30),
    dt.datetime(2024, 5, 6, 7, 8, 9, 10), dt.datetime(2024, 5, 6, tzinfo=dt.UTC), dt.datetime.max, dt.datetime.min,
    dt.datetime(2024, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=-3, microseconds=1))), dt.date(1, 1, 1),
    dt.time(1, 2, 3, 4),
    dt.time(1, tzinfo=dt.UTC), dt.timedelta.max, dt.timedelta.min, dt.timedelta(-1, 5, 7), dt.UTC,
    zoneinfo.ZoneInfo("Europe/Berlin"), decimal.Decimal("1.10"), decimal.Decimal("-Infinity"),
    decimal.Decimal("1E+400"),
    uuid.UUID(int=7), pathlib.Path("/a/b"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("C:/x"),
    pathlib.Path("\udcff"),
    ipaddress.ip_address("10.0.0.1"), ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_interface("::1/64"),
    collections.deque([1, (2,)], 5), collections.OrderedDict([("b", 1), ("a", {1})]), collections.Counter("abca"),
    [(1,)] * 3, [1, (2,), 3], {"a": (1,), "b": (2,)}, {"a": (1,), "b": 2}, {"0": (1,), "*": 3},
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:30])
def test_a_plain_value_comes_back_and_its_payload_is_just_the_value(value: Any) -> None:
    comes_back(value)
    assert json.loads(codec.encode(value)) == [value]


@pytest.mark.parametrize("value", TYPED, ids=name_of)
def test_a_built_in_value_that_json_lacks_comes_back_as_itself(value: Any) -> None:
    comes_back(value)
    comes_back([value])
    comes_back({"key": [{"inside": value}]})
    comes_back((value, 1))


def test_a_tuple_inside_a_dict_comes_back_as_a_tuple() -> None:
    assert type(round_trip({"a": (1, 2)})["a"]) is tuple


def test_nan_comes_back_as_nan_and_not_as_nothing() -> None:
    assert str(round_trip(float("nan"))) == "nan"
    assert str(round_trip([1.0] * 20 + [float("nan")])[20]) == "nan"
    assert round_trip(decimal.Decimal("sNaN123")).is_snan()


def test_true_and_one_stay_different_inside_containers() -> None:
    assert [type(part) for part in round_trip((True, 1, 1.0))] == [bool, int, float]


def test_the_order_of_a_dict_is_kept() -> None:
    assert list(round_trip({"b": 1, "a": 2})) == ["b", "a"]
    assert list(round_trip({2: 1, 1: (2,)})) == [2, 1]


def test_a_zone_and_the_second_pass_of_an_hour_are_kept() -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    restored = round_trip(dt.datetime(2024, 10, 27, 2, 30, tzinfo=berlin, fold=1))
    assert restored.tzinfo is berlin
    assert restored.fold == 1
    assert restored.utcoffset() == dt.timedelta(hours=1)
    named = round_trip(dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2), "mine")))
    assert named.tzname() == "mine"
    assert round_trip(dt.datetime(2024, 1, 1, fold=1)).fold == 1
    assert round_trip(dt.datetime(2024, 1, 1, tzinfo=dt.UTC)).tzinfo is dt.UTC
    assert round_trip(collections.deque([1], 5)).maxlen == 5


def test_a_container_comes_back_as_a_copy() -> None:
    value = {"a": [1]}
    assert round_trip(value)["a"] is not value["a"]


def test_equal_type_trees_of_many_members_are_said_once() -> None:
    authors = [Author("a", dt.date(2000, 1, 1)) for _ in range(100)]
    payload = codec.encode(authors, types_of(list[Author]))
    assert payload.count(b"@Author") == 1
    assert codec.decode(payload, types_of(list[Author])) == authors


# --- classes

CLASSES = [
    (Colour.RED, Colour), (Colour.BLUE, Colour), (Size.SMALL, Size), (Mood.GOOD, Mood),
    (Right.READ | Right.WRITE, Right),
    (Point(1, 2), Point), (Author("a", dt.date(2000, 1, 1), {"x"}), Author),
    (Book("t", [Author("a"), Author("b", tags={"y"})], Colour.BLUE), Book),
    (Node(1, Node(2, Node(3))), Node), (Order(1, decimal.Decimal("1.0"), Point(1)), Order),
    (Item(name="a"), Item), (Basket(items=[Item(name="a", tags=("x",))]), Basket),
    (Basket.model_validate({"items": [], "more": (1,)}), Basket),
    (Box(Author("a")), Box[Author]), ([Author("a")], list[Author]), ({"k": Author("a")}, dict[str, Author]),
    ({Colour.RED: Point(1)}, dict[Colour, Point]), ((Author("a"), 1), tuple[Author, int]), (Author("a"), Author | None),
    (None, Author | None), (Author("a"), Optional[Author]), (Author("a"), Annotated[Author, "note"]),
    ({"author": Author("a")}, Movie), (UserId(3), UserId), (Colour.RED, Literal[Colour.RED]), (Author("a"),
    type[Author]),
    ([Point(1)], collections.abc.Sequence[Point]), ({Point(1), Point(2)}, set[Point]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "annotation"), CLASSES, ids=lambda value: ascii(value)[:40])
def test_an_annotated_class_comes_back_as_itself(value: Any, annotation: Any) -> None:
    comes_back(value, annotation)


def test_types_may_be_asked_for_with_unhashable_annotations() -> None:
    comes_back(Author("a"), Annotated[Author, []])


def test_a_post_init_does_not_work_twice_on_the_same_data() -> None:
    @dataclass
    class Doubled:
        value: int

        def __post_init__(self) -> None:
            self.value *= 2

    assert round_trip(Doubled(1), Doubled).value == 2


def test_attributes_beyond_the_fields_are_kept_and_remembered_properties_are_not() -> None:
    @dataclass
    class Extended:
        value: int

        @cached_property
        def lock(self) -> Any:
            return threading.Lock()

    original = Extended(1)
    original.note = (1, 2)  # type: ignore[attr-defined]
    assert original.lock
    restored = round_trip(original, Extended)
    assert restored.note == (1, 2)
    assert "lock" not in vars(restored)


def test_a_pydantic_model_keeps_what_was_set_its_extras_and_its_private_part() -> None:
    item = Item(name="a")
    item._secret = 9
    restored = round_trip(item, Item)
    assert restored.model_fields_set == {"name"}
    assert restored._secret == 9
    assert round_trip(Basket.model_validate({"items": [], "more": (1,)}), Basket).more == (1,)


def test_two_classes_of_one_name_in_one_annotation_are_told_apart() -> None:
    other: Any = dataclass(type("Author", (), {"__annotations__": {"age": int}, "__module__": "elsewhere"}))
    annotation = list[Author | other]
    restored = round_trip([Author("a"), other(3)], annotation)
    assert [type(part) for part in restored] == [Author, other]


def test_a_field_that_a_class_gained_takes_its_default() -> None:
    old: Any = dataclass(type("Author", (), {"__annotations__": {"name": str, "gone": int}}))
    payload = codec.encode(old("a", 3), types_of(old))
    assert codec.decode(payload.replace(old.__qualname__.encode(), b"Author"), types_of(Author)) == Author("a")


@pytest.mark.parametrize("cls", [Author, Order, Item])
def test_a_field_that_a_class_gained_without_a_default_is_named(cls: Any) -> None:
    payload = b'[{"list":[{}]},{"list":["@%b"]}]' % cls.__qualname__.encode()
    with pytest.raises(NotDecodable, match=r"value\['list'\]\[0\]\.(name|id) cannot") as caught:
        codec.decode(payload, types_of(cls))
    assert caught.value.path


def test_a_class_that_the_annotation_no_longer_names_is_said_so() -> None:
    payload = codec.encode(Author("a"), types_of(Author))
    with pytest.raises(NotDecodable, match="'Author' is neither named by the annotation nor registered"):
        codec.decode(payload)


def test_an_enum_member_that_is_gone_is_said_so() -> None:
    with pytest.raises(NotDecodable):
        codec.decode(b'["GREEN","@Colour"]', types_of(Colour))


# --- what is refused


class StrSubclass(str):
    pass


class DictSubclass(dict[str, int]):
    pass


REFUSED = [
    (Author("a"), "Annotate .* or use everstep.register"), (StrSubclass("a"), "a subclass of str"),
    (DictSubclass(), "a subclass of dict"), (collections.defaultdict(list), "a subclass of dict"),
    (Size.SMALL, "Annotate"),
    ((n for n in [1]), "generator"), (threading.Lock(), "lock"), (print, "builtin"), (object(), "object"),
    (lambda: 1, "function"), (int, "is of the type type"), (..., "ellipsis"), (memoryview(b""), "memoryview"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=name_of)
def test_what_would_not_come_back_is_refused_with_a_remedy(value: Any, words: str) -> None:
    with pytest.raises(NotEncodable, match=words):
        codec.encode(value)
    with pytest.raises(NotEncodable, match=words) as caught:
        codec.encode({"a": [1, (2, value)]}, where="the result")
    assert caught.value.path == "the result['a'][1][1]"


def test_the_path_names_fields_members_and_keys() -> None:
    book = Book("t", [Author("a"), Author("b", born=object())])  # type: ignore[arg-type]
    with pytest.raises(NotEncodable, match=r"^value\.authors\[1\]\.born is of the type object") as caught:
        codec.encode(book, types_of(Book))
    assert caught.value.path == "value.authors[1].born"
    with pytest.raises(NotEncodable, match=r"value\[1\]\['k'\] is"):
        codec.encode({1: {"k": object()}})
    with pytest.raises(NotEncodable, match=r"value\.keys\(\)\[0\] is"):
        codec.encode({object(): 1})


def test_a_key_in_a_message_is_bounded() -> None:
    with pytest.raises(NotEncodable) as caught:
        codec.encode({"k" * 1000: object()})
    assert len(str(caught.value)) < 500


def test_a_value_that_contains_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    knot: dict[str, Any] = {}
    knot["a"] = (knot, knot)
    node = Node(1)
    node.next = node
    for value, types in ((circle, ANY), (knot, ANY), (node, types_of(Node))):
        with pytest.raises(NotEncodable, match="contains itself"):
            codec.encode(value, types)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}])
def test_a_value_of_depth_one_hundred_thousand_is_refused(wrap: Any) -> None:
    value: Any = 1
    for _ in range(10**5):
        value = wrap(value)
    with pytest.raises(NotEncodable, match="deeper than 100 levels"):
        codec.encode(value)
    while isinstance(value, list | tuple | dict):  # taken apart by hand, for the interpreter would do it recursively
        value = value["a"] if isinstance(value, dict) else value[0]


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}, Box])
def test_what_is_just_not_too_deep_comes_back(wrap: Any) -> None:
    value: Any = 1
    for _ in range(40):
        value = wrap(value)
    comes_back(value, Box)
    while is_encodable(wrap(value)):
        value = wrap(value)
    comes_back(value, Box)


def test_a_time_of_a_foreign_zone_is_refused() -> None:
    class Foreign(dt.tzinfo):
        def utcoffset(self, when: object) -> None: ...

        dst = utcoffset
        tzname = utcoffset

    with pytest.raises(NotEncodable, match="zoneinfo"):
        codec.encode([dt.datetime(2024, 1, 1, tzinfo=Foreign())])


# --- texts of annotations, scalars


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (bool, "bool"), (list[Author], "list[Author]"), (None, "None"), (int | None, "int | None"),
        (Optional[int], "int | None"),
        (dict[str, list[int]], "dict[str, list[int]]"), (Any, "Any"), ("Later", "Later"), (Annotated[int, 1], "int"),
        (Literal["a", 1], "Literal['a', 1]"), (tuple[int, ...], "tuple[int, ...]"), (list, "list"),
        (collections.abc.Callable[[int], str], "Callable[[int], str]"), (UserId, "UserId"), (Movie, "Movie"), (T, "T"),
    ],
)  # fmt: skip
def test_the_text_of_an_annotation_is_short_and_stable(annotation: Any, text: str) -> None:
    assert types_text(annotation) == text


def test_only_exact_scalars_count_as_such() -> None:
    assert all(map(is_immutable_scalar, (1, "a", 1.5, True, None, -(2**63))))
    assert not any(map(is_immutable_scalar, (2**63, float("nan"), StrSubclass("a"), Size.SMALL, (), b"", [])))
