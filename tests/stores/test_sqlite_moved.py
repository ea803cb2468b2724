"""A store's file that is moved, removed or replaced while it is open: nothing is acknowledged any more."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

import everstep
from everstep.errors import StoreFailed, StoreMoved
from everstep.stores.brief import Busy
from everstep.stores.protocol import Accepted, StartRun
from everstep.stores.sqlite import SqliteStore, connections
from everstep.worker.serving import WorkerApp
from tests.stores.kit import new_run

WAIT_SECONDS_MAX = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "runs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(path)
    yield made
    made.close()


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("there"))


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """As a backup is put in its place, or by an editor."""
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


def remove_wal(path: Path) -> None:
    path.with_name("runs.db-wal").unlink()


def replace_wal(path: Path) -> None:
    shutil.copy(path.with_name("runs.db-wal"), path.with_name("copy"))
    os.replace(path.with_name("copy"), path.with_name("runs.db-wal"))


def remove_shm(path: Path) -> None:
    path.with_name("runs.db-shm").unlink()


WAYS = [move, move_folder, remove, replace, remove_wal, replace_wal, remove_shm]


def starts_until_refused(store: SqliteStore) -> int:
    """Start runs until the store refuses, and return how many were acknowledged."""
    until = time.monotonic() + WAIT_SECONDS_MAX
    count = 0
    while time.monotonic() < until:
        try:
            assert store.commit([StartRun(new_run(f"late {count}"))]) == [Accepted()]
        except StoreMoved:
            return count
        count += 1
    raise AssertionError("it goes on acknowledging")


@pytest.mark.parametrize("way", WAYS)
def test_a_store_whose_file_is_gone_acknowledges_nothing_any_more(
    store: SqliteStore, path: Path, way: Callable[[Path], None]
) -> None:
    store.commit([StartRun(new_run("early"))])
    way(path)
    starts_until_refused(store)
    for _ in range(3):
        with pytest.raises(StoreMoved, match="was moved, removed or replaced"):
            store.commit([StartRun(new_run("later"))])
    with pytest.raises(StoreFailed):
        store.register_worker("me", 1, "host", 10**18)
    with pytest.raises(StoreFailed):
        store.changed()


@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_only_looks_for_changes_notices_as_well(
    store: SqliteStore, path: Path, way: Callable[[Path], None]
) -> None:
    store.changed()
    way(path)
    until = time.monotonic() + WAIT_SECONDS_MAX
    with pytest.raises(StoreMoved):  # noqa: PT012 - it takes a moment
        while time.monotonic() < until:
            store.changed()


def test_a_file_that_was_put_back_is_the_store_again_for_a_new_process(path: Path) -> None:
    store = SqliteStore(path)
    store.commit([StartRun(new_run("early"))])
    move(path)
    starts_until_refused(store)
    store.close()
    path.with_name("elsewhere.db").rename(path)
    again = SqliteStore(path)
    assert again.run("early") is not None
    assert again.commit([StartRun(new_run("new"))]) == [Accepted()]
    again.close()


def test_a_file_that_is_written_by_others_checkpointed_and_vacuumed_is_not_moved(
    store: SqliteStore, path: Path
) -> None:
    for number in range(20):
        store.commit([StartRun(new_run(f"r{number}"))])
    other = apsw.Connection(str(path))
    other.set_busy_timeout(20_000)
    other.pragma("wal_checkpoint(TRUNCATE)")
    other.execute("VACUUM")
    other.close()
    store._writer.refuse_if_moved(now=True)
    assert store.commit([StartRun(new_run("later"))]) == [Accepted()]
    assert store.run("r0") is not None


def test_a_commit_that_must_not_wait_leaves_the_look_to_a_thread_and_looks_itself_if_there_is_none(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.commit([StartRun(new_run("at once"))], patient=False) == [Accepted()]
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.0)
    store._writer.refuse_if_moved(now=True)
    with pytest.raises(Busy):
        store.commit([StartRun(new_run("r"))], patient=False)
    assert store.run("r") is None
    assert store.commit([StartRun(new_run("r"))]) == [Accepted()]  # on a thread: it may wait
    with pytest.raises(Busy):
        store.commit([StartRun(new_run("s"))], patient=False)
    move(path)
    with pytest.raises(StoreMoved):
        store.commit([StartRun(new_run("s"))], patient=False)


@pytest.mark.parametrize("way", [move, remove_wal])
def test_an_idle_worker_notices_and_is_not_ready_any_more(path: Path, way: Callable[[Path], None]) -> None:
    asyncio.run(_notices(path, way))


async def _notices(path: Path, way: Callable[[Path], None]) -> None:
    app = await WorkerApp(SqliteStore(path), lambda news: None).open()
    try:
        assert app.health().ready
        way(path)
        until = time.monotonic() + WAIT_SECONDS_MAX
        while app.health().ready:
            assert time.monotonic() < until, "it goes on as if nothing had happened"
            await asyncio.sleep(0.01)
        assert not app.health().healthy

        @everstep.workflow
        async def flow() -> int:
            return 1

        with pytest.raises(StoreMoved):
            await app.start(flow, id="late")
    finally:
        await app.close()
