"""Writing in a caller's own transaction: what is written there is there if and only if the caller commits it.

The connection must be one of APSW, which brings its own copy of SQLite. The standard library's `sqlite3` is another
copy, and two of them on one file in one process free each other's locks when one closes it: that can destroy the store.
"""

import os
from collections.abc import Sequence
from typing import Any, Final

import apsw

from everstep.errors import Misuse
from everstep.stores.protocol import Operation, Verdict
from everstep.stores.sqlite.commits import Transaction

SAVEPOINT: Final = "everstep_outbox"


def write_in(path: str, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
    """Do operations in the open transaction of a connection to the file of a store. See `Store.write_in`."""
    _check(path, connection)
    # The caller's own row factory is not used here.
    row_trace, connection.row_trace = connection.row_trace, None
    cursor = connection.cursor()
    # A failure in the middle leaves none of these operations, and the caller's transaction as it was.
    cursor.execute(f"SAVEPOINT {SAVEPOINT}")
    try:
        verdicts = [Transaction(connection).one(operation) for operation in operations]
    except BaseException:
        if connection.in_transaction:  # some errors roll all of it back
            cursor.execute(f"ROLLBACK TO {SAVEPOINT}")
            cursor.execute(f"RELEASE {SAVEPOINT}")
        raise
    else:
        cursor.execute(f"RELEASE {SAVEPOINT}")
        return verdicts
    finally:
        connection.row_trace = row_trace


def _check(path: str, connection: Any) -> None:
    if not isinstance(connection, apsw.Connection):
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise Misuse(
            f"transaction= is an apsw.Connection to {path}, not a {kind}. The sqlite3 of the standard library is "
            "another copy of SQLite: on one file in one process they free each other's locks, which can destroy it."
        )
    if not connection.in_transaction:
        raise Misuse(
            "transaction= is a connection with an open transaction, and this one has none: begin one first, with "
            '`with connection:` or connection.execute("BEGIN IMMEDIATE"), and commit it afterwards.'
        )
    file = connection.db_filename("main")
    if not file or os.path.realpath(file) != path:
        raise Misuse(f"transaction= is a connection to the store's own file, {path}, and this one is to another.")
