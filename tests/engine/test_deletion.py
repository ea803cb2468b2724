"""Deletion takes nothing that a run may still need, and whoever comes too late is told so and does nothing twice."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.engine.app.app import App
from everstep.errors import BeingDeleted, CrossesOnce, IdConflict, RunActive, RunCancelled, Uncompensated, UnknownRun
from everstep.stores.protocol import Accepted, Append, Claim, Claimed, RowChange, StartRun
from everstep.stores.rows.transfer import ClaimFamily
from everstep.testing.clock import FakeClock
from tests.engine.deletion_helpers import (
    BROKEN,
    DAY,
    PAID,
    asking,
    before_first,
    begin_deletion,
    delete_part,
    ended,
    having,
    having_laps,
    invoicing,
    invoicing_after_a_failure,
    job,
    passes,
    telling,
    writing,
)
from tests.postgres.server import server

Scenario = Callable[[App, FakeClock], Awaitable[None]]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of each kind."""
    if request.param != "postgres":
        yield "memory:" if request.param == "memory" else str(tmp_path / "runs.db")
        return
    schema = server().fresh_schema()
    yield server().url(schema)
    server().drop(schema)


def on_every_store(scenario: Scenario) -> Callable[[str], None]:
    """Play a scenario with an app on a store."""

    @wraps(scenario)
    def play(url: str) -> None:
        async def main() -> None:
            clock = FakeClock()
            async with everstep.open(url, clock=clock, durability="process") as app:
                await scenario(app, clock)

        asyncio.run(main())

    del play.__wrapped__  # type: ignore[attr-defined]  # pytest would look at the scenario's own parameters
    return play


async def ids(app: App) -> list[str]:
    return sorted(row.id for row in await app.list(limit=1000))


async def sharing(app: App, clock: FakeClock) -> None:
    """Two parents wait for one child, which paid and then failed. It is the first one's; the second came much later."""
    BROKEN.add("lamp")
    await app.start(asking, "lamp", "shared", id="first")
    assert await ended(app, "first") == "failed"
    await passes(app, clock, 50 * DAY)
    await app.start(asking, "lamp", "shared", id="second")
    assert await ended(app, "second") == "failed"
    BROKEN.clear()
    assert PAID == ["lamp"]


# -- what a run may still need stays -----------------------------------------------------------------------------------
@on_every_store
async def test_a_child_stays_while_another_parent_than_its_own_may_be_retried(app: App, clock: FakeClock) -> None:
    await sharing(app, clock)
    done = await app.gc(older_than=10 * DAY)
    assert (done.runs, done.left) == ([], 2)
    await app.retry("second")
    assert await app.get("second").result(timeout=60) == "receipt 1"
    assert PAID == ["lamp"], "the child goes on from what failed"
    await passes(app, clock)
    assert sorted((await app.gc(older_than=10 * DAY)).runs) == ["first", "second", "shared"]


@on_every_store
async def test_who_completed_keeps_nothing_and_what_is_old_together_goes_together(app: App, clock: FakeClock) -> None:
    await sharing(app, clock)
    await passes(app, clock, 50 * DAY)
    done = await app.gc(older_than=10 * DAY)
    assert (sorted(done.runs), done.left) == (["first", "second", "shared"], 0), "the second was all that kept them"
    await app.run(job, "desk", id="shared")
    await passes(app, clock, 50 * DAY)
    assert await app.run(asking, "desk", "shared", id="user") == "receipt 2"
    assert (await app.gc(older_than=10 * DAY)).runs == ["shared"]


@on_every_store
async def test_what_an_unfinished_run_was_told_of_stays(app: App, clock: FakeClock) -> None:
    await app.run(job, "desk", id="shared")
    run = await app.start(telling, "desk", "shared", id="waiting")
    await passes(app, clock)
    assert (await app.gc(older_than=DAY)).runs == []
    await run.signal("word", "go")
    assert await run.result(timeout=60) == "receipt 1"
    assert (await app.gc(older_than=DAY)).runs == ["shared"]


@on_every_store
async def test_a_fork_that_may_go_on_keeps_its_source_and_what_that_has_asked_for(app: App, clock: FakeClock) -> None:
    assert await app.run(asking, "lamp", "shared", id="source") == "receipt 1"
    await passes(app, clock)
    BROKEN.add("first")
    fork = await app.fork("source", at=1)  # it would follow the same child
    assert await ended(app, fork.id) == "failed"
    assert (await app.gc(older_than=DAY)).runs == []
    BROKEN.clear()
    await app.retry(fork.id)
    assert await app.get(fork.id).result(timeout=60) == "receipt 1"
    assert PAID == ["lamp"]
    assert sorted((await app.gc(older_than=DAY)).runs) == ["shared", "source"]


