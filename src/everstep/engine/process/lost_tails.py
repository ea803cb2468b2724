"""Lost tails: the database was replaced by one that lacks what this process saw durable.

The shorter history is sound, so a worker that resumed the run would continue from it, and repeat what was begun in the
lost part. So the run is held as `damaged` before anything else is done with it. Its repair lets it continue from what
is left; from there on, steps that must not happen twice need a confirmation.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from everstep.engine.history.damage import Diagnosis, diagnose, steps_in
from everstep.engine.process.process import Process
from everstep.engine.run.holds import HoldReport, damaged_report, report_of
from everstep.errors import Damaged
from everstep.model.events import EventRow
from everstep.model.status import ENDED, Status
from everstep.model.untrusted import logger
from everstep.stores.protocol import Claim, Claimed, NotClaimed, Post, RunRow
from everstep.stores.rows.runs import LostTail, has_moved

log = logger("everstep.run")

UNFINISHED: Final[tuple[Status, ...]] = ("queued", "running", "waiting", "held")
AGAIN_SECONDS: Final = 0.5
"""Delay before another attempt to hold a run that another worker has, or that the store did not hold (seconds)."""
NAMED_MAX: Final = 50
"""The maximum number of runs that are named in one log line."""


class Losses:
    """The runs of an app that have lost their tails and are not held yet."""

    def __init__(self, app: Process) -> None:
        self._app = app
        self.open: dict[str, LostTail] = {}
        self._posted: set[str] = set()
        self._being_held: set[str] = set()

    def look(self, found: Sequence[LostTail]) -> set[str]:
        """Stop the runs that have lost their tails, and hold them. Returns the new ones."""
        if found:
            self._tell(found)
            for tail in found:
                self._stop(tail)
        for run in self.open.keys() - self._being_held:
            self._being_held.add(run)
            self._app.spawn(self._hold(run))  # if that fails, the pump looks again and retries it
        return {tail.run for tail in found}

    def _stop(self, tail: LostTail) -> None:
        if tail.status in UNFINISHED:
            self.open[tail.run] = tail
        driver = self._app.drivers.get(tail.run)
        if driver is not None:
            self._app.let_go(driver)
        self._app.watchers.look_again(tail.run)

    def _tell(self, found: Sequence[LostTail]) -> None:
        ended = [tail.run for tail in found if tail.seen_status in ENDED]
        gone = [tail.run for tail in found if tail.status is None]
        log.error(
            "The database has lost what it had made durable: the ends of the histories of %d runs (%s). Those that "
            "have not ended there are held. %s%sOther runs may be concerned, which this process did not drive: stop "
            "all workers, say `everstep restored`, and start them again.",
            len(found),
            _named([tail.run for tail in found]),
            f"Of these, {len(ended)} had ended, and their results may be known outside ({_named(ended)}). "
            * bool(ended),
            f"{len(gone)} are gone altogether, or were deleted meanwhile ({_named(gone)}). " * bool(gone),
        )

    async def _hold(self, run: str) -> None:
        """Claim the run and hold it. While another process drives it, ask that process to hold it."""
        app, tail = self._app, self.open[run]
        try:
            if await app.read(self._was_held, tail):
                self.open.pop(run, None)
                app.pump.nudge()  # it may be free to continue by now
                return
            await app.become_worker()
            verdict = await app.committer.submit(Claim(run, app.worker, app.clock.now(), UNFINISHED))
            if isinstance(verdict, Claimed):
                await app.holding.hold_claimed(verdict.row, await app.read(self._report, verdict.row, tail))
            elif isinstance(verdict, NotClaimed):
                await self._ask_owner(verdict.row, tail)
        except Damaged as error:
            log.error("Run %s has lost its tail, and cannot be held: %s", run, error)
            self.open.pop(run, None)
        finally:
            app.loop.call_later(AGAIN_SECONDS, self._being_held.discard, run)

    def _was_held(self, tail: LostTail) -> bool:
        """Return True if the run was held for this before, by another worker or on request, even if that is
        resolved.
        """
        holds = self._app.store.holds(run=tail.run, open_only=False)
        lost = [report_of(hold) for hold in holds if hold.reason == "damaged" and hold.created_at > tail.seen_at]
        return any(report.get("seen", tail.seen) >= tail.seen for report in lost)

    async def _ask_owner(self, row: RunRow | None, tail: LostTail) -> None:
        app = self._app
        if row is None or row.status in ENDED:
            self.open.pop(tail.run, None)
            return
        alive = {worker.id for worker in await app.read(app.store.workers) if worker.has_lease}
        if row.owner in alive and tail.run not in self._posted:
            self._posted.add(tail.run)
            report = msgspec.json.encode(await app.read(self._report, row, tail))
            await app.committer.submit(Post(tail.run, "hold", value=report, at=app.clock.now()))

    def _report(self, row: RunRow, tail: LostTail) -> HoldReport:
        found = diagnose(self._app.store, row)
        while (now := self._app.store.run(row.id)) is not None and has_moved(row, now):  # its owner is driving it
            row, found = now, diagnose(self._app.store, now)
        if found.problem:
            return damaged_report(Damaged(found.problem, found.last_good), found)
        return lost_tail_report(found, tail, self._app.worker)


def _moment(at: int) -> str:
    return datetime.fromtimestamp(at / 1_000_000, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _named(runs: list[str]) -> str:
    more = f", and {len(runs) - NAMED_MAX} more" if len(runs) > NAMED_MAX else ""
    return ", ".join(runs[:NAMED_MAX]) + more


def lost_tail_report(found: Diagnosis, tail: LostTail, worker: str) -> HoldReport:
    """Return the report for a sound history that ends before an event that was seen durable."""
    there = found.last_good if found.generation == tail.generation else 0
    if tail.is_other:
        summary = f"event {tail.seen} is another one than the durable one: another process continued without that"
    else:
        summary = f"event {tail.seen} was durable and is gone; the history ends at event {there}"
    lost = Diagnosis(summary, found.generation, found.good, found.digest, _lost(tail, there), True, [])
    steps, workers, _ = steps_in(lost)
    facts: dict[str, Any] = {
        "last_good": found.last_good,
        "seen": tail.seen,
        "seen_status": tail.seen_status,
        "lost_between": f"{_moment(tail.there_at)} and {_moment(tail.seen_at)}",
        "begun": [f"{step.step} ({step.effect}), event {step.seq}, key {step.key}" for step in steps],
        "workers": sorted({*workers, worker}),
    }
    known = "" if len(lost.rest) >= tail.seen - there else " Not everything that was begun there is known."
    consequences = {
        "repair": "continue from the last event that is there; what must not happen twice is confirmed before it is "
        f"done, because it may have happened in the lost part.{known}"
    }
    # Verifying again would find a sound history, and continue from it as if nothing were missing.
    return HoldReport("damaged", summary, facts=facts, without=["retry"], consequences=consequences)


def _lost(tail: LostTail, there: int) -> list[EventRow]:
    """Return the known lost events. If another history took their place, it is unknown which events are lost."""
    return [event for event in tail.events if tail.is_other or event.seq > there]
