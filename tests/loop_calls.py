"""Every kind of call that an application makes, and what shows that its loop goes on while its store is silent."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import everstep
from everstep import step, transaction, workflow
from everstep.effects.databases import STORE
from everstep.engine.app.app import App
from everstep.errors import Misuse, RunCancelled, UnknownRun
from tests.waiting import DEADLINE_SECONDS, wait_on_loop_until

Call = Callable[[], Awaitable[Any]]

TURNS = 40
"""How often the loop has to turn while the store is silent. Each turn takes two milliseconds at least."""


class Trouble(Protocol):
    """A store that does not answer."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Heart:
    """A task that counts the turns of its loop."""

    def __init__(self) -> None:
        self.turns = 0
        self._thread = threading.get_ident()
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0.002)

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


async def outcomes_of(trouble: Trouble, calls: Mapping[str, Call]) -> dict[str, Any]:
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


async def prepare(app: App, folder: Path) -> None:
    """Start the runs that the calls are about."""
    await app.limit("lanes", concurrency=1)
    await app.queue("slow", concurrency=1)
    await app.run(quick, 1, id="done")
    await app.run(says, id="said")
    await app.run(pays, "a", id="paid")
    await app.run(keyed_flow, "known", id="keyed")
    await app.schedule(quick, 1, name="hourly", every=3600)
    for name in ("signalled", "cancelled", "held", "shown", "asked to hold", "resolved"):
        await app.start(waits, id=name.replace(" ", "-"))
    failed = await app.start(fails, str(folder / "there"), id="failed")
    with suppress(ValueError):
        await failed.result()
    (folder / "there").write_text("")
    await app.hold("resolved", by="test")
    shown = app.get("shown")
    async for _ in shown.stream("words"):
        break
    for id in ("signalled", "cancelled", "shown", "asked-to-hold"):
        await wait_on_loop_until(lambda id=id: app.drivers[id].is_idle)  # type: ignore[misc]


def calls_of(app: App, url: str, folder: Path) -> dict[str, tuple[Call, Any]]:
    """Return every kind of call, with what it must return, or the type of what it raises."""

    async def first_of_stream() -> Any:
        return (await anext(aiter(app.get("shown").stream("words")))).value

    async def opened() -> str:
        async with everstep.open(url) as other:
            return await other.get("done").status()

    async def signalled() -> Any:
        await app.signal("signalled", "go", 7, id="once")
        return await app.get("signalled").result()

    async def resolved() -> Any:
        await app.resolve("resolved", "retry")
        return (await app.get("resolved").holds()) == []

    async def retried() -> Any:
        return await (await app.retry("failed")).result()

    async def forked() -> Any:
        return await (await app.fork("done", at=3, id="fork")).result()

    async def forked_before_its_first_entry() -> Any:
        return await (await app.fork("said", at=3, id="fork-said")).result()

    async def cancelled() -> Any:
        await app.cancel("cancelled")
        with suppress(RunCancelled):
            await app.get("cancelled").result()
        return await app.get("cancelled").status()

    async def held() -> Any:
        await app.hold("asked-to-hold", by="test")
        return await app.get("asked-to-hold").status()

    async def limits() -> Any:
        return (await app.limit("lanes")).concurrency

    return {
        "start and result": (lambda: app.run(quick, 2), 3),
        "result": (lambda: app.get("done").result(), 2),
        "status": (lambda: app.get("done").status(), "completed"),
        "list": (lambda: _count(app.list(workflow="loop.fails")), 1),
        "history": (lambda: _count(app.get("done").history()), 4),
        "published": (lambda: app.get("shown").published(), {"where": "waiting"}),
        "stream": (first_of_stream, "first"),
        "children": (lambda: app.get("done").children(), []),
        "verify": (lambda: _sound(app.get("done").verify()), True),
        "signal": (signalled, 7),
        "cancel": (cancelled, "cancelled"),
        "retry": (retried, "there"),
        "hold": (held, "held"),
        "holds": (lambda: app.holds(run="done"), []),
        "resolve": (resolved, True),
        "fork": (forked, 2),
        "fork that streams": (forked_before_its_first_entry, "said"),
        "rollback": (lambda: app.rollback("unknown"), UnknownRun),
        "approvals": (lambda: app.approvals("shown"), []),
        "schedule": (lambda: app.schedule(quick, 1, name="daily", every=86400), object),
        "schedules": (lambda: app.get_schedule("hourly").show(), object),
        "queue": (lambda: app.queue("slow", concurrency=2), object),
        "limit": (limits, 1),
        "effects": (lambda: _count(app.effects(prefix="order:known")), 1),
        "free a key": (lambda: app.free_key("order:none"), Misuse),
        "settle a key": (lambda: app.settle_key("order:none", 1), Misuse),
        "forget keys": (lambda: app.forget_keys(older_than=1e6), 0),
        "forget markers": (lambda: app.forget_markers(STORE), 0),
        "collect": (lambda: app.gc(older_than=1e6), object),
        "repair": (lambda: app.repair("done", dry_run=True), object),
        "export": (lambda: app.export(["done"], str(folder / "out.everstep")), object),
        "worker gone": (lambda: app.worker_gone("unknown", note="off"), Misuse),
        "host gone": (lambda: app.host_gone("unknown", note="off"), object),
        "export all": (lambda: app.export(None, str(folder / "all.everstep"), unfinished="leave"), object),
        "export schedules": (
            lambda: app.export(["done"], str(folder / "schedules.everstep"), schedules=["hourly"], unfinished="leave"),
            object,
        ),
        "child": (lambda: app.run(parent), 5),
        "keyed step": (lambda: app.run(keyed_flow, "known"), "known"),
        "limited step": (lambda: app.run(limited_flow), 3),
        "atomic step": (lambda: app.run(atomic_flow), 5),
        "file effect": (lambda: app.run(writes, str(folder / "file.txt")), "file.txt"),
        "checkpoint": (lambda: app.run(saves), 2),
        "stream of a body": (lambda: app.run(speaks), "word"),
        "open and close": (opened, "completed"),
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
        if is_raised or wanted is object:
            is_right = isinstance(outcome, wanted) and (is_raised or not isinstance(outcome, BaseException))
        else:
            is_right = outcome == wanted
        if not is_right:
            found[name] = outcome
    return found
