"""When schedules are due: cron, time zones, clocks that are put forward and back, intervals, jitter."""

from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import Misuse
from everstep.model.schedules import (
    Definition,
    checked,
    count_ticks,
    jitter_of,
    newest_ticks,
    next_tick,
    run_of_tick,
    ticks_after,
)
from tests.schedules.kit import defined, micros, texts

BERLIN = "Europe/Berlin"
"""Clocks there go from 2:00 to 3:00 on 29 March 2026, and from 3:00 back to 2:00 on 25 October 2026."""
LORD_HOWE = "Australia/Lord_Howe"
"""There by half an hour: from 2:00 to 2:30 on 4 October 2026, and from 2:00 back to 1:30 on 5 April 2026."""


def first(definition: Definition, after: str, count: int) -> list[str]:
    return texts(list(islice(ticks_after(definition, micros(after)), count)))


def test_a_cron_expression_is_of_minutes_or_with_a_sixth_field_of_seconds() -> None:
    assert first(defined("*/20 9 * * *"), "2026-11-16T09:00:00Z", 3) == [
        "2026-11-16T09:20:00Z",
        "2026-11-16T09:40:00Z",
        "2026-11-17T09:00:00Z",
    ]
    assert first(defined("*/30 * * * * *"), "2026-11-16T09:00:00Z", 2) == [
        "2026-11-16T09:00:30Z",
        "2026-11-16T09:01:00Z",
    ]


def test_a_tick_is_after_the_time_that_is_asked_for_and_never_at_it() -> None:
    nine = micros("2026-11-16T09:00:00Z")
    assert next_tick(defined("0 9 * * *"), nine - 1) == nine
    assert next_tick(defined("0 9 * * *"), nine) == nine + 86400 * 1_000_000
    assert next_tick(defined(every=60_000_000), nine - 1) == nine
    assert next_tick(defined(every=60_000_000), nine) == nine + 60_000_000


def test_the_expression_is_read_in_its_time_zone_summer_and_winter() -> None:
    nine = defined("0 9 * * *", zone=BERLIN)
    assert first(nine, "2026-10-23T12:00:00Z", 3) == [
        "2026-10-24T07:00:00Z",
        "2026-10-25T08:00:00Z",
        "2026-10-26T08:00:00Z",
    ]


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *"])
def test_a_time_that_does_not_exist_becomes_the_first_that_does(expression: str) -> None:
    assert first(defined(expression, zone=BERLIN), "2026-03-28T00:00:00Z", 3) == [
        "2026-03-28T01:30:00Z",
        "2026-03-29T01:00:00Z",  # 3:00 in Berlin
        "2026-03-30T00:30:00Z",
    ]


def test_several_times_that_do_not_exist_become_one_tick() -> None:
    assert first(defined("0,20,40 2,3 * * *", zone=BERLIN), "2026-03-29T00:00:00Z", 4) == [
        "2026-03-29T01:00:00Z",
        "2026-03-29T01:20:00Z",
        "2026-03-29T01:40:00Z",
        "2026-03-30T00:00:00Z",
    ]


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *"])
def test_of_a_time_that_comes_twice_the_first_counts(expression: str) -> None:
    assert first(defined(expression, zone=BERLIN), "2026-10-24T12:00:00Z", 2) == [
        "2026-10-25T00:30:00Z",
        "2026-10-26T01:30:00Z",
    ]
    between = "2026-10-25T00:45:00Z"  # after the first 2:30 and before the second
    assert first(defined(expression, zone=BERLIN), between, 1) == ["2026-10-26T01:30:00Z"]


@pytest.mark.parametrize("expression", ["*/30 * * * *", "0 */30 * * * *", "*/30 2,3 * * *"])
def test_what_goes_by_every_minute_leaves_out_what_does_not_exist_and_repeats_what_comes_twice(expression: str) -> None:
    spring = first(defined(expression, zone=BERLIN), "2026-03-29T00:59:00Z", 2)
    assert spring == ["2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"]
    autumn = first(defined(expression, zone=BERLIN), "2026-10-24T23:59:00Z", 4)
    assert autumn == [f"2026-10-25T0{hour}:{minute}:00Z" for hour in "01" for minute in ("00", "30")]


def test_zones_that_move_by_half_an_hour_are_meant_as_well() -> None:
    assert first(defined("10 2 * * *", zone=LORD_HOWE), "2026-10-03T12:00:00Z", 1) == ["2026-10-03T15:30:00Z"]
    assert first(defined("45 1 * * *", zone=LORD_HOWE), "2026-04-04T12:00:00Z", 2) == [
        "2026-04-04T14:45:00Z",
        "2026-04-05T15:15:00Z",
    ]


