"""`everstep migrate`: bring a store's schema to this release's version."""

import os

import apsw
import click

from everstep.cli.opening import store_options
from everstep.cli.terminal import console, say_json, styled
from everstep.errors import Misuse
from everstep.stores.opening import _path_of, default_url, is_postgres, open_store
from everstep.stores.sqlite.connections import Patience, connect, translated
from everstep.stores.sqlite.opening import migrations, version_of


@click.command("migrate")
@click.option("--print", "prints", is_flag=True, help="Print the SQL instead, for a role that may (PostgreSQL).")
@store_options
def migrate_command(url: str | None, in_json: bool, prints: bool) -> None:
    """Bring a store to this release's version of the schema. Stop workers of older releases first."""
    named = url or default_url()
    if prints:
        click.echo(_script(named), nl=False)
        return
    if is_postgres(named):
        _migrate_postgres(named, in_json)
        return
    before = schema_version(url)
    store = open_store(url or default_url(), create=False)
    path: str = getattr(store, "path", store.url)
    store.close()
    _say(path, before, len(migrations()), in_json)


def _script(named: str) -> str:
    """Return the SQL for a person who may run it."""
    if not is_postgres(named):
        raise Misuse("A SQLite file is migrated by any process that may write it: there is nothing to print.")
    from everstep.stores.postgres.addresses import address_of  # psycopg is an optional dependency
    from everstep.stores.postgres.opening import script, stored_version  # psycopg is an optional dependency

    return script(address_of(named).schema, stored_version(named))


def _migrate_postgres(named: str, in_json: bool) -> None:
    from everstep.stores.postgres.opening import migrations, stored_version  # psycopg is an optional dependency

    before = stored_version(named)
    store = open_store(named, create=True)
    store.close()
    _say(store.url, before, len(migrations("everstep")), in_json)


def _say(path: str, before: int, after: int, in_json: bool) -> None:
    if in_json:
        say_json({"store": path, "from": before, "to": after})
    elif before == after:
        console().print(styled("✓ ", "green").append(f"{path} has version {after} of the schema already."))
    else:
        console().print(styled("✓ ", "green").append(f"{path}: the schema went from version {before} to {after}."))


def file_of(url: str | None) -> str:
    """Return the path of the SQLite file that a URL names."""
    named = url or default_url()
    if named == "memory:":
        raise Misuse("memory: is no file; it lasts as long as the process that opened it.")
    return os.path.realpath(_path_of(named))


def schema_version(url: str | None) -> int:
    """Return the version of a store's schema, without changing anything; 0 for an empty or missing file."""
    path = file_of(url)
    if not os.path.exists(path) or not os.path.getsize(path):
        return 0
    try:
        flags = apsw.SQLITE_OPEN_READONLY
        connection = connect(path, durability="power", patience=Patience(), flags=flags, vfs=None)
    except apsw.Error as error:
        raise translated(error, path, writing=False) from error
    try:
        return version_of(connection, path)
    except apsw.Error as error:
        raise translated(error, path, writing=False) from error
    finally:
        connection.close()
