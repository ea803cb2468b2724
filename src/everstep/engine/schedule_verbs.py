"""The part of an app that is about schedules. What each verb does stands in `schedules.py`, loaded when one is used."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from everstep.model.ids import checked_name
from everstep.model.options import checked_tags, checked_text, checked_whole

if TYPE_CHECKING:
    from everstep.engine.schedules import Schedule, Scheduled
    from everstep.model.schedules import CatchUp, Overlap


class ScheduleVerbs:
    """The part of an app that is about schedules."""

    async def schedule(
        self: Any,
        workflow: Any,
        /,
        *args: Any,
        name: str | None = None,
        cron: str = "",
        zone: str = "UTC",
        every: float | timedelta = 0,
        offset: float | timedelta = 0,
        jitter: float | timedelta = 0,
        overlap: "Overlap" = "skip",
        catch_up: "CatchUp" = "newest",
        catch_up_max: int = 100,
        queue: str | None = None,
        priority: int = 0,
        tags: dict[str, str] | None = None,
    ) -> "Schedule":
        """Start a run of a workflow again and again, at the times that a cron expression or an interval says.

        The schedule is durable on return. Any worker that knows the workflow starts the runs; each has the schedule's
        name and the time in its id, as in `nightly@2026-11-16T09:00:00Z`. The same call once more changes nothing; with
        other options it changes the schedule, from the next tick on.

        workflow: the declared one, or its name, also if it is declared elsewhere.
        name: of the schedule; default: the workflow's.
        cron: five fields (minute, hour, day, month, day of the week), or six with the second first.
        zone: the time zone of the expression, such as `Europe/Berlin`.
        every: instead of `cron`, so many seconds, or a `timedelta`. It counts from the beginning of 1970 (UTC), so that
            3600 is every full hour; `offset` moves that.
        jitter: a run is started up to so many seconds later: by as much for one tick on every worker, and by something
            else for each.
        overlap: what happens at a tick when the run before has not ended. `skip` (default): nothing. `queue`: the
            newest tick waits for its end. `allow`: both run. `cancel`: the run before is cancelled, and when it has
            ended the newest tick's is started.
        catch_up: what happens when no worker was there for a while. `newest` (default): of the ticks that were missed,
            the newest is started. `all`: all of them, the newest `catch_up_max`. `none`: no tick that is more than a
            minute late.
        """
        from everstep.engine.schedules import define

        times = {"every": every, "offset": offset, "jitter": jitter}
        options = {"overlap": overlap, "catch_up": catch_up, "catch_up_max": catch_up_max, "priority": priority}
        where = {
            "queue": checked_name(queue, "queue") if queue not in (None, "") else "",
            "tags": checked_tags(tags) or {},
        }
        checked_whole("priority", priority, least=-(2**31), most=2**31)
        checked_whole("catch_up_max", catch_up_max, least=1)
        checked_text("cron", cron)
        checked_text("zone", zone)
        return await define(self, workflow, args, name, cron, zone, times, {**options, **where})

    def get_schedule(self: Any, name: str) -> "Schedule":
        """Return a handle on a schedule by its name."""
        from everstep.engine.schedules import Schedule

        return Schedule(self, name)

    async def schedules(self: Any) -> "list[Scheduled]":
        """Return all schedules, by their names."""
        from everstep.engine.schedules import scheduled

        return [scheduled(row) for row in await self.read(self.store.schedules)]
