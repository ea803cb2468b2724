"""`continue_as`: the same run goes on with a fresh history, a new *generation* of it.

The code ends, with the arguments of the next generation. Then `run_continued`, the last event of the old history, and
`run_started`, the first of the new one, are written in one transaction: a crash leaves either the old generation, whose
code says the same again, or the new one. What the run has beside its code is carried over in the `run_started`; the
inbox stays as it is, so a signal or cancel that comes meanwhile is taken by the new generation.
"""

import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from everstep.effects.surroundings import persons_line
from everstep.effects.witnesses import recipe_of
from everstep.engine.checkpoints import KeptFact, under_way
from everstep.engine.execution import current_execution
from everstep.engine.generations import Continue, ContinueRun
from everstep.engine.saga import cannot_be_carried
from everstep.engine.starting import Origin, continued_run
from everstep.errors import Misuse
from everstep.model.carried import Carried
from everstep.model.crash_points import crash_point
from everstep.model.digests import derived_key

if TYPE_CHECKING:
    from everstep.engine.driver import Driver
    from everstep.engine.execution import Execution

STOPPING = ("cancel_requested", "rollback_requested")
UNDOABLE_MAX: Final = 1000
"""So many completed steps with a compensation are carried over at most: each new history begins with them."""


def continue_as(*args: Any) -> NoReturn:
    """End this history and go on as the same run with a fresh one: the workflow is called anew, with these arguments.

        @workflow
        async def watch(seen: int) -> None:
            for _ in range(1000):
                seen += await look()
            everstep.continue_as(seen)

    It never returns. The run keeps its id, its tags, its timeout, its budget and what it has used of it, what it
    published, the facts that it remembers (`expect`), and signals and requests that nobody has received. A request
    that was taken has to be answered first. Its streams go on. Nothing else may be under way: a step, timer,
    `receive`, task or child that was begun and not awaited is `Misuse`. Completed steps with a compensation are undone
    as well when a later generation fails or is rolled back; so they must be declared steps, and what they are given
    must be stored: a bound method, or one with `Live` arguments, is `Misuse`.
    """
    execution = current_execution("everstep.continue_as()")
    execution.require_live()
    source = persons_line(sys._getframe(1))
    _refuse(execution, f"{source} — " if source else "")
    workflow = execution.workflow
    raise Continue(execution.codec.encode_arguments(workflow.signature, args, {}, workflow.name))


def _refuse(execution: "Execution", at: str) -> None:
    """Raise `Misuse` if the run has anything that a fresh history could not take along."""
    if found := under_way(execution):
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise Misuse(
            f"{at}everstep.continue_as() with something else under way ({listed}): a fresh history would not know of "
            "it. Await it or cancel it before, and call continue_as from the workflow's own task."
        )
    _refuse_undoable(execution, at)
    for subject, taken in execution.witnesses.items():
        if taken.judge is not None or recipe_of(taken.witness) is None:
            raise Misuse(
                f"{at}everstep.continue_as() of a run that remembers {subject}, which could not be observed again, or "
                "not judged, without the code that expects it. `release` it before, and `expect` it anew."
            )


def _refuse_undoable(execution: "Execution", at: str) -> None:
    """Raise `Misuse` if a later generation could not undo what was done, or would have too much of it to carry."""
    done = execution.saga.completed
    for one in done.values():
        if why := cannot_be_carried(one):
            raise Misuse(
                f"{at}everstep.continue_as() after {one.title}, which has a compensation and {why}: only this history "
                "could undo it. Do such steps in a child run, and await it."
            )
    if len(done) > UNDOABLE_MAX:
        raise Misuse(
            f"{at}everstep.continue_as() with {len(done)} completed steps that have a compensation: each history would "
            f"begin with all of them, and {UNDOABLE_MAX} is the most. Do such steps in child runs, and await them."
        )


def record(driver: "Driver", command: ContinueRun) -> None:
    """Record the end of this generation, and with it the beginning of the next."""
    unapplied = [(kind, body) for _, _, kind, body, _ in driver.execution.unapplied]
    if any(kind in STOPPING for kind, _ in unapplied):
        return  # it was recorded before the code's end: the code is told, and what follows from that counts
    crash_point("run.continue")
    execution, journal, row = driver.execution, driver.journal, driver.row
    for kind, body in unapplied:
        if kind in ("signal_received", "request_received"):
            execution.let_arrive(kind, body)
    driver.attempts.bodies.cancel_all()
    driver.children.cancel_those_that_end_with_it()
    driver.ending = command.kind
    driver.record(command.kind, "", command.body())
    driver.renewal = continued_run(
        execution.workflow,
        row,
        command.arguments,
        at=journal.at,
        owner=driver.app.worker,
        randomness=driver.app.randomness,
        origin=Origin(
            driver.app.store.chain.writing,
            life=driver.app.life,
            entropy=derived_key(execution.entropy, f"#generation {row.generation + 1}"),
        ),
        budget=driver.allotment,
        carried=_carried(driver),
    )
    driver.saver.save(waited_for=True)


def _carried(driver: "Driver") -> Carried:
    execution = driver.execution
    carried = Carried(driver.journal.digest.hex(), driver.row.created_at, driver.clock_started)
    carried.signals = execution.receiving.unreceived()
    if execution.receiving.requests is not None:
        carried.requests = execution.receiving.requests.untaken()
    carried.facts = {
        subject: msgspec.Raw(msgspec.json.encode(KeptFact.of(taken))) for subject, taken in execution.witnesses.items()
    }
    carried.published = driver.published
    carried.caution, carried.unseen_workers = execution.caution, sorted(execution.unseen_workers)
    carried.uncompensated = execution.saga.remembered()
    carried.undoable = execution.saga.carried(execution, driver.journal.pack)
    if execution.books is not None:
        carried.accounts = execution.books.head.carried()
    return carried
