"""Whether a process is surely gone, as far as that can be known without asking it: on the machine where it was."""

import os
from functools import cache


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


def is_surely_gone(pid: int, where: str) -> bool:
    """Tell whether there is no such process on the machine of that name: only if that is this one.

    A number that another process has got meanwhile says nothing; nor does a process that has ended and not been
    waited for.
    """
    if not where or where != machine():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
