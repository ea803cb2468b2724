"""An application's operations on schedules: create, change, look at, pause, resume, trigger, backfill, delete.

None of them starts a run: they write into the schedule's row what is to be started, and a worker that knows the
workflow does that. So any process may call them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from everstep.engine.code.start import start_arguments
from everstep.engine.code.workflow import NamedWorkflow, Workflow, target_of
from everstep.engine.history.clock import microseconds
from everstep.engine.history.restored import restores_in
from everstep.engine.history.verify import preview_text
from everstep.engine.process.host import Host
from everstep.engine.process.schedules import changed_row, definition_of, state_of
from everstep.errors import Misuse, UnknownSchedule
from everstep.model.options import LONGEST_SECONDS, check_texts, checked_seconds, refused
from everstep.model.schedules import (
    BACKFILL_MAX,
    CatchUp,
    Definition,
    Overlap,
    State,
    checked,
    next_tick,
    run_of_tick,
    tick_text,
    ticks_after,
)
from everstep.model.untrusted import attempted, is_a, text_of
from everstep.stores.protocol import Accepted
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/-]{0,149}")
RACES_MAX: Final = 100
"""The maximum number of retries of a change because another process was faster."""

Changing = Callable[[Definition, State, int], None]
Moment = datetime | str


class Scheduled(msgspec.Struct, kw_only=True):
    """A schedule as it is now. Times are microseconds since 1970."""

    name: str
    workflow: str
    cron: str = ""
    zone: str = "UTC"
    every: float = 0.0
    offset: float = 0.0
    jitter: float = 0.0
    overlap: Overlap = "skip"
    catch_up: CatchUp = "newest"
    catch_up_max: int = 100
    queue: str = ""
    priority: int = 0
    tags: dict[str, str] = {}
    arguments: str = ""
    """A preview of them."""
    is_paused: bool = False
    paused_at: int | None = None
    note: str = ""
    """Why it is paused."""
    by: str = ""
    next_tick: int | None = None
    """None: it is paused, or there will be no more."""
    next_at: int | None = None
    """When the tick is started: with jitter, a little later."""
    asked: list[int] = []
    """Ticks of triggers and backfills that no worker has started yet."""
    buffered: int | None = None
    """A tick that is started when the current runs have ended."""
    last_tick: int | None = None
    last_run: str = ""
    active: list[str] = []
    """Runs of it that had not ended when it was last written."""
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    created_at: int = 0


class Schedule:
    """A handle on a schedule, by its name."""

    def __init__(self, app: Host, name: str) -> None:
        self._app = app
        self.name = checked_schedule_name(name)

    async def show(self) -> Scheduled:
        """Return the schedule as it is now. Raises `UnknownSchedule` if there is none."""
        return scheduled(await self._app.read(existing_schedule, self._app, self.name))

    async def pause(self, note: str = "", *, by: str = "") -> None:
        """Start no more runs by time, until it is resumed. Runs that have begun continue; a waiting tick is dropped.

        note, by: why, and who decided; both are shown.
        """
        check_texts(note=note, by=by)

        def pause(definition: Definition, state: State, at: int) -> None:
            state.skipped += state.buffered is not None
            state.stopped_at, state.note, state.by, state.buffered = at, note, by, None

        await change(self._app, self.name, pause)

    async def resume(self) -> None:
        """Continue with the next tick from now. Ticks that were missed while it was paused are not started: see
        `backfill`.
        """

        def resume(definition: Definition, state: State, at: int) -> None:
            if state.stopped_at is not None:
                state.stopped_at, state.note, state.by = None, "", ""
                state.tick = next_tick(definition, at)

        await change(self._app, self.name, resume)

    async def trigger(self) -> str:
        """Start a run now, on a worker, even if one is running, or the schedule is paused. Returns the run's id.

        It is durable on return; the run exists as soon as a worker that knows the workflow has seen it.
        """
        ticks: list[int] = []

        def trigger(definition: Definition, state: State, at: int) -> None:
            ticks[:] = [max([at, *(tick + 1 for tick in state.asked)])]
            state.asked = [*state.asked, *ticks]

        await change(self._app, self.name, trigger)
        return run_of_tick(self.name, ticks[0])

    async def backfill(self, start: Moment, end: Moment) -> list[str]:
        """Start the runs of all ticks from `start` to before `end`, on a worker, except those that exist.

        Returns their ids. All are started at once, whatever `overlap` says, so choose the period carefully: at most
        1,000 ticks. Called again, the runs are the same.
        """
        first, last = moment_of(start, "start"), moment_of(end, "end")
        ticks: list[int] = []

        def backfill(definition: Definition, state: State, at: int) -> None:
            ticks[:] = _ticks_between(definition, first, min(last, at + 1))
            state.asked = sorted({*state.asked, *ticks})

        await change(self._app, self.name, backfill)
        return [run_of_tick(self.name, tick) for tick in ticks]

    async def delete(self) -> None:
        """Delete the schedule. Its runs stay, and those that have begun continue."""
        for _ in range(RACES_MAX):
            row = await self._app.read(existing_schedule, self._app, self.name)
            verdict = await self._app.committer.submit(ChangeSchedule(row.name, row.revision, None))
            if isinstance(verdict, Accepted):
                return
        raise Misuse(f"The schedule {self.name} is being changed by others all the time; try again.")

    def __repr__(self) -> str:
        return f"<schedule {self.name}>"


def _ticks_between(definition: Definition, first: int, last: int) -> list[int]:
    ticks = []
    for tick in ticks_after(definition, first - 1):
        if tick >= last:
            break
        ticks.append(tick)
        if len(ticks) > BACKFILL_MAX:
            raise Misuse(
                f"There are more than {BACKFILL_MAX:,} ticks from {tick_text(first)} on. Backfill a part of that first."
            )
    return ticks


def moment_of(moment: Moment, what: str) -> int:
    """Return a time in microseconds, from a datetime or an ISO text. It must say its time zone."""
    given = attempted(datetime.fromisoformat, moment) if is_a(moment, str) else moment
    if not isinstance(given, datetime):
        raise refused(what, moment, "that is not a time such as 2026-11-16T09:00:00+01:00")
    if given.tzinfo is None:
        raise Misuse(f"{what}={given.isoformat()} does not say its time zone: add Z for UTC, or +01:00.")
    return (given - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _checked_time(name: str, seconds: Any) -> float:
    """Return a time of a schedule; only `offset` may be below zero."""
    return checked_seconds(name, seconds, least=-LONGEST_SECONDS if name == "offset" else 0, example=60)


def checked_schedule_name(name: object) -> str:
    """Return the name of a schedule if it is valid."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise Misuse(
        f"{text_of(name, most=80)!r} is not a name for a schedule. It has 1 to 150 characters: letters, digits and "
        ". _ : + / -, and begins with a letter or digit."
    )


