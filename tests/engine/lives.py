"""Lives of a run: once undisturbed, then again from every prefix of its history, as after a crash at that place."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

import everstep
from everstep import step
from everstep.engine.app.app import App
from everstep.engine.app.handles import Run
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.verify import Recorded, published_by
from everstep.model.accounts import standing_at
from everstep.model.events import EventRow, decode_body
from everstep.stores.protocol import Append, Claim, Claimed, NewRun, RowChange, RunRow, StartRun
from everstep.testing.clock import FakeClock
from tests.lasting import LastingStore

RUN = "the-run"
Signals = Sequence[tuple[str, Any]]


@step(effect="read")
async def echo(value: Any) -> Any:
    return value


@step(effect="read")
async def fail(text: str) -> None:
    raise ValueError(text)


@step
async def hang(name: str = "") -> str:
    """A body that never ends. The helpers below let time pass although it runs."""
    await asyncio.Event().wait()
    raise AssertionError(name)


@step
def add(a: int, b: int) -> int:
    return a + b


class Life(NamedTuple):
    """What became of a run: its result or its error, and its history."""

    value: Any
    error: BaseException | None
    events: list[EventRow]
    row: RunRow

    def commands(self) -> list[tuple[str, str, int]]:
        """Return what the code asked for, without what recovery added."""
        wanted = ("step_started", "timer_started", "step_cancelled", "signal_awaited", "value_published")
        bodies = [(event, decode_body(event.kind, event.body)) for event in self.events if event.kind in wanted]
        return [(event.kind, event.step, body.call) for event, body in bodies if getattr(body, "attempt", 1) == 1]

    def kinds(self) -> list[str]:
        """Return the kinds of the events."""
        return [event.kind for event in self.events]

    def bodies(self, kind: str) -> list[Any]:
        """Return the bodies of the events of a kind."""
        return [decode_body(kind, event.body) for event in self.events if event.kind == kind]


def is_settled(app: App) -> bool:
    """Tell whether nothing moves without time: every run waits, or waits only for bodies that hang."""
    if app._taking_up or app._tasks:
        return False
    for driver in app.drivers.values():
        bodies = driver.attempts.running.values()
        if driver.attempts.starting or driver._unapplied or not driver.writer.all_is_durable:
            return False
        if any(not attempt.call.step.startswith("hang") for attempt in bodies):
            return False
        if not bodies and (not driver.is_idle or app.store.inbox(driver.run)):
            return False
    return True


async def settle(app: App) -> None:
    """Wait until nothing moves without time."""
    await asyncio.sleep(0)  # alarms that have just been rung come first
    await until(lambda: is_settled(app))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. pytest's own timeout says where, if it never does."""
    while not condition():
        await asyncio.sleep(0.0005)


async def play(app: App, clock: FakeClock, run: str = RUN) -> None:
    """Let a run go to its end; time moves only when nothing else does."""
    for _ in range(10_000):
        await settle(app)
        if run not in app.drivers:
            if not await wake_from_store(app, clock, run):
                return
        elif not clock.advance_to_next():
            return
    raise AssertionError(f"{run} does not end")


async def wake_from_store(app: App, clock: FakeClock, run: str) -> bool:
    """Let a waiting run that has left memory come back when its time has come. A run that remembers facts leaves."""
    row = app.store.run(run)
    if row is None or row.status not in ("queued", "waiting") or not (row.wake_at or app.store.inbox(run)):
        return False
    if row.wake_at is not None and not app.store.inbox(run):
        clock.advance(max(0, row.wake_at - clock.now()) / 1e6)
    app.pump.nudge()
    await asyncio.sleep(0.001)
    return True


async def outcome(run: Run[Any]) -> tuple[Any, BaseException | None]:
    """Return a run's result, or its error."""
    try:
        return await run.result(timeout=60), None
    except everstep.errors.RunHeld:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
        return None, error


async def live(store: Any, clock: FakeClock, workflow: Any, args: Sequence[Any], signals: Signals = ()) -> Life:
    """Start a run, or go on with it, in an app of its own, and let it go to its end."""
    app = App(store, clock=clock)
    await app.open()
    try:
        run = await app.start(workflow, *args, id=RUN)
        for number, (name, value) in enumerate(signals):
            if app.store.run(RUN).status in ("queued", "running", "waiting"):  # type: ignore[union-attr]
                try:
                    await run.signal(name, value, id=f"signal-{number}")
                except everstep.errors.RunEnded:
                    break  # it was quicker
        await play(app, clock)
        value, error = await outcome(run)
        row = store.run(RUN)
        return Life(value, error, list(store.events(RUN, row.generation)), row)
    finally:
        await app.close()


