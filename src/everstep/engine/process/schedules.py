"""The part of a worker that looks after schedules: when a tick has come, it starts the run of it.

A tick is started by the change of the schedule's row, in one transaction with its run, by whoever knows the newest
revision. So of several workers one does it; a worker that dies before that has done nothing, and the next one does it.

It costs nothing to wait: an alarm is set for the next tick. A change by another process is noticed as everything
else is, by the pump.
"""

from functools import partial
from typing import Final, TypeVar

import msgspec

from everstep.codec import Arguments
from everstep.engine.code.start import Origin, new_run
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.clock import Alarm, microseconds, set_alarm
from everstep.engine.history.restored import restores_in
from everstep.engine.process.process import Process
from everstep.errors import Damaged, StoreError
from everstep.model import events as ev
from everstep.model.budgets import allotment_of
from everstep.model.crash_points import crash_point
from everstep.model.schedules import Decision, Definition, State, decide, run_of_tick, tick_text, wake_time
from everstep.model.status import ENDED
from everstep.model.untrusted import logger
from everstep.stores.protocol import Accepted, NewRun, Post
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow

log = logger("everstep.schedules")

T = TypeVar("T")

ROWS: Final = 100
"""So many schedules are looked at in one go."""
AGAIN_SECONDS: Final = 0.5
"""After so long a store that failed is asked again."""
GRACE_SECONDS: Final = 30.0
"""How long a run may clean up that is cancelled because the next tick has come."""


def definition_of(row: ScheduleRow) -> Definition:
    """Return what a schedule starts, and when."""
    return _decoded(row, row.definition, Definition)


def state_of(row: ScheduleRow) -> State:
    """Return how a schedule stands."""
    return _decoded(row, row.state, State)


