"""The schedules of a worker: when a tick is due, it starts the tick's run.

The change of the schedule's row and its run are one transaction, which only a worker with the newest revision can
commit. So one of several workers starts a tick; a worker that dies before that has done nothing, and the next one does
it.

Waiting costs nothing: an alarm is set for the next tick. The pump notices a change by another process like any other.
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
"""The number of schedules that are processed in one go."""
AGAIN_SECONDS: Final = 0.5
"""Delay before a store that failed is asked again, in seconds."""
GRACE_SECONDS: Final = 30.0
"""How long a run may clean up that is cancelled because the next tick is due, in seconds."""


def definition_of(row: ScheduleRow) -> Definition:
    """Return what a schedule starts, and when."""
    return _decoded(row, row.definition, Definition)


def state_of(row: ScheduleRow) -> State:
    """Return the state of a schedule."""
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
    """Return a schedule's new row. Revisions are times, so that none is used again, not even for a new schedule."""
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
    """Return the runs that a tick waits for. An unreadable schedule waits for none."""
    try:
        return state_of(row).active
    except Damaged:
        return []


class Scheduler:
    """Starts the runs of ticks. Only an app that claims every free run does that, because the runs have no owner."""

    def __init__(self, app: Process) -> None:
        self.awaited: frozenset[str] = frozenset()
        """Runs whose end a tick waits for."""
        self._app = app
        self._looks_again = self._is_closed = False
        self._alarm: Alarm | None = None
        self._next_at: int | None = None
        """When the store last said that something would be due."""
        self._unreadable: set[str] = set()
        """Unreadable schedules that were logged."""

    def look(self) -> None:
        """Look soon because another process has written, unless it was not about schedules."""
        if self._is_at_work():
            app = self._app
            ask = partial(app.store.next_schedule, workflows=app.workflows())
            app.read_then("", self._look_if_new, lambda error: self.look_closely(), ask)

    def look_closely(self) -> None:
        """Look soon because something may be due. A look in progress is repeated."""
        if not self._is_at_work():
            return
        self._looks_again = True
        self._app.background.keep("schedules", self._look)

    def _is_at_work(self) -> bool:
        app = self._app
        return bool(app.recover and app.worker) and not (self._is_closed or app.draining)

    def _look_if_new(self, next_at: int | None) -> None:
        """Look, unless a cheap query has shown that nothing changed: a start or a wait moves the next time."""
        is_due = next_at is not None and next_at <= self._app.clock.now()
        if next_at != self._next_at or self.awaited or is_due:
            self.look_closely()

    def close(self) -> None:
        """Start nothing more."""
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    async def _look(self) -> None:
        """Do what is due. A failure begins again, until nothing is left to look at."""
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
            return True  # another worker has done it, or the schedule was changed
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
        """Return the run of a tick. After a restored backup it may have been started before, which is unknown."""
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
        """Return True if ticks that are due now may have been started before, in a time that is lost."""
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
            at = at if at > now else now + microseconds(AGAIN_SECONDS)  # an unreadable one stays due
            self._alarm = set_alarm(app.clock, app.loop, at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.look_closely()
