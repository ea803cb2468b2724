"""The output-commit rule: nothing leaves a run before what it depends on is durable, and nothing else waits."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Retry, step, workflow
from everstep.engine.app.app import App
from everstep.engine.run import attempts as attempts_module
from everstep.stores.opening import open_store
from everstep.stores.protocol import Operation, Verdict
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, settle, until
from tests.lasting import LastingStore

SEEN: list[list[str]] = []
"""What a second connection saw in the store when a body began."""
STORE = ""


def durable(run: str = RUN) -> list[str]:
    """Return `kind step` of each event that is on disk, as a second connection sees it."""
    store = open_store(STORE)
    try:
        return [f"{event.kind} {event.step}".strip() for event in store.events(run, 1)]
    finally:
        store.close()


@pytest.fixture(autouse=True)
def _store(tmp_path: Path) -> None:
    global STORE
    STORE = str(tmp_path / "store.db")
    SEEN.clear()


@step(name="effect")
async def effect(number: int) -> int:
    SEEN.append(durable())
    return number


@step(name="blocking_effect")
def blocking_effect(number: int) -> int:
    SEEN.append(durable())
    return number


@step(name="look", effect="read")
async def look(number: int) -> int:
    return number


@workflow
async def effects_flow() -> int:
    total = await look(1) + await look(2)
    total += await effect(total)
    both = await asyncio.gather(effect(1), asyncio.to_thread(blocking_effect, 2))
    return total + sum(both)


def on_file(workflow: Any, *args: Any) -> tuple[Any, int]:
    """Run a workflow on a file; return its result and the number of commits it took."""

    async def main() -> tuple[Any, int]:
        async with everstep.open(STORE) as app:
            before = app.committer.commits
            result = await (await app.start(workflow, *args, id=RUN)).result(timeout=60)
            return result, app.committer.commits - before

    return asyncio.run(main())


def test_a_repeat_body_starts_when_its_intent_and_all_before_it_are_on_disk() -> None:
    assert on_file(effects_flow)[0] == 9
    reads = ["step_started look", "step_completed look", "step_started look#2", "step_completed look#2"]
    first = ["run_started", *reads, "step_started effect"]
    together = [*first, "step_completed effect", "step_started effect#2", "step_started blocking_effect"]
    assert SEEN[0] == first
    assert SEEN[1][: len(together)] == together
    assert SEEN[2][: len(together)] == together


def test_another_attempt_is_on_disk_before_its_body_starts_too() -> None:
    @step(name="again", retry=Retry(attempts=3, first=0))
    async def again() -> None:
        SEEN.append(durable())
        if everstep.current().attempt < 3:
            raise OSError("again")

    @workflow
    async def flow() -> None:
        await again()

    on_file(flow)
    started, failed = "step_started again", "attempt_failed again"
    assert [seen[1:] for seen in SEEN] == [
        [started],
        [started, failed, started],
        [started, failed, started, failed, started],
    ]


def test_a_fallback_that_acts_starts_when_the_failure_that_calls_for_it_is_on_disk() -> None:
    async def instead() -> str:
        SEEN.append(durable())
        return "instead"

    @step(name="broken", fallback=instead)
    async def broken() -> str:
        raise OSError("no")

    @workflow
    async def flow() -> str:
        return await broken()

    assert on_file(flow)[0] == "instead"
    assert SEEN == [["run_started", "step_started broken", "attempt_failed broken"]]


@pytest.mark.parametrize("count", [1, 7, 20])
def test_a_sequential_repeat_step_costs_one_commit(count: int) -> None:
    @step
    async def plain(number: int) -> int:
        return number

    @workflow
    async def flow(count: int) -> int:
        return sum([await plain(number) for number in range(count)])

    result, commits = on_file(flow, count)
    assert result == sum(range(count))
    assert commits == count + 2  # the start, one for each step with the outcome before it, the end


def test_a_hundred_concurrent_repeat_steps_share_their_commits() -> None:
    @step
    async def plain(number: int) -> int:
        return number

    @workflow
    async def flow() -> int:
        return sum(await asyncio.gather(*(plain(number) for number in range(100))))

    result, commits = on_file(flow)
    assert result == 4950
    assert commits <= 4  # the start, all intents, all outcomes and the end


def test_steps_of_many_runs_share_their_commits() -> None:
    @step
    async def plain(number: int) -> int:
        return number

    @workflow
    async def flow(number: int) -> int:
        return await plain(number) + await plain(number)

    async def main() -> int:
        async with everstep.open(STORE) as app:
            runs = await asyncio.gather(*(app.start(flow, number) for number in range(100)))
            results = await asyncio.gather(*(run.result(timeout=60) for run in runs))
            assert sum(results) == 9900
            return app.committer.commits

    assert asyncio.run(main()) < 60  # of 400 that single commits would take


class SlowStore(LastingStore):
    """A store whose commits wait for the test from the moment it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.committing = threading.Event()

    def commit(self, operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        if not self.open.is_set():
            self.committing.set()
            assert self.open.wait(20)
        return super().commit(operations, **how)


@asynccontextmanager
async def slow_app() -> AsyncIterator[tuple[App, SlowStore]]:
    """Give an app whose commits are made on the committer's thread, so that a slow one does not stop the loop."""
    store = SlowStore()
    app = await App(store, clock=FakeClock()).open()
    app.committer._seconds = 1e9  # as if every commit had been slow: none is made on the loop
    try:
        yield app, store
    finally:
        store.open.set()
        await app.close()


@step(name="tell", effect="read")
async def tell(name: str) -> str:
    TOLD.append(name)
    return name


@step(name="act")
async def act(name: str) -> str:
    TOLD.append(f"acted {name}")
    return name


TOLD: list[str] = []


def while_commits_wait(workflow: Any, condition: Callable[[], bool]) -> list[str]:
    """Run a workflow whose commits wait after its start; return what was told until a condition held."""

    async def main() -> list[str]:
        TOLD.clear()
        async with slow_app() as (app, store):
            run = await app.start(workflow, id=RUN)
            store.open.clear()
            await until(condition)
            await until(store.committing.is_set)
            for _ in range(50):  # whatever could go on, goes on
                await asyncio.sleep(0)
            told = list(TOLD)
            store.open.set()
            await run.result(timeout=60)
            return told

    return asyncio.run(main())


def test_reads_do_not_wait_for_commits_and_effects_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "EXPENSIVE_SECONDS", 1e9)

    @workflow
    async def flow() -> None:
        for number in range(5):
            await tell(f"read {number}")
        await act("effect")

    told = while_commits_wait(flow, lambda: "read 4" in TOLD)
    assert told == [f"read {number}" for number in range(5)]
    assert TOLD[-1] == "acted effect"


