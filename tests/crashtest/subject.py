"""Small workflows that crash tests are tested with."""

import asyncio
import time

import everstep
from everstep import step, workflow
from everstep.testing import ledger


@step(effect="once")
def post(text: str) -> str:
    return ledger.apply(ledger.offered(), "post", everstep.key(), text)


@workflow
def post_once(text: str) -> str:
    return post(text)


@workflow
async def wait_for_word() -> str:
    await asyncio.sleep(86400)
    return await everstep.receive("word", str)


@workflow
async def post_if_approved(text: str) -> str:
    try:
        if await everstep.approval("post", {"text": text}, answer=bool, timeout=86400):
            return await asyncio.to_thread(post, text)
    except TimeoutError:
        return "nobody answered"
    return "refused"


@workflow
async def wait_for_approval() -> object:
    return await everstep.approval("post", None)


@workflow
async def talk() -> list[str]:
    """Two signals race, then questions are answered."""
    yes = asyncio.create_task(everstep.receive("yes", str))
    no = asyncio.create_task(everstep.receive("no", str))
    done, given_up = await asyncio.wait([yes, no], return_when=asyncio.FIRST_COMPLETED)
    for one in given_up:
        one.cancel()
    said = [one.result() for one in done]
    await asyncio.sleep(86400)
    async for request in everstep.requests("say", str):
        said.append(request.value)
        request.answer(len(said))
        if request.value == "bye":
            break
    return said


@step
async def mark(what: str) -> str:
    return await asyncio.to_thread(ledger.apply, ledger.offered(), "mark", everstep.key(), what)


@step(effect="read")
async def look(at: float) -> int:
    return 1


@workflow
async def look_at_the_clock() -> int:
    """All of it is in one commit, for its only step is quick: hardly any kill comes between."""
    return await look(time.time())
