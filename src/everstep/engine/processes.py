"""Whether the process behind a worker has ended, by the worker's name: it says where the process runs, or ran."""

import os

from everstep.stores import processes


def is_of_this_process(worker: str) -> bool:
    """Tell whether a worker is, or was, this process."""
    return _place(worker) == (os.getpid(), processes.machine_code())


def has_ended(worker: str) -> bool:
    """Tell whether the process of a worker has provably ended. Of another machine's nobody here can say."""
    return processes.has_ended(*_place(worker))


def _place(worker: str) -> tuple[int, str]:
    """Return the number of a worker's process, and its machine."""
    parts = worker.rsplit("-", 3)
    return (int(parts[1]), parts[2]) if len(parts) == 4 and parts[1].isdigit() else (0, "")
