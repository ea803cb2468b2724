"""Runs for which the engine itself raises: each is taken up again alone, or held; no other run notices."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from blockbuster import BlockingError

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.code.execution import Execution
from everstep.engine.history.journal import Journal
from everstep.engine.process import host
from everstep.engine.process.holding import Holding
from everstep.engine.run.attempts import StepAttempts
from everstep.engine.run.doubts import Failures
from everstep.engine.run.driver import Driver
from everstep.engine.run.inbox import Deadlines, Inbox
from everstep.engine.run.writer import RunWriter
from everstep.stores.protocol import Failed
from tests.engine.resume_helpers import Machine

APPLIED: dict[str, str] = {}
"""What a receiver that honours keys has applied."""

ASKED: set[str] = set()


@pytest.fixture(autouse=True)
def nothing_yet() -> None:
    APPLIED.clear()
    ASKED.clear()


@step
async def apply(what: str) -> str:
    APPLIED.setdefault(everstep.key(), what)
    return what


@step
async def wait_and_apply(what: str) -> str:
    await asyncio.sleep(0)
    APPLIED.setdefault(everstep.key(), what)
    everstep.heartbeat(what)
    everstep.stream("notes").append(what)
    return what


@step
def apply_on_a_thread(what: str) -> str:
    APPLIED.setdefault(everstep.key(), what)
    return what


@step(retry=everstep.Retry(attempts=3, first=0.001))
async def fail_once(what: str) -> str:
    if everstep.key() not in ASKED:
        ASKED.add(everstep.key())
        raise ConnectionError("not yet")
    return what


@workflow
async def several(name: str) -> list[str]:
    first = await asyncio.gather(
        apply(f"{name} a"), wait_and_apply(f"{name} b"), asyncio.to_thread(apply_on_a_thread, f"{name} c")
    )
    await asyncio.sleep(0.001)
    word = await everstep.receive("word", str)
    return [*first, await fail_once("d"), word]


def expected(name: str) -> list[str]:
    return [f"{name} a", f"{name} b", f"{name} c", "d", "tides"]


def breaks(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    run_of: Callable[[Any], str],
    error: BaseException,
    count: int,
) -> list[str]:
    """Let a method raise `count` times for the run `broken`, and for no other."""
    fired: list[str] = []
    real = getattr(owner, method)

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        if run_of(self) == "broken" and len(fired) < count:
            fired.append(method)
            raise error
        return real(self, *args, **options)

    monkeypatch.setattr(owner, method, broken)
    return fired


PLACES: dict[str, tuple[type, str, Callable[[Any], str]]] = {
    "unit": (RunWriter, "unit", lambda writer: writer._driver.run),
    "settle": (RunWriter, "settle", lambda writer: writer._driver.run),
    "start": (StepAttempts, "start", lambda attempts: attempts._driver.run),
    "perform": (StepAttempts, "_perform", lambda attempts: attempts._driver.run),
    "completed": (StepAttempts, "completed", lambda attempts: attempts._driver.run),
    "failed": (Failures, "failed", lambda failures: failures._driver.run),
    "heartbeat": (StepAttempts, "_record_heartbeat", lambda attempts: attempts._driver.run),
    "apply": (Execution, "apply", lambda execution: execution.run),
    "fire": (Deadlines, "fire", lambda deadlines: "broken"),
    "inbox": (Inbox, "take", lambda inbox: inbox._driver.run),
    "pack": (Journal, "pack", lambda journal: journal.run),
    "rest": (Driver, "come_to_rest", lambda driver: driver.run),
    "go on": (Driver, "go_on", lambda driver: driver.run),
}


async def runs_beside(machine: Machine, app: App) -> dict[str, Any]:
    """Run several at the same time, one of which is called `broken`, and return their results."""
    names = ["a", "b", "broken", "c", "d"]
    handles = {name: await app.start(several, name, id=name) for name in names}
    for name in names:
        await app.signal(name, "word", "tides")
    return {name: await asyncio.wait_for(handle.result(), 30) for name, handle in handles.items()}


@pytest.mark.parametrize("error", [ValueError("broken"), MemoryError()], ids=["a mistake", "no memory"])
@pytest.mark.parametrize("place", PLACES)
async def test_whatever_is_raised_for_a_run_it_goes_on_from_its_history(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    app = await machine.boot(clock=None)
    fired = breaks(monkeypatch, *PLACES[place], error, 2)
    results = await runs_beside(machine, app)
    assert results == {name: expected(name) for name in results}
    assert fired, "the fault has happened"
    assert len(APPLIED) == 3 * len(results), "with the same keys"
    assert machine.replay("broken").differences == []


@pytest.mark.parametrize("place", ["unit", "settle", "completed", "go on"])
async def test_a_run_for_which_the_engine_raises_again_and_again_is_held_and_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    app = await machine.boot(clock=None)
    breaks(monkeypatch, *PLACES[place], ValueError("broken"), 10**9)
    names = ["a", "broken", "b"]
    for name in names:
        await app.start(several, name, id=name)
        await app.signal(name, "word", "tides")
    for name in ("a", "b"):
        assert await asyncio.wait_for(app.get(name).result(), 30) == expected(name)
    await machine.until_status("broken", "held")
    assert machine.hold("broken").reason == "stuck"
    assert "ValueError" in machine.hold("broken").summary
    monkeypatch.undo()
    await app.resolve("broken", "retry")
    assert await asyncio.wait_for(app.get("broken").result(), 30) == expected("broken")


@pytest.mark.parametrize("error", [MemoryError(), BlockingError("os.stat")], ids=["the machine", "a detector"])
async def test_a_run_is_not_held_for_what_the_engine_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    app = await machine.boot(clock=None)
    fired = breaks(monkeypatch, *PLACES["settle"], error, 7)
    results = await runs_beside(machine, app)
    assert results["broken"] == expected("broken")
    assert len(fired) == 7
    assert not machine.store.holds(run="broken", open_only=False)


@pytest.mark.parametrize("method", ["drive", "hold_claimed"])
async def test_taking_up_one_run_that_raises_does_not_keep_others_from_being_taken_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    first = await machine.boot(clock=None)
    names = ["a", "b", "broken", "c"]
    for name in names:
        await first.start(several, name, id=name)
    await machine.until(lambda: all(machine.status(name) == "waiting" for name in names))
    await machine.kill(first)
    owner: Any = Holding if method == "hold_claimed" else host
    real, fired = getattr(owner, method), []

    async def raises(app: Any, what: Any, *args: Any, **options: Any) -> Any:
        run = what.row.id if hasattr(what, "row") else what.id
        if run == "broken" and len(fired) < 2:
            fired.append(run)
            raise TypeError("broken")
        return await real(app, what, *args, **options)

    monkeypatch.setattr(owner, method, raises)
    worker = await machine.worker(clock=None)
    for name in names:
        await worker.signal(name, "word", "tides")
    for name in names:
        assert await asyncio.wait_for(worker.get(name).result(), 30) == expected(name)


async def test_a_unit_for_which_the_store_has_no_memory_is_written_later_and_the_run_is_not_held(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.boot(clock=None)
    real, fired = RunWriter.settle, []

    def refused(self: RunWriter, unit: Any, verdict: Any) -> None:
        if self._driver.run == "broken" and not fired:
            fired.append(unit)
            verdict = Failed(MemoryError())
        real(self, unit, verdict)

    monkeypatch.setattr(RunWriter, "settle", refused)
    results = await runs_beside(machine, app)
    assert results["broken"] == expected("broken")
    assert not machine.store.holds(run="broken", open_only=False)
