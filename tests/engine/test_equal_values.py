"""Models that are equal are equal: which fields were given is no difference, and is never shown."""

import re
from typing import Any

import pytest
from pydantic import BaseModel

import everstep
from everstep import step, workflow
from everstep.codec import Codec, fields_only, without_internals
from everstep.engine.app.client import Client
from everstep.errors import IdConflict
from everstep.view.run import run_view
from tests.engine.resume_helpers import Machine


class Signup(BaseModel):
    email: str
    plan: str = "free"


class Open(BaseModel):
    model_config = {"extra": "allow"}
    name: str = "x"


@step
async def enrol(signup: Signup) -> Signup:
    return signup


@workflow
async def signing_up(signup: Signup) -> Signup:
    await everstep.approval("enrol", signup, answer=bool)
    return await enrol(signup)


async def test_a_default_that_is_given_is_no_other_argument(machine: Machine) -> None:
    app, run = await machine.start(signing_up, Signup(email="a"), id="x")
    for same in (Signup(email="a", plan="free"), {"email": "a"}, {"email": "a", "plan": "free"}):
        assert (await app.start(signing_up, same, id="x")).id == run.id  # type: ignore[arg-type]
    for other in (Signup(email="a", plan="paid"), {"email": "b"}):
        with pytest.raises(IdConflict, match=re.escape('exists with other arguments ([[{"email":"a","plan":"free"}]')):
            await app.start(signing_up, other, id="x")  # type: ignore[arg-type]
    await run.approve(arguments=Signup(email="a", plan="free"))
    assert await run.result(timeout=60) == Signup(email="a")


async def test_a_run_that_was_started_by_name_is_the_same_run(machine: Machine) -> None:
    app = await machine.boot()
    await Client(app).start("signing_up", {"email": "a"}, id="x")
    assert (await app.start(signing_up, Signup(email="a"), id="x")).id == "x"
    with pytest.raises(IdConflict):
        await app.start(signing_up, Signup(email="b"), id="x")
    with pytest.raises(IdConflict):
        await Client(app).start("signing_up", {"email": "b"}, id="x")


async def test_what_is_shown_has_fields_and_nothing_else(machine: Machine) -> None:
    app, run = await machine.start(signing_up, Signup(email="a"), id="x")
    await machine.until(lambda: machine.kinds("x", "approval_asked"))
    (asked,) = await run.approvals()
    assert asked.arguments == {"email": "a", "plan": "free"}
    await run.approve()
    await run.result(timeout=60)
    await machine.clock.rest(app)
    view = run_view(machine.store, machine.row("x"))
    shown = [view.arguments, view.result, [(row.arguments, row.value) for row in view.rows]]
    assert "unset" not in str(shown)
    assert view.result == {"email": "a", "plan": "free"}
    assert view.rows[-1].value == '{"email":"a","plan":"free"}'


CUT = '[[{"email":"a","":{"unset":["plan"]}}],{"0":["@Signup"]}]'


@pytest.mark.parametrize("length", range(12, len(CUT) + 1))
def test_a_text_that_is_cut_off_anywhere_shows_no_internals(length: int) -> None:
    shown = without_internals(CUT[:length])
    assert "unset" not in shown
    assert '"":' not in shown
    assert shown.startswith('[[{"email":"')


@pytest.mark.parametrize(
    "value", [{"": 1}, {"": []}, {"": {}}, [{"a": {"": None}}], {"a": ""}, ["", {"": "x"}], {"": "", "b": 2}]
)
def test_data_of_a_user_is_shown_as_it_is(value: Any) -> None:
    assert fields_only(value) == value
    text = Codec().encode(value).decode()
    assert without_internals(text) == text


def test_what_a_model_holds_besides_its_fields_is_shown_with_them() -> None:
    assert fields_only({"name": "x", "": {"unset": ["name"], "extra": {"n": 1}, "private": {"_p": 2}}}) == {
        "name": "x",
        "n": 1,
    }
    assert (
        without_internals('{"name":"x","":{"unset":["name"],"extra":{"n":1}}}') == '{"name":"x","":{"extra":{"n":1}}}'
    )
