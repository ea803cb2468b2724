"""Errors of a real server, on demand: a trigger raises any SQLSTATE, and sessions are cancelled again and again."""

import threading
from typing import Any

import psycopg

from tests.postgres.server import Server

KNOWN = {code for code in psycopg.errors._sqlcodes if len(code) == 5 and code[:2] == code[:2].upper()}
SQLSTATES = sorted({code for code in KNOWN if any(map(str.isdigit, code))} - {"00000"} | {"ZZ999", "QX001", "57ZZZ"})
"""All that PostgreSQL knows, but for that of success, and a few that it does not."""
OF_EACH_CLASS = sorted({*{code[:2]: code for code in SQLSTATES}.values(), "25006", "42501", "42P01", "53100", "57014"})


class Faults:
    """Tables and questions of a store's schema that raise what a test wants, as often as it wants."""

    def __init__(self, server: Server, schema: str) -> None:
        self._schema = schema
        self._connection = psycopg.connect(server.uri, autocommit=True)
        do = self._connection.execute
        do(f"SET search_path TO {schema}")
        do("CREATE SEQUENCE raised")
        do("CREATE TABLE faults (code text, run text, count bigint, pause double precision)")
        do("INSERT INTO faults VALUES (NULL, NULL, 0, 0)")
        do(
            f"CREATE FUNCTION fault(run text) RETURNS bigint LANGUAGE plpgsql SET search_path = {schema} AS $$ "
            "DECLARE wanted faults%ROWTYPE; BEGIN SELECT * INTO wanted FROM faults; "
            "PERFORM pg_sleep(wanted.pause); "
            "IF wanted.code IS NOT NULL AND (wanted.run IS NULL OR wanted.run = fault.run) "
            "AND nextval('raised') <= wanted.count THEN "
            "RAISE EXCEPTION USING ERRCODE = wanted.code, MESSAGE = 'raised on purpose'; END IF; RETURN 1; END $$"
        )
        do(
            f"CREATE FUNCTION fault_in_table() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema} AS $$ "
            "BEGIN PERFORM fault(to_jsonb(NEW) ->> TG_ARGV[0]); RETURN NEW; END $$"
        )
        for table, column in (("events", "run"), ("signals", "run"), ("workers", "id")):
            do(
                f"CREATE TRIGGER faulty BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW "
                f"EXECUTE FUNCTION fault_in_table('{column}')"
            )

    def arm(self, code: str | None, *, count: int = 1, run: str | None = None, pause: float = 0.0) -> None:
        """Raise an error the next times that something is written: of any run, or of one."""
        self._connection.execute("ALTER SEQUENCE raised RESTART")
        self._connection.execute(
            "UPDATE faults SET code = %s, run = %s, count = %s, pause = %s", [code, run, count, pause]
        )

    def close(self) -> None:
        self._connection.close()


class Canceller:
    """Cancels whatever the sessions of a store are doing, again and again."""

    def __init__(self, server: Server, application: str = "everstep%") -> None:
        self._server, self._application = server, application
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> "Canceller":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        asked = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE %s"
        with psycopg.connect(self._server.uri, autocommit=True) as connection:
            while not self._over.wait(0.03):
                connection.execute(asked, [self._application])
