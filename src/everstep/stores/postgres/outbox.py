"""Writing in a caller's own transaction: what is written there exists if and only if the caller commits it.

Other processes are notified at the commit, by a NOTIFY inside the transaction. That makes commits of such transactions
wait for each other a little, which the store's own commits need not.
"""

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from everstep.errors import Misuse
from everstep.stores.postgres.adapters import adapt
from everstep.stores.postgres.transaction import Transaction
from everstep.stores.protocol import Operation, Verdict


class _Borrowed:
    """A caller's connection, used in our own way: each cursor adapts values, and the caller's settings stay."""

    prepare_threshold = None

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection

    def cursor(self) -> "psycopg.RawCursor[Any]":
        """Return a cursor with the adapters of the store's own connections."""
        cursor = psycopg.RawCursor(self._connection, row_factory=tuple_row)
        adapt(cursor)
        return cursor

    def execute(self, query: Any, parameters: Any = (), *, prepare: bool | None = None, binary: bool = False) -> Any:
        """Do a statement, and return the cursor."""
        return self.cursor().execute(query, parameters, prepare=prepare, binary=binary)


def write_in(schema: str, places: int, entropy: str, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
    """Do operations in the open transaction of a connection to the database of a store. See `Store.write_in`."""
    if not isinstance(connection, psycopg.Connection):
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise Misuse(f"transaction= is a psycopg.Connection to the store's own database, not a {kind}.")
    if connection.info.transaction_status != psycopg.pq.TransactionStatus.INTRANS:
        raise Misuse(
            "transaction= is a connection with an open transaction, and this one has none: begin one first, with "
            "`with connection.transaction():`, and commit it afterwards."
        )
    transaction = Transaction(schema, places, _Borrowed(connection))  # type: ignore[arg-type]
    with connection.transaction():  # a savepoint: a failure in the middle leaves none of these operations
        before = transaction.take_names()
        _check_database(transaction, entropy)
        transaction.prepare(operations)
        verdicts = [transaction.one(operation) for operation in operations]
        transaction.tell(f"everstep_{schema}")
        transaction.give_names_back(before)
        return verdicts


def _check_database(transaction: Transaction, entropy: str) -> None:
    try:
        found = transaction.entropy()
    except psycopg.errors.UndefinedTable:
        found = ""
    if found != entropy:
        raise Misuse("transaction= is a connection to the store's own database, and this one is to another.")
