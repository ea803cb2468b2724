"""Children that are the workload of the crash tests, by the hundred. Run as a program this file is their parent:

python nursery.py SOCKET
"""

import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from everstep.testing import nursery

KILLED = -signal.SIGKILL
SEEDS = (1, 2, 3)
"""Of hashes: sets are in another order in the process that goes on than in the one that was killed."""


class Nursery:
    """Where trials get their processes from: from one parent after the other, each with a hash seed of its own."""

    def __init__(self, folder: Path) -> None:
        self._parents = [self._started(str(folder / f"nursery-{seed}"), seed) for seed in SEEDS]
        self._turn = itertools.cycle(self._parents)

    def _started(self, address: str, seed: int) -> nursery.Parent:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        return nursery.Parent(address, [sys.executable, __file__, address], environment)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path, seconds: float) -> int | None:
        """Let a child run to its end and return its exit status; None if it had to be killed after some seconds."""
        ask = {"arguments": list(arguments), "environment": dict(environment), "output": str(output)}
        return next(self._turn).child(json.dumps(ask).encode(), seconds)

    def close(self) -> None:
        """End the parents."""
        for parent in self._parents:
            parent.close()


def become(asked: bytes) -> NoReturn:
    """Be the workload, in an environment that this process did not start with."""
    ask = json.loads(asked)
    os.environ.clear()
    os.environ.update(ask["environment"])
    output = os.open(ask["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    arm_crash_points()
    status = 70
    try:
        status = workload.command(["workload.py", *ask["arguments"]])
    except BaseException:  # noqa: BLE001  # a program that raises ends with 1, whatever it raises
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        os._exit(status)


def arm_crash_points() -> None:
    """Arm as the environment says. It is read at import, which is over, so every module gets the new function."""
    armed = crash_points.armed_by(os.environ)
    for module in passing:
        module.crash_point = armed  # type: ignore[attr-defined]


if __name__ == "__main__":
    # Else each child would load by itself what it needs: the databases, and what a connection to the ledger looks up.
    import encodings.ascii
    import encodings.idna  # noqa: F401
    import sqlite3  # noqa: F401

    import exchange  # noqa: F401
    import workload

    import everstep.stores.sqlite.guard
    import everstep.stores.sqlite.marked  # noqa: F401
    from everstep.engine.app import blocking, opening  # noqa: F401
    from everstep.model import crash_points

    # Known ahead: a child that looked at all modules would make a copy of much of its memory.
    unarmed = crash_points.crash_point
    passing = [one for one in sys.modules.values() if getattr(one, "crash_point", None) is unarmed]
    gc.collect()
    gc.freeze()
    nursery.serve(sys.argv[1], become)
