"""Requests and streams beside what else may become of a run: a fresh history, a fork, another store, deletion."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.code.recovery_point import verify_whole
from everstep.errors import Misuse, RunEnded
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine


@step(effect="read")
async def speak(words: str) -> int:
    for word in words.split():
        everstep.stream("tokens").append(word)
    return len(words)


@workflow
async def helper(words: str, rounds: int) -> list[str]:
    everstep.stream("log").append("begun")
    await speak(words)
    taken: list[str] = []
    async for request in everstep.requests("rename", str, answer=str):
        request.answer(request.value.upper())
        taken.append(request.value)
        if len(taken) == 2:
            break
    await speak("the end")
    if rounds > 1:
        everstep.continue_as(words, rounds - 1)
    return taken


async def entries(run: Any, name: str) -> list[Any]:
    return [entry.value async for entry in run.stream(name)]


async def test_requests_that_nobody_has_taken_are_answered_by_the_next_generation(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    run = await app.start(helper, "good morning", 2, id="r")
    asked = [asyncio.create_task(run.ask("rename", word, id=word)) for word in "abcd"]
    assert await asyncio.gather(*asked) == ["A", "B", "C", "D"]
    assert await run.result() == ["c", "d"]
    for word in "abcd":
        assert await run.ask("rename", word, id=word) == word.upper(), "asked again, also after the end"
    verify_whole(app.store, "r")
    assert check(export_histories(app.store)) == []


async def test_a_reader_goes_on_with_the_streams_of_the_next_generation(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    run = await app.start(helper, "good morning", 2, id="r")
    reading = asyncio.create_task(entries(run, "tokens"))
    await asyncio.gather(*(run.ask("rename", word) for word in "abcd"))
    assert await reading == ["good", "morning", "the", "end"] * 2
    assert await entries(run, "tokens") == ["good", "morning", "the", "end"] * 2, "who comes later gets all of it"


async def test_a_request_that_was_taken_and_not_answered_keeps_a_run_from_going_on(machine: Machine) -> None:
    @workflow
    async def forgetful() -> None:
        async for _ in everstep.requests("rename", str):
            everstep.continue_as()

    app = await machine.boot(clock=None)
    run = await app.start(forgetful, id="r")
    asking = asyncio.create_task(run.ask("rename", "x"))
    with pytest.raises(Misuse, match="a request without an answer"):
        await run.result()
    with pytest.raises(RunEnded):
        await asking


async def test_a_fork_has_the_entries_of_what_it_begins_with_and_goes_on_with_them(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    run = await app.start(helper, "good morning", 1, id="r")
    await asyncio.gather(run.ask("rename", "x", id="one"), run.ask("rename", "y", id="two"))
    assert await run.result() == ["x", "y"]
    first = next(event.seq for event in machine.events("r") if event.kind == "step_completed")
    fork = await app.fork("r", at=first, id="f", allow_effects=True)
    assert await fork.ask("rename", "z", id="one") == "Z", "it is another run, with an inbox of its own"
    assert await fork.ask("rename", "w") == "W"
    assert await fork.result() == ["z", "w"]
    assert await entries(fork, "tokens") == ["good", "morning", "the", "end"]
    assert await entries(fork, "log") == ["begun"]
    for one in ("r", "f"):
        verify_whole(app.store, one)
    assert machine.replay("f").differences == []


async def test_a_run_that_is_moved_keeps_its_answers_and_streams_also_under_other_numbers(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    run = await app.start(helper, "good morning", 1, id="r")
    assert await run.ask("rename", "x", id="one") == "X"
    await machine.stop(app)
    app = await machine.boot(clock=None)
    await app.export(["r"], str(machine.folder / "runs.jsonl"), unfinished="hold")
    elsewhere = Machine(machine.folder / "elsewhere")
    (machine.folder / "elsewhere").mkdir()
    try:
        other = await elsewhere.boot(clock=None)
        mine = await other.start(helper, "hello", 1, id="mine")
        await mine.ask("rename", "p", id="p")  # it has the number that the request had where it came from
        await other.import_(str(machine.folder / "runs.jsonl"))
        moved = other.get("r")
        assert await moved.ask("rename", "x", id="one") == "X"
        assert await moved.ask("rename", "y", id="two") == "Y"
        assert await moved.result() == ["x", "y"]
        assert await entries(moved, "tokens") == ["good", "morning", "the", "end"]
        verify_whole(other.store, "r")
    finally:
        await elsewhere.shut()


async def test_deleting_a_run_takes_its_answers_and_streams_along(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    run = await app.start(helper, "good morning", 1, id="r")
    await asyncio.gather(run.ask("rename", "x"), run.ask("rename", "y"))
    await run.result()
    assert machine.dump()["streams"]
    assert machine.dump()["answers"]
    await app.gc(older_than=0)
    left = machine.dump()
    assert (left["runs"], left["events"], left["streams"], left["answers"], left["signals"]) == ([], [], [], [], [])
