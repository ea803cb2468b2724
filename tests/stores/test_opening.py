"""Opening: URLs, what becomes a store, and what is refused unchanged."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from everstep.errors import Misuse, StoreError, StoreUnusable
from everstep.stores.opening import open_store
from everstep.stores.protocol import StartRun
from everstep.stores.sqlite import MemoryStore, SqliteStore, opening
from tests.stores.kit import begin_python, new_run, python
from tests.waiting import open_raw


def version(path: Path) -> object:
    connection = open_raw(path)
    try:
        return connection.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchall()
    finally:
        connection.close()


# -- URLs -----------------------------------------------------------------------------------------------------------


def test_a_url_or_a_path_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///a.db", f"sqlite:///{tmp_path}/a.db", "a.db", str(tmp_path / "a.db")):
        store = open_store(url)
        assert store.url == f"sqlite:///{os.path.realpath(tmp_path)}/a.db"
        store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.db"]


def test_a_store_s_own_url_opens_it_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "a.db"))
    store.commit([StartRun(new_run("a"))])
    store.close()
    again = open_store(store.url, create=False)
    assert again.run("a") is not None
    assert (store.is_new, again.is_new) == (True, False)
    again.close()


def test_memory_is_for_tests() -> None:
    store = open_store("memory:", clock=lambda: 5)
    assert isinstance(store, MemoryStore)
    assert store.now() == 5


@pytest.mark.parametrize("url", ["mysql://x", "sqlite://a.db", "sqlite:///", "", ":memory:", "a\0b"])
def test_a_url_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(Misuse):
        open_store(url)


def test_durability_is_one_of_two_words() -> None:
    with pytest.raises(Misuse, match="power"):
        open_store("memory:", durability="none")  # type: ignore[arg-type]


@pytest.mark.parametrize(("durability", "synchronous"), [("power", 2), ("process", 1)])
def test_durability_decides_how_commits_are_synced(tmp_path: Path, durability: str, synchronous: int) -> None:
    store = SqliteStore(tmp_path / "a.db", durability=durability)  # type: ignore[arg-type]
    connection = store._writer.connection
    assert connection.pragma("synchronous") == synchronous
    assert connection.pragma("journal_mode") == "wal"
    assert connection.pragma("mmap_size") == 0
    assert connection.pragma("foreign_keys") == 0
    store.close()


def test_apsw_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, everstep, everstep.stores.opening; print('apsw' in sys.modules)"
    assert python(code) == "False\n"


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_only_the_owner_can_read_a_store(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        store = SqliteStore(tmp_path / "a.db")
        store.register_worker("me", 1, "host", 1)
        store.commit([StartRun(new_run("a"))])
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes == dict.fromkeys(["a.db", "a.db-wal", "a.db-shm", "a.db-live"], 0o600)
        store.close()
    finally:
        os.umask(before)


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.touch()
    store = SqliteStore(path)
    assert store.is_new
    store.close()
    assert version(path) == [(len(opening.migrations()),)]


def test_without_create_a_missing_or_empty_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with pytest.raises(StoreUnusable, match="no store"):
        SqliteStore(path, create=False)
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreUnusable, match="empty"):
        SqliteStore(path, create=False)
    assert path.read_bytes() == b""


def test_two_names_of_one_file_share_its_liveness_locks(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    one, two = SqliteStore(tmp_path / "real" / "a.db"), SqliteStore(tmp_path / "link" / "a.db")
    one.register_worker("me", 1, "host", 0)
    assert two.bury_dead(0) == []
    one.close()
    two.close()


def foreign_database(path: Path) -> None:
    connection = open_raw(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE runs (id); INSERT INTO runs VALUES (1)")
    connection.close()


def foreign_application(path: Path) -> None:
    connection = open_raw(path)
    connection.execute("PRAGMA application_id = 77")
    connection.close()


def damaged_header(path: Path) -> None:
    SqliteStore(path).close()
    content = bytearray(path.read_bytes())
    content[3] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("just a text\n" * 500),
        lambda path: path.write_bytes(b"x"),
        foreign_database,
        foreign_application,
        damaged_header,
    ],
    ids=["text", "one byte", "another database", "another application", "damaged header"],
)
def test_a_file_that_is_not_a_store_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    path = tmp_path / "a.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match="not a store"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_folder_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="is a folder"):
        SqliteStore(tmp_path)
    with pytest.raises(StoreUnusable, match="no folder"):
        SqliteStore(tmp_path / "none" / "a.db")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreUnusable, match="ordinary file"):
        SqliteStore(tmp_path / "pipe")


WITHOUT_PRIVILEGES = """
import ctypes, os, struct, sys
if os.getuid() == 0:
    # The superuser without its capabilities: now modes count for it as well.
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    assert ctypes.CDLL(None).capset(header, nothing) == 0
from everstep.errors import StoreError
from everstep.stores.opening import open_store
try:
    open_store(sys.argv[1])
except StoreError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform != "linux" and os.getuid() == 0, reason="the superuser may write anything")
@pytest.mark.parametrize("what", ["file", "folder", "both", "new"])
def test_what_cannot_be_written_is_refused_as_read_only(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "stores"
    folder.mkdir()
    if what != "new":
        SqliteStore(folder / "a.db").close()
        (folder / "a.db").chmod(0o600 if what == "folder" else 0o400)
    folder.chmod(0o700 if what == "file" else 0o500)
    said = python(WITHOUT_PRIVILEGES, str(folder / "a.db"))
    folder.chmod(0o700)
    assert said.startswith("StoreReadOnly"), said


def test_a_store_of_a_newer_release_is_refused_and_both_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    SqliteStore(path).close()
    connection = open_raw(path)
    connection.execute("UPDATE meta SET value = 9 WHERE name = 'schema_version'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match=rf"version 9 .* version {len(opening.migrations())}"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_an_older_store_is_migrated_only_if_that_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    SqliteStore(path).close()
    steps = [*opening.migrations(), "CREATE TABLE later (x) STRICT".replace("x", "x TEXT")]
    monkeypatch.setattr(opening, "migrations", lambda: steps)
    with pytest.raises(StoreUnusable, match="migrate=True"):
        SqliteStore(path, migrate=False)
    assert version(path) == [(len(steps) - 1,)]
    store = SqliteStore(path)
    assert not store.is_new
    store.close()
    assert version(path) == [(len(steps),)]


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    SqliteStore(path).close()
    steps = [*opening.migrations(), "CREATE TABLE later (x TEXT) STRICT; CREATE TABLE runs (x TEXT) STRICT"]
    monkeypatch.setattr(opening, "migrations", lambda: steps)
    with pytest.raises(apsw.SQLError):
        SqliteStore(path)
    monkeypatch.undo()
    store = SqliteStore(path)
    assert store._reader._connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'later'").get == 0
    store.close()


OPEN = """
import sys
from everstep.stores.opening import open_store
sys.stdin.read(1)
print(open_store(sys.argv[1]).is_new)
"""


def test_many_processes_open_a_new_file_at_once_and_one_makes_it(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"a{attempt}.db"
        if attempt == 1:
            path.touch()
        processes = [begin_python(OPEN, str(path)) for _ in range(6)]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("x")
            process.stdin.flush()
        said = [process.communicate() for process in processes]
        assert sorted(out for out, _ in said) == ["False\n"] * 5 + ["True\n"], said


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    store.close()
    store.close()
    for use in (lambda: store.run("a"), lambda: store.commit([StartRun(new_run("a"))]), store.changed):
        with pytest.raises((Misuse, StoreError), match="closed"):
            use()
