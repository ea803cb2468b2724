"""Claimed runs whose code does not run: they are held, ended as cancelled, or compared with their code again."""

from collections.abc import Sequence

from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.damage import diagnose
from everstep.engine.process.process import Process
from everstep.engine.run.driver import Driver
from everstep.engine.run.holds import HoldReport, damaged_report
from everstep.engine.run.inbox import cancel_in, hold_in
from everstep.engine.run.resume import is_supported, would_go_on
from everstep.engine.run.units import cancelled_unit, hold_unit, resolve_unit
from everstep.errors import Damaged, StoreError
from everstep.model import events as ev
from everstep.stores.protocol import Accepted, Claim, Claimed, Release, RunRow


class Holding:
    """The part of an app that holds and ends runs without their code."""

    def __init__(self, app: Process) -> None:
        self._app = app

    def hold_new(self, run: str, report: HoldReport) -> None:
        """Hold a run that was started just now."""
        self._app.spawn(self._hold_new(run, report), run=run)

    async def _hold_new(self, run: str, report: HoldReport) -> None:
        """Hold a run that was started just now. Its start may not be durable yet, and a claim comes behind that."""
        app = self._app
        verdict = await app.committer.submit(Claim(run, app.worker, app.clock.now(), ("running",)))
        if isinstance(verdict, Claimed):
            await self.hold_claimed(verdict.row, report)

    async def hold_claimed(self, row: RunRow, report: HoldReport, consumed: Sequence[int] = ()) -> None:
        """Hold a claimed run."""
        app = self._app
        try:
            unit = await app.read(hold_unit, app, row, report)
            unit.consumed = consumed
            verdict = await app.committer.submit(unit)
        except StoreError:
            app.want(row.id)  # it is resumed, and held then
            raise
        if not isinstance(verdict, Accepted):
            app.watchers.look_again(row.id)  # another process drives it, and what looked wrong was its progress
            return
        app.held(unit.hold)
        app.watchers.tell(row.id, "held", None)

    async def look_at_delayed(self, row: RunRow) -> None:
        """A run that has not begun is cancelled or held without its code; anything else waits until it begins."""
        for delivery in await self._app.read(self._app.store.inbox, row.id):
            if delivery.kind == "cancel":
                await self.end_claimed(row, cancel_in(delivery))
                return
            if delivery.kind == "hold":
                await self.hold_claimed(row, hold_in(delivery), [delivery.number])
                return

    async def end_claimed(self, row: RunRow, request: ev.CancelRequested) -> bool:
        """End a claimed run as cancelled, without its code. Cancels in its inbox are answered by that as well."""
        app = self._app
        consumed = [one.number for one in await app.read(app.store.inbox, row.id) if one.kind == "cancel"]
        try:
            unit = await app.read(cancelled_unit, app, row, request, consumed)
        except Damaged as error:
            report = damaged_report(error, await app.read(diagnose, app.store, row))
            unit = await app.read(hold_unit, app, row, report)
            if isinstance(await app.committer.submit(unit), Accepted):
                app.held(unit.hold)
            raise
        verdict = await app.committer.submit(unit)
        if not isinstance(verdict, Accepted):
            await app.returns.give_back(Release(row.id, row.epoch, "queued"))
            return False
        for post in unit.posts:
            app.wake(post.run)
        app.ended_without_code(row.id, "cancelled")
        return True

    async def retry_diverged(self, run: str) -> None:
        """Compare a run that is held as diverged with the code as it is now; if it matches, it continues by itself."""
        app = self._app
        holds = [hold for hold in await app.read(app.store.holds, run=run) if hold.reason == "diverged"]
        row = await app.read(app.store.run, run)
        if not holds or row is None or not is_supported(row) or row.workflow not in DECLARED.names():
            return
        await app.become_worker()
        verdict = await app.committer.submit(Claim(run, app.worker, app.clock.now(), ("held",)))
        if not isinstance(verdict, Claimed):
            return
        if not await would_go_on(app, verdict.row, DECLARED.named(row.workflow)):
            await app.returns.give_back(Release(run, verdict.row.epoch, "held"))
            return
        note = "the code matches the history again"
        unit = await app.read(resolve_unit, app, verdict.row, holds[0], "retry", note=note, by="everstep")
        if isinstance(await app.committer.submit(unit), Accepted):
            app.adopt(run)

    def hold_unstorable(self, driver: Driver, error: BaseException) -> None:
        """The store refuses a run's newest events, a value that is too large for instance: it stops, and no other."""
        self._app.let_go(driver)
        self._app.spawn(self._hold_unstorable(driver, type(error).__name__), run=driver.run)

    async def _hold_unstorable(self, driver: Driver, error: str) -> None:
        app = self._app
        try:
            row = await app.read(app.store.run, driver.run)
        except StoreError:
            app.want(driver.run)  # it is resumed, and held then if the same is refused again
            return
        if row is not None and row.epoch == driver.row.epoch:
            await self.hold_claimed(row, HoldReport("stuck", f"its newest events cannot be stored: {error}"))
