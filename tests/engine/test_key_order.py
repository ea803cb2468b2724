"""Equal dicts are equal whatever the order of their keys: in signals, requests, approvals, answers and results."""

from typing import Any

import pytest

import everstep
from everstep import workflow
from everstep.codec import Codec, meaning_digest
from everstep.engine.code import approvals
from everstep.errors import ApprovalConflict, IdConflict
from everstep.model.digests import digest_of
from tests.engine.resume_helpers import Machine

FORWARD: dict[str, Any] = {"a": 1, "b": {"x": [1], "y": {"p", "q"}}, "c": None}
BACKWARD: dict[str, Any] = {"c": None, "b": {"y": {"q", "p"}, "x": [1]}, "a": 1}
OTHERS: list[Any] = [
    FORWARD | {"a": 1.0},
    FORWARD | {"a": True},
    FORWARD | {"a": "1"},
    FORWARD | {"b": {"x": [1], "y": ["p", "q"]}},
    FORWARD | {"b": {"x": (1,), "y": {"p", "q"}}},
    {"a": 1},
    list(FORWARD.items()),
    None,
]
NOW: dict[str, Any] = {"large": False, "secret": False, "is_backward": False}


def shown() -> dict[str, Any]:
    """Return what the code says in this life: as large, and in the order, that the test wants."""
    value = BACKWARD if NOW["is_backward"] else FORWARD
    return value | {"z": "z" * 200_000} if NOW["large"] else value


@workflow(name="order-waits")
async def waits() -> Any:
    return await everstep.receive("never")


@workflow(name="order-answers")
async def answers() -> Any:
    async for request in everstep.requests("what"):
        request.answer(shown())


@workflow(name="order-asks")
async def asks() -> Any:
    return [await everstep.approval("this", shown(), secret=NOW["secret"]), await everstep.approval("that", 1)]


@workflow(name="order-ends")
async def ends() -> Any:
    return shown()


@pytest.fixture(autouse=True)
def plain() -> Any:
    NOW.update(large=False, secret=False, is_backward=False)
    yield
    NOW.update(large=False, secret=False, is_backward=False)


def test_the_digest_of_a_meaning_knows_no_order_and_tells_all_else_apart() -> None:
    codec = Codec()
    same = meaning_digest(codec.encode(FORWARD))
    assert meaning_digest(codec.encode(BACKWARD)) == same
    digests = [meaning_digest(codec.encode(other)) for other in OTHERS]
    assert len({same, *digests}) == len(OTHERS) + 1
    plain = codec.encode({"a": 1, "b": [True]})
    assert meaning_digest(plain) == digest_of(plain).hex()  # as the releases before wrote it
    assert meaning_digest(b"damaged") == digest_of(b"damaged").hex()


async def test_a_signal_that_is_sent_again_with_its_keys_in_another_order_is_the_same(machine: Machine) -> None:
    _, run = await machine.start(waits, id="r")
    assert await run.signal("go", FORWARD, id="s")
    assert not await run.signal("go", BACKWARD, id="s")
    for other in OTHERS:
        with pytest.raises(IdConflict):
            await run.signal("go", other, id="s")
    with pytest.raises(IdConflict):
        await run.signal("stop", FORWARD, id="s")


async def test_a_request_that_is_asked_again_with_its_keys_in_another_order_is_the_same(machine: Machine) -> None:
    _, run = await machine.start(answers, id="r")
    assert await run.ask("what", FORWARD, id="q") == await run.ask("what", BACKWARD, id="q") == FORWARD
    for other in OTHERS:
        with pytest.raises(IdConflict):
            await run.ask("what", other, id="q")


async def test_an_approval_of_arguments_whose_keys_have_another_order_is_of_the_same(machine: Machine) -> None:
    _, run = await machine.start(asks, id="r")
    await machine.until(lambda: len(machine.kinds("r", "approval_asked")) == 1)
    for other in OTHERS:
        with pytest.raises(ApprovalConflict, match="other arguments"):
            await run.approve(True, arguments=other)
    await run.approve(True, arguments=BACKWARD)


async def _answered_after_a_crash(machine: Machine, *, before: bool) -> None:
    """Let a run ask, die, go on with its keys in another order, and be answered before or after that."""
    app, _ = await machine.start(asks, id="r")
    await machine.until(lambda: len(machine.kinds("r", "approval_asked")) == 1)
    if before:
        await app.approve("r", "yes", what="this")
        await machine.until(lambda: len(machine.kinds("r", "approval_asked")) == 2)
    await machine.kill(app)


async def _goes_on(machine: Machine, *, before: bool) -> None:
    app = await machine.worker()
    if not before:
        await app.approve("r", "yes", what="this", arguments=... if NOW["secret"] else shown())
        await machine.until(lambda: len(machine.kinds("r", "approval_asked")) == 2 or machine.status("r") == "held")
    await app.approve("r", "also", what="that")
    assert await app.get("r").result() == ["yes", "also"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["plain", "large", "secret"])
async def test_an_approval_is_of_the_same_when_the_code_orders_its_keys_otherwise_now(
    machine: Machine, how: str, before: bool
) -> None:
    NOW.update({"large": how == "large", "secret": how == "secret"})
    await _answered_after_a_crash(machine, before=before)
    NOW["is_backward"] = True
    await _goes_on(machine, before=before)


# Of a secret the digest is all there is, and an older one is of the order that the keys had.
@pytest.mark.parametrize(
    ("how", "same_order"), [("plain", True), ("plain", False), ("large", True), ("large", False), ("secret", True)]
)
@pytest.mark.parametrize("before", [True, False])
async def test_an_approval_that_the_release_before_asked_for_is_still_answered(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str, before: bool, same_order: bool
) -> None:
    """That release made digest and id from the payload, in the order that the keys had."""
    NOW.update({"large": how == "large", "secret": how == "secret"})
    with monkeypatch.context() as older:
        older.setattr(approvals, "meaning_digest", lambda payload: digest_of(payload).hex())
        NOW["is_backward"] = same_order
        await _answered_after_a_crash(machine, before=before)
    NOW["is_backward"] = True
    await _goes_on(machine, before=before)


@pytest.mark.parametrize("large", [True, False])
async def test_an_answer_and_a_result_are_the_same_when_the_code_orders_their_keys_otherwise_now(
    machine: Machine, large: bool
) -> None:
    NOW["large"] = large
    app, run = await machine.start(answers, id="q")
    await run.ask("what", 1, id="1")
    await app.run(ends, id="e")
    NOW["is_backward"] = True
    assert machine.replay("q").differences == []
    assert machine.replay("e").differences == []
    NOW["large"] = not large
    assert [one.what for one in machine.replay("q").differences] == ["answer"]
    assert [one.what for one in machine.replay("e").differences] == ["result"]