def existing_schedule(app: Host, name: str) -> ScheduleRow:
    """Return a schedule's row. Raises `UnknownSchedule` if there is none."""
    rows = app.store.schedules(name=checked_schedule_name(name))
    if not rows:
        raise UnknownSchedule(f"There is no schedule {name!r} in {app.store.url}. `everstep schedule ls` lists them.")
    return rows[0]


def scheduled(row: ScheduleRow) -> Scheduled:
    """Return a schedule as people see it."""
    definition, state = definition_of(row), state_of(row)
    is_paused = state.stopped_at is not None
    facts = msgspec.structs.asdict(definition)
    for name in ("every", "offset", "jitter"):
        facts[name] = facts[name] / 1e6
    del facts["digest"]
    facts["arguments"] = preview_text(bytes(definition.arguments))
    standing = msgspec.structs.asdict(state)
    for name in ("tick", "stopped_at", "restores", "life"):
        del standing[name]
    return Scheduled(
        name=row.name,
        is_paused=is_paused,
        paused_at=state.stopped_at,
        next_tick=None if is_paused else state.tick,
        next_at=row.next_at,
        created_at=row.created_at,
        **facts,
        **standing,
    )


async def change(app: Host, name: str, how: Changing) -> None:
    """Change a schedule, also if other processes change it at the same time."""
    for _ in range(RACES_MAX):
        row, at = await app.read(existing_schedule, app, name), app.clock.now()
        definition, state = definition_of(row), state_of(row)
        how(definition, state, at)
        verdict = await app.committer.submit(
            ChangeSchedule(name, row.revision, changed_row(row, definition, state, at))
        )
        if isinstance(verdict, Accepted):
            app.scheduler.look_closely()
            return
    raise Misuse(f"The schedule {name} is being changed by others all the time; try again.")


async def define(
    app: Host,
    workflow: Any,
    args: Sequence[Any],
    name: str | None,
    cron: str,
    zone: str,
    times: Mapping[str, float | timedelta],
    options: Mapping[str, Any],
) -> Schedule:
    """Create a schedule, or change what it starts and when. Repeating the call changes nothing."""
    target = target_of(workflow)
    schedule = Schedule(app, name if name not in (None, "") else target.id_prefix)
    definition = _definition(app, target, args, cron, zone, times, options)
    for _ in range(RACES_MAX):
        at = app.clock.now()
        checked(definition, at)
        rows = await app.read(app.store.schedules, name=schedule.name)
        if rows and rows[0].definition == msgspec.json.encode(definition):
            return schedule
        row = rows[0] if rows else ScheduleRow(name=schedule.name, workflow=target.name)
        life = await app.read(app.store.life)
        state = state_of(row) if rows else State(restores=restores_in(life), life=life)
        state.tick, state.buffered = next_tick(definition, at), None
        new = changed_row(row, definition, state, at)
        if isinstance(await app.committer.submit(ChangeSchedule(row.name, row.revision, new)), Accepted):
            app.scheduler.look_closely()
            return schedule
    raise Misuse(f"The schedule {schedule.name} is being changed by others all the time; try again.")


def _definition(
    app: Host,
    target: "Workflow | NamedWorkflow",
    args: Sequence[Any],
    cron: str,
    zone: str,
    times: Mapping[str, float | timedelta],
    options: Mapping[str, Any],
) -> Definition:
    arguments = start_arguments(app.codec, target, args)
    micros: dict[str, Any] = {
        name: microseconds(_checked_time(name, value.total_seconds() if isinstance(value, timedelta) else value))
        for name, value in times.items()
    }
    return Definition(
        workflow=target.name,
        arguments=msgspec.Raw(arguments.payload),
        digest=arguments.digest,
        cron=" ".join(cron.split()),
        zone=zone,
        **micros,
        **options,
    )
