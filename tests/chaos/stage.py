"""Where a stop-and-close trial happens: the till that judges, the hosts, and a store of its own."""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from everstep.stores.opening import open_store
from everstep.stores.protocol import RunFilter, RunRow, Store
from everstep.testing import nursery
from everstep.testing.ledger_process import digest_of, receipt
from tests.chaos.hosts import __file__ as hosts_file
from tests.postgres.server import Server, server

DEADLINE_SECONDS = 30.0
"""After this time without a fault, in seconds, what is waited for hangs. On an idle machine it takes less than one."""
SLOW_SECONDS = 0.5
"""How long a slow till waits for bodies to act before it answers a probe."""


@dataclass
class Body:
    """A body that has knocked at the till."""

    effect: str
    number: int
    key: str
    pid: int
    go: "asyncio.Future[None]"
    is_open: bool = True
    """Whether it may still act: its connection stands."""
    acted: bool = False


class Till:
    """The outside world: what bodies want to do and have done, by their own words, in the order of arrival."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.overlaps: list[str] = []
        """Effects that were begun again while an earlier body of theirs could still act."""
        self.robbed: list[str] = []
        """Effects that were begun again although nothing was done to the process of the earlier body."""
        self.is_disturbed = False
        """Whether something was done to the first process that may end its bodies, or looks like its end."""
        self.entries: list[dict[str, Any]] = []
        """In the form of a ledger's."""
        self.probes: Counter[str] = Counter()
        self.is_slow = False
        """Whether bodies act between a probe's question and its answer."""
        self._applied: dict[str, str] = {}
        self._released: set[int | None] = set()

    def value(self, number: int, but: str = "stamp") -> str | None:
        """Return the receipt of an order's effect, if it was applied."""
        found = [e for e in self.entries if e["kind"] == "applied" and e["arguments"] == number and e["effect"] != but]
        return receipt(found[0]["effect"], found[0]["digest"]) if found else None

    def open_bodies(self, number: int | None = None) -> list[Body]:
        """Return the bodies that may still act, of one order or of all."""
        return [one for one in self.bodies if one.is_open and number in (None, one.number)]

    def release(self, number: int | None = None) -> None:
        """Let the bodies of an order act, or those of all, now and later."""
        self._released |= {number} if number is not None else {None}
        for body in self.bodies:
            if self._may_act(body) and not body.go.done():
                body.go.set_result(None)

    def _may_act(self, body: Body) -> bool:
        return bool(self._released & {None, body.number}) or body.effect == "stamp"

    async def serve_body(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: Any) -> None:
        """Keep a body waiting until it may act, and enter what it does."""
        go = asyncio.get_running_loop().create_future()
        body = Body(hello["effect"], hello["number"], hello["key"], hello["pid"], go)
        others = [one for one in self.bodies if one.key == body.key and one.is_open]
        self.bodies.append(body)
        try:
            writer.write(b"here\n")
            if others:
                what = f"{body.effect}({body.number}) in {body.pid} beside {[one.pid for one in others]}"
                self.overlaps.append(what)
                self.robbed += [what] if is_awaited(body.effect) and not self.is_disturbed else []
                if not honours_keys(body.effect):
                    self.release(body.number)  # the sooner both act, the surer that is seen
            said = asyncio.ensure_future(reader.readline())
            if not self._may_act(body):
                await asyncio.wait([go, said], return_when=asyncio.FIRST_COMPLETED)
            if not said.done():
                writer.write(b"go\n")
            if await said == b"apply\n":
                writer.write(self._apply(body).encode() + b"\n")
                await reader.read()
        except OSError:
            pass  # it was cut off
        finally:
            body.is_open = False
            writer.close()

    def _apply(self, body: Body) -> str:
        digest = digest_of(body.number)
        entry = {"effect": body.effect, "key": body.key, "arguments": body.number, "digest": digest}
        body.acted = True
        self.entries.append({**entry, "kind": "request", "at": time.time_ns() // 1000})
        if body.key not in self._applied or not honours_keys(body.effect):
            self.entries.append({**entry, "kind": "applied", "at": time.time_ns() // 1000})
            self._applied[body.key] = receipt(body.effect, digest)
        return self._applied[body.key]

    async def answer_probe(self, key: str) -> str:
        """Return the receipt of what was applied; nothing if it was not.

        Of a slow till that is the truth of the moment at which it was asked: bodies act before the answer arrives.
        """
        self.probes[key] += 1
        value = self._applied.get(key, "")
        acting = [body for body in self.bodies if body.key == key and body.is_open]
        if self.is_slow and acting:
            self.release(acting[0].number)
            until = time.monotonic() + SLOW_SECONDS
            while any(body.is_open for body in acting) and time.monotonic() < until:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)  # what acted has ended in its process, too
        return value


def honours_keys(effect: str) -> bool:
    """Tell whether the till applies this effect once for each key."""
    return effect == "stamp" or effect.endswith("_repeat")


def is_awaited(effect: str) -> bool:
    """Tell whether a body waits for its own work, so that nothing but its end ends the attempt."""
    return not effect.startswith(("left_", "timed_"))


class Unanswered(Exception):
    """A host did not do what it was asked for, or raised."""


class Hang(Unanswered):
    """Something took so long that it will never happen."""


class Gone(Unanswered):
    """The process has ended."""


class HostProcess:
    """A process with apps, as a trial sees it."""

    def __init__(self, name: str, pid: int, status: "asyncio.Future[int]") -> None:
        self.name = name
        self.pid = pid
        self.status = status
        self.is_stopped = False
        self.greeted = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._is_over = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear what it answers."""
        self._writer = writer
        self.greeted.set()
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                future = self._answers.pop(answer["n"])
                if not future.done():
                    future.set_result(answer)
        finally:
            self._is_over = True
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(Gone(f"{self.name} has ended"))

    async def ask(self, do: str, **facts: Any) -> dict[str, Any]:
        """Let it do something, and return its answer. Raises `Unanswered` with the error that it had."""
        assert self._writer is not None
        if self._is_over:
            raise Gone(f"{self.name} has ended")
        number = len(self._answers) + int(time.monotonic_ns())
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"n": number, "do": do, **facts}).encode() + b"\n")
        answer = await future
        if "error" in answer:
            raise Unanswered(answer["error"])
        return answer

    def send(self, number: int) -> None:
        """Send a signal."""
        if not self.status.done():
            self.is_stopped = number == signal.SIGSTOP or (self.is_stopped and number != signal.SIGCONT)
            with suppress(ProcessLookupError):  # it has ended, and the news of that is on its way
                os.kill(self.pid, number)

    def hang_up(self) -> None:
        """Let it end, with whatever acts in it."""
        if self._writer is not None:
            self._writer.close()


class Nursery:
    """Where hosts come from."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="everstep-stop-")
        self.address = f"{self._folder.name}/hosts"
        paths = [str(Path(nursery.__file__).parents[2]), str(Path(__file__).parents[2])]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._parent = nursery.Parent(self.address, [sys.executable, str(hosts_file), self.address], environment)

    async def begin(self, ask: dict[str, Any]) -> HostProcess:
        """Start a host."""
        reader, writer = await asyncio.open_unix_connection(self.address)
        writer.write(json.dumps(ask).encode() + b"\n")
        pid = int(await reader.readline())

        async def end() -> int:
            told = await reader.readline()
            writer.close()
            return int(told)

        return HostProcess(ask["name"], pid, asyncio.ensure_future(end()))

    def close(self) -> None:
        """End the parent."""
        self._parent.close()
        self._folder.cleanup()


@dataclass
class Stage:
    """A store, the till, the hosts of one trial, and a log of what was done."""

    kind: str
    folder: Path
    nursery: Nursery
    mutant: str = ""
    deadline: float = DEADLINE_SECONDS
    till: Till = field(default_factory=Till)
    hosts: dict[str, HostProcess] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)

    async def __aenter__(self) -> "Stage":
        self._began = time.monotonic()
        self._socket = str(self.folder / "till")
        self._server = await asyncio.start_unix_server(self._serve, self._socket)
        self._schema = server().fresh_schema() if self.kind == "postgres" else ""
        self.url = server().url(self._schema) if self._schema else f"sqlite:///{self.folder}/store.db"
        self.store: Store = await asyncio.to_thread(open_store, self.url)
        return self

    async def __aexit__(self, *error: object) -> None:
        for host in self.hosts.values():
            host.send(signal.SIGKILL)
        await asyncio.gather(*(host.status for host in self.hosts.values()))
        self.store.close()
        self._server.close()
        if self._schema:
            await asyncio.to_thread(server().drop, self._schema)

    def note(self, what: str) -> None:
        """Write into the log."""
        self.log.append(f"{time.monotonic() - self._began:7.2f} {what}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = json.loads(await reader.readline() or b"{}")
            if hello.get("who") == "host":
                while hello["name"] not in self.hosts:  # its number as a process is still on its way
                    await asyncio.sleep(0.001)
                await self.hosts[hello["name"]].serve(reader, writer)
            elif hello.get("who") == "body":
                self.note(f"body {hello['effect']}({hello['number']}) begins in {hello['pid']}")
                await self.till.serve_body(hello, reader, writer)
                self.note(f"body {hello['effect']}({hello['number']}) in {hello['pid']} is over")
            elif hello.get("who") == "probe":
                value = await self.till.answer_probe(hello["key"])
                self.note(f"probe of {hello['pid']}: {value or 'not done'}")
                writer.write(value.encode() + b"\n")
        except OSError:
            pass  # it was killed
        finally:
            writer.close()

    async def begin(self, name: str, *, ahead: float = 0.0, drain: float | None = None) -> HostProcess:
        """Start a host: a program with apps, or with `drain` a worker."""
        ask = {"name": name, "url": self.url, "till": self._socket, "ahead": ahead, "drain": drain}
        ask |= {"output": str(self.folder / f"{name}.txt"), "mutant": self.mutant}
        host = self.hosts[name] = await self.nursery.begin(ask)
        await self.within(host.greeted.wait(), f"{name} begins")
        self.note(f"{name} is process {host.pid}{', a worker' if drain is not None else ''}")
        return host

    def rows(self) -> dict[str, RunRow]:
        """Return the runs as they are in the store."""
        return {row.id: row for row in self.store.runs(RunFilter(limit=100))}

    async def within(self, waiting: Any, what: str) -> Any:
        """Wait for something, but not for ever."""
        try:
            return await asyncio.wait_for(waiting, self.deadline)
        except TimeoutError:
            raise Hang(f"{what}: this hangs") from None

    async def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until it is so; False if it did not become so in time."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.02)
        return True

    def cancel_statements(self, pid: int) -> int:
        """Let the server cancel statements of a process: they are made to wait, so that this meets them."""
        asked = """
            SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity
            WHERE application_name LIKE %s AND wait_event_type = 'Lock'
        """
        uri, count = server().uri, 0
        with psycopg.connect(uri) as holding, psycopg.connect(uri, autocommit=True) as asking:
            try:
                holding.execute("SET lock_timeout = '1s'")
                holding.execute(f'LOCK TABLE "{self._schema}".runs IN ACCESS EXCLUSIVE MODE')
                until = time.monotonic() + 1.5
                while not count and time.monotonic() < until:
                    row = asking.execute(asked, (f"everstep {pid} %",)).fetchone()
                    count = row[0] if row else 0
                    time.sleep(0.01)
            except psycopg.errors.LockNotAvailable:
                pass  # a stopped process is in the middle of a transaction
            holding.rollback()
        return count


def by_kind(problems: list[str]) -> dict[str, list[str]]:
    """Return problems by their first word."""
    found: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        found[problem.partition(":")[0]].append(problem)
    return dict(found)


__all__ = ["Gone", "Hang", "Nursery", "Server", "Stage", "Till", "Unanswered", "by_kind", "is_awaited"]
