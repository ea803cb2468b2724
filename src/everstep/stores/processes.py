"""Whether a process has ended: only the kernel of its machine can tell.

A session with a server may end while the process behind it lives: it was stopped, or its network was cut. So a lost
session does not prove that a process can no longer act.
"""

import os
import socket
import sys
from functools import cache
from typing import Final

from everstep.model.digests import digest_of
from everstep.stores.brief import refuse_when_brief

ENDED_STATES: Final = frozenset("ZX")
"""The states of a process that exists only until its parent has noticed its end, or whose first thread has ended."""
FIRST_TIME_NAMESPACE: Final = "time:[4026531834]"
"""The time namespace in which a machine starts. In any other one, start times of processes count from another moment.
"""


@cache
def machine() -> str:
    """Return a name for this machine's boot and its numbering of processes; empty where unknown.

    Containers number their processes themselves, whatever their host is called, and so get another name.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # what is mounted there shows other numbers
        numbers = os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {numbers}{_time_namespace()}"
    except OSError:
        return ""


def _time_namespace() -> str:
    try:
        times = os.readlink("/proc/self/ns/time")
    except FileNotFoundError:
        return ""  # a kernel without them
    return "" if times == FIRST_TIME_NAMESPACE else f" {times}"


@cache
def machine_code() -> str:
    """Return a short code for this machine, for names of workers."""
    place = machine()
    if not place:
        import uuid

        place = str(uuid.getnode())
    return digest_of(f"{socket.gethostname()} {place}".encode()).hex()[:10]


HOST_CHARACTERS_MAX: Final = 40
"""The maximum number of characters of a host's name in the names of its workers."""


def worker_name(host: str, bits: int) -> str:
    """Return a new name for this process among the workers: host, pid, machine, start time, and 32 random bits."""
    return f"{host[:HOST_CHARACTERS_MAX]}-{os.getpid()}-{machine_code()}-{_own_start_time(os.getpid()):x}.{bits:08x}"


def is_of_this_process(worker: str) -> bool:
    """Return True if a worker is, or was, this process."""
    pid, where, started = _place(worker)
    return (pid, where) == (os.getpid(), machine_code()) and started in (0, _own_start_time(pid))


def is_of_this_machine(worker: str) -> bool:
    """Return True if a worker is, or was, a process on this machine, so that its pid means something here."""
    return _place(worker)[1] == machine_code()


def worker_has_ended(worker: str) -> bool:
    """Return True if the process of a worker has provably ended. A worker of another machine never counts as ended
    here.
    """
    return has_ended(*_place(worker))


def _place(worker: str) -> tuple[int, str, int]:
    """Return the pid of a worker's process, its machine, and when it was started; 0 where the name does not say."""
    parts = worker.rsplit("-", 3)
    if len(parts) != 4 or not parts[1].isdecimal():
        return (0, "", 0)
    started = parts[3].partition(".")[0] if "." in parts[3] else "0"
    try:
        return (int(parts[1]), parts[2], int(started, 16))
    except ValueError:
        return (0, "", 0)


def has_ended(pid: int, where: str, started: int = 0) -> bool:
    """Return True if a process has provably ended, which only its own machine can tell.

    where: what `machine` or `machine_code` said in that process. started: its start time, if that is known: then a
    process that got the same pid later is told apart from it. Without it, a living process with the pid proves nothing.
    """
    refuse_when_brief()  # files of the kernel are read
    if os.name == "nt" or not where or where not in (machine(), machine_code()):
        return False
    if sys.platform == "linux" and not machine():
        return False  # the processes of another namespace would be asked
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it exists, and is another user's
    state, begun = _state(pid)
    if 0 < started < begun:
        return True
    return state in ENDED_STATES and not _has_threads(pid)


def _has_threads(pid: int) -> bool:
    """Return True if threads of a process may run although its first one has ended."""
    try:
        return set(os.listdir(f"/proc/{pid}/task")) != {str(pid)}
    except FileNotFoundError:
        return False
    except OSError:
        return True


def start_time(pid: int) -> int:
    """Return when a process was started, in clock ticks since the machine was; 0 where that is unknown."""
    return _state(pid)[1]


_own_start_time: Final = cache(start_time)


def _state(pid: int) -> tuple[str, int]:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0
