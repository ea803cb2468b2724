"""Leases: a stopped owner loses its runs after a while, a dead one at once; and only the epoch makes that safe."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import Misuse
from everstep.stores.protocol import Claim, Claimed
from tests.engine.resume_helpers import Gate, Machine, Program, freeze
from tests.waiting import stop_between_writes
from tests.worlds.ledger import NOTES, note


@workflow
async def one_word_noted() -> str:
    return await note(await everstep.receive("word", str))


async def test_a_stopped_owner_keeps_its_run_until_its_lease_has_lapsed(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        NOTES.append("slow")
        await gate.wait()
        return "done"

    @workflow
    async def flow() -> str:
        return await slow()

    app = await machine.boot(lease=30.0)
    await app.start(flow, id="r")
    await gate.reached.wait()
    freeze(app)
    worker = await machine.worker(lease=30.0)
    await machine.watch(worker, 29)
    await machine.until(lambda: not worker.pump._nudged)
    assert machine.row("r").owner == app.worker
    assert NOTES == ["slow"]
    await machine.watch(worker, 2)
    await machine.until(lambda: machine.row("r").owner == worker.worker)
    gate.opened.set()
    await machine.until_status("r", "completed")
    assert machine.row("r").deaths == 0, "it was stopped, and not dead"
    await machine.kill(app)


async def test_a_worker_without_neighbours_asks_for_some_as_seldom_as_it_renews_its_lease(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await machine.worker(lease=30.0)
    asked = 0
    neighbours = worker.store.neighbours

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return neighbours(*args)

    monkeypatch.setattr(worker.store, "neighbours", counted)
    await worker.become_worker()
    for _ in range(120):
        machine.clock.advance(0.5)
        worker.pump.nudge()
        await machine.clock.rest(worker)
    assert 4 <= asked <= 8, "every ten seconds, and not at each of 120 sweeps"


async def test_a_zombie_writes_nothing_and_both_callers_get_one_result(machine: Machine) -> None:
    gates = [Gate(), Gate()]
    bodies = iter(gates)

    @step
    async def slow() -> str:
        gate = next(bodies)
        number = gates.index(gate)
        await gate.wait()
        return f"body {number}"

    @workflow
    async def flow() -> str:
        return await slow() + await note("!")

    zombie = await machine.boot(lease=10.0)
    first = await zombie.start(flow, id="r")
    await gates[0].reached.wait()
    old_epoch = machine.row("r").epoch
    freeze(zombie)
    worker = await machine.worker()
    await machine.watch(worker, 11)
    await gates[1].reached.wait()
    assert machine.row("r").epoch > old_epoch

    gates[0].opened.set()  # the zombie wakes up and has an outcome
    await machine.until(lambda: "r" not in zombie.drivers)
    assert machine.kinds("r").count("step_completed") == 0
    gates[1].opened.set()
    zombie.pump.start()
    assert await worker.get("r").result(timeout=60) == "body 1!"
    assert await first.result(timeout=60) == "body 1!"
    assert NOTES == ["!"]
    assert machine.replay("r").differences == []


async def test_a_claim_alone_fences_the_old_owner_although_the_head_has_not_moved(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        await gate.wait()
        return "from the zombie"

    @workflow
    async def flow() -> str:
        return await slow()

    zombie = await machine.boot(lease=10.0)
    await zombie.start(flow, id="r")
    await gate.reached.wait()
    events = machine.events("r")
    (owner,) = machine.store.workers()
    assert machine.store.lapse(owner.id, owner.lease_until)
    (verdict,) = machine.store.commit([Claim("r", "somebody else", machine.clock.now(), ("running",))])
    assert isinstance(verdict, Claimed)
    gate.opened.set()
    await machine.until(lambda: "r" not in zombie.drivers)
    assert machine.events("r") == events
    assert machine.status("r") == "running"


async def test_a_lease_is_renewed_while_its_owner_lives(machine: Machine) -> None:
    app = await machine.boot(lease=30.0)
    await app.start(one_word_noted, id="r")
    worker = await machine.worker(lease=30.0)
    for _ in range(10):
        await machine.advance(12)
    assert machine.row("r").owner == app.worker
    assert "r" not in worker.drivers


async def test_a_buried_worker_comes_back_as_another_and_its_runs_go_on(machine: Machine) -> None:
    """Its row is gone, as after a mistaken burial: it must not go on under the old name."""
    app = await machine.boot(lease=30.0)
    run = await app.start(one_word_noted, id="r")
    await machine.rest(app)
    result = asyncio.ensure_future(run.result())
    old = app.worker
    machine.sql("DELETE FROM workers")
    await machine.advance(15)
    await machine.until(lambda: app.worker not in ("", old))
    assert [worker.id for worker in machine.store.workers()] == [app.worker]
    await app.signal("r", "word", "still here")
    assert await asyncio.wait_for(result, 10) == "still here"
    assert NOTES == ["still here"]
    pumps = [task for task in asyncio.all_tasks() if "Pump._work" in repr(task)]
    assert len(pumps) == 1


async def test_a_buried_worker_goes_on_with_runs_that_nobody_waits_for(machine: Machine) -> None:
    app = await machine.boot(lease=30.0)
    await app.start(one_word_noted, id="r")
    await machine.rest(app)
    old = app.worker
    machine.sql("DELETE FROM workers")
    await machine.advance(15)
    await machine.until(lambda: app.worker not in ("", old))
    await app.signal("r", "word", "still here")
    await machine.until_status("r", "completed")


async def test_two_apps_race_for_one_claim_and_exactly_one_gets_it_every_time(machine: Machine) -> None:
    one, two = await machine.boot(), await machine.boot()
    await one.become_worker()
    await two.become_worker()
    await one.start(one_word_noted, id="r")
    await machine.rest(one)
    await machine.stop(one)
    one = await machine.boot()
    await one.become_worker()
    epochs = [machine.row("r").epoch]
    for _ in range(200):
        machine.sql("UPDATE runs SET owner = NULL, status = 'queued' WHERE id = 'r'")
        barrier = asyncio.Barrier(2)

        async def race(app: Any) -> bool:
            await barrier.wait()  # noqa: B023
            claim = Claim("r", app.worker, machine.clock.now(), ("queued",))
            verdicts = await asyncio.to_thread(app.store.commit, [claim])
            return isinstance(verdicts[0], Claimed)

        assert sorted(await asyncio.gather(race(one), race(two))) == [False, True]
        epochs.append(machine.row("r").epoch)
    assert epochs == list(range(epochs[0], epochs[0] + 201))
    machine.sql("UPDATE runs SET owner = NULL, status = 'waiting' WHERE id = 'r'")


async def test_two_workers_share_many_runs_and_none_is_done_twice(machine: Machine) -> None:
    @workflow
    async def counted(number: int) -> int:
        await note(str(number))
        return number

    starter = await machine.boot()
    gate = Gate()

    begun: list[int] = []

    @step
    async def block(number: int) -> None:
        begun.append(number)
        await gate.wait()

    @workflow
    async def blocked(number: int) -> int:
        await note(f"before {number}")
        await block(number)
        return int(await note(str(number)))

    for number in range(40):
        await starter.start(blocked, number, id=f"b{number}")
    await machine.until(lambda: len(begun) == 40)  # so all before is durable
    await machine.kill(starter)
    NOTES.clear()
    gate.opened.set()
    workers = [await machine.worker() for _ in range(2)]
    await machine.until(lambda: machine.store.counts() == {"completed": 40})
    assert sorted(NOTES, key=int) == [str(number) for number in range(40)]
    assert len(workers) == 2


@pytest.mark.parametrize("lease", [0, 0.5, -1])
def test_a_lease_that_is_too_short_is_refused(tmp_path: Path, lease: float) -> None:
    async def main() -> None:
        async with everstep.open(str(tmp_path / "x.db"), lease=lease):
            pass

    with pytest.raises(Misuse, match="lease"):
        asyncio.run(main())


OWNER = """
@step
async def hang(name: str) -> str:
    with open(URL + ".notes", "a") as file:
        file.write(sys.argv[2] + "\\n")
    if sys.argv[2] == "first":
        print("reached", flush=True)
        await asyncio.sleep(float(sys.argv[3]))
    return sys.argv[2]

