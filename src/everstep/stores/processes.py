"""Whether a process has ended: that is seen by the kernel of its machine, or not at all.

A session with a server may end while the process behind it lives: it was stopped, or its network was cut. So a lost
session is no proof that a process cannot act any more; only the machine on which it ran can tell.
"""

import os
import socket
from functools import cache
from typing import Final

from everstep.model.digests import digest_of

ENDED_STATES: Final = frozenset("ZX")
"""Of a process that is only there until its parent has taken note of its end."""


@cache
def machine() -> str:
    """Return what names this machine since it was started, and the numbers of its processes; empty where unknown.

    Containers have numbers of their own, whatever their host is called, and so another name.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # what is mounted there shows other numbers
        numbers = os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {numbers}"
    except OSError:
        return ""


@cache
def machine_code() -> str:
    """Return a few letters for this machine, for names of workers."""
    place = machine()
    if not place:
        import uuid

        place = str(uuid.getnode())
    return digest_of(f"{socket.gethostname()} {place}".encode()).hex()[:6]


def has_ended(pid: int, where: str) -> bool:
    """Tell whether a process has provably ended: only of one on this machine that can be said.

    where: what `machine` or `machine_code` said in that process. A number that another process has got meanwhile says
    nothing.
    """
    if os.name == "nt" or not where or where not in (machine(), machine_code()):
        return False
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except (OSError, IndexError):
        return False
    return state in ENDED_STATES
