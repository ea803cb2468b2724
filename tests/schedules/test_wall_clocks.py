"""Ticks where clocks are put forward and back, by whatever and whenever, against every single minute."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.model.schedules import Definition, has_fixed_time, ticks_after

MINUTE = timedelta(minutes=1)
CHANGES = {
    # A change of the clock, and what is special about it.
    "Australia/Lord_Howe forward": ("Australia/Lord_Howe", "2026-10-03T15:30"),  # by half an hour
    "Australia/Lord_Howe back": ("Australia/Lord_Howe", "2026-04-04T15:00"),
    "Antarctica/Troll forward": ("Antarctica/Troll", "2026-03-29T01:00"),  # by two hours
    "Antarctica/Troll back": ("Antarctica/Troll", "2026-10-25T01:00"),
    "Pacific/Apia": ("Pacific/Apia", "2011-12-30T10:00"),  # a day that never was
    "Pacific/Kwajalein": ("Pacific/Kwajalein", "1993-08-21T12:00"),
    "America/Havana forward": ("America/Havana", "2026-03-08T05:00"),  # at midnight
    "America/Havana back": ("America/Havana", "2026-11-01T05:00"),
    "Africa/Cairo forward": ("Africa/Cairo", "2026-04-23T22:00"),  # at midnight
    "Africa/Cairo back": ("Africa/Cairo", "2026-10-29T21:00"),  # from midnight into the day before
    "America/Santiago back": ("America/Santiago", "2026-04-05T03:00"),
    "America/St_Johns": ("America/St_Johns", "2006-04-02T03:31"),  # at one minute past midnight
    "Pacific/Chatham": ("Pacific/Chatham", "2026-09-26T14:00"),  # at a quarter to three
    "Asia/Pyongyang": ("Asia/Pyongyang", "2018-05-04T15:00"),  # for good, by half an hour
    "Asia/Kathmandu": ("Asia/Kathmandu", "1985-12-31T18:30"),  # by a quarter of an hour
    "Europe/Berlin forward": ("Europe/Berlin", "2026-03-29T01:00"),
    "Europe/Berlin back": ("Europe/Berlin", "2026-10-25T01:00"),
    "Europe/Dublin back": ("Europe/Dublin", "2026-10-25T01:00"),
    "Africa/Casablanca": ("Africa/Casablanca", "2026-02-15T02:00"),
}
EXPRESSIONS = [
    "* * * * *",
    "*/15 * * * *",
    "30 * * * *",
    "0 */2 * * *",
    "*/10 2 * * *",
    "15 * 30 12 *",
    "0 9 * * *",
    "30 0,2 * * *",
    "5,45 0-4 * * *",
    "59 23 * * *",
    "0 0 30 12 *",
    "10 2 * * 0",
]


@cache
def minutes_of(field: str, first: int, last: int) -> set[int]:
    """Read a field of a cron expression, as far as it is used here."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        low, _, high = span.partition("-")
        begin, end = (first, last) if span == "*" else (int(low), int(high or low))
        found |= set(range(begin, end + 1, int(step or 1)))
    return found


def matches(expression: str, wall: datetime) -> bool:
    minute, hour, day, month, weekday = expression.split()
    return (
        wall.minute in minutes_of(minute, 0, 59)
        and wall.hour in minutes_of(hour, 0, 23)
        and wall.day in minutes_of(day, 1, 31)
        and wall.month in minutes_of(month, 1, 12)
        and wall.isoweekday() % 7 in minutes_of(weekday, 0, 6)
    )


def shown(zone: ZoneInfo, first: datetime, last: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Give each minute between two times, and what the clock on the wall shows then."""
    while first <= last:
        yield first, first.astimezone(zone).replace(tzinfo=None, fold=0)
        first += MINUTE


def expected(expression: str, zone: ZoneInfo, after: datetime, last: datetime) -> list[datetime]:
    """Return the ticks, by looking at each minute."""
    if not has_fixed_time(expression):
        return [moment for moment, wall in shown(zone, after + MINUTE, last) if matches(expression, wall)]
    found: list[datetime] = []
    # Two days before, for a time that does not exist becomes one that does.
    minutes = list(shown(zone, after - timedelta(days=2), last))
    newest = minutes[0][1]  # the latest time that the clock has shown
    for moment, wall in minutes[1:]:
        while newest < wall:  # a time that comes the first time, or has been left out
            newest += MINUTE
            if matches(expression, newest) and moment > after and found[-1:] != [moment]:
                found.append(moment)
    return found


def ticks(expression: str, zone: ZoneInfo, after: datetime, last: datetime) -> list[datetime]:
    definition = Definition(workflow="w", arguments=msgspec.Raw(b"[]"), digest="", cron=expression, zone=zone.key)
    found: list[datetime] = []
    for tick in ticks_after(definition, round(after.timestamp() * 1_000_000)):
        moment = datetime.fromtimestamp(tick / 1_000_000, UTC)
        if moment > last:
            break
        found.append(moment)
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_no_tick_is_lost_or_doubled_where_clocks_change(change: str, expression: str) -> None:
    name, at = CHANGES[change]
    zone, moment = ZoneInfo(name), datetime.fromisoformat(at).replace(tzinfo=UTC)
    offsets = {one.astimezone(zone).utcoffset() for one in (moment - MINUTE, moment)}
    assert len(offsets) == 2, "there is a change at this time"
    after, last = moment - timedelta(hours=14), moment + timedelta(hours=26)
    assert ticks(expression, zone, after, last) == expected(expression, zone, after, last)


@given(
    change=st.sampled_from(sorted(CHANGES)),
    minute=st.sampled_from(["*", "*/7", "*/30", "0", "29", "30", "0,30", "10-20", "59"]),
    hour=st.sampled_from(["*", "*/3", "0", "1", "2", "0-3", "23", "2,14"]),
    day=st.sampled_from(["*", "30", "4-5", "1,29"]),
    before=st.integers(0, 30 * 60),
)
def test_whenever_a_schedule_is_looked_at_its_ticks_are_those_of_every_minute(
    change: str, minute: str, hour: str, day: str, before: int
) -> None:
    name, at = CHANGES[change]
    zone, moment = ZoneInfo(name), datetime.fromisoformat(at).replace(tzinfo=UTC)
    expression = f"{minute} {hour} {day} * *"
    after, last = moment + timedelta(hours=3) - before * MINUTE, moment + timedelta(hours=27)
    assert ticks(expression, zone, after, last) == expected(expression, zone, after, last)


def test_the_ticks_of_a_year_are_those_of_every_minute() -> None:
    for name in ("Australia/Lord_Howe", "Africa/Casablanca"):
        zone, first = ZoneInfo(name), datetime(2026, 1, 1, tzinfo=UTC)
        last = first + timedelta(days=365)
        assert ticks("30 * * * *", zone, first, last) == expected("30 * * * *", zone, first, last)
