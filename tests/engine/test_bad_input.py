"""Bad input: poisoned values, wrong names and arguments, files that are no store. A clear error; nothing is lost."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import Misuse, NotEncodable, StoreError, StoreReadOnly, StoreUnusable, UnknownRun, UnknownWorkflow
from tests.engine.resume_helpers import Machine
from tests.waiting import open_sqlite


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Stranger:
    """A type that nobody registered."""


REFUSED: dict[str, Any] = {
    "recursive": recursive(),
    "deep": deep(100_000),
    "a stranger": Stranger(),
    "a stranger within": {"a": [1, Stranger()]},
    "a function": len,
    "a generator": (number for number in ()),
    "a lock": asyncio.Lock(),
}
KEPT: dict[str, Any] = {
    "a lone surrogate": "\ud800",
    "NUL": "a\x00b",
    "huge integer": 10**400,
    "not a number": float("nan"),
    "infinity": float("inf"),
    "a tuple": (1, (2, 3)),
    "keys that are numbers": {1: "a", 2: "b"},
    "a set": {1, 2, 3},
    "bytes": b"\x00\xff",
    "our own tags": {"$": "tuple", "args": [], "kwargs": {}, "__everstep__": 1},
    "an envelope": [[1], {"t": "set"}],
    "large": "x" * 2_000_000,
    "empty": "",
    "none": None,
    "deep but fine": deep(50),
}


@step(effect="read")
async def give_back(value: Any) -> Any:
    return value


@workflow
async def through(value: Any) -> Any:
    return await give_back(value)


@workflow
async def from_signal() -> Any:
    return await everstep.receive("value")


@workflow
async def waits() -> None:
    await everstep.receive("never")


def same(one: Any, other: Any) -> bool:
    return bool(one == other and type(one) is type(other)) or (one != one and other != other)


async def still_works(app: Any) -> None:
    assert await app.run(through, 1) == 1


# -- values ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", REFUSED)
async def test_a_value_that_cannot_be_stored_is_refused_wherever_it_comes_from(machine: Machine, name: str) -> None:
    value = REFUSED[name]

    @step(effect="read")
    async def returns_it() -> Any:
        return value

    @workflow
    async def as_outcome() -> str:
        try:
            await returns_it()
        except NotEncodable:
            return "refused"
        return "?"

    @workflow
    async def as_argument() -> str:
        try:
            await give_back(value)
        except NotEncodable:
            return "refused"
        return "?"

    @workflow
    async def published() -> str:
        try:
            everstep.publish("it", value)
        except NotEncodable:
            return "refused"
        return "?"

    @workflow
    async def as_result() -> Any:
        return value

    app = await machine.boot()
    with pytest.raises(NotEncodable):
        await app.start(through, value, id="start")
    assert machine.store.run("start") is None
    run = await app.start(from_signal, id="signal")
    with pytest.raises(NotEncodable):
        await run.signal("value", value)
    assert machine.store.signals("signal") == []
    await run.signal("value", "fine")
    assert await run.result() == "fine"
    for flow in (as_outcome, as_argument, published):
        assert await app.run(flow) == "refused"
    with pytest.raises(NotEncodable):
        await app.run(as_result, id="result")
    assert machine.status("result") == "failed"
    await still_works(app)


@pytest.mark.parametrize("name", KEPT)
async def test_an_awkward_value_comes_back_as_itself_by_every_way_and_after_a_crash(
    machine: Machine, name: str
) -> None:
    value = KEPT[name]

    @workflow
    async def holding(given: Any) -> Any:
        back = await give_back(given)
        everstep.publish("it", back)
        return [back, await everstep.receive("value")]

    app, run = await machine.start(holding, value, id="r")
    await machine.rest(app)
    assert same((await run.published())["it"], value)
    await machine.kill(app)
    worker = await machine.worker()
    await worker.signal("r", "value", value)
    await machine.until_status("r", "completed", "held", "failed")
    back, received = await worker.get("r").result()
    assert same(back, value)
    assert same(received, value)
    assert machine.replay("r").differences == []


# -- calls -------------------------------------------------------------------------------------------------------------
async def test_wrong_calls_of_start_are_refused_and_create_nothing(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(TypeError, match="argument"):
        await app.start(through, id="r")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="argument"):
        await app.start(through, 1, 2, id="r")  # type: ignore[call-arg]
    with pytest.raises(UnknownWorkflow, match="nobody"):
        await app.start("nobody", 1, id="r")  # type: ignore[call-overload]
    with pytest.raises(Misuse, match="workflow"):
        await app.start(give_back, 1, id="r")
    with pytest.raises(Misuse, match="on_existing"):
        await app.start(through, 1, id="r", on_existing="maybe")  # type: ignore[arg-type]
    assert machine.store.run("r") is None
    await still_works(app)


@pytest.mark.parametrize("id", ["", " ", "a b", "-a", "x" * 201, "\x00", "ä", "a\n", "../a/../../b\x7f", 7])
async def test_an_id_that_is_none_is_refused(machine: Machine, id: Any) -> None:
    app = await machine.boot()
    with pytest.raises(Misuse, match="not a run id"):
        await app.start(through, 1, id=id)
    with pytest.raises(Misuse, match="not a run id"):
        await app.signal(id, "x", 1)
    with pytest.raises(Misuse, match="not a run id"):
        await app.cancel(id)
    with pytest.raises(Misuse, match="not a run id"):
        app.get(id)


async def test_every_question_about_an_unknown_run_says_so(machine: Machine) -> None:
    app = await machine.boot()
    run = app.get("nobody")
    for asked in (
        run.result(), run.status(), run.history(), run.published(), run.verify(), run.cancel(), run.signal("x"),
        app.retry("nobody"), app.hold("nobody"), app.resolve("nobody", "retry"),
    ):  # fmt: skip
        with pytest.raises(UnknownRun, match="nobody"):
            await asked
    with pytest.raises(Misuse, match="status"):
        await app.list(status="sleeping")


# -- files -------------------------------------------------------------------------------------------------------------
def try_to_open(path: Path | str) -> None:
    async def main() -> None:
        async with everstep.open(str(path)) as app:
            await app.run(through, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    "content", [b"hello, I am a text\n" * 100, b"SQLite format 3\x00" + b"\xff" * 5000, os.urandom(4096)]
)
def test_a_file_that_is_no_store_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "runs.db"
    path.write_bytes(content)
    with pytest.raises(StoreUnusable):
        try_to_open(path)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with open_sqlite(path) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
        connection.execute("INSERT INTO customers VALUES ('ann')")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StoreUnusable, match="something else"):
        try_to_open(path)
    assert path.read_bytes() == content


def test_a_store_of_a_newer_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    try_to_open(path)
    with open_sqlite(path) as connection:
        connection.execute("UPDATE meta SET value = 999 WHERE name = 'schema_version'")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StoreUnusable, match="newer release"):
        try_to_open(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("sqlite:///no/such/folder/runs.db", StoreUnusable),
        ("postgresql://127.0.0.1:1/x", StoreError),
        ("redis://localhost", Misuse),
        ("sqlite://", Misuse),
        ("sqlite:///", Misuse),
        (":memory:", Misuse),
        ("a\x00b", Misuse),
    ],
)
def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        try_to_open(url)


def test_a_folder_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="folder"):
        try_to_open(tmp_path)


async def test_a_disk_that_becomes_read_only_is_a_clear_error_and_nothing_is_lost(machine: Machine) -> None:
    app, run = await machine.start(from_signal, id="r")
    await machine.rest(app)
    app.store._writer.connection.pragma("query_only", 1)  # type: ignore[attr-defined]
    with pytest.raises(StoreReadOnly):
        await app.start(through, 1, id="other")
    with pytest.raises(StoreReadOnly):
        await run.signal("value", 1)
    await machine.kill(app)
    worker = await machine.worker()
    await worker.signal("r", "value", 2)
    await machine.until_status("r", "completed")
    assert await worker.get("r").result() == 2
    assert machine.store.run("other") is None
