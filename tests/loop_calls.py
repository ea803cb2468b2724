"""Every kind of call that an application makes, and what shows that its loop goes on while its store is silent."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import everstep
from everstep import step, transaction, workflow
from everstep.effects.databases import STORE
from everstep.engine.app.app import App
from everstep.engine.app.client import Client
from everstep.engine.app.handles import Run
from everstep.engine.process.host import Host
from everstep.engine.verbs.schedules import Schedule
from everstep.errors import Misuse, RunCancelled, RunHeld, UnknownRun
from tests.crash.figures import FIGURES
from tests.waiting import DEADLINE_SECONDS, wait_on_loop_until

Call = Callable[[], Awaitable[Any]]

MORNING = "2026-11-16T08:00:00Z"
TURNS = 40
"""How often the loop has to turn while the store is silent. Each turn takes two milliseconds at least."""


class Trouble(Protocol):
    """A store that does not answer."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Heart:
    """A task that counts the turns of its loop, and measures the longest pause between two of them."""

    def __init__(self) -> None:
        self.turns = 0
        self.longest = 0.0
        """In seconds."""
        self._thread = threading.get_ident()
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            self.turns += 1
            await asyncio.sleep(0.002)
            self.longest, last = max(self.longest, time.monotonic() - last - 0.002), time.monotonic()

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def wait_for_turns(self) -> str:
        """Wait on another thread until the loop has turned often enough; if it does not, return where it stands."""
        wanted, until = self.turns + TURNS, time.monotonic() + DEADLINE_SECONDS
        while self.turns < wanted:
            if time.monotonic() > until:
                return "".join(traceback.format_stack(sys._current_frames()[self._thread])[-16:])
            time.sleep(0.001)
        return ""


class Pauses:
    """How long loops have stood still in one kind of trouble; the last lines of the test run say so."""

    def __init__(self, trouble: str) -> None:
        self._trouble = trouble
        self._calls = 0
        self._longest = (0.0, "")

    def note(self, calls: Mapping[str, Call], seconds: float) -> None:
        """Note the longest pause while these calls were made."""
        self._calls += len(calls)
        self._longest = max(self._longest, (seconds, next(iter(calls)) if len(calls) == 1 else "all at once"))

    def tell(self) -> None:
        """Say it at the end of the test run: a figure for people, which no test judges."""
        seconds, where = self._longest
        line = f"loop, {self._trouble}: {self._calls} calls, longest pause {seconds * 1000:.0f} ms ({where})"
        FIGURES.lines.append(line)


async def outcomes_of(trouble: Trouble, calls: Mapping[str, Call], pauses: Pauses | None = None) -> dict[str, Any]:
    """Begin calls while the store does not answer, and return what they return when it does again.

    The loop has to turn before the store is allowed to answer. None of the calls may be over before that: it would not
    have asked the store.
    """
    heart, loop = Heart(), asyncio.get_running_loop()
    ends_now, ended = threading.Event(), loop.create_future()
    tasks: dict[str, asyncio.Task[Any]] = {}

    def end() -> None:
        ends_now.wait()
        where = heart.wait_for_turns()
        if pauses is not None:
            pauses.note(calls, heart.longest)
        over = sorted(name for name, task in list(tasks.items()) if task.done())
        trouble.end()
        loop.call_soon_threadsafe(ended.set_result, (where, over))

    threading.Thread(target=end, daemon=True).start()
    await asyncio.to_thread(trouble.begin)
    ends_now.set()
    tasks.update({name: asyncio.create_task(_awaited(call), name=name) for name, call in calls.items()})
    where, over = await ended
    async with asyncio.timeout(DEADLINE_SECONDS):
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
    await heart.stop()
    assert not where, f"the loop stood still here:\n{where}"
    assert not over, f"these did not wait for the store: {over}"
    return dict(zip(tasks, results, strict=True))


async def _awaited(call: Call) -> Any:
    return await call()


# -- what is called ------------------------------------------------------------------------------------------------
@step
async def add(a: int, b: int) -> int:
    return a + b


@step(effect="once")
async def pay(order: str) -> str:
    return f"paid {order}"


@step(key="order:{order}")
async def keyed(order: str) -> str:
    return order


@step(limit="lanes")
async def limited(number: int) -> int:
    return number


@step
async def speak(word: str) -> str:
    everstep.stream("words").append(word)
    return word


