"""What bodies note in the test's own process, and what makes them wait or fail. All of it is empty when a test begins.

It is an account that is not the engine's: tests compare it with the history.
"""

from typing import Any

from everstep import step

NOTES: list[Any] = []
"""What bodies did, in order."""
KEYS: list[Any] = []
"""The keys they did it with."""
PAID: list[Any] = []
"""What was paid."""
DONE: list[Any] = []
"""What was done to the outside world, where a test notes other things as well."""
BEGUN: list[Any] = []
"""What was begun, and has perhaps not ended."""
APPLIED: list[Any] = []
"""Effects that were applied, with their keys: what a receiver outside would know."""
READS: list[Any] = []
"""What was read."""
ASKED: list[Any] = []
"""What the engine asked of a probe, a witness or a judge."""
ANSWERS: list[Any] = []
"""What they will answer, one after the other."""
GATES: dict[str, Any] = {}
"""Where a body waits until its test lets it go on."""
BROKEN: set[str] = set()
"""The names of what fails for now."""
FAILS: list[Any] = []
"""What fails next."""


def clear_ledger() -> None:
    """Let nothing be noted."""
    for one in (NOTES, KEYS, PAID, DONE, BEGUN, APPLIED, READS, ASKED, ANSWERS, GATES, BROKEN, FAILS):
        one.clear()


async def pass_gate(name: str) -> None:
    """Wait at the gate of this name, if a test has put one there."""
    if name in GATES:
        await GATES[name].wait()


async def act(what: str) -> None:
    """Note what a body does, and wait at the gate of that name."""
    NOTES.append(what)
    await pass_gate(what)


@step
async def note(text: str) -> str:
    """A step that only notes what it is given."""
    NOTES.append(text)
    return text
