"""Processes without the price of starting Python: a parent has imported everything, and each child is a fork of it.

A child is a separate process that is killed like any other; only its imports were done by its parent. Each connection
asks for one child, in one line, and gets two answers: the child's process id, and later its exit status.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn


class Parent:
    """The parent, as seen by a process that needs children. Its command is a program that calls `serve` with the
    address.
    """

    def __init__(self, address: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._address = address
        self._process = subprocess.Popen(
            [*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment)
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("The parent of the processes to kill did not start; its output is above.")

    def child(self, ask: bytes, seconds: float) -> int | None:
        """Run a child to its end and return its exit status; None if it was killed because it took too long."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.sendall(ask + b"\n")
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


def serve(address: str, become: Callable[[bytes], NoReturn]) -> None:
    """Fork a child for each connection, until the standard input ends. The child calls `become` with its task."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _look_after(connection, become)
                os._exit(0)
            connection.close()


def _look_after(connection: socket.socket, become: Callable[[bytes], NoReturn]) -> None:
    """Start the child that a connection asks for, and report how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as asked:
        ask = asked.readline()
    child = os.fork()
    if child == 0:
        connection.close()
        become(ask)
    connection.sendall(b"%d\n" % child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        connection.sendall(b"%d\n" % status)
    except OSError:
        pass  # the caller gave up
