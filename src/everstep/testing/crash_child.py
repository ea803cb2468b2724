"""A process of a crash test: it runs a user's workflow to its end, quickly, or is killed on the way.

Time is skipped: whenever everything rests, the clock moves to what is due next. Signals are delivered whenever the run
waits for them. Sleeping in step bodies is shortened. Keys depend on the run's id alone, so that two runs of a workflow
have the same keys.
"""

import asyncio
import functools
import hashlib
import heapq
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from everstep.codec import PLAIN, Codec
from everstep.engine.app.app import App
from everstep.engine.code import asyncio_parts, start
from everstep.engine.code.loop import WorkflowLoop
from everstep.engine.code.recovery_point import load_past
from everstep.engine.code.workflow import DECLARED
from everstep.engine.run.attempts import StepAttempts
from everstep.engine.run.resume import replay
from everstep.engine.verbs.approve import open_approvals
from everstep.engine.verbs.ask import posted
from everstep.errors import Error, Misuse, WrongType
from everstep.model.events import decode_body
from everstep.model.exchange_events import APPROVAL
from everstep.model.own_files import replace
from everstep.model.status import ENDED
from everstep.stores.opening import open_store
from everstep.stores.protocol import Post, RunFilter
from everstep.testing.clock import Alarm
from everstep.testing.crash_boundaries import REST, Passing
from everstep.worker.loading import load_workflow

RUN: Final = "crashtest"
STORE: Final = "everstep.db"
LEASE_SECONDS: Final = 1e9
"""Longer than any jump of the clock. Whether an owner lives is seen by its lock."""
TURN_SECONDS: Final = 0.002
RESTS: Final = 3
"""The number of turns in a row in which everything must be at rest."""
STUCK_TURNS: Final = 250
ORDER_SECONDS: Final = 0.03
"""The maximum delay of an outcome, in seconds, when orders are tried."""
LAST_LINES: Final = "end.json"
DIFFERENCES: Final = "differences.json"
REPLAYED_MAX: Final = 100
"""The maximum number of runs of a trial that are replayed: the tested run first, then its children."""
REQUEST: Final = "request:"
"""The prefix that marks requests among the things that a run waits for."""

_sleep = asyncio.sleep


class Ask(msgspec.Struct):
    """The task of a process."""

    target: str
    """`/path/app.py:report`."""
    file: str
    """The workflow's own file, which belongs to the user wherever it is."""
    arguments: str
    """Their payload."""
    folder: str
    """Its working directory. The store is beside the notes, so that the workflow does not see it."""
    notes: str
    environment: dict[str, str] = {}
    at: str = ""
    """The boundary at which it is killed."""
    signals: dict[str, Any] = {}
    approvals: dict[str, Any] = {}
    """The answer to each approval, by what is to be approved."""
    requests: dict[str, list[Any]] = {}
    """The values to ask, in order, by the names of requests."""
    replay: bool = False
    """Only compare the code with the existing histories."""
    order: int = 0
    pace: float = 1.0
    seconds: float = 30.0


def _not_taken(name: str, why: str) -> Misuse:
    return Misuse(f"The workflow does not take the value that is given for the signal {name}: {why}")


class LeapingClock:
    """The machine's time, beginning at the store's clock, with jumps over all waiting."""

    def __init__(self, at: int) -> None:
        self._offset = at - time.monotonic_ns() // 1000
        self._alarms: list[tuple[int, int, Alarm]] = []
        self._order = itertools.count()

    def now(self) -> int:
        """Return microseconds since 1970."""
        return time.monotonic_ns() // 1000 + self._offset

    def ticks(self) -> int:
        """Return how much time has passed, including the jumps."""
        return self.now()

    def alarm(self, loop: asyncio.AbstractEventLoop, at: int, callback: Callable[[], None]) -> Alarm:
        """Call back when this clock has reached a time."""
        alarm = Alarm(loop, callback)
        heapq.heappush(self._alarms, (at, next(self._order), alarm))
        return alarm

    def ring(self) -> None:
        """Call the callbacks that are due."""
        now = self.now()
        while self._alarms and (self._alarms[0][0] <= now or self._alarms[0][2].is_cancelled):
            heapq.heappop(self._alarms)[2].ring()

    def next(self) -> int | None:
        """Return when the next alarm is due."""
        self.ring()
        return self._alarms[0][0] if self._alarms else None

    def leap(self, at: int) -> None:
        """Move to a time, if it is in the future."""
        self._offset += max(0, at - self.now())
        self.ring()


