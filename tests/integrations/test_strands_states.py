"""The state of an agent whose tools run at the same time: nothing that a tool wrote is lost, live or in a replay."""

import threading
from typing import Any

import pytest
from strands import ToolContext, tool
from strands.agent.state import AgentState
from strands.hooks import AfterToolCallEvent, HookProvider, HookRegistry

import everstep
from everstep.integrations.strands import durable
from everstep.integrations.strands.states import SharedState
from tests.engine.resume_helpers import Machine
from tests.integrations.strands_shop import agent


class Turns:
    """Lets tools write in an order that the test chooses: a tool waits until the one before it has written."""

    written: dict[str, threading.Event] = {}
    ended: dict[str, threading.Event] = {}

    @classmethod
    def begin(cls) -> None:
        cls.written = {name: threading.Event() for name in "abc"}
        cls.ended = {name: threading.Event() for name in "abc"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    Turns.begin()


@tool(context=True)
def write(who: str, names: list[str], tool_context: ToolContext, after: str = "", ends_after: str = "") -> str:
    """Write names into the state, after another tool has written, and end after another one has ended."""
    if after:
        assert Turns.written[after].wait(60)
    for name in names:
        before = tool_context.agent.state.get(name) or []
        tool_context.agent.state.set(name, [*before, who])
    Turns.written[who].set()
    if ends_after:
        assert Turns.ended[ends_after].wait(60)
    Turns.ended[who].set()
    return f"{who} sees {tool_context.agent.state.get()}"


@tool(context=True)
async def forget(name: str, tool_context: ToolContext) -> str:
    """Delete a name from the state."""
    tool_context.agent.state.delete(name)
    return "forgotten"


@tool(context=True)
def write_in_a_thread(word: str, tool_context: ToolContext) -> str:
    """Write in a thread that knows nothing of the tool."""
    thread = threading.Thread(target=tool_context.agent.state.set, args=("threaded", word))
    thread.start()
    thread.join()
    return "written"


@tool(context=True)
def begin_anew(word: str, tool_context: ToolContext) -> str:
    """Give the agent another state."""
    tool_context.agent.state = AgentState({"anew": word})
    return "begun"


@tool(context=True)
def fail_after_writing(word: str, tool_context: ToolContext) -> str:
    """Write, and fail."""
    tool_context.agent.state.set("failed", word)
    raise RuntimeError(word)


@tool(context=True)
def write_many(who: str, count: int, tool_context: ToolContext) -> str:
    """Write many names without a pause, while others write theirs and end."""
    for number in range(count):
        tool_context.agent.state.set(f"{who}{number}", number)
    return "written"


TOOLS = [write, write_many, forget, write_in_a_thread, begin_anew, fail_after_writing]


class Told:
    """What the workflow is told, set by the test."""

    subject: Any = None
    options: dict[str, Any] = {}


class Looking(HookProvider):
    """Notes what workflow code sees after each tool."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        registry.add_callback(AfterToolCallEvent, self.look)

    def look(self, event: AfterToolCallEvent[Any]) -> None:
        self.seen.append(event.agent.state.get())


@everstep.workflow
async def stateful() -> Any:
    called = durable(Told.subject, **Told.options)
    await called.invoke_async("go")
    return called.state.get()


async def outcome(machine: Machine, *answers: Any, **options: Any) -> Any:
    """Return the state after a run. A replay comes to the same."""
    Told.subject = agent(*answers, "done", tools=TOOLS, **options)
    Told.options = {}
    app = await machine.boot()
    live = await app.run(stateful, id="r")
    assert machine.replay("r").differences == []
    return live


async def test_what_parallel_tools_write_is_all_kept(machine: Machine) -> None:
    calls = [("write", {"who": who, "names": [who]}) for who in "abc"]
    live = await outcome(machine, calls)
    assert live == {"a": ["a"], "b": ["b"], "c": ["c"]}


async def test_what_a_tool_writes_while_others_end_is_not_taken_away(machine: Machine) -> None:
    counts = {who: 100 * (place + 1) for place, who in enumerate("abcde")}
    live = await outcome(machine, [("write_many", {"who": who, "count": count}) for who, count in counts.items()])
    assert live == {f"{who}{number}": number for who, count in counts.items() for number in range(count)}


@pytest.mark.parametrize("ends_first", ["a", "b"])
async def test_of_two_tools_that_write_one_name_the_later_write_is_kept(machine: Machine, ends_first: str) -> None:
    first = {"who": "a", "names": ["n"]} | ({"ends_after": "b"} if ends_first == "b" else {})
    second = {"who": "b", "names": ["n"], "after": "a"} | ({"ends_after": "a"} if ends_first == "a" else {})
    looking = Looking()
    live = await outcome(machine, [("write", first), ("write", second)], hooks=[looking])
    assert live == {"n": ["a", "b"]}, "the second has read what the first wrote"
    half = len(looking.seen) // 2
    assert looking.seen[:half] == looking.seen[half:], "hooks see the same in a replay"
    assert looking.seen[half - 1] == {"n": ["a", "b"]}


async def test_a_tool_deletes_what_it_deletes_and_nothing_else(machine: Machine) -> None:
    calls = [("forget", {"name": "old"}), ("write", {"who": "a", "names": ["a"]}), ("write_in_a_thread", {"word": "w"})]
    live = await outcome(machine, calls, state={"old": 1, "kept": 2})
    assert live == {"kept": 2, "a": ["a"], "threaded": "w"}


async def test_a_state_that_a_tool_gives_its_agent_is_kept(machine: Machine) -> None:
    live = await outcome(machine, [("begin_anew", {"word": "w"})], [("write", {"who": "a", "names": ["a"]})])
    assert live == {"anew": "w", "a": ["a"]}


async def test_a_tool_that_fails_has_written_what_it_wrote(machine: Machine) -> None:
    live = await outcome(machine, [("fail_after_writing", {"word": "w"})])
    assert live == {"failed": "w"}, "as in Strands: the failure is a result"


async def test_what_one_tool_wrote_is_there_when_the_other_is_killed(machine: Machine) -> None:
    calls = [("write", {"who": "a", "names": ["n"]}), ("write", {"who": "b", "names": ["n"], "after": "c"})]
    Told.subject = agent(calls, "done", tools=TOOLS)
    app, _ = await machine.start(stateful, id="r")
    await machine.until(lambda: "write" in [e.step for e in machine.events("r") if e.kind == "step_completed"])
    dying, Turns.written["c"] = Turns.written["c"], threading.Event()
    Turns.written["c"].set()
    dying.set()  # the thread that is left behind ends, and what it wrote is gone with its process
    await machine.kill(app)
    worker = await machine.worker()
    assert await worker.get("r").result() == {"n": ["a", "b"]}
    assert machine.replay("r").differences == []


async def test_an_outcome_with_the_whole_state_is_read_as_the_release_before_wrote_it(machine: Machine) -> None:
    Told.subject = agent([("fail", {"how": "who knows"})], "done", state={"old": 1})
    Told.options = {"contracts": {"fail": {"effect": "once"}}}
    app, _ = await machine.start(stateful, id="r")
    await machine.until_status("r", "held")
    value = {"result": {"toolUseId": "call-0-0", "status": "success", "content": [{"text": "it was done"}]}}
    await app.resolve("r", "done", value=value | {"streamed": [], "interrupts": [], "state": {"word": "tide"}})
    assert await app.get("r").result() == {"word": "tide"}


def test_a_shared_state_refuses_what_a_state_of_strands_refuses() -> None:
    state = SharedState({"a": 1})
    for wrong in (lambda: state.set("", 1), lambda: state.set("a", object()), lambda: state.delete(" ")):
        with pytest.raises(ValueError, match=r"Key|JSON"):
            wrong()
    state.set("b", [1])
    state.get("b").append(2)
    assert state.get() == {"a": 1, "b": [1]}
    state.delete("a")
    state.delete("nothing")
    assert state.get() == {"b": [1]}
