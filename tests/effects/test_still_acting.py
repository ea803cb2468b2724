"""What a body left behind and still acts: nothing is begun beside it."""

import asyncio
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Done, Fatal, NotDone, Retry, step, workflow
from everstep.engine.process import host
from tests.engine.resume_helpers import PATIENCE_SECONDS, Machine

WAYS = ["to_thread", "def", "executor", "pool", "thread", "thread in a thread", "threadsafe", "task", "shielded"]


class Bank:
    """A receiver whose money arrives when its gate is opened; it knows nothing before."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.sent: list[str] = []
        self.acting = 0
        self.most = 0
        self.begun = threading.Event()
        self.pool = ThreadPoolExecutor(1)
        self.kept: list[Any] = []

    def send(self, key: str = "") -> str:
        self.acting += 1
        self.most = max(self.most, self.acting)
        self.begun.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        self.sent.append(key)
        self.acting -= 1
        return "paid"

    async def send_on_loop(self) -> str:
        self.acting += 1
        self.most = max(self.most, self.acting)
        self.begun.set()
        while not self.gate.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:  # what it has begun is brought to its end
                continue
        self.sent.append("")
        self.acting -= 1
        return "paid"

    def probe(self, key: str) -> Any:
        return Done("the bank has it") if self.sent else NotDone()

    def send_in_thread(self, target: Callable[[], Any]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()

    async def begin(self, way: str) -> Any:
        """Let the money be sent in one of many ways, and return what the body would wait for."""
        loop = asyncio.get_running_loop()
        if way == "to_thread":
            return asyncio.ensure_future(asyncio.to_thread(self.send))
        if way in ("executor", "pool"):
            return loop.run_in_executor(self.pool if way == "pool" else None, self.send)
        if way == "thread":
            self.send_in_thread(self.send)
        elif way == "thread in a thread":
            self.send_in_thread(lambda: self.send_in_thread(self.send))
        elif way == "threadsafe":
            future = loop.create_future()  # a callback need not have a module
            self.send_in_thread(
                lambda: (
                    loop.call_soon_threadsafe(future.set_result, None),
                    asyncio.run_coroutine_threadsafe(self.send_on_loop(), loop),
                )
            )
            await future
        else:
            self.kept.append(asyncio.create_task(self.send_on_loop()))
            return asyncio.shield(self.kept[0]) if way == "shielded" else self.kept[0]
        return asyncio.get_running_loop().create_future()

    async def begins(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0.001)

    def flow(self, way: str, how_it_ends: str = "", **options: Any) -> Any:
        """Return a workflow with one `once` step; its body waits for the money, or fails once that is under way."""

        async def pay() -> str:
            awaited = await self.begin(way)
            if how_it_ends:
                await self.begins()
                raise NotDone("try again") if how_it_ends == "not done" else OSError("the answer was lost")
            return str(await awaited)

        def pay_on_thread() -> str:
            return self.send()

        body = pay_on_thread if way == "def" else pay
        pays = step(body, name="pay", effect="once", probe=self.probe, **options)

        @workflow(name="sends")
        async def sends() -> str:
            return await asyncio.to_thread(pays) if way == "def" else await pays()

        return sends


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let apps close without waiting for bodies."""
    monkeypatch.setattr(host, "ONCE_SECONDS", 0.0)
    monkeypatch.setattr(host, "STOP_SECONDS", 0.05)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "def"])
async def test_what_a_failed_body_left_behind_is_waited_for(machine: Machine, way: str) -> None:
    bank = Bank()
    app, run = await machine.start(bank.flow(way, "lost"), id="r")
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    bank.gate.set()
    await machine.until(lambda: bool(bank.sent))
    await machine.until(lambda: not app.acting.runs())
    await machine.advance(2)
    assert await run.result(timeout=PATIENCE_SECONDS) == "the bank has it"
    assert (len(bank.sent), bank.most) == (1, 1)


LEFT = ["thread", "threadsafe", "shielded", "executor"]


