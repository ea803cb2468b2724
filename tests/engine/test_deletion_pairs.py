"""Deletion and each other thing that can be done to a run, in either order: no effect happens twice unless allowed.

Each case has effects of one contract. Two runs ask for them: the first completes and is deleted as soon as it is old,
the second fails afterwards. Whatever is done then may be refused, but what was paid is not paid again.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import workflow
from everstep.engine.app.app import App
from everstep.errors import CrossesOnce, RunCancelled, Uncompensated
from everstep.testing.clock import FakeClock
from tests.engine.deletion_helpers import BROKEN, DAY, PAID, check, ended, job, passes, pay, pay_invoice

KINDS = ["once", "keyed", "atomic", "child", "keyed child"]


@everstep.transaction(everstep.STORE)
async def book(connection: Any, what: str) -> str:
    PAID.append(what)
    return f"receipt {len(PAID)}"


@workflow
async def invoice(what: str) -> str:
    return await pay_invoice(what)


@workflow
async def sale(kind: str, what: str) -> str:
    await check("first")
    if kind == "once":
        receipt = await pay(what)
    elif kind == "keyed":
        receipt = await pay_invoice(what)
    elif kind == "atomic":
        receipt = await book(what)
    elif kind == "child":
        receipt = await (await everstep.start(job, what, id=f"job-{what}")).result()
    else:
        receipt = await invoice(what)
    await check("last")
    return receipt


async def sold(app: App, clock: FakeClock, kind: str) -> None:
    """Two runs ask for the effect; the second one much later, and it fails."""
    await app.run(sale, kind, "lamp", id="first")
    await passes(app, clock, 50 * DAY)
    BROKEN.add("last")
    await app.start(sale, kind, "lamp", id="r")
    assert await ended(app, "r") == "failed"
    BROKEN.clear()


async def collect(app: App) -> None:
    await app.gc(older_than=10 * DAY, keys_older_than=10 * DAY)


async def retry(app: App, folder: Path) -> None:
    await app.retry("r")
    assert await ended(app, "r") == "completed"


async def fork(app: App, folder: Path) -> None:
    """It fails at first, so it may go on."""
    BROKEN.add("first")
    forked = await app.fork("r", at=1, id="fork")
    assert await ended(app, forked.id) == "failed"


async def rollback(app: App, folder: Path) -> None:
    await app.rollback("r", allow_uncompensated=True)
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)


async def move(app: App, folder: Path) -> None:
    """Export it, and go on with it in another store."""
    await app.export(["r"], str(folder / "runs.jsonl"))
    async with everstep.open(str(folder / "other.db"), clock=app.clock, durability="process") as other:
        await other.import_(str(folder / "runs.jsonl"))
        for go_on in (retry, fork):
            try:
                await go_on(other, folder)
            except CrossesOnce:
                pass
        BROKEN.clear()
        await collect(other)


OPERATIONS: list[Callable[[App, Path], Awaitable[None]]] = [retry, fork, rollback, move]


@pytest.mark.parametrize("is_first", [True, False], ids=["deletion first", "deletion second"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_done_twice_whatever_is_deleted_before_or_after(
    url: str, tmp_path: Path, kind: str, operation: Callable[[App, Path], Awaitable[None]], is_first: bool
) -> None:
    clock = FakeClock()
    async with everstep.open(url, clock=clock, durability="process") as app:
        await sold(app, clock, kind)
        before = list(PAID)
        if is_first:
            await collect(app)
        try:
            await operation(app, tmp_path)
        except (CrossesOnce, Uncompensated):
            pass
        if not is_first:
            await collect(app)
        BROKEN.clear()
        for row in await app.list(status="failed"):
            try:
                await app.retry(row.id)
                await ended(app, row.id)
            except CrossesOnce:
                pass
        assert before == PAID
        for row in await app.list(limit=100):
            assert (await app.get(row.id).verify()).sound
        await passes(app, clock)
        await collect(app)
        assert await app.list(limit=100) == []
        assert await app.effects() == []
