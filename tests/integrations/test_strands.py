"""Strands under a workflow: model and tool calls are steps, replayed as recorded, in doubt never shown as errors."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.multiagent import GraphBuilder, Swarm

import everstep
from everstep.errors import Misuse
from everstep.integrations.strands import ScriptedModel, durable
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine
from tests.integrations.strands_shop import (
    DONE,
    Throttled,
    Told,
    agent,
    fail,
    frugal,
    hurried,
    look_up,
    remember,
    streamed,
    told,
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Told.subject, Told.options = None, {}


def steps(machine: Machine, run: str = "r") -> list[str]:
    return [event.step for event in machine.events(run) if event.kind == "step_started"]


def sound(machine: Machine, run: str = "r") -> None:
    assert machine.replay(run).differences == []
    assert check(export_histories(machine.store)) == []


TWO_LOOKS = [("look_up", {"topic": "tides"}), ("look_up", {"topic": "ships"})]


async def test_each_model_call_and_each_tool_call_is_a_step_and_is_not_made_again(machine: Machine) -> None:
    Told.subject = agent(TWO_LOOKS, [("post", {"text": "hello"})], "done")
    app = await machine.boot()
    result = await app.run(told, "go", id="r")
    assert result["text"] == "done"
    assert result["roles"] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert steps(machine) == ["model", "look_up", "look_up#2", "model#2", "post", "model#3"]
    calls, done = Told.subject.model.calls, list(DONE)
    sound(machine)
    assert (Told.subject.model.calls, DONE) == (calls, done), "a replay calls nobody"
    assert Told.subject.messages == [], "the module's agent is as it was"


async def test_the_response_that_minted_a_tool_call_is_durable_before_the_tool_runs(machine: Machine) -> None:
    Told.subject = agent([("post", {"text": "hello"})], "done")
    app = await machine.boot()
    await app.run(told, "go", id="r")
    kinds = [(event.kind, event.step) for event in machine.events("r")]
    assert kinds.index(("step_completed", "model")) < kinds.index(("step_started", "post"))


async def test_two_runs_of_one_agent_at_a_time_do_not_mix(machine: Machine) -> None:
    Told.subject = agent(TWO_LOOKS, "done")
    app = await machine.boot()
    runs = [await app.start(told, f"go {number}", id=f"r{number}") for number in range(5)]
    results = await asyncio.gather(*(run.result() for run in runs))
    assert {tuple(result["roles"]) for result in results} == {("user", "assistant", "user", "assistant")}
    for number in range(5):
        assert machine.replay(f"r{number}").differences == []


async def test_a_tools_error_is_its_result_and_a_state_that_it_wrote_is_there_in_a_replay(machine: Machine) -> None:
    Told.subject = agent([("fail", {"how": "badly"})], [("remember", {"word": "tide"})], "done")
    app = await machine.boot()
    result = await app.run(told, "go", id="r")
    assert result["results"] == ["Error: RuntimeError - badly", "remembered"]
    assert result["state"] == {"word": "tide"}
    assert DONE == ["fail badly", "remember tide"]
    sound(machine)
    assert Told.subject.state.get() == {}


async def test_an_outcome_in_doubt_holds_the_run_and_the_model_is_never_told_of_it_as_an_error(
    machine: Machine,
) -> None:
    Told.subject = agent([("fail", {"how": "who knows"})], "done")
    Told.options = {"contracts": {"fail": {"effect": "once"}}}
    app, _ = await machine.start(told, "go", id="r")
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "in-doubt"
    assert machine.hold("r").step == "fail"
    assert Told.subject.model.calls == 1
    value = {"result": {"toolUseId": "call-0-0", "status": "success", "content": [{"text": "it was done"}]}}
    value |= {"streamed": [], "interrupts": [], "state": None}
    await app.resolve("r", "done", value=value)
    result = await app.get("r").result()
    assert result["results"] == ["it was done"]
    assert DONE == ["fail who knows"]


async def test_a_tool_that_a_person_must_approve_waits_with_its_exact_arguments(machine: Machine) -> None:
    Told.subject = agent([("pay", {"usd": 5})], "done")
    _, run = await machine.start(told, "go", id="r")
    await machine.until(lambda: machine.kinds("r", "approval_asked"))
    (one,) = await run.approvals()
    assert (one.what, one.arguments) == ("pay", {"usd": 5})
    assert DONE == []
    await run.approve(False, by="bob", note="too much")
    result = await run.result()
    assert "refused by a person (bob): too much" in result["results"][0]
    assert DONE == []
    sound(machine)


@pytest.mark.parametrize("answer", [True, "yes", {"a": 1}, 0, False, ""])
async def test_an_interrupt_of_strands_becomes_an_approval(machine: Machine, answer: Any) -> None:
    Told.subject = agent([("ask_first", {"what": "jump"})], "done")
    app, run = await machine.start(told, "go", id="r")
    await machine.until(lambda: machine.kinds("r", "approval_asked"))
    (one,) = await run.approvals()
    assert (one.what, one.arguments) == ("may-i", {"what": "jump"})
    await machine.until_status("r", "waiting")
    await machine.kill(app)
    worker = await machine.worker()
    await worker.approve("r", answer)
    result = await worker.get("r").result()
    assert result["results"] == [f"the answer is {answer}"]
    assert [f"ask_first {answer}"] == DONE
    assert machine.replay("r").differences == []


async def test_strands_own_retries_are_durable_timers(machine: Machine) -> None:
    Told.subject = agent(model=Throttled("done"))
    _, run = await machine.start(told, "go", id="r")
    await machine.until(lambda: machine.kinds("r", "timer_started"))
    await machine.advance(300)
    assert (await run.result())["text"] == "done"
    assert steps(machine) == ["model", "model#2"]
    sound(machine)


async def test_usage_is_charged_in_tokens_and_in_dollars(machine: Machine) -> None:
    Told.subject = agent(TWO_LOOKS, TWO_LOOKS, TWO_LOOKS, "done")
    Told.options = {"price": lambda usage: usage["totalTokens"] / 1000}
    app = await machine.boot()
    await app.run(told, "go", id="r")
    charged = [body.charged for body in machine.bodies("r", "step_completed") if body.charged is not None]
    assert [(one.tokens, one.microdollars) for one in charged] == [(15, 15_000)] * 4


async def test_an_agent_whose_budget_is_used_up_is_stopped_before_it_asks_its_model_again(machine: Machine) -> None:
    Told.subject = agent(TWO_LOOKS, TWO_LOOKS, TWO_LOOKS, TWO_LOOKS, "done")
    app = await machine.boot()
    assert await app.run(frugal, "go", id="r") == "tokens ran out"
    assert steps(machine).count("model#3") == 1
    assert Told.subject.model.calls == 3, "45 tokens of 40: the third call was begun with 30"
    sound(machine)


async def test_a_tool_for_which_there_is_no_budget_holds_the_run_and_the_model_is_not_told_of_an_error(
    machine: Machine,
) -> None:
    Told.subject = agent([("look_up", {"topic": "tides"})], [("post", {"text": "hello"})], "done")
    app, run = await machine.start(hurried, "go", id="r")
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "budget"
    assert (Told.subject.model.calls, DONE) == (2, ["look_up tides"])
    await app.resolve("r", "accept", by="ann")
    assert await run.result() == "done"
    assert DONE == ["look_up tides", "post hello"]
    sound(machine)


async def test_events_of_a_stream_are_emitted_again_in_a_replay(machine: Machine) -> None:
    Told.subject = agent([("look_up", {"topic": "tides"})], "done")
    app = await machine.boot()
    kinds = await app.run(streamed, "go", id="r")
    assert "data done" in kinds
    assert any("tool_use_stream" in kind or "current_tool_use" in kind for kind in kinds)
    sound(machine)


async def test_an_agent_as_a_tool_is_durable_inside(machine: Machine) -> None:
    inner = Agent(
        name="inner",
        model=ScriptedModel([("look_up", {"topic": "tides"})], "found"),
        tools=[look_up],
        callback_handler=None,
    )
    Told.subject = agent([("inner", {"input": "find"})], "done", tools=[inner.as_tool(name="inner")])
    app = await machine.boot()
    result = await app.run(told, "go", id="r")
    assert result["results"] == ["found\n"] or "found" in result["results"][0]
    assert steps(machine) == ["model", "inner.model", "look_up", "inner.model#2", "model#2"]
    sound(machine)


def graph(*, slow: float = 0.0) -> Any:
    builder = GraphBuilder()
    for name in ("begin", "left", "right", "join"):
        seconds = slow if name == "right" else 0.0
        made = Agent(name=name, model=ScriptedModel(f"{name} done", seconds=seconds), callback_handler=None)
        builder.add_node(made, name)
    for one in ("left", "right"):
        builder.add_edge("begin", one)
        builder.add_edge(one, "join")
    builder.set_entry_point("begin")
    builder.set_max_node_executions(10)
    return builder.build()


@everstep.workflow
async def graphed() -> list[str]:
    result = await durable(Told.subject).invoke_async("go")
    names = [node.node_id for node in result.execution_order]
    return [*names, str(result.results[names[-1]].result).strip()]


async def test_a_graph_with_a_join_records_each_node_before_it_begins(machine: Machine) -> None:
    Told.subject = graph(slow=0.25)
    app = await machine.boot()
    order = await app.run(graphed, id="r")
    assert order == ["begin", "left", "right", "join", "join done"]
    begun = [name for name in steps(machine) if name.startswith("node.")]
    assert begun == ["node.begin", "node.left", "node.right", "node.join"]
    assert machine.kinds("r", "timer_started") == [], "it does not wait in turns"
    sound(machine)


async def test_a_graph_that_is_killed_while_a_branch_runs_runs_that_branch_and_the_join_once(machine: Machine) -> None:
    Told.subject = graph(slow=0.5)
    app, _ = await machine.start(graphed, id="r")
    await machine.until(lambda: "left.model" in [e.step for e in machine.events("r") if e.kind == "step_completed"])
    await machine.kill(app)
    calls = {name: node.executor.model.calls for name, node in Told.subject.nodes.items()}
    assert calls == {"begin": 1, "left": 1, "right": 1, "join": 0}
    worker = await machine.worker()
    assert await worker.get("r").result() == ["begin", "left", "right", "join", "join done"]
    calls = {name: node.executor.model.calls for name, node in Told.subject.nodes.items()}
    assert calls == {"begin": 1, "left": 1, "right": 2, "join": 1}
    sound(machine)


@everstep.workflow
async def swarmed() -> list[str]:
    result = await durable(Told.subject).invoke_async("go")
    return [node.node_id for node in result.node_history]


async def test_a_swarm_hands_over_in_the_run_and_not_in_the_module(machine: Machine) -> None:
    over = [("handoff_to_agent", {"agent_name": "two", "message": "yours", "context": {"a": 1}})]
    one = Agent(name="one", model=ScriptedModel(over, "handed over"), callback_handler=None)
    two = Agent(name="two", model=ScriptedModel("done"), callback_handler=None)
    Told.subject = Swarm([one, two], entry_point=one)
    app = await machine.boot()
    for run in ("r", "s"):
        assert await app.run(swarmed, id=run) == ["one", "two"]
        assert "node.two" in steps(machine, run)
        sound(machine, run)
    assert Told.subject.shared_context.context == {}


def test_outside_a_workflow_each_call_is_a_run_and_a_script_that_is_run_again_goes_on(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for life in (1, 2):
        stock = agent([("look_up", {"topic": "tides"})], "first", "second")
        mine = durable(stock, id="chat")
        assert str(mine("one")).strip() == "first"
        assert str(mine("two")).strip() == "second"
        assert len(stock.messages) == 6
        assert stock.model.calls == (3 if life == 1 else 0)  # type: ignore[attr-defined]
    assert DONE == ["look_up tides"]
    with pytest.raises(Misuse, match="Give it an id"):
        durable(agent("x"))("one")
    with pytest.raises(everstep.errors.IdConflict):
        durable(agent("x"), id="chat")("another prompt")


def test_outside_a_workflow_agents_without_names_are_not_mixed_up(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agents = [Agent(model=ScriptedModel(f"I am {name}"), callback_handler=None) for name in "AB"]
    one, two = (durable(agent, id=f"talk-{number}") for number, agent in enumerate(agents))
    assert [str(called("Who are you?")).strip() for called in (one, two, one)] == ["I am A", "I am B", "I am A"]


def test_outside_a_workflow_a_graph_and_a_running_loop_work_as_well(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert durable(graph(), id="g")("go").status.value == "completed"

    async def main() -> str:
        return str(await durable(agent("hello"), id="a").invoke_async("one")).strip()

    assert asyncio.run(main()) == "hello"


def test_what_is_no_agent_and_background_tasks_are_refused() -> None:
    @everstep.workflow(name="wrong")
    async def wrong() -> None:
        await durable(object()).invoke_async("x")

    with everstep.open("memory:") as app, pytest.raises(Misuse, match="agents, graphs and swarms"):
        app.run(wrong)


def test_the_tools_under_test_are_tools() -> None:
    assert {type(one) for one in (look_up, fail, remember)} == {type(tool(lambda: None))}


class Answer(BaseModel):
    """A structured answer."""

    word: str


@everstep.workflow
async def structured() -> str:
    result = await durable(Told.subject).invoke_async("go", structured_output_model=Answer)
    return str(result.structured_output.word)


async def test_structured_output_is_the_same_in_a_replay(machine: Machine) -> None:
    Told.subject = agent([("Answer", {"word": "tide"})], "done")
    app = await machine.boot()
    assert await app.run(structured, id="r") == "tide"
    sound(machine)


@everstep.workflow
async def with_one_made_outside() -> None:
    await Told.options["made"].invoke_async("go")


async def test_one_that_was_made_outside_a_workflow_is_refused_in_it(machine: Machine) -> None:
    Told.options = {"made": durable(agent("done"))}
    app = await machine.boot()
    with pytest.raises(Misuse, match="in the workflow itself"):
        await app.run(with_one_made_outside, id="r")
