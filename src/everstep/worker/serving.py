"""Serving workflows: claim unfinished, free runs until a signal arrives; then give them back in good order."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Self

import msgspec

from everstep.engine.app.app import App
from everstep.engine.history.clock import microseconds
from everstep.engine.process.stalls import Stalls
from everstep.engine.process.webhooks import Webhook
from everstep.engine.run.driver import Driver
from everstep.model.untrusted import logger, text_of
from everstep.stores.protocol import HoldRow, Store
from everstep.worker.health import Health, answer_on
from everstep.worker.stopping import stopping_on_signals
from everstep.worker.waiting import open_when_there, waiting_health

log = logger("everstep.worker")


WATCH: Final = "saying how busy this worker is"
WATCH_SECONDS: Final = 0.5
SAY_SECONDS: Final = 2.0
"""The minimum time between two updates of a worker's row about its load, in addition to its renewals (seconds)."""
HAS_ROOM: Final = 0.8
"""A saturated worker has room again when at most this part of its runs is active."""


class News(msgspec.Struct, kw_only=True):
    """An event of a worker, for its log."""

    what: str
    """`waiting`, `took up`, `let go`, `held`, `saturated`, `has room`, `stopping`, `stopped`, or how a run ended."""
    run: str = ""
    workflow: str = ""
    detail: str = ""


Tell = Callable[[News], None]


class WorkerApp(App):
    """An app that claims every free run, and reports what it does."""

    def __init__(self, store: Store, tell: Tell, *, on_hold: Webhook | None = None, **options: Any) -> None:
        super().__init__(store, recover=True, on_hold=[self._tell_hold, *([on_hold] if on_hold else [])], **options)
        self._tell = tell
        self._last_commit_at: int | None = None
        self._say_at = 0
        self._stalls = Stalls(self)

    def _tell_hold(self, hold: HoldRow) -> None:
        self.spawn(self._say_held(hold))

    async def _say_held(self, hold: HoldRow) -> None:
        row = await self.read(self.store.run, hold.run)
        detail = f"{hold.reason}: {hold.summary}"
        self._tell(News(what="held", run=hold.run, workflow=row.workflow if row is not None else "", detail=detail))

    async def take_up_run(self, run: str, *args: Any) -> bool:
        """Claim a run if it is free, and drive it."""
        had = run in self.drivers
        taken = await super().take_up_run(run, *args)
        driver = self.drivers.get(run)
        if taken and not had and driver is not None:
            row = driver.row
            detail = f"at event {row.head_seq}" + (f", {row.deaths} deaths before" if row.deaths else "")
            self._tell(News(what="took up", run=run, workflow=row.workflow, detail=detail))
        return taken

    def let_go(self, driver: Driver, error: BaseException | None = None) -> None:
        """Report that a run has left this worker, and how."""
        ended, workflow = driver.ended_as(), driver.row.workflow
        super().let_go(driver, error)
        if ended != "held":
            detail = "" if error is None else text_of(error)
            self._tell(News(what=ended or "let go", run=driver.run, workflow=workflow, detail=detail))

    # -- how it is -------------------------------------------------------------------------------------------------
    def health(self) -> Health:
        """Return the state of this worker, for its health port."""
        healthy = not (self.pump.is_late() or self.is_failed or self.committer.full)
        facts: dict[str, Any] = {"worker": self.worker, "draining": self.draining, "runs": len(self.drivers)}
        running = self.presence.running()
        facts |= {"running": running, "concurrency": self.concurrency}
        facts |= {"saturation": round(running / self.concurrency, 3), "last_commit_at": self._last_commit_at}
        facts |= {"commits": self.committer.commits, "lease_renewed_at": self.pump.renewed_at}
        why = self.background.why_not_claiming()
        facts |= {"troubles": self.background.troubles(), "not_claiming": why}
        return Health(healthy, healthy and not (self.draining or why), facts)

    def _load(self) -> tuple[int, int]:
        return len(self.drivers), self.presence.running()

    async def open(self) -> Self:
        """Open the app, and watch whether the event loop turns."""
        await super().open()
        self._stalls.begin()
        return self

    async def close(self, drain: float = 0.0) -> None:
        """Stop: see `App.close`."""
        try:
            await super().close(drain)
        finally:
            self._stalls.close()

    async def watch(self) -> None:
        """Process commits, and report when there is no room for more runs, and when there is again."""
        commits, saturated, said = -1, False, self._load()
        while True:
            if self._load() != said and self.worker and self.clock.now() >= self._say_at:
                said, self._say_at = self._load(), self.clock.now() + microseconds(SAY_SECONDS)
                await self.presence.renew(self.clock.now())
            if self.committer.commits != commits:
                commits, self._last_commit_at = self.committer.commits, self.clock.now()
            running = self.presence.running()
            if running >= self.concurrency and not saturated:
                saturated = True
                self._tell(News(what="saturated", detail=f"all of {self.concurrency} runs are at work; others wait"))
            elif running < self.concurrency * HAS_ROOM and saturated:
                saturated = False
                self._tell(News(what="has room", detail=f"{running} of {self.concurrency} runs are at work"))
            self.background.works(WATCH)
            await asyncio.sleep(WATCH_SECONDS)


async def serve(
    make: Callable[[Store], WorkerApp],
    open_one: Callable[[], Store],
    tell: Tell,
    *,
    drain: float,
    health: tuple[str, int] | None = None,
    pipe: int | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT: then start nothing new, wait `drain` seconds for bodies, and give the runs back.

    A second signal ends the process at once. Returns the exit status: 0 after SIGTERM or SIGINT. If the store's server
    cannot be reached at the start, the worker waits for it.

    health: the address of the health port. pipe: its end counts as a signal as well, because the supervisor is gone
    then.
    """
    app: WorkerApp | None = None

    async def how() -> Health:
        return app.health() if app is not None else waiting_health()

    server = await answer_on(health, how) if health is not None else None
    with stopping_on_signals() as stop:
        if pipe is not None:
            asyncio.get_running_loop().add_reader(pipe, stop.asked.set)
        store = await open_when_there(open_one, lambda what, detail: tell(News(what=what, detail=detail)), stop.asked)
        if store is not None:
            app = await make(store).open()
            await _serve(app, tell, stop.asked, drain)
        if pipe is not None:
            asyncio.get_running_loop().remove_reader(pipe)
    if server is not None:
        server.close()
    return 0


async def _serve(app: WorkerApp, tell: Tell, stop: asyncio.Event, drain: float) -> None:
    app.background.keep(WATCH, app.watch, endless=True)
    await stop.wait()
    under_way = sum(1 for driver in app.drivers.values() if driver.status == "running")
    detail = f"{len(app.drivers)} runs are here, {under_way} of them at work"
    if under_way:
        detail += f"; steps under way may take up to {drain:g} s. A second signal stops at once"
    tell(News(what="stopping", detail=detail))
    given_back = sorted(app.drivers)
    await app.close(drain)
    tell(News(what="stopped", detail=f"{len(given_back)} runs were given back"))
