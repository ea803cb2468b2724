"""Where a measurement keeps its data: in a file in its folder or, with BENCH_POSTGRES, in a database of that server.

The parent makes an empty database for each measurement and names it in the environment, so that the same script is
measured on both. Scripts whose start is measured import this, so it imports next to nothing.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POSTGRES = os.environ.get("BENCH_POSTGRES", "")

SETTINGS = """
    SELECT current_setting('server_version') AS version, current_setting('synchronous_commit') AS synchronous_commit,
        current_setting('fsync') AS fsync, current_setting('transaction_isolation') AS isolation
"""
OWN_BYTES = """
    SELECT coalesce(sum(pg_total_relation_size(pg_class.oid)), 0)::bigint
    FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE relkind IN ('r', 'm') AND nspname NOT IN ('pg_catalog', 'information_schema')
"""


def url_of(folder: Path, name: str) -> str:
    """Return the URL of a system's store."""
    return POSTGRES or f"sqlite:///{folder}/{name}.db"


def is_empty(folder: Path) -> bool:
    """Tell whether no measurement has kept anything here yet."""
    if POSTGRES:
        return ask(folder, "", "SELECT count(*) FROM pg_stat_user_tables") == (0,)
    return not any(folder.iterdir())


def ask(folder: Path, name: str, query: str, *parameters: Any) -> tuple[Any, ...]:
    """Return a row that another connection sees."""
    if POSTGRES:
        import psycopg

        with psycopg.connect(POSTGRES, autocommit=True) as postgres:
            return postgres.execute(query.replace("?", "%s"), parameters).fetchone() or ()
    connection = _connected(folder, name)
    try:
        answer: tuple[Any, ...] = connection.execute(query, parameters).fetchone()
    finally:
        connection.close()
    return answer


def _connected(folder: Path, name: str) -> Any:
    """Return a connection to a SQLite file, of the library that the measured system uses.

    Two SQLite libraries in one process do not see each other's locks: the second one to come takes the file's shared
    memory for left behind, and cuts it off under the first.
    """
    if name == "everstep":
        import apsw

        connection = apsw.Connection(f"{folder}/{name}.db", flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(10_000)
        return connection
    import sqlite3

    return sqlite3.connect(f"file:{folder}/{name}.db?mode=ro", uri=True, timeout=10)


@contextmanager
def looking_into(folder: Path, name: str) -> Iterator[Callable[[str], Any]]:
    """Give what returns the first row that a query gives, on a connection that stays open meanwhile."""
    if POSTGRES:
        import psycopg

        with psycopg.connect(POSTGRES, autocommit=True) as postgres:
            yield lambda query: postgres.execute(query).fetchone()
        return
    connection = _connected(folder, name)
    try:
        yield lambda query: connection.execute(query).fetchone()
    finally:
        connection.close()


def settings_text(version: str, synchronous_commit: str, fsync: str, isolation: str) -> str:
    """Return what decides about durability on PostgreSQL, as a person reads it. See `SETTINGS`."""
    return f"PostgreSQL {version.split()[0]}, synchronous_commit={synchronous_commit}, fsync={fsync}, {isolation}"


def server_seconds(connection: Any) -> float:
    """Return the CPU time that the server has used for a connection, where that can be seen from here, else nothing."""
    return process_seconds(connection.info.backend_pid)


def process_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, where that can be seen from here, else nothing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Weight:
    """What a measurement puts on the disk from now on. On SQLite that is the file, once it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if POSTGRES:
            self._bytes, self._wal, self._commits = self._now()

    def figures(self, steps: int, steps_before: int) -> dict[str, Any]:
        """Return the bytes for each step; on PostgreSQL those of its tables, and of its log beside them."""
        if not POSTGRES:
            from measuring import bytes_in

            return {"step_bytes": bytes_in(self._folder) / (steps + steps_before)}
        kept, wal, commits = self._now()
        return {
            "step_bytes": (kept - self._bytes) / steps,
            "wal_bytes": (wal - self._wal) / steps,
            "step_commits": (commits - self._commits) / steps,
        }

    def _now(self) -> tuple[int, int, int]:
        """Return the bytes of all tables, the end of the server's log, and its commits in this database."""
        query = (
            f"SELECT ({OWN_BYTES}), pg_current_wal_lsn() - '0/0'::pg_lsn, "
            "(SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())"
        )
        kept, wal, commits = ask(self._folder, "", query)
        return int(kept), int(wal), int(commits)
