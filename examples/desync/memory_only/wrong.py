"""An agent that sorts letters into folders, as a model says. Its record is `record.json`.

    CRASH_AT="moved kite.txt" python wrong.py   # dies by SIGKILL in the middle
    python wrong.py                             # goes on by its record

Work on a copy of this folder: the letters lie in it. Why it goes wrong stands in docs/desync.md.
"""

import json
import os
import signal
from pathlib import Path

from model import ask_model_where

RECORD = Path("record.json")


def crash(place: str) -> None:
    """Die here, as by a power cut, if the environment says so."""
    if os.environ.get("CRASH_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def save(moved: list[str]) -> None:
    beside = Path("record.tmp")
    beside.write_text(json.dumps(moved))
    os.replace(beside, RECORD)


def sort_letters() -> None:
    moved = json.loads(RECORD.read_text()) if RECORD.exists() else []
    letters = sorted(path.name for path in Path("inbox").iterdir() if path.name not in moved)
    plan = ask_model_where(letters)
    for name, folder in plan.items():
        Path(folder).mkdir(exist_ok=True)
        os.replace(f"inbox/{name}", f"{folder}/{name}")
        moved.append(name)
        save(moved)
        print(f"{name} -> {folder}")
        crash(f"moved {name}")


if __name__ == "__main__":
    sort_letters()
