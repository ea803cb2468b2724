"""An agent that writes letters to readers and sends them. Its record is `state.json`.

    CRASH_AT="saving cleo" python wrong.py   # dies by SIGKILL in the middle of writing its record
    python wrong.py                          # goes on by its record
    cat outbox.txt                           # the world that it acts on

Why it goes wrong stands in docs/desync.md.
"""

import json
import os
import signal
from dataclasses import asdict, dataclass

READERS = ["ann", "bo", "cleo", "dan"]


@dataclass
class Letter:
    reader: str
    text: str


def crash(place: str) -> None:
    """Die here, as by a power cut, if the environment says so."""
    if os.environ.get("CRASH_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def ask_model(reader: str) -> Letter:
    return Letter(reader, f"Dear {reader}! " + "The sea is calm tonight. " * 200)  # here you call your model


def send(letter: Letter) -> None:
    with open("outbox.txt", "a") as outbox:
        outbox.write(f"{letter.reader}: {letter.text[:20]}\n")


def encode(letter: Letter) -> dict[str, str]:
    crash(f"saving {letter.reader}")
    return asdict(letter)


def save(sent: list[Letter]) -> None:
    with open("state.json", "w") as file:
        json.dump(sent, file, default=encode)


def load() -> list[Letter]:
    try:
        with open("state.json") as file:
            return [Letter(**one) for one in json.load(file)]
    except FileNotFoundError:
        return []
    except ValueError:  # the letters must go out, whatever is the matter with a file
        print("state.json cannot be read; I begin anew")
        return []


def send_letters() -> None:
    sent = load()
    for reader in READERS:
        if reader not in [letter.reader for letter in sent]:
            letter = ask_model(reader)
            send(letter)
            print("sent to", reader)
            sent.append(letter)
            save(sent)


if __name__ == "__main__":
    send_letters()
