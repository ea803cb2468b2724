"""`replaced`: a function in place of a step's body, with the step's name, contract, retries and history."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Retry, step, workflow
from everstep.errors import Misuse
from everstep.testing import replaced
from everstep.testing.skipping import skipping_app


@step(effect="read", retry=Retry(attempts=3))
async def ask(question: str, *, tries: int = 1) -> str:
    raise AssertionError("the real body")


@step
def save(text: str) -> str:
    raise AssertionError("the real body")


class Shop:
    @step
    async def sell(self, item: str) -> str:
        raise AssertionError("the real body")


@workflow
async def flow(topic: str) -> str:
    return await asyncio.to_thread(save, await ask(topic) + await Shop().sell("lamp"))


def test_fakes_run_in_place_of_bodies_and_the_history_is_the_same() -> None:
    def on(question: str, *, tries: int = 1) -> str:
        return f"on {question}"

    async def sold(self: Shop, item: str) -> str:
        return f" sold {item}"

    with (
        skipping_app() as app,
        replaced(ask, on) as asked,
        replaced(save, lambda text: text.upper()) as saved,
        replaced(Shop.sell, sold),
    ):
        run = app.start(flow, "tides", id="r")
        assert run.result() == "ON TIDES SOLD LAMP"
        names = [event.step for event in run.history() if event.kind == "step_started"]
        assert names == ["ask", "Shop.sell", "save"]
        assert run.verify().sound
    assert asked.calls == [{"question": "tides", "tries": 1}]
    assert saved.calls == [{"text": "on tides sold lamp"}]


def test_a_fake_that_fails_is_retried_as_the_step_is_and_sees_its_key() -> None:
    keys: list[str] = []

    async def flaky(question: str, *, tries: int = 1) -> str:
        keys.append(everstep.key())
        if len(keys) < 3:
            raise ConnectionError
        return "third"

    @workflow
    async def asks() -> str:
        return await ask("x", tries=2)

    with skipping_app() as app, replaced(ask, flaky) as fake:
        assert app.run(asks) == "third"
    assert len(set(keys)) == 1
    assert fake.calls == [{"question": "x", "tries": 2}] * 3


def test_after_the_block_the_step_is_the_real_one_also_after_an_error() -> None:
    def fails() -> None:
        with replaced(save, lambda text: text):
            assert save("plain call") == "plain call"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with pytest.raises(AssertionError, match="the real body"):
        save("x")


def test_a_fake_may_be_a_step_and_fakes_may_be_nested() -> None:
    @step
    def other(text: str) -> str:
        return f"other {text}"

    with replaced(save, other), replaced(save, lambda text: f"inner {text}"):
        assert save("x") == "inner x"
    with replaced(save, other):
        assert save("x") == "other x"


def test_what_is_no_step_or_no_fitting_fake_is_refused() -> None:
    async def wrong(text: str) -> str:
        return text

    target: Any = print
    with pytest.raises(Misuse, match="for steps"), replaced(target, print):
        pass
    with pytest.raises(Misuse, match="`def` instead"), replaced(save, wrong):
        pass
    with pytest.raises(Misuse, match="fake="), replaced(save, 5):  # type: ignore[call-overload]
        pass
