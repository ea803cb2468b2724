"""What comes back as what: each line of the table in docs/howto/types.md, at every place that takes a value."""

import collections
import datetime as dt
import decimal
import enum
import ipaddress
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar

import attrs
import msgspec
import numpy as np
import pytest
from pydantic import BaseModel, Field

import everstep
from everstep import step, workflow
from everstep.cli.arguments import decoded_arguments
from everstep.engine.app.client import Client
from everstep.engine.code.workflow import DECLARED
from everstep.stores.opening import open_store
from tests.engine.resume_helpers import Machine
from tests.house.sources import ROOT

T = TypeVar("T")
PAGE = ROOT / "docs" / "howto" / "types.md"
PLACES = ("code", "sent", "json", "published", "export")
"""The columns of the table: how a value comes back from these places."""


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True)
class Frozen:
    x: int
    tags: frozenset[str] = field(default_factory=frozenset)


@attrs.define
class Box:
    width: int


class Options(TypedDict):
    depth: int


class Pair(NamedTuple):
    left: int
    right: str


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Span(msgspec.Struct):
    start: int


class Order(BaseModel):
    product: str
    count: int = 1
    at: dt.datetime | None = None


class Card(BaseModel):
    kind: Literal["card"]
    number: str


class Cash(BaseModel):
    kind: Literal["cash"]


class Page(BaseModel, Generic[T]):
    items: list[T]


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    def __hash__(self) -> int:
        return self.cents


everstep.register(Money, encode=lambda money: money.cents, decode=Money)


class Frame:
    """Stands for a data frame of pandas: its class says itself how it becomes bytes, and is registered."""

    def __init__(self, columns: dict[str, list[float]]) -> None:
        self.columns = columns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and other.columns == self.columns

    __hash__ = None  # type: ignore[assignment]


everstep.register(
    Frame,
    encode=lambda frame: msgspec.msgpack.encode(frame.columns),  # for pandas: frame.to_parquet()
    decode=lambda data: Frame(msgspec.msgpack.decode(data)),  # for pandas: pd.read_parquet(io.BytesIO(data))
)

Amount = NewType("Amount", int)
MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
ID = "7d444840-9dc0-11d1-b245-5ffdce74fad2"


class Case(NamedTuple):
    annotation: Any
    value: Any
    json: str
    """What a person or another program sends; nothing if JSON cannot say it."""


