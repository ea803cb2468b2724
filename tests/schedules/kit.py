"""What the tests of schedules share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec

from everstep.engine.app.app import App
from everstep.model.schedules import Definition, tick_text
from everstep.testing.clock import FakeClock
from tests.lasting import LastingStore

NINE = datetime(2026, 11, 16, 9, tzinfo=UTC)


def micros(moment: datetime | str) -> int:
    """Return a time in microseconds since 1970."""
    given = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return round(given.timestamp()) * 1_000_000


def defined(cron: str = "", **options: object) -> Definition:
    """Return a definition without arguments."""
    return Definition(workflow="tidy", arguments=msgspec.Raw(b"[[]]"), digest="", cron=cron, **options)  # type: ignore[arg-type]


def texts(ticks: list[int]) -> list[str]:
    return [tick_text(tick) for tick in ticks]


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds. pytest's own timeout says where, if it never does."""
    while not condition():
        await asyncio.sleep(0.0005)


class Place:
    """A store in memory and a clock, for apps that come and go."""

    def __init__(self, at: datetime = NINE) -> None:
        self.clock = FakeClock(micros(at))
        self.store = LastingStore(clock=self.clock.now)

    @asynccontextmanager
    async def worker(self, *, recover: bool = True) -> AsyncIterator[App]:
        app = await App(self.store, recover=recover, clock=self.clock).open()
        try:
            yield app
        finally:
            await app.close()

    async def move(self, app: App, seconds: float) -> None:
        """Let time pass, and wait until what that leads to is durable."""
        self.clock.advance(seconds)
        await self.clock.rest(app)

    def runs(self) -> list[str]:
        from everstep.stores.protocol import RunFilter

        return sorted(row.id for row in self.store.runs(RunFilter(limit=10_000)))

    def status(self, run: str) -> str:
        row = self.store.run(run)
        return row.status if row is not None else ""
