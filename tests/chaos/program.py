"""What the workers of the chaos tests serve: runs with every contract, a gather, a timer, a signal, a child, retries.

`EVERSTEP_LEDGER` is the address of the ledger, `CHAOS_FOLDER` the place of its book and of the marks: each process has
a file in which it writes a sign when an effect of its begins, and another when it is over. So whoever kills it can tell
whether an effect was open at that instant, without asking it. `CHAOS_SHOP` is the URL of a database for atomic steps,
and `CHAOS_TABLE` a table in it, which is on the store's own server.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import everstep
from everstep import STORE, Done, NotDone, Retry, Unknown, step, transaction, workflow
from everstep.testing.ledger import LEDGER_SETTING, apply, ask

FOLDER = "CHAOS_FOLDER"
PATIENT = Retry(attempts=100, first=0.02, factor=1.0, jitter=0.0)
BEGUN, OVER = b"+", b"-"
_marks: dict[int, int] = {}


def ledger() -> str:
    return os.environ[LEDGER_SETTING]


def mark(sign: bytes) -> None:
    """Write a sign into the marks of this process."""
    file = _marks.get(os.getpid())
    if file is None:
        path = Path(os.environ[FOLDER]) / f"marks-{os.getpid()}"
        file = _marks[os.getpid()] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, sign)


@contextmanager
def open_effect() -> Iterator[None]:
    mark(BEGUN)
    try:
        yield
    finally:
        mark(OVER)


def send(effect: str, argument: object) -> str:
    with open_effect():
        return apply(ledger(), effect, everstep.key(), argument)


@step(effect="read")
async def look(number: int) -> str:
    return await asyncio.to_thread(ask, ledger(), "look", everstep.key(), number)


@step(retry=PATIENT)
async def charge(amount: int) -> str:
    """The ledger loses its first answer."""
    return await asyncio.to_thread(send, "charge", amount)


@step(retry=PATIENT)
async def pack(number: int) -> str:
    return await asyncio.to_thread(send, "pack", number)


def ask_about(key: str, *arguments: object) -> Done | NotDone | Unknown:
    """Ask the ledger's own account. A request that it has, and has not applied yet, may still be applied."""
    path = Path(os.environ[FOLDER]) / "ledger" / "ledger.jsonl"
    known = key.encode()
    entries = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    lines = [json.loads(line) for line in entries if known in line]
    kinds = {line["kind"]: line for line in lines if line["key"] == key}
    if "applied" in kinds:
        return Done(f"{kinds['applied']['effect']}-{kinds['applied']['digest'][:12]}")
    return Unknown("it is under way") if kinds else NotDone()


@step(effect="once", probe=ask_about, settle=0.1, probe_for=600)
def remit(amount: int) -> str:
    """The ledger applies whatever is sent twice once more. The effect is not sent at once: a process may be cut off."""
    with open_effect():
        time.sleep(0.05)
        return apply(ledger(), "remit", everstep.key(), amount)


@step(effect="once", probe=ask_about, settle=0.1, probe_for=600)
def remit_slowly(amount: int, seconds: float, gate: str = "") -> str:
    """It takes some time until the outside hears of it, counted from when a file is there, if one is named."""
    with open_effect():
        while gate and not (Path(os.environ[FOLDER]) / gate).exists():
            time.sleep(0.01)
        time.sleep(seconds)
        return apply(ledger(), "remit_slowly", everstep.key(), amount)


@step(retry=PATIENT)
def stamp(text: str) -> str:
    return send("stamp", text)


def enter(connection: Any, effect: str, number: int) -> str:
    """Write down an effect in the database itself: what is there was applied. The transaction is open for a while."""
    with open_effect():
        row = (effect, everstep.key(), number)
        connection.execute(f"INSERT INTO {os.environ['CHAOS_TABLE']} VALUES (%s, %s, %s)", row)
        connection.execute("SELECT pg_sleep(0.05)")
    return f"{effect} {number}"


@transaction(os.environ.get("CHAOS_SHOP", STORE), retry=PATIENT)
def book(connection: Any, number: int) -> str:
    return enter(connection, "book", number)


@transaction(STORE, retry=PATIENT)
def keep(connection: Any, number: int) -> str:
    return enter(connection, "keep", number)


@workflow
async def chaos_child(number: int) -> str:
    return await pack(number)


@workflow
async def chaos_order(number: int) -> dict[str, str | list[str]]:
    found = await asyncio.gather(look(number), look(number + 1))
    packed, paid = await asyncio.gather(chaos_child(number), charge(number))
    await asyncio.sleep(0.05)
    remitted, booked = await asyncio.gather(asyncio.to_thread(remit, number), asyncio.to_thread(book, number))
    word = await everstep.receive("word", str)
    stamped, kept = await asyncio.gather(asyncio.to_thread(stamp, word), asyncio.to_thread(keep, number))
    given = {"found": found, "packed": packed, "paid": paid, "remitted": remitted, "stamped": stamped}
    return given | {"booked": booked, "kept": kept}


@workflow
async def chaos_slow(amount: int, seconds: float, gate: str = "") -> str:
    return await asyncio.to_thread(remit_slowly, amount, seconds, gate)
