"""A run that was started here: there is no past, and nothing to claim."""

from everstep.engine.code.execution import Execution
from everstep.engine.code.loop import SpinningWorkflow
from everstep.engine.code.replay import first_run
from everstep.engine.code.workflow import Workflow
from everstep.engine.history.clock import microseconds
from everstep.engine.history.journal import Journal
from everstep.engine.history.verify import Recorded
from everstep.engine.run.drive import go_on
from everstep.engine.run.driver import Beside, Driver
from everstep.engine.run.holds import HoldReport, arguments_report, stuck_report
from everstep.engine.run.host import RunHost
from everstep.engine.run.resume import Payloads, books_of
from everstep.errors import NotDecodable
from everstep.model.untrusted import is_refusal
from everstep.stores.protocol import RunRow


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
        return arguments_report(error)
    if replayed.spins:
        execution.evict()
        return stuck_report(execution, SpinningWorkflow())
    beside = Beside(body.budget)
    return Driver(host, row, replayed, journal, started.at + microseconds(body.delay), beside)