# -- judged, and then claimed ------------------------------------------------------------------------------------------
async def _retried(app: App) -> str:
    BROKEN.clear()
    await app.retry("r")
    return await ended(app, "r")


async def _restarted(app: App) -> str:
    BROKEN.clear()
    await app.start(job, "lamp", id="r", on_existing="restart")
    return await ended(app, "r")


async def _rolled_back(app: App) -> str:
    await app.rollback("r", allow_uncompensated=True)
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)
    return "cancelled"


async def _shared(app: App) -> str:
    BROKEN.add("lamp")
    await app.start(asking, "lamp", "r", id="user")
    return await ended(app, "user")


async def _forked(app: App) -> str:
    fork = await app.fork("r", at=1, allow_effects=True)
    return await ended(app, fork.id)


@pytest.mark.parametrize("meanwhile", [_retried, _restarted, _rolled_back, _shared, _forked])
async def test_a_run_that_was_judged_old_and_is_needed_since_is_not_deleted(
    url: str, meanwhile: Callable[[App], Awaitable[str]]
) -> None:
    """The moment between judging and claiming is held open, and in it somebody else does something with the run."""

    clock = FakeClock()
    async with everstep.open(url, clock=clock, durability="process") as app:
        BROKEN.add("lamp")
        await app.start(job, "lamp", id="r")
        assert await ended(app, "r") == "failed"
        await passes(app, clock)
        before_first(app, ClaimFamily, lambda: meanwhile(app))
        done = await app.gc(older_than=DAY)
        assert (done.runs, done.left) == ([], 1)
        assert (await app.get("r").verify()).sound


@on_every_store
async def test_children_stay_when_their_parent_was_retried_after_it_was_judged(app: App, clock: FakeClock) -> None:
    BROKEN.add("lamp")
    await app.start(having, "lamp", id="r")
    assert await ended(app, "r") == "failed"
    await passes(app, clock)
    BROKEN.clear()

    async def retried() -> None:
        await app.retry("r")
        assert await ended(app, "r") == "completed"

    before_first(app, ClaimFamily, retried)
    assert (await app.gc(older_than=DAY)).runs == []
    assert len(await ids(app)) == 2
    assert PAID == ["lamp"]


# -- being deleted -----------------------------------------------------------------------------------------------------
@on_every_store
async def test_a_run_that_is_being_deleted_is_reported_as_such(app: App, clock: FakeClock) -> None:
    BROKEN.add("lamp")
    await app.start(job, "lamp", id="r")
    assert await ended(app, "r") == "failed"
    await begin_deletion(app, "r")
    asked: list[Callable[[], Awaitable[Any]]] = [
        lambda: app.retry("r"),
        lambda: app.rollback("r", allow_uncompensated=True),
        lambda: app.fork("r", at=1, allow_effects=True),
        lambda: app.start(job, "lamp", id="r"),
        lambda: app.start(job, "lamp", id="r", on_existing="restart"),
        lambda: app.start(job, "lamp", id="r", on_existing="retry"),
        lambda: app.repair("r"),
        lambda: app.cancel("r"),
    ]
    for ask in asked:
        with pytest.raises(BeingDeleted, match="everstep gc"):
            await ask()
    await app.gc(older_than=1000 * DAY)
    with pytest.raises(UnknownRun):
        await app.get("r").status()
    assert PAID == ["lamp"]


@on_every_store
async def test_half_of_a_history_is_no_damage_while_it_is_being_deleted(app: App, clock: FakeClock) -> None:
    await app.run(job, "lamp", id="r")
    await begin_deletion(app, "r")
    assert not await delete_part(app, "r", limit=2)
    for ask in (app.get("r").result, app.get("r").verify, app.get("r").history):
        with pytest.raises(BeingDeleted):
            await ask()
    assert (await app.gc(older_than=1000 * DAY)).runs == ["r"]


@on_every_store
async def test_a_reader_of_a_stream_is_told_when_the_rest_is_being_deleted(app: App, clock: FakeClock) -> None:
    run = await app.start(writing, 3, id="r")
    await run.result()
    entries = run.stream("words")
    assert (await anext(entries)).value == 0
    await begin_deletion(app, "r")
    await delete_part(app, "r", limit=7)
    with pytest.raises(UnknownRun):
        assert [entry.value async for entry in entries] == "all that were left"


