"""The commonest statement of all, sent without what psycopg does around one: that costs more than the rest of a step.

It is prepared once on each connection, with types that do not depend on its values, which come as bytes. Nothing else
is different: it is sent, waited for and answered on the same connection, and its errors are psycopg's.
"""

import select
import struct
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg import errors, pq

from everstep.stores.postgres.arrays import OID_OF_ARRAY, OID_OF_ELEMENT, array_bytes
from everstep.stores.postgres.connections import Connection
from everstep.stores.sql.nul import escaped

NUMBER: Final = struct.Struct(">q").pack
FINE: Final = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)


class Direct:
    """A statement. `kinds`: a letter for each parameter, `n`umber, `t`ext or `b`ytes; capitals are arrays of these."""

    def __init__(self, name: str, text: str, kinds: str) -> None:
        self._name = f"everstep_{name}".encode()
        self._text = text.encode()
        self._kinds = kinds
        self._types = [OID_OF_ARRAY[one.lower()] if one.isupper() else OID_OF_ELEMENT[one] for one in kinds]
        self._formats = [pq.Format.BINARY] * len(kinds)
        self._connection: Connection | None = None

    def changed(self, connection: Connection, values: Sequence[Any]) -> int:
        """Do the statement, and return how many rows it has changed. No other thread may use the connection then."""
        pgconn = connection.pgconn
        written = list(map(_written, self._kinds, values))
        try:
            if self._connection is not connection:
                pgconn.send_prepare(self._name, self._text, self._types)
                _answer(pgconn)
                self._connection = connection
            pgconn.send_query_prepared(self._name, written, self._formats)
            return _answer(pgconn).command_tuples or 0
        except psycopg.OperationalError as error:
            if error.sqlstate is None:  # it is not the server that says so
                raise errors.ConnectionException(str(error)) from error
            raise


def _written(kind: str, value: Any) -> bytes | None:
    if value is None:
        return None
    if kind == "n":
        return NUMBER(value)
    if kind == "t":
        return escaped(value).encode()
    return bytes(value) if kind == "b" else array_bytes(kind.lower(), value)


def _answer(pgconn: pq.abc.PGconn) -> pq.abc.PGresult:
    """Send what is not sent yet, and wait for the answer; a signal may interrupt that. An error is raised."""
    while pgconn.flush():
        _wait(pgconn.socket, writing=True)
        pgconn.consume_input()
    _wait(pgconn.socket)
    pgconn.consume_input()
    while pgconn.is_busy():
        _wait(pgconn.socket)
        pgconn.consume_input()
    result = pgconn.get_result()
    if result is None:
        raise psycopg.OperationalError("the connection is lost")
    while pgconn.get_result() is not None:
        pass
    if result.status not in FINE:
        raise errors.error_from_result(result)
    return result


if hasattr(select, "poll"):

    def _wait(fileno: int, *, writing: bool = False) -> None:
        poll = select.poll()
        poll.register(fileno, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
        poll.poll()

else:

    def _wait(fileno: int, *, writing: bool = False) -> None:
        select.select([fileno], [fileno] if writing else [], [])
