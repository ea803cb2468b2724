"""Child processes for a crash test, which run a user's workflow.

Only the child imports a user's code, so no state of it outlives a process. The order of sets differs between nurseries:
each has its own hash seed.
"""

import gc
import os
import sys
import sysconfig
import traceback
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from everstep.model.own_files import append_to
from everstep.testing import nursery
from everstep.testing.crash_child import Ask, become

AHEAD: Final = (
    *("everstep", "everstep.stores.sqlite", "everstep.blocking", "everstep.files", "everstep.witness"),
    *("everstep.engine.app.blocking", "everstep.testing.ledger", "sqlite3", "email.parser"),
    *("encodings.ascii", "encodings.idna"),
)
"""Modules that are imported before any child is forked, in addition to those that this module needs."""
OUTPUT: Final = "output.txt"
PROGRAM: Final = "import sys; from everstep.testing import crash_nursery; crash_nursery.serve(*sys.argv[1:])"


class Nursery:
    """The source of a crash test's processes."""

    def __init__(self, folder: Path, hash_seed: int, ahead: tuple[str, ...] = ()) -> None:
        address = str(folder / f"nursery-{hash_seed}")
        # Settings of Everstep are for the caller's own runs, not for those of a crash test.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        environment |= {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._parent = nursery.Parent(address, [sys.executable, "-c", PROGRAM, address, *ahead], environment)

    def run(self, ask: Ask) -> int | None:
        """Run a child to its end and return its exit status; None if it was killed because it took too long."""
        return self._parent.child(msgspec.json.encode(ask), ask.seconds)

    def close(self) -> None:
        """End the parent."""
        self._parent.close()


def serve(address: str, *ahead: str) -> None:
    """Run as the parent. `ahead` is imported before any child is forked."""
    for name in (*AHEAD, *ahead):
        import_module(name)
    sysconfig.get_paths()  # every child needs them, and the first call is slow
    gc.collect()
    gc.freeze()
    nursery.serve(address, be_child)


def be_child(asked: bytes) -> NoReturn:
    """Perform the task that was sent, with the output in a file."""
    ask = msgspec.json.decode(asked, type=Ask)
    output = append_to(os.path.join(os.path.dirname(ask.notes), OUTPUT))
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, stream)
    status = 70
    try:
        status = become(ask)
    except BaseException:  # noqa: BLE001  # a program that raises ends with 1, whatever it raises
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
