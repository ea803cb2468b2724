"""Small workflows that crash tests are tested with."""

import asyncio

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
