"""The loop of an application goes on while another process has the file of its store locked."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

import everstep
from everstep.stores.brief import Busy, briefly, waits_until
from everstep.stores.sqlite import SqliteStore
from everstep.stores.sqlite.reads import Reader
from tests.loop_calls import Pauses, methods, outcomes_of, prepared, quick, wrong
from tests.waiting import open_raw, wait_until

READS = {
    *(f"App.{verb}" for verb in ("list", "holds", "approvals", "schedules", "limit", "effects", "repair", "rollback")),
    *(f"App.{verb}" for verb in ("worker_gone", "export", "export all", "export schedules", "gc", "close")),
    *(f"Run.{verb}" for verb in ("result", "status", "row", "history", "published", "stream", "children", "holds")),
    *("Run.verify", "Run.approvals", "Client.list", "Client.approvals", "Client.get, opened and closed"),
    "Schedule.show",
}
"""Calls that only read: they do not wait for whoever writes."""


class LockedFile:
    """Another process is in the middle of a write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: apsw.Connection | None = None

    def begin(self) -> None:
        self._connection = open_raw(self._path)
        self._connection.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        assert self._connection is not None
        self._connection.execute("ROLLBACK")
        self._connection.close()


async def opened_and_closed(url: str, **options: Any) -> str:
    async with everstep.open(url, **options) as app:
        return await app.get("done").status()


def test_no_call_that_writes_stops_the_loop_while_the_file_is_locked(tmp_path: Path) -> None:
    async def main() -> None:
        path, url = tmp_path / "runs.db", f"sqlite:///{tmp_path / 'runs.db'}"
        pauses = Pauses("locked SQLite file")
        async with prepared(url, tmp_path) as (_, expected):
            calls = {name: call for name, (call, _) in expected.items() if name not in READS}
            calls["open and recover"] = lambda: opened_and_closed(url, recover=True)
            expected["open and recover"] = calls["open and recover"], "completed"
            assert not wrong(expected, await outcomes_of(LockedFile(path), calls, pauses))
        pauses.tell()

    asyncio.run(main())


def test_each_public_method_is_among_the_calls(tmp_path: Path) -> None:
    """A method that is added without a call here would not be tried while a store is silent."""

    async def called() -> set[str]:
        async with prepared(f"sqlite:///{tmp_path / 'runs.db'}", tmp_path) as (_, expected):
            return {name.partition(",")[0].partition(" ")[0] for name in expected}

    found = asyncio.run(called())
    assert methods() - found == set()
    assert found - methods() == {"Client.get"}, "these are no methods"


def test_a_new_store_is_made_without_stopping_the_loop(tmp_path: Path) -> None:
    """Its file is there already, and locked: whoever makes it waits for that."""

    async def main() -> None:
        path = tmp_path / "new.db"
        open_raw(path).close()
        url = f"sqlite:///{path}"

        async def first() -> int:
            async with everstep.open(url) as app:
                return await app.run(quick, 1)

        assert await outcomes_of(LockedFile(path), {"open": first}) == {"open": 2}

    asyncio.run(main())


def test_runs_of_a_blocking_app_go_on_while_one_of_its_calls_waits(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with everstep.open(f"sqlite:///{path}") as app:
        app.run(quick, 1)
        trouble = LockedFile(path)
        trouble.begin()
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(app.run(quick, 2)))
        waiting.start()
        turned = threading.Event()
        wait_until(lambda: app.inner.committer._busy)
        app.loop.call_soon_threadsafe(turned.set)
        wait_until(turned.is_set)
        assert waiting.is_alive()
        trouble.end()
        waiting.join()
        assert found == [3]


def test_whatever_the_engine_asks_on_a_loop_it_asks_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are quick in a file, so this is seen only by looking at each."""
    patient: list[str] = []
    ask = Reader.all

    def watched(reader: Reader, name: str, *parameters: object) -> Any:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            if waits_until() is None:
                patient.append(name)
        return ask(reader, name, *parameters)

    async def main() -> None:
        url = f"sqlite:///{tmp_path / 'runs.db'}"
        async with prepared(url, tmp_path, recover=True) as (_, expected):
            for call, _ in expected.values():
                with suppress(everstep.Error):
                    await call()
        async with everstep.open(url, recover=True) as app:  # and what was left is taken up
            await app.signal("shown", "go", 1)
            assert await app.get("shown").result() == 1

    monkeypatch.setattr(Reader, "all", watched)
    asyncio.run(main())
    assert patient == []


def test_a_reader_that_waits_does_not_make_the_loop_wait_for_each_question(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    reader = store._reader
    try:
        reader._lock.acquire()
        with pytest.raises(Busy):
            briefly(store.run, "a")
        assert reader._is_slow
        reader._lock.release()
        with pytest.raises(Busy):
            briefly(store.run, "a")
        assert store.run("a") is None
        assert briefly(store.run, "a") is None
    finally:
        store.close()
