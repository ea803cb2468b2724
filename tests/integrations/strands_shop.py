"""Agents, graphs and swarms that the tests of the Strands adapter use."""

from typing import Any

from strands import Agent, ToolContext, tool
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

import everstep
from everstep.integrations.strands import ScriptedModel, durable
from tests.worlds.ledger import DONE


@tool
def look_up(topic: str) -> str:
    """Look up a topic."""
    DONE.append(f"look_up {topic}")
    return f"{topic} come and go"


@tool
@everstep.step
def post(text: str) -> str:
    """Post a text."""
    DONE.append(f"post {text}")
    return f"posted with {everstep.key()[:4]}"


@tool
async def fail(how: str) -> str:
    """Fail."""
    DONE.append(f"fail {how}")
    raise RuntimeError(how)


@tool(context=True)
def remember(word: str, tool_context: ToolContext) -> str:
    """Remember a word."""
    DONE.append(f"remember {word}")
    tool_context.agent.state.set("word", word)
    return "remembered"


@tool(context=True)
def ask_first(what: str, tool_context: ToolContext) -> str:
    """Ask a person first."""
    answer = tool_context.interrupt("may-i", reason={"what": what})
    DONE.append(f"ask_first {answer}")
    return f"the answer is {answer}"


@tool
@everstep.tool(approval=True, effect="once")
async def pay(usd: int) -> str:
    """Pay."""
    DONE.append(f"pay {usd}")
    return f"paid {usd}"


class Throttled(ScriptedModel):
    """A model that is busy at first."""

    busy = 1

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls < self.busy:
            self.calls += 1
            raise ModelThrottledException("busy")
        async for chunk in super().stream(*args, **kwargs):
            yield chunk


class Overflowing(ScriptedModel):
    """A model whose window is full at its second call."""

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls == 1:
            self.calls += 1
            raise ContextWindowOverflowException("too long")
        async for chunk in super().stream(*args, **kwargs):
            yield chunk


def agent(*answers: Any, **options: Any) -> Agent:
    model = options.pop("model", None) or ScriptedModel(*answers)
    tools = [look_up, post, fail, remember, ask_first, pay]
    return Agent(model=model, tools=options.pop("tools", tools), callback_handler=None, **options)


class Told:
    """What the workflow under test is told, set by the test."""

    subject: Any = None
    options: dict[str, Any] = {}


@everstep.workflow
async def told(prompt: str) -> dict[str, Any]:
    called = durable(Told.subject, **Told.options)
    result = await called.invoke_async(prompt)
    found: dict[str, Any] = {"text": str(result).strip()}
    if isinstance(Told.subject, Agent):
        found["state"] = called.state.get()
        found["roles"] = [one["role"] for one in called.messages]
        found["results"] = [
            block["toolResult"]["content"][0]["text"]
            for one in called.messages
            for block in one["content"]
            if "toolResult" in block
        ]
    return found


@everstep.workflow(budget=everstep.Budget(tokens=40, then="fail"))
async def frugal(prompt: str) -> str:
    try:
        return str(await durable(Told.subject).invoke_async(prompt)).strip()
    except everstep.BudgetExceeded as exceeded:
        return f"{exceeded.over} ran out"


@everstep.workflow(budget=everstep.Budget(steps=3))
async def hurried(prompt: str) -> str:
    return str(await durable(Told.subject).invoke_async(prompt)).strip()


@everstep.workflow
async def streamed(prompt: str) -> list[str]:
    events = durable(Told.subject).stream_async(prompt)
    return [f"data {one['data']}" if "data" in one else ",".join(sorted(map(str, one))) async for one in events]
