"""Schedules: when they are due, and what to do then. Pure: no clock, no store.

A tick is a time at which a run is started. Ticks are those of a cron expression in a time zone, or those of an
interval, which counts from the beginning of 1970, so that they are the same wherever and whenever they are computed.

Where clocks are put forward or back, a cron expression with a fixed hour and minute has one tick for each such time of
a day: a time that does not exist becomes the first moment that does, and of a time that comes twice the first counts.
An expression with a `*` or `*/n` in the hour or minute follows the wall clock minute by minute: what that clock leaves
out has no tick, and what it shows twice has two.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from everstep.errors import Misuse
from everstep.model.digests import digest_of
from everstep.model.options import refused

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

Overlap = Literal["skip", "queue", "allow", "cancel"]
CatchUp = Literal["newest", "all", "none"]
OVERLAPS: Final = ("skip", "queue", "allow", "cancel")
CATCH_UPS: Final = ("newest", "all", "none")

SECOND: Final = 1_000_000
LATE_SECONDS: Final = 60
"""With `catch_up="none"`, a tick that is late by more than this many seconds is not started."""
MISSED_MAX: Final = 1_000
"""The maximum number of missed ticks that are counted at once; there may be more."""
BACKFILL_MAX: Final = 1_000
"""Maximum number of ticks of one backfill."""
COMPARED: Final = 20
"""The number of ticks that are compared to find the shortest distance between two."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND: Final = timedelta(seconds=1)
_LOOK: Final = timedelta(hours=6)
"""No zone changes its clock twice within this time."""


class Definition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a schedule starts, and when. Times are microseconds."""

    workflow: str
    arguments: msgspec.Raw
    """Their payload."""
    digest: str
    """The digest of the arguments."""
    cron: str = ""
    zone: str = "UTC"
    every: int = 0
    offset: int = 0
    """By how much the ticks of an interval are shifted."""
    jitter: int = 0
    """The maximum delay of a tick's start. The delay is random per tick, and the same for a tick on every worker."""
    overlap: Overlap = "skip"
    catch_up: CatchUp = "newest"
    catch_up_max: int = 100
    queue: str = ""
    priority: int = 0
    tags: dict[str, str] = {}


