"""Plain data becomes the declared type, or the error names the part that does not fit."""

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar

import attrs
import msgspec
import pytest
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass as checked_dataclass

import everstep
from everstep.codec import as_declared, converted
from everstep.errors import NotDecodable

T = TypeVar("T")


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


@dataclasses.dataclass
class Place(Point):
    name: str = ""


@dataclasses.dataclass
class Circle:
    radius: int


class Colour(enum.Enum):
    RED = "red"


class Options(TypedDict):
    depth: int


class Pair(NamedTuple):
    left: int
    right: str = "r"


@attrs.define
class Box:
    width: int
    inner: Point | None = None


class Span(msgspec.Struct):
    start: int


class Line(BaseModel):
    product: str
    count: int = 1


class Order(BaseModel):
    id: str
    lines: list[Line] = []
    at: dt.datetime | None = None


class Strict(BaseModel):
    model_config = {"strict": True}
    at: dt.datetime
    where: Point


class Card(BaseModel):
    kind: Literal["card"]
    number: str


class Cash(BaseModel):
    kind: Literal["cash"]


class Page(BaseModel, Generic[T]):
    items: list[T]


@checked_dataclass
class Checked:
    amount: Annotated[int, Field(gt=0)]


class Coin:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coin) and other.cents == self.cents

    __hash__ = None  # type: ignore[assignment]


def coin_of(text: Any) -> Coin:
    return Coin(round(float(text) * 100))


everstep.register(Coin, encode=lambda money: f"{money.cents / 100:.2f}", decode=coin_of)

Amount = NewType("Amount", int)
Payment = Annotated[Card | Cash, Field(discriminator="kind")]
NEW_YEAR = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
ID = "7d444840-9dc0-11d1-b245-5ffdce74fad2"

FITS: list[tuple[Any, Any, Any]] = [
    (1, int, 1),
    (1, float, 1.0),
    ("a", str | int, "a"),
    (None, Optional[int], None),  # noqa: UP045
    ("x", Literal["x", "y"], "x"),
    (5, Amount, 5),
    ("2026-01-02T03:04:05Z", dt.datetime, dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)),
    ("2026-01-02", dt.date, dt.date(2026, 1, 2)),
    ("03:04:05", dt.time, dt.time(3, 4, 5)),
    ("P1D", dt.timedelta, dt.timedelta(days=1)),
    ("1.50", decimal.Decimal, decimal.Decimal("1.50")),
    (ID, uuid.UUID, uuid.UUID(ID)),
    ("aGk=", bytes, b"hi"),
    ("red", Colour, Colour.RED),
    ("/etc", Path, Path("/etc")),
    (["/etc"], list[PurePath], [PurePath("/etc")]),
    ([1, 2], set[int], {1, 2}),
    ([1, 2], frozenset[int], frozenset({1, 2})),
    ([1, "a"], tuple[int, str], (1, "a")),
    ([1, 2], tuple[int, ...], (1, 2)),
    ({"x": 1}, Point, Point(1)),
    ({"a": [{"x": 1}]}, dict[str, list[Point]], {"a": [Point(1)]}),
    ({"radius": 2}, Point | Circle, Circle(2)),
    ([{"radius": 2}, {"x": 1}], list[Point | Circle], [Circle(2), Point(1)]),
    ({"a": {"radius": 2}}, dict[str, Point | Circle], {"a": Circle(2)}),
    ({"depth": 3}, Options, {"depth": 3}),
    ([1, "a"], Pair, Pair(1, "a")),
    ({"width": 1, "inner": {"x": 2}}, Box, Box(1, Point(2))),
    ({"start": 4}, Span, Span(4)),
    ("12.50", Coin, Coin(1250)),
    (["1", "2"], list[Coin], [Coin(100), Coin(200)]),
    ({"id": "a", "lines": [{"product": "tea"}]}, Order, Order(id="a", lines=[Line(product="tea")])),
    ([{"product": "tea"}], list[Line], [Line(product="tea")]),
    ({"product": "tea"}, Line | None, Line(product="tea")),
    (None, Line | None, None),
    ({"kind": "cash"}, Card | Cash, Cash(kind="cash")),
    ({"kind": "card", "number": "4"}, Payment, Card(kind="card", number="4")),
    ({"items": [{"x": 1}]}, Page[Point], Page[Point](items=[Point(1)])),
    ({"amount": 3}, Checked, Checked(3)),
    (7, Annotated[int, Field(gt=5)], 7),
    ({"at": "2026-01-02T00:00:00Z", "where": {"x": 1}}, Strict, Strict(at=NEW_YEAR, where=Point(1))),
    ({"k": Line(product="tea")}, dict[str, Line], {"k": Line(product="tea")}),
    ({"anything": [1]}, Any, {"anything": [1]}),
    ({"anything": [1]}, object, {"anything": [1]}),
]  # fmt: skip

