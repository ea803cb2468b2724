"""How a run is driven: start reading here.

    claim     the host's `take_up_run` fences the run against every other worker
    verify    its whole history is loaded and verified: digest by digest, and against the run's row
    replay    its code is run against that history; nothing outside is touched
    compare   the facts that the code remembers are compared with the outside as it is now
    settle    steps that were begun and whose outcome is not known are settled, by their contracts
    perform   what the code asks for is recorded, and done as soon as that is durable (`driver.py`, `attempts.py`)
    append    what was recorded becomes durable with that of other runs (`writer.py`, `process/committer.py`)
    let go    the run has ended, is held, or was taken over: the host's `let_go`; one that waits leaves when it is idle

Whatever does not agree puts the run on hold, and nothing else is changed. A run that was started here has no past and
begins in `begin.py`.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from everstep.engine.code.loop import SpinningWorkflow
from everstep.engine.code.recovery_point import load_past
from everstep.engine.code.stops import pass_on, stop_in
from everstep.engine.code.workflow import Workflow
from everstep.engine.history.damage import diagnose
from everstep.engine.run.drift import compare_outside
from everstep.engine.run.driver import Driver
from everstep.engine.run.holds import (
    HoldReport,
    arguments_report,
    damaged_report,
    diverged_report,
    poisoned_report,
    stuck_report,
)
from everstep.engine.run.host import RunHost
from everstep.engine.run.inbox import first_hold
from everstep.engine.run.resume import code_of, driver_of, replay_history
from everstep.engine.run.units import is_delayed
from everstep.errors import Damaged, NotDecodable, NotReadable, StoreError
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import logger
from everstep.stores.protocol import Claimed, Delivery

log = logger("everstep.app")

DEATHS_MAX: Final = 3
"""A run whose drivers died this often in a row without progress, the last time alone, is held as poisoned."""


async def drive(host: RunHost, claimed: Claimed) -> None:
    """Take a run that this process has claimed as far as it can go; or hold it, or leave it to another worker."""
    row, read = claimed.row, claimed.past
    if (workflow := code_of(row)) is None:
        await host.give_back(row)
        return
    crash_point("run.claimed")
    if is_delayed(row, host.clock.now()):
        await host.holding.look_at_delayed(row)
        return
    try:
        inbox = read.inbox if read is not None else await host.read(host.store.inbox, row.id)
        driver = await verify_and_replay(host, claimed, workflow)
    except NotReadable as error:
        log.warning("Run %s is left for a worker that can read it: %s", row.id, error)
        await host.leave_alone(row)
    except BaseException as error:  # noqa: BLE001  # what is no stop is raised again
        host.set_aside(row, error)
    else:
        if isinstance(driver, HoldReport):
            await host.hold_or_leave(row, driver)
            return
        driver.beside.asked_hold = first_hold(inbox)
        if driver.execution.witnesses:
            host.compare_later(row.id, compare_and_go_on(host, driver))
        else:
            go_on(host, driver, arrived=inbox if not host.was_woken(row.id) else None)


async def verify_and_replay(host: RunHost, claimed: Claimed, workflow: Workflow) -> Driver | HoldReport:
    """Bring a claimed run to where it was, with nothing written and nothing outside touched; or say why it is held."""
    row, read = claimed.row, claimed.past
    if row.deaths >= DEATHS_MAX:
        return poisoned_report(row.deaths, host.interrupted.cause(row.id))
    try:
        past = await host.read(load_past, host.store, row, read.events if read is not None else ())
        replayed = await replay_history(host, row, workflow, past.events, past.checkpoint)
    except Damaged as error:
        return damaged_report(error, await host.read(diagnose, host.store, row))
    except NotDecodable as error:
        return arguments_report(error)
    if not (replayed.differences or replayed.spins):
        return await driver_of(host, row, past, replayed)
    replayed.execution.evict()
    if replayed.differences:
        return diverged_report(replayed.differences)
    return stuck_report(replayed.execution, SpinningWorkflow())


async def compare_and_go_on(host: RunHost, driver: Driver) -> None:
    """Compare what the code remembers with the outside, which may take long, and go on if it is as it was."""
    try:
        await compare_outside(driver)
        go_on(host, driver)
    except BaseException as error:
        host.abandon(driver)
        if (stop := stop_in(error)) is None or isinstance(error, asyncio.CancelledError):
            raise
        pass_on(stop, host.loop)


def go_on(host: RunHost, driver: Driver, *, is_new: bool = False, arrived: Sequence[Delivery] | None = None) -> None:
    """Settle what is in doubt and do what the code asks for. From here on the run moves by what happens to it."""
    host.note_driven(driver)
    crash_point("run.replayed")
    try:
        driver.go_on(is_new=is_new, arrived=arrived)
    except StoreError as error:  # what its code asks for cannot be done just now, and nothing of that is written
        log.error("Run %s cannot continue just now, and is resumed later: %s", driver.run, error)
        host.take_again(driver)
    except BaseException as error:
        if (stop := stop_in(error)) is not None:
            host.interrupted.leave(driver, stop, "workflow code")
        elif isinstance(error, Exception):  # it reaches this run alone
            host.stumbling.leave(driver, error)
        else:
            raise
