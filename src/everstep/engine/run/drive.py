"""How a run is driven: start reading here.

    claim     the host's `take_up_run` fences the run against every other worker
    verify    its whole history is loaded and verified: digest by digest, and against the run's row
    replay    its code is run against that history; nothing outside is touched
    compare   the facts that the code remembers are compared with the outside as it is now
    settle    steps that were begun and whose outcome is not known are settled, by their contracts
    perform   what the code asks for is recorded, and done as soon as that is durable (`driver.py`, `attempts.py`)
    append    what was recorded becomes durable with that of other runs (`writer.py`, `process/committer.py`)
    let go    the run has ended, is held, or was taken over: the host's `let_go`; one that waits leaves when it is idle

Whatever does not agree puts the run on hold, and nothing else is changed.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from everstep.engine.code.execution import Execution
from everstep.engine.code.loop import SpinningWorkflow
from everstep.engine.code.recovery_point import Past, load_past
from everstep.engine.code.replay import Replayed, first_run
from everstep.engine.code.stops import pass_on, stop_in
from everstep.engine.code.workflow import DECLARED, Workflow
from everstep.engine.history.clock import microseconds
from everstep.engine.history.damage import diagnose
from everstep.engine.history.journal import Journal
from everstep.engine.history.restored import Note, may_lack, newest_note
from everstep.engine.history.verify import Recorded
from everstep.engine.run.acting import whereabouts
from everstep.engine.run.drift import compare_outside
from everstep.engine.run.driver import Beside, Driver
from everstep.engine.run.holds import HoldReport, damaged_report, diverged_report, poisoned_report, stuck_report
from everstep.engine.run.host import RunHost
from everstep.engine.run.inbox import first_hold
from everstep.engine.run.resume import Payloads, books_of, is_supported, replay_history
from everstep.engine.run.streams import newest_entries
from everstep.engine.run.units import is_delayed
from everstep.errors import Damaged, Misuse, NotDecodable, NotReadable, StoreError, UnknownWorkflow
from everstep.model.crash_points import crash_point
from everstep.model.events import EventRow
from everstep.model.untrusted import is_refusal, logger
from everstep.stores.protocol import Claimed, Delivery, RunRow

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
        driver = await take_up(host, row, workflow, read.events if read is not None else ())
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


def code_of(row: RunRow) -> Workflow | None:
    """Return the code of a run, if this process has it and this release can drive it."""
    try:
        workflow = DECLARED.named(row.workflow)
    except (UnknownWorkflow, Misuse) as error:
        log.warning("Run %s is left for a worker that knows it: %s", row.id, error)
        return None
    if not is_supported(row):
        log.warning("Run %s was made by a newer release (semantics %d); it is left alone.", row.id, row.semantics)
        return None
    return workflow


async def take_up(
    host: RunHost, row: RunRow, workflow: Workflow, events: Sequence[EventRow] = ()
) -> Driver | HoldReport:
    """Verify and replay a claimed run, with the events that its claim has read; or say why a person must look at it."""
    if row.deaths >= DEATHS_MAX:
        return poisoned_report(row.deaths, host.interrupted.cause(row.id))
    try:
        past = await host.read(load_past, host.store, row, events)
        replayed = await replay_history(host, row, workflow, past.events, past.checkpoint)
    except Damaged as error:
        return damaged_report(error, await host.read(diagnose, host.store, row))
    except NotDecodable as error:
        return _arguments_do_not_fit(error)
    if replayed.spins or replayed.differences:
        replayed.execution.evict()
        return diverged_report(replayed.differences) if replayed.differences else _spins(replayed)
    key = host.store.chain.key(past.events[0].body.chain, row.id)
    journal = Journal(row.id, row.generation, row.head_seq, row.head_digest, past.events[-1].at, key)
    replayed.execution.read_payloads_with(Payloads(host.store, row.id, journal.undurable))
    driver = Driver(
        host, row, replayed, journal, _clock_started_at(past), await _read_beside(host, row, past, replayed)
    )
    if await host.read(may_lack, host.store, host.life, row.id, row.generation, _newest_note(past)):
        driver.note_restored(host.life)
    return driver


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


# -- a run that was started here: there is no past, and nothing to claim ---------------------------------------------
def drive_new(host: RunHost, row: RunRow, workflow: Workflow, started: Recorded) -> None:
    """Drive a run that was started just now."""
    try:
        driver = begin(host, row, workflow, started)
    except BaseException as error:  # noqa: BLE001  # what is no stop, and no refusal, is raised again
        if is_refusal(error):
            host.stumbling.take_later(row.id, error)
        else:
            host.set_aside(row, error)
        return
    if isinstance(driver, HoldReport):
        host.holding.hold_new(row.id, driver)
    else:
        go_on(host, driver, is_new=True)


def begin(host: RunHost, row: RunRow, workflow: Workflow, started: Recorded) -> Driver | HoldReport:
    """Bring a run that was started here to its first rest; or say why a person must look at it."""
    body = started.body
    key = host.store.chain.key(body.chain, row.id)
    journal = Journal(row.id, row.generation, row.head_seq, row.head_digest, started.at, key)
    lookup = Payloads(host.store, row.id, journal.undurable)
    execution = Execution(
        workflow, run=row.id, generation=row.generation, codec=host.codec, lookup=lookup, books=books_of(started)
    )
    try:
        replayed = first_run(execution, started)
    except NotDecodable as error:
        return _arguments_do_not_fit(error)
    if replayed.spins:
        execution.evict()
        return _spins(replayed)
    beside = Beside(body.budget)
    return Driver(host, row, replayed, journal, started.at + microseconds(body.delay), beside)


# -- what the above needs to know ------------------------------------------------------------------------------------
def _arguments_do_not_fit(error: NotDecodable) -> HoldReport:
    return HoldReport("diverged", f"the arguments do not fit the code: {error}", without=["accept"])


def _spins(replayed: Replayed) -> HoldReport:
    return stuck_report(replayed.execution, SpinningWorkflow())


async def _read_beside(host: RunHost, row: RunRow, past: Past, replayed: Replayed) -> Beside:
    """Read what the driver has to know of a run besides its events."""
    beside = Beside(past.events[0].body.budget, damaged_checkpoints=past.damaged)
    if first := replayed.first_checkpoint:
        (event,) = await host.read(host.store.events, row.id, row.generation, first, first)
        beside.first_checkpoint = (first, event.digest)
    if replayed.attempts:
        begun_by = {attempts.by for attempts in replayed.attempts.values()} - {""}
        others = begun_by | replayed.execution.unseen_workers
        beside.whereabouts = await host.read(whereabouts, host.store, others)
    # Also of a run whose events name no stream: its first entry must not have to ask the store on the loop.
    beside.stream_heads = await host.read(newest_entries, host.store, row.id, row.generation)
    return beside


def _newest_note(past: Past) -> Note:
    """Return what a history says of restored backups; beside its first event only few say anything."""
    kept = past.checkpoint and Note(past.checkpoint.seq, past.checkpoint.part.life, past.checkpoint.part.restores)
    has_notes = past.checkpoint is not None or "run_restored" in past.kinds
    return newest_note(past.events if has_notes else past.events[:1], kept)


def _clock_started_at(past: "Past") -> int:
    """Return when the run's time began: at its start and after its delay, or at its newest retry."""
    is_later = past.checkpoint is not None or "run_retried" in past.kinds
    for event in reversed(past.events if is_later else ()):
        if event.kind == "run_retried":
            return int(event.at)
        if past.checkpoint is not None and event.seq == past.checkpoint.seq:
            return past.checkpoint.part.clock_started
    if (forked := past.events[0].body.forked) is not None:
        return int(forked.at)
    if (carried := past.events[0].body.carried) is not None:
        return int(carried.clock_started)
    return int(past.events[0].at) + microseconds(past.events[0].body.delay)
