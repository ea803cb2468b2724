"""One of many in a group commit, or at a table of callbacks: what it raises reaches it alone."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from everstep.engine.process.committer import Committer
from everstep.engine.run.threads import Threads
from everstep.errors import StoreError
from everstep.stores.brief import Busy
from everstep.stores.protocol import Accepted, Append, Operation, Release, RowChange, Verdict

WAIT_SECONDS_MAX = 20.0


class Store:
    """A store that accepts everything, unless it is told to raise; each batch is kept."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Operation]] = []
        self.errors: list[BaseException] = []
        self.threads: set[str] = set()

    def commit(self, operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        self.threads.add(threading.current_thread().name)
        self.batches.append(operations)
        if self.errors:
            raise self.errors.pop(0)
        return [Accepted() for _ in operations]


class Run:
    """A run whose callbacks raise if they are told to."""

    def __init__(self, name: str, **raises: BaseException) -> None:
        self.name = name
        self.is_queued = False
        self.heard: list[Any] = []
        self._raises = raises

    def _may_raise(self, where: str) -> None:
        if where in self._raises:
            raise self._raises[where]

    def unit(self) -> Append | None:
        self._may_raise("unit")
        return Append(self.name, 1, 1, 0, b"", [], RowChange("running", 0))

    def settle(self, unit: Append, verdict: Verdict) -> None:
        self._may_raise("settle")
        self.heard.append(verdict)

    def fail(self, error: BaseException) -> None:
        self._may_raise("fail")
        self.heard.append(error)

    def stumble(self, error: BaseException, *, is_own: bool) -> None:
        self.heard.append(("stumbled", error, is_own))
        self._may_raise("stumble")


async def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def commit_all(store: Store, runs: Sequence[Run], is_done: Callable[[], Any]) -> Committer:
    """Let runs be ready at once, wait, and see that the committer still works and can be closed."""
    committer = Committer(store, asyncio.get_running_loop())  # type: ignore[arg-type]
    for run in runs:
        committer.ready(run, waited_for=True)
    await until(is_done)
    later = Run("later")
    committer.ready(later, waited_for=True)
    await until(lambda: later.heard == [Accepted()])
    assert isinstance(await asyncio.wait_for(committer.submit(Release("r", 1, "queued")), WAIT_SECONDS_MAX), Accepted)
    await asyncio.wait_for(committer.close(), WAIT_SECONDS_MAX)
    return committer


@pytest.mark.parametrize("where", ["unit", "settle"])
@pytest.mark.parametrize("error", [ValueError("broken"), MemoryError(), AttributeError("gone")], ids=repr)
async def test_what_one_run_raises_reaches_it_alone(where: str, error: Exception) -> None:
    others = [Run(f"r{number}") for number in range(16)]
    broken = Run("broken", **{where: error})
    runs = [*others[:5], broken, *others[5:]]
    await commit_all(Store(), runs, lambda: all(run.heard for run in runs))
    assert all(run.heard == [Accepted()] for run in others)
    assert broken.heard == [("stumbled", error, True)]


async def test_a_run_that_cannot_even_be_told_keeps_no_other_waiting() -> None:
    broken = Run("broken", settle=ValueError("broken"), stumble=ValueError("twice"))
    runs = [broken, Run("a"), Run("b")]
    await commit_all(Store(), runs, lambda: all(run.heard for run in runs))
    assert runs[1].heard == runs[2].heard == [Accepted()]


async def test_a_run_that_raises_when_the_store_fails_keeps_no_other_waiting() -> None:
    store, failure = Store(), StoreError("lost")
    store.errors.append(failure)
    broken = Run("broken", fail=ValueError("broken"))
    runs = [broken, Run("a"), Run("b")]
    await commit_all(store, runs, lambda: all(run.heard for run in runs))
    assert runs[1].heard == runs[2].heard == [failure]
    assert broken.heard[0][0] == "stumbled"


def test_what_is_to_stop_the_process_stops_it_after_all_others_were_settled() -> None:
    others = [Run("a"), Run("b")]

    async def main() -> None:
        committer = Committer(Store(), asyncio.get_running_loop())  # type: ignore[arg-type]
        for run in [Run("broken", settle=SystemExit(3)), *others]:
            committer.ready(run, waited_for=True)
        await until(lambda: False)

    with pytest.raises(SystemExit):
        asyncio.run(main())
    assert [run.heard for run in others] == [[Accepted()], [Accepted()]]


@pytest.mark.parametrize("count", [1, 3], ids=["on the loop", "on the thread"])
@pytest.mark.parametrize("error", [MemoryError(), OSError(24, "Too many open files"), KeyError("bug")], ids=repr)
async def test_an_error_that_is_not_the_stores_does_not_end_the_app(count: int, error: Exception) -> None:
    store = Store()
    store.errors.append(error)
    runs = [Run(f"r{number}") for number in range(count)]
    await commit_all(store, runs, lambda: all(run.heard for run in runs))
    assert all(run.heard == [("stumbled", error, False)] for run in runs), "nothing is known, so each is read again"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration()], ids=repr)