def cut(store: LastingStore, count: int) -> LastingStore:
    """Return another store with the first events of the run, as a crash would leave it behind."""
    row = store.run(RUN)
    assert row is not None
    events = store.events(RUN, row.generation)[:count]
    first = events[0]
    fresh = msgspec.structs.replace(
        row,
        status="queued",
        head_seq=1,
        head_digest=first.digest,
        epoch=0,
        owner=None,
        outcome=None,
        published=None,
        wake_at=None,
        current_step="",
        ended_at=None,
        budget=budget(events[:1]),
    )
    dump = store.dump(RUN)
    assert dump is not None
    payloads = dump.payloads
    other = LastingStore()
    other.go_on_from(store)
    other.commit([StartRun(NewRun(fresh, first, payloads=payloads))])
    if count > 1:
        other.register_worker("ghost", 1, "host", 1)
        claimed = other.commit([Claim(RUN, "ghost", first.at, ("queued",))])[0]
        assert isinstance(claimed, Claimed), claimed
        change = RowChange("queued", events[-1].at, published=published(store, events), budget=budget(events))
        unit = Append(
            run=RUN,
            generation=row.generation,
            epoch=claimed.row.epoch,
            expected_seq=1,
            expected_digest=first.digest,
            events=events[1:],
            row=change,
            release=True,
        )
        verdict = other.commit([unit])[0]
        assert type(verdict).__name__ == "Accepted", verdict
    return other


def recorded(events: Sequence[EventRow]) -> list[Recorded]:
    return [Recorded(e.seq, e.kind, e.step, e.at, decode_body(e.kind, e.body)) for e in events]


def budget(events: Sequence[EventRow]) -> bytes | None:
    """Return what the row of a run with these events says about its budget."""
    return standing_at(recorded(events))


def published(store: LastingStore, events: Sequence[EventRow]) -> bytes | None:
    """Return what the row of a run with these events says that it published."""
    values = {
        name: msgspec.Raw(restore_payload(store.payload(RUN, body.ref), body.ref)) if body.ref else body.value
        for name, body in published_by(recorded(events)).items()
    }
    return msgspec.json.encode(values) if values else None


def text_of(error: BaseException | None) -> str:
    """Return what two equal errors have in common, members of groups included."""
    if isinstance(error, BaseExceptionGroup):
        return f"{type(error).__name__}[{', '.join(map(text_of, error.exceptions))}]"
    return f"{type(error).__name__}: {error}"


async def prove_async(
    workflow: Any, *args: Any, signals: Signals = (), every_prefix: bool = True, same_commands: bool = True
) -> Life:
    """Let a run live once, then once more from every prefix of its history; all lives must be the same."""
    store = LastingStore()
    first = await live(store, FakeClock(), workflow, args, signals)
    if not every_prefix:
        return first
    for count in range(1, len(first.events)):
        at = first.events[count - 1].at
        kept = [e for e in first.events[:count] if e.kind == "signal_received"]
        received = {decode_body(e.kind, e.body).id for e in kept}
        missing = [pair for number, pair in enumerate(signals) if f"signal-{number}" not in received]
        again = await live(cut(store, count), FakeClock(at), workflow, args, missing)
        where = f"cut after event {count} ({first.events[count - 1].kind} {first.events[count - 1].step})"
        assert again.events[:count] == first.events[:count], where
        assert again.value == first.value, where
        assert text_of(again.error) == text_of(first.error), where
        if same_commands:
            assert again.commands() == first.commands(), where
    return first


def prove(workflow: Any, *args: Any, **options: Any) -> Any:
    """Return the result of a run that is the same in all its lives."""
    life = asyncio.run(prove_async(workflow, *args, **options))
    if life.error is not None:
        raise life.error
    return life.value


def prove_life(workflow: Any, *args: Any, **options: Any) -> Life:
    """Return the first life of a run that is the same in all its lives."""
    return asyncio.run(prove_async(workflow, *args, **options))


def once_live(workflow: Any, *args: Any) -> Life:
    """Live once, without the prefixes."""
    return prove_life(workflow, *args, every_prefix=False)