@workflow
async def hanging() -> str:
    return await hang("x")

async def main():
    async with everstep.open(URL, recover=True, lease=float(sys.argv[4])) as app:
        if sys.argv[2] == "first":
            run = await app.start(hanging, id="r")
        else:
            print("ready", flush=True)
            run = app.get("r")
        print(await run.result(), flush=True)

asyncio.run(main())
"""


def test_a_killed_process_is_replaced_long_before_its_lease_lapses(tmp_path: Path) -> None:
    first = Program(tmp_path, OWNER, "first", "60", "3600")
    assert first.line() == "reached"
    second = Program(tmp_path, OWNER, "second", "0", "3600")
    assert second.line() == "ready"
    first.kill()
    status, out, err = second.end()
    assert status == 0, err
    assert out == "second\n"


def test_a_stopped_process_loses_its_run_and_is_fenced_when_it_wakes(tmp_path: Path) -> None:
    first = Program(tmp_path, OWNER, "first", "1", "1")
    assert first.line() == "reached"
    stop_between_writes(tmp_path / "runs.db", first.signal)
    second = Program(tmp_path, OWNER, "second", "0", "1")
    assert second.line() == "ready"
    status, out, err = second.end()
    assert (status, out.split()[0]) == (0, "second"), err
    first.signal(signal.SIGCONT)
    status, out, err = first.end()
    assert (status, out.split()[0]) == (0, "second"), err
    machine = Machine(tmp_path)
    try:
        assert machine.kinds("r") == [
            "run_started", "step_started", "step_started", "step_completed", "run_completed",
        ]  # fmt: skip
    finally:
        machine.store.close()
    assert (tmp_path / "runs.db.notes").read_text().split() == ["first", "second"]