class State(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of a schedule."""

    tick: int | None = None
    """The next tick, or None if there will be no more."""
    asked: list[int] = []
    """Ticks that a person asked for, by a trigger or a backfill, and that are not started yet."""
    buffered: int | None = None
    """A tick that is started when the current runs have ended."""
    active: list[str] = []
    """Runs that had not ended when this was written. Empty with `overlap="allow"`, which does not need them."""
    last_tick: int | None = None
    last_run: str = ""
    fired: int = 0
    skipped: int = 0
    """Ticks that were not started because an earlier run had not ended."""
    missed: int = 0
    """Ticks that were not started because no worker was there in time."""
    stopped_at: int | None = None
    """When it was paused."""
    note: str = ""
    by: str = ""
    restores: int = 0
    """How often the store had been restored from a backup when this was written."""
    life: str = ""
    """The store's life when this was written."""


class Decision(msgspec.Struct):
    """What to do about a schedule now, and its state after that."""

    state: State
    starts: list[int]
    cancels: list[str]


def tick_text(tick: int) -> str:
    """Return a tick as the id of its run contains it: `2026-11-16T09:00:00Z`."""
    moment = _EPOCH + timedelta(microseconds=tick)
    return moment.isoformat(timespec="microseconds" if tick % SECOND else "seconds").replace("+00:00", "Z")


def run_of_tick(name: str, tick: int) -> str:
    """Return the id of a tick's run: the same on every worker."""
    return f"{name}@{tick_text(tick)}"


# -- ticks -----------------------------------------------------------------------------------------------------------
def next_tick(definition: Definition, after: int) -> int | None:
    """Return the first tick after a time, or None if there is none."""
    return next(ticks_after(definition, after), None)


def ticks_after(definition: Definition, after: int) -> Iterator[int]:
    """Give the ticks after a time, in order."""
    if definition.every:
        number = (after - definition.offset) // definition.every + 1
        while True:
            yield number * definition.every + definition.offset
            number += 1
    yield from _cron_ticks(definition.cron, zone_named(definition.zone), after)


def _cron_ticks(expression: str, zone: "ZoneInfo", after: int) -> Iterator[int]:
    from cronsim import CronSim

    try:
        moment = _EPOCH + timedelta(microseconds=after)
        if not has_fixed_time(expression):
            yield from map(_microseconds, _shown(expression, zone, moment))
            return
        before = after
        for local in CronSim(expression, moment.astimezone(zone).replace(tzinfo=None, fold=0)):
            tick = _microseconds(_existing(local, zone))
            if tick > before:  # several times that do not exist become one
                yield tick
                before = tick
    except OverflowError:  # the year 10000
        return


def _shown(expression: str, zone: "ZoneInfo", after: datetime) -> Iterator[datetime]:
    """Give the moments at which the wall clock shows a time that an expression names.

    Between two of its changes that clock has a constant offset from UTC. So each such stretch is computed by itself,
    however far the clock is moved at its ends: half an hour, two hours, or a day.
    """
    from cronsim import CronSim

    since = after
    ahead = _ahead(since, zone)
    while True:
        for local in CronSim(expression, (after + ahead).replace(tzinfo=None)):
            moment = local.replace(tzinfo=UTC) - ahead
            if (change := _change(zone, since, moment, ahead)) is not None:
                break
            yield moment
            after = since = moment
        else:
            return
        since, after, ahead = change, change - timedelta(microseconds=1), _ahead(change, zone)


def _ahead(moment: datetime, zone: "ZoneInfo") -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta()


def _change(zone: "ZoneInfo", since: datetime, until: datetime, ahead: timedelta) -> datetime | None:
    """Return when a zone's clock changes next, after one moment and no later than another, or None."""
    early = since.replace(microsecond=0)
    while early < until:
        late = min(early + _LOOK, until)
        if _ahead(late, zone) != ahead:
            while late - early > _SECOND:
                middle = early + (late - early) // _SECOND // 2 * _SECOND
                if _ahead(middle, zone) == ahead:
                    early = middle
                else:
                    late = middle
            return late
        early = late
    return None


def has_fixed_time(expression: str) -> bool:
    """Return True if a cron expression names fixed hours and minutes, without a `*` in them."""
    *_, minute, hour, _, _, _ = expression.split()
    return not minute.startswith("*") and not hour.startswith("*")


def _existing(local: datetime, zone: "ZoneInfo") -> datetime:
    """Return a local time as a moment: the first of two, or the first one after the gap if it does not exist."""
    moment = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == local:
        return moment
    early, late = local.replace(tzinfo=zone, fold=1).astimezone(UTC), moment
    new = late.astimezone(zone).utcoffset()
    while late - early > timedelta(seconds=1):
        middle = early + timedelta(seconds=int((late - early).total_seconds() / 2))
        if middle.astimezone(zone).utcoffset() == new:
            late = middle
        else:
            early = middle
    return late


def _microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def newest_ticks(definition: Definition, first: int, until: int, most: int) -> list[int]:
    """Return the newest ticks between two times, both included. The cost does not depend on how many there are."""
    span = SECOND
    while True:
        start = max(first, until - span)
        found: deque[int] = deque(maxlen=most)
        for tick in ticks_after(definition, start - 1):
            if tick > until:
                break
            found.append(tick)
        if len(found) >= most or start <= first:
            return list(found)
        span *= 2


def count_ticks(definition: Definition, first: int, until: int, most: int) -> int:
    """Return how many ticks there are from one time until before another, at most `most`."""
    count = 0
    for tick in ticks_after(definition, first - 1):
        if tick >= until or count >= most:
            break
        count += 1
    return count


def jitter_of(definition: Definition, name: str, tick: int) -> int:
    """Return the delay of a tick's start: derived from its name, so the same on every worker."""
    if not definition.jitter:
        return 0
    number = int.from_bytes(digest_of(run_of_tick(name, tick).encode())[:8], "big")
    return number % definition.jitter


# -- deciding --------------------------------------------------------------------------------------------------------
def decide(name: str, definition: Definition, state: State, at: int, is_under_way: Callable[[str], bool]) -> Decision:
    """Return what to do about a schedule at a time."""
    state = msgspec.structs.replace(state, active=[run for run in state.active if is_under_way(run)])
    decision = Decision(state, [], [])
    for tick in state.asked:
        _start(name, definition, decision, tick)
    state.asked = []
    if state.stopped_at is not None:
        return decision
    if state.buffered is not None and not state.active:
        _start(name, definition, decision, state.buffered)
        state.buffered = None
    for tick in _due(name, definition, state, at):
        if definition.overlap == "allow" or not state.active:
            _start(name, definition, decision, tick)
        elif definition.overlap == "skip":
            state.skipped += 1
        else:
            state.skipped += state.buffered is not None  # the newest one waits
            state.buffered = tick
            if definition.overlap == "cancel":
                decision.cancels = [run for run in state.active if run not in _ids(name, decision.starts)]
    return decision


def _ids(name: str, ticks: Sequence[int]) -> list[str]:
    return [run_of_tick(name, tick) for tick in ticks]


def _start(name: str, definition: Definition, decision: Decision, tick: int) -> None:
    state, run = decision.state, run_of_tick(name, tick)
    decision.starts.append(tick)
    state.fired += 1
    state.last_tick, state.last_run = tick, run
    if definition.overlap != "allow" and run not in state.active:
        state.active = [*state.active, run]


def _due(name: str, definition: Definition, state: State, at: int) -> list[int]:
    """Return the ticks that are due now, and move on to the next one."""
    first = state.tick
    if first is None or first + jitter_of(definition, name, first) > at:
        return []
    most = definition.catch_up_max if definition.catch_up == "all" else 1
    found = newest_ticks(definition, first, at, most + 1)  # one more: the newest may be due a little later
    due = [tick for tick in found if tick + jitter_of(definition, name, tick) <= at] or [first]
    chosen = due[-most:]
    state.tick = next_tick(definition, due[-1])
    if definition.catch_up == "none" and chosen[-1] + definition.jitter + LATE_SECONDS * SECOND < at:
        chosen = []
    kept_from = chosen[0] if chosen else due[-1] + 1
    state.missed += count_ticks(definition, first, kept_from, MISSED_MAX)
    return chosen


def wake_time(name: str, definition: Definition, state: State) -> int | None:
    """Return when the schedule next needs attention, or None if time alone brings nothing."""
    if state.asked:
        return 0
    if state.stopped_at is not None or state.tick is None:
        return None
    return state.tick + jitter_of(definition, name, state.tick)


# -- checking --------------------------------------------------------------------------------------------------------
def zone_named(name: str) -> "ZoneInfo":
    """Return a time zone by its name."""
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise Misuse(f"There is no time zone {name!r} on this machine. Write one such as Europe/Berlin.") from None


def checked(definition: Definition, at: int) -> Definition:
    """Return a definition if it is valid. Raises `Misuse` that says what is wrong."""
    if bool(definition.cron) == bool(definition.every):
        raise Misuse("A schedule has a cron= expression or an every= interval, and not both.")
    if definition.every < 0 or (definition.every and definition.every < SECOND):
        raise Misuse("every= is a number of seconds, at least 1.")
    if definition.every == 0 and definition.offset:
        raise Misuse("offset= moves the ticks of every=; a cron expression says itself when they are.")
    if definition.jitter < 0 or definition.catch_up_max < 1:
        raise Misuse("jitter= is a number of seconds, and catch_up_max= a number of ticks, at least 1.")
    for option, value, choices in (
        ("overlap", definition.overlap, OVERLAPS),
        ("catch_up", definition.catch_up, CATCH_UPS),
    ):
        if value not in choices:
            raise refused(option, value, f"it is one of {', '.join(choices)}")
    zone_named(definition.zone)
    if definition.cron:
        _check_cron(definition.cron)
    _check_jitter(definition, at)
    return definition


def _check_cron(expression: str) -> None:
    from cronsim import CronSim, CronSimError

    try:
        CronSim(expression, datetime(2000, 1, 1))  # noqa: DTZ001  # only to see whether it can be read
    except CronSimError as error:
        raise Misuse(
            f"{expression[:80]!r} is not a cron expression ({error}). It has five fields (minute, hour, day, month, "
            "day of the week), or six with the second first."
        ) from None


def _check_jitter(definition: Definition, at: int) -> None:
    """Refuse a jitter that lets ticks overtake each other."""
    first = next_tick(definition, at)
    if first is None:
        raise Misuse(f"{definition.cron!r} never matches a date.")
    if not definition.jitter:
        return
    ticks = list(islice(ticks_after(definition, at), COMPARED))
    gaps = [late - early for early, late in pairwise(ticks)]
    if gaps and definition.jitter > min(gaps):
        raise Misuse(
            f"jitter={definition.jitter / SECOND:g}: that is longer than the {min(gaps) / SECOND:g} seconds between "
            "two ticks of this schedule."
        )
