"""The committer by itself: units in flight, and what becomes of them when a commit fails."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from everstep.engine.process import committer as module
from everstep.engine.process.committer import Committer
from everstep.errors import StoreError, StoreFull
from everstep.stores.protocol import Accepted, Append, Failed, Operation, Refused, RowChange, Verdict

WAIT_SECONDS_MAX = 10.0
RUNS = 16


class SlowStore:
    """A store whose commits last until they are let through, on their thread; each is kept."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Operation]] = []
        self.gates: list[threading.Event] = []
        self.refuses: set[str] = set()
        self.error: Exception | None = None
        self.is_open = True

    def commit(self, operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        gate = threading.Event()
        if self.is_open:
            gate.set()
        self.gates.append(gate)
        self.batches.append(operations)
        assert gate.wait(WAIT_SECONDS_MAX)
        if self.error is not None:
            raise self.error
        return [Refused("head") if one.run in self.refuses else Accepted() for one in operations]  # type: ignore[union-attr]


class Run:
    """A run that writes one unit each time that it is asked, and notes what it hears."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_queued = False
        self.units = 0
        self.heard: list[Verdict | BaseException] = []

    def unit(self) -> Append | None:
        self.units += 1
        assert self.units == len(self.heard) + 1, "the verdict on the last unit is not known yet"
        return Append(self.name, 1, 1, self.units, b"", [], RowChange("running", 0))

    def settle(self, unit: Append, verdict: Verdict) -> None:
        self.heard.append(verdict)

    def fail(self, error: BaseException) -> None:
        self.heard.append(error)

    def stumble(self, error: BaseException, *, is_own: bool) -> None:
        self.heard.append(error)


class Bench:
    """A committer on a running loop, and two groups of runs."""

    def __init__(self) -> None:
        self.store = SlowStore()
        self.committer = Committer(self.store, asyncio.get_running_loop())  # type: ignore[arg-type]
        self.first = [Run(f"a{number}") for number in range(RUNS)]
        self.second = [Run(f"b{number}") for number in range(RUNS)]

    async def until(self, is_so: Callable[[], Any]) -> None:
        until = time.monotonic() + WAIT_SECONDS_MAX
        while not is_so():
            assert time.monotonic() < until
            await asyncio.sleep(0.001)

    def ready(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.committer.ready(run, waited_for=True)

    async def learn(self) -> None:
        """Let each run have a first commit."""
        self.ready([*self.first, *self.second])
        await self.until(lambda: self.second[-1].heard)
        self.store.batches.clear()
        self.store.gates.clear()

    async def begin(self, runs: Sequence[Run]) -> None:
        """Let the commit of these runs be under way."""
        self.ready(runs)
        await self.until(lambda: self.store.gates)

    def names(self, batch: int) -> list[str]:
        return [one.run for one in self.store.batches[batch]]  # type: ignore[union-attr]


def bench(function: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        async def main() -> None:
            made = Bench()
            try:
                await function(made)
            finally:
                for gate in made.store.gates:
                    gate.set()
                made.store.is_open, made.store.error = True, None
                await asyncio.wait_for(made.committer.close(), WAIT_SECONDS_MAX)

        asyncio.run(main())

    test.__name__ = function.__name__
    return test


@bench
async def test_a_run_with_a_unit_in_flight_is_not_asked_for_the_next_before_its_verdict(bench: Bench) -> None:
    await bench.learn()
    bench.store.is_open = False
    bench.store.refuses = {"a3"}
    await bench.begin(bench.first)
    bench.ready([*bench.first, *bench.second])
    bench.store.gates[0].set()
    await bench.until(lambda: len(bench.store.batches) == 2)
    assert bench.names(1) == [run.name for run in [*bench.first, *bench.second]], "nothing was begun before the verdict"
    assert bench.first[3].heard[-1] == Refused("head")
    bench.store.is_open = True
    bench.store.gates[1].set()
    await bench.until(lambda: all(len(run.heard) == 3 for run in bench.first))


@bench
async def test_when_a_commit_fails_those_are_told_that_became_ready_meanwhile_as_well(bench: Bench) -> None:
    await bench.learn()
    bench.store.is_open = False
    bench.store.error = StoreError("the disk is gone")
    await bench.begin(bench.first)
    bench.ready(bench.second)
    bench.store.is_open = True
    bench.store.gates[0].set()
    await bench.until(lambda: all(len(run.heard) == 2 for run in [*bench.first, *bench.second]))
    assert all(run.heard[-1] is bench.store.error for run in [*bench.first, *bench.second])


@bench
async def test_a_batch_that_finds_the_disk_full_is_written_when_there_is_room(bench: Bench) -> None:
    await bench.learn()
    bench.store.is_open = False
    bench.store.error = StoreFull("no room")
    await bench.begin(bench.first)
    bench.ready(bench.second)
    bench.store.gates[0].set()
    await bench.until(lambda: bench.committer.full)
    bench.store.is_open, bench.store.error = True, None
    await bench.until(lambda: all(len(run.heard) == 2 for run in [*bench.first, *bench.second]))
    assert all(run.heard[-1] == Accepted() for run in [*bench.first, *bench.second])


@bench
async def test_a_full_disk_for_one_of_a_batch_lets_the_others_go_on(bench: Bench) -> None:
    await bench.learn()
    failed = StoreFull("no room for this one")
    commit = bench.store.commit

    def all_but_one(operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        verdicts = commit(operations, **how)
        return [
            Failed(failed) if one.run == "a5" and len(bench.store.batches) == 1 else verdict  # type: ignore[union-attr]
            for one, verdict in zip(operations, verdicts, strict=True)
        ]

    bench.store.commit = all_but_one  # type: ignore[method-assign]
    await bench.begin(bench.first)
    bench.ready(bench.second)
    await bench.until(lambda: all(len(run.heard) == 2 for run in [*bench.first, *bench.second]))
    assert bench.first[5].units == 2, "it was not asked again"


@bench
async def test_a_run_that_finds_the_disk_full_and_has_more_to_write_does_not_try_without_a_pause(bench: Bench) -> None:
    await bench.learn()
    run = bench.first[0]
    bench.store.commit = lambda operations, **how: (  # type: ignore[method-assign]
        bench.store.batches.append(operations) or [Failed(StoreFull("no room")) for _ in operations]
    )
    bench.ready([run, bench.first[1]])
    await bench.until(lambda: bench.committer.full)
    bench.ready([run])  # another step of it has ended
    await asyncio.sleep(module.ROOM_SECONDS / 2)
    assert len(bench.store.batches) <= 3
    del bench.store.commit
    await bench.until(lambda: len(run.heard) == 3)


@bench
async def test_a_run_that_is_ready_while_requests_find_the_disk_full_is_not_forgotten(bench: Bench) -> None:
    bench.store.is_open = False
    bench.store.error = StoreFull("no room")
    asked = [bench.committer.submit(Append(name, 1, 1, 1, b"", [], RowChange("running", 0))) for name in "cd"]
    await bench.until(lambda: bench.store.gates)
    run = bench.first[0]
    bench.ready([run])
    bench.store.gates[0].set()
    for one in asked:
        with pytest.raises(StoreFull):
            await one
    bench.store.is_open, bench.store.error = True, None
    for gate in bench.store.gates:
        gate.set()
    await bench.until(lambda: run.heard == [Accepted()])


@bench
async def test_a_request_goes_with_the_next_batch(bench: Bench) -> None:
    await bench.learn()
    bench.store.is_open = False
    await bench.begin(bench.first)
    asked = bench.committer.submit(Append("c", 1, 1, 1, b"", [], RowChange("running", 0)))
    bench.ready(bench.second)
    bench.store.is_open = True
    bench.store.gates[0].set()
    assert await asyncio.wait_for(asked, WAIT_SECONDS_MAX) == Accepted()
    assert bench.names(1)[0] == "c"


@pytest.mark.parametrize("is_begun", [False, True])
async def test_closing_waits_for_what_is_in_flight(is_begun: bool) -> None:
    bench = Bench()
    await bench.learn()
    bench.store.is_open = False
    bench.ready(bench.first)
    if is_begun:
        await bench.until(lambda: bench.store.gates)
    closing = asyncio.ensure_future(bench.committer.close())
    await bench.until(lambda: bench.store.gates)
    assert not closing.done()
    bench.store.gates[0].set()
    await asyncio.wait_for(closing, WAIT_SECONDS_MAX)
    assert all(len(run.heard) == 2 for run in bench.first)


# -- signals whose handlers raise -------------------------------------------------------------------------------------
class Interrupted(Run):
    """A run in the middle of whose turn Ctrl-C comes."""

    stumbled: BaseException | None = None

    def unit(self) -> Append | None:
        raise KeyboardInterrupt

    def stumble(self, error: BaseException, *, is_own: bool = True) -> None:
        self.stumbled = error


def test_a_signal_while_a_unit_is_made_ends_the_process_when_the_others_are_written() -> None:
    store, interrupted, other = SlowStore(), Interrupted("a"), Run("b")

    async def main() -> None:
        committer = Committer(store, asyncio.get_running_loop())  # type: ignore[arg-type]
        try:
            committer.ready(interrupted, waited_for=True)
            committer.ready(other, waited_for=True)
            await asyncio.sleep(WAIT_SECONDS_MAX)
        finally:
            await committer.close()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert isinstance(interrupted.stumbled, KeyboardInterrupt)
    assert other.heard == [Accepted()]


def test_a_flush_that_a_signal_cut_off_before_it_began_is_made_when_the_app_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, run = SlowStore(), Run("a")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        committer = Committer(store, loop)  # type: ignore[arg-type]
        with monkeypatch.context() as lost:
            lost.setattr(loop, "call_soon", lambda *args, **how: None)
            committer.ready(run, waited_for=True)
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            await committer.close()

    asyncio.run(main())
    assert run.heard == [Accepted()]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_that_a_signal_kept_from_its_thread_is_committed_once(when: str) -> None:
    store, runs = SlowStore(), [Run("a"), Run("b")]

    class Batches(queue.SimpleQueue[Any]):
        is_cut_off = False

        def put(self, item: Any, *how: Any, **more: Any) -> None:
            is_first, self.is_cut_off = not self.is_cut_off, True
            if is_first and when == "before":
                raise KeyboardInterrupt
            super().put(item)
            if is_first:
                raise KeyboardInterrupt

    async def main() -> None:
        committer = Committer(store, asyncio.get_running_loop())  # type: ignore[arg-type]
        committer._batches = Batches()
        for run in runs:
            committer.ready(run, waited_for=False)
        with pytest.raises(KeyboardInterrupt):
            committer._flush()
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            await committer.close()

    asyncio.run(main())
    assert [run.heard for run in runs] == [[Accepted()], [Accepted()]]
    assert len(store.batches) == 1
