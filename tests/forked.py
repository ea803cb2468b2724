"""Python programs in processes of their own, by the hundred, without the price of starting Python for each.

A parent has imported what such programs need, and each program is a fork of it: a real process that is stopped and
killed like any other. `Program` stands for `subprocess.Popen`. Run as a program this file is a parent:

python forked.py SOCKET
"""

import atexit
import gc
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from subprocess import DEVNULL, PIPE, STDOUT
from typing import IO, Any

AHEAD = (
    *("everstep", "everstep.cli", "everstep.stores.sqlite", "everstep.blocking", "everstep.files", "everstep.witness"),
    *("everstep.testing.ledger", "everstep.testing.journals", "sqlite3", "email.parser", "inspect", "shlex"),
    *("concurrent.futures.thread", "encodings.ascii", "encodings.idna", "rich.console", "rich.logging", "rich.table"),
)
"""What every parent imports before it has children."""
ALL_OF = ("everstep.effects", "everstep.engine", "everstep.stores", "everstep.worker", "everstep.graph", "everstep.cli")
"""Packages of which every parent imports all modules: else each program would load by itself what it needs of them."""
NOT_AHEAD = (".sqlalchemy_database", ".demo")
"""But for these: the one loads very much that few programs need, the other declares a workflow."""
SEED = "PYTHONHASHSEED"


class Parent:
    """A process whose children are programs. The order of sets is the same in all of them: the seed is its own."""

    def __init__(self, address: str, seed: str) -> None:
        self.address = address
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, address], stdin=PIPE, stdout=PIPE, env={**environment, SEED: seed}
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "what it said stands above"

    def close(self) -> None:
        self._process.communicate()


class Parents:
    """The parents that this process has, by their seeds. Whoever asks for no seed gets one of two in turn."""

    def __init__(self) -> None:
        self._by_seed: dict[str, Parent] = {}
        self._starting = threading.Lock()
        self._turn = itertools.cycle(("1", "2"))
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def one(self, seed: str | None) -> Parent:
        with self._starting:
            chosen = seed if seed not in (None, "", "random") else next(self._turn)
            assert chosen is not None
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory()
                atexit.register(self.close)
            if chosen not in self._by_seed:
                self._by_seed[chosen] = Parent(f"{self._folder.name}/{chosen}", chosen)
            return self._by_seed[chosen]

    def close(self) -> None:
        while self._by_seed:
            self._by_seed.popitem()[1].close()
        if self._folder is not None:
            self._folder.cleanup()


PARENTS = Parents()


class Program:
    """A program in a process of its own: what of `subprocess.Popen` tests use. The command begins as `python` does."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: int | IO[Any] | None = DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
    ) -> None:
        executable, *arguments = command
        assert executable == sys.executable, "only Python programs are forked"
        assert arguments[0] in ("-m", "-c") or arguments[0].endswith(".py"), (
            f"{arguments[0]} is for a process that is started"
        )
        self.args = list(command)
        self.returncode: int | None = None
        self.stdin: Any
        self.stdout: Any
        self.stderr: Any
        self._waiting = threading.RLock()
        self._told = b""
        self._read: dict[str, Any] = {}
        self._readers: dict[str, threading.Thread] = {}
        environment = dict(os.environ if env is None else env)
        ask = {"arguments": arguments, "environment": environment, "cwd": str(cwd or Path.cwd())}
        given, self.stdin = self._input(stdin, text)
        for stream, inherited in ((stdout, 1), (stderr, 2)):
            number, mine = self._output(stream, inherited, given, text)
            given.append(number)
            setattr(self, ("stdin", "stdout", "stderr")[inherited], mine)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(PARENTS.one(environment.get(SEED)).address)
        socket.send_fds(self._connection, [b"-"], given)
        for number in given:
            os.close(number)
        self._connection.sendall(json.dumps(ask).encode() + b"\n")
        self.pid = int(self._line(None) or 0)
        assert self.pid, "the parent of programs has ended"

    @staticmethod
    def _input(stream: int | IO[Any] | None, text: bool) -> tuple[list[int], Any]:
        """Return the file that the program reads, and the end of a pipe that is ours."""
        if stream == PIPE:
            reading, writing = os.pipe()
            return [reading], os.fdopen(writing, "w" if text else "wb")
        assert stream == DEVNULL
        return [os.open(os.devnull, os.O_RDONLY)], None

    @staticmethod
    def _output(stream: int | IO[Any] | None, inherited: int, given: list[int], text: bool) -> tuple[int, Any]:
        """Return the file that the program writes, and the end of a pipe that is ours."""
        if stream == PIPE:
            reading, writing = os.pipe()
            return writing, os.fdopen(reading, "r" if text else "rb")
        if stream == STDOUT:
            return os.dup(given[1]), None
        if stream == DEVNULL:
            return os.open(os.devnull, os.O_WRONLY), None
        file = inherited if stream is None else stream
        return os.dup(file if isinstance(file, int) else file.fileno()), None

    def _line(self, seconds: float | None) -> bytes | None:
        """Return the next line from the parent; None if there is none after some seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._told:
            rest = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._connection], [], [], rest)[0]:
                return None
            more = self._connection.recv(64)
            assert more, "the parent of programs has ended"
            self._told += more
        line, _, self._told = self._told.partition(b"\n")
        return line

    def wait(self, timeout: float | None = None) -> int:
        with self._waiting:
            if self.returncode is None:
                line = self._line(timeout)
                if line is None:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                self.returncode = int(line)
                self._connection.close()
            return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        with self._waiting:
            if self.poll() is None:
                os.kill(self.pid, number)  # nobody else has its number: it is reaped when its status was taken

    def wait_until_stopped(self, seconds: float = 30.0) -> None:
        """Wait until the program has stopped itself, or was stopped."""
        until = time.monotonic() + seconds
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert self.poll() is None, f"it ended with {self.returncode}"
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.005)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Read both pipes to their ends, and wait. May be called again, after it took too long or not."""
        until = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None:
            self.stdin.close()
        for name, pipe in (("out", self.stdout), ("err", self.stderr)):
            if pipe is not None and name not in self._readers and not pipe.closed:
                self._readers[name] = threading.Thread(target=self._read_all, args=(name, pipe), daemon=True)
                self._readers[name].start()
        for reader in self._readers.values():
            reader.join(None if until is None else max(0.0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self._read.get("out"), self._read.get("err")

    def _read_all(self, name: str, pipe: IO[Any]) -> None:
        with pipe:
            self._read[name] = pipe.read()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    capture_output: bool = False,
    text: bool = False,
    timeout: float | None = None,
    check: bool = False,
) -> "subprocess.CompletedProcess[Any]":
    """Run a program to its end, as `subprocess.run` does."""
    if capture_output:
        stdout = stderr = PIPE
    program = Program(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr, text=text)
    try:
        out, err = program.communicate(timeout)
    except BaseException:
        program.kill()
        program.wait()
        raise
    done = subprocess.CompletedProcess(program.args, program.wait(), out, err)
    if check:
        done.check_returncode()
    return done


# -- the parent -------------------------------------------------------------------------------------------------------
def serve(address: str) -> dict[str, Any] | None:
    """Fork a program for each connection, until the standard input ends. Returns in each program what it is."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                return look_after(connection)
            connection.close()
    return None


