"""A program that sends a mail, once. It is killed inside of the step if a file says so: `die before` or `die after`."""

import json
import os
import signal
from pathlib import Path

import everstep
from everstep import Budget, Done, Fatal, NotDone, Retry, step, workflow
from everstep.testing.ledger import apply

LEDGER = os.environ.get("LEDGER_URL", "")
ENTRIES = Path(os.environ.get("LEDGER_ENTRIES", "nowhere"))


def die_if(place: str) -> None:
    if Path("die").exists() and Path("die").read_text() == place:
        Path("die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def find_mail(key: str, to: str, text: str) -> Done | NotDone:
    lines = [json.loads(line) for line in ENTRIES.read_text().splitlines()] if ENTRIES.exists() else []
    sent = [line for line in lines if line["kind"] == "applied" and line["key"] == key]
    return Done("found in the outbox") if sent else NotDone()


def send(to: str, text: str) -> str:
    die_if("before")
    number = apply(LEDGER, "send_mail", everstep.key(), [to, text])
    die_if("after")
    return number


send_mail = step(send, name="send_mail", effect="once")
send_probed = step(send, name="send_mail", effect="once", probe=find_mail, probe_for=0.0)


@workflow
def mailing(to: str, text: str) -> str:
    return send_mail(to, text)


@workflow
def mailing_probed(to: str, text: str) -> str:
    return send_probed(to, text)


def recall(number: str, to: str, text: str) -> None:
    apply(LEDGER, "recall", everstep.key(), [number])


def unbook(number: str, city: str) -> None:
    die_if("unbooking")
    if Path("closed").exists():
        raise ConnectionError("closed today")
    apply(LEDGER, "unbook", everstep.key(), [city])


undo_booking = step(unbook, name="unbook", effect="once", not_done=(ConnectionError,), retry=Retry(then="hold"))


@step(effect="once", compensate=undo_booking)
def book(city: str) -> str:
    return apply(LEDGER, "book", everstep.key(), [city])


send_recallable = step(send, name="send_mail", effect="once", compensate=step(recall, effect="once"))


@step
def check() -> None:
    if Path("fail").exists():
        raise Fatal("no such place")


@workflow
def travelling(to: str, text: str) -> str:
    book("Oslo")
    check()
    return send_recallable(to, text)


send_priced = step(send, name="send_mail", effect="once", cost={"usd": 0.6})


@workflow(budget=Budget(usd=0.4))
def mailing_dearly(to: str, text: str) -> str:
    book("Oslo")
    return send_priced(to, text)


@workflow
def mailing_later(to: str, text: str) -> str:
    everstep.blocking.sleep(2.0)
    return send_mail(to, text)