async def test_the_committers_thread_does_not_end_by_what_a_commit_raises(error: BaseException) -> None:
    store = Store()
    committer = Committer(store, asyncio.get_running_loop())  # type: ignore[arg-type]
    store.errors.append(error)
    futures = [committer.submit(Release(f"r{number}", 1, "queued")) for number in range(3)]
    outcomes = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT_SECONDS_MAX)
    assert [type(outcome) for outcome in outcomes] == [StoreError] * 3
    assert isinstance(await committer.submit(Release("r", 1, "queued")), Accepted)
    await asyncio.wait_for(committer.close(), WAIT_SECONDS_MAX)


class Refusals:
    """Threads that the machine refuses, by the beginning of their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, count: int = 10**9) -> None:
        self.fired = 0
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith(name) and self.fired < count:
                self.fired += 1
                raise error
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize("refused", [1, 10**9], ids=["once", "always"])
@pytest.mark.parametrize("error", [NO_THREAD, MemoryError()], ids=repr)
async def test_without_a_thread_commits_are_made_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, error: Exception, refused: int
) -> None:
    refusals = Refusals(monkeypatch, "everstep-committer", error, refused)

    store, runs = Store(), [Run("a"), Run("b"), Run("c")]
    await commit_all(store, runs, lambda: all(run.heard for run in runs))
    assert all(run.heard == [Accepted()] for run in runs)
    assert refusals.fired


async def test_without_a_thread_a_commit_waits_for_another_process_and_the_loop_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Refusals(monkeypatch, "everstep-committer", NO_THREAD)

    store, runs = Store(), [Run("a"), Run("b")]
    store.errors += [Busy(), Busy()]
    await commit_all(store, runs, lambda: all(run.heard for run in runs))
    assert all(run.heard == [Accepted()] for run in runs)
    assert [len(batch) for batch in store.batches[:3]] == [2, 2, 2]


# -- bodies on threads -----------------------------------------------------------------------------------------------
async def test_what_the_end_of_one_body_raises_keeps_no_other_waiting() -> None:
    loop = asyncio.get_running_loop()
    raised: list[Any] = []
    loop.set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    threads, told, gate = Threads(loop, 4), [], threading.Event()

    def done(value: Any, error: BaseException | None) -> None:
        told.append(value)
        if len(told) == 1:
            raise ValueError("broken")

    for _ in range(4):
        threads.start("r", lambda: gate.wait(WAIT_SECONDS_MAX), done)
    gate.set()
    while len(threads._ended) < 4:  # all have ended before the loop hears of the first
        pass
    await until(lambda: len(told) == 4)
    assert [type(error) for error in raised] == [ValueError]
    threads.close()


@pytest.mark.parametrize("error", [NO_THREAD, MemoryError()], ids=repr)
async def test_a_body_for_which_there_is_no_thread_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    refusals = Refusals(monkeypatch, "everstep-step", error, 3)

    threads, ended = Threads(asyncio.get_running_loop(), 4), []
    for number in range(3):
        threads.start("r", lambda number=number: number, lambda value, error: ended.append(value))
    await until(lambda: sorted(ended) == [0, 1, 2])
    assert refusals.fired == 3
    threads.close()