def test_an_interval_counts_from_1970_so_that_it_is_the_same_for_everybody() -> None:
    assert first(defined(every=3600_000_000), "2026-11-16T09:12:00Z", 2) == [
        "2026-11-16T10:00:00Z",
        "2026-11-16T11:00:00Z",
    ]
    moved = defined(every=3600_000_000, offset=300_000_000)
    assert first(moved, "2026-11-16T09:04:00Z", 2) == ["2026-11-16T09:05:00Z", "2026-11-16T10:05:00Z"]


@given(
    st.sampled_from(["30 2 * * *", "0,30 1,2,3 * * *", "*/10 * * * *", "0 12 29 2 *", "15 30 2 * * SUN", "0 0 L * *"]),
    st.sampled_from(["UTC", BERLIN, LORD_HOWE, "America/New_York"]),
    st.integers(micros("2026-01-01T00:00:00Z"), micros("2027-01-01T00:00:00Z")),
)
def test_ticks_go_forward_and_are_the_same_wherever_one_begins_to_look(expression: str, zone: str, after: int) -> None:
    definition = defined(expression, zone=zone)
    ticks = list(islice(ticks_after(definition, after), 8))
    assert ticks == sorted(set(ticks))
    assert all(tick > after for tick in ticks)
    for earlier, later in zip([after, *ticks], ticks, strict=False):
        assert next_tick(definition, earlier) == later
        assert next_tick(definition, (earlier + later) // 2) == later
        assert next_tick(definition, later - 1) == later


@given(
    st.sampled_from(["30 2 * * *", "*/10 * * * *", "* * * * * *", "0 12 * * MON"]),
    st.integers(0, 1_500),
    st.integers(1, 5),
)
def test_the_newest_ticks_are_the_last_of_all(expression: str, seconds: int, most: int) -> None:
    definition = defined(expression, zone=BERLIN)
    start = micros("2026-10-24T22:00:00Z")
    end = start + seconds * 1_000_000
    listed = [tick for tick in islice(ticks_after(definition, start - 1), 1_502) if tick <= end]
    assert newest_ticks(definition, start, end, most) == listed[-most:]
    assert count_ticks(definition, start, end + 1, 1_000) == min(len(listed), 1_000)


def test_the_newest_tick_after_a_year_is_found_at_once() -> None:
    start, end = micros("2025-11-16T09:00:00Z"), micros("2026-11-16T09:00:00Z")
    assert newest_ticks(defined("* * * * * *"), start, end, 1) == [end]
    assert newest_ticks(defined("0 0 29 2 *"), start, end, 1) == []


def test_jitter_is_the_same_on_every_worker_and_another_for_each_tick_and_schedule() -> None:
    definition = defined(every=60_000_000, jitter=30_000_000)
    ticks = list(islice(ticks_after(definition, 0), 200))
    late = [jitter_of(definition, "a", tick) for tick in ticks]
    assert late == [jitter_of(definition, "a", tick) for tick in ticks]
    assert all(0 <= one < 30_000_000 for one in late)
    assert len(set(late)) > 190
    assert late != [jitter_of(definition, "b", tick) for tick in ticks]
    assert jitter_of(defined(every=60_000_000), "a", ticks[0]) == 0


def test_the_run_of_a_tick_names_both() -> None:
    assert run_of_tick("nightly", micros("2026-11-16T09:00:00Z")) == "nightly@2026-11-16T09:00:00Z"
    assert run_of_tick("nightly", micros("2026-11-16T09:00:00Z") + 1500) == "nightly@2026-11-16T09:00:00.001500Z"


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        (defined(), "not both"),
        (defined("* * * * *", every=1_000_000), "not both"),
        (defined(every=1), "at least 1"),
        (defined("* * * *"), "five fields"),
        (defined("61 * * * *"), "Bad minute"),
        (defined("0 0 31 2 *"), "Bad day"),
        (defined("0 9 * * *", zone="Europe/Atlantis"), "Europe/Berlin"),
        (defined("0 9 * * *", zone="../../etc/passwd"), "Europe/Berlin"),
        (defined("0 9 * * *", overlap="both"), "skip, queue, allow, cancel"),
        (defined("0 9 * * *", catch_up="some"), "newest, all, none"),
        (defined("0 9 * * *", offset=5), "offset="),
        (defined(every=60_000_000, jitter=61_000_000), "between two ticks"),
        (defined("*/5 * * * *", jitter=301_000_000), "between two ticks"),
        (defined("*/5 * * * *", catch_up_max=0), "catch_up_max="),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_remedy(definition: Definition, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        checked(definition, micros("2026-11-16T09:00:00Z"))


def test_a_time_zone_that_is_known_is_that_of_the_machine() -> None:
    assert checked(defined("0 9 * * *", zone=BERLIN), 0).zone == str(ZoneInfo(BERLIN))
