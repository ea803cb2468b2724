"""A support agent that settles tickets: money back, a mail, the ticket closed. Its record is `record.json`.

    CRASH_AT="mailed bo" python wrong.py   # dies by SIGKILL when bo has got the mail
    python wrong.py                        # goes on by its record
    cat bank.txt outbox.txt                # the world that it acts on

Why it goes wrong stands in docs/desync.md.
"""

import json
import os
import signal
from pathlib import Path

TICKETS = {"ann": 20, "bo": 15, "cleo": 90}
RECORD = Path("record.json")


def crash(place: str) -> None:
    """Die here, as by a power cut, if the environment says so."""
    if os.environ.get("CRASH_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def add(path: str, line: str) -> None:
    """The outside: a bank, a mail server and a list of tickets that do what they are told."""
    with open(path, "a") as file:
        file.write(line + "\n")


def save(done: list[str]) -> None:
    beside = Path("record.tmp")
    beside.write_text(json.dumps(done))
    os.replace(beside, RECORD)


def settle(customer: str, amount: int) -> None:
    add("bank.txt", f"{amount} to {customer}")
    add("outbox.txt", f"{customer}: your {amount} are on their way")
    crash(f"mailed {customer}")
    add("closed.txt", customer)


def work() -> None:
    done = json.loads(RECORD.read_text()) if RECORD.exists() else []
    for customer, amount in TICKETS.items():
        if customer not in done:
            settle(customer, amount)
            # The record comes last, when everything has really happened.
            done.append(customer)
            save(done)
            print("settled", customer)


if __name__ == "__main__":
    work()