class Life:
    """One life of the run: from the start of this process to the run's end, or to a kill."""

    def __init__(self, ask: Ask, app: App, clock: LeapingClock, passing: Passing) -> None:
        self._ask, self._app, self._clock, self._passing = ask, app, clock, passing

    async def go(self) -> dict[str, Any]:
        """Drive all runs until none can continue. Returns their state."""
        rested = 0
        while True:
            await _sleep(TURN_SECONDS)
            self._clock.ring()
            if not self._is_quiet(patient=rested < STUCK_TURNS // 2):
                rested = 0
                continue
            rested += 1
            if rested < RESTS:
                continue
            if not self._unfinished():
                return {"awaited": []}
            self._passing.passes(REST)
            if await self._deliver() or self._leap():
                rested = 0
            elif rested > STUCK_TURNS:
                names = {name for _, name in self._awaited() if not name.startswith(APPROVAL)}
                names |= {APPROVAL + one.what for one in open_approvals(self._app.store)}
                names |= {REQUEST + name for _, name in self._asked_for()}
                return {"awaited": sorted(names)}

    def _is_quiet(self, *, patient: bool) -> bool:
        app = self._app
        if not app.is_at_rest() or app.wanted:
            return False
        counts = app.store.counts()
        if counts.get("queued") or counts.get("running"):
            return False
        return not (patient and app.store.pending(app.worker))

    def _unfinished(self) -> list[Any]:
        rows = self._app.store.runs(RunFilter(limit=1000))
        return [row for row in rows if row.status not in ENDED and row.status != "held"]

    def _awaited(self) -> list[tuple[str, str]]:
        """Return the runs that wait for signals, and the signals' names."""
        found = []
        for row in self._unfinished():
            driver = self._app.drivers.get(row.id)
            names = driver.execution.receiving.awaited() if driver is not None else self._by_events(row, "signal")
            found += [(row.id, name) for name in names]
        return found

    def _asked_for(self) -> list[tuple[str, str]]:
        """Return the runs that wait for requests, and the requests' names."""
        found = []
        for row in self._unfinished():
            driver = self._app.drivers.get(row.id)
            if driver is None:
                names = self._by_events(row, "request")
            else:
                requests = driver.execution.receiving.requests
                names = requests.awaited() if requests is not None else []
            found += [(row.id, name) for name in names]
        return found

    def _by_events(self, row: Any, kind: str) -> list[str]:
        """Return the names that a run which is not in memory waits for: asked for in its history, and not received
        since.
        """
        names: list[str] = []
        for event in self._app.store.events(row.id, row.generation):
            if event.kind == f"{kind}_awaited":
                names.append(decode_body(event.kind, event.body).name)
            elif event.kind == f"{kind}_received" and (name := decode_body(event.kind, event.body).name) in names:
                names.remove(name)
        return names

    async def _deliver(self) -> bool:
        """Deliver one thing that a run waits for, and look again: it may be all that the code needs.

        The id is the same in every life, so each arrives once. A delivery that has arrived and is not taken is not
        needed any more.
        """
        if await self._approve():
            return True
        for run, name in self._awaited():
            inbox = [one for one in self._app.store.signals(run) if one.name == name and one.kind == "signal"]
            if name in self._ask.signals and all(one.state != "pending" for one in inbox):
                self._refuse_rejected(run, name)
                number = sum(1 for one in inbox if one.state == "consumed") + 1
                try:
                    await self._app.signal(run, name, self._ask.signals[name], id=f"crashtest-{name}-{number}")
                except WrongType as refused:
                    raise _not_taken(name, refused.why) from None
                return True
        return await self._ask_next()

    def _refuse_rejected(self, run: str, name: str) -> None:
        """Fail if the code rejects a value, because it would be delivered without end."""
        row = self._app.store.run(run)
        for event in self._app.store.events(run, row.generation) if row is not None else ():
            if event.kind == "signal_rejected" and (body := decode_body(event.kind, event.body)).name == name:
                raise _not_taken(name, body.why)

    async def _ask_next(self) -> bool:
        """Send the next request to a run that waits for it, without waiting for the answer: the history has it."""
        for run, name in self._asked_for():
            inbox = [one for one in self._app.store.signals(run) if one.name == name and one.kind == "request"]
            number = sum(1 for one in inbox if one.state == "consumed")
            values = self._ask.requests.get(name, [])
            if number < len(values) and all(one.state != "pending" for one in inbox):
                payload = self._app.codec.encode(values[number], PLAIN, f"the request {name!r}")
                post = Post(run, "request", name, f"crashtest-{name}-{number + 1}", payload, self._clock.now())
                await posted(self._app, post)
                return True
        return False

    async def _approve(self) -> bool:
        """Answer the first open approval. An answered one is no longer open."""
        wanted = [one for one in open_approvals(self._app.store) if one.what in self._ask.approvals][:1]
        for one in wanted:
            await self._app.approve(one.run, self._ask.approvals[one.what], id=one.id, by="crashtest")
        return bool(wanted)

    def _leap(self) -> bool:
        times = (self._clock.next(), self._app.store.next_wake(worker=self._app.worker, everyone=True))
        due = [at for at in times if at is not None]
        if not due:
            return False
        self._clock.leap(min(due))
        return True


async def live(ask: Ask, passing: Passing) -> dict[str, Any]:
    """Start the run, or continue it."""
    workflow = load_workflow(ask.target)
    store = open_store(os.path.join(os.path.dirname(ask.notes), STORE))
    clock = LeapingClock(store.now())
    app = App(store, recover=True, lease=LEASE_SECONDS, clock=clock)
    args, _ = app.codec.decode_arguments(workflow.signature, ask.arguments.encode())
    await app.open()
    try:
        await app.start(workflow, *args, id=RUN)
        app.pump.nudge()
        return await Life(ask, app, clock, passing).go()
    finally:
        await app.close()


async def replay_all(ask: Ask) -> list[dict[str, Any]]:
    """Replay all existing runs from their beginnings, and return what the code asks for differently."""
    load_workflow(ask.target)
    asyncio_parts.install()
    store = open_store(os.path.join(os.path.dirname(ask.notes), STORE), create=False)
    found: list[dict[str, Any]] = []
    try:
        for row in store.runs(RunFilter(limit=REPLAYED_MAX)):
            if row.status in ENDED and row.workflow in DECLARED.names():
                past = load_past(store, row)
                workflow = DECLARED.named(row.workflow)
                replayed = replay(store, Codec(), row, workflow, past.events, past.checkpoint, quiet=True)
                replayed.execution.evict()
                found += [one._asdict() for one in replayed.differences]
    finally:
        store.close()
    return found


def entropy_of(randomness: random.Random) -> str:
    """Return the random bits of a new run: the same for the same run in every folder."""
    run = sys._getframe(1).f_locals.get("run", "")
    return hashlib.sha256(f"crashtest {run}".encode()).hexdigest()[:32]


def shorten_sleep(pace: float) -> None:
    """Shorten sleeping in step bodies to a fraction. Timers of workflows are skipped anyway."""
    whole, whole_async = time.sleep, asyncio.sleep

    def sleep(seconds: float) -> None:
        whole(seconds / pace)

    @functools.wraps(whole_async)
    async def sleep_async(delay: float, result: Any = None) -> Any:
        loop = asyncio.get_running_loop()
        return await whole_async(delay if isinstance(loop, WorkflowLoop) else delay / pace, result)

    time.sleep = sleep  # type: ignore[assignment]
    asyncio.sleep = asyncio.tasks.sleep = sleep_async


def shuffle_ends(seed: int) -> None:
    """Make concurrent steps complete in another order: each outcome is delayed a little, by the seed."""
    end = StepAttempts._end

    def end_later(attempts: StepAttempts, attempt: Any, *outcome: Any) -> None:
        delay = random.Random(f"{seed} {attempt.run} {attempt.step}").random() * ORDER_SECONDS
        attempts._driver.app.loop.call_later(delay, functools.partial(end, attempts, attempt, *outcome))

    StepAttempts._end = end_later  # type: ignore[method-assign, assignment]


def become(ask: Ask) -> int:
    """Perform a task in this process. Returns its exit status."""
    os.environ.update(ask.environment)
    os.chdir(ask.folder)
    passing = Passing(ask.at, ask.notes, ask.file)
    start.new_entropy = entropy_of
    shorten_sleep(ask.pace)
    if ask.order:
        shuffle_ends(ask.order)
    try:
        if ask.replay:
            end: Any = asyncio.run(replay_all(ask))
        else:
            passing.arm()
            end = asyncio.run(live(ask, passing))
    except Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    replace(Path(ask.notes).with_name(DIFFERENCES if ask.replay else LAST_LINES), json.dumps(end).encode())
    return 0
