"""Restore, import, export, fork, retry, rollback: every pair, in either order, with effects of every contract between.

What happened is judged by a till that the engine knows nothing of: nothing that must not happen twice did, unless it
was undone in between, and whatever ends as completed has done everything.
"""

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Done, NotDone, Retry, step, transaction, workflow
from everstep.engine.app.app import App
from everstep.engine.history.restored import mark_restored
from everstep.errors import CompensationBegun, CrossesOnce, RunActive
from everstep.model.status import ENDED
from everstep.stores.protocol import HoldRow, RunFilter
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw

OPERATIONS = ("restore", "export", "import", "fork", "retry", "rollback")
CONTRACTS = ("label", "visit", "post", "ship", "sell")


class Till:
    """What was really done: which effect, for which item, under which key."""

    def __init__(self) -> None:
        self.applied: list[tuple[str, str, str]] = []
        self.undone: list[tuple[str, str]] = []
        self.shop = Path()

    def apply(self, effect: str, item: str) -> str:
        entry = (effect, item, everstep.key())
        if effect != "label" or entry not in self.applied:  # the receiver of labels honours keys
            self.applied.append(entry)
        return f"{effect} {item}"

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how often each effect was applied, with those in the database of the shop."""
        rows = [("sell", item) for (item,) in self.ask("SELECT item FROM sales")]
        return Counter([(effect, item) for effect, item, _ in self.applied] + rows)

    def ask(self, sql: str) -> list[Any]:
        connection = open_raw(self.shop)
        try:
            return list(connection.execute(sql))
        finally:
            connection.close()


TILL = Till()
FAILING: set[str] = set()


@pytest.fixture(autouse=True)
def empty_till(tmp_path: Path) -> None:
    make_empty(tmp_path)


def make_empty(folder: Path) -> None:
    TILL.applied.clear()
    TILL.undone.clear()
    TILL.shop = folder / "shop.db"
    TILL.ask("CREATE TABLE sales (item TEXT)")
    FAILING.clear()


def probe(effect: str) -> Any:
    async def ask(key: str, item: str) -> Done | NotDone:
        left = TILL.counts()[effect, item] - TILL.undone.count((effect, item))
        return Done(f"{effect} {item}") if left > 0 else NotDone()

    return ask


def trading(*, undoable: bool) -> Any:
    """Return a workflow with a step of each contract, and a child, in each of two stages."""
    suffix = "_undoably" if undoable else ""

    def undoing(effect: str) -> dict[str, Any]:
        async def undo(outcome: str, item: str) -> None:
            TILL.undone.append((effect, item))

        return {"compensate": step(undo, name=f"undo_{effect}", effect="once", probe=asked)} if undoable else {}

    async def asked(key: str, outcome: str, item: str) -> Done | NotDone:
        return Done(None) if (outcome.partition(" ")[0], item) in TILL.undone else NotDone()

    def declared(name: str, **options: Any) -> Any:
        async def body(item: str) -> str:
            return TILL.apply(name, item)

        return step(body, name=name + suffix, **options, **undoing(name))

    def sell(connection: Any, item: str) -> str:
        connection.execute("INSERT INTO sales VALUES (?)", (item,))
        return f"sell {item}"

    label = declared("label")
    visit = declared("visit", effect="once")
    post = declared("post", effect="once", probe=probe("post"))
    ship = declared("ship", effect="once", key="ship:{item}", probe=probe("ship"))

    @step(name=f"check{suffix}", retry=Retry(attempts=1))
    async def check(item: str) -> None:
        if item in FAILING:
            raise ValueError("not yet")

    @workflow(name=f"pairs_child{suffix}")
    async def child(item: str) -> str:
        return str(await post(item))

    @workflow(name=f"pairs{suffix}")
    async def trade(item: str) -> list[str]:
        done = []
        for stage in (1, 2):
            everstep.publish("at", stage)
            await everstep.receive(f"go{stage}", str)
            here = f"{item}{stage}"
            done += [await label(here), await visit(here), await post(here), await ship(here)]
            done.append(await asyncio.to_thread(transaction(str(TILL.shop), name=f"sell{suffix}")(sell), here))
            done.append(await child(f"{here} of a child"))
            await check(here)
        everstep.publish("at", 3)
        done.append(await everstep.receive("go3", str))
        return done

    return trade


TRADE, UNDOABLY = trading(undoable=False), trading(undoable=True)


class World:
    """A run, wherever it is by now, and a person who looks into the till before answering."""

    def __init__(self, machine: Machine, chance: random.Random) -> None:
        self.machines = [machine]
        """Each store that the run was in, the present one first."""
        self.chance = chance
        self.run = "r"
        self.files = 0
        self.backup = b""
        self.keys_differ = False
        """Whether what was done in a lost time may be done again under other keys: by a fork that was allowed to, or
        because the fork or the retry that did it is lost."""
        self.refused: list[str] = []
        self.questions = 0
        self.kinds: list[str] = []
        """Of the run's events, at the end."""

    @property
    def machine(self) -> Machine:
        return self.machines[0]

    def at(self) -> int:
        row = self.machine.row(self.run)
        return int(json.loads(row.published or b'{"at": [0]}')["at"][0])

    def status(self) -> str:
        return self.machine.status(self.run)

    def holds(self) -> list[HoldRow]:
        return [hold for hold in self.machine.store.holds() if hold.run.startswith(self.run)]

    # -- going on --------------------------------------------------------------------------------------------------
    async def go(self, target: int) -> None:
        """Let the run go on to a stage, or to its end if that comes first, and leave it there."""
        app = await self.machine.worker()
        await self.machine.until(self.has_news)
        while self.status() not in ENDED and not (self.at() >= target and self.is_at_rest()):
            before = self.at()
            if self.is_at_rest():
                await app.signal(self.run, f"go{before}", "x", id=f"{self.run} {before}")
                await self.machine.until(lambda: self.at() != before or self.status() in ENDED or self.holds())  # noqa: B023
            for hold in self.holds():
                await self.answer(app, hold)
            await self.machine.rest(app)
            await self.machine.until(self.has_news)
        await self.machine.stop(app)

    def is_at_rest(self) -> bool:
        children = self.machine.store.children(self.run)
        return self.status() == "waiting" and all(one.status in ENDED for one in children) and not self.holds()

    def has_news(self) -> bool:
        return bool(self.status() in ENDED or self.holds() or self.is_at_rest())

    async def answer(self, app: App, hold: HoldRow) -> None:
        self.questions += 1
        if hold.reason == "asked":
            await app.resolve(hold.run, "retry", hold=hold.id)
            return
        assert hold.reason == "restored", hold.summary
        effect, _, number = hold.step.removesuffix("#2").partition("_")[0], "", "2" if hold.step.endswith("#2") else "1"
        item = f"x{number}"
        has_happened = TILL.counts()[effect, item] > TILL.undone.count((effect, item))
        await app.resolve(hold.run, *(("done",) if has_happened else ("not-done",)), value=f"{effect} {item}")

    # -- operations ------------------------------------------------------------------------------------------------
    def back_up(self) -> None:
        reader, self.machine._reader = self.machine._reader, None
        if reader is not None:
            reader.close()
        self.backup = self.machine.path.read_bytes()

    async def restore(self) -> None:
        """Lose what the run does in its next stage, or has done since the backup."""
        await self.go(self.at() + 1)
        backup = self.backup
        self.back_up()
        for path in self.machine.folder.glob("runs.db*"):
            path.unlink()
        self.machine.path.write_bytes(backup)
        mark_restored(self.machine.store)
        if self.machine.store.run(self.run) is None:
            self.run, self.keys_differ = "r", True

    async def export(self) -> str:
        """Write a file, and go on here after all."""
        path = await self.write_file()
        app = await self.machine.boot()
        for hold in self.holds():
            await app.resolve(hold.run, "retry", hold=hold.id)
        await self.machine.stop(app)
        return path

    async def write_file(self) -> str:
        self.files += 1
        path = str(self.machine.folder / f"file{self.files}")
        app = await self.machine.boot()
        await app.export([self.run], path, unfinished="hold")
        await self.machine.stop(app)
        return path

    async def import_(self) -> None:
        path = await self.write_file()
        there = Machine(self.machines[-1].folder / f"store{len(self.machines)}")
        there.folder.mkdir()
        self.machines.insert(0, there)
        app = await there.boot()
        await app.import_(path)
        await self.machine.stop(app)
        self.back_up()

    async def fork(self) -> None:
        """Fork the run where it is; only the fork goes on."""
        app = await self.machine.boot()
        source, head = self.run, self.machine.row(self.run).head_seq
        self.run = f"fork-{len(source)}-of-{source}"
        try:
            await app.fork(source, at=head, id=self.run)
        except CrossesOnce:
            self.keys_differ = True
            await app.fork(source, at=head, id=self.run, allow_effects=True)
        if self.machine.status(source) not in ENDED:
            await app.cancel(source, now=True)
            await self.machine.until_status(source, "cancelled")
        await self.machine.stop(app)

    async def retry(self) -> None:
        """Let the next stage fail at its end, and retry that."""
        FAILING.update({"x1", "x2"})
        await self.go(3)
        FAILING.clear()
        app = await self.machine.boot()
        await app.retry(self.run)
        await self.machine.stop(app)

    async def rollback(self) -> None:
        app = await self.machine.worker()
        await app.rollback(self.run, allow_uncompensated=True)
        while self.status() not in ENDED:
            await self.machine.until(lambda: self.status() in ENDED or self.holds())
            for hold in self.holds():
                await self.answer(app, hold)
        await self.machine.stop(app)

    async def do(self, operation: str) -> None:
        if operation == "fork" and self.status() in ENDED:
            self.refused.append("fork")  # there is nothing to go on with
            return
        if operation in ("export", "import") and self.status() in ENDED:
            self.refused.append(operation)
            return
        try:
            await getattr(self, {"import": "import_"}.get(operation, operation))()
        except (CompensationBegun, RunActive):
            self.refused.append(operation)

    # -- judging ---------------------------------------------------------------------------------------------------
    def judge(self, *, whole: bool) -> None:
        counts, undone = TILL.counts(), Counter(TILL.undone)
        items = {item for _, item in counts}
        assert items <= {f"x{n}{who}" for n in (1, 2) for who in ("", " of a child")}
        free = ("label", "sell") if self.keys_differ else ()
        for (effect, item), count in counts.items():
            if effect not in free:
                assert count <= 1 + undone[effect, item], f"{effect} {item}: {count} times"
            assert undone[effect, item] <= count, f"{effect} {item} was undone more often than done"
        if whole:
            assert self.status() == "completed"
            wanted = {(effect, f"x{n}") for effect in CONTRACTS for n in (1, 2)}
            wanted |= {("post", f"x{n} of a child") for n in (1, 2)}
            assert {one for one, count in counts.items() if count > 0} == wanted