@transaction(STORE)
def noted(connection: Any, number: int) -> int:
    connection.execute("CREATE TABLE IF NOT EXISTS loop_notes (number bigint)")
    connection.execute(f"INSERT INTO loop_notes VALUES ({number})")
    return number


@workflow(name="loop.quick")
async def quick(number: int) -> int:
    return await add(number, 1)


@workflow(name="loop.waits")
async def waits() -> Any:
    everstep.publish("where", "waiting")
    everstep.stream("words").append("first")
    return await everstep.receive("go")


@workflow(name="loop.fails")
async def fails(path: str) -> str:
    return await found(path)


@step(effect="read")
async def found(path: str) -> str:
    if not Path(path).exists():
        raise ValueError("not yet")
    return Path(path).name


@workflow(name="loop.pays")
async def pays(order: str) -> str:
    return await pay(order)


@workflow(name="loop.keyed")
async def keyed_flow(order: str) -> str:
    return await keyed(order)


@workflow(name="loop.limited")
async def limited_flow() -> int:
    return await limited(3)


@workflow(name="loop.parent")
async def parent() -> int:
    return await quick(4)


@workflow(name="loop.atomic")
async def atomic_flow() -> int:
    return await asyncio.to_thread(noted, 5)


@workflow(name="loop.files")
async def writes(path: str) -> str:
    await everstep.files.write(path, "text")
    return Path(path).name


@workflow(name="loop.saves")
async def saves() -> int:
    state = await everstep.checkpoint(1)
    await add(state, 1)
    return await everstep.checkpoint(2)


@workflow(name="loop.says")
async def says() -> str:
    await add(1, 2)
    everstep.stream("words").append("said")
    return "said"


@workflow(name="loop.speaks")
async def speaks() -> str:
    return await speak("word")


@workflow(name="loop.answers")
async def answers() -> None:
    async for request in everstep.requests("double", int):
        request.answer(2 * request.value)


@workflow(name="loop.approved")
async def approved() -> Any:
    return await everstep.approval("ship", {"to": "ann"})


CLASSES: dict[str, type] = {"App": App, "Run": Run, "Client": Client, "Schedule": Schedule}
ENGINE = {"App": {*dir(Host)} - {"close"}}
"""What an app has besides from the engine; only how it is closed is for users."""
ASK_NOTHING = {"App.get", "App.get_schedule", "Client.get"}
"""Methods that only make a handle."""
ON_THREADS = {"App.result_types"}
"""What the engine itself asks, on a thread."""
WAITING = ("shown", "to-hold", "to-resolve")


def methods() -> set[str]:
    """Return the public methods of all classes that users hold on a loop, but those that ask nothing."""
    found = {
        f"{name}.{method}"
        for name, cls in CLASSES.items()
        for method in set(dir(cls)) - ENGINE.get(name, set())
        if not method.startswith("_") and callable(getattr(cls, method))
    }
    return found - ASK_NOTHING - ON_THREADS


@asynccontextmanager
async def prepared(url: str, folder: Path, **options: Any) -> AsyncIterator[tuple[App, dict[str, tuple[Call, Any]]]]:
    """Open an app and a client, start the runs that the calls are about, and give the app with `calls_of` it."""
    async with everstep.open(url, **options) as app, everstep.connect(url) as client:
        await app.limit("lanes", concurrency=1)
        await app.queue("slow", concurrency=1)
        await app.run(quick, 1, id="done")
        await app.run(quick, 1, id="again")
        await app.run(says, id="said")
        await app.run(pays, "a", id="paid")
        await app.run(keyed_flow, "known", id="keyed")
        for name in ("hourly", "paused", "deleted"):
            await app.schedule(quick, 1, name=name, every=3600)
        await app.get_schedule("paused").pause()
        waiting = [*WAITING, *(f"{by}-{verb}" for by in ("app", "run", "client") for verb in ("signal", "cancel"))]
        for id in waiting:
            await app.start(waits, id=id)
        await app.start(answers, id="answers")
        for by in ("app", "run", "client"):
            await app.start(approved, id=f"{by}-approve")
        failed = await app.start(fails, str(folder / "there"), id="failed")
        with suppress(ValueError):
            await failed.result()
        (folder / "there").write_text("")
        await app.hold("to-resolve", by="test")
        async with everstep.open(f"sqlite:///{folder / 'other.db'}") as other:
            await other.run(quick, 5, id="imported")
            await other.export(["imported"], str(folder / "other.everstep"))
        async for _ in app.get("shown").stream("words"):
            break
        for id in app.drivers:
            await wait_on_loop_until(lambda id=id: id not in app.drivers or app.drivers[id].is_idle)  # type: ignore[misc]
        yield app, calls_of(app, client, url, folder)


