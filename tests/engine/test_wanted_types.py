"""The types that code waits for: what is no type is refused, and an answer of another type is told of at once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, Optional

import pytest

import everstep
from everstep import workflow
from everstep.codec import plain_type, types_text
from everstep.errors import ApprovalConflict, Misuse
from everstep.model.options import checked_type
from tests.engine.resume_helpers import Machine


@dataclass
class Verdict:
    ok: bool


HALF = "\ud800"
NO_TYPES: list[Any] = ["int", HALF, 3, [1], {1}, object(), len, asyncio, list["int"], list[3], Literal[HALF]]  # type: ignore[misc,valid-type]
TYPES: list[Any] = [
    *(int, None, Any, object, Verdict, list, list[int], dict[str, Verdict | None], Optional[int], tuple[int, ...]),  # noqa: UP045
    *(Literal["a", 3], Annotated[int, "any"], NewType("Amount", int), Callable[[int], str]),
]
WANTED: dict[str, Any] = {
    "list": list[int],
    "dict": dict[str, int],
    "union": int | None,
    "literal": Literal["yes", "no"],
    "class": Verdict,
}
GOOD: dict[str, Any] = {"list": [1, 2], "dict": {"a": 1}, "union": None, "literal": "yes", "class": {"ok": True}}


@workflow(name="wanted-approval")
async def approving(name: str) -> Any:
    return repr(await everstep.approval("it", 1, answer=WANTED[name]))


@pytest.mark.parametrize("value", NO_TYPES, ids=map(str, range(len(NO_TYPES))))
async def test_what_is_no_type_is_refused_in_the_code_at_the_call(value: Any) -> None:
    @workflow
    async def giving() -> list[str]:
        async def first(requests: Any) -> None:
            await anext(requests)

        told = []
        for call in (
            lambda: everstep.receive("x", value),
            lambda: everstep.approval("x", 1, answer=value),
            lambda: first(everstep.requests("x", value)),
            lambda: first(everstep.requests("x", answer=value)),
        ):
            try:
                await call()
            except Misuse as refused:
                told.append(str(refused))
        return told

    async with everstep.open("memory:") as app:
        told = await (await app.start(giving)).result(timeout=60)
        assert len(told) == 4
        assert all("it is a type, such as" in one for one in told)
        with pytest.raises(Misuse, match="it is a type"):
            await app.ask("r", "x", 1, answer=value)


@pytest.mark.parametrize("value", TYPES, ids=map(str, range(len(TYPES))))
def test_what_is_a_type_is_taken_and_has_a_text_that_can_be_stored(value: Any) -> None:
    assert checked_type("type", value) is value
    types_text(value).encode()


def test_a_text_names_a_type_only_if_all_its_parts_are_built_in() -> None:
    for one in (int, list[int], dict[str, list[int | None]], tuple[int, ...], Literal["a", 3], None, Any):
        assert plain_type(types_text(one)) == one
    for text in (
        "Verdict",
        "list[Verdict]",
        "os.system",
        "print(1)",
        "list[",
        "[" * 400,
        "list[int]" * 400,
        "int[str]",
    ):
        assert plain_type(text) is ...


@pytest.mark.parametrize("name", WANTED)
async def test_an_answer_of_another_type_is_refused_at_once_where_the_type_is_known(
    machine: Machine, name: str
) -> None:
    app, run = await machine.start(approving, name, id="r")
    await machine.until(lambda: len(machine.kinds("r", "approval_asked")) == 1)
    for answerer in (app, await machine.boot(queues=["none"])):
        for wrong in ("seven", 1.5, [1.5], {"a": "b"}):
            with pytest.raises(ApprovalConflict, match="wants a"):
                await answerer.approve("r", wrong)
    await run.approve(GOOD[name])
    assert await run.result() == repr(Verdict(True) if name == "class" else GOOD[name])
    assert machine.kinds("r", "signal_rejected") == []