async def pair(machine: Machine, first: str, second: str, seed: int = 0) -> World:
    world = World(machine, random.Random(seed))
    is_undone = "rollback" in (first, second)
    app, _ = await machine.start(UNDOABLY if is_undone else TRADE, "x", id="r")
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.stop(app)
    if seed:
        await world.go(world.chance.choice([1, 2]))
    world.back_up()
    await world.do(first)
    if seed and second == "restore" and first != "import" and world.chance.random() < 0.5:
        world.keys_differ = first == "retry"  # the backup lacks the first of the two as well
    else:
        world.back_up()
    if world.status() not in ENDED:
        await world.go(2)
    await world.do(second)
    if world.status() not in ENDED:
        await world.go(3)
    if world.status() == "waiting":
        app = await world.machine.worker()
        await app.signal(world.run, "go3", "x")
        await world.machine.until(lambda: world.status() in ENDED)
        await world.machine.stop(app)
    world.judge(whole=not is_undone)
    for one in world.machines:
        app = await one.boot()
        for row in one.store.runs(RunFilter()):
            assert (await app.get(row.id).verify()).sound, row.id
        await one.stop(app)
    world.kinds = world.machine.kinds(world.run)
    for one in world.machines:
        if one is not machine:
            await one.shut()
    return world


@pytest.mark.parametrize("second", OPERATIONS)
@pytest.mark.parametrize("first", OPERATIONS)
async def test_every_pair_of_operations_does_nothing_twice_and_loses_nothing(
    machine: Machine, first: str, second: str
) -> None:
    world = await pair(machine, first, second)
    if "restore" in (first, second) and "rollback" not in (first, second):
        assert world.questions, "what may have happened was asked about"
    if "restore" not in (first, second):
        assert "run_restored" not in world.kinds


@pytest.mark.soak
def test_seeds_of_pairs(tmp_path: Path) -> None:
    """From either stage, and with backups that lack the first of the two operations as well."""
    for seed in range(1, int(os.environ.get("EVERSTEP_SEEDS", "500")) + 1):
        chance = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        make_empty(folder)
        first, second = chance.choice(OPERATIONS), chance.choice(OPERATIONS)
        print(f"seed {seed}: {first}, {second}")

        async def one(folder: Path = folder, first: str = first, second: str = second, seed: int = seed) -> None:
            machine = Machine(folder)
            try:
                await pair(machine, first, second, seed)
            finally:
                await machine.shut()

        asyncio.run(one())