def _decoded(row: ScheduleRow, text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(
            f"The schedule {row.name} cannot be read ({type(error).__name__}): it is damaged, or of a newer release. "
            f"`everstep schedule delete {row.name}` removes it; its runs stay."
        ) from error


def changed_row(row: ScheduleRow, definition: Definition, state: State, at: int) -> ScheduleRow:
    """Return a schedule's row as it is to be. Revisions are times, so that one never comes back, also for a new one."""
    return ScheduleRow(
        name=row.name,
        workflow=definition.workflow,
        revision=max(row.revision + 1, at),
        next_at=wake_time(row.name, definition, state),
        waits=state.buffered is not None and state.stopped_at is None,
        definition=msgspec.json.encode(definition),
        state=msgspec.json.encode(state),
        created_at=row.created_at or at,
    )


def _active(row: ScheduleRow) -> list[str]:
    """Return the runs that a tick waits for. One that cannot be read waits for none."""
    try:
        return state_of(row).active
    except Damaged:
        return []


class Scheduler:
    """Starts the runs of ticks. Only an app that takes up whatever is free does that: the runs are nobody's."""

    def __init__(self, app: Process) -> None:
        self.awaited: frozenset[str] = frozenset()
        """Runs whose end a tick waits for."""
        self._app = app
        self._looks_again = self._is_closed = False
        self._alarm: Alarm | None = None
        self._next_at: int | None = None
        """When the store said that there is something to do, the last time that it was asked."""
        self._unreadable: set[str] = set()
        """Schedules that cannot be followed, which was said."""

    def look(self) -> None:
        """Somebody has written something: look soon, unless it was not about schedules."""
        if self._is_at_work():
            app = self._app
            ask = partial(app.store.next_schedule, workflows=app.workflows())
            app.read_then("", self._look_if_new, lambda error: self.look_closely(), ask)

    def look_closely(self) -> None:
        """Something may be due: look soon. Whoever looks already looks once more."""
        if not self._is_at_work():
            return
        self._looks_again = True
        self._app.background.keep("schedules", self._look)

    def _is_at_work(self) -> bool:
        app = self._app
        return bool(app.recover and app.worker) and not (self._is_closed or app.draining)

    def _look_if_new(self, next_at: int | None) -> None:
        """Look, unless a quick question has shown that nothing changed: what starts or waits moves the next time."""
        is_due = next_at is not None and next_at <= self._app.clock.now()
        if next_at != self._next_at or self.awaited or is_due:
            self.look_closely()

    def close(self) -> None:
        """Start nothing more."""
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    async def _look(self) -> None:
        """Do what is due. What fails here begins again, until nothing is left to look at."""
        app = self._app
        while self._is_at_work():
            self._looks_again = False
            wanted = {"at": app.clock.now(), "workflows": app.workflows(), "limit": ROWS}
            rows = await app.read(app.store.due_schedules, **wanted)
            self.awaited = frozenset(run for row in rows if row.waits for run in _active(row))
            done = [await self._look_after(row) for row in rows]
            if not (any(done) or self._looks_again):
                break
        if not app.draining:
            self._next_at = await app.read(app.store.next_schedule, workflows=app.workflows())
            self._set_alarm(self._next_at)

    async def _look_after(self, row: ScheduleRow) -> bool:
        """Do what is due for one schedule. Returns whether anything was done, so that there may be more."""
        app = self._app
        try:
            change = await app.read(self._change, row)
        except Exception as error:  # whatever it is, it concerns this schedule only, unless the store failed
            if isinstance(error, StoreError) and not isinstance(error, Damaged):
                raise
            if row.name not in self._unreadable:
                self._unreadable.add(row.name)
                log.error("The schedule %s cannot be followed: %s", row.name, error)
            return False
        if change is None:
            return False
        crash_point("schedule.due")
        if not isinstance(await app.committer.submit(change), Accepted):
            return True  # another worker has done it, or somebody has changed the schedule
        crash_point("schedule.fired")
        if change.starts:
            log.info("The schedule %s has started %s.", row.name, ", ".join(new.row.id for new in change.starts))
            app.pump.nudge()
        for post in change.posts:
            app.wake(post.run)
        return True

    def _change(self, row: ScheduleRow) -> ChangeSchedule | None:
        app, at = self._app, self._app.clock.now()
        definition, state = definition_of(row), state_of(row)
        decision = decide(row.name, definition, state, at, self._is_under_way)
        if decision.state == state:
            return None
        starts = [self._run_of(row, definition, decision, state, tick, at) for tick in decision.starts]
        request = ev.CancelRequested(reason="its next tick has come", by=f"schedule {row.name}", grace=GRACE_SECONDS)
        value = ev.encode_body(request)
        posts = [Post(run, "cancel", "", f"schedule:{row.name}", value, at) for run in decision.cancels]
        decision.state.life, decision.state.restores = app.life, restores_in(app.life)
        return ChangeSchedule(row.name, row.revision, changed_row(row, definition, decision.state, at), starts, posts)

    def _run_of(
        self, row: ScheduleRow, definition: Definition, decision: Decision, state: State, tick: int, at: int
    ) -> NewRun:
        """Return the run of a tick. After a restored backup it may have been started before, and nobody knows."""
        app, workflow = self._app, DECLARED.named(definition.workflow)
        arguments = Arguments(bytes(definition.arguments), definition.digest, (), {})
        return new_run(
            workflow,
            run_of_tick(row.name, tick),
            arguments,
            at=at,
            randomness=app.randomness,
            tags={**definition.tags, "schedule": row.name, "tick": tick_text(tick)},
            priority=definition.priority,
            queue=definition.queue or None,
            origin=Origin(app.store.chain.writing, app.life, unseen=self._may_have_fired(state)),
            budget=allotment_of(workflow.budget),
        )

    def _may_have_fired(self, state: State) -> bool:
        """Tell whether ticks that come now may have come before, in a time that is lost."""
        if state.life:
            return state.life != self._app.life
        return restores_in(self._app.life) > state.restores  # an earlier release only counted

    def _is_under_way(self, run: str) -> bool:
        row = self._app.store.run(run)
        return row is not None and row.status not in ENDED

    def _set_alarm(self, at: int | None) -> None:
        app = self._app
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if at is not None:
            now = app.clock.now()
            at = at if at > now else now + microseconds(AGAIN_SECONDS)  # one that cannot be followed stays due
            self._alarm = set_alarm(app.clock, app.loop, at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.look_closely()
