"""Processes without the price of starting Python: a parent has imported Everstep, and each child is a fork of it.

A child is a process of its own that is killed like any other. A user's code is imported in the child alone, so no state
of it outlives a process. The order of sets differs between nurseries: each has its own hash seed.

Each connection asks for one child and gets two lines: its number as a process, and later its exit status.
"""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from everstep.testing.crash_child import Ask, become

AHEAD: Final = (
    *("everstep", "everstep.stores.sqlite", "everstep.blocking", "everstep.files", "everstep.witness"),
    *("everstep.testing.ledger", "sqlite3", "email.parser"),
)
"""What is imported before any child is made, beside what this module needs itself."""
OUTPUT: Final = "output.txt"
PROGRAM: Final = "import sys; from everstep.testing import crash_nursery; crash_nursery.serve(*sys.argv[1:])"


class Nursery:
    """The parent, as a crash test uses it."""

    def __init__(self, folder: Path, hash_seed: int, ahead: tuple[str, ...] = ()) -> None:
        self._address = str(folder / f"nursery-{hash_seed}")
        # Settings of Everstep are for the runs of whoever calls this, not for those of a crash test.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        environment |= {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self._address, *ahead],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("The parent of the processes to kill did not start; what it said stands above.")

    def run(self, ask: Ask) -> int | None:
        """Let a child run to its end and return its exit status; None if it had to be killed for taking too long."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.sendall(msgspec.json.encode(ask) + b"\n")
            connection.settimeout(ask.seconds)
            with connection.makefile("r") as answers:
                child = int(answers.readline())
                try:
                    return int(answers.readline())
                except TimeoutError:
                    os.kill(child, signal.SIGKILL)
                    return None

    def close(self) -> None:
        """End the parent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def serve(address: str, *ahead: str) -> None:
    """Fork a child for each connection, until the standard input ends. `ahead` is imported before that as well."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in (*AHEAD, *ahead):
        import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                look_after(connection)
                os._exit(0)
            connection.close()


def look_after(connection: socket.socket) -> None:
    """Start the child that a connection asks for, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as asked:
        ask = msgspec.json.decode(asked.readline(), type=Ask)
    child = os.fork()
    if child == 0:
        connection.close()
        be_child(ask)
    connection.sendall(b"%d\n" % child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        connection.sendall(b"%d\n" % status)
    except OSError:
        pass  # whoever asked gave up


def be_child(ask: Ask) -> NoReturn:
    """Do what was asked, with the output in a file."""
    output = os.open(os.path.join(os.path.dirname(ask.notes), OUTPUT), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
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
