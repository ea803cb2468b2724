"""Processes of the stop-and-close trials: each opens and closes apps as it is told, and suffers what it is told.

A host is a fork of a parent that has imported everything. It is told by JSON lines on a socket, read by a thread of its
own, so that faults reach it also while its loop is busy. Run as a program this file is the parent:

python hosts.py SOCKET
"""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import apsw

import everstep
from everstep.engine.process import host
from everstep.engine.run import doubts
from everstep.testing import nursery
from tests.chaos import mutants, stopping

PROGRAM = Path(stopping.__file__)
HASTY = ((host, "ONCE_SECONDS", 0.3), (host, "STOP_SECONDS", 0.3), (doubts, "FIRST_SECONDS", 0.2))
"""Pauses of the engine that are shortened: no promise depends on how long they are."""


# -- faults inside a process ------------------------------------------------------------------------------------------
class Faults:
    """What is wrong in this process: its clock, its threads, its statements. Counts what really happened."""

    def __init__(self) -> None:
        self.fired: Counter[str] = Counter()
        self._ahead = 0.0
        self._threads_refused = 0
        self._statements_cut = self._pieces_left = 0

    def install(self) -> None:
        """Put them in the way of whatever is called from now on."""
        for name, unit in (("time", 1), ("time_ns", 10**9)):
            self._shift(name, unit)
        for name, unit in (("clock_gettime", 1), ("clock_gettime_ns", 10**9)):
            self._shift_clock(name, unit)
        begin = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self._threads_refused:
                self._threads_refused -= 1
                self.fired["threads refused"] += 1
                raise RuntimeError("can't start new thread")
            begin(thread)

        threading.Thread.start = start  # type: ignore[method-assign]
        apsw.connection_hooks.append(self._watch)

    def _shift(self, name: str, unit: int) -> None:
        read = getattr(time, name)
        kind = type(read())
        setattr(time, name, lambda: read() + kind(self._ahead * unit))

    def _shift_clock(self, name: str, unit: int) -> None:
        read = getattr(time, name)

        def shifted(clock: int) -> Any:
            value = read(clock)
            return value + type(value)(self._ahead * unit) if clock == time.CLOCK_REALTIME else value

        setattr(time, name, shifted)

    def _watch(self, connection: apsw.Connection) -> None:
        connection.set_progress_handler(self._is_cut, 20)

    def _is_cut(self) -> bool:
        if not self._statements_cut:
            return False
        if self._pieces_left:
            self._pieces_left -= 1
            return False
        self._statements_cut -= 1
        self.fired["statements cancelled"] += 1
        return True

    def jump(self, seconds: float) -> None:
        """Set this process's clock forward or back."""
        self._ahead += seconds
        self.fired["clock jumps"] += 1

    def refuse(self, threads: int) -> None:
        """Refuse the next threads that anything here wants to start."""
        self._threads_refused = threads

    def cut(self, statements: int, after: int = 0) -> None:
        """Interrupt the next statements of SQLite here, once this many pieces of others were done."""
        self._statements_cut, self._pieces_left = statements, after

    def end(self) -> None:
        """Let everything be as it should."""
        self._ahead, self._threads_refused, self._statements_cut = 0.0, 0, 0