MISFITS: list[tuple[Any, Any, str]] = [
    (True, int, "Expected `int`, got `bool`"),
    ("1", int, "Expected `int`, got `str`"),
    (1, None, "Expected `null`"),
    ("z", Literal["x", "y"], "Invalid enum value 'z'"),
    ("blue", Colour, "Invalid enum value 'blue'"),
    ({"x": "1"}, Point, "Expected `int`, got `str` - at `$.x`"),
    ({"x": -1}, Point, "x is negative"),
    ({"a": [{"y": 1}]}, dict[str, list[Point]], "missing required field `x` - at `$[...][0]`"),
    ({"z": 1}, Point | Circle, "as Point: Object missing required field `x`; as Circle: Object missing"),
    ([{"z": 1}], list[Point | Circle], "`$[0]`: as Point"),
    (3, Path, "a text is needed, not int"),
    ("much", Coin, "does not accept it"),
    ({"id": 1, "lines": [{}]}, Order, "`$.id`: Input should be a valid string; `$.lines[0].product`: Field required"),
    ({"kind": "cheque"}, Payment, "does not match any of the expected tags"),
    (3, Annotated[int, Field(gt=5)], "Input should be greater than 5"),
    ({"amount": 0}, Checked, "`$.amount`: Input should be greater than 0"),
    ({"items": ["a"]}, Page[int], "`$.items[0]`: Input should be a valid integer"),
    ({"a": 1}, Callable[[], int], "Expected `Callable[[], int]`, got `dict`"),
]


@pytest.mark.parametrize(("value", "annotation", "expected"), FITS, ids=lambda one: None)
def test_plain_data_becomes_the_declared_type(value: Any, annotation: Any, expected: Any) -> None:
    made = converted(value, annotation).value
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize(("value", "annotation", "expected"), FITS, ids=lambda one: None)
def test_what_is_of_the_type_already_stays_equal(value: Any, annotation: Any, expected: Any) -> None:
    assert converted(expected, annotation).value == expected
    assert as_declared(expected, annotation) == expected


@pytest.mark.parametrize(("value", "annotation", "why"), MISFITS, ids=lambda one: None)
def test_what_does_not_fit_is_refused_with_the_place(value: Any, annotation: Any, why: str) -> None:
    with pytest.raises(NotDecodable) as refused:
        converted(value, annotation)
    assert why in str(refused.value)


def test_of_many_wrong_parts_five_are_named() -> None:
    with pytest.raises(NotDecodable, match="and 4 more"):
        converted([{} for _ in range(9)], list[Line])


def test_whether_code_of_the_type_had_a_say_is_told() -> None:
    assert converted({"product": "tea"}, Line).ran_code
    assert converted("1", Coin).ran_code
    assert converted("/", Path).ran_code
    assert not converted(Line(product="tea"), Line).ran_code
    assert not converted([1], set[int]).ran_code


KEPT: list[tuple[Any, Any]] = [
    (Place(1, name="here"), Point),
    ((1, 2), Sequence[int]),
    (collections.OrderedDict(a=1), Mapping[str, int]),
    (1, float),
    (NEW_YEAR, dt.date),
]


@pytest.mark.parametrize(("value", "annotation"), KEPT, ids=lambda one: None)
def test_what_python_code_gives_of_a_type_is_not_changed(value: Any, annotation: Any) -> None:
    assert as_declared(value, annotation) is value


def test_memory_that_is_refused_says_nothing_about_the_value() -> None:
    @dataclasses.dataclass
    class Greedy:
        x: int

        def __post_init__(self) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        converted({"x": 1}, Greedy)
