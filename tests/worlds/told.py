"""What the tests of teardown share: an account of what code did, and runs that can leave memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.testing.clock import FakeClock
from tests.engine.lives import echo
from tests.lasting import LastingStore

TOLD: list[str] = []


@step(name="tell")
async def tell(text: str) -> str:
    TOLD.append(text)
    return text


@asynccontextmanager
async def an_app(store: Any = None, clock: FakeClock | None = None) -> AsyncIterator[App]:
    app = await App(store or LastingStore(), clock=clock or FakeClock()).open()
    try:
        yield app
    finally:
        await app.close()


@workflow
async def echo_flow(number: int) -> int:
    return await echo(number)  # type: ignore[no-any-return]