def calls_of(app: App, client: Client, url: str, folder: Path) -> dict[str, tuple[Call, Any]]:
    """Return every kind of call, with what it must return, or the type of what it raises.

    Each is named after the method that it is about; `methods()` are all there.
    """
    done, shown = app.get("done"), app.get("shown")

    async def first_of_stream() -> Any:
        return (await anext(aiter(shown.stream("words")))).value

    async def opened() -> str:
        async with everstep.open(url) as other:
            return await other.get("done").status()

    async def connected() -> str:
        async with everstep.connect(url) as other:
            return await other.get("done").status()

    async def signalled(by: str, signal: Callable[[], Awaitable[Any]]) -> Any:
        await signal()
        return await app.get(f"{by}-signal").result()

    async def approved_by(by: str, approve: Callable[[], Awaitable[Any]]) -> Any:
        await approve()
        return await app.get(f"{by}-approve").result()

    async def resolved() -> Any:
        await app.resolve("to-resolve", "retry")
        return (await app.get("to-resolve").holds()) == []

    async def retried() -> Any:
        return await (await app.retry("failed")).result()

    async def forked(id: str, fork: str) -> Any:
        return await (await app.fork(id, at=3, id=fork)).result()

    async def restarted() -> Any:
        again = await app.start(quick, 1, id="again", on_existing="restart")
        return await again.result(), (await again.row()).generation

    async def cancelled(by: str, cancel: Callable[[], Awaitable[Any]]) -> Any:
        await cancel()
        with suppress(RunCancelled):
            await app.get(f"{by}-cancel").result()
        return await app.get(f"{by}-cancel").status()

    async def held() -> Any:
        await app.hold("to-hold", by="test")
        with suppress(RunHeld):  # it is asked for then, and made when its driver has taken it
            await app.get("to-hold").result()
        return await app.get("to-hold").status()

    async def limits() -> Any:
        return (await app.limit("lanes")).concurrency

    async def started_by_name() -> Any:
        return await (await client.start("loop.quick", 7, id="by-name")).status() in ("queued", "running", "completed")

    async def attached_by_name() -> Any:
        return await (await client.start("loop.quick", 1, id="done")).result()

    async def status_of_row() -> Any:
        return (await done.row()).status

    of_schedules = ["hourly"]
    return {
        "App.run": (lambda: app.run(quick, 2), 3),
        "App.run a child": (lambda: app.run(parent), 5),
        "App.run a step with a key": (lambda: app.run(keyed_flow, "known"), "known"),
        "App.run a step with a limit": (lambda: app.run(limited_flow), 3),
        "App.run an atomic step": (lambda: app.run(atomic_flow), 5),
        "App.run a file effect": (lambda: app.run(writes, str(folder / "file.txt")), "file.txt"),
        "App.run a checkpoint": (lambda: app.run(saves), 2),
        "App.run a body that streams": (lambda: app.run(speaks), "word"),
        "App.start again": (restarted, (2, 2)),
        "App.start what has ended": (lambda: app.run(quick, 1, id="done"), 2),
        "App.list": (lambda: _count(app.list(workflow="loop.fails")), 1),
        "App.signal": (lambda: signalled("app", lambda: app.signal("app-signal", "go", 7, id="once")), 7),
        "App.ask": (lambda: app.ask("answers", "double", 4), 8),
        "App.approvals": (lambda: app.approvals("shown"), []),
        "App.approve": (lambda: approved_by("app", lambda: app.approve("app-approve", "yes")), "yes"),
        "App.cancel": (lambda: cancelled("app", lambda: app.cancel("app-cancel")), "cancelled"),
        "App.retry": (retried, "there"),
        "App.hold": (held, "held"),
        "App.holds": (lambda: app.holds(run="done"), []),
        "App.resolve": (resolved, True),
        "App.fork": (lambda: forked("done", "fork"), 2),
        "App.fork before its first entry": (lambda: forked("said", "fork-said"), "said"),
        "App.rollback": (lambda: app.rollback("unknown"), UnknownRun),
        "App.schedule": (lambda: app.schedule(quick, 1, name="daily", every=86400), object),
        "App.schedules": (lambda: app.schedules(), list),
        "App.queue": (lambda: app.queue("slow", concurrency=2), object),
        "App.limit": (limits, 1),
        "App.effects": (lambda: _count(app.effects(prefix="order:known")), 1),
        "App.free_key": (lambda: app.free_key("order:none"), Misuse),
        "App.settle_key": (lambda: app.settle_key("order:none", 1), Misuse),
        "App.forget_keys": (lambda: app.forget_keys(older_than=1e6), 0),
        "App.forget_markers": (lambda: app.forget_markers(STORE), 0),
        "App.gc": (lambda: app.gc(older_than=1e6), object),
        "App.repair": (lambda: app.repair("done", dry_run=True), object),
        "App.worker_gone": (lambda: app.worker_gone("unknown", note="off"), Misuse),
        "App.host_gone": (lambda: app.host_gone("unknown", note="off", never_seen=True), object),
        "App.export": (lambda: app.export(["done"], str(folder / "out.everstep")), object),
        "App.export all": (lambda: app.export(None, str(folder / "all.everstep"), unfinished="leave"), object),
        "App.export schedules": (
            lambda: app.export(["done"], str(folder / "plan.everstep"), schedules=of_schedules, unfinished="leave"),
            object,
        ),
        "App.import_": (lambda: app.import_(str(folder / "other.everstep")), object),
        "App.close": (opened, "completed"),
        "Run.result": (lambda: done.result(), 2),
        "Run.status": (lambda: done.status(), "completed"),
        "Run.row": (status_of_row, "completed"),
        "Run.history": (lambda: _count(done.history()), 4),
        "Run.published": (lambda: shown.published(), {"where": "waiting"}),
        "Run.stream": (first_of_stream, "first"),
        "Run.children": (lambda: done.children(), []),
        "Run.holds": (lambda: done.holds(), []),
        "Run.verify": (lambda: _sound(done.verify()), True),
        "Run.signal": (lambda: signalled("run", lambda: app.get("run-signal").signal("go", 7)), 7),
        "Run.ask": (lambda: app.get("answers").ask("double", 5), 10),
        "Run.approvals": (lambda: shown.approvals(), []),
        "Run.approve": (lambda: approved_by("run", lambda: app.get("run-approve").approve("yes")), "yes"),
        "Run.cancel": (lambda: cancelled("run", lambda: app.get("run-cancel").cancel()), "cancelled"),
        "Client.start": (started_by_name, True),
        "Client.start what has ended": (attached_by_name, 2),
        "Client.list": (lambda: _count(client.list(workflow="loop.fails")), 1),
        "Client.signal": (lambda: signalled("client", lambda: client.signal("client-signal", "go", 7)), 7),
        "Client.ask": (lambda: client.ask("answers", "double", 6), 12),
        "Client.approvals": (lambda: client.approvals("shown"), []),
        "Client.approve": (lambda: approved_by("client", lambda: client.approve("client-approve", "yes")), "yes"),
        "Client.cancel": (lambda: cancelled("client", lambda: client.cancel("client-cancel")), "cancelled"),
        "Client.get, opened and closed": (connected, "completed"),
        "Schedule.show": (lambda: app.get_schedule("hourly").show(), object),
        "Schedule.pause": (lambda: app.get_schedule("hourly").pause("test"), None),
        "Schedule.resume": (lambda: app.get_schedule("paused").resume(), None),
        "Schedule.trigger": (lambda: app.get_schedule("paused").trigger(), str),
        "Schedule.backfill": (lambda: app.get_schedule("paused").backfill(MORNING, MORNING), list),
        "Schedule.delete": (lambda: app.get_schedule("deleted").delete(), None),
    }


async def _count(found: Awaitable[Sequence[Any]]) -> int:
    return len(await found)


async def _sound(found: Awaitable[Any]) -> bool:
    return bool((await found).sound)


def wrong(expected: Mapping[str, tuple[Call, Any]], outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcomes that are not as expected."""
    found: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        wanted = expected[name][1]
        is_raised = isinstance(wanted, type) and issubclass(wanted, BaseException)
        if isinstance(wanted, type):
            is_right = isinstance(outcome, wanted) and (is_raised or not isinstance(outcome, BaseException))
        else:
            is_right = outcome == wanted
        if not is_right:
            found[name] = outcome
    return found
