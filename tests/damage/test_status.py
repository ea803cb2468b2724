"""A run whose stored status is no status: it is held if it has not ended, all that read it say so, nothing hangs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from click.testing import CliRunner

import everstep
from everstep import workflow
from everstep.cli import main
from everstep.engine.process import without_status
from everstep.errors import Damaged, RunHeld
from tests.engine.resume_helpers import Machine

WRONG = ["waitinh", "", "zzz", "completee", "Failed"]


@workflow(name="status_waiting")
async def waiting() -> int:
    everstep.stream("s").append(1)
    return await everstep.receive("go", int)


@workflow(name="status_ended")
async def ended() -> int:
    everstep.stream("s").append(1)
    return 1


async def with_status(machine: Machine, status: str) -> None:
    app = await machine.boot()
    await app.run(ended, id="ended")
    await app.start(waiting, id="open")
    await machine.until_status("open", "waiting")
    await machine.stop(app)
    machine.sql("UPDATE runs SET status = ?", status)


async def read_stream(app: Any, run: str) -> None:
    async for _ in app.get(run).stream("s"):
        pass


VERBS: dict[str, Callable[[Any, str], Awaitable[Any]]] = {
    "status": lambda app, run: app.get(run).status(),
    "result": lambda app, run: app.get(run).result(),
    "stream": read_stream,
    "signal": lambda app, run: app.signal(run, "go", 1),
    "ask": lambda app, run: app.ask(run, "go", 1),
    "cancel": lambda app, run: app.cancel(run),
    "cancel now": lambda app, run: app.cancel(run, now=True),
    "retry": lambda app, run: app.retry(run),
    "rollback": lambda app, run: app.rollback(run),
    "hold": lambda app, run: app.hold(run),
    "fork": lambda app, run: app.fork(run, at=1),
    "start": lambda app, run: app.start(waiting if run == "open" else ended, id=run),
    "restart": lambda app, run: app.start(waiting if run == "open" else ended, id=run, on_existing="restart"),
}


@pytest.mark.parametrize("run", ["open", "ended"])
@pytest.mark.parametrize("verb", VERBS)
async def test_each_verb_says_that_a_run_without_a_status_is_damaged(machine: Machine, verb: str, run: str) -> None:
    await with_status(machine, "waitinh")
    app = await machine.boot()
    before = machine.dump()
    with pytest.raises(Damaged, match="there is no status 'waitinh'"):
        async with asyncio.timeout(60):
            await VERBS[verb](app, run)
    assert machine.dump() == before, "nothing is acknowledged, and nothing is changed"


@pytest.mark.parametrize("status", WRONG)
async def test_a_worker_holds_what_has_not_ended_and_leaves_what_has(machine: Machine, status: str) -> None:
    await with_status(machine, status)
    app = await machine.worker()
    await machine.until_status("open", "held")
    assert machine.hold("open").reason == "damaged"
    assert "its row had no status" in machine.hold("open").summary
    assert machine.hold("open").resolutions == ["retry"]
    with pytest.raises(RunHeld):
        await app.get("open").result()
    await machine.rest()
    assert machine.row("ended").status == status
    assert (await app.repair("ended")).status == "completed"
    assert await app.get("ended").result() == 1
    await app.resolve("open", "retry")
    await app.signal("open", "go", 5)
    assert await app.get("open").result() == 5


async def test_a_run_whose_history_is_damaged_too_is_repaired(machine: Machine) -> None:
    await with_status(machine, "waitinh")
    machine.sql("UPDATE events SET at = at + 1 WHERE run = 'open' AND kind = 'signal_awaited'")
    app = await machine.worker()
    await machine.until_status("open", "held")
    assert "digest" in machine.hold("open").summary
    await app.resolve("open", "repair")
    await app.signal("open", "go", 5)
    assert await app.get("open").result() == 5


async def test_a_worker_that_is_at_work_finds_it_within_a_minute(machine: Machine) -> None:
    app, _ = await machine.start(waiting, id="open")
    await machine.until_status("open", "waiting")
    await machine.stop(app)
    await machine.worker()
    await machine.rest()
    await machine.until(lambda: machine.row("open").owner is None)
    machine.sql("UPDATE runs SET status = 'waitinh'")
    await machine.advance(61)
    await machine.until_status("open", "held")


async def test_doctor_and_ls_name_runs_without_a_status(machine: Machine) -> None:
    await with_status(machine, "waitinh")
    path = str(machine.path)
    done = await asyncio.to_thread(CliRunner().invoke, main, ["doctor", "--url", path])
    assert done.exit_code == 1
    assert "2 damaged, without a status" in done.output
    for run in ("open", "ended"):
        assert run in done.output
    done = await asyncio.to_thread(CliRunner().invoke, main, ["ls", "--url", path])
    assert "2 of 2 runs (2 damaged, without a status)" in done.output
    done = await asyncio.to_thread(CliRunner().invoke, main, ["top", "--once", "--url", path])
    assert "2 damaged" in done.output
    machine.sql("UPDATE runs SET status = CASE id WHEN 'open' THEN 'waiting' ELSE 'completed' END")
    done = await asyncio.to_thread(CliRunner().invoke, main, ["doctor", "--url", path])
    assert done.exit_code == 0
    assert "damaged" not in done.output


@pytest.mark.parametrize(
    "damage", ["workflow = CAST(x'FF' AS TEXT)", "budget = x'00'", "tags = '{'", "published = x'00'"]
)
async def test_a_row_that_cannot_be_read_keeps_no_other_from_being_held_and_no_worker_from_claiming(
    machine: Machine, damage: str
) -> None:
    app = await machine.boot()
    for id in ("open-1", "open-2", "open-3"):
        await app.start(waiting, id=id)
        await machine.until_status(id, "waiting")
    await machine.stop(app)
    machine.sql(f"UPDATE runs SET status = 'aaa', {damage} WHERE id IN ('open-1', 'open-2')")  # looked at first
    machine.sql("UPDATE runs SET status = 'zzz' WHERE id = 'open-3'")
    worker = await machine.worker()
    await machine.until(lambda: "open-3" in [hold.run for hold in machine.store.holds()])
    await machine.advance(150)
    assert not worker.background.has_failing
    assert not worker.background.not_claiming
    assert await worker.run(ended) == 1


async def test_a_history_that_cannot_be_judged_keeps_no_other_run_from_being_held(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.boot()
    for id in ("open-1", "open-2"):
        await app.start(waiting, id=id)
        await machine.until_status(id, "waiting")
    await machine.stop(app)
    machine.sql("UPDATE runs SET status = 'zzz'")
    real = without_status.diagnose

    def judged(store: Any, row: Any) -> Any:
        if row.id == "open-1":
            raise Damaged("its history cannot be judged", 0)
        return real(store, row)

    monkeypatch.setattr(without_status, "diagnose", judged)
    worker = await machine.worker()
    await machine.until(lambda: [hold.run for hold in machine.store.holds()] == ["open-2"])
    await machine.advance(150)
    assert not worker.background.has_failing
    assert not worker.background.not_claiming
