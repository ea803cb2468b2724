"""Processes without the price of starting Python: a parent has imported everything, and each child is a fork of it.

A child is a process of its own, killed like any other; only its imports were done by its parent. For trials by the
hundred. Run as a program this file is the parent:

    python nursery.py SOCKET

Each connection asks for one child and gets two lines: its number as a process, and later its exit status.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

KILLED = -signal.SIGKILL


class Nursery:
    """The parent, as tests use it."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "nursery")
        command = [sys.executable, __file__, self._address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path, seconds: float) -> int | None:
        """Let a child run to its end and return its exit status; None if it had to be killed after some seconds."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            ask = {"arguments": list(arguments), "environment": dict(environment), "output": str(output)}
            connection.sendall(json.dumps(ask).encode() + b"\n")
            connection.settimeout(seconds)
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


def serve(address: str) -> None:
    """Fork a child for each connection, until the standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
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
    with connection.makefile("r") as asked:
        ask = json.loads(asked.readline())
    child = os.fork()
    if child == 0:
        connection.close()
        become(ask)
    connection.sendall(b"%d\n" % child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        connection.sendall(b"%d\n" % status)
    except OSError:
        pass  # whoever asked gave up


def become(ask: dict[str, Any]) -> NoReturn:
    """Be the workload, in an environment that this process did not start with."""
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
    unarmed, armed = crash_points.crash_point, crash_points.armed_by(os.environ)
    for module in list(sys.modules.values()):
        if getattr(module, "crash_point", None) is unarmed:
            vars(module)["crash_point"] = armed


if __name__ == "__main__":
    import workload

    from everstep.model import crash_points

    serve(sys.argv[1])