CASES: dict[str, Case] = {
    "`bool`": Case(bool, True, "true"),
    "`int`": Case(int, 2**70, "5"),
    "`float`": Case(float, float("inf"), "1.5"),
    "`str`": Case(str, "ü", '"ü"'),
    "`None`": Case(None, None, "null"),
    "`bytes`": Case(bytes, b"hi", '"aGk="'),
    "`list[int]`": Case(list[int], [1], "[1]"),
    "`dict[str, int]`": Case(dict[str, int], {"a": 1}, '{"a": 1}'),
    "`dict[int, str]`": Case(dict[int, str], {1: "a"}, '{"1": "a"}'),
    "`tuple[int, str]`": Case(tuple[int, str], (1, "a"), '[1, "a"]'),
    "`set[int]`": Case(set[int], {1}, "[1]"),
    "`frozenset[int]`": Case(frozenset[int], frozenset({1}), "[1]"),
    "`deque[int]`": Case(collections.deque[int], collections.deque([1]), ""),
    "`Sequence[int]`": Case(Sequence[int], [1], "[1]"),
    "`Mapping[str, int]`": Case(Mapping[str, int], {"a": 1}, '{"a": 1}'),
    "`int | str`": Case(int | str, "a", '"a"'),
    "`Optional[int]`": Case(Optional[int], None, "null"),  # noqa: UP045
    "`Literal['a', 'b']`": Case(Literal["a", "b"], "a", '"a"'),
    "`NewType`": Case(Amount, 5, "5"),
    "`Annotated[int, Field(gt=0)]`": Case(Annotated[int, Field(gt=0)], 7, "7"),
    "`Any`": Case(Any, {"a": [1, None]}, '{"a": [1, null]}'),
    "`datetime`": Case(dt.datetime, MOMENT, '"2026-01-02T03:04:05Z"'),
    "`date`": Case(dt.date, dt.date(2026, 1, 2), '"2026-01-02"'),
    "`time`": Case(dt.time, dt.time(3, 4), '"03:04:00"'),
    "`timedelta`": Case(dt.timedelta, dt.timedelta(days=1), '"P1D"'),
    "`Decimal`": Case(decimal.Decimal, decimal.Decimal("1.50"), '"1.50"'),
    "`UUID`": Case(uuid.UUID, uuid.UUID(ID), f'"{ID}"'),
    "`Path`": Case(Path, Path("/etc"), '"/etc"'),
    "`IPv4Address`": Case(ipaddress.IPv4Address, ipaddress.IPv4Address("10.0.0.1"), ""),
    "`complex`": Case(complex, 1 + 2j, ""),
    "`Enum`": Case(Colour, Colour.RED, '"red"'),
    "`IntEnum`": Case(Level, Level.HIGH, "3"),
    "dataclass": Case(Point, Point(1), '{"x": 1}'),
    "frozen dataclass": Case(Frozen, Frozen(1, frozenset({"a"})), '{"x": 1, "tags": ["a"]}'),
    "attrs class": Case(Box, Box(1), '{"width": 1}'),
    "`TypedDict`": Case(Options, {"depth": 1}, '{"depth": 1}'),
    "`NamedTuple`": Case(Pair, Pair(1, "a"), '[1, "a"]'),
    "`msgspec.Struct`": Case(Span, Span(1), '{"start": 1}'),
    "pydantic model": Case(Order, Order(product="tea", at=MOMENT), '{"product": "tea"}'),
    "list of models": Case(list[Order], [Order(product="tea")], '[{"product": "tea"}]'),
    "discriminated union": Case(
        Annotated[Card | Cash, Field(discriminator="kind")], Card(kind="card", number="4"), '{"kind": "cash"}'
    ),
    "generic model": Case(Page[int], Page[int](items=[1]), '{"items": [1]}'),
    "registered class": Case(Money, Money(120), "120"),
    "numpy scalar": Case(np.float32, np.float32(1.5), "1.5"),
    "numpy array": Case(np.ndarray, np.arange(6.0).reshape(2, 3), "[[1.5], [2.5]]"),
    "pandas frame (registered)": Case(Frame, Frame({"a": [1.0]}), ""),
}
SEEN: dict[str, Any] = {}


def declare(name: str, annotation: Any) -> Any:
    """Declare the workflows that take a type everywhere."""
    name = f"matrix-{list(CASES).index(name)}"

    @step
    async def give(value: annotation) -> annotation:
        SEEN["step argument"] = value
        return value

    @workflow(name=name)
    async def places(value: annotation) -> annotation:
        SEEN["argument"] = value
        result = await give(value)
        SEEN["result"] = result
        SEEN["signal"] = await everstep.receive("signal", annotation)
        SEEN["approval"] = await everstep.approval("approval", None, answer=annotation)
        async for request in everstep.requests("request", annotation):
            SEEN["request"] = request.value
            request.answer(None)
            break
        SEEN["json signal"] = await everstep.receive("json", annotation)
        SEEN["json approval"] = await everstep.approval("json", None, answer=annotation)
        everstep.publish("published", result)
        everstep.stream("stream").append(result)
        SEEN["checkpoint"] = state = await everstep.checkpoint(result)
        await everstep.receive("end")
        return state

    @workflow(name=f"{name}-by-name")
    async def by_name(value: annotation) -> None:
        SEEN["client"] = value

    return places


def how(value: Any, expected: Any) -> str:
    """Return how a value came back."""
    if type(value) is not type(expected):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.ndarray | np.generic):
        return "itself" if value.dtype == expected.dtype and value.tolist() == expected.tolist() else repr(value)
    return "itself" if value == expected else repr(value)