# -- missing is not unborn ---------------------------------------------------------------------------------------------
@on_every_store
async def test_a_parent_whose_child_was_deleted_is_not_retried_unless_that_is_allowed(
    app: App, clock: FakeClock
) -> None:
    await sharing(app, clock)
    assert await delete_part(app, "shared")
    with pytest.raises(CrossesOnce, match="deleted history") as caught:
        await app.retry("second")
    assert [(one.run, one.seq) for one in caught.value.crossed] == [("shared", 0)]
    assert PAID == ["lamp"]
    await app.retry("second", across_once=True)
    assert await app.get("second").result(timeout=60) == "receipt 2"


@on_every_store
async def test_a_child_with_the_same_id_that_came_later_is_another_one(app: App, clock: FakeClock) -> None:
    await sharing(app, clock)
    assert await delete_part(app, "shared")
    clock.advance(3600)
    BROKEN.add("lamp")
    await app.start(job, "lamp", id="shared")
    assert await ended(app, "shared") == "failed"
    with pytest.raises(CrossesOnce, match="deleted history"):
        await app.retry("second")


@on_every_store
async def test_a_rollback_says_that_a_child_was_deleted(app: App, clock: FakeClock) -> None:
    await app.run(asking, "lamp", "shared", id="r")
    assert await delete_part(app, "shared")
    with pytest.raises(Uncompensated, match="the run shared did, which was deleted"):
        await app.rollback("r")
    await app.rollback("r", allow_uncompensated=True)


@pytest.mark.parametrize("source", [asking, having, having_laps])
async def test_a_fork_across_a_deleted_child_is_refused(url: str, source: Any) -> None:
    async with everstep.open(url, clock=FakeClock(), durability="process") as app:
        await app.run(source, *(["lamp", "shared"] if source is asking else ["lamp"]), id="r")
        (child,) = [run for run in await ids(app) if run != "r"]
        assert await delete_part(app, child)
        with pytest.raises(CrossesOnce, match=f"deleted history does not say of {child}"):
            await app.fork("r", at=1)
        assert PAID == ["lamp"]
        fork = await app.fork("r", at=1, allow_effects=True)
        await fork.result(timeout=60)


@on_every_store
async def test_effects_of_earlier_generations_of_a_child_count(app: App, clock: FakeClock) -> None:
    await app.run(having_laps, "lamp", id="r")
    with pytest.raises(CrossesOnce, match=r"pay of .* \(event"):
        await app.fork("r", at=1)
    assert PAID == ["lamp"]


# -- forgotten keys ----------------------------------------------------------------------------------------------------
@on_every_store
async def test_a_fork_across_an_effect_whose_key_was_forgotten_is_refused(app: App, clock: FakeClock) -> None:
    await app.run(invoicing, "7", id="r")
    await app.run(invoicing, "7", id="sharer")
    shared = await app.fork("r", at=1)
    assert await shared.result(timeout=60) == "receipt 1"
    await passes(app, clock)
    assert (await app.gc(keys_older_than=DAY)).keys == 1
    for run in ("r", "sharer"):
        with pytest.raises(CrossesOnce, match="its key was forgotten"):
            await app.fork(run, at=1)
    assert PAID == ["7"]
    again = await app.fork("r", at=1, allow_effects=["pay_invoice"])
    assert await again.result(timeout=60) == "receipt 2"


@on_every_store
async def test_a_retry_across_an_effect_whose_key_was_forgotten_is_refused(app: App, clock: FakeClock) -> None:
    BROKEN.add("first")
    for run in ("owner", "sharer"):
        await app.start(invoicing_after_a_failure, "7", id=run)
        assert await ended(app, run) == "failed"
    BROKEN.clear()
    await passes(app, clock)
    assert (await app.gc(keys_older_than=DAY)).keys == 1
    for run in ("owner", "sharer"):
        with pytest.raises(CrossesOnce, match=r"pay_invoice \(event \d+, its key was forgotten\)"):
            await app.retry(run)
        await app.retry(run, across_once=True)
        assert await app.get(run).result(timeout=60) == "receipt 1", "the outcome is kept"
        assert (await app.get(run).verify()).sound
    assert PAID == ["7"]


@on_every_store
async def test_a_key_that_is_forgotten_while_a_fork_is_made_refuses_the_fork(app: App, clock: FakeClock) -> None:
    await app.run(invoicing, "7", id="r")
    await passes(app, clock)
    before_first(app, StartRun, lambda: app.gc(keys_older_than=DAY))
    with pytest.raises(CrossesOnce, match="its key was forgotten"):
        await app.fork("r", at=1)
    assert PAID == ["7"]


@on_every_store
async def test_a_child_that_is_deleted_while_a_fork_is_made_refuses_the_fork(app: App, clock: FakeClock) -> None:
    await app.run(job, "lamp", id="shared")
    await app.run(asking, "lamp", "shared", id="r")
    before_first(app, StartRun, lambda: begin_deletion(app, "shared"))
    with pytest.raises(CrossesOnce, match="deleted history"):
        await app.fork("r", at=1)
    assert PAID == ["lamp"]


