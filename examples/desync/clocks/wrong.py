"""An agent that keeps summaries of notes, and renews those whose note has changed. Its record is `record.json`.

    python at.py 11:30 edit.py lamp "40 euros"                 # a note
    CRASH_AT="indexed lamp" python at.py 12:00 wrong.py        # dies by SIGKILL when it has indexed it
    python at.py 12:01 wrong.py                                # goes on by its record

Why it goes wrong stands in docs/desync.md.
"""

import json
import os
import signal
import time
from pathlib import Path

RECORD = Path("record.json")


def crash(place: str) -> None:
    """Die here, as by a power cut, if the environment says so."""
    if os.environ.get("CRASH_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def ask_model(text: str) -> str:
    return f"in short: {text}"  # here you call your model


def save(indexed: dict[str, float]) -> None:
    beside = Path("record.tmp")
    beside.write_text(json.dumps(indexed))
    os.replace(beside, RECORD)


def index() -> None:
    indexed = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    Path("index").mkdir(exist_ok=True)
    for note in sorted(Path("notes").iterdir()):
        if note.stat().st_mtime <= indexed.get(note.name, 0):
            print(f"{note.name}: no change")
            continue
        began = time.time()  # taken before the note is read: what is written meanwhile is newer
        Path("index", note.name).write_text(ask_model(note.read_text()))
        indexed[note.name] = began
        save(indexed)
        print(f"{note.name}: indexed")
        crash(f"indexed {note.name}")


if __name__ == "__main__":
    index()
