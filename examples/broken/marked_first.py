"""Wrong: the step writes down that it is done before it is done. Killed in between, it is never done.

    everstep crashtest marked_first.py '"ann"'

Right: do the effect, with its key, and leave it to Everstep to record that it is done.
"""

from pathlib import Path

import everstep
from everstep import step, workflow
from everstep.testing import ledger


@step
def send(to: str) -> str:
    mark = Path(f"sent-{to}")
    if mark.exists():
        return "sent"
    mark.touch()  # the mistake
    ledger.apply(ledger.offered(), "mail", everstep.key(), to)
    return "sent"


@workflow
def greet(name: str) -> str:
    return send(name)
