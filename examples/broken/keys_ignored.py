"""Wrong: the step may be repeated (it is a `repeat`), but its receiver ignores the key. After a crash it mails again.

    everstep crashtest keys_ignored.py '"ann"' --files outbox.txt

Right: `effect="once"` with a probe that looks into the outbox, or a receiver that does one key once.
"""

import everstep
from everstep import step, workflow


def mail_server(key: str, to: str) -> None:
    with open("outbox.txt", "a") as outbox:  # it takes the key and does not look at it
        outbox.write(f"to {to}\n")


@step
def send(to: str) -> str:
    mail_server(everstep.key(), to)  # the mistake
    return f"sent to {to}"


@workflow
def greet(name: str) -> str:
    return send(name)
