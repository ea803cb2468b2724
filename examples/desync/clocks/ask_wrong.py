"""An agent that asks a person and waits for the answer, but not for ever. Its record is `record.json`.

    CRASH_AT="look 15" python at.py 12:00 --then 11:00 ask_wrong.py   # dies by SIGKILL after one and a half seconds
    python at.py 11:01 ask_wrong.py                                   # goes on by its record

Why it goes wrong stands in docs/desync.md.
"""

import json
import os
import signal
import time
from pathlib import Path

PATIENCE = 0.5  # seconds; a day in real life
RECORD = Path("record.json")


def crash(place: str) -> None:
    """Die here, as by a power cut, if the environment says so."""
    if os.environ.get("CRASH_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def ask() -> str:
    if not RECORD.exists():  # once, so that a restart does not prolong the wait
        RECORD.write_text(json.dumps({"deadline": time.time() + PATIENCE}))
    deadline = json.loads(RECORD.read_text())["deadline"]
    looks, said = 0, None
    while (left := deadline - time.time()) > 0:
        if Path("answer.txt").exists():
            return Path("answer.txt").read_text()
        if said != round(left / 60):
            said = round(left / 60)
            print(f"I wait for {said} more minutes")
        time.sleep(0.1)
        looks += 1
        crash(f"look {looks}")
    return "nobody answered in time"


if __name__ == "__main__":
    print(ask())
