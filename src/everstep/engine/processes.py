"""Whether the process behind a worker has ended: that is seen by the kernel of its machine, or not at all.

A session with a server may end while the process behind it lives: it was stopped, or its network was cut. So a lost
session is no proof that a process cannot act any more; only the machine on which it ran can tell.
"""

import os
from typing import Final

from everstep.engine.presence import machine

ENDED_STATES: Final = frozenset("ZX")
"""Of a process that is only there until its parent has taken note of its end."""


def is_of_this_process(worker: str) -> bool:
    """Tell whether a worker is, or was, this process."""
    return _number(worker) == os.getpid()


def has_ended(worker: str) -> bool:
    """Tell whether the process of a worker has provably ended. Of another machine's nobody here can say."""
    number = _number(worker)
    if number is None or os.name == "nt":
        return False
    try:
        os.kill(number, 0)
        with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except (OSError, IndexError):
        return False
    return state in ENDED_STATES


def _number(worker: str) -> int | None:
    """Return the number of a worker's process; None if it is not of this machine."""
    parts = worker.rsplit("-", 3)
    return int(parts[1]) if len(parts) == 4 and parts[2] == machine() and parts[1].isdigit() else None
