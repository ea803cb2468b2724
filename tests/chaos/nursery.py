"""Workers as forks of a parent that has imported everything. Run as a program this file is the parent:

python nursery.py SOCKET
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everstep.testing import nursery


class WorkerProcess:
    """A worker that can be killed, stopped and told to end."""

    def __init__(self, pid: int, connection: socket.socket, output: Path) -> None:
        self.pid = pid
        self.output = output
        self.stopped_until = 0.0
        """When it is woken, if it is stopped."""
        self._connection = connection
        self._said = b""

    def send(self, number: int) -> None:
        """Send a signal, if it is there to receive one."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it has ended by itself

    def status(self, seconds: float = 0.0) -> int | None:
        """Return its exit status; None if it has not ended within some seconds."""
        until = time.monotonic() + seconds
        while b"\n" not in self._said:
            self._connection.settimeout(max(0.001, until - time.monotonic()))
            try:
                self._said += self._connection.recv(64)
            except TimeoutError:
                if time.monotonic() >= until:
                    return None
        return int(self._said)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.send(signal.SIGKILL)
        assert self.status(20) is not None, "a killed process does not end"
        self._connection.close()


class Nursery:
    """Where the workers come from."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "nursery")
        source = str(Path(nursery.__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(Path(__file__).parents[2])])}
        self._parent = nursery.Parent(self._address, [sys.executable, __file__, self._address], environment)

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> WorkerProcess:
        """Start `everstep worker` with these arguments."""
        ask = {"arguments": list(arguments), "environment": dict(environment), "output": str(output)}
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        connection.sendall(json.dumps(ask).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            said += connection.recv(1)
        return WorkerProcess(int(said), connection, output)

    def close(self) -> None:
        """End the parent."""
        self._parent.close()


def become(asked: bytes) -> NoReturn:
    """Be `everstep worker`, and keep a journal of what its store accepts."""
    ask = json.loads(asked)
    os.environ.update(ask["environment"])
    output = os.open(ask["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    journal = journals.ClientJournal(Path(os.environ["CHAOS_FOLDER"]) / "journal.jsonl")
    open_store = working.open_store

    def open_watched(*args: Any, **options: Any) -> Any:
        store = open_store(*args, **options)
        journals.watch_commits(store, journal)
        return store

    working.open_store = open_watched
    status = 70
    try:
        cli.main(["worker", *ask["arguments"]])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001  # a program that raises ends with 1, whatever it raises
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    import asyncio  # noqa: F401  # so that no child has to import it
    from concurrent.futures import thread  # noqa: F401

    import psycopg  # noqa: F401

    from everstep import cli
    from everstep.cli import working
    from everstep.stores import postgres  # noqa: F401
    from everstep.testing import journals

    nursery.serve(sys.argv[1], become)
