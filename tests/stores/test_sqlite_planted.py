"""A store in a folder where everybody can write: what strangers put under its names is not used, and not changed."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from everstep.errors import StoreUnusable
from everstep.stores.sqlite import SqliteStore, opening
from everstep.stores.sqlite.liveness import LiveLocks

STRANGER = 54321
NAMES = ("runs.db", "runs.db-wal", "runs.db-shm", "runs.db-journal", "runs.db-live")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def plant_file(path: Path, victim: Path) -> None:
    path.write_bytes(b"theirs")
    path.chmod(0o666)
    os.chown(path, STRANGER, STRANGER)


def plant_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)
    os.lchown(path, STRANGER, STRANGER)


def plant_dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("new"))
    os.lchown(path, STRANGER, STRANGER)


def plant_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path, 0o666)
    os.chown(path, STRANGER, STRANGER)


def plant_second_name(path: Path, victim: Path) -> None:
    os.link(victim, path)


PLANTS: list[Callable[[Path, Path], None]] = [
    plant_file,
    plant_link,
    plant_dangling_link,
    plant_pipe,
    plant_second_name,
]


@needs_root
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_stranger_put_at_a_name_of_the_store_is_refused_and_left_alone(
    shared: Path, tmp_path: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    if name != "runs.db":
        SqliteStore(shared / "runs.db").close()
        for one in shared.glob("runs.db-*"):
            one.unlink()
    plant(shared / name, victim)
    before = os.lstat(shared / name)
    with pytest.raises(StoreUnusable, match="every user can write"):
        SqliteStore(shared / "runs.db")
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "new").exists()
    after = os.lstat(shared / name)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


@needs_root
def test_what_comes_between_looking_and_opening_is_found_and_nothing_of_it_is_believed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger is quicker than SQLite, with a log that changes the store."""
    path = shared / "runs.db"
    other = SqliteStore(path)
    other.register_worker("w", os.getpid(), "here", 1)
    log = Path(f"{path}-wal").read_bytes()
    assert log
    other.close()
    content = path.read_bytes()
    look, switch = opening.check_is_store, opening._switch_to_wal

    def look_and_lose(*args: object, **options: object) -> None:
        look(*args, **options)  # type: ignore[arg-type]
        Path(f"{path}-wal").write_bytes(log)

    def switch_as_nobody(connection: apsw.Connection) -> str:
        mode = switch(connection)
        os.chown(f"{path}-wal", STRANGER, STRANGER)  # run by root, SQLite takes what is there for its own
        return mode

    monkeypatch.setattr(opening, "check_is_store", look_and_lose)
    monkeypatch.setattr(opening, "_switch_to_wal", switch_as_nobody)
    with pytest.raises(StoreUnusable, match="every user can write"):
        SqliteStore(path)
    assert path.read_bytes() == content
    assert Path(f"{path}-wal").read_bytes() == log


def test_a_store_of_ones_own_is_opened_again_there_and_is_private(shared: Path) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            store = SqliteStore(shared / "runs.db")
            store.register_worker("w", os.getpid(), "here", 1)
            modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in shared.iterdir()}
            store.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("runs.db", "runs.db-wal", "runs.db-shm", "runs.db-live"), 0o600)


def test_a_link_of_ones_own_leads_to_the_store(tmp_path: Path, shared: Path) -> None:
    SqliteStore(tmp_path / "runs.db").close()
    (shared / "link.db").symlink_to(tmp_path / "runs.db")
    store = SqliteStore(shared / "link.db")
    assert store.path == str(tmp_path / "runs.db")
    store.close()


@pytest.mark.parametrize("make", [lambda path, victim: path.symlink_to(victim), lambda path, _: os.mkfifo(path)])
def test_the_file_of_locks_is_no_link_and_no_pipe(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    make(tmp_path / "runs.db-live", victim)
    with pytest.raises(StoreUnusable):
        LiveLocks(str(tmp_path / "runs.db-live")).take(1)
    assert victim.read_bytes() == b"mine"