def test_an_expensive_read_is_on_disk_before_the_code_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "EXPENSIVE_SECONDS", -1.0)

    @workflow
    async def flow() -> None:
        await tell("read 0")
        await tell("read 1")

    assert while_commits_wait(flow, lambda: "read 0" in TOLD) == ["read 0"]
    assert TOLD == ["read 0", "read 1"]


def test_what_counts_as_expensive_is_a_twentieth_of_a_second() -> None:
    assert attempts_module.EXPENSIVE_SECONDS == 0.05


async def test_outcomes_behind_an_expensive_one_wait_with_it_so_that_the_order_of_the_log_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts_module, "EXPENSIVE_SECONDS", 0.03)
    order: list[str] = []

    @step(name="slow", effect="read")
    async def slow() -> str:
        await asyncio.sleep(0.04)
        TOLD.append("slow ended")
        gate.set()
        return "slow"

    @step(name="quick", effect="read")
    async def quick() -> str:
        await gate.wait()
        TOLD.append("quick ended")
        return "quick"

    gate = asyncio.Event()

    @workflow
    async def flow() -> list[str]:
        async def one(call: Any) -> None:
            order.append(await call)

        await asyncio.gather(one(slow()), one(quick()))
        return order

    TOLD.clear()
    async with slow_app() as (app, store):
        run = await app.start(flow, id=RUN)
        store.open.clear()
        await until(lambda: "quick ended" in TOLD)
        await until(store.committing.is_set)
        for _ in range(50):
            await asyncio.sleep(0)
        assert order == []
        store.open.set()
        await run.result(timeout=60)
        assert order == ["slow", "quick"]


async def test_a_result_reaches_nobody_before_it_is_on_disk() -> None:
    @workflow
    async def flow() -> str:
        await tell("last")
        return "done"

    TOLD.clear()
    async with slow_app() as (app, store):
        run = await app.start(flow, id=RUN)
        store.open.clear()
        waiting = asyncio.create_task(run.result())
        await until(lambda: bool(TOLD))
        await until(store.committing.is_set)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert await run.status() != "completed"
        store.open.set()
        assert await waiting == "done"


async def test_a_published_value_reaches_nobody_before_it_is_on_disk() -> None:
    @workflow
    async def flow() -> None:
        await tell("before")
        everstep.publish("progress", 1)
        await tell("after")
        await everstep.receive("never")

    TOLD.clear()
    async with slow_app() as (app, store):
        run = await app.start(flow, id=RUN)
        store.open.clear()
        await until(lambda: "after" in TOLD)
        await until(store.committing.is_set)
        assert await run.published() == {}
        store.open.set()
        await settle(app)
        assert await run.published() == {"progress": 1}


def test_a_child_is_started_when_its_parent_s_record_is_on_disk() -> None:
    @workflow
    async def child() -> str:
        return await tell("child")

    @workflow
    async def flow() -> str:
        await tell("parent")
        return await child()

    told = while_commits_wait(flow, lambda: bool(TOLD))
    assert told == ["parent"]
    assert TOLD == ["parent", "child"]
