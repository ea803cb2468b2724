"""The loop of an application goes on while its server is silent: whatever is asked of it waits on a thread."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import everstep
from tests.loop_calls import Pauses, Trouble, outcomes_of, prepared, wrong
from tests.postgres.hosts import Swallowing
from tests.postgres.server import Server


class LockedTables:
    """Somebody has locked all tables of the store."""

    def __init__(self, server: Server, schema: str) -> None:
        self._server = server
        self._schema = schema
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None

    def begin(self) -> None:
        tables = self._server.ask("SELECT tablename FROM pg_tables WHERE schemaname = %s", self._schema)
        names = ", ".join(f'"{self._schema}"."{table}"' for (table,) in tables)
        self._connection = psycopg.connect(self._server.uri)
        self._connection.execute(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")

    def end(self) -> None:
        assert self._connection is not None
        self._connection.close()


class StoppedServer:
    """All processes of the server are stopped."""

    def __init__(self, server: Server) -> None:
        self._first = server.process_id()
        self._stopped: list[int] = []

    def begin(self) -> None:
        self._stopped = [self._first]
        os.kill(self._first, signal.SIGSTOP)
        self._stopped += _children_of(self._first)
        for process in self._stopped[1:]:
            os.kill(process, signal.SIGSTOP)

    def end(self) -> None:
        for process in reversed(self._stopped):
            os.kill(process, signal.SIGCONT)


def _children_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(fields[1]) == parent:
                found.append(int(folder.name))
    return found


class SilentNetwork:
    """Nothing comes through to the server, and nothing comes back."""

    def __init__(self, network: Swallowing) -> None:
        self._network = network

    def begin(self) -> None:
        self._network.cut(0)

    def end(self) -> None:
        self._network.heal(0)


@pytest.fixture
def network(server: Server) -> Iterator[Swallowing]:
    made = Swallowing(server.socket_path(), 1)
    yield made
    made.close()


async def _all_at_once(url: str, trouble: Trouble, folder: Path, what: str) -> None:
    pauses = Pauses(what)
    async with prepared(url, folder) as (_, expected):
        outcomes = await outcomes_of(trouble, {name: call for name, (call, _) in expected.items()}, pauses)
        assert not wrong(expected, outcomes)
    pauses.tell()


def test_no_call_stops_the_loop_while_the_tables_are_locked(server: Server, schema: str, tmp_path: Path) -> None:
    """One after another, so that each is the first that finds the store silent."""

    async def one_by_one() -> None:
        pauses = Pauses("locked tables")
        async with prepared(server.url(schema), tmp_path) as (_, expected):
            for name, (call, _) in expected.items():
                outcomes = await outcomes_of(LockedTables(server, schema), {name: call}, pauses)
                assert not wrong(expected, outcomes)
        pauses.tell()

    asyncio.run(one_by_one())


def test_no_call_stops_the_loop_while_the_server_is_stopped(server: Server, schema: str, tmp_path: Path) -> None:
    asyncio.run(_all_at_once(server.url(schema), StoppedServer(server), tmp_path, "stopped server"))


def test_no_call_stops_the_loop_while_the_network_swallows_everything(
    server: Server, schema: str, network: Swallowing, tmp_path: Path
) -> None:
    url = f"postgresql://postgres@{network.address(0)}/postgres?schema={schema}"
    asyncio.run(_all_at_once(url, SilentNetwork(network), tmp_path, "silent network"))


def test_closing_an_app_does_not_stop_the_loop(server: Server, schema: str) -> None:
    async def close() -> None:
        app = await everstep.open(server.url(schema), recover=True).__aenter__()
        outcomes = await outcomes_of(LockedTables(server, schema), {"close": app.close})
        assert outcomes == {"close": None}

    asyncio.run(close())
