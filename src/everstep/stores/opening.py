"""Opening a store by its URL."""

import os
from collections.abc import Callable
from typing import Final, Literal

from everstep.errors import Misuse
from everstep.model.chains import ChainKeyOption, chain_keys
from everstep.model.collector import paused_collector
from everstep.stores.protocol import Store

DEFAULT_URL: Final = "sqlite:///everstep.db"
NEW_BYTES: Final = (0, 4096)
"""The size of a store's file before its tables are there."""


def default_url() -> str:
    """Return `EVERSTEP_URL`, else `sqlite:///everstep.db`."""
    return os.environ.get("EVERSTEP_URL") or DEFAULT_URL


def open_store(
    url: str,
    *,
    durability: Literal["power", "process"] = "power",
    clock: Callable[[], int] | None = None,
    create: bool = True,
    migrate: bool = True,
    chain_key: ChainKeyOption = None,
) -> Store:
    """Open the store that a URL names.

    `sqlite:///relative.db`, `sqlite:////absolute.db` or a bare path: a SQLite file. `postgresql://…`: a schema of a
    PostgreSQL database, `everstep` unless `?schema=` names another. `memory:`: for tests.
    `durability="power"` survives the loss of power, `"process"` only that of the process. With `create=False` a missing
    store is an error, with `migrate=False` one that an older release made. Without `chain_key` the environment's count.
    """
    store = _opened(url, durability=durability, clock=clock, create=create, migrate=migrate)
    try:
        store.chain = chain_keys(chain_key, os.environ.get("EVERSTEP_CHAIN_KEY", ""))
    except BaseException:
        store.close()
        raise
    return store


def _opened(
    url: str,
    *,
    durability: Literal["power", "process"],
    clock: Callable[[], int] | None,
    create: bool,
    migrate: bool,
) -> Store:
    if durability not in ("power", "process"):
        raise Misuse(f'durability={durability!r}: it is "power" or "process".')
    if is_postgres(url):
        return _postgres(url, durability=durability, clock=clock, create=create, migrate=migrate)
    path = _path_of(url) if url != "memory:" else None
    with paused_collector():
        from everstep.stores.sqlite import MemoryStore, SqliteStore  # start-up: another kind needs no SQLite

    if path is None:
        return MemoryStore(clock=clock)
    return SqliteStore(path, durability=durability, clock=clock, create=create, migrate=migrate)


def may_be_in_the_making(url: str) -> bool:
    """Return True if a URL names an almost empty file: another process may be creating the store in it."""
    try:
        return not is_postgres(url) and os.stat(_path_of(url)).st_size in NEW_BYTES
    except (OSError, Misuse):
        return False


def is_postgres(url: str) -> bool:
    """Return True if a URL names a PostgreSQL database."""
    return url.startswith(("postgresql://", "postgres://"))


def _postgres(
    url: str,
    *,
    durability: Literal["power", "process"],
    clock: Callable[[], int] | None,
    create: bool,
    migrate: bool,
) -> Store:
    try:
        from everstep.stores.postgres import PostgresStore  # psycopg is an optional dependency
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "psycopg":
            raise
        raise Misuse("A store on PostgreSQL needs psycopg: pip install 'everstep[postgres]'") from error
    return PostgresStore(url, durability=durability, clock=clock, create=create, migrate=migrate)


def _path_of(url: str) -> str:
    """Return the path of a SQLite file from its URL, or a bare path as it is."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme in ("postgresql", "postgres"):
        raise Misuse("A PostgreSQL database is not a file. This command is about SQLite files.")
    elif scheme == "sqlite" and rest.startswith("/"):
        path = rest[1:]
    else:
        known = "sqlite:///relative.db, sqlite:////absolute.db or postgresql://host/database"
        raise Misuse(f"{scheme}://… is not the URL of a store. Use {known}.")
    if not path or path.startswith((":", "sqlite:")) or "\0" in path:
        raise Misuse("A store needs the path of a file, as in sqlite:///runs.db; for tests there is memory:")
    return path
