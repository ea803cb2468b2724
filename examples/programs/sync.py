"""`def` code as most of it is: requests fetches orders and books them, SQLAlchemy notes what was booked."""

import os

import requests
from sqlalchemy import Integer, String, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import everstep
from everstep import Done, NotDone, Retry, step, workflow

SERVICE = os.environ.get("SERVICE", "")
ENGINE = create_engine("sqlite:///books.db", connect_args={"timeout": 30})


class Base(DeclarativeBase):
    pass


class Booking(Base):
    __tablename__ = "bookings"
    key: Mapped[str] = mapped_column(String, primary_key=True)
    order: Mapped[str] = mapped_column(String)
    number: Mapped[int] = mapped_column(Integer)


@step(effect="read", retry=Retry(attempts=3, first=0.05))
def orders() -> list[str]:
    answer = requests.get(f"{SERVICE}/orders", timeout=30)
    answer.raise_for_status()
    return [str(name) for name in answer.json()]


def find_booking(key: str, order: str) -> Done | NotDone:
    answer = requests.get(f"{SERVICE}/bookings", params={"key": key}, timeout=30)
    answer.raise_for_status()
    return Done(answer.json()[0]) if answer.json() else NotDone()


@step(effect="once", probe=find_booking, not_done=(requests.ConnectionError,), retry=Retry(attempts=3))
def book(order: str) -> int:
    answer = requests.post(f"{SERVICE}/bookings", json={"order": order, "key": everstep.key()}, timeout=30)
    answer.raise_for_status()
    return int(answer.json())


@step
def note(order: str, number: int) -> None:
    Base.metadata.create_all(ENGINE)
    with Session(ENGINE) as session, session.begin():
        session.merge(Booking(key=everstep.key(), order=order, number=number))


@step(effect="read")
def noted() -> list[str]:
    with Session(ENGINE) as session:
        return list(session.scalars(select(Booking.order).order_by(Booking.number)))


@workflow
def sync() -> list[str]:
    for order in orders():
        note(order, book(order))
    return noted()


if __name__ == "__main__":
    print(everstep.run(sync, id="sync-1"))
