"""An acknowledged signal is seen by the generation that it was sent to, or its sender is told why not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.verbs.approve import open_approvals
from everstep.errors import ApprovalConflict, IdConflict, Misuse, RunEnded
from everstep.model.exchange_events import APPROVAL
from everstep.stores.protocol import Post
from everstep.testing.checker import check
from everstep.testing.histories import export_histories
from tests.engine.resume_helpers import Machine

FAILS: list[bool] = [False]
MEANWHILE: list[Callable[[], Any]] = []
"""What another process does just before the step fails."""


@step
async def may_fail() -> str:
    while MEANWHILE:
        MEANWHILE.pop()()
    if FAILS[0]:
        raise ValueError("broken")
    return "done"


@workflow
async def works_then_listens(words: int = 1) -> list[str]:
    await everstep.receive("go", bool)
    await may_fail()
    return [await everstep.receive("word", str) for _ in range(words)]


@workflow
async def works_then_answers() -> str:
    await everstep.receive("go", bool)
    await may_fail()
    async for request in everstep.requests("what", str, answer=str):
        request.answer(request.value.upper())
        break
    return "answered"


@workflow
async def asks_then_works() -> str:
    async with asyncio.TaskGroup() as both:
        asked = both.create_task(everstep.approval("pay", {"usd": 1}, answer=bool))
        await everstep.receive("go", bool)
        await may_fail()
    return str(asked.result())


async def failed_with(app: App, machine: Machine, *sent: tuple[str, str]) -> None:
    """A run that fails just after these signals were acknowledged, before it has looked at them."""
    FAILS[0] = True
    posts = [Post("r", "signal", "word", id, f'["{value}"]'.encode(), app.clock.now()) for value, id in sent]
    MEANWHILE.append(lambda: machine.store.commit(posts))
    run = await app.start(works_then_listens, len(sent), id="r")
    await run.signal("go", True)
    with pytest.raises(ValueError, match="broken"):
        await run.result()
    states = [one.state for one in machine.store.signals("r") if one.name == "word"]
    assert states == ["undelivered"] * len(sent)
    FAILS[0] = False
    await machine.stop(app)


async def test_what_a_failed_run_had_not_taken_is_delivered_when_it_is_retried(machine: Machine) -> None:
    await failed_with(await machine.boot(), machine, ("a", "one"), ("b", ""), ("c", "two"))
    app = await machine.worker()
    await app.retry("r")
    assert await app.get("r").result() == ["a", "b", "c"]
    assert check(export_histories(machine.store)) == []


async def test_start_with_retry_delivers_it_too(machine: Machine) -> None:
    await failed_with(await machine.boot(), machine, ("a", "one"))
    _, run = await machine.start(works_then_listens, 1, id="r", on_existing="retry")
    assert await run.result() == ["a"]


async def test_a_sender_that_tries_again_is_told_that_the_run_ended_without_the_signal(machine: Machine) -> None:
    await failed_with(await machine.boot(), machine, ("a", "one"))
    app = await machine.boot()
    with pytest.raises(RunEnded, match=r"ended without taking it.*everstep retry r"):
        await app.signal("r", "word", "a", id="one")
    with pytest.raises(RunEnded):
        await app.signal("r", "word", "a", id="another")
    await app.retry("r")
    assert await app.signal("r", "word", "a", id="one") is False, "it is in its inbox again"
    worker = await machine.worker()
    assert await worker.get("r").result() == ["a"]
    assert await app.signal("r", "word", "a", id="one") is False, "it was taken: that is acknowledged, also now"


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
async def test_an_id_of_an_earlier_generation_reaches_a_restarted_run(machine: Machine, end: str) -> None:
    app = await machine.worker()
    FAILS[0] = end == "failed"
    run = await app.start(works_then_listens, 1, id="r")
    assert await run.signal("go", True, id="go")
    await machine.until(lambda: [one.state for one in machine.store.signals("r")] == ["consumed"])
    if end == "completed":
        assert await run.signal("word", "old", id="word")
    elif end == "cancelled":
        await run.cancel(now=True)
    await machine.until_status("r", end)
    FAILS[0] = False
    run = await app.start(works_then_listens, 1, id="r", on_existing="restart")
    assert await run.signal("go", True, id="go")
    assert await run.signal("word", "new", id="word")
    assert await run.signal("word", "new", id="word") is False
    assert await run.result() == ["new"]


async def test_what_an_earlier_generation_did_not_take_is_not_delivered_to_a_later_one(machine: Machine) -> None:
    await failed_with(await machine.boot(), machine, ("old", "one"), ("old", ""))
    app = await machine.worker()
    FAILS[0] = True
    run = await app.start(works_then_listens, 1, id="r", on_existing="restart")
    await run.signal("go", True)
    await machine.until_status("r", "failed")
    FAILS[0] = False
    await app.retry("r")
    assert await run.signal("word", "new", id="one")
    assert await run.result() == ["new"]


async def test_a_request_that_a_failed_run_had_not_taken_is_answered_after_a_retry(machine: Machine) -> None:
    app = await machine.boot()
    FAILS[0] = True
    run = await app.start(works_then_answers, id="r")
    asking = asyncio.create_task(run.ask("what", "x", id="q"))
    await machine.until(lambda: machine.store.signals("r"))
    await run.signal("go", True)
    with pytest.raises(RunEnded):
        await asking
    FAILS[0] = False
    await app.retry("r")
    worker = await machine.worker()
    assert await worker.get("r").ask("what", "x", id="q") == "X"


async def test_an_answer_to_an_approval_that_the_run_had_not_taken_counts_after_a_retry(machine: Machine) -> None:
    app = await machine.boot()
    FAILS[0] = True

    def answer() -> None:
        (asked,) = open_approvals(machine.store)
        name = APPROVAL + asked.id
        machine.store.commit([Post("r", "signal", name, name, b'[{"answer":true,"by":"ann"}]', app.clock.now())])

    MEANWHILE.append(answer)
    run = await app.start(asks_then_works, id="r")
    await run.signal("go", True)
    with pytest.raises(ExceptionGroup):
        await run.result()
    assert [one.state for one in machine.store.signals("r")] == ["consumed", "undelivered"]
    FAILS[0] = False
    await app.retry("r")
    with pytest.raises(ApprovalConflict, match="by ann"):
        await app.get("r").approve(False)
    worker = await machine.worker()
    assert await worker.get("r").result() == "True"


async def test_one_id_for_two_signals_is_a_conflict(machine: Machine) -> None:
    _, run = await machine.start(works_then_listens, 1, id="r")
    assert await run.signal("word", "a", id="one")
    with pytest.raises(IdConflict, match="Use another id"):
        await run.signal("go", True, id="one")
    with pytest.raises(IdConflict, match="another value"):
        await run.signal("word", "b", id="one")
    await run.signal("go", True)
    assert await run.result() == ["a"]
    with pytest.raises(IdConflict):
        await run.signal("word", "b", id="one")


@pytest.mark.parametrize("id", [1, True, b"one", ["one"], "", "a\nb", "x" * 501])
async def test_the_id_of_a_signal_is_a_text(machine: Machine, id: Any) -> None:
    _, run = await machine.start(works_then_listens, 1, id="r")
    with pytest.raises(Misuse, match="id"):
        await run.signal("word", "a", id=id)


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[App]:
    if kind == "postgres":
        from tests.postgres.server import server

        schema = server().fresh_schema()
        try:
            async with everstep.open(server().url(schema)) as app:
                yield app
        finally:
            server().drop(schema)
        return
    async with everstep.open("memory:" if kind == "memory" else str(folder / "runs.db")) as app:
        yield app


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_on_every_store_a_signal_to_a_run_that_fails_is_delivered_once_it_goes_on(
    kind: str, tmp_path: Path
) -> None:
    async with opened(kind, tmp_path) as app:
        FAILS[0] = True
        run = await app.start(works_then_listens, 1, id="r")
        # Both are in one batch: the run takes them together, or fails without the second.
        await asyncio.gather(run.signal("go", True), run.signal("word", "a", id="one"))
        with pytest.raises(ValueError, match="broken"):
            await run.result()
        FAILS[0] = False
        await app.retry("r")
        await run.signal("word", "a", id="one")
        assert await run.result() == ["a"]
        again = await app.start(works_then_listens, 1, id="r", on_existing="restart")
        await again.signal("go", True)
        assert await again.signal("word", "a", id="one")
        assert await again.result() == ["a"]
