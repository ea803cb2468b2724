"""Models of pydantic in states of LangGraph are read as they were saved, whatever their fields are called."""

import warnings
from typing import Annotated, Any, Literal

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model, field_validator
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass
from pydantic_core import core_schema
from typing_extensions import TypedDict

from everstep.integrations.langgraph.building import built
from everstep.integrations.langgraph.serde import StrictSerializer

KEYS = sorted(
    {key for one in vars(core_schema).values() if hasattr(one, "__required_keys__") for key in one.__annotations__}
)
"""All keys that parts of a pydantic schema have."""
CALLS: list[Any] = []


class Checked(BaseModel):
    n: int = 1

    @field_validator("n")
    @classmethod
    def check(cls, n: int) -> int:
        CALLS.append(n)
        return n


@pytest.mark.parametrize("base", [BaseModel, Checked])
@pytest.mark.parametrize("default", ["text", {"type": "model", "metadata": 1}, [{"type": "function-plain"}]])
def test_a_field_may_have_the_name_of_any_key_of_a_pydantic_schema(base: type[BaseModel], default: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are names of pydantic's own methods
        fields: Any = dict.fromkeys(KEYS, (Any, default))
        model = create_model("Model", __base__=base, **fields)
    assert {"type", "metadata", "serialization", "function", "schema", "choices"} < model.model_fields.keys()
    assert built(model, {}).model_dump() == model().model_dump()
    for key in KEYS:
        CALLS.clear()
        assert getattr(built(model, {key: "other"}), key) == "other"
        assert getattr(built(model, {key: default}), key) == default
        assert not CALLS


class Event(BaseModel):
    type: Literal["event"] = "event"
    metadata: dict[str, Any] = {}
    serialization: str = "s"


class Other(BaseModel):
    type: Literal["other"] = "other"
    function: int = 0


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    order_id: int
    paid_at: int | None = None


class CamelOrNot(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")
    order_id: int


class Written(BaseModel):
    """It is saved with its aliases."""

    model_config = ConfigDict(serialize_by_alias=True)
    order_id: int | None = Field(default=None, alias="orderId")


class Read(BaseModel):
    order_id: int | None = Field(default=None, validation_alias=AliasChoices("oid", "id"))


class Swapped(BaseModel):
    a: int = Field(alias="b")
    b: int = Field(alias="a")


class Typed(TypedDict):
    order_id: Annotated[int, Field(alias="orderId")]


@dataclass
class Data:
    order_id: int = Field(alias="orderId")


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    numbers: tuple[int, ...]
    within: Event
    swapped: Swapped


class Whole(Checked):
    one: Event | Other
    other: Annotated[Event | Other, Field(discriminator="type")]
    camels: list[Camel]
    by_name: dict[str, CamelOrNot]
    typed: Typed
    data: Data
    strict: Strict


STRICT = Strict(numbers=(1, 2), within=Event(metadata={"a": 1}), swapped=Swapped(a=1, b=2))


@pytest.mark.parametrize(
    "value",
    [
        Event(metadata={"type": "none"}, serialization="q"),
        Camel(orderId=1, paidAt=5),
        CamelOrNot(order_id=1),
        Written(orderId=1),
        Read(oid=1),
        Swapped(a=1, b=2),
        STRICT,
        Whole(
            n=2,
            one=Other(function=3),
            other=Event(serialization="q"),
            camels=[Camel(orderId=1)],
            by_name={"fields": CamelOrNot(order_id=4)},
            typed={"orderId": 1},  # type: ignore[typeddict-unknown-key, typeddict-item]
            data=Data(orderId=7),
            strict=STRICT,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_is_read_as_it_was_saved(value: BaseModel) -> None:
    for allowed in ([], [type(value)]):
        serializer = StrictSerializer(allowed)
        saved = serializer.dumps_typed(value)
        CALLS.clear()
        assert serializer.loads_typed(saved) == value
        assert bool(CALLS) == (bool(allowed) and isinstance(value, Checked))
