"""Opening a schema as a store: what it must be, how it becomes one, and migrations under a lock."""

import hashlib
import os
import re
from functools import cache
from typing import Final

import psycopg

from everstep.errors import StoreReadOnly, StoreUnusable
from everstep.model.crash_points import crash_point
from everstep.stores.postgres.addresses import Address, address_of
from everstep.stores.postgres.connections import RULES, VERSION_MIN, Connection, Outage, connect, refused, transaction
from everstep.stores.postgres.queries import HERE, sql_text, statements
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.sql.migrations import is_compatible, works_with

OF_SCRIPT: Final = {name: RULES[name] for name in ("search_path", "standard_conforming_strings")}
"""Settings that a script sets itself, because it runs in a session of the person's own."""
_TABLE: Final = re.compile(r'\bTABLE (?:IF NOT EXISTS )?"\w+"\.(\w+)')
_MIGRATION: Final = re.compile(r"(\d{4})_\w+\.sql")


@cache
def migrations(schema: str) -> list[str]:
    """Return the text of each migration; the n-th one leads to version n."""
    found = sorted(name for name in os.listdir(os.path.join(HERE, "migrations")) if _MIGRATION.fullmatch(name))
    assert [int(name[:4]) for name in found] == list(range(1, len(found) + 1)), "migrations are numbered densely"
    return [sql_text(schema, "migrations", name) for name in found]


def check_server(connection: Connection, address: Address) -> None:
    """Raise `StoreUnusable` unless the server and the database can carry a store."""
    version = connection.info.server_version
    if version < VERSION_MIN:
        raise StoreUnusable(f"{address.shown} is PostgreSQL {version // 10000}; Everstep needs 14 or newer.")
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StoreUnusable(f"{address.shown} is a database in {encoding}; Everstep needs one in UTF8.")


def places_of(schema: str) -> int:
    """Return the first half of the advisory locks of a store's workers; the second half is the place. 4 bytes each."""
    return int.from_bytes(hashlib.sha256(f"everstep places {schema}".encode()).digest()[:4], "big") >> 1


def version_of(connection: Connection, address: Address) -> int:
    """Return the version of the schema, 0 if there is no store. Raises `StoreUnusable` for a newer one."""
    ask = PostgresStatements(address.schema, connection).all
    if not ask("has_meta", address.schema):
        if ask("has_tables", address.schema):
            raise StoreUnusable(
                f"The schema {address.schema} in {address.shown} has tables of something else. Nothing was changed. "
                "Name another one: …?schema=name"
            )
        return 0
    versions = ask("schema_version")
    version: int = versions[0][0] if versions else 0
    newest = len(migrations(address.schema))
    if version > newest and (version > newest + 1 or _works_with(connection, address, version) > newest):
        raise StoreUnusable(
            f"{address.shown} has version {version} of the schema, made by a newer release of Everstep; this one knows "
            f"version {newest}, and cannot use it. Install the newer release. Nothing was changed."
        )
    return version


def refuse_strangers(connection: Connection, address: Address) -> None:
    """Raise `StoreUnusable` if the schema or a table of the store was made by an untrusted role."""
    tables = sorted({name for text in migrations(address.schema) for name in _TABLE.findall(text)})
    found = PostgresStatements(address.schema, connection).all("owned_by_strangers", address.schema, tables)
    if strangers := [owner for (owner,) in found if owner != address.owner]:
        raise StoreUnusable(
            f"The schema {address.schema} in {address.shown}, or a table of the store in it, belongs to the role "
            f"{', '.join(strangers)}, and not to this role, one that it is a member of, or the owner of the database. "
            "The owner of a table can run anything with the rights of those who write to it. Nothing was changed. If "
            f"the store is meant to be theirs, say so in the URL: …?owner={strangers[0]}"
        )


def _works_with(connection: Connection, address: Address, version: int) -> int:
    rows = PostgresStatements(address.schema, connection).all("works_with")
    return int(rows[0][0]) if rows else version


