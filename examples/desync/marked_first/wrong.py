"""A refactoring agent that renames `fetch` to `price_of` in three files. Its record is `record.json`.

    CRASH_AT="marked c.py" python wrong.py   # dies by SIGKILL when it has marked c.py as done
    python wrong.py                          # goes on by its record

Work on a copy of this folder: the three files lie in it. Why it goes wrong stands in docs/desync.md.
"""

import json
import os
import signal
from pathlib import Path

FILES = ["a.py", "b.py", "c.py"]
RECORD = Path("record.json")


def crash(place: str) -> None:
    """Die here, as by a power cut, if the environment says so."""
    if os.environ.get("CRASH_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def ask_model(source: str) -> str:
    return source.replace("fetch", "price_of")  # here you call your model


def save(done: list[str]) -> None:
    beside = Path("record.tmp")
    beside.write_text(json.dumps(done))
    os.replace(beside, RECORD)


def refactor() -> None:
    done = json.loads(RECORD.read_text()) if RECORD.exists() else []
    for path in FILES:
        if path in done:
            continue
        source = ask_model(Path(path).read_text())
        # The record comes first: a file must never be given to the model again after it was rewritten.
        done.append(path)
        save(done)
        crash(f"marked {path}")
        Path(path).write_text(source)
        print("wrote", path)
    print("done:", *done)


if __name__ == "__main__":
    refactor()
