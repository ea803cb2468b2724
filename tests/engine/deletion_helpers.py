"""What the tests of deletion share: workflows with effects, and a moment between judging and claiming."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import everstep
from everstep import continue_as, step, workflow
from everstep.engine.app.app import App
from everstep.stores.protocol import Accepted
from everstep.stores.rows.transfer import ClaimFamily, Deleted, DeletePart
from everstep.testing.clock import FakeClock
from tests.worlds.ledger import BROKEN, PAID

DAY = 86400.0


@step(effect="once")
async def pay(what: str) -> str:
    PAID.append(what)
    return f"receipt {len(PAID)}"


@step(effect="once", key="invoice:{what}")
async def pay_invoice(what: str) -> str:
    PAID.append(what)
    return f"receipt {len(PAID)}"


@step(effect="read")
async def check(what: str) -> str:
    if what in BROKEN:
        raise ValueError(what)
    return what


@workflow
async def job(what: str) -> str:
    """Pay, and then perhaps fail."""
    receipt = await pay(what)
    await check(what)
    return receipt


@workflow
async def asking(what: str, shared: str) -> str:
    """Wait for another run, which is started if it is not there, whoever else does."""
    await check("first")
    return await (await everstep.start(job, what, id=shared)).result()


@workflow
async def telling(what: str, shared: str) -> str:
    """Wait for another run, and then for a word."""
    receipt = await (await everstep.start(job, what, id=shared)).result()
    await everstep.receive("word", str)
    return receipt


@workflow
async def writing(count: int) -> str:
    """Write entries of a stream, of more than one page."""
    for number in range(count):
        everstep.stream("words").append(number)
    return "written"


@workflow
async def having(what: str) -> str:
    """Have a child with an id that derives from this one."""
    await check("first")
    return await job(what)


@workflow
async def laps(what: str, number: int) -> str:
    """Pay in the first lap only: the effect is in an earlier generation."""
    if not number:
        await pay(what)
        continue_as(what, 1)
    return "done"


@workflow
async def having_laps(what: str) -> str:
    await check("first")
    return await laps(what, 0)


@workflow
async def invoicing(what: str) -> str:
    await check("first")
    receipt = await pay_invoice(what)
    await check("last")
    return receipt


@workflow
async def invoicing_after_a_failure(what: str) -> str:
    """What failed was before the payment, so a retry goes back over it."""
    try:
        await check("first")
    except ValueError:
        await pay_invoice(what)
        raise
    return await pay_invoice(what)


async def begin_deletion(app: App, run: str) -> None:
    """Claim an ended run for its deletion, and go no further: as if the process died there."""
    await app.become_worker()
    family, now = {run: (await app.get(run).row()).epoch}, app.clock.now()
    verdict = await app.committer.submit(ClaimFamily(family, app.worker, now, now + 1))
    assert isinstance(verdict, Accepted), verdict


async def delete_part(app: App, run: str, limit: int = 10_000) -> bool:
    """Delete a part of an ended run, whoever needs it, as an earlier release would have; tell whether it is gone."""
    epoch = (await app.get(run).row()).epoch
    verdict = await app.committer.submit(DeletePart(run, epoch, app.clock.now(), limit))
    assert isinstance(verdict, Deleted), verdict
    return verdict.done


def before_first(app: App, kind: type[Any], hook: Callable[[], Awaitable[Any]]) -> None:
    """Let something happen just before the first operation of a kind that this app sends is done."""
    submit, left = app.committer.submit, [hook]

    async def after_hook(operation: Any) -> Any:
        await left.pop()()
        return await submit(operation)

    def gated(operation: Any) -> Any:
        if isinstance(operation, kind) and left:
            return asyncio.ensure_future(after_hook(operation))
        return submit(operation)

    app.committer.submit = gated  # type: ignore[method-assign]


async def passes(app: App, clock: FakeClock, seconds: float = 100 * DAY) -> None:
    """Let time pass, and whatever becomes due by it."""
    await clock.rest(app)
    clock.advance(seconds)
    await clock.rest(app)


async def ended(app: App, run: str) -> str:
    """Wait for a run's end, and say how it ended."""
    try:
        await app.get(run).result(timeout=60)
    except ValueError:
        pass
    return await app.get(run).status()
