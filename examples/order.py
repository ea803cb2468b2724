"""An order over three services: one is unreliable, and one says no for good.

Try it in an empty folder:

    python order.py lamp         # shipping stumbles twice and is tried again; the order goes out
    python order.py piano        # nobody ships pianos: the payment is returned, the stock is freed
    sqlite3 services.db 'select * from done'      # what the services did, each thing once

Kill it at any moment and run it again: it goes on, also in the middle of giving the money back.
"""

import sqlite3
import sys
import time

import everstep
from everstep import Fatal, Retry, step, workflow

PATIENT = Retry(attempts=6, first=0.1, factor=2.0, most=5.0)


def service(name: str, key: str, what: str) -> str:
    """The other side. Like every good payment service it knows the key of a request, and does it once."""
    time.sleep(0.1)
    database = sqlite3.connect("services.db", timeout=30)
    with database:
        database.execute("create table if not exists done (service, what, key primary key)")
        database.execute("insert or ignore into done values (?, ?, ?)", (name, what, key))
    database.close()
    return f"{name}-{key[:6]}"


# Each step hands its key on. If the process dies after the service has acted and before the outcome is recorded, the
# step is done again with the same key, and the service sees that it has done this already.
@step(retry=PATIENT)
def reserve(item: str) -> str:
    return service("stock", everstep.key(), f"reserve {item}")


@step(retry=PATIENT)
def charge(customer: str, amount: int) -> str:
    return service("payment", everstep.key(), f"charge {customer} {amount}")


@step(retry=PATIENT)
def ship(item: str, customer: str) -> str:
    if item == "piano":
        raise Fatal("we do not ship pianos")  # another attempt would be useless
    if everstep.current().attempt < 3:
        raise ConnectionError("shipping does not answer")  # another attempt may help
    return service("shipping", everstep.key(), f"ship {item} to {customer}")


@step(retry=PATIENT)
def refund(payment: str) -> None:
    service("payment", everstep.key(), f"refund {payment}")


@step(retry=PATIENT)
def free(reservation: str) -> None:
    service("stock", everstep.key(), f"free {reservation}")


@workflow
def order(item: str, customer: str, price: int) -> str:
    reservation = reserve(item)
    payment = charge(customer, price)
    try:
        return f"shipped: {ship(item, customer)}"
    except Fatal as error:
        # Plain Python, and durable: whatever happens now, both of these will be done.
        refund(payment)
        free(reservation)
        return f"refunded, because {error}"


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else "lamp"
    print(everstep.run(order, wanted, "ann", 120, id=f"order-{wanted}"))