def look_after(connection: socket.socket) -> dict[str, Any]:
    """Fork the program, tell its number and how it ended, and wait until that was taken before the number is freed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, given, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as asked:
        ask: dict[str, Any] = json.loads(asked.readline())
    program = os.fork()
    if program == 0:
        connection.close()
        for stream, number in enumerate(given):
            os.dup2(number, stream)
            os.close(number)
        return ask
    for number in given:
        os.close(number)
    os.close(1)  # whoever reads what the program writes must see its end
    os.close(2)
    try:
        connection.sendall(b"%d\n" % program)
        ended = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        connection.sendall(b"%d\n" % status)
        connection.recv(1)
    except OSError:
        pass  # whoever asked is gone
    os._exit(0)


def become(ask: dict[str, Any], paths: list[str]) -> None:
    """Be the program, as if Python had been started for it."""
    os.environ.clear()
    os.environ.update(ask["environment"])
    time.tzset()
    os.chdir(ask["cwd"])
    for stream in (sys.stdout, sys.stderr):
        # The streams have the files of the program; they buffer as Python says for those.
        terminal = bool(os.environ.get("PYTHONUNBUFFERED"))
        stream.reconfigure(line_buffering=stream is sys.stderr, write_through=terminal)  # type: ignore[union-attr]
    arm_crash_points()
    first, *rest = ask["arguments"]
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.getcwd() if first in ("-m", "-c") else os.path.dirname(os.path.abspath(first)), *own, *paths]
    if first == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = [first, *(rest[1:] if first == "-c" else rest)]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if first == "-c":
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        module.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(module))


PASSING: list[Any] = []
"""The modules that pass crash points."""


def find_crash_points() -> None:
    """Find them ahead: a program that looked at all modules would make a copy of much of its memory."""
    unarmed = import_module("everstep.model.crash_points").crash_point
    PASSING[:] = [one for one in sys.modules.values() if getattr(one, "crash_point", None) is unarmed]


def arm_crash_points() -> None:
    """Arm as the environment says. It is read at import, which is over, so every module gets the new function."""
    armed = import_module("everstep.model.crash_points").armed_by(os.environ)
    for module in PASSING:
        module.crash_point = armed


def status_of(ended: SystemExit) -> int:
    """Return the exit status, as Python takes it."""
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def end(status: int) -> None:
    """Do what Python does before a process ends, but for taking modules apart that the parent has imported."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def import_ahead() -> None:
    """Import what programs need. Where there is no driver for PostgreSQL, nothing of that."""
    has_driver = find_spec("psycopg") is not None
    for name in (*AHEAD, *(("psycopg",) if has_driver else ())):
        import_module(name)
    for package in ALL_OF:
        for found in walk_packages(import_module(package).__path__, f"{package}."):
            if not any(part in found.name for part in NOT_AHEAD) and (has_driver or "postgres" not in found.name):
                import_module(found.name)


if __name__ == "__main__":
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    beside = [path for path in sys.path[1:] if path not in known]
    import_ahead()
    find_crash_points()
    gc.collect()
    gc.freeze()
    asked = serve(sys.argv[1])
    if asked is not None:
        status = 0
        try:
            become(asked, beside)
        except SystemExit as ended:
            status = status_of(ended)
        except Exception as error:  # noqa: BLE001  # a program that raises ends with 1, whatever it raises
            traceback.print_exception(error)
            status = 1
        end(status)
