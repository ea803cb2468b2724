"""A run whose code has made a call and dropped it does not complete; and anyio on the loop of a run."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

import everstep
from everstep import step, workflow
from everstep.engine.code.commands import EndRun
from everstep.errors import Misuse
from tests.engine.lives import RUN, echo, once_live, prove


@workflow
async def child() -> int:
    return 1


def test_a_step_that_is_never_awaited_fails_the_run_with_its_line() -> None:
    @workflow
    async def flow() -> str:
        echo(1)  # type: ignore[unused-coroutine]
        await echo(2)
        return "done"

    error = once_live(flow).error
    assert type(error) is Misuse
    assert "The call of echo is never awaited, so it does nothing at test_dropped_calls.py" in str(error)
    assert "write `await echo(…)`" in str(error)


def test_calls_that_begin_late_are_not_dropped() -> None:
    @workflow
    async def flow() -> list[Any]:
        later = [echo(number) for number in range(30)]
        children = [child() for _ in range(20)]
        task = asyncio.create_task(echo("task"))
        cut = asyncio.create_task(echo("cut"))
        cut.cancel()
        closed: Any = echo("closed")
        closed.close()
        return [*(await asyncio.gather(*later)), sum(await asyncio.gather(*children)), await task]

    assert once_live(flow).value == [*range(30), 20, "task"]


def test_a_run_that_an_earlier_release_completed_replays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def flow() -> str:
        echo(1)  # type: ignore[unused-coroutine]
        return "done"

    url = f"sqlite:///{tmp_path / 'runs.db'}"
    with monkeypatch.context() as patch:
        patch.setattr("everstep.engine.code.dropped.Unawaited.dropped", lambda self: None)
        with pytest.warns(RuntimeWarning, match="never awaited"):
            assert everstep.run(flow, id=RUN, url=url) == "done"
    with everstep.open(url) as app:
        assert app.get(RUN).verify().sound
    assert EndRun("run_completed").otherwise is None


def test_anyio_replays_with_the_same_winners() -> None:
    @step(effect="read")
    async def slow() -> str:
        await asyncio.sleep(0)
        return "slow"

    @workflow
    async def flow() -> list[Any]:
        seen: list[Any] = []

        async def after(seconds: float) -> None:
            await anyio.sleep(seconds)
            seen.append(seconds)

        async with anyio.create_task_group() as group:
            group.start_soon(after, 2)
            group.start_soon(after, 1)
        with anyio.move_on_after(1) as scope:
            await anyio.sleep(5)
        seen.append(scope.cancelled_caught)
        async with anyio.CapacityLimiter(1):
            seen.append(await slow())
        event = anyio.Event()
        event.set()
        await event.wait()
        sending, receiving = anyio.create_memory_object_stream[int](1)
        await sending.send(3)
        seen.append(await receiving.receive())
        sending.close()
        receiving.close()
        try:
            with anyio.fail_after(0.1):
                await anyio.sleep(4)
        except TimeoutError:
            seen.append("late")
        return seen

    assert prove(flow) == [1, 2, True, "slow", 3, "late"]
