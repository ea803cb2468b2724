"""Probes that do not answer: each question has its time, and nobody is asked again before the last one has ended."""

import asyncio
import threading
from typing import Any

import pytest

from everstep import Done, NotDone, step, workflow
from everstep.engine.run.doubts import question_seconds
from everstep.errors import RunHeld
from tests.engine.resume_helpers import Machine


class Slow:
    """A step whose outcome is unknown, and a probe that hangs until it is let go."""

    def __init__(
        self, *, is_async: bool, stubborn: bool = False, answers: list[Any] | None = None, **options: Any
    ) -> None:
        self.asked = 0
        self.paid = 0
        self.go_on = threading.Event()
        self.cancelled = 0
        slow = self

        def probe(key: str) -> Any:
            slow.asked += 1
            slow.go_on.wait(20)
            return answers.pop(0) if answers else Done("found")

        async def async_probe(key: str) -> Any:
            slow.asked += 1
            while not slow.go_on.is_set():
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    slow.cancelled += 1
                    if not stubborn:
                        raise
            return answers.pop(0) if answers else Done("found")

        @step(effect="once", probe=async_probe if is_async else probe, **options)
        async def pay() -> str:
            slow.paid += 1
            raise OSError("the answer was lost")

        @workflow
        async def flow() -> str:
            return await pay()

        self.flow = flow


async def until_asked(machine: Machine, slow: Slow, times: int) -> None:
    await machine.until(lambda: slow.asked == times)


async def until_answered(machine: Machine, times: int) -> None:
    await machine.until(lambda: len(machine.bodies("r", "probe_answered")) == times)


@pytest.mark.parametrize(("probe_for", "seconds"), [(600.0, 60), (30.0, 30), (0.0, 10), (1e9, 60)])
def test_a_question_takes_a_minute_at_most(probe_for: float, seconds: float) -> None:
    assert question_seconds(probe_for) == seconds


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async"])
async def test_a_probe_that_does_not_answer_in_time_does_not_know(machine: Machine, is_async: bool) -> None:
    slow = Slow(is_async=is_async)
    app, run = await machine.start(slow.flow, id="r")
    await until_asked(machine, slow, 1)
    machine.clock.advance(59)
    await asyncio.sleep(0.05)
    assert machine.bodies("r", "probe_answered") == []
    machine.clock.advance(1)
    await until_answered(machine, 1)
    (told,) = machine.bodies("r", "probe_answered")
    assert (told.answer, told.why) == ("unknown", "it did not answer within 60 s")
    slow.go_on.set()
    await machine.until(lambda: not app.threads.is_acting("r", -1))
    await machine.advance(1)
    assert await run.result(timeout=60) == "found"
    assert (slow.asked, slow.paid) == (2, 1)
    assert not machine.replay("r").differences


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async, and it does not let itself be cancelled"])
async def test_while_a_question_hangs_nobody_is_asked_another_one(machine: Machine, is_async: bool) -> None:
    slow = Slow(is_async=is_async, stubborn=True, probe_for=200.0)
    app, run = await machine.start(slow.flow, id="r")
    await until_asked(machine, slow, 1)
    machine.clock.advance(60)
    await until_answered(machine, 1)
    for _ in range(12):
        if machine.status("r") == "held":
            break
        await machine.rest(app)
        machine.clock.advance_to_next()
        await asyncio.sleep(0.02)
    with pytest.raises(RunHeld, match="its probe does not know, after 200 s"):
        await run.result(timeout=60)
    assert slow.asked == 1, "a thread that hangs is one thread"
    assert {body.why for body in machine.bodies("r", "probe_answered")} == {
        "it did not answer within 60 s",
        "it has not answered the question before",
    }
    slow.go_on.set()
    await asyncio.sleep(0.05)
    assert machine.status("r") == "held", "an answer that comes too late is not taken"
    await machine.until(lambda: not app.threads.is_acting("r", -1))
    await app.resolve("r", "probe")
    assert await app.get("r").result(timeout=60) == "found"
    assert slow.asked == 2


async def test_an_answer_that_comes_late_is_not_taken_for_that_to_a_later_question(machine: Machine) -> None:
    """Its first question is given up and forgotten; the run is taken up anew and asked again."""
    slow = Slow(is_async=True, stubborn=True, answers=[NotDone(), Done("found")])
    app, _ = await machine.start(slow.flow, id="r")
    await until_asked(machine, slow, 1)
    machine.clock.advance(60)
    await until_answered(machine, 1)
    slow.go_on.set()
    await asyncio.sleep(0.05)
    assert slow.paid == 1, "that it has not happened was said too late to be believed"
    await machine.advance(1)
    assert await app.get("r").result(timeout=60) == "found"
    assert (slow.asked, slow.paid) == (2, 1)


async def test_probe_for_zero_means_one_question_of_ten_seconds(machine: Machine) -> None:
    slow = Slow(is_async=True, probe_for=0.0)
    _, run = await machine.start(slow.flow, id="r")
    await until_asked(machine, slow, 1)
    machine.clock.advance(10)
    with pytest.raises(RunHeld, match="after 0 s"):
        await run.result(timeout=60)
    assert (slow.asked, slow.cancelled) == (1, 1)


async def test_closing_while_a_probe_hangs_gives_the_run_back_in_doubt(machine: Machine) -> None:
    slow = Slow(is_async=True)
    app, _ = await machine.start(slow.flow, id="r")
    await until_asked(machine, slow, 1)
    await machine.stop(app)
    assert machine.kinds("r", "probe_answered") == []
    slow.go_on.set()
    app = await machine.boot()
    assert await (await app.start(slow.flow, id="r")).result(timeout=60) == "found"
    assert slow.paid == 1


def test_an_application_with_eager_tasks_gets_its_answers(tmp_path: Any) -> None:
    import everstep

    @step(effect="once", probe=lambda key: Done("found"))
    async def pay() -> str:
        raise OSError("the answer was lost")

    async def find(key: str) -> Done:
        return Done("found at once")

    @step(effect="once", probe=find)
    async def pay_eagerly() -> str:
        raise OSError("the answer was lost")

    @workflow
    async def flow() -> list[str]:
        return [await pay(), await pay_eagerly()]

    async def main() -> list[str]:
        if hasattr(asyncio, "eager_task_factory"):
            asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        async with everstep.open(str(tmp_path / "runs.db")) as app:
            return await app.run(flow, id="r")

    assert asyncio.run(main()) == ["found", "found at once"]