class Given:
    """Bodies that fail for certain while the bank still acts, as often as wanted; then one that pays."""

    def __init__(self, bank: Bank, error: BaseException, failures: int = 1, way: str = "thread") -> None:
        self.bank, self.error, self.way = bank, error, way
        self.left = failures
        self.raised = 0
        self.paid = 0

    async def pay(self) -> str:
        if not self.left:
            self.paid += 1
            return "paid" if not self.bank.acting else "paid beside another"
        self.left -= 1
        self.bank.begun.clear()
        await self.bank.begin(self.way)
        await self.bank.begins()
        self.raised += 1
        raise self.error

    def flow(self, **options: Any) -> Any:
        async def pay() -> str:
            return await self.pay()

        pays = step(pay, name="pay", effect="once", probe=self.bank.probe, **options)

        @workflow(name="sends")
        async def sends() -> str:
            return await pays()

        return sends


FAILURES: dict[str, dict[str, Any]] = {
    "for good": {},
    "with another attempt": {"retry": Retry(attempts=2, first=0.1)},
    "with a fallback": {"fallback": "none"},
    "and a person is asked": {"retry": Retry(attempts=1, then="hold")},
}


async def a_while(machine: Machine) -> None:
    """Let time pass in which nothing should happen."""
    for _ in range(5):
        machine.clock.advance(1)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("way", LEFT)
async def test_what_a_body_says_while_something_of_it_acts_is_not_certain(machine: Machine, way: str, how: str) -> None:
    given = Given(bank := Bank(), NotDone("try again"), way=way)
    _, run = await machine.start(given.flow(**FAILURES[how]), id="r")
    await machine.until(lambda: given.raised)
    await a_while(machine)
    assert machine.kinds("r")[-1] == "step_started", "nothing is known yet"
    bank.gate.set()
    await machine.until(lambda: machine.status("r") == "completed" or machine.clock.advance(1))
    assert await run.result() == "the bank has it"
    assert (given.paid, len(bank.sent)) == (0, 1)


async def test_one_of_several_that_was_refused_says_nothing_of_the_others(machine: Machine) -> None:
    """`gather` raises at the first error, and lets the others go on."""
    bank = Bank()

    async def refused() -> None:
        await bank.begins()
        raise ConnectionRefusedError

    @step(effect="once", not_done=(ConnectionRefusedError,), retry=Retry(attempts=3, first=0.1))
    async def pay() -> None:
        await asyncio.gather(bank.send_on_loop(), refused())

    @workflow
    async def pays() -> None:
        await pay()

    app, _ = await machine.start(pays, id="r")
    await bank.begins()
    bank.gate.set()
    await machine.until(lambda: machine.status("r") == "held" or machine.clock.advance(1))
    (hold,) = await app.holds()
    assert "said so while something that it had started was still running" in hold.summary
    assert len(bank.sent) == 1


async def test_a_step_that_has_failed_for_good_fails_when_all_of_it_has_ended(machine: Machine) -> None:
    given = Given(bank := Bank(), Fatal("never"))
    app, run = await machine.start(given.flow(), id="r")
    await machine.until(lambda: given.raised)
    await a_while(machine)
    assert machine.kinds("r")[-1] == "step_started"
    bank.gate.set()
    with pytest.raises(Fatal):
        await run.result(timeout=PATIENCE_SECONDS)
    assert bank.acting == 0
    run = await app.start(given.flow(), id="r", on_existing="retry")
    assert await run.result(timeout=PATIENCE_SECONDS) == "paid"


async def test_a_key_is_free_when_nothing_acts_under_it_any_more(machine: Machine) -> None:
    given = Given(bank := Bank(), Fatal("never"))
    app = await machine.boot()
    flow = given.flow(key=lambda: "invoice")
    await app.start(flow, id="a")
    await machine.until(lambda: given.raised)
    second = await app.start(flow, id="b")
    await a_while(machine)
    assert given.paid == 0
    bank.gate.set()
    await machine.until(lambda: machine.status("b") == "completed" or machine.clock.advance(1))
    assert await second.result() == "paid"


