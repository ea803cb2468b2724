"""The same support agent with Everstep: each effect is a step, and each step says what it promises.

    EVERSTEP_CRASH_AT=body.after:5 python right.py   # dies by SIGKILL when bo has got the mail and nobody noted it
    python right.py                                  # goes on by its history
    cat bank.txt outbox.txt                          # the world that it acts on

Kill it elsewhere, and everybody is still paid once and told once.
"""

from pathlib import Path

import everstep
from everstep import Done, NotDone, step, workflow

TICKETS = {"ann": 20, "bo": 15, "cleo": 90}


def add(path: str, line: str, key: str) -> None:
    """The outside: a bank, a mail server and a list of tickets that note the key of what they did."""
    with open(path, "a") as file:
        file.write(f"{line}  [{key[:8]}]\n")


def has(path: str, key: str) -> bool:
    return Path(path).exists() and f"[{key[:8]}]" in Path(path).read_text()


def pay_once(line: str, key: str) -> None:
    """The bank's side, as payment services do it: a request whose key is known was made already."""
    if not has("bank.txt", key):
        add("bank.txt", line, key)


@step  # "repeat": safe to ask for again, because the bank knows the key
def refund(customer: str, amount: int) -> None:
    pay_once(f"{amount} to {customer}", everstep.key())


def find_mail(key: str, customer: str, amount: int) -> Done | NotDone:
    return Done(None) if has("outbox.txt", key) else NotDone()


@step(effect="once", probe=find_mail)  # never repeated by itself; when in doubt, the mail server is asked
def mail(customer: str, amount: int) -> None:
    add("outbox.txt", f"{customer}: your {amount} are on their way", everstep.key())


@step  # "repeat": closing a closed ticket changes nothing
def close(customer: str) -> None:
    if not has("closed.txt", everstep.key()):
        add("closed.txt", customer, everstep.key())


@workflow
def settle(tickets: dict[str, int]) -> int:
    for customer, amount in tickets.items():
        refund(customer, amount)
        mail(customer, amount)
        close(customer)
        print("settled", customer)
    return len(tickets)


if __name__ == "__main__":
    everstep.run(settle, TICKETS, id="tickets-1")
