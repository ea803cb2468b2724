"""Two releases on one SQLite file: the older one lives with one version more than it knows, if that says so."""

from pathlib import Path

import pytest

from everstep.errors import StoreUnusable
from everstep.stores.protocol import StartRun
from everstep.stores.sql.migrations import COMPATIBLE
from everstep.stores.sqlite import SqliteStore, opening
from tests.stores.kit import new_run


def test_a_release_lives_with_one_version_more_than_it_knows_if_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opening.migrations()[0]
    added = f"{COMPATIBLE}\nALTER TABLE runs ADD COLUMN flavour TEXT;"
    path = tmp_path / "runs.db"

    def release(*migrations: str) -> None:
        monkeypatch.setattr(opening, "migrations", lambda: list(migrations))

    release(first)
    older = SqliteStore(path)
    older.commit([StartRun(new_run("before"))])
    release(first, added)
    SqliteStore(path).close()
    release(first)
    older.commit([StartRun(new_run("after"))])  # it goes on, and another one may begin
    again = SqliteStore(path)
    assert [row is not None for row in map(again.run, ("before", "after"))] == [True, True]
    for store in (older, again):
        store.close()
    for third in ("CREATE TABLE more (id TEXT);", f"{COMPATIBLE}\nCREATE TABLE more (id TEXT);"):
        release(first, added, third)
        SqliteStore(path).close()
        release(first)
        with pytest.raises(StoreUnusable, match="version 3 of the schema, made by a newer release"):
            SqliteStore(path)
        release(first, added)
        if COMPATIBLE in third:
            SqliteStore(path).close()
        else:
            with pytest.raises(StoreUnusable, match="version 3"):
                SqliteStore(path)
        path.unlink()
