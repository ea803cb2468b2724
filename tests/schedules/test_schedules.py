"""Schedules at work: what is started when, by one worker or several, with time that a test moves."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import Damaged, Misuse, StoreError, UnknownSchedule
from everstep.stores.protocol import MarkRestored
from everstep.testing.faulty_store import FaultyStore
from tests.schedules.kit import NINE, Place, until

TIDIED: list[tuple[str, str]] = []
HOUR = 3600


@step
async def note(run: str, what: str) -> None:
    TIDIED.append((run, what))


@workflow
async def tidy(what: str = "all") -> str:
    await note(everstep.current().run, what)
    return what


@workflow
async def wait(what: str = "all") -> str:
    """Goes on until it is told to end."""
    try:
        return await everstep.receive("end", str)
    finally:
        TIDIED.append((everstep.current().run, "over"))


HINDERED: list[asyncio.Event] = []


@step
async def hinder() -> None:
    if HINDERED:
        await HINDERED[0].wait()


@workflow
async def hindered() -> None:
    await hinder()


@workflow(timeout=5.0, version="7")
async def limited() -> None:
    await asyncio.sleep(60)


@pytest.fixture
def place() -> Place:
    TIDIED.clear()
    return Place()


def at(hour: int, minute: int = 0, day: int = 16) -> str:
    return f"2026-11-{day}T{hour:02}:{minute:02}:00Z"


async def ended(place: Place, run: str) -> None:
    await until(lambda: place.status(run) in ("completed", "failed", "cancelled"))


async def test_each_tick_starts_a_run_that_names_it(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(tidy, "desk", name="hourly", cron="0 * * * *", tags={"team": "a"})
        await place.move(app, HOUR - 1)
        assert place.runs() == []
        await place.move(app, 1)
        assert place.runs() == [f"hourly@{at(10)}"]
        await ended(place, f"hourly@{at(10)}")
        await place.move(app, HOUR)
        assert place.runs() == [f"hourly@{at(10)}", f"hourly@{at(11)}"]
        assert await app.get(f"hourly@{at(11)}").result() == "desk"
        await ended(place, f"hourly@{at(10)}")
        assert sorted(TIDIED) == [(f"hourly@{at(10)}", "desk"), (f"hourly@{at(11)}", "desk")]
        (newest, _) = await app.list(tags={"schedule": "hourly", "team": "a"})
        assert newest.tags == {"schedule": "hourly", "tick": at(11), "team": "a"}
        facts = await app.get_schedule("hourly").show()
        assert (facts.fired, facts.skipped, facts.missed, facts.last_run) == (2, 0, 0, f"hourly@{at(11)}")


async def test_of_several_workers_one_starts_a_tick(place: Place) -> None:
    async with place.worker() as one, place.worker() as two, place.worker() as three:
        await one.schedule(tidy, name="hourly", every=HOUR, overlap="allow")
        two.scheduler.look()  # as when the pump sees that somebody else has written
        three.scheduler.look()
        await place.clock.rest(one, two, three)
        for number in range(1, 20):
            place.clock.advance(HOUR)
            await place.clock.rest(one, two, three)
            assert len(place.runs()) == number
        assert (await one.get_schedule("hourly").show()).fired == 19


async def test_without_a_worker_nothing_is_started(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule(tidy, every=HOUR)
        await place.move(app, 5 * HOUR)
        assert place.runs() == []


async def test_a_schedule_is_left_to_a_worker_that_knows_its_workflow(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule("elsewhere", "x", name="other", every=HOUR)
        await place.move(app, HOUR)
        assert place.runs() == []
        assert app.scheduler._alarm is None
        assert (await app.get_schedule("other").show()).workflow == "elsewhere"


async def test_what_the_code_declares_holds_for_the_runs_of_a_schedule(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule("limited", name="l", every=HOUR)
    async with place.worker() as app:
        await place.move(app, HOUR)
        row = place.store.run(f"l@{at(10)}")
        assert row is not None
        assert row.version == "7"
        started = (await app.get(row.id).history())[0]
        assert started.body["timeout"] == 5.0


# -- catching up -----------------------------------------------------------------------------------------------------
async def test_of_the_ticks_that_were_missed_only_the_newest_is_started(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule(tidy, name="s", every=HOUR, overlap="allow")
    place.clock.advance(5.5 * HOUR)
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == [f"s@{at(14)}"]
        facts = await app.get_schedule("s").show()
        assert (facts.missed, facts.fired) == (4, 1)
        await place.move(app, HOUR)
        assert place.runs() == [f"s@{at(14)}", f"s@{at(15)}"]


async def test_all_that_was_missed_is_started_if_that_is_wanted_up_to_a_bound(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule(tidy, name="s", every=HOUR, overlap="allow", catch_up="all", catch_up_max=3)
    place.clock.advance(5.5 * HOUR)
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == [f"s@{at(12)}", f"s@{at(13)}", f"s@{at(14)}"]
        assert (await app.get_schedule("s").show()).missed == 2


async def test_nothing_that_was_missed_is_started_if_that_is_wanted(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule(tidy, name="s", every=HOUR, catch_up="none")
    place.clock.advance(HOUR + 61)
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == []
        assert (await app.get_schedule("s").show()).missed == 1
        await place.move(app, HOUR - 61)
        assert place.runs() == [f"s@{at(11)}"]


async def test_a_year_of_seconds_that_were_missed_takes_no_time(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule(tidy, name="s", cron="* * * * * *", overlap="allow")
    place.clock.advance(365 * 86400)
    async with place.worker() as app:
        await place.clock.rest(app)
        assert len(place.runs()) == 1
        assert (await app.get_schedule("s").show()).missed == 1_000  # it is not counted further


# -- overlap ---------------------------------------------------------------------------------------------------------
async def test_a_tick_is_skipped_while_the_run_before_is_under_way(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(wait, name="s", every=HOUR)
        await place.move(app, HOUR)
        first = f"s@{at(10)}"
        await until(lambda: place.status(first) == "waiting")
        await place.move(app, HOUR)
        await place.move(app, HOUR)
        assert place.runs() == [first]
        assert (await app.get_schedule("s").show()).skipped == 2
        await app.signal(first, "end", "x")
        await ended(place, first)
        await place.move(app, HOUR)
        assert place.runs() == [first, f"s@{at(13)}"]


async def test_the_newest_tick_waits_for_the_run_before(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(wait, name="s", every=HOUR, overlap="queue")
        await place.move(app, HOUR)
        first = f"s@{at(10)}"
        await until(lambda: place.status(first) == "waiting")
        await place.move(app, HOUR)
        await place.move(app, HOUR)
        assert place.runs() == [first]
        facts = await app.get_schedule("s").show()
        assert (facts.skipped, facts.active) == (1, [first])
        assert facts.buffered is not None
        await app.signal(first, "end", "x")
        await until(lambda: place.runs() == [first, f"s@{at(12)}"])
        assert (await app.get_schedule("s").show()).buffered is None


async def test_the_end_of_a_run_here_is_heard_of_at_once(place: Place) -> None:
    HINDERED.append(asyncio.Event())
    async with place.worker() as app:
        await app.schedule(hindered, name="s", every=HOUR, overlap="queue")
        place.clock.advance(HOUR)
        await until(place.runs)
        place.clock.advance(HOUR)
        while (await app.get_schedule("s").show()).buffered is None:
            await asyncio.sleep(0.001)
        assert place.runs() == [f"s@{at(10)}"]
        HINDERED.pop().set()  # nobody but the run's own body says anything
        await until(lambda: place.runs() == [f"s@{at(10)}", f"s@{at(11)}"])


async def test_a_tick_that_waits_is_started_by_another_worker_when_this_one_is_gone(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(wait, name="s", every=HOUR, overlap="queue")
        await place.move(app, HOUR)
        await until(lambda: place.status(f"s@{at(10)}") == "waiting")
        await place.move(app, HOUR)
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == [f"s@{at(10)}"]
        await app.signal(f"s@{at(10)}", "end", "x")
        await until(lambda: place.runs() == [f"s@{at(10)}", f"s@{at(11)}"])


async def test_runs_may_overlap_if_that_is_wanted(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(wait, name="s", every=HOUR, overlap="allow")
        for _ in range(3):
            await place.move(app, HOUR)
        assert place.runs() == [f"s@{at(hour)}" for hour in (10, 11, 12)]


async def test_the_run_before_is_cancelled_and_the_next_one_begins_when_it_has_ended(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(wait, name="s", every=HOUR, overlap="cancel")
        await place.move(app, HOUR)
        first, second = f"s@{at(10)}", f"s@{at(11)}"
        await until(lambda: place.status(first) == "waiting")
        await place.move(app, HOUR)
        await ended(place, first)
        await until(lambda: place.status(second) == "waiting")
        assert place.status(first) == "cancelled"
        kinds = [(event.kind, event.body.get("by")) for event in await app.get(first).history()]
        assert ("cancel_requested", "schedule s") in kinds
        assert (first, "over") in TIDIED  # its code has cleaned up


async def test_a_held_run_is_under_way_until_somebody_resolves_it(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(wait, name="s", every=HOUR)
        await place.move(app, HOUR)
        first = f"s@{at(10)}"
        await until(lambda: place.status(first) == "waiting")
        await app.hold(first, "look at this")
        await place.move(app, HOUR)
        assert place.runs() == [first]
        await app.resolve(first, "cancel")
        await place.move(app, HOUR)
        assert place.runs() == [first, f"s@{at(12)}"]


# -- jitter ----------------------------------------------------------------------------------------------------------
async def test_with_jitter_a_run_begins_later_and_keeps_the_id_of_its_tick(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(tidy, name="s", every=HOUR, jitter=1800)
        facts = await app.get_schedule("s").show()
        assert facts.next_at is not None
        assert facts.next_tick is not None
        late = (facts.next_at - facts.next_tick) / 1e6
        assert 0 < late < 1800
        await place.move(app, HOUR)
        assert place.runs() == []
        await place.move(app, late)
        assert place.runs() == [f"s@{at(10)}"]


# -- what people do --------------------------------------------------------------------------------------------------
async def test_a_paused_schedule_starts_nothing_and_what_it_left_out_is_not_made_up_for(place: Place) -> None:
    async with place.worker() as app:
        schedule = await app.schedule(tidy, name="s", every=HOUR)
        await schedule.pause("the printer burns", by="ann")
        await place.move(app, 3 * HOUR)
        assert place.runs() == []
        facts = await schedule.show()
        assert (facts.is_paused, facts.note, facts.by, facts.next_at) == (True, "the printer burns", "ann", None)
        await schedule.resume()
        await place.clock.rest(app)
        assert place.runs() == []
        await place.move(app, HOUR)
        assert place.runs() == [f"s@{at(13)}"]
        assert (await schedule.show()).note == ""


async def test_resuming_what_is_not_paused_changes_nothing(place: Place) -> None:
    async with place.worker(recover=False) as app:
        schedule = await app.schedule(tidy, name="s", every=HOUR)
        place.clock.advance(2.5 * HOUR)
        await schedule.resume()
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == [f"s@{at(11)}"]


async def test_a_trigger_starts_a_run_now_also_when_it_is_paused_or_one_is_under_way(place: Place) -> None:
    async with place.worker() as app:
        schedule = await app.schedule(wait, name="s", every=HOUR)
        await place.move(app, HOUR)
        await schedule.pause()
        place.clock.advance(60)
        one = await schedule.trigger()
        place.clock.advance(0.000_001)  # no two triggers are at one time, unless that stands still
        two = await schedule.trigger()
        await until(lambda: place.status(one) and place.status(two))
        assert one == f"s@{at(10, 1)}"
        assert place.runs() == sorted([f"s@{at(10)}", one, two])
        assert set((await schedule.show()).active) == {f"s@{at(10)}", one, two}
        assert place.clock.now() == (await schedule.show()).paused_at + 60_000_001  # type: ignore[operator]


async def test_a_trigger_is_kept_until_a_worker_is_there(place: Place) -> None:
    async with place.worker(recover=False) as app:
        schedule = await app.schedule(tidy, name="s", every=HOUR)
        run = await schedule.trigger()
        assert [*(await schedule.show()).asked] == [place.clock.now()]
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == [run]


async def test_a_backfill_starts_the_ticks_of_a_time_once(place: Place) -> None:
    async with place.worker() as app:
        schedule = await app.schedule(tidy, "desk", name="s", every=HOUR)
        begin, end = datetime(2026, 11, 16, 2, tzinfo=UTC), "2026-11-16T06:00:00+01:00"
        ids = await schedule.backfill(begin, end)
        assert ids == [f"s@{at(hour)}" for hour in (2, 3, 4)]
        for run in ids:
            await until(lambda run=run: place.status(run))
            await ended(place, run)
        assert await schedule.backfill(begin, end) == ids
        await place.clock.rest(app)
        assert place.runs() == ids
        assert sorted(TIDIED) == [(run, "desk") for run in ids]


async def test_a_backfill_leaves_out_what_is_still_to_come_and_is_bounded(place: Place) -> None:
    async with place.worker() as app:
        schedule = await app.schedule(tidy, name="s", cron="* * * * *")
        ids = await schedule.backfill(NINE - timedelta(minutes=2), NINE + timedelta(hours=1))
        assert ids == [f"s@{at(8, 58)}", f"s@{at(8, 59)}", f"s@{at(9)}"]
        with pytest.raises(Misuse, match="more than 1,000 ticks"):
            await schedule.backfill(NINE - timedelta(days=1), NINE)
        with pytest.raises(Misuse, match="time zone"):
            await schedule.backfill("2026-11-16T02:00:00", NINE)
        with pytest.raises(Misuse, match="is not a time"):
            await schedule.backfill("yesterday", NINE)


async def test_a_deleted_schedule_starts_nothing_and_its_runs_go_on(place: Place) -> None:
    async with place.worker() as app:
        schedule = await app.schedule(wait, name="s", every=HOUR)
        await place.move(app, HOUR)
        await until(lambda: place.status(f"s@{at(10)}") == "waiting")
        await schedule.delete()
        await place.move(app, HOUR)
        assert place.runs() == [f"s@{at(10)}"]
        assert await app.schedules() == []
        for verb in (schedule.delete, schedule.show, schedule.pause, schedule.trigger):
            with pytest.raises(UnknownSchedule):
                await verb()


async def test_declared_again_it_is_the_same_and_declared_otherwise_it_changes_from_now_on(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule(tidy, "a", name="s", every=HOUR)
        (before,) = place.store.schedules()
        place.clock.advance(2.5 * HOUR)
        await app.schedule(tidy, "a", name="s", every=timedelta(hours=1))
        assert place.store.schedules() == [before]
        await app.schedule(tidy, "b", name="s", every=HOUR)
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == []  # what was missed was of the old one
        await place.move(app, HOUR)
        assert await app.get(f"s@{at(12)}").result() == "b"


async def test_a_changed_schedule_stays_paused(place: Place) -> None:
    async with place.worker() as app:
        schedule = await app.schedule(tidy, "a", name="s", every=HOUR)
        await schedule.pause("why")
        await app.schedule(tidy, "b", name="s", every=HOUR)
        await place.move(app, HOUR)
        assert place.runs() == []
        assert (await schedule.show()).note == "why"


async def test_a_run_that_has_the_id_already_is_the_run_of_the_tick(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(wait, name="s", every=HOUR)
        run = await app.start(wait, id=f"s@{at(10)}")
        await place.move(app, HOUR)
        assert place.runs() == [run.id]
        await place.move(app, HOUR)
        facts = await app.get_schedule("s").show()
        assert (facts.fired, facts.skipped, facts.active) == (1, 1, [run.id])


@pytest.mark.parametrize("name", ["", "a b", "a@b", "-a", "x" * 151, None])
async def test_a_schedule_has_a_name_that_fits_into_ids(place: Place, name: Any) -> None:
    async with place.worker(recover=False) as app:
        if name:
            with pytest.raises(Misuse, match="not a name for a schedule"):
                await app.schedule(tidy, name=name, every=HOUR)
        else:
            assert (await app.schedule(tidy, name=name, every=HOUR)).name == "tidy"


async def test_arguments_that_do_not_fit_are_refused_when_it_is_made(place: Place) -> None:
    async with place.worker(recover=False) as app:
        with pytest.raises(TypeError):
            await app.schedule(tidy, 1, 2, 3, every=HOUR)
        with pytest.raises(Misuse):
            await app.schedule(tidy, object(), every=HOUR)
        assert await app.schedules() == []


# -- faults ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["due_schedules", "next_schedule", "commit", "run"])
@pytest.mark.parametrize("after", [False, True])
async def test_a_store_that_fails_for_a_while_loses_and_doubles_no_tick(place: Place, method: str, after: bool) -> None:
    faulty = FaultyStore(place.store)
    app = await everstep.App(faulty.as_store(), recover=True, clock=place.clock).open()
    try:
        await app.schedule(tidy, name="s", every=HOUR)
        await place.clock.rest(app)
        fault = faulty.fail(method, after=after, error=StoreError("told to"), count=2)
        place.clock.advance(HOUR)
        for _ in range(20):
            await asyncio.sleep(0.002)
            place.clock.advance(1)
        faulty.mend()
        await place.move(app, 1)
        await ended(place, f"s@{at(10)}")
        assert fault.fired or method == "run"
        assert place.runs() == [f"s@{at(10)}"]
        assert [run for run, _ in TIDIED] == [f"s@{at(10)}"]
    finally:
        await app.close()


async def test_a_schedule_that_cannot_be_read_does_not_stop_the_others(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(tidy, name="broken", every=HOUR)
        await app.schedule(tidy, name="sound", every=HOUR)
        await app.schedule(tidy, name="worse", every=HOUR)
        place.store.do("UPDATE schedules SET definition = ? WHERE name = 'broken'", b'{"workflow": 1}')
        place.store.do("UPDATE schedules SET state = ?, waits = 1 WHERE name = 'worse'", b"\xff")
        await place.move(app, HOUR)
        await ended(place, f"sound@{at(10)}")
        assert place.runs() == [f"sound@{at(10)}"]
        with pytest.raises(Damaged, match="everstep schedule delete broken"):
            await app.schedules()
        await app.get_schedule("broken").delete()
        await app.get_schedule("worse").delete()
        assert [one.name for one in await app.schedules()] == ["sound"]


async def test_a_clock_that_was_set_back_neither_loses_nor_doubles_a_tick(place: Place) -> None:
    async with place.worker() as app:
        await app.schedule(tidy, name="s", every=HOUR, overlap="allow")
        await place.move(app, 2 * HOUR)
    place.clock._at -= 3 * 3600 * 1_000_000
    place.store._latest = 0
    async with place.worker() as app:
        await place.clock.rest(app)
        assert place.runs() == [f"s@{at(11)}"]
        for _ in range(4):
            await place.move(app, HOUR)
        assert place.runs() == [f"s@{at(11)}", f"s@{at(12)}"]


async def test_after_a_restored_backup_a_tick_that_may_have_been_started_asks_before_it_acts(place: Place) -> None:
    async with place.worker(recover=False) as app:
        await app.schedule(tidy, name="s", every=HOUR, overlap="allow")
    place.store.commit([MarkRestored(0)])
    place.clock.advance(1.5 * HOUR)
    async with place.worker() as app:
        await place.clock.rest(app)
        await place.move(app, HOUR)
        begun = [(await app.get(run).history())[0].body for run in place.runs()]
        assert [body.get("unseen", False) for body in begun] == [True, False]


# -- what it costs ---------------------------------------------------------------------------------------------------
class Counting(FaultyStore):
    """Counts the questions about schedules."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if "schedule" in name:
            self.asked.append(name)
        return super().__getattr__(name)


async def test_a_worker_that_waits_for_a_tick_asks_nothing(place: Place) -> None:
    store = Counting(place.store)
    app = await everstep.App(store.as_store(), recover=True, clock=place.clock).open()
    try:
        await app.schedule(tidy, name="s", every=HOUR)
        await place.clock.rest(app)
        store.asked.clear()
        await asyncio.sleep(0.7)  # many turns of the pump, and a sweep
        assert store.asked == []
        app.scheduler.look()  # somebody else has written
        await place.clock.rest(app)
        assert store.asked == ["next_schedule"]
    finally:
        await app.close()


async def test_an_alarm_that_rings_too_early_is_set_again(place: Place) -> None:
    """On a real clock no alarm is set for later than an hour."""
    async with place.worker() as app:
        await app.schedule(tidy, name="s", every=24 * HOUR)
        await place.clock.rest(app)
        for _ in range(3):
            assert app.scheduler._alarm is not None
            app.scheduler._alarm.cancel()  # it has rung
            app.scheduler._ring()
            await place.clock.rest(app)
            assert place.runs() == []
        await place.move(app, 24 * HOUR)
        assert len(place.runs()) == 1
