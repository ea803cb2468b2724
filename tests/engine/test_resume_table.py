"""Every verb in every status: the table of docs/resume.md is read, and each of its cells is tried."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.errors import HoldConflict, IdConflict, RunActive, RunCancelled, RunEnded, RunHeld
from everstep.model.status import STATUSES
from tests.engine.resume_helpers import Machine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume.md"
VERBS = (
    "start, attach", "start, retry", "start, restart", "start, fail", "signal", "approve", "cancel", "cancel, now",
    "retry", "hold", "resolve", "fork", "rollback",
)  # fmt: skip
ERRORS = {error.__name__: error for error in (HoldConflict, IdConflict, RunActive, RunCancelled, RunEnded, RunHeld)}


def table() -> dict[tuple[str, str], str]:
    """Return the table: verb and status to what the page says."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header == ["verb", *STATUSES]
    return {(row[0], status): cell for row in rows for status, cell in zip(STATUSES, row[1:], strict=True)}


TABLE = table()
NOTES: list[str] = []
FAILS: list[bool] = []
GATES: list[asyncio.Event] = []


@step
async def load() -> str:
    NOTES.append("load")
    return "l"


@step
async def work() -> str:
    NOTES.append("work")
    if FAILS:
        raise ValueError("work")
    if GATES:
        await GATES[0].wait()
    return "w"


@step
async def clean() -> None:
    NOTES.append("clean")


@workflow
async def subject() -> str:
    try:
        done = await load() + await work()
        return done + await everstep.receive("word", str)
    except asyncio.CancelledError:
        await clean()
        raise


@workflow
async def asking() -> str:
    done = await load()
    async with asyncio.TaskGroup() as both:
        asked = both.create_task(everstep.approval("word", None, answer=str))
        done += await work()
    return done + asked.result()


async def bring(machine: Machine, status: str, verb: str = "") -> App:
    """Bring the run into a status, driven by a living process if it is running or waiting; return that process."""
    NOTES.clear()
    FAILS[:] = [True] if status == "failed" else []
    GATES[:] = [asyncio.Event()] if status in ("queued", "running") else []
    owner, run = await machine.start(asking if verb == "approve" else subject, id="r")
    if status in ("queued", "running"):
        await machine.until(lambda: "work" in NOTES)
        await machine.until(lambda: machine.kinds("r").count("step_started") == 2)
    elif status != "failed":
        await machine.until_status("r", "waiting")
        await machine.rest(owner)
    if status == "queued":
        await machine.stop(owner)
    elif status == "held":
        await owner.hold("r")
    elif status == "completed":
        await (run.approve("!") if verb == "approve" else run.signal("word", "!"))
    elif status == "cancelled":
        await run.cancel(now=True)
    await machine.until_status("r", status)
    FAILS.clear()
    if status == "queued":
        GATES.clear()
    NOTES.clear()
    return owner


async def do(app: App, verb: str) -> Any:
    """Do what a verb says."""
    match verb.split(", "):
        case ["start", policy]:
            return await app.start(subject, id="r", on_existing=policy)  # type: ignore[arg-type]
        case ["signal"]:
            return await app.signal("r", "word", "!")
        case ["approve"]:
            return await app.get("r").approve("!")
        case ["cancel", *now]:
            return await app.cancel("r", now=bool(now))
        case ["retry"]:
            return await app.retry("r")
        case ["hold"]:
            return await app.hold("r")
        case ["resolve"]:
            return await app.resolve("r", "retry")
        case ["fork"]:
            return await app.fork("r", at=3, id="f", allow_effects=["work"])
        case ["rollback"]:
            return await app.rollback("r")
    raise AssertionError(verb)


async def release(machine: Machine, app: App) -> Any:
    """Let the run come to its end, and return its result."""
    for gate in GATES:
        gate.set()
    if not any(one.kind == "signal" for one in machine.store.signals("r")):
        await app.signal("r", "word", "!")
    await machine.until_status("r", "completed")
    return await app.get("r").result()


# -- what the words of the table mean ----------------------------------------------------------------------------------
async def continues_here(machine: Machine, app: App, verb: str, owner: App) -> None:
    run = await do(app, verb)
    await machine.until(lambda: "r" in app.drivers)
    assert run.id == "r"
    assert await release(machine, app) == "lw!"
    assert "load" not in NOTES


