"""Arguments of workflows by name: beside those by place, and the same call in either form."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import workflow
from everstep.errors import IdConflict, Misuse
from everstep.testing.golden import replay_golden, save_history
from everstep.testing.skipping import skipping_app
from tests.engine.resume_helpers import Machine
from tests.waiting import wait_on_loop_until


@workflow
async def report(topic: str, reader: str = "all", *, pages: int = 1) -> str:
    return f"{topic} for {reader}, {pages}"


@workflow
async def id_of(id: str, queue: str, kwargs: int) -> str:
    return f"{id} {queue} {kwargs}"


@workflow
async def turning(left: int, *, seen: int = 0) -> int:
    if left:
        everstep.continue_as(left - 1, seen=seen + left)
    return seen


@workflow
async def parent() -> list[str]:
    child = await everstep.start(report, kwargs={"topic": "moons", "pages": 2})
    return [await child.result(), await report("stars", pages=3)]


@workflow
def def_parent() -> str:
    child = everstep.blocking.start(report, "moons", kwargs={"pages": 4})
    result: str = child.result()
    return result


FORMS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("tides", "ann"), {"pages": 2}),
    (("tides",), {"reader": "ann", "pages": 2}),
    ((), {"pages": 2, "topic": "tides", "reader": "ann"}),
]


async def test_all_forms_of_one_call_are_the_same_run(machine: Machine) -> None:
    app = await machine.boot()
    for args, kwargs in FORMS:
        run = await app.start(report, *args, kwargs=kwargs, id="r")
        assert await run.result(timeout="1m") == "tides for ann, 2"
    assert len(machine.kinds("r")) == 2, "it ran once"
    with pytest.raises(IdConflict):
        await app.start(report, "tides", kwargs={"reader": "bob", "pages": 2}, id="r")
    assert (await app.run(report, "tides", kwargs={})) == "tides for all, 1"


async def test_a_run_that_a_client_named_by_arguments_is_the_same_call_where_the_code_is(machine: Machine) -> None:
    app = await machine.boot()
    async with everstep.connect(str(machine.path), durability="process", clock=machine.clock) as client:
        await client.start("report", kwargs={"topic": "tides", "reader": "ann", "pages": 2}, id="c")
        again = await client.start("report", kwargs={"reader": "ann", "pages": 2, "topic": "tides"}, id="c")
        with pytest.raises(IdConflict, match="by place"):
            await client.start("report", "tides", kwargs={"reader": "ann", "pages": 2}, id="c")
    assert again.id == "c"
    for args, kwargs in FORMS:
        run = await app.start(report, *args, kwargs=kwargs, id="c")
        assert await run.result(timeout=60) == "tides for ann, 2"
    with pytest.raises(IdConflict):
        await app.start(report, "moons", kwargs={"reader": "ann", "pages": 2}, id="c")


async def test_parameters_may_have_the_names_of_options(machine: Machine) -> None:
    app = await machine.boot()
    run = await app.start(id_of, kwargs={"id": "mine", "queue": "none", "kwargs": 5}, id="r")
    assert (run.id, await run.result(timeout=60)) == ("r", "mine none 5")


async def test_children_and_continue_as_take_arguments_by_name(machine: Machine) -> None:
    app = await machine.boot()
    assert await app.run(parent) == ["moons for all, 2", "stars for all, 3"]
    assert await app.run(def_parent) == "moons for all, 4"
    assert await app.run(turning, 3) == 6


async def test_schedules_and_forks_take_arguments_by_name(machine: Machine) -> None:
    app = await machine.worker()
    schedule = await app.schedule(report, "tides", kwargs={"pages": 9}, name="daily", every="1d")
    assert (await schedule.show()).every == 86400
    await app.schedule(report, kwargs={"pages": 9, "topic": "tides"}, name="daily", every="24h")
    run = await schedule.trigger()
    await wait_on_loop_until(lambda: app.store.run(run) is not None)
    assert await app.get(run).result(timeout=60) == "tides for all, 9"
    forked = await app.fork(run, at=1, kwargs={"topic": "moons"})
    assert await forked.result(timeout=60) == "moons for all, 1"
    forked = await app.fork(run, at=1, args=["moons"], kwargs={"pages": 3})
    assert await forked.result(timeout=60) == "moons for all, 3"


def test_the_blocking_forms_take_arguments_by_name(tmp_path: Any) -> None:
    url = str(tmp_path / "runs.db")
    assert everstep.run(report, "tides", kwargs={"pages": 2}, url=url) == "tides for all, 2"
    with everstep.open(url) as app:
        assert app.start(report, kwargs={"topic": "tides"}, id="b").result() == "tides for all, 1"
        save_history(app, "b", tmp_path / "b.json")
    replay_golden(tmp_path / "b.json", report, kwargs={"topic": "tides"})
    with everstep.connect(url) as client:
        assert client.start("report", kwargs={"topic": "tides"}).status() == "queued"
    with skipping_app() as skipping:
        assert skipping.run(report, kwargs={"topic": "tides"}) == "tides for all, 1"


def refused(how: Any) -> str:
    with pytest.raises((Misuse, TypeError)) as error:
        how()
    return str(error.value)


def test_a_name_that_is_no_option_is_refused_with_what_to_write(tmp_path: Any) -> None:
    url = str(tmp_path / "runs.db")
    assert 'kwargs={"topic": …}' in refused(lambda: everstep.run(report, topic="tides", url=url))  # type: ignore[call-overload]
    with everstep.open(url) as app:
        assert 'kwargs={"topic": …}' in refused(lambda: app.start(report, topic="tides"))  # type: ignore[call-overload]
        assert 'kwargs={"topic": …}' in refused(lambda: app.run(report, topic="tides"))  # type: ignore[call-overload]
        assert "'tpoic'" in refused(lambda: app.start(report, kwargs={"tpoic": "tides"}))
        assert "multiple values for argument 'topic'" in refused(
            lambda: app.start(report, "tides", kwargs={"topic": "x"})
        )
        for wrong in (["tides"], "tides", {1: "tides"}, 5):
            assert 'kwargs={"topic": "tides"}' in refused(lambda wrong=wrong: app.start(report, kwargs=wrong))
    with everstep.connect(url) as client:
        assert 'kwargs={"topic": …}' in refused(lambda: client.start("report", topic="tides"))


async def test_a_child_refuses_a_name_that_is_no_option(machine: Machine) -> None:
    @workflow
    async def wrong() -> None:
        await everstep.start(report, topic="tides")  # type: ignore[call-overload]

    app = await machine.boot()
    with pytest.raises(Misuse, match="kwargs="):
        await app.run(wrong)


def test_asyncio_is_not_needed_to_call_the_plain_function() -> None:
    assert asyncio.run(report(topic="tides", pages=2)) == "tides for all, 2"
