"""Lapsed leases: found by watching, and never by comparing with a clock.

A worker that is stopped (SIGSTOP, a debugger, a network that swallows everything) keeps its liveness lock and cannot
say that it does nothing. Its runs go to others when one of them has watched its row for a whole lease, by its own
ticks, and has seen no renewal. The times in the row are not compared with any clock: two clocks may differ by a day, or
jump. A dead worker is not watched, because its lock is free at once (see `bury_dead`).

Time in which the watcher itself did not look counts for little: machine, container or process may have been paused, and
the other worker with it.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from everstep.engine.history.clock import Clock, StoreClock, microseconds, ticks_of
from everstep.engine.process.process import Process
from everstep.engine.process.worker_row import read_about
from everstep.stores.protocol import Store, WorkerRow
from everstep.stores.ticks import ticks as machine_ticks

NEIGHBOURS: Final = 16
"""The number of other workers that a worker watches: its neighbours. So the work of each does not grow with their
number.
"""
PAUSE_SECONDS: Final = 0.1
"""Pause between two looks of a command that waits for a lease to lapse."""
LOOKS: Final = 6
"""How often a lease is checked while it lasts."""
ABSENCE_SHARE: Final = 3
"""Of the time between two looks at most this part of a lease (a third) counts. A worker renews its lease after a
third, so a watcher that was paused together with it cannot add up a whole lease.
"""


class Watch:
    """The other workers of a store, as one of them sees them."""

    def __init__(self, clock: Clock, lease: float) -> None:
        self.next_at = 0
        """When to look again, in ticks."""
        self._alone_micros = microseconds(lease) // ABSENCE_SHARE
        """Pause between two looks of a worker without neighbours: as between two renewals of its own lease."""
        self._ticks = ticks_of(clock)
        self._real = clock.ticks if isinstance(clock, StoreClock) else machine_ticks
        """Measures how time passes for this process. The ticks of a test's clock may jump while everything is awake."""
        self._looked = (0, 0)
        self._silent: dict[str, tuple[int, int]] = {}
        """For each worker the lease that was read, and for how many microseconds it has been the same."""

    def look(self, rows: Sequence[WorkerRow]) -> list[WorkerRow]:
        """Compare workers with what was last read of them, and return those whose leases have lapsed."""
        ticks, real = self._ticks(), self._real()
        passed, absent = ticks - self._looked[0], real - self._looked[1]
        self._looked = ticks, real
        silent: dict[str, tuple[int, int]] = {}
        lapsed: list[WorkerRow] = []
        pauses: list[int] = []
        for row in rows:
            lease = microseconds(max(1.0, read_about(row).lease))
            micros = self._silence_of(row, lease, passed, absent)
            silent[row.id] = row.lease_until, micros
            pauses.append(min(lease // LOOKS, max(0, lease - micros) + 1))
            if micros > lease:
                lapsed.append(row)
        self._silent = silent
        self.next_at = ticks + min(pauses, default=self._alone_micros)
        return lapsed

    def _silence_of(self, row: WorkerRow, lease: int, passed: int, absent: int) -> int:
        until, micros = self._silent.get(row.id, (0, 0))
        if until != row.lease_until or absent >= lease:
            return 0
        return micros + max(0, passed - max(0, absent - lease // ABSENCE_SHARE))


def outwait(store: Store, clock: Clock, owner: str) -> bool:
    """Watch a worker until its lease has lapsed, and tell whether it has; False as soon as it is renewed.

    For what is over in a moment, such as a command: a stopped worker must not keep a run from it for ever. The clock
    only says whether it is worth watching: a lease that should last is not waited for.
    """
    watch, first = Watch(clock, PAUSE_SECONDS), 0
    while True:
        rows = [row for row in store.workers() if row.id == owner]
        if not rows or not rows[0].has_lease:
            return True
        first = first or rows[0].lease_until
        if rows[0].lease_until != first or first > store.now() or not isinstance(clock, StoreClock):
            return False  # (a test's clock does not advance during a wait)
        for row in watch.look(rows):
            store.lapse(row.id, row.lease_until)
        time.sleep(PAUSE_SECONDS)


async def wait_for_lapse(app: Process, owner: str | None) -> None:
    """Bury the dead. If a run's owner is stopped, as it seems, watch it for as long as its lease lasts."""
    await app.read(app.store.bury_dead, app.clock.now())
    if owner is not None and owner != app.worker:
        await app.elsewhere.call(partial(outwait, app.store, app.clock, owner))