async def the_same_run(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    assert machine.row("r").owner == owner.worker
    assert await release(machine, app) == "lw!"
    assert NOTES == []


async def its_result(machine: Machine, app: App, verb: str, owner: App) -> None:
    assert await (await do(app, verb)).result() == "lw!"
    assert NOTES == []


async def its_failure(machine: Machine, app: App, verb: str, owner: App) -> None:
    with pytest.raises(ValueError, match="work"):
        await (await do(app, verb)).result()
    assert NOTES == []


async def continues_from_what_failed(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    assert await release(machine, app) == "lw!"
    assert NOTES == ["work"]


async def begins_again(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    assert machine.row("r").generation == 2
    await machine.until_status("r", "waiting")
    await app.signal("r", "word", "?")
    assert await app.get("r").result() == "lw?"
    assert NOTES == ["load", "work"]
    assert machine.store.events("r", 1)


async def delivered(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    if machine.status("r") == "queued":
        await machine.worker()
    assert await release(machine, app) == "lw!"


async def delivered_later(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    await machine.rest()
    assert [one.state for one in machine.store.signals("r") if one.kind != "hold"] == ["pending"]
    await app.resolve("r", "retry")
    assert await release(machine, app) == "lw!"


async def its_code_cleans_up(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    if machine.status("r") == "queued":
        await machine.worker()
    await machine.until_status("r", "cancelled")
    assert NOTES[-1:] == ["clean"]


async def ends_at_once(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    await machine.until_status("r", "cancelled")
    assert NOTES == []


async def held(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "asked"
    await app.resolve("r", "retry")
    assert await release(machine, app) == "lw!"


async def continues(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    assert await release(machine, app) == "lw!"
    assert NOTES == []


async def rolled_back(machine: Machine, app: App, verb: str, owner: App) -> None:
    await do(app, verb)
    if machine.status("r") == "queued":
        await machine.worker()
    await machine.until(lambda: machine.kinds("r")[-1] == "run_cancelled" and machine.kinds("r")[-2].startswith("roll"))
    assert machine.status("r") == "cancelled"
    assert machine.bodies("r", "run_cancelled")[-1].rolled_back
    assert NOTES == []
    with pytest.raises(RunCancelled):
        await app.get("r").result()


async def a_new_run(machine: Machine, app: App, verb: str, owner: App) -> None:
    before = (machine.status("r"), machine.events("r"), machine.row("r").epoch)
    fork = await do(app, verb)
    assert (machine.status("r"), machine.events("r"), machine.row("r").epoch) == before
    for gate in GATES:
        gate.set()
    await fork.signal("word", "?")
    assert await fork.result(timeout=60) == "lw?"
    assert NOTES == ["work"]


MEANINGS: dict[str, Callable[..., Any]] = {
    function.__name__.replace("_", " "): function
    for function in (
        continues_here, the_same_run, its_result, its_failure, continues_from_what_failed, begins_again, delivered,
        delivered_later, its_code_cleans_up, ends_at_once, held, continues, rolled_back, a_new_run,
    )
}  # fmt: skip


async def refuses(machine: Machine, app: App, verb: str, error: type[Exception]) -> None:
    """The verb raises, and changes nothing about the run but who asked last."""
    before = (machine.status("r"), machine.events("r"), machine.store.signals("r"), machine.row("r").generation)
    with pytest.raises(error):
        await (await do(app, verb)).result()
    after = (machine.status("r"), machine.events("r"), machine.store.signals("r"), machine.row("r").generation)
    assert after == before
    assert NOTES == []


def test_the_table_has_every_verb_in_every_status() -> None:
    assert set(TABLE) == {(verb, status) for verb in VERBS for status in STATUSES}


def test_every_word_of_the_table_is_used_and_explained() -> None:
    words = {cell for cell in TABLE.values() if not cell.startswith("`")}
    assert words == set(MEANINGS)
    text = PAGE.read_text("utf-8")
    assert all(f"*{word}*" in text for word in words)
    assert {cell.strip("`") for cell in TABLE.values() if cell.startswith("`")} <= set(ERRORS)


@pytest.mark.parametrize(("verb", "status"), TABLE, ids=[f"{verb} of {status}" for verb, status in TABLE])
async def test_the_cell_holds(machine: Machine, verb: str, status: str) -> None:
    owner = await bring(machine, status, verb)
    app = await machine.boot()
    cell = TABLE[verb, status]
    if cell.startswith("`"):
        await refuses(machine, app, verb, ERRORS[cell.strip("`")])
    else:
        await MEANINGS[cell](machine, app, verb, owner)


@pytest.mark.parametrize("status", STATUSES)
async def test_other_arguments_are_refused_in_every_status(machine: Machine, status: str) -> None:
    await bring(machine, status)
    app = await machine.boot()

    @workflow(name="subject")
    async def changed(number: int) -> str:
        return ""

    try:
        for policy in ("attach", "retry", "fail"):
            with pytest.raises(IdConflict):
                await app.start(changed, 1, id="r", on_existing=policy)  # type: ignore[arg-type]
    finally:
        from everstep.engine.code.workflow import DECLARED

        DECLARED.add(subject)  # type: ignore[arg-type]
    assert machine.status("r") == status
