"""Agents inside of agents, interrupted, denied, left and cancelled: the outcome is that of plain Strands."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from strands import Agent, ToolContext, tool
from strands.hooks import BeforeNodeCallEvent, BeforeToolCallEvent, HookProvider, HookRegistry
from strands.multiagent import GraphBuilder, Swarm
from strands.tools.executors import SequentialToolExecutor

import everstep
from everstep.integrations.strands import ScriptedModel, durable
from tests.engine.resume_helpers import Machine
from tests.integrations.strands_shop import DONE, look_up

Play = Callable[[Any, Any], Any]
"""What a program does: it is given a subject, and a function that calls it and answers its interrupts."""


@tool(context=True)
def jump(how: str, tool_context: ToolContext) -> str:
    """Jump, if a person says yes."""
    answer = tool_context.interrupt("may-i", reason={"how": how})
    if answer != "yes":
        return f"not allowed: {answer}"
    DONE.append(f"jump {how}")
    return f"jumped {how}"


class Asking(HookProvider):
    """Asks before each call of a tool."""

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        registry.add_callback(BeforeToolCallEvent, self.ask)

    def ask(self, event: BeforeToolCallEvent[Any]) -> None:
        answer = event.interrupt(f"may-{event.tool_use['name']}", reason=dict(event.tool_use["input"]))
        if answer != "yes":
            event.cancel_tool = f"denied: {answer}"


class AskingForNodes(HookProvider):
    """Asks before each node."""

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        registry.add_callback(BeforeNodeCallEvent, self.ask)

    def ask(self, event: BeforeNodeCallEvent) -> None:
        if event.interrupt("may-node", reason=event.node_id) != "yes":
            event.cancel_node = "denied"


def an_agent(name: str, *answers: Any, tools: Any = (), **options: Any) -> Agent:
    model = options.pop("model", None) or ScriptedModel(*answers)
    return Agent(name=name, model=model, tools=[*tools], callback_handler=None, **options)


def jumper(name: str = "sub", how: str = "high", **options: Any) -> Agent:
    return an_agent(name, [("jump", {"how": how})], f"{name} is done", tools=[jump], **options)


def above(*inner: Any, turns: int = 1, **options: Any) -> Agent:
    calls = [[(one.tool_name, {"input": f"turn {turn}"}) for one in inner] for turn in range(turns)]
    return an_agent("top", *calls, "top is done", tools=inner, **options)


def an_agent_as_a_tool() -> Agent:
    return above(jumper().as_tool(name="sub"))


def one_that_is_called_again_and_again() -> Agent:
    return above(jumper().as_tool(name="sub"), turns=3)


def one_that_remembers() -> Agent:
    return above(jumper().as_tool(name="sub", preserve_context=True), turns=2)


def one_that_answers_itself() -> Agent:
    return above(jumper().as_tool(name="sub", delegate=True))


def without_any_interrupt() -> Agent:
    sub = an_agent("sub", [("look_up", {"topic": "tides"})], "found", tools=[look_up])
    return above(sub.as_tool(name="sub"), turns=3)


def two_levels_deep() -> Agent:
    middle = an_agent("mid", [("low", {"input": "go"})], "mid is done", tools=[jumper("low").as_tool(name="low")])
    return above(middle.as_tool(name="mid"), turns=2)


def interrupts_of_hooks_on_both_levels() -> Agent:
    return above(jumper(hooks=[Asking()]).as_tool(name="sub"), hooks=[Asking()], turns=2)


def several_at_once() -> Agent:
    tools = [jumper("one", "high").as_tool(name="one"), jumper("two", "far").as_tool(name="two"), jump]
    calls = [("one", {"input": "a"}), ("two", {"input": "b"}), ("jump", {"how": "myself"})]
    return an_agent("top", calls, calls, "top is done", tools=tools)


def one_after_the_other() -> Agent:
    tools = [jumper("one", "high").as_tool(name="one"), jumper("two", "far").as_tool(name="two")]
    calls = [("one", {"input": "a"}), ("two", {"input": "b"})]
    return an_agent("top", calls, "top is done", tools=tools, tool_executor=SequentialToolExecutor())


def a_function_that_calls_an_agent() -> Agent:
    inner = an_agent("inner", [("look_up", {"topic": "tides"})], "found", tools=[look_up])

    @tool
    async def ask_inner(input: str) -> str:
        """Ask another agent."""
        return str(await inner.invoke_async(input))

    @tool
    def ask_inner_too(input: str) -> str:
        """Ask another agent, without waiting."""
        return str(inner(input))

    return an_agent(
        "top",
        [("ask_inner", {"input": "a"})],
        [("ask_inner_too", {"input": "b"})],
        "ok",
        tools=[ask_inner, ask_inner_too],
    )


def a_graph(*inner: Agent, **options: Any) -> Any:
    builder = GraphBuilder()
    for one in inner:
        builder.add_node(one, one.name)
    for one, two in itertools.pairwise(inner):
        builder.add_edge(one.name, two.name)
    builder.set_max_node_executions(9)
    if "hooks" in options:
        builder.set_hook_providers(options["hooks"])
    return builder.build()


def a_function_that_calls_a_graph() -> Agent:
    graph = a_graph(an_agent("first", "one"), an_agent("second", "two"))
    swarm = Swarm([an_agent("alone", "swarmed")])

    @tool
    async def ask_graph(input: str) -> str:
        """Ask a graph."""
        return str((await graph.invoke_async(input)).results["second"].result)

    @tool
    def ask_swarm(input: str) -> str:
        """Ask a swarm."""
        return str(swarm(input).results["alone"].result)

    return an_agent(
        "top", [("ask_graph", {"input": "a"}), ("ask_swarm", {"input": "b"})], "ok", tools=[ask_graph, ask_swarm]
    )


def a_graph_of_agents_with_agents() -> Any:
    return a_graph(an_agent("plain", "one"), above(jumper().as_tool(name="sub"), turns=2), jumper("last"))


def a_graph_in_a_graph() -> Any:
    builder = GraphBuilder()
    builder.add_node(a_graph(an_agent("plain", "one"), jumper("deep")), "inner")
    builder.add_node(jumper("last"), "last")
    builder.add_edge("inner", "last")
    builder.set_max_node_executions(9)
    return builder.build()


def a_graph_that_asks_before_its_nodes() -> Any:
    return a_graph(an_agent("first", "one"), jumper("second"), hooks=[AskingForNodes()])


def a_swarm_of_agents_with_agents() -> Any:
    over = [("handoff_to_agent", {"agent_name": "top", "message": "yours", "context": {}})]
    first = an_agent("first", over, "handed over")
    return Swarm([first, above(jumper().as_tool(name="sub"), turns=2)], entry_point=first)


PROGRAMS: list[Callable[[], Any]] = [
    an_agent_as_a_tool,
    one_that_is_called_again_and_again,
    one_that_remembers,
    one_that_answers_itself,
    without_any_interrupt,
    two_levels_deep,
    interrupts_of_hooks_on_both_levels,
    several_at_once,
    one_after_the_other,
    a_function_that_calls_an_agent,
    a_function_that_calls_a_graph,
    a_graph_of_agents_with_agents,
    a_graph_in_a_graph,
    a_graph_that_asks_before_its_nodes,
    a_swarm_of_agents_with_agents,
]


async def two_calls(subject: Any, call: Any) -> Any:
    return [await outcome(call("first")), await outcome(call("second"))]


async def outcome(call: Any) -> Any:
    try:
        return said(await call)
    except (RuntimeError, TypeError) as error:  # what Strands raises for a node that a person denied
        return str(error)


async def left_at_an_event_of_the_inner_agent(subject: Any, call: Any) -> Any:
    async for event in subject.stream_async("go"):
        if "tool_stream_event" in event:
            break
    return said(await call("again"))


async def left_at_its_first_event(subject: Any, call: Any) -> Any:
    async for _ in subject.stream_async("go"):
        break
    await asyncio.sleep(0.1)  # by then the loop has closed what the plain one left
    return said(await call("again"))


async def cancelled_in_the_inner_agent(subject: Any, call: Any) -> Any:
    going = asyncio.create_task(subject.invoke_async("go"))
    await Gate.reached()
    going.cancel()
    with suppress(asyncio.CancelledError):
        await going
    return said(await call("again"))


class Gate(HookProvider):
    """Tells when an inner agent is about to call a tool, and lets it go on at its second time."""

    event: asyncio.Event | None = None

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        registry.add_callback(BeforeToolCallEvent, self.wait)

    async def wait(self, event: BeforeToolCallEvent[Any]) -> None:
        if Gate.event is not None and not Gate.event.is_set():
            Gate.event.set()
            await asyncio.get_running_loop().create_future()

    @staticmethod
    async def reached() -> None:
        Gate.event = asyncio.Event()
        await Gate.event.wait()


def gated() -> Agent:
    return above(jumper(hooks=[Gate()]).as_tool(name="sub"), turns=2)


def said(result: Any) -> Any:
    status = getattr(result, "status", None)
    if status is None:
        return [str(result).strip(), result.stop_reason]
    return [status.value, [[name, str(one.result).strip()] for name, one in sorted(result.results.items())]]


def conversations(subject: Any) -> Any:
    """What the agents of a subject have said and were told, without ids and times."""
    if isinstance(subject, Agent):
        inner = [one._agent for one in subject.tool_registry.registry.values() if hasattr(one, "_agent")]
        spoken = [[one["role"], one["content"]] for one in subject.messages]
        return [subject.name, spoken, [conversations(one) for one in inner if isinstance(one, Agent)]]
    return [conversations(node.executor) for _, node in sorted(subject.nodes.items())]


class Played:
    """The program under test, set by the test."""

    subject: Any = None
    play: Play = two_calls


@everstep.workflow
async def played() -> Any:
    called = durable(Played.subject)
    played = await Played.play(called, called.invoke_async)
    return [played, conversations(called._inside())]


async def in_plain_strands(subject: Any, answer: str) -> Any:
    async def call(prompt: Any) -> Any:
        result = await subject.invoke_async(prompt)
        while interrupts := result.interrupts or ():
            given = [{"interruptResponse": {"interruptId": one.id, "response": answer}} for one in interrupts]
            await asyncio.sleep(0.01)  # a person takes longer: by then the loop has closed what Strands left
            result = await subject.invoke_async(given)
        return result

    played = await Played.play(subject, call)
    return [played, conversations(subject)]


async def in_a_run(machine: Machine, answer: str, *, dies: bool = False) -> Any:
    """Run the program, and answer whatever it asks. If it `dies`, each time that it waits for a person."""
    app, _ = await machine.start(played, id="r")
    while True:
        await machine.until(lambda: machine.status("r") in ("waiting", "completed", "failed", "held"))
        if machine.status("r") != "waiting":
            return await app.get("r").result()
        if dies:
            await machine.kill(app)
            app = await machine.worker()
        asked = len(machine.kinds("r", "approval_asked"))
        for one in await app.get("r").approvals():
            await app.approve("r", answer, id=one.id)
        await machine.advance(1)
        await machine.until(
            lambda before=asked: (
                machine.status("r") in ("completed", "failed", "held")  # type: ignore[misc]
                or len(machine.kinds("r", "approval_asked")) > before
            )
        )


@pytest.fixture(autouse=True)
def fresh() -> None:
    Played.play = staticmethod(two_calls)  # type: ignore[assignment]
    Gate.event = None


@pytest.mark.parametrize("answer", ["yes", "no"])
@pytest.mark.parametrize("build", PROGRAMS)
async def test_nested_agents_do_what_they_do_in_plain_strands(machine: Machine, build: Any, answer: str) -> None:
    plain = await in_plain_strands(build(), answer)
    done = sorted(DONE)
    DONE.clear()
    Played.subject = build()
    assert await in_a_run(machine, answer) == plain
    assert sorted(DONE) == done
    assert [one for one in machine.bodies("r", "timer_started") if one.duration < 1_000_000] == [], "nothing polls"
    assert machine.replay("r").differences == []


@pytest.mark.parametrize("play", [left_at_its_first_event, cancelled_in_the_inner_agent])
async def test_an_agent_that_was_left_or_cancelled_works_again(machine: Machine, play: Any) -> None:
    Played.play = staticmethod(play)  # type: ignore[assignment]
    plain = await in_plain_strands(gated(), "yes")
    done = list(DONE)
    DONE.clear()
    Gate.event = None
    Played.subject = gated()
    assert await in_a_run(machine, "yes") == plain
    assert done == DONE
    assert "jump high" in DONE
    Gate.event = None
    assert machine.replay("r").differences == []


async def test_an_inner_agent_whose_event_was_the_last_that_was_read_works_again(machine: Machine) -> None:
    Played.play = staticmethod(left_at_an_event_of_the_inner_agent)  # type: ignore[assignment]
    Played.subject = gated()
    outcome, _ = await in_a_run(machine, "yes")
    assert outcome == ["top is done", "end_turn"]
    assert DONE == ["jump high"]
    assert machine.replay("r").differences == []


@pytest.mark.parametrize("build", [two_levels_deep, several_at_once, a_graph_of_agents_with_agents])
async def test_nested_agents_go_on_in_another_process_for_each_answer(machine: Machine, build: Any) -> None:
    plain = await in_plain_strands(build(), "yes")
    done = sorted(DONE)
    DONE.clear()
    Played.subject = build()
    assert await in_a_run(machine, "yes", dies=True) == plain
    assert sorted(DONE) == done, "what a person allowed is done once"
    assert machine.replay("r").differences == []


@everstep.workflow
async def left_open() -> list[str]:
    called = durable(Played.subject)
    first, found = called.stream_async("go"), []
    async for _ in first:
        found.append(str(await called.invoke_async("in between")).strip())
        break
    try:
        await anext(first)
    except everstep.errors.Misuse as error:
        found.append(str(error))
    return found


async def test_a_stream_whose_agent_was_called_again_says_so(machine: Machine) -> None:
    Played.subject = an_agent("top", "done")
    app = await machine.boot()
    text, error = await app.run(left_open, id="r")
    assert (text, error[:27]) == ("done", "This stream was left: its a")