def is_json(value: Any) -> bool:
    """Tell whether a value consists of what JSON and the table's built-in types have."""
    if isinstance(value, dict | list):
        return type(value) in (dict, list) and all(map(is_json, value.values() if isinstance(value, dict) else value))
    return value is None or type(value) in (bool, int, float, str, dt.datetime, frozenset)


async def cells(machine: Machine, name: str, case: Case) -> dict[str, str]:
    """Send a value to all places, and return what came back, for each column of the table."""
    SEEN.clear()
    flow = declare(name, case.annotation)
    app, run = await machine.start(flow, case.value, id="r")
    given: Any = msgspec.json.decode(case.json) if case.json else case.value
    await run.signal("signal", case.value)
    await machine.until(lambda: machine.kinds("r", "approval_asked"))
    await run.approve(case.value)
    await run.ask("request", case.value, timeout=20)
    await run.signal("json", given)
    await machine.until(lambda: len(machine.kinds("r", "approval_asked")) == 2)
    await run.approve(given)
    await machine.clock.rest(app)
    lives = [dict(SEEN)]
    await machine.kill(app)
    SEEN.clear()
    app = await machine.worker()
    published = (await app.get("r").published())["published"]
    await app.signal("r", "end")
    (entry,) = [one.value async for one in app.get("r").stream("stream")]
    result = await app.get("r").result(timeout=20)
    lives.append(dict(SEEN))
    assert how(result, case.value) == "itself"
    assert how(entry, published) == "itself", "a stream gives what was published"
    told = {"published": how(published, case.value)}
    if told["published"] != "itself":  # then it is what JSON has, without any class
        told["published"] = f"`{msgspec.json.encode(published).decode()}`"
        assert is_json(published)
    for life in lives:
        sent = {place: value for place, value in life.items() if not place.startswith(("json", "client"))}
        assert "checkpoint" in sent
        assert {place: how(value, case.value) for place, value in sent.items()} == dict.fromkeys(sent, "itself")
    told["code"] = told["sent"] = "itself"
    told["json"] = await from_json(app, machine, flow, case, lives[0]) if case.json else "no"
    await app.export(["r"], str(machine.folder / "export"))
    other = await machine.boot(store=open_store("memory:"))
    await other.import_(str(machine.folder / "export"))
    told["export"] = how(await other.get("r").result(timeout=20), case.value)
    return told


async def from_json(app: Any, machine: Machine, flow: Any, case: Case, seen: dict[str, Any]) -> str:
    """Return what plain data becomes: the same by a signal, an approval, a client and the command line."""
    declared = DECLARED.named(flow.name)
    (expected,) = decoded_arguments(declared, (case.json,))
    assert how(seen["json signal"], expected) == how(seen["json approval"], expected) == "itself"
    await Client(app).start(f"{flow.name}-by-name", msgspec.json.decode(case.json), id="n")
    await app.take_up_run("n")
    await app.get("n").result(timeout=20)
    assert how(SEEN["client"], expected) == "itself"
    kind = type(expected)
    assert kind is type(case.value) or kind is Cash
    return f"`{case.json}`"


def table() -> dict[str, dict[str, str]]:
    """Return the table of the page: by the first column."""
    found = {}
    for line in PAGE.read_text("utf-8").splitlines():
        told = [one.strip().replace("\\|", "|") for one in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(told) == len(PLACES) and told[0] not in ("type", "---"):
            found[told[0]] = {
                "json": told[1],
                "code": told[2],
                "sent": told[2],
                "published": told[3],
                "export": told[4],
            }
    return found


def test_the_table_has_a_line_for_each_type_and_no_cell_is_empty() -> None:
    lines = table()
    assert list(lines) == list(CASES)
    assert len(lines) >= 40
    assert all(all(cells.values()) for cells in lines.values())


@pytest.mark.parametrize("name", CASES)
async def test_a_value_comes_back_as_the_table_says(machine: Machine, name: str) -> None:
    assert await cells(machine, name, CASES[name]) == table()[name]
