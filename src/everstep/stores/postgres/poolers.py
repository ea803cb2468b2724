"""A pooler that nobody mentioned: session locks and prepared statements would belong to whoever comes next."""

from typing import Final

from everstep.errors import StoreUnusable
from everstep.stores.postgres.addresses import Address
from everstep.stores.postgres.connections import Connection, connect
from everstep.stores.postgres.queries import statements

REFUSAL: Final = "unsupported startup parameter"
"""What PgBouncer says to the settings of a session, unless it was told to pass over them."""


def refuse_unsaid_pooler(connection: Connection, address: Address) -> None:
    """Raise `StoreUnusable` if transactions go to changing sessions and the URL does not say so.

    A pooler tells its clients process numbers of its own, so most addresses cost one question. Behind one in session
    mode each connection keeps its session; in transaction mode another's transaction takes it away.
    """
    if address.pooler or (before := _session_of(connection, address)) == connection.info.backend_pid:
        return
    with connect(address, "everstep looks", durability="power") as other, other.transaction():
        _session_of(other, address)
        if _session_of(connection, address) == before:
            return
    raise StoreUnusable(unsaid(address))


def unsaid(address: Address) -> str:
    """Return what to say about such a pooler."""
    return (
        f"Between here and {address.shown} is a pooler that gives each transaction another session. "
        "Say so in the URL, and Everstep keeps nothing in a session: …?pooler=on. Nothing was changed."
    )


def _session_of(connection: Connection, address: Address) -> int:
    row = connection.execute(statements(address.schema)["session"], prepare=False).fetchone()
    assert row is not None
    return int(row[0])
