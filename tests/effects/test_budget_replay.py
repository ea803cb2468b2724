"""What workflow code reads of its budget is the same in every replay, whatever happened when it was read first.

The steps take what is left as an argument, so a replay that reads anything else is found as a difference.
"""

import asyncio
import random
from typing import Any

import msgspec
import pytest

import everstep
from everstep import Budget, BudgetExceeded, Retry, step, workflow
from everstep.codec import Codec
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.verify import load_verified
from everstep.engine.run.resume import replay
from everstep.model.accounts import Accounts, accounts_of
from everstep.testing.checker import check, export_histories
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Machine

CHANCE = random.Random(0)
QUICKLY = Retry(attempts=3, first=0.0, jitter=0.0)


@step(effect="read", cost=lambda lane, left: {"usd": 0.10 + 0.05 * lane, "tokens": 50}, retry=QUICKLY, fallback="none")
async def look(lane: int, left: Any) -> str:
    for _ in range(CHANCE.randrange(4)):
        await asyncio.sleep(0)
    if CHANCE.random() < 0.5:
        everstep.charge(usd=CHANCE.randrange(1, 40) / 100)
    if CHANCE.random() < 0.3:
        raise ConnectionError
    return "found"


@step(cost={"usd": 0.20}, fallback="not written")
async def write(lane: int, left: Any) -> str:
    await asyncio.sleep(CHANCE.random() / 500)
    everstep.charge(usd=CHANCE.randrange(1, 30) / 100, tokens=CHANCE.randrange(9))
    return "written"


@workflow
async def part_of_it(lane: int) -> str:
    told = await look(lane, everstep.budget().left[:3])
    return f"{told} {await write(lane, everstep.budget().left[:3])}"


@workflow(budget=Budget(usd=9, tokens=900, steps=60, then="fallback"))
async def wide(lanes: int) -> list[str]:
    async def one(lane: int) -> str:
        told = []
        with everstep.budget(usd=1.5, tokens=200, steps=12, then="fail" if lane % 2 else None):
            try:
                for _ in range(2):
                    told.append(await look(lane, everstep.budget().left[:3]))
                    everstep.charge(usd=0.01 * lane)
                    told.append(await write(lane, everstep.budget().left[:3]))
                    told.append(await part_of_it(lane))
            except BudgetExceeded as error:
                told.append(error.over)
            except ConnectionError:
                told.append("failed")
        return ", ".join(told)

    found = await asyncio.gather(*(one(lane) for lane in range(lanes)), return_exceptions=True)
    return [str(one) for one in found]


def replays_of_every_prefix(machine: Machine) -> int:
    """Replay every prefix of every history; return how many there were."""
    count = 0
    for row in [machine.row("w"), *machine.store.children("w")]:
        history = load_verified(machine.store, row)
        for length in range(1, len(history) + 1):
            replayed = replay(machine.store, Codec(), row, DECLARED.named(row.workflow), history[:length], quiet=True)
            replayed.execution.evict()
            assert not replayed.differences, f"{row.id} up to event {length}: {replayed.differences}"
            count += 1
    return count


def accounts_are_plain_data(machine: Machine) -> None:
    """A checkpoint can hold them: what is read back goes on as if nothing had happened."""
    history = load_verified(machine.store, machine.row("w"))
    whole = accounts_of(history[0].body, history[0].at)
    stored = accounts_of(history[0].body, history[0].at)
    for event in history:
        whole.take(event.kind, event.step, event.body, event.at)
        stored = msgspec.json.decode(msgspec.json.encode(stored), type=Accounts)
        stored.take(event.kind, event.step, event.body, event.at)
    assert stored == whole


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_left_is_the_same_in_every_replay(machine: Machine, seed: int) -> None:
    CHANCE.seed(seed)
    for _ in range(CHANCE.randrange(3)):  # killed three times in a row it would be held as poisoned
        app, _ = await machine.start(wide, 5, id="w")
        for _ in range(CHANCE.randrange(1, 40)):
            await asyncio.sleep(0)
        await machine.kill(app)
    app, run = await machine.start(wide, 5, id="w")
    while machine.status("w") not in ("completed", "held"):
        await asyncio.sleep(0.002)
        machine.clock.advance(1)
        app.pump.nudge()
    while machine.status("w") == "held":
        await app.resolve("w", "accept")
        await machine.until_status("w", "completed", "held")
    assert len(await run.result(timeout=60)) == 5
    assert replays_of_every_prefix(machine) > 60
    assert check(export_histories(machine.store)) == []
    accounts_are_plain_data(machine)
    kinds = set(machine.kinds("w"))
    assert {"charged", "budget_narrowed", "child_started", "step_completed"} <= kinds
    usd, tokens, attempts = charged_in(machine.events("w"))
    assert usd > 1
    assert tokens > 50
    assert attempts > 10
