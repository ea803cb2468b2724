"""A trip booked over three services: a flight, a room, a car. Without a car there is no trip, and what was booked goes.

Try it in an empty folder:

    python trip.py Oslo          # all three are booked
    python trip.py Venice        # there are no cars in Venice: the room and the flight are cancelled, in this order
    everstep show trip-Venice    # what was done and what was undone
    everstep rollback trip-Oslo && python trip.py Oslo      # changed your mind: all three are cancelled
    sqlite3 services.db 'select * from done'                # what the services did, each thing once

Kill it at any moment and run it again: it goes on, also in the middle of undoing.
"""

import sqlite3
import sys
import time

import everstep
from everstep import Done, Fatal, NotDone, Retry, step, workflow

PATIENT = Retry(attempts=6, first=0.1, factor=2.0, most=5.0)


def database() -> sqlite3.Connection:
    found = sqlite3.connect("services.db", timeout=30)
    found.execute("create table if not exists done (service, what, key primary key)")
    return found


def service(name: str, key: str, what: str) -> str:
    """The other side. It knows the key of a request, and does it once."""
    time.sleep(0.05)
    with database() as services:
        services.execute("insert or ignore into done values (?, ?, ?)", (name, what, key))
    return f"{name}-{key[:6]}"


# What undoes a step is a step as well. It gets the outcome of the step that it undoes, and then its arguments.
@step(retry=PATIENT)
def cancel_flight(ticket: str, city: str) -> None:
    service("flight", everstep.key(), f"cancel flight to {city}")


@step(retry=PATIENT)
def cancel_room(booking: str, city: str, nights: int) -> None:
    service("room", everstep.key(), f"cancel {nights} nights in {city}")


def ask_for_refund(key: str, *arguments: object) -> Done | NotDone:
    """Ask the car service what became of a refund whose outcome nobody knows."""
    with database() as services:
        found = services.execute("select what from done where key = ?", (key,)).fetchone()
    return Done() if found else NotDone()


# The deposit is money: it is returned once. If nobody knows whether it was, the service is asked.
@step(effect="once", probe=ask_for_refund)
def return_deposit(rental: str, city: str) -> None:
    service("car", everstep.key(), f"return deposit for a car in {city}")


@step(retry=PATIENT, compensate=cancel_flight)
def book_flight(city: str) -> str:
    return service("flight", everstep.key(), f"flight to {city}")


@step(retry=PATIENT, compensate=cancel_room)
def book_room(city: str, nights: int) -> str:
    return service("room", everstep.key(), f"{nights} nights in {city}")


@step(retry=PATIENT, compensate=return_deposit)
def rent_car(city: str) -> str:
    if city == "Venice":
        raise Fatal("there are no cars in Venice")  # another attempt would be useless
    return service("car", everstep.key(), f"car in {city}")


@workflow
def trip(city: str) -> str:
    flight = book_flight(city)
    room = book_room(city, 2)
    car = rent_car(city)  # if this fails, the run fails; but first all that was done before is undone
    return f"booked: {flight}, {room}, {car}"


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else "Oslo"
    try:
        print(everstep.run(trip, wanted, id=f"trip-{wanted}"))
    except Fatal as error:
        print(f"no trip: {error}. {' '.join(error.__notes__)}")
    except everstep.errors.RunCancelled:
        print("rolled back: everything is cancelled")
