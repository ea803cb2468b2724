"""Opening a schema as a store: what it must be, how it becomes one, and migrations under a lock."""

import hashlib
import os
import re
from functools import cache
from typing import Final

import psycopg

from everstep.errors import StoreReadOnly, StoreUnusable
from everstep.model.crash_points import crash_point
from everstep.stores.opening import is_compatible, works_with
from everstep.stores.postgres.addresses import Address, address_of
from everstep.stores.postgres.connections import VERSION_MIN, Connection, Outage, connect, refused
from everstep.stores.postgres.queries import HERE, sql_text, statements

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
    """Return the first half of the advisory locks of a store's workers; the other half is the place. 4 bytes each."""
    return int.from_bytes(hashlib.sha256(f"everstep places {schema}".encode()).digest()[:4], "big") >> 1


def version_of(connection: Connection, address: Address) -> int:
    """Return the version of the schema, 0 if there is no store. Raises `StoreUnusable` for a newer one."""
    known = statements(address.schema)
    if not connection.execute(known["has_meta"], (address.schema,)).fetchall():
        if connection.execute(known["has_tables"], (address.schema,)).fetchall():
            raise StoreUnusable(
                f"The schema {address.schema} in {address.shown} has tables of something else. Nothing was changed. "
                "Name another one: …?schema=name"
            )
        return 0
    versions = connection.execute(known["schema_version"]).fetchall()
    version: int = versions[0][0] if versions else 0
    newest = len(migrations(address.schema))
    if version > newest and (version > newest + 1 or _works_with(connection, address, version) > newest):
        raise StoreUnusable(
            f"{address.shown} has version {version} of the schema, made by a newer release of Everstep; this one knows "
            f"version {newest}, and cannot live with it. Install the newer release. Nothing was changed."
        )
    return version


def _works_with(connection: Connection, address: Address, version: int) -> int:
    rows = connection.execute(statements(address.schema)["works_with"]).fetchall()
    return int(rows[0][0]) if rows else version


def _refuse_while_others_work(connection: Connection, address: Address, version: int) -> None:
    """Raise `StoreUnusable` if a migration would break workers of older releases that are at work."""
    if version == 0 or is_compatible(migrations(address.schema)[version]):
        return
    known = statements(address.schema)
    connection.execute(known["lock_worker_rows"])
    if workers := connection.execute(known["workers_at_work"], (places_of(address.schema),)).fetchall():
        listed = ", ".join(f"{id} (process {pid} on {host})" for id, pid, host in workers)
        raise StoreUnusable(
            f"{address.shown} has version {version} of the schema, and workers of an older release are at work which "
            f"could not live with version {version + 1}: {listed}. Stop them first. Nothing was changed."
        )


def stored_version(url: str) -> int:
    """Return the version of a store's schema, without changing anything; 0 if there is no store."""
    address = address_of(url)
    try:
        with connect(address, "everstep looks", durability="power") as connection:
            check_server(connection, address)
            return version_of(connection, address)
    except Outage as outage:
        raise StoreUnusable(f"{address.shown} cannot be reached: {outage}.") from outage
    except psycopg.Error as error:
        raise refused(error, address.shown) from error


def migrate(connection: Connection, address: Address, *, create: bool, may_migrate: bool) -> bool:
    """Bring the schema to this release's version, and return whether the store was made just now.

    Each migration is one transaction. All processes that open the store take turns, by a lock that ends with the
    transaction: whoever comes second finds the work done.
    """
    is_new = False
    known = statements(address.schema)
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
            with connection.transaction():
                connection.execute("SET LOCAL synchronous_commit TO on")  # whatever else may be lost
                connection.execute(known["lock_schema"], (address.schema,))
                if version_of(connection, address) == version:
                    _refuse_while_others_work(connection, address, version)
                    if not connection.execute(known["has_schema"], (address.schema,)).fetchall():
                        connection.execute(known["create_schema"])
                    connection.execute(migrations(address.schema)[version])
                    connection.execute(known["set_schema_version"], (version + 1,))
                    needed = works_with(migrations(address.schema), version + 1)
                    connection.execute(known["forget_works_with"])
                    if needed <= version:
                        connection.execute(known["set_works_with"], (needed,))
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
    """Return what brings a store from a version to this release's, for a person with the right to do it."""
    known = statements(schema)
    parts = ["BEGIN;", f"{known['create_schema']};"] if version == 0 else ["BEGIN;"]
    for number, text in enumerate(migrations(schema)[version:], version + 1):
        parts += [text.rstrip(), known["set_schema_version"].replace("$1", str(number)) + ";"]
        needed = works_with(migrations(schema), number)
        parts.append(known["forget_works_with"] + ";")
        if needed < number:
            parts.append(known["set_works_with"].replace("$1", str(needed)) + ";")
    return "\n\n".join([*parts, "COMMIT;"]) + "\n"
