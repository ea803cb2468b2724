"""Parts of the engine that most runs never need. Each is loaded when the first run needs it, so others start sooner.

What stands here is called once per run, or when something rare happens, never for each step: the import statement in
each function is not free, although it finds the module in place from the second time on.
"""

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextvars import Context

    from everstep.codec import Arguments
    from everstep.engine.app import App
    from everstep.engine.attempts import StepAttempts
    from everstep.engine.bodies import Attempt, Bodies
    from everstep.engine.books import Books
    from everstep.engine.budgets import Budgets
    from everstep.engine.checkpoints import Checkpoint, Checkpoints
    from everstep.engine.children import Children, RecentEnds
    from everstep.engine.commands import Command, Difference, EndRun, StepCall
    from everstep.engine.crossing import Kept, KeptOutcome
    from everstep.engine.doubts import Doubts
    from everstep.engine.driver import Driver
    from everstep.engine.due import Attempts
    from everstep.engine.execution import Execution
    from everstep.engine.handles import Run
    from everstep.engine.history import Recorded
    from everstep.engine.holding import HoldReport
    from everstep.engine.inbox import Inbox, Told
    from everstep.engine.journal import Journal
    from everstep.engine.keys import Keys
    from everstep.engine.loop import WorkflowLoop
    from everstep.engine.saga import Saga
    from everstep.engine.spending import Charging, Spending
    from everstep.engine.streaming import Streams
    from everstep.engine.workflow import Workflow
    from everstep.errors import Damaged
    from everstep.model import events as ev
    from everstep.model.carried import Carried, CarriedStep
    from everstep.stores.beside import EntryRow
    from everstep.stores.protocol import Delivery, RunRow, Store


# -- starting, otherwise than as a new run of this app -------------------------------------------------------------
def start_in(
    app: "App", target: "Workflow", args: "Sequence[Any]", policy: str, transaction: Any, **options: Any
) -> "Run[Any]":
    """Start a run in a transaction of the caller's."""
    from everstep.engine.outbox import start_in

    return start_in(app, target, args, policy, transaction, **options)


async def existing_run(app: "App", row: "RunRow", target: "Workflow", arguments: "Arguments", policy: str) -> None:
    """Do what the caller of `start` wants with a run that is there already."""
    from everstep.engine.existing import existing_run

    await existing_run(app, row, target, arguments, policy)


# -- parts of a driver, for the runs that have them ----------------------------------------------------------------
def budgets_of(driver: "Driver", books: "Books", attempts: "dict[int, Attempts]") -> "Budgets":
    """Return what looks after a run's budget."""
    from everstep.engine.budgets import Budgets

    return Budgets(driver, books, attempts)


def books_of(started: "ev.RunStarted", at: int) -> "Books":
    """Return the books of a run that was started with a budget."""
    from everstep.engine.books import Books

    return Books(started, at)


def inbox_of(driver: "Driver") -> "Inbox":
    """Return what takes a run's deliveries."""
    from everstep.engine.inbox import Inbox

    return Inbox(driver)


def told_of(store: "Store", deliveries: "Sequence[Delivery]", recent: "RecentEnds") -> "Told":
    """See `inbox`."""
    from everstep.engine.inbox import told_of

    return told_of(store, deliveries, recent)


def children_of(driver: "Driver") -> "Children":
    """Return what looks after a run's children."""
    from everstep.engine.children import Children

    return Children(driver)


def doubts_of(driver: "Driver", attempts: "StepAttempts", known: "dict[int, Attempts]") -> "Doubts":
    """Return what settles steps of which nobody knows whether they happened."""
    from everstep.engine.doubts import Doubts

    return Doubts(driver, attempts, known)


def keys_of(driver: "Driver", attempts: "StepAttempts", known: "dict[int, Attempts]") -> "Keys":
    """Return what looks after steps with `key=`."""
    from everstep.engine.keys import Keys

    return Keys(driver, attempts, known)


def streams_of(driver: "Driver") -> "Streams":
    """Return what writes to a run's streams."""
    from everstep.engine.streaming import Streams

    return Streams(driver)


def newest_entries(store: "Store", run: str, generation: int) -> "dict[str, EntryRow]":
    """See `streaming`."""
    from everstep.engine.streaming import newest_entries

    return newest_entries(store, run, generation)


def charging_of(driver: "Driver") -> "Charging":
    """Return what writes down the charges of running bodies."""
    from everstep.engine.spending import Charging

    return Charging(driver)


def new_spending(*, uses_nothing: bool = False) -> "Spending":
    """Return what one attempt was charged: nothing yet."""
    from everstep.engine.spending import Spending

    return Spending(uses_nothing=uses_nothing)


def new_saga() -> "Saga":
    """Return what a run can undo: nothing yet."""
    from everstep.engine.saga import Saga

    return Saga()


# -- what code asks for, beside steps ------------------------------------------------------------------------------
def perform(driver: "Driver", command: "Command") -> None:
    """Do what the code asked for."""
    from everstep.engine.performing import perform

    perform(driver, command)


def record_patches(driver: "Driver") -> None:
    """Record the newest answers to `patched`."""
    from everstep.engine.performing import record_patches

    record_patches(driver)


def charge_usage(books: "Books | None", call: int, nanos: int | None, tokens: int | None, source: str) -> "Command":
    """Return the command that counts what workflow code used by itself."""
    from everstep.engine.books import charge_usage

    return charge_usage(books, call, nanos, tokens, source)


