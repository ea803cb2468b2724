"""Schedules move between stores by a file: they go on in one of them, and no tick is started in both."""

from pathlib import Path

import msgspec
import pytest

from everstep import workflow
from everstep.engine.app.app import App
from everstep.engine.verbs import transfer
from everstep.errors import Damaged, IdConflict, Misuse
from everstep.model.schedules import State
from everstep.stores.rows.schedules import ChangeSchedule
from tests.schedules.kit import Place, until

STARTED: list[str] = []


@workflow(name="moved_tidy")
async def tidy(who: str) -> str:
    STARTED.append(who)
    return who


async def exported(app: App, path: Path, **options: object) -> None:
    await app.schedule(tidy, "ann", every=60, name="nightly")
    await app.export([], str(path), schedules=["nightly"], **options)  # type: ignore[arg-type]


async def test_a_schedule_that_is_moved_is_paused_where_it_was_and_goes_on_elsewhere(tmp_path: Path) -> None:
    here, there, path = Place(), Place(), tmp_path / "s.jsonl"
    STARTED.clear()
    async with here.worker() as app:
        with pytest.raises(Misuse, match="--hold"):
            await exported(app, path)
        await exported(app, path, unfinished="hold", by="ann")
        shown = await app.get_schedule("nightly").show()
        assert (shown.is_paused, shown.note, shown.by) == (True, "exported to s.jsonl", "ann")
    async with there.worker() as app:
        assert (await app.import_(str(path))).schedules == ["nightly"]
        assert not (await app.get_schedule("nightly").show()).is_paused
        await there.move(app, 61)
        await until(lambda: STARTED == ["ann"])
        with pytest.raises(IdConflict):
            await app.import_(str(path))
        assert (await app.import_(str(path), skip_existing=True)).schedules == []


async def test_a_copy_of_a_schedule_is_paused_where_it_is_imported(tmp_path: Path) -> None:
    here, there, path = Place(), Place(), tmp_path / "s.jsonl"
    async with here.worker(recover=False) as app:
        await exported(app, path, unfinished="leave")
        assert not (await app.get_schedule("nightly").show()).is_paused
    async with there.worker(recover=False) as app:
        await app.import_(str(path))
        shown = await app.get_schedule("nightly").show()
        assert shown.is_paused
        assert "continues where that was exported" in shown.note
        await app.get_schedule("nightly").delete()
        await app.import_(str(path), copies=True)
        assert not (await app.get_schedule("nightly").show()).is_paused


async def test_a_schedule_that_changes_meanwhile_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, path, write = Place(), tmp_path / "s.jsonl", transfer.write

    def write_late(app: App, *args: object) -> int:
        count = write(app, *args)  # type: ignore[arg-type]
        (row,) = here.store.schedules(name="nightly")
        newer = msgspec.structs.replace(row, revision=row.revision + 1)
        here.store.commit([ChangeSchedule("nightly", row.revision, newer)])
        return count

    monkeypatch.setattr(transfer, "write", write_late)
    async with here.worker(recover=False) as app:
        with pytest.raises(Misuse, match="changed just now"):
            await exported(app, path, unfinished="hold")
    assert not list(tmp_path.iterdir())


async def test_a_damaged_schedule_is_found_and_not_exported(tmp_path: Path) -> None:
    here = Place()
    async with here.worker(recover=False) as app:
        await app.schedule(tidy, "ann", every=60, name="nightly")
        (row,) = here.store.schedules(name="nightly")
        for damage in ({"state": msgspec.json.encode(State(tick=7))}, {"definition": b"{"}, {"workflow": "other"}):
            transfer.verify_schedule(row)
            with pytest.raises(Damaged):
                transfer.verify_schedule(msgspec.structs.replace(row, **damage))
