"""The ways in which an atomic step reaches PostgreSQL, and a body for each that sells."""

import asyncio
import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import everstep
from everstep import STORE, transaction, workflow

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

SALE = "INSERT INTO sales VALUES (%s, %s)"


def sell(connection: Any, item: str) -> str:
    connection.execute(SALE, (everstep.key(), item))
    return f"sold {item}"


async def sell_async(connection: Any, item: str) -> str:
    await connection.execute(SALE, (everstep.key(), item))
    return f"sold {item}"


def sell_by_sqlalchemy(connection: Any, item: str) -> str:
    connection.execute(_sale_in_names(), {"key": everstep.key(), "item": item})
    return f"sold {item}"


async def sell_by_sqlalchemy_async(connection: Any, item: str) -> str:
    await connection.execute(_sale_in_names(), {"key": everstep.key(), "item": item})
    return f"sold {item}"


# SQLAlchemy is imported where it is used: processes that are killed are started often.
@cache
def _sale_in_names() -> Any:
    from sqlalchemy import text

    return text("INSERT INTO sales VALUES (:key, :item)")


def engine(url: str, **options: Any) -> "Engine":
    from sqlalchemy import create_engine

    whole, _, schema = url.replace("postgresql://", "postgresql+psycopg://").partition("&schema=")
    if schema:
        options["execution_options"] = {"everstep_schema": schema}
    return create_engine(whole, **options)


def async_engine(url: str, **options: Any) -> "AsyncEngine":
    from sqlalchemy.ext.asyncio import create_async_engine

    whole, _, schema = url.replace("postgresql://", "postgresql+psycopg://").partition("&schema=")
    if schema:
        options["execution_options"] = {"everstep_schema": schema}
    return create_async_engine(whole, **options)


def asyncpg_engine(url: str) -> "AsyncEngine":
    """The same by another driver, which has names of its own for what is set."""
    from sqlalchemy import make_url
    from sqlalchemy.ext.asyncio import create_async_engine

    whole, _, schema = url.replace("postgresql://", "postgresql+asyncpg://").partition("&schema=")
    made = make_url(whole)
    arguments = {"ssl": False, "server_settings": {"search_path": schema}}
    made = made.difference_update_query(["options", "sslmode", "connect_timeout"])
    return create_async_engine(made, connect_args=arguments, execution_options={"everstep_schema": schema})


def sessions(url: str) -> Any:
    from sqlalchemy.orm import sessionmaker

    return sessionmaker(engine(url))


def async_sessions(url: str) -> Any:
    from sqlalchemy.ext.asyncio import async_sessionmaker

    return async_sessionmaker(async_engine(url))


class Way(NamedTuple):
    database: Callable[[str], Any]
    """From the URL of a server to what is given to `@transaction`."""
    sell: Callable[..., Any]
    is_async: bool = False
    by_sqlalchemy: bool = False
    in_store: bool = False


WAYS = {
    "psycopg": Way(lambda url: url, sell),
    "psycopg, async": Way(lambda url: url, sell_async, is_async=True),
    "store": Way(lambda url: STORE, sell, in_store=True),
    "store, async": Way(lambda url: STORE, sell_async, is_async=True, in_store=True),
    "engine": Way(engine, sell_by_sqlalchemy, by_sqlalchemy=True),
    "engine, async": Way(async_engine, sell_by_sqlalchemy_async, is_async=True, by_sqlalchemy=True),
    "asyncpg": Way(asyncpg_engine, sell_by_sqlalchemy_async, is_async=True, by_sqlalchemy=True),
    "session": Way(sessions, sell_by_sqlalchemy, by_sqlalchemy=True),
    "session, async": Way(async_sessions, sell_by_sqlalchemy_async, is_async=True, by_sqlalchemy=True),
}


def body_of(way: Way, before: Callable[[Any], Any] | None = None, after: Callable[[Any], Any] | None = None) -> Any:
    """Return a body that sells, and does something before and after that: functions of the connection."""

    def body(connection: Any, item: str) -> str:
        if before is not None:
            before(connection)
        sold: str = way.sell(connection, item)
        if after is not None:
            after(connection)
        return sold

    async def body_async(connection: Any, item: str) -> str:
        if before is not None and inspect.isawaitable(done := before(connection)):
            await done
        sold: str = await way.sell(connection, item)
        if after is not None and inspect.isawaitable(done := after(connection)):
            await done
        return sold

    return body_async if way.is_async else body


def step_of(way: Way, url: str, body: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a step that sells."""
    return transaction(way.database(url), name="sell", **options)(body or way.sell)


def flow_of(way: Way, url: str, body: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a workflow that sells a lamp, by a body in the place of the usual one if there is one."""
    return selling(step_of(way, url, body, **options))


def selling(step: Any) -> Any:
    """Return a workflow that sells a lamp."""

    @workflow(name="sale")
    async def sale() -> str:
        sold: str = await (step("lamp") if step.is_async else asyncio.to_thread(step, "lamp"))
        return sold

    return sale


def said(statement: str) -> Any:
    """Say something, by any library."""
    from sqlalchemy import text

    def say(connection: Any) -> Any:
        by_sqlalchemy = type(connection).__module__.startswith("sqlalchemy")
        return connection.execute(text(statement) if by_sqlalchemy else statement)

    return say
