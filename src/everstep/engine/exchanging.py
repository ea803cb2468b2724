"""What a driver does when workflow code answers a request, or appends to a stream."""

from typing import TYPE_CHECKING

from everstep.engine.requests import AnswerRequest
from everstep.model.crash_points import crash_point
from everstep.stores.beside import AnswerRow

if TYPE_CHECKING:
    from everstep.engine.driver import Driver


def answer(driver: "Driver", command: AnswerRequest) -> None:
    """Record an answer. Whoever asked finds it when it is durable, and so is all that it depends on."""
    journal = driver.journal
    body = journal.pack_into(command.body(), command.field)
    seq = driver.record(command.kind, "", body)
    journal.beside_events().answers.append(AnswerRow(driver.run, command.number, journal.generation, seq))
    crash_point("request.answered")
    driver.saver.save(waited_for=True)
