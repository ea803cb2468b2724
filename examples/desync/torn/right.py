"""The same agent with Everstep: its history is appended to in transactions, and each event vouches for those before it.

    EVERSTEP_CRASH_AT=store.commit.written:5 python right.py   # dies by SIGKILL in the middle of writing its history
    python right.py                                            # goes on by its history
    cat outbox.txt                                             # the world that it acts on

`flip_bit.py` damages the history.
"""

from dataclasses import dataclass
from pathlib import Path

import everstep
from everstep import Done, NotDone, step, workflow

READERS = ["ann", "bo", "cleo", "dan"]


@dataclass
class Letter:
    reader: str
    text: str


@step(effect="read")
def ask_model(reader: str) -> Letter:
    return Letter(reader, f"Dear {reader}! " + "The sea is calm tonight. " * 200)  # here you call your model


def find_letter(key: str, letter: Letter) -> Done | NotDone:
    outbox = Path("outbox.txt")
    return Done(None) if outbox.exists() and f"[{key[:8]}]" in outbox.read_text() else NotDone()


@step(effect="once", probe=find_letter)
def send(letter: Letter) -> None:
    with open("outbox.txt", "a") as outbox:
        outbox.write(f"{letter.reader}: {letter.text[:20]}  [{everstep.key()[:8]}]\n")


@workflow
def send_letters(readers: list[str]) -> int:
    for reader in readers:
        send(ask_model(reader))
        print("sent to", reader)
    return len(readers)


if __name__ == "__main__":
    try:
        everstep.run(send_letters, READERS, id="letters-1")
    except everstep.errors.RunHeld:
        raise SystemExit(3) from None  # what it is held for was logged
