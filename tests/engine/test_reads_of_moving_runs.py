"""Looking at a run while it is driven: its row and its events are two reads, and what comes between is no damage."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

import everstep
from everstep import step, workflow
from everstep.cli import main
from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp
from everstep.stores.protocol import Store
from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from tests.waiting import open_raw, wait_until


@step(effect="read")
async def note(number: int) -> int:
    return number


@workflow
async def moving() -> list[bool]:
    """Waits for approvals, answers requests and makes a step for each signal, all at once."""

    async def move() -> None:
        for number in range(1_000):
            await everstep.receive("move")
            await note(number)

    async def answer() -> None:
        async for request in everstep.requests("asked", str):
            await request.answer(request.value)

    _both = asyncio.gather(move(), answer())
    return [await everstep.approval("pay", {"usd": 5}, answer=bool)]


@workflow(on_parent_end="abandon")
async def child() -> None:
    for number in range(1_000):
        await everstep.receive("move")
        await note(number)


@workflow
async def parent() -> None:
    await everstep.start(child, id="child")
    raise LookupError("the parent fails, and its child goes on")


class Driven:
    """An app that drives one run, on a thread, and moves it on when asked."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.moves = 0

    def __enter__(self) -> "Driven":
        self._opened = everstep.open(str(self.path), durability="process")
        self.app: BlockingApp = self._opened.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)

    def steps(self) -> int:
        return sum(one.kind == "step_completed" for one in self.app.get(self.run).history())

    def move(self) -> None:
        """Let the run go on by a step, durably."""
        self.moves, before = self.moves + 1, self.steps()
        self.app.get(self.run).signal("move", None)
        wait_until(lambda: self.steps() > before)


class MovingStore:
    """A store of somebody who looks: just after a row was read, and before its events are, the run moves on."""

    def __init__(self, store: Store, driven: Driven, times: int) -> None:
        self._store, self._driven, self._left = store, driven, times

    def events(self, run: str, *args: Any, **options: Any) -> Any:
        if run == self._driven.run and self._left:
            self._left -= 1
            self._driven.move()
        return self._store.events(run, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    with Driven(tmp_path / "runs.db", "r") as driven:
        driven.app.start(moving, id="r")
        wait_until(driven.app.approvals)
        yield driven


def looks(driven: Driven, look: Callable[[App], Any], times: int = 2) -> Any:
    """Let another app look at the run while it moves, and return what that sees."""

    async def main() -> Any:
        store: Any = MovingStore(SqliteStore(driven.path, durability="process"), driven, times)
        app = await App(store).open()
        try:
            seen = look(app)
            return await seen if asyncio.iscoroutine(seen) else seen
        finally:
            await app.close()

    before = driven.moves
    seen = asyncio.run(main())
    assert driven.moves == before + times, "the run did not move while it was looked at"
    return seen


def test_an_approval_of_a_run_that_moves_is_listed(driven: Driven) -> None:
    (one,) = looks(driven, lambda app: app.approvals())
    assert one.what == "pay"


def test_an_approval_of_a_run_that_moves_is_answered(driven: Driven) -> None:
    looks(driven, lambda app: app.approve("r", True))
    assert driven.app.get("r").result() == [True]


def test_a_run_that_moves_is_verified(driven: Driven) -> None:
    assert looks(driven, lambda app: app.get("r").verify()).sound


def test_a_run_that_moves_is_forked(driven: Driven) -> None:
    looks(driven, lambda app: app.fork("r", at=1, id="f"))
    assert driven.app.get("f").verify().sound


def test_a_run_that_moves_is_rolled_back(driven: Driven) -> None:
    looks(driven, lambda app: app.rollback("r"))
    wait_until(lambda: driven.app.get("r").status() == "cancelled")


def test_the_histories_of_a_run_that_moves_are_judged_as_sound(driven: Driven) -> None:
    assert check(looks(driven, lambda app: export_histories(app.store))) == []


def test_a_request_that_was_answered_long_ago_is_found_while_its_run_moves(driven: Driven) -> None:
    assert driven.app.get("r").ask("asked", "first", id="q") == "first"
    # The table of answers is only a help; without it, the history tells.
    connection = open_raw(driven.path)
    connection.execute("DELETE FROM answers")
    connection.close()
    assert looks(driven, lambda app: app.get("r").ask("asked", "first", id="q")) == "first"


def test_a_child_that_moves_while_its_parent_is_rolled_back_has_no_damage(tmp_path: Path) -> None:
    with Driven(tmp_path / "runs.db", "child") as driven:
        run = driven.app.start(parent, id="p")
        with pytest.raises(LookupError):
            run.result()
        driven.move()
        looks(driven, lambda app: app.rollback("p"))
        assert driven.app.get("p").verify().sound


@pytest.mark.parametrize("command", [["replay", __file__], ["verify", "--all"]])
def test_commands_find_no_damage_in_a_run_that_moves(
    driven: Driven, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SqliteStore.events

    def events(store: SqliteStore, run: str, *args: Any, **options: Any) -> Any:
        if driven.moves < 2 and store is not driven.app.inner.store and run == "r" and not MOVING:
            MOVING.append(True)
            driven.move()
            MOVING.clear()
        return read(store, run, *args, **options)

    MOVING: list[bool] = []
    monkeypatch.setattr(SqliteStore, "events", events)
    told = click.testing.CliRunner().invoke(main, [*command, "--json", "--url", str(driven.path)])
    assert driven.moves == 2
    assert told.exit_code == 0, told.output
    assert "amaged" not in json.dumps(told.output)
