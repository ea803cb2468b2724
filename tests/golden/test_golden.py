"""What earlier releases left behind is read, verified, migrated and continued: `make.py` writes it for each of them."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.engine.app.app import App
from everstep.engine.verbs.export_file import read_header
from everstep.errors import RunCancelled
from everstep.stores.sqlite import SqliteStore, opening
from everstep.testing import replay_golden
from everstep.testing.checker import check, export_histories
from tests.golden import program
from tests.waiting import DEADLINE_SECONDS, open_sqlite, wait_on_loop_until

HERE = Path(__file__).parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/store.sql"))
VERSION_OF = {
    name: int((HERE / name / "store.sql").read_text().partition("'schema_version',")[2].partition(")")[0])
    for name in RELEASES
}
"""The version of the schema in each of them."""
VERSIONS = range(min(VERSION_OF.values()), len(opening.migrations()) + 1)
STORES = [(name, version) for name in RELEASES for version in VERSIONS if version >= VERSION_OF[name]]
"""Each store as it was left, and as a release that knows a later version would have it."""
STATUSES = {
    "finished": "completed",
    "known": "completed",
    "counted": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "undone": "cancelled",
    "waiting": "waiting",
    "approving": "waiting",
    "parent": "waiting",
    "held": "held",
    "half-done": "running",
}
FINISHED = {"name": "LAMP", "sum": 9, "mail": "mailed lamp"}


def made(release: str, version: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the store that a release has left, migrated up to a version, and return its URL."""
    with closing(open_sqlite(path)) as connection:
        connection.executescript((HERE / release / "store.sql").read_text())
    known = opening.migrations()[:version]
    with monkeypatch.context() as patched:
        patched.setattr(opening, "migrations", lambda: known)
        SqliteStore(path).close()
    return f"sqlite:///{path}"


async def results(app: App, *runs: str) -> list[Any]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [await app.get(run).result() for run in runs]


def test_there_is_a_store_of_each_version_of_the_schema() -> None:
    """A release that adds a migration adds its golden files: `python tests/golden/make.py`."""
    assert {version for _, version in STORES} == set(VERSIONS)
    assert max(VERSION_OF.values()) == len(opening.migrations())


@pytest.mark.parametrize(("release", "version"), STORES)
def test_a_store_that_an_earlier_release_left_is_migrated_verified_and_continued(
    release: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = made(release, version, tmp_path / "runs.db", monkeypatch)

    async def look() -> None:
        async with everstep.open(url) as app:
            rows = {row.id: row.status for row in await app.list()}
            assert rows.items() >= STATUSES.items()
            for run in rows:
                assert (await app.get(run).verify()).sound, run
            assert await results(app, "finished", "counted") == [FINISHED, 3]
            assert await app.get("finished").published() == {"sums": [2, 3, 4]}
            assert [entry.value async for entry in app.get("finished").stream("words")] == ["lamp"]
            assert [asked.what for asked in await app.approvals()] == ["ship"]
            assert (await app.get_schedule("daily").show()).note == "golden"
            with pytest.raises(ValueError, match="shelf is not there"):
                await app.get("failed").result()
            with pytest.raises(RunCancelled):
                await app.get("undone").result()

    async def go_on() -> None:
        async with everstep.open(url, recover=True) as app:
            await app.resolve("held", "done", value="paid by hand")
            await app.approve("approving")
            (child,) = await app.get("parent").children()
            for run in (app.get("waiting"), child):
                await run.signal("go", "on")
            ended = await results(app, "waiting", "approving", "parent", "held", "half-done")
            assert ended[:4] == [[[1], 2, "on", 3], "ANN", [4, [[3], 4, "on", 5]], "paid by hand"]
            assert ended[4] == ["booked seat 7", "mailed known", "worked on golden", "mailed golden"]
            assert await app.run(program.total, program.Order("lamp", [1, 2, 3]), id="finished") == FINISHED
            assert await (await app.fork("finished", at=1, id="fork", allow_effects=True)).result() == FINISHED
            await (await app.rollback("half-done", allow_uncompensated=True)).row()
            await wait_on_loop_until(lambda: status_of(app, "half-done") == "cancelled")
            for row in await app.list():
                assert (await app.get(row.id).verify()).sound, row.id
            assert check(export_histories(app.store)) == []

    asyncio.run(look())
    asyncio.run(go_on())


def status_of(app: App, run: str) -> str:
    row = app.store.run(run)
    assert row is not None
    return row.status


@pytest.mark.parametrize("release", RELEASES)
def test_a_history_that_an_earlier_release_saved_is_what_the_code_does(release: str) -> None:
    replay_golden(HERE / release / "history.json", program.total)


@pytest.mark.parametrize("release", RELEASES)
def test_what_an_earlier_release_exported_is_imported_and_continued(release: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with everstep.open(f"sqlite:///{tmp_path / 'runs.db'}", recover=True) as app:
            done = await app.import_(str(HERE / release / "runs.everstep"), copies=True)
            assert set(done.runs) == {"finished", "failed", "counted", "waiting", "approving"}
            await app.get("waiting").signal("go", "on")
            await app.approve("approving")
            assert await results(app, "finished", "waiting", "approving") == [FINISHED, [[1], 2, "on", 3], "ANN"]

    asyncio.run(main())


def test_exports_of_each_format_are_there(tmp_path: Path) -> None:
    formats = {}
    for path in HERE.glob("*/*.everstep"):
        with path.open("rb") as stream:
            formats.setdefault(read_header(stream).format, path)
    assert set(formats) == {1, 2}

    async def main() -> None:
        async with everstep.open(f"sqlite:///{tmp_path / 'runs.db'}") as app:
            await app.import_(str(formats[2]))
            assert (await app.get_schedule("daily").show()).is_paused
            assert await app.get("finished").result() == FINISHED

    asyncio.run(main())