async def test_also_after_a_doubt_the_next_attempt_waits_for_what_the_last_one_left_behind(machine: Machine) -> None:
    given = Given(bank := Bank(), OSError("the answer was lost"), failures=2)
    bank.probe = lambda key: NotDone()  # type: ignore[method-assign]
    _, run = await machine.start(given.flow(retry=Retry(attempts=3, first=0.1)), id="r")
    await machine.until(lambda: given.raised == 1)
    given.error, given.bank = NotDone("try again"), (second := Bank())
    bank.gate.set()
    await machine.until(lambda: given.raised == 2 or machine.clock.advance(1))
    await a_while(machine)
    assert given.paid == 0
    second.gate.set()
    await machine.until(lambda: machine.status("r") == "completed" or machine.clock.advance(1))
    assert await run.result() == "paid"


async def test_what_never_ends_is_asked_about_in_the_end(machine: Machine) -> None:
    given = Given(bank := Bank(), NotDone("try again"))
    bank.probe = lambda key: NotDone()  # type: ignore[method-assign]
    app, _ = await machine.start(given.flow(probe_for=5), id="r")
    await machine.until(lambda: machine.status("r") == "held" or machine.clock.advance(1))
    (hold,) = await app.holds()
    assert hold.reason == "in-doubt"
    assert "still runs in this process" in hold.summary
    assert given.paid == 0
    bank.gate.set()


@pytest.mark.usefixtures("impatient")
async def test_a_certain_failure_that_an_app_left_unsettled_is_in_doubt_for_the_next_one(machine: Machine) -> None:
    given = Given(bank := Bank(), NotDone("try again"))
    first, _ = await machine.start(given.flow(retry=Retry(attempts=2, first=0.1)), id="r")
    await machine.until(lambda: given.raised)
    await machine.stop(first)
    second = await machine.worker()
    await machine.watch(second, 60)  # the lease of the first, whose lock is not free
    await machine.until(lambda: "probe_answered" in machine.kinds("r") or machine.clock.advance(0.1))
    assert given.paid == 0
    bank.gate.set()
    await machine.until(lambda: machine.status("r") in ("completed", "held") or machine.clock.advance(1))
    assert (given.paid, len(bank.sent)) == (0, 1)


async def test_the_threads_of_a_pool_of_processes_are_not_those_of_the_body_that_used_it_first(
    machine: Machine,
) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:

        @step(effect="once")
        async def pay() -> str:
            await asyncio.get_running_loop().run_in_executor(pool, os.getpid)
            raise NotDone("try again")

        @workflow
        async def pays() -> str:
            return await pay()

        app = await machine.boot()
        with pytest.raises(NotDone):
            await app.run(pays, id="r")


async def test_a_thread_that_runs_a_function_of_this_package_is_one_of_the_body(machine: Machine) -> None:
    bank = Bank()
    send = functools.partial(bank.send)
    send.__module__ = "everstep.anything"  # type: ignore[attr-defined]

    @step(effect="once", probe=bank.probe)
    async def pay() -> str:
        bank.send_in_thread(send)
        await bank.begins()
        raise OSError("the answer was lost")

    @workflow
    async def pays() -> str:
        return await pay()

    _, run = await machine.start(pays, id="r")
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    bank.gate.set()
    await machine.until(lambda: machine.status("r") == "completed" or machine.clock.advance(1))
    assert await run.result() == "the bank has it"
    assert bank.most == 1


