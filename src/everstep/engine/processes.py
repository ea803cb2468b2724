"""Names of workers, and whether the process behind one has ended: seen by the kernel of its machine, or not at all.

A session with a server may end while the process behind it lives: it was stopped, or its network was cut. So a lost
session is no proof that a process cannot act any more; only the machine on which it ran can tell.
"""

import os
import socket
from functools import cache
from typing import Final

from everstep.model.digests import digest_of

BOOT: Final = "/proc/sys/kernel/random/boot_id"
NAMESPACE: Final = "/proc/self/ns/pid"
ENDED_STATES: Final = frozenset("ZX")
"""Of a process that is only there until its parent has taken note of its end."""


@cache
def machine() -> str:
    """Return a few letters for this machine since it was started; a container has its own."""
    try:
        place = f"{_read(BOOT)} {os.readlink(NAMESPACE)}"
    except OSError:
        import uuid

        place = f"{uuid.getnode()}"
    return digest_of(f"{socket.gethostname()} {place}".encode()).hex()[:6]


def worker_name(host: str, bits: int) -> str:
    """Return a new name for this process among the workers: where it runs, its number, and 32 random bits."""
    return f"{host[:40]}-{os.getpid()}-{machine()}-{bits:08x}"


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
        state = _read(f"/proc/{number}/stat").rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except (OSError, IndexError):
        return False
    return state in ENDED_STATES


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _number(worker: str) -> int | None:
    """Return the number of a worker's process; None if it is not of this machine."""
    parts = worker.rsplit("-", 3)
    return int(parts[1]) if len(parts) == 4 and parts[2] == machine() and parts[1].isdigit() else None
