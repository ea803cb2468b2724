"""What a driver does when the code asks for something that is not a step, and not its end."""

from typing import TYPE_CHECKING

from everstep.engine import checkpointing, exchanging
from everstep.engine.checkpoints import TakeCheckpoint
from everstep.engine.commands import (
    CancelChild,
    CancelStep,
    ChildCall,
    Command,
    PublishValue,
    StartTimer,
)
from everstep.engine.requests import AnswerRequest
from everstep.engine.streaming import AppendEntry
from everstep.engine.witnessing import TakeWitness
from everstep.model import events as ev
from everstep.model.crash_points import crash_point

if TYPE_CHECKING:
    from everstep.engine.driver import Driver


def perform(driver: "Driver", command: Command) -> None:
    """Record what the code asked for, and do it when the output-commit rule allows."""
    if isinstance(command, TakeCheckpoint):
        checkpointing.record(driver, command)
        return
    if driver.budgets is not None and isinstance(command, ChildCall):
        driver.budgets.ask_for_child(command)
        return
    if isinstance(command, StartTimer):
        timer = command.timer
        # By the store's clock now: the run's own events may be ahead of it, if they were written by a wrong clock.
        timer.deadline = driver.app.clock.now() + timer.duration
        driver.deadlines.add(timer.deadline, "timer", command.call)
    elif isinstance(command, CancelStep):
        driver.attempts.forget(command.target.call)
    elif isinstance(command, ChildCall):
        driver.children.start(command)
    elif isinstance(command, PublishValue):
        driver.publish(command.name, command.payload)
    elif isinstance(command, CancelChild):
        driver.children.cancel(command.target.run)
    elif isinstance(command, AnswerRequest):
        exchanging.answer(driver, command)
        return
    elif isinstance(command, AppendEntry):
        driver.attempts.bodies.streams_of_run().append(command)
        return
    body = command.body()
    if isinstance(command, PublishValue) or command.kind == "approval_asked":
        body = driver.journal.pack_into(body, "value")
    elif isinstance(command, TakeWitness):
        body = driver.journal.pack_into(body, "fact")
    elif command.kind == "graph_moved":
        body = driver.journal.pack_into(body, "items")
    seq = driver.record(command.kind, command.step, body)
    if command.kind == "graph_moved":
        crash_point("graph.moved")
    if isinstance(command, ChildCall):
        driver.saver.when_durable(seq, lambda: driver.app.adopt(command.run))
    else:
        driver.saver.save(waited_for=False)


def record_patches(driver: "Driver") -> None:
    """Record the answers to `patched` that the code has got since the last time."""
    for name in driver.execution.new_patches:
        driver.record("patched", "", ev.Patched(name, driver.execution.patches[name]))
    driver.execution.new_patches = ()
    driver.saver.save(waited_for=False)
