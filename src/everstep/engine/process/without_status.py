"""Runs without a valid status: their rows are damaged, so that no search for runs that need a driver finds them.

A worker looks for them now and then, and holds those that have not ended as damaged: otherwise they would never
continue, without any report. One that has ended needs no driver. Reading it raises `Damaged`, and `everstep doctor`
names it.
"""

from typing import Final

import msgspec

from everstep.engine.history.damage import Diagnosis, diagnose
from everstep.engine.process.process import Process
from everstep.engine.run.holds import HoldReport, damaged_report
from everstep.errors import Damaged
from everstep.model.events import ENDS
from everstep.model.status import STATUSES
from everstep.model.untrusted import logger
from everstep.stores.protocol import Claim, Claimed

log = logger("everstep.run")

AGAIN_SECONDS: Final = 60.0
"""How often a worker looks, in seconds."""
PAGE: Final = 100


async def hold_runs_without_status(app: Process) -> None:
    """Hold the runs that have no status, unless they are driven."""
    for run in await app.read(app.store.runs_without_status, PAGE):
        if run in app.drivers or run in app.untakeable:
            continue  # the next write of its driver sets the status, or is refused
        with app.setting_aside(run):
            try:
                await _hold(app, run)
            except Damaged as error:  # it concerns this run alone: others are held, and the worker keeps claiming
                log.error("Run %s has no status, and its row cannot be read: %s", run, error)
                app.cannot_take_up(run)


async def _hold(app: Process, run: str) -> None:
    row = await app.read(app.store.run, run)
    if row is None or row.status in STATUSES:
        return
    found = await app.read(diagnose, app.store, msgspec.structs.replace(row, status="queued"))
    if row.ended_at is not None or (found.good and found.good[-1].kind in ENDS):
        log.error("Run %s has ended, and its row has no status: `everstep repair %s` puts it right.", run, run)
        app.cannot_take_up(run)
        return
    await app.become_worker()
    verdict = await app.committer.submit(Claim(run, app.worker, app.clock.now(), (row.status,)))
    if not isinstance(verdict, Claimed):
        log.error("Run %s has no status, and cannot be held: another process has it, or has changed it.", run)
        return
    await app.holding.hold_claimed(verdict.row, _report(row.status, found))


def _report(status: str, found: Diagnosis) -> HoldReport:
    """Return what is damaged. The hold gives the row a status, so with a sound history nothing is left to repair."""
    if found.problem:
        return damaged_report(Damaged(found.problem, found.last_good), found)
    return HoldReport(
        "damaged",
        f"its row had no status ({status!r} is none); its history is sound",
        facts={"last_good": found.last_good},
        without=["repair"],
        consequences={"retry": "verify the history again, and continue from it"},
    )