def _refuse_while_others_work(connection: Connection, address: Address, version: int) -> None:
    """Raise `StoreUnusable` if a migration would break running workers of older releases."""
    if version == 0 or is_compatible(migrations(address.schema)[version]):
        return
    known = PostgresStatements(address.schema, connection)
    known.run("lock_worker_rows")
    if workers := known.all("workers_at_work", places_of(address.schema)):
        listed = ", ".join(f"{id} (process {pid} on {host})" for id, pid, host in workers)
        raise StoreUnusable(
            f"{address.shown} has version {version} of the schema, and workers of an older release are at work which "
            f"cannot use version {version + 1}: {listed}. Stop them first. Nothing was changed."
        )


def stored_version(url: str) -> int:
    """Return the version of a store's schema, without changing anything; 0 if there is no store."""
    address = address_of(url)
    try:
        with connect(address, "everstep looks", durability="power") as connection:
            check_server(connection, address)
            refuse_strangers(connection, address)
            return version_of(connection, address)
    except Outage as outage:
        raise StoreUnusable(f"{address.shown} cannot be reached: {outage}.") from outage
    except psycopg.Error as error:
        raise refused(error, address.shown) from error


def migrate(connection: Connection, address: Address, *, create: bool, may_migrate: bool) -> bool:
    """Bring the schema to this release's version, and return whether the store was made just now.

    Each migration is one transaction. All processes that open the store take turns, by a lock that ends with the
    transaction: the second one finds the work done.
    """
    is_new = False
    known = PostgresStatements(address.schema, connection)
    refuse_strangers(connection, address)
    newest = len(migrations(address.schema))
    while (version := version_of(connection, address)) < newest:
        if not version and not create:
            raise StoreUnusable(f"There is no store in the schema {address.schema} of {address.shown}.")
        if version and not may_migrate:
            raise StoreUnusable(
                f"{address.shown} has version {version} of the schema and this release needs {newest}. "
                "Open it with migrate=True when no older release uses it any more."
            )
        crash_point("store.migrate.before")
        try:
            with transaction(connection):
                # A migration must not be lost, whatever the durability of the store is.
                connection.execute("SET LOCAL synchronous_commit TO on")
                known.all("lock_schema", address.schema)
                if version_of(connection, address) == version:
                    _refuse_while_others_work(connection, address, version)
                    is_ours = not known.all("has_schema", address.schema)
                    if is_ours:
                        known.run("create_schema")
                    connection.execute(migrations(address.schema)[version])
                    if is_ours:
                        connection.execute(sql_text(address.schema, "private.sql"))
                    known.run("set_schema_version", version + 1)
                    needed = works_with(migrations(address.schema), version + 1)
                    known.run("forget_works_with")
                    if needed <= version:
                        known.run("set_works_with", needed)
                    is_new = is_new or version == 0
                crash_point("store.migrate.written")
        except psycopg.errors.InsufficientPrivilege as error:
            raise StoreReadOnly(
                f"This role may not make tables in {address.shown} ({error.diag.message_primary}). Let one that may "
                "run what `everstep migrate --print` prints."
            ) from error
        crash_point("store.migrate.after")
    return is_new


def script(schema: str, version: int = 0) -> str:
    """Return a script that brings a store from a version to this release's, for a person with the right to run it."""
    known = statements(schema)
    parts = ["BEGIN;", *(f"SET LOCAL {name} TO {value};" for name, value in OF_SCRIPT.items())]
    if version == 0:
        parts.append(f"{known['create_schema']};")
    for number, text in enumerate(migrations(schema)[version:], version + 1):
        parts += [text.rstrip(), known["set_schema_version"].replace("$1", str(number)) + ";"]
        needed = works_with(migrations(schema), number)
        parts.append(known["forget_works_with"] + ";")
        if needed < number:
            parts.append(known["set_works_with"].replace("$1", str(needed)) + ";")
    return "\n\n".join([*parts, "COMMIT;"]) + "\n"
