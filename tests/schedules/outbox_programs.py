"""A caller with a transaction of its own, in which it writes an order, starts a run and sends a signal."""

import os
import signal
import sys
from pathlib import Path

import apsw

import everstep


def die_at(point: str) -> None:
    if os.environ.get("DIES_AT") == point:
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, order: str) -> None:
    with everstep.connect(f"sqlite:///{folder}/store.db") as client:
        client.start("desk", id="desk")
        connection = apsw.Connection(str(folder / "store.db"))
        connection.set_busy_timeout(60_000)
        connection.execute("CREATE TABLE IF NOT EXISTS orders (name TEXT)")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES (?)", (order,))
        client.start("ship", order, id=order, transaction=connection)
        client.signal("desk", "order", order, transaction=connection)
        die_at("commit")
        connection.execute("COMMIT")
        die_at("committed")
        connection.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), f"o-{sys.argv[2]}")
