"""What an app reports in its worker's row, for people and other workers: what it serves, how busy it is."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.clock import microseconds, read_again
from everstep.engine.process.elsewhere import on_a_thread
from everstep.engine.process.worker_row import About, read_about
from everstep.engine.run.acting import is_declared_gone
from everstep.errors import Misuse, WorkerGone
from everstep.model.digests import digest_of
from everstep.model.untrusted import logger
from everstep.stores.processes import worker_name
from everstep.stores.protocol import Release, RunRow

if TYPE_CHECKING:  # a real cycle: a host has this part, which drives the host's runs
    from everstep.engine.process.host import Host


log = logger("everstep.worker")

CLOSING: Final = "renewals while closing"
LEFT_MAX: Final = 1000
"""The maximum number of runs in a worker's row that it gave back because they need other code."""


class Presence:
    """The report of an app in its worker's row, and the runs that it leaves for other workers."""

    def __init__(self, app: "Host") -> None:
        self._app = app
        self._prints: dict[str, list[str]] = {}
        self.left: dict[str, None] = {}

    def running(self) -> int:
        """Return the number of active runs here."""
        return sum(1 for driver in self._app.drivers.values() if driver.status == "running")

    def about(self) -> bytes:
        """Return this app's present report."""
        app = self._app
        about = About(
            recovers=app.recover,
            workflows={name: self.print_of(name) for name in app.workflows()} if app.recover else {},
            queues=list(app.queueing.served) if app.queueing.served is not None else None,
            concurrency=app.concurrency,
            runs=len(app.drivers),
            running=self.running(),
            draining=app.draining,
            left=list(self.left)[-LEFT_MAX:],
            troubles=app.background.troubles(),
            not_claiming=app.background.not_claiming,
            lease=app.lease,
        )
        return msgspec.json.encode(about)

    def print_of(self, name: str) -> list[str]:
        """Return a workflow's version, and the digest of the file that declares it."""
        if name not in self._prints:
            try:
                workflow = DECLARED.named(name)
                from pathlib import Path  # it imports much, and few programs need it

                path = Path(workflow.function.__code__.co_filename)
                file_print = digest_of(path.read_bytes()).hex()[:16] if path.is_file() else ""
                self._prints[name] = [workflow.version, file_print]
            except (Misuse, OSError):
                return ["", ""]
        return self._prints[name]

    def enter(self) -> tuple[str, str]:
        """Register this process as a worker under a new name. Returns that, and the store's life.

        On a thread: it reads files, and another process may be writing for a while.
        """
        app, host = self._app, socket.gethostname()
        worker = worker_name(host, app.randomness.getrandbits(32))
        read_again(app.clock)
        until = app.clock.now() + microseconds(app.lease)
        self.refuse_if_gone()
        app.store.register_worker(worker, os.getpid(), host, until, app.notifier.targets, self.about())
        try:
            return worker, app.store.life()  # while it is a worker, no restore can be recorded
        except BaseException:
            app.store.leave(worker)
            raise

    def refuse_if_gone(self) -> None:
        """Raise `WorkerGone` if this worker, or its host since the app was opened, was declared gone."""
        app = self._app
        if (said := is_declared_gone(app.store, app.worker, socket.gethostname(), app.opened_at)) is not None:
            by = f" by {said.by}" if said.by else ""
            raise WorkerGone(
                f"The {said.kind} {said.name} was declared gone{by}: {said.note}. This process lives, and what it had "
                "begun may have been done again elsewhere. It claims no run and begins nothing more. Stop it; a new "
                "process may start."
            )

    async def renew(self, at: int) -> bool:
        """Renew the lease, update the report, and read the store's clock; False if this worker was removed.

        On a thread, because another process may be writing for a while. The report is made here on the loop, where it
        changes.
        """
        return await on_a_thread(self._renew, at, self.about())

    def _renew(self, at: int, about: bytes) -> bool:
        app = self._app
        noted = read_again(app.clock)
        return app.store.renew(app.worker, at + microseconds(app.lease), noted, about)

    @asynccontextmanager
    async def prolonged(self) -> AsyncIterator[None]:
        """Renew the lease within the block, where the pump no longer does: bodies may take longer than a lease."""
        background = self._app.background
        if self._app.worker:
            background.keep(CLOSING, self._prolong, endless=True)
        try:
            yield
        finally:
            await background.end(CLOSING, cancel=True)

    async def _prolong(self) -> None:
        while True:
            await self.renew(self._app.clock.now())
            self._app.background.works(CLOSING)
            await asyncio.sleep(self._app.lease / 3)

    # -- runs whose code is elsewhere ------------------------------------------------------------------------------
    def has_other(self, workflow: str, queue: str, run: str) -> bool:
        """Return True if another living worker serves a workflow with other code, and has not given this run back."""
        app, mine = self._app, self.print_of(workflow)
        others = [row for row in app.store.workers() if row.id != app.worker and row.has_lease]
        abouts = map(read_about, others)
        return any(
            about.serves(workflow, queue) and about.workflows[workflow] != mine and run not in about.left
            for about in abouts
        )

    async def leaves_for_another(self, row: RunRow, reason: str) -> bool:
        """Give a claimed run back if it does not match the code here, and another living worker has other code for it.

        This worker's row records that first, so that no two workers leave a run to each other.
        """
        app = self._app
        if reason != "diverged" or not app.recover:
            return False
        if not await app.read(self.has_other, row.workflow, row.queue, row.id):
            return False
        log.warning("Run %s does not match the code of %s here; it is left for another worker.", row.id, row.workflow)
        self.left[row.id] = None
        app.untakeable.add(row.id)
        await self.renew(app.clock.now())
        await app.returns.give_back(Release(row.id, row.epoch, row.status))
        return True

    async def look_again(self) -> None:
        """Claim runs again that were left for another worker, when no such worker exists any more."""
        for run in list(self.left):
            row = await self._app.read(self._app.store.run, run)
            if row is None or row.status not in ("queued", "running", "waiting"):
                self._forget(run)
            elif not await self._app.read(self.has_other, row.workflow, row.queue, run):
                self._forget(run)
                self._app.pump.nudge()

    def _forget(self, run: str) -> None:
        del self.left[run]
        self._app.untakeable.discard(run)