# -- apps -------------------------------------------------------------------------------------------------------------
class Apps:
    """The apps of this process, by name: on the process's own loop, or each on a loop of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._open: dict[str, tuple[Any, Any]] = {}

    async def open(self, app: str, form: str, recover: bool) -> None:
        """Open one. `form`: `async`, or `blocking`."""
        opening = everstep.open(self._url, recover=recover, lease=30.0)
        if form == "blocking":
            self._open[app] = (opening, await asyncio.to_thread(opening.__enter__))
        else:
            self._open[app] = (opening, await opening.__aenter__())

    async def connect(self, app: str) -> None:
        """Be a client: it starts and signals, and drives nothing."""
        client = everstep.connect(self._url)
        self._open[app] = (client, await client.__aenter__())

    async def close(self, app: str, drain: float) -> None:
        """Close it in good order."""
        opening, one = self._open.pop(app)
        if isinstance(one, everstep.App):
            await one.close(drain)
        else:
            await asyncio.to_thread(opening.__exit__, None, None, None)

    async def _do(self, app: str, method: str, *args: Any, **options: Any) -> Any:
        one = self._open[app][1]
        if isinstance(one, everstep.App | everstep.Client):
            return await getattr(one, method)(*args, **options)
        return await asyncio.to_thread(getattr(one, method), *args, **options)

    async def start(self, app: str, run: str, name: str, number: int) -> None:
        """Start a run, or attach to it."""
        workflow = "stop_order" if isinstance(self._open[app][1], everstep.Client) else stopping.stop_order
        await self._do(app, "start", workflow, name, number, id=run)

    async def signal(self, app: str, run: str, name: str, value: str, id: str) -> None:
        """Send a signal to a run."""
        await self._do(app, "signal", run, name, value, id=id)

    async def resolve(self, app: str, run: str, resolution: str, value: str | None) -> None:
        """Decide about a hold."""
        await self._do(app, "resolve", run, resolution, value=value, by="the trial")


# -- the process ------------------------------------------------------------------------------------------------------
class Host:
    """This process: hears what it is told and answers, each under the number of what was asked."""

    def __init__(self, ask: dict[str, Any]) -> None:
        self._faults = Faults()
        self._apps = Apps(ask["url"])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(ask["till"])
        self._say({"who": "host", "name": ask["name"], "pid": os.getpid()})
        self._faults.install()
        self._faults.jump(ask["ahead"]) if ask["ahead"] else None

    def _say(self, what: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(what).encode() + b"\n")

    def hear(self, leave: Callable[[], None]) -> None:
        """Do what is asked, until the trial hangs up."""
        with self._connection.makefile("rb") as lines:
            for line in lines:
                ask = json.loads(line)
                number, do = ask.pop("n"), ask.pop("do")
                if do in ("jump", "refuse", "cut", "end"):
                    getattr(self._faults, do)(**ask)
                    self._say({"n": number})
                elif do == "fired":
                    self._say({"n": number, "fired": dict(self._faults.fired), "cpu": sum(os.times()[:2])})
                else:
                    assert self._loop is not None
                    asyncio.run_coroutine_threadsafe(self._answer(number, do, ask), self._loop)
        leave()

    async def _answer(self, number: int, do: str, ask: dict[str, Any]) -> None:
        try:
            await getattr(self._apps, do)(**ask)
            self._say({"n": number})
        except Exception as error:  # noqa: BLE001  # the trial judges it
            self._say({"n": number, "error": f"{type(error).__name__}: {error}"})

    async def main(self) -> None:
        """Be a program with apps, until the trial hangs up."""
        self._loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop = self._loop
        threading.Thread(target=self.hear, args=(lambda: loop.call_soon_threadsafe(over.set),), daemon=True).start()
        await over.wait()


def become(asked: bytes) -> NoReturn:
    """Be a host: a program with apps of its own, or `everstep worker`."""
    ask = json.loads(asked)
    os.environ[stopping.TILL] = ask["till"]
    output = os.open(ask["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    for module, name, seconds in HASTY:
        assert hasattr(module, name), f"{module.__name__}.{name} has another name now: give it here"
        setattr(module, name, seconds)
    status = 70
    try:
        host = Host(ask)
        if ask["mutant"]:
            mutants.plant(ask["mutant"])
        if ask["drain"] is None:
            asyncio.run(host.main())
            status = 0
        else:
            threading.Thread(target=host.hear, args=(lambda: os._exit(0),), daemon=True).start()
            cli.main(["worker", str(PROGRAM), f"--url={ask['url']}", f"--drain={ask['drain']}"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:  # noqa: BLE001  # a program that raises ends with 1, whatever it raises
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    import gc

    import psycopg  # noqa: F401

    from everstep import cli
    from everstep.cli import working  # noqa: F401
    from everstep.engine.app import blocking  # noqa: F401
    from everstep.engine.verbs import runs  # noqa: F401
    from everstep.stores import postgres, sqlite  # noqa: F401

    gc.collect()
    gc.freeze()
    nursery.serve(sys.argv[1], become)