@on_every_store
async def test_a_key_stays_while_a_fork_of_its_run_may_ask_for_it(app: App, clock: FakeClock) -> None:
    await app.run(invoicing, "7", id="r")
    BROKEN.add("first")
    fork = await app.fork("r", at=1)
    assert await ended(app, fork.id) == "failed"
    await passes(app, clock)
    assert (await app.gc(keys_older_than=DAY)).keys == 0
    BROKEN.clear()
    await app.retry(fork.id)
    assert await app.get(fork.id).result(timeout=60) == "receipt 1"
    assert PAID == ["7"]
    await passes(app, clock)
    assert (await app.gc(keys_older_than=DAY)).keys == 1


@on_every_store
async def test_a_key_stays_while_a_retried_run_may_ask_for_it_again(app: App, clock: FakeClock) -> None:
    BROKEN.add("first")
    for run in ("owner", "sharer"):
        await app.start(invoicing_after_a_failure, "7", id=run)
        assert await ended(app, run) == "failed"
    await app.retry("sharer")  # over what it has shared
    assert await ended(app, "sharer") == "failed"
    await passes(app, clock)
    assert (await app.gc(keys_older_than=DAY)).keys == 0
    before_first(app, Append, lambda: app.gc(keys_older_than=DAY))
    BROKEN.clear()
    await app.retry("sharer")
    assert await app.get("sharer").result(timeout=60) == "receipt 1"
    assert (await app.gc(keys_older_than=DAY)).keys == 1
    with pytest.raises(CrossesOnce, match="its key was forgotten"):
        await app.retry("owner")
    assert PAID == ["7"]


@on_every_store
async def test_a_key_that_is_forgotten_while_a_retry_is_made_refuses_the_retry(app: App, clock: FakeClock) -> None:
    BROKEN.add("first")
    await app.start(invoicing_after_a_failure, "7", id="r")
    assert await ended(app, "r") == "failed"
    await passes(app, clock)
    before_first(app, Append, lambda: app.gc(keys_older_than=DAY))
    with pytest.raises(CrossesOnce, match="its key was forgotten"):
        await app.retry("r")
    assert await app.get("r").status() == "failed"
    assert PAID == ["7"]


# -- forks with an id --------------------------------------------------------------------------------------------------
@on_every_store
async def test_a_fork_with_the_same_id_and_another_outcome_is_another_fork(app: App, clock: FakeClock) -> None:
    await app.run(invoicing, "7", id="r")
    at = next(event.seq for event in await app.get("r").history() if event.kind == "step_completed")
    first = await app.fork("r", at=at, outcome="one", id="f")
    assert (await app.fork("r", at=at, outcome="one", id="f")).id == first.id
    for other in ({"outcome": "two"}, {"outcome": None}, {}):
        with pytest.raises(IdConflict):
            await app.fork("r", at=at, id="f", **other)


# -- exports -----------------------------------------------------------------------------------------------------------
@on_every_store
async def test_a_run_that_is_begun_again_while_it_is_exported_is_not_in_a_file_that_says_it_has_ended(
    app: App, clock: FakeClock
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/runs.jsonl"
        BROKEN.add("lamp")
        await app.start(job, "lamp", id="r")
        assert await ended(app, "r") == "failed"
        dump, row = app.store.dump, await app.get("r").row()

        def begun_again(run: str) -> Any:
            app.store.dump = dump  # type: ignore[method-assign]
            verdict = app.store.commit([Claim("r", "other", 1, ("failed",))])[0]
            assert isinstance(verdict, Claimed)
            again = RowChange("queued", row.updated_at)
            append = Append("r", 1, verdict.row.epoch, row.head_seq, row.head_digest, [], again, release=True)
            assert app.store.commit([append]) == [Accepted()]
            return dump(run)

        app.store.dump = begun_again  # type: ignore[method-assign]
        with pytest.raises(RunActive, match="begun again"):
            await app.export(["r"], path)
        assert not os.path.exists(path)


@on_every_store
async def test_what_is_being_deleted_is_not_exported(app: App, clock: FakeClock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await app.run(job, "lamp", id="r")
        await app.run(job, "desk", id="s")
        await begin_deletion(app, "r")
        assert not await delete_part(app, "r", limit=2)
        with pytest.raises(BeingDeleted):
            await app.export(["r"], f"{folder}/one.jsonl")
        assert (await app.export(None, f"{folder}/all.jsonl")).runs == ["s"]
