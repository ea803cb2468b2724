"""Runs a script on a machine whose clock shows another time.

    python at.py 12:00 wrong.py                    # it is 12:00 when the script begins, and the clock goes on
    python at.py 12:00 --then 11:00 ask_wrong.py   # and when the script has said something, it is set back to 11:00

Only `time.time` of that one process is changed.
"""

import argparse
import builtins
import os
import runpy
import sys
import time
from datetime import UTC, datetime


def moment(text: str) -> float:
    return datetime.fromisoformat(f"2026-01-05T{text}").replace(tzinfo=UTC).timestamp()


class Clock:
    def __init__(self, at: float) -> None:
        self.set(at)

    def set(self, at: float) -> None:
        self._offset = at - time.monotonic()

    def time(self) -> float:
        return time.monotonic() + self._offset


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("time", type=moment)
    parser.add_argument("--then", type=moment)
    parser.add_argument("script")
    given, words = parser.parse_known_args()
    clock, say = Clock(given.time), builtins.print

    def say_and_set_back(*text: object) -> None:
        say(*text, flush=True)
        if given.then:
            clock.set(given.then)
            os.write(1, f"(the clock is set to {datetime.fromtimestamp(given.then, UTC):%H:%M})\n".encode())
            given.then = None

    builtins.print = say_and_set_back
    time.time, time.time_ns = clock.time, lambda: int(clock.time() * 1e9)
    sys.argv = [given.script, *words]
    runpy.run_path(given.script, run_name="__main__")
