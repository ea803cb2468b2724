"""The statements of every step, sent without psycopg's own work around a statement, which costs more than the rest of a
step.

A statement is prepared once on each connection, with types that do not depend on its values, which are sent as bytes.
Several may be sent at once: then they are one transaction, which commits when the last one is done, or does nothing.
Nothing else differs: they use the same connection, and errors are psycopg's.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import psycopg
from psycopg import errors, pq

from everstep.stores.postgres.addresses import DEFAULT_SCHEMA
from everstep.stores.postgres.arrays import OID_OF_ARRAY, OID_OF_ELEMENT, array_bytes
from everstep.stores.postgres.connections import BEGIN, Connection, said_by, wait_for_socket
from everstep.stores.postgres.queries import statements
from everstep.stores.sql.nul import escaped, unescaped
from everstep.stores.sql.rows import Row

NUMBER: Final = struct.Struct(">q").pack
READ_NUMBER: Final = struct.Struct(">q").unpack
FINE: Final = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)
BINARY: Final = pq.Format.BINARY


_WRITERS: Final[dict[str, Callable[[Any], bytes | None]]] = {
    "n": lambda value: None if value is None else NUMBER(value),
    "t": lambda value: None if value is None else escaped(value).encode(),
    "b": lambda value: None if value is None else bytes(value),
    **{kind.upper(): partial(array_bytes, kind) for kind in "ntb"},
}


class Direct:
    """A statement. `kinds`: a letter for each parameter, `n`umber, `t`ext or `b`ytes; capitals are arrays of these."""

    def __init__(self, name: str, text: str, kinds: str) -> None:
        self._name = f"everstep_{name}".encode()
        self._text = text.encode()
        self._writers = [_WRITERS[one] for one in kinds]
        self._types = [OID_OF_ARRAY[one.lower()] if one.isupper() else OID_OF_ELEMENT[one] for one in kinds]
        self._formats = [BINARY] * len(kinds)
        self._connection: Connection | None = None

    def changed(self, connection: Connection, values: Sequence[Any]) -> int:
        """Do the statement, and return how many rows it has changed. No other thread may use the connection then."""
        if said_by(connection) is not None:
            return done_together(connection, [(self, values)])[0].command_tuples or 0
        written = self.written(values)
        with _LostIsLost():
            self.prepare(connection)
            self.send(connection, written)
            return _answer(connection.pgconn).command_tuples or 0

    def written(self, values: Sequence[Any]) -> list[bytes | None]:
        """Return the parameters in their wire format."""
        return [write(value) for write, value in zip(self._writers, values, strict=True)]

    def prepare(self, connection: Connection) -> None:
        """Prepare the statement on this server, if it is not prepared. Behind a pooler it may be another server each
        time.
        """
        if self._connection is not connection and connection.prepare_threshold is not None:
            connection.pgconn.send_prepare(self._name, self._text, self._types)
            _answer(connection.pgconn)
            self._connection = connection

    def send(self, connection: Connection, written: Sequence[bytes | None]) -> None:
        """Send it."""
        if connection.prepare_threshold is None:
            connection.pgconn.send_query_params(self._text, written, self._types, self._formats, BINARY)
        else:
            connection.pgconn.send_query_prepared(self._name, written, self._formats, BINARY)


_BEGIN: Final = Direct("begin", BEGIN, "")
_SAY: Final = Direct("say", statements(DEFAULT_SCHEMA)["say_for_transaction"], "TT")
_COMMIT: Final = Direct("commit", "COMMIT", "")


def done_together(connection: Connection, asked: Sequence[tuple[Direct, Sequence[Any]]]) -> list[pq.abc.PGresult]:
    """Do statements in one transaction and one round trip, and return their results. The first error is raised.

    Behind a pooler the transaction sets its own settings, unless it is open already.
    """
    pgconn = connection.pgconn
    if (said := said_by(connection)) and pgconn.transaction_status == pq.TransactionStatus.IDLE:
        return _done_in_order(connection, [(_BEGIN, ()), (_SAY, said), *asked, (_COMMIT, ())])[2:-1]
    return _done_in_order(connection, asked)


def _done_in_order(connection: Connection, asked: Sequence[tuple[Direct, Sequence[Any]]]) -> list[pq.abc.PGresult]:
    """Do statements in one round trip."""
    written = [statement.written(values) for statement, values in asked]
    pgconn = connection.pgconn
    with _LostIsLost():
        for statement, _ in asked:
            statement.prepare(connection)
        pgconn.enter_pipeline_mode()
        for (statement, _), parameters in zip(asked, written, strict=True):
            statement.send(connection, parameters)
        pgconn.pipeline_sync()
        _send_all(pgconn)
        results = [_result(pgconn) for _ in asked]
        end = _next_result(pgconn)
        if end is None or end.status != pq.ExecStatus.PIPELINE_SYNC:
            raise psycopg.OperationalError("whether the transaction was committed is unknown")
        pgconn.exit_pipeline_mode()
        for result in results:
            if result.status not in FINE:
                raise errors.error_from_result(result)
        return results


def rows_of(result: pq.abc.PGresult, kinds: str) -> list[Row]:
    """Return the rows of a result. `kinds`: a letter for each column."""
    readers = list(enumerate(map(_READERS.__getitem__, kinds)))
    value = result.get_value
    return [tuple([read(value(row, column)) for column, read in readers]) for row in range(result.ntuples)]


def _number(value: bytes | None) -> int | None:
    return None if value is None else READ_NUMBER(value)[0]


def _text(value: bytes | None) -> str | None:
    return None if value is None else unescaped(value.decode())


def _blob(value: bytes | None) -> bytes | None:
    return value


_READERS: Final[dict[str, Callable[[bytes | None], Any]]] = {"n": _number, "t": _text, "b": _blob}


class _LostIsLost:
    """A context in which libpq's error about a lost connection becomes the error for a lost connection."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:  # libpq says so, not the server
            raise errors.ConnectionException(str(error)) from error


def _answer(pgconn: pq.abc.PGconn) -> pq.abc.PGresult:
    """Send what is not sent yet, and wait for the answer; a signal may interrupt that. Errors are raised."""
    _send_all(pgconn)
    result = _result(pgconn)
    if result.status not in FINE:
        raise errors.error_from_result(result)
    return result


def _send_all(pgconn: pq.abc.PGconn) -> None:
    while pgconn.flush():
        wait_for_socket(pgconn.socket, writing=True)
        pgconn.consume_input()


def _result(pgconn: pq.abc.PGconn) -> pq.abc.PGresult:
    """Wait for the result of a statement."""
    result = _next_result(pgconn)
    if result is None:
        raise psycopg.OperationalError("the connection is lost")
    while _next_result(pgconn) is not None:
        pass
    return result


def _next_result(pgconn: pq.abc.PGconn) -> pq.abc.PGresult | None:
    while pgconn.is_busy():
        wait_for_socket(pgconn.socket)
        pgconn.consume_input()
    return pgconn.get_result()
