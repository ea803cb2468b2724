"""Taking up many runs that others have started: without pauses, and without missing what arrives meanwhile."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.process import pump
from everstep.stores.protocol import Claimed, ClaimedPast, Operation, Post, Verdict
from tests.lasting import LastingStore

SECONDS_MAX = 20.0
TURNS_MAX = 200


@step
async def act(x: int) -> int:
    return x + 1


@workflow
async def acting(x: int) -> int:
    return await act(x)


@workflow
async def listening() -> str:
    return await everstep.receive("word", str)


async def test_a_worker_with_more_runs_than_places_takes_the_next_without_waiting_for_a_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pump, "POLL_SECONDS", 1_000.0)

    store = LastingStore()
    starter = App(store)
    await starter.open()
    starter.draining = True  # it starts runs and drives none
    for number in range(40):
        await starter.start(acting, number, id=f"run-{number}")
    starter.store.leave(starter.worker)
    worker = await App(store, recover=True, concurrency=4).open()
    async with asyncio.timeout(SECONDS_MAX):
        while store.counts() != {"completed": 40}:
            await asyncio.sleep(0.005)
    await worker.close()


@step(effect="read")
async def stay(number: int) -> int:
    await LEAVE[number].wait()
    return number


@workflow
async def staying(number: int) -> int:
    return await stay(number)


LEAVE: list[asyncio.Event] = []


async def test_runs_that_leave_an_app_which_drives_more_than_it_has_places_for_do_not_take_its_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[int] = []

    async def turn(self: pump.Pump) -> None:
        turns.append(1)
        await take_turn(self)
        if len(turns) > TURNS_MAX:
            await asyncio.sleep(0)  # it would never pause

    take_turn = pump.Pump._turn
    monkeypatch.setattr(pump.Pump, "_turn", turn)

    LEAVE[:] = [asyncio.Event() for _ in range(12)]
    app = await App(LastingStore(), concurrency=4).open()
    runs = [await app.start(staying, number) for number in range(12)]
    async with asyncio.timeout(SECONDS_MAX):
        app.pump.nudge()
        while not app.pump._has_more:  # it has looked, and there was no room
            await asyncio.sleep(0.001)
        turns.clear()
        for number, run in enumerate(runs):
            LEAVE[number].set()
            assert await run.result() == number
    assert len(turns) < TURNS_MAX
    await app.close()


class ReadingStore(LastingStore):
    """One whose claims have read the past of their runs; and then somebody else delivers, before anybody hears."""

    def __init__(self) -> None:
        super().__init__()
        self.app: App | None = None
        self.has_looked = threading.Event()

    def commit(self, operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        verdicts = super().commit(operations, **how)
        for place, verdict in enumerate(verdicts):
            if isinstance(verdict, Claimed) and self.app is not None:
                row = verdict.row
                verdicts[place] = Claimed(row, ClaimedPast(self.events(row.id, row.generation), self.inbox(row.id)))
                super().commit([Post(row.id, "signal", "word", value=b'["now"]', at=1)])
                self.app.loop.call_soon_threadsafe(self.app.pump.nudge)
                assert self.has_looked.wait(SECONDS_MAX)
        return verdicts

    def pending(self, worker: str) -> list[str]:
        found = super().pending(worker)
        if found and self.app is not None:
            self.app.loop.call_soon(self.has_looked.set)
        return found


async def test_what_arrives_between_a_claim_and_its_verdict_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "POLL_SECONDS", 1_000.0)

    store = ReadingStore()
    first = await App(store).open()
    await first.start(listening, id="r")
    while store.counts() != {"waiting": 1}:
        await asyncio.sleep(0.005)
    await first.close()
    second = await App(store).open()
    await second.start(listening, id="another")  # so that the pump is not idle, and does not look by itself
    while store.counts() != {"waiting": 2}:
        await asyncio.sleep(0.005)
    second.committer._seconds = 1.0  # so that commits are made on the committer's thread, and the pump can look
    store.app = second
    async with asyncio.timeout(SECONDS_MAX):
        assert await second.take_up_run("r")
        assert store.has_looked.is_set()
        while store.counts() != {"waiting": 1, "completed": 1}:
            await asyncio.sleep(0.005)
    await second.close()
