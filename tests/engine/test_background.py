"""Background work that raises, at each of its calls: it is tried again, counted and shown, and runs go on."""

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest

import everstep
from everstep import Retention, Webhook, step, workflow
from everstep.engine.process import webhooks
from everstep.engine.process.host import Host
from everstep.engine.process.limits import Limits
from everstep.engine.process.notify import Notifier
from everstep.engine.process.presence import Presence
from everstep.engine.process.pump import Pump
from everstep.engine.process.queues import Queueing
from everstep.engine.process.resting import Resting
from everstep.engine.process.retention import Collector
from everstep.engine.process.schedules import Scheduler
from everstep.engine.process.watchers import Watchers
from everstep.engine.process.webhooks import Answer
from everstep.errors import StoreError
from everstep.stores.protocol import Operation, RunFilter, StartRun
from everstep.testing.faulty_store import FaultyStore
from everstep.worker.serving import WATCH, WorkerApp
from tests.engine.resume_helpers import Machine
from tests.waiting import DEADLINE_SECONDS

SECONDS = DEADLINE_SECONDS


@step(effect="read", limit="narrow")
async def limited(name: str) -> str:
    return name


@workflow(queue="lane")
async def waits_in_a_lane(name: str) -> str:
    return name + await everstep.receive("word", str)


@workflow
async def works(name: str) -> str:
    await asyncio.sleep(0.001)
    return await limited(name)


@step(effect="once")
async def lost() -> str:
    raise OSError("the answer was lost")


@workflow
async def held_at_once() -> str:
    return await lost()


@workflow
async def ticks() -> str:
    return "tick"


async def worker_of(machine: Machine, **options: Any) -> WorkerApp:
    """Start a worker that has everything in the background that there is."""
    store = options.pop("store", None) or machine.open_store()
    kept = Retention(runs=0.0, every=0.05, keep=1000)
    given = {"lease": 10.0, "on_hold": Webhook("https://example.org/holds"), "retention": kept, "clock": machine.clock}
    app = WorkerApp(store, lambda news: None, **{**given, **options})
    await app.open()
    app.background.keep(WATCH, app.watch, endless=True)
    machine._apps.append(app)
    return app