async def test_an_answer_that_was_given_while_something_still_acted_is_asked_for_again(machine: Machine) -> None:
    bank = Bank()
    answers: list[Any] = []
    app = await machine.boot()

    async def probe(key: str) -> Any:
        answers.append(bank.probe(key))
        if len(answers) == 1:  # it has not happened yet; by the time at which this is heard it has, and nothing acts
            bank.gate.set()
            await machine.until(lambda: not app.acting.runs())
        return answers[-1]

    @step(effect="once", probe=probe)
    async def pay() -> str:
        bank.send_in_thread(bank.send)
        await bank.begins()
        raise OSError("the answer was lost")

    @workflow
    async def pays() -> str:
        return await pay()

    run = await app.start(pays, id="r")
    assert await run.result(timeout=PATIENCE_SECONDS) == "the bank has it"
    assert len(bank.sent) == 1


async def test_a_call_that_a_pool_refused_is_not_made_later(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that gets no thread raises, and has the call in its queue: its next thread would make it."""
    bank = Bank()
    bank.gate.set()
    add_thread = bank.pool._adjust_thread_count
    refusals = [RuntimeError("can't start new thread")]

    def refused_once() -> None:
        if refusals:
            raise refusals.pop()
        add_thread()

    monkeypatch.setattr(bank.pool, "_adjust_thread_count", refused_once)

    @step(effect="once", not_done=(RuntimeError,), retry=Retry(attempts=2, first=0.01))
    async def pay() -> str:
        return await asyncio.get_running_loop().run_in_executor(bank.pool, bank.send)

    @workflow
    async def pays() -> str:
        return await pay()

    _, run = await machine.start(pays, id="r")
    await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
    await machine.advance(1)
    assert await run.result(timeout=PATIENCE_SECONDS) == "paid"
    bank.pool.shutdown()
    assert len(bank.sent) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("impatient")
async def test_a_body_that_acts_on_when_its_app_is_closed_is_not_begun_again_by_the_next_app(
    tmp_path: Path, way: str
) -> None:
    """As in a notebook: the app is closed and opened again in one process."""
    bank = Bank()
    flow = bank.flow(way)
    url = f"sqlite:///{tmp_path}/runs.db"

    async with everstep.open(url, lease=1.0) as app:
        await app.start(flow, id="r")
        await bank.begins()
    async with everstep.open(url, lease=1.0) as app:
        run = await app.start(flow, id="r")
        await seen(app, "probe_answered")
        assert bank.most == 1
        bank.gate.set()
        assert await run.result(timeout=PATIENCE_SECONDS) == "the bank has it"
    assert (len(bank.sent), bank.most) == (1, 1)


async def seen(app: everstep.App, kind: str) -> None:
    """Wait until the run has such an event."""
    while not any(event.kind == kind for event in await app.get("r").history()):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("way", ["to_thread", "task", "def"])
async def test_an_app_whose_closing_is_cancelled_gives_its_runs_back_all_the_same(tmp_path: Path, way: str) -> None:
    """With a lease of an hour: no other app gets the run because that has lapsed."""
    bank = Bank()
    flow = bank.flow(way)
    url = f"sqlite:///{tmp_path}/runs.db"

    async def live() -> None:
        async with everstep.open(url, lease=3600.0) as app:
            await app.start(flow, id="r")
            await asyncio.Event().wait()

    life = asyncio.create_task(live())
    await bank.begins()
    while not life.done():  # as a scope of anyio does
        life.cancel()
        await asyncio.sleep(0)
    bank.gate.set()
    async with everstep.open(url) as app:
        run = await app.start(flow, id="r")
        assert await run.result(timeout=PATIENCE_SECONDS) == "the bank has it"
    assert (len(bank.sent), bank.most) == (1, 1)


@pytest.mark.usefixtures("impatient")
async def test_a_body_that_waits_for_a_thread_when_its_app_is_closed_does_not_begin(machine: Machine) -> None:
    bank = Bank()
    begun: list[str] = []

    @step(effect="once")
    def pay(name: str) -> str:
        begun.append(name)
        return bank.send()

    @workflow
    async def pays() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(pay, name) for name in "ab"))

    app = await machine.boot()
    app.threads._most = 1
    await app.start(pays, id="r")
    await machine.until(lambda: begun and len(app.threads.acting()) == 2)
    await machine.stop(app)
    assert app.acting.runs() == {"r"}
    bank.gate.set()
    await machine.until(lambda: not app.acting.runs())
    assert begun == ["a"]
    other = await machine.worker()
    await machine.until(lambda: machine.status("r") == "held" or machine.clock.advance(1))
    assert other.store.has_ended(app.worker), "its lock is free by now"


OTHER = """
import asyncio, pathlib, sys, threading, time
import everstep
from everstep import Done, NotDone, step, workflow
from everstep.engine.process import host, host
folder = pathlib.Path(sys.argv[1])

def send() -> str:
    (folder / "begun").touch()
    while not (folder / "gate").exists():
        time.sleep(0.01)
    with open(folder / "sent", "a") as file:
        file.write("sent\\n")
    return "paid"

def probe(key: str):
    return Done("the bank has it") if (folder / "sent").exists() else NotDone()

@step(effect="once", probe=probe)
async def pay() -> str:
    return await asyncio.to_thread(send)

@workflow(name=folder.name)
async def sends() -> str:
    return await pay()

async def main() -> None:
    async with everstep.open(f"sqlite:///{folder}/runs.db", lease=1.0) as app:
        await app.start(sends, id="r")
        while not (folder / "begun").exists():
            await asyncio.sleep(0.01)
        if sys.argv[2] == "open":
            print("begun", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
    print("closed", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

if __name__ == "__main__":  # not in the test, which imports this as well
    host.ONCE_SECONDS, host.STOP_SECONDS = 0.0, 0.05
    asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["its app was closed", "it was stopped, and its lock file deleted"])
def test_a_body_in_another_process_that_lives_is_not_begun_again(tmp_path: Path, what: str) -> None:
    program = tmp_path / "other.py"
    program.write_text(OTHER)
    is_closed = what == "its app was closed"
    command = [sys.executable, str(program), str(tmp_path), "closed" if is_closed else "open"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == ("closed\n" if is_closed else "begun\n")
        if not is_closed:
            other.send_signal(signal.SIGSTOP)  # else it would notice, and take its lock again
            (tmp_path / "runs.db-live").unlink()
        asyncio.run(take_over(tmp_path, lambda: other.send_signal(signal.SIGCONT)))
    finally:
        other.kill()
        other.communicate()
    assert (tmp_path / "sent").read_text() == "sent\n"


async def take_over(folder: Path, go_on: Callable[[], None]) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("other_program", folder / "other.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, ["other", str(folder), ""]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    async with everstep.open(f"sqlite:///{folder}/runs.db", lease=1.0, recover=True) as app:
        while await app.get("r").status() != "held":
            await asyncio.sleep(0.01)
        (hold,) = await app.holds()
        assert "process that began it" in hold.summary
        (folder / "gate").touch()
        go_on()
        while not (folder / "sent").exists():
            await asyncio.sleep(0.01)
        await app.resolve("r", "probe")
        assert await app.get("r").result(timeout=PATIENCE_SECONDS) == "the bank has it"


async def test_a_limit_counts_the_threads_of_attempts_that_timed_out(machine: Machine) -> None:
    bank = Bank()
    begun: list[int] = []

    def slow() -> str:
        begun.append(1)
        return bank.send()

    ask = step(slow, name="ask", effect="repeat", limit="api", timeout=0.05, retry=Retry(attempts=4, first=0.01))

    @workflow
    async def asks() -> str:
        return await asyncio.to_thread(ask)

    app = await machine.boot()
    await app.limit("api", concurrency=1)
    await app.start(asks, id="r")
    await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
    for _ in range(10):
        machine.clock.advance(1)
        await asyncio.sleep(0.02)
    assert (len(begun), bank.most) == (1, 1), "the thread of the first attempt still has the slot"
    bank.gate.set()
    await machine.until(lambda: machine.status("r") in ("completed", "failed") or machine.clock.advance(1))
    assert bank.most == 1