def start_atomic(driver: "Driver", bodies: "Bodies", attempt: "Attempt", context: "Context", *, cut_off: bool) -> None:
    """Start an attempt at an atomic step."""
    from everstep.engine.transacting import start

    start(driver, bodies, attempt, context, cut_off=cut_off)


def undecided(error: BaseException) -> Any:
    """Return the error if it says that nobody knows whether an atomic step's transaction was committed, else None."""
    from everstep.effects.atomic import Undecided

    return error if type(error) is Undecided else None


def ask_and_call(execution: "Execution", tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a person approve a call of a tool, and make it."""
    return execution.loop.create_task(tool.approved(execution, args, kwargs))


# -- generations and checkpoints -----------------------------------------------------------------------------------
def take_along(execution: "Execution", carried: "Carried") -> None:
    """Give a new generation what the one before had."""
    from everstep.engine.generations import take_along

    take_along(execution, carried)


def record_continued(driver: "Driver", command: "EndRun") -> None:
    """The code goes on with a fresh history."""
    from everstep.engine.continuing import record
    from everstep.engine.generations import ContinueRun

    assert isinstance(command, ContinueRun)
    record(driver, command)


def report_damage(driver: "Driver") -> None:
    """Note the checkpoints that recovery had to pass over."""
    from everstep.engine.checkpointing import report_damage

    report_damage(driver)


def checkpoints_of(taken: set[int], checkpoint: "Checkpoint | None") -> "Checkpoints":
    """Return what a replay knows about checkpoints."""
    from everstep.engine.checkpoints import Checkpoints

    return Checkpoints(taken, checkpoint)


def is_jump(command: "Command") -> bool:
    """Tell whether the code has come to the place from which it goes on with a checkpoint."""
    from everstep.engine.checkpoints import Jump

    return isinstance(command, Jump)


# -- retries and judgements in a replay ----------------------------------------------------------------------------
def new_kept() -> "Kept":
    """Return the outcomes that a retry goes back over: none yet."""
    from everstep.engine.crossing import Kept

    return Kept()


def kept_by(events: "Sequence[Recorded]", retried: "Recorded") -> "list[KeptOutcome]":
    """Return the outcomes that a retry goes back over."""
    from everstep.engine.crossing import kept_by

    return kept_by(events, retried)


def note_judgement(execution: "Execution", body: "ev.DriftJudged") -> None:
    """Remember what was said about a change of the outside."""
    from everstep.engine.judging import note_judgement

    note_judgement(execution, body)


# -- undoing, holding, forced ends ---------------------------------------------------------------------------------
def begin_compensation(driver: "Driver", started: "ev.CompensationStarted") -> None:
    """Begin to undo what a run did."""
    from everstep.engine.compensating import begin

    begin(driver, started)


def note_undoing(driver: "Driver") -> None:
    """See `compensating`: also for what an earlier release has begun to undo."""
    from everstep.engine.compensating import note_undoing

    note_undoing(driver, driver.execution.saga.completed)


def note_compensated(journal: "Journal", call: int, key: str, carried: "CarriedStep | None" = None) -> None:
    """A step is undone."""
    from everstep.engine.compensating import note_compensated

    note_compensated(journal, call, key, carried)


def with_undoing(report: "HoldReport", driver: "Driver") -> "HoldReport":
    """Let a report say what can be undone."""
    from everstep.engine.compensating import with_undoing

    return with_undoing(report, driver)


def stuck_report(execution: "Execution", error: BaseException | None) -> "HoldReport":
    """The code waits for something that can never happen, or does not come to rest."""
    from everstep.engine.holding import stuck_report

    return stuck_report(execution, error)


def exhausted_report(call: "StepCall", attempt: int, error: BaseException) -> "HoldReport":
    """A step failed as often as its policy allows."""
    from everstep.engine.holding import exhausted_report

    return exhausted_report(call, attempt, error)


def poisoned_report(deaths: int, cause: str) -> "HoldReport":
    """Whatever drives this run dies, or is stopped."""
    from everstep.engine.holding import poisoned_report

    return poisoned_report(deaths, cause)


def diverged_report(differences: "Sequence[Difference]") -> "HoldReport":
    """The code and the history disagree."""
    from everstep.engine.holding import diverged_report

    return diverged_report(differences)


def undecodable_report(error: BaseException) -> "HoldReport":
    """The arguments of a run are not what its code takes."""
    from everstep.engine.holding import HoldReport

    return HoldReport("diverged", f"the arguments do not fit the code: {error}", without=["accept"])


def damaged_report(error: "Damaged", store: "Store", row: "RunRow") -> "HoldReport":
    """The history does not match its digests."""
    from everstep.engine.diagnosis import diagnose
    from everstep.engine.holding import damaged_report

    return damaged_report(error, diagnose(store, row))


def force_end(driver: "Driver") -> None:
    """End a run without its code."""
    from everstep.engine.forced_ends import force

    force(driver)


def unwind(loop: "WorkflowLoop", context: "Context", run: str) -> None:
    """Let code go that has not come to its end."""
    from everstep.engine.unwinding import unwind

    unwind(loop, context, run)


def refuse(loop: "WorkflowLoop") -> NoReturn:
    """Raise `Evicted` in code that is being unwound, or leave it where it is."""
    from everstep.engine.unwinding import refuse

    refuse(loop)