@pytest.fixture(autouse=True)
def acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that takes every notification."""
    monkeypatch.setattr(webhooks.Sending, "send", lambda self: Answer(204, ""))


async def workload(machine: Machine, worker: WorkerApp) -> None:
    """Do something with every kind of background work, from another process, and see that it happens."""
    client = await machine.boot()
    await client.limit("narrow", concurrency=1)
    await client.queue("lane", concurrency=2)
    for name in "ab":
        await client.start(works, name, id=f"r-works-{name}")
        await client.start(waits_in_a_lane, name, id=f"r-lane-{name}")
    await worker.start(held_at_once, id="r-held")
    await client.schedule(ticks, name="r-ticks", every=1)
    for name in "ab":
        await client.signal(f"r-lane-{name}", "word", "!")
    await machine.stop(client)  # from here on the worker has them all

    def has_happened() -> bool:
        machine.clock.advance(0.01)
        rows = machine.store.runs(RunFilter(limit=1000))
        done = {row.id for row in rows if row.status == "completed"}
        wanted = {f"r-works-{name}" for name in "ab"} | {f"r-lane-{name}" for name in "ab"}
        told = [note.state for note in machine.store.notifications(undelivered_only=False)]
        ticked = [run for run in done if "r-ticks" in run]
        return wanted <= done and bool(ticked) and bool(told) and set(told) == {"sent"}

    await machine.until(has_happened, SECONDS)


def break_method(
    monkeypatch: pytest.MonkeyPatch, worker: WorkerApp, owner: type, name: str, error: Exception
) -> list[str]:
    """Let a method of a worker, or of a part of it, raise twice."""
    real, fired = getattr(owner, name), []

    def may_raise(part: Any) -> None:
        app = getattr(part, "_app", None) or getattr(part, "app", part)
        if app is worker and len(fired) < 2:
            fired.append(name)
            raise error

    @functools.wraps(real)
    def raises(part: Any, *args: Any, **options: Any) -> Any:
        may_raise(part)
        return real(part, *args, **options)

    @functools.wraps(real)
    async def raises_later(part: Any, *args: Any, **options: Any) -> Any:
        may_raise(part)
        return await real(part, *args, **options)

    monkeypatch.setattr(owner, name, raises_later if inspect.iscoroutinefunction(real) else raises)
    return fired


WORK = [
    (Pump, "_turn"),
    (Pump, "_renew"),
    (Pump, "_bury"),
    (Pump, "_look"),
    (Pump, "_take_more"),
    (Pump, "_take_due"),
    (Pump, "_pause"),
    (Presence, "about"),
    (Presence, "renew"),
    (Queueing, "take"),
    (Resting, "evict_oldest"),
    (Host, "look_for_losses"),
    (Watchers, "look_at_what_is_elsewhere"),
    (Notifier, "look"),
    (Notifier, "_try"),
    (Notifier, "_answer"),
    (Scheduler, "look"),
    (Scheduler, "_look"),
    (Scheduler, "_look_after"),
    (Collector, "_look"),
    (Limits, "look"),
    (Limits, "_take"),
    (Limits, "_room"),
    (Limits, "_look_closely"),
    (WorkerApp, "_load"),
]


@pytest.mark.parametrize(("owner", "name"), WORK, ids=[f"{owner.__name__}.{name}" for owner, name in WORK])
async def test_background_work_that_raises_is_tried_again_and_counted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    worker = await worker_of(machine)
    fired = break_method(monkeypatch, worker, owner, name, TypeError("broken"))
    await workload(machine, worker)
    await machine.until(lambda: fired or machine.clock.advance(0.01), SECONDS)
    await until_all_works(machine, worker)
    assert sum(trouble.failures for trouble in worker.background.troubles().values()) >= 1
    assert worker.health().ready


async def until_all_works(machine: Machine, worker: WorkerApp) -> None:
    """Let time pass until nothing has failed that has not succeeded since."""

    def is_so() -> bool:
        machine.clock.advance(0.01)
        return not worker.background.has_failing

    await machine.until(is_so, SECONDS)


METHODS = ("bury_dead", "changed", "due", "due_notifications", "due_schedules", "inbox", "next_notification")
METHODS += ("next_schedule", "next_wake", "pending", "queue_room", "queued", "queues", "renew", "rows", "run", "slots")
METHODS += ("workers", "commit")


def _starts(operations: Sequence[Operation]) -> bool:
    return any(isinstance(operation, StartRun) for operation in operations)


@pytest.mark.parametrize("method", METHODS)
async def test_a_store_that_raises_what_no_store_should_ends_nothing(machine: Machine, method: str) -> None:
    faulty = FaultyStore(machine.open_store())
    worker = await worker_of(machine, store=faulty.as_store())
    # A caller who asks for a commit is told; the rest is the worker's own.
    asked = method == "commit"
    fault = faulty.fail(
        method, after=False, error=TypeError("broken"), count=2, when=lambda *args: not (asked and _starts(*args))
    )
    await workload(machine, worker)
    await machine.until(lambda: fault.fired or machine.clock.advance(0.01), SECONDS)
    await until_all_works(machine, worker)
    assert not worker.is_failed


async def test_tasks_that_the_application_cancels_begin_again(machine: Machine) -> None:
    worker = await worker_of(machine)
    for _ in range(2):
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
    await workload(machine, worker)
    assert worker.background.troubles()["pump"].failures >= 1


async def test_what_failed_is_logged_once_with_its_traceback(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "everstep.background"):
        worker = await worker_of(machine)
        break_method(monkeypatch, worker, Pump, "_bury", KeyError("where it was"))

        def has_recovered() -> bool:
            machine.clock.advance(0.01)
            troubles = worker.background.troubles()
            return troubles.get("dead workers") is not None and not worker.background.has_failing

        await machine.until(has_recovered, SECONDS)
    told = [record for record in caplog.records if "dead workers" in record.getMessage()]
    assert [bool(record.exc_info) for record in told] == [True, False, False]
    assert "continues" in told[-1].getMessage()


async def test_after_a_time_without_success_no_runs_of_others_are_claimed_until_it_succeeds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, is_broken = Collector._look, True

    async def raises(self: Collector) -> None:
        if is_broken:
            raise KeyError("broken")
        await real(self)

    monkeypatch.setattr(Collector, "_look", raises)
    worker = await worker_of(machine, patience=0.3)
    client = await machine.boot()

    def has_stopped() -> bool:
        machine.clock.advance(0.01)
        return "retention (KeyError)" in worker.background.not_claiming

    await machine.until(has_stopped, SECONDS)
    assert not worker.health().ready
    assert "retention" in worker.health().facts["not_claiming"]
    assert any("claims no more runs" in record.getMessage() for record in caplog.records)

    await client.start(ticks, id="r", queue="lane")
    await client.start(ticks, id="s")
    assert await client.get("s").result(timeout=SECONDS) == "tick", "whoever starts a run drives it"
    own = await worker.start(ticks, id="own")
    assert await own.result(timeout=SECONDS) == "tick", "what is here goes on"
    await machine.stop(client)

    def is_in_its_row() -> bool:
        machine.clock.advance(0.01)
        rows = [row for row in machine.store.workers() if row.id == worker.worker]
        return bool(rows) and b"not_claiming" in rows[0].about

    await machine.until(is_in_its_row, SECONDS)
    is_broken = False
    await machine.until(lambda: not worker.background.not_claiming, SECONDS)
    assert worker.health().ready


async def test_a_worker_that_does_not_claim_leaves_free_runs_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_broken = Collector._look, True

    async def raises(self: Collector) -> None:
        if is_broken:
            raise KeyError("broken")
        await real(self)

    monkeypatch.setattr(Collector, "_look", raises)
    worker = await worker_of(machine, patience=0.2)

    def has_stopped() -> bool:
        machine.clock.advance(0.01)
        return bool(worker.background.not_claiming)

    await machine.until(has_stopped, SECONDS)
    client, _ = await machine.start(waits_in_a_lane, "x", id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(client)
    await worker.signal("r", "word", "!")
    looks = 0
    look = Pump._look

    async def counted(self: Pump, at: int) -> None:
        nonlocal looks
        looks += 1
        await look(self, at)

    monkeypatch.setattr(Pump, "_look", counted)
    for wanted in range(1, 4):
        worker.pump.nudge()
        await machine.until(lambda wanted=wanted: looks >= wanted)
    assert machine.status("r") == "waiting"
    is_broken = False
    await machine.until_status("r", "completed")


# -- what the machine refuses ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [3, 10**9], ids=["a few", "all"])
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
async def test_without_threads_runs_go_on_and_the_app_can_be_closed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception, count: int
) -> None:
    start, fired = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if len(fired) < count and thread.name.startswith("everstep"):
            fired.append(thread.name)
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    app = await machine.boot(recover=True, clock=None)
    runs = [await app.start(works, str(number), id=str(number)) for number in range(20)]
    assert [await run.result(timeout=SECONDS) for run in runs] == [str(number) for number in range(20)]
    assert fired
    await asyncio.wait_for(machine.stop(app), SECONDS)


async def test_a_def_body_waits_for_a_thread_and_others_do_not_wait_for_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, is_refused = threading.Thread.start, True

    def refuse(thread: threading.Thread) -> None:
        if is_refused and thread.name.startswith("everstep-step"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    @step(effect="once")
    def on_a_thread() -> str:
        machine.notes.append("body")
        return "done"

    @workflow
    async def threaded() -> str:
        return await asyncio.to_thread(on_a_thread)

    app = await machine.boot(clock=None)
    waiting = await app.start(threaded, id="t")
    other = await app.start(works, "other", id="o")
    assert await other.result(timeout=SECONDS) == "other"
    await machine.until(lambda: "threads" in app.background.troubles())
    assert machine.notes == []
    is_refused = False
    assert await waiting.result(timeout=SECONDS) == "done"
    assert machine.notes == ["body"]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), StoreError("lost")], ids=repr)
async def test_a_worker_that_cannot_enter_again_tries_until_it_can(machine: Machine, error: Exception) -> None:
    faulty = FaultyStore(machine.open_store())
    worker = await worker_of(machine, store=faulty.as_store())
    fault = faulty.fail("register_worker", after=False, error=error, count=3)
    machine.sql("DELETE FROM workers")  # it was given up for dead

    def has_come_back() -> bool:
        machine.clock.advance(0.02)
        return fault.fired == 3 and worker.worker != ""

    await machine.until(has_come_back, SECONDS)
    await workload(machine, worker)
