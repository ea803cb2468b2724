"""A graph whose nodes wait for a person: work goes on meanwhile, and nothing is done that was not allowed."""

import asyncio
import operator
from dataclasses import dataclass, field
from typing import Any

import pytest

import everstep
from everstep import step
from everstep.engine.code.execution import Execution
from everstep.errors import Refused
from tests.engine.resume_helpers import Machine


@dataclass
class State:
    """What the nodes know."""

    did: list[str] = field(default_factory=list)
    approved: bool = False


class Work:
    """What bodies did, and how many were at it at the same time."""

    begun: list[str] = []
    at_once = 0
    most = 0
    gate: asyncio.Event


@pytest.fixture(autouse=True)
def fresh() -> None:
    Work.begun, Work.at_once, Work.most = [], 0, 0


async def at_work(name: str) -> dict[str, Any]:
    Work.begun.append(name)
    Work.at_once += 1
    Work.most = max(Work.most, Work.at_once)
    await Work.gate.wait()
    Work.at_once -= 1
    return {"did": [name]}


def working(name: str) -> Any:
    @step(name=name)
    async def work(state: State) -> dict[str, Any]:
        return await at_work(name)

    return work


def asking(name: str, **options: Any) -> Any:
    @everstep.tool(name=name, **{"approval": True, **options})
    async def work(state: State) -> dict[str, Any]:
        return await at_work(name)

    return work


def a_graph(name: str, *nodes: Any, most: int | None = 1) -> Any:
    graph = everstep.Graph(name, state=State, reduce={"did": operator.add}, max_concurrency=most)
    for node in nodes:
        graph.node(node)
    return graph


async def begin(machine: Machine, graph: Any, *, is_open: bool = True) -> Any:
    Work.gate = asyncio.Event()
    if is_open:
        Work.gate.set()
    app = await machine.boot()
    return await app.start(graph, State(), id="r")


async def test_an_approval_that_waits_takes_no_place(machine: Machine) -> None:
    graph = a_graph("waits")
    graph.approval("may", lambda state: "?", into="approved")
    for name in ("one", "two"):
        graph.node(working(name))
    run = await begin(machine, graph)
    await machine.until(lambda: Work.begun == ["one", "two"])
    await machine.until_status("r", "waiting")
    await run.approve()
    ended = await run.result()
    assert (ended.approved, sorted(ended.did)) == (True, ["one", "two"])
    assert Work.most == 1
    assert machine.replay("r").differences == []


async def test_a_tool_that_must_be_approved_is_not_done_before_and_takes_no_place_until_then(machine: Machine) -> None:
    graph = a_graph("asks", asking("pay"), working("one"), working("two"))
    run = await begin(machine, graph, is_open=False)
    await machine.until(lambda: Work.begun == ["one"])
    (one,) = await run.approvals()
    assert one.what == "pay"
    await run.approve()
    await machine.until(lambda: machine.kinds("r", "signal_received"))
    assert Work.begun == ["one"], "it is allowed, and waits for a place"
    Work.gate.set()
    assert sorted((await run.result()).did) == ["one", "pay", "two"]
    assert Work.begun == ["one", "pay", "two"], "what was allowed goes before what has not begun"
    assert Work.most == 1
    assert machine.replay("r").differences == []


@pytest.mark.parametrize("most", [None, 1])
async def test_a_tool_that_a_person_refuses_is_not_done(machine: Machine, most: int | None) -> None:
    graph = a_graph("refused", asking("pay"), asking("send"), most=most)
    run = await begin(machine, graph)
    await machine.until(lambda: len(machine.kinds("r", "approval_asked")) == 2)
    await run.approve(False, what="pay", by="bob")
    with pytest.raises(Refused, match="bob"):
        await run.result()
    assert Work.begun == [], "nor is the one that nobody has answered"


async def test_a_tool_that_needs_no_approval_for_its_arguments_keeps_to_the_places(machine: Machine) -> None:
    graph = a_graph("small", asking("pay", approval=lambda state: False), working("one"), working("two"))
    run = await begin(machine, graph)
    assert sorted((await run.result()).did) == ["one", "pay", "two"]
    assert Work.most == 1
    assert machine.kinds("r", "approval_asked") == []


async def test_what_was_allowed_is_done_once_after_a_crash(machine: Machine) -> None:
    graph = a_graph("crashes", asking("pay"), working("one"))
    await begin(machine, graph, is_open=False)
    (app,) = machine._apps
    await machine.until(lambda: Work.begun == ["one"])
    await app.approve("r", True)
    await machine.until(lambda: machine.kinds("r", "signal_received"))
    await machine.kill(app)
    Work.gate.set()
    worker = await machine.worker()
    assert sorted((await worker.get("r").result()).did) == ["one", "pay"]
    assert sorted(Work.begun) == ["one", "one", "pay"], "only the one that was under way is done again"
    assert machine.replay("r").differences == []


async def test_a_run_of_the_release_in_which_an_approval_took_a_place_goes_on_as_it_began(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = a_graph("before", asking("pay"))
    graph.approval("may", lambda state: "?", into="approved")
    graph.node(working("one"))
    graph.edge("may", "one")
    with monkeypatch.context() as before:
        before.setattr(Execution, "patched", lambda self, name: False)
        await begin(machine, graph)
        (app,) = machine._apps
        await machine.until_status("r", "waiting")
        assert Work.begun == ["pay"], "then tools in graphs did not ask"
        await machine.stop(app)
    app = await machine.worker()
    await app.approve("r", True)
    assert sorted((await app.get("r").result()).did) == ["one", "pay"]
    assert machine.replay("r").differences == []
