"""A model call and a tool call as steps.

Strands' middleware replaces the model, or the tool, of one call by one that makes the call in a step's body, records
the result, and emits the same events from the record, live and in a replay.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from enum import Enum
from typing import Any, Final

from strands.agent._agent_as_tool import _AgentAsTool
from strands.interrupt import Interrupt, InterruptException
from strands.middleware.stages import ExecuteToolContext, InvokeModelContext
from strands.models.model import Model
from strands.tools.decorator import DecoratedFunctionTool
from strands.types._events import ToolInterruptEvent, ToolResultEvent, ToolStreamEvent
from strands.types.exceptions import (
    ContextWindowOverflowException,
    MaxTokensReachedException,
    ModelThrottledException,
)
from strands.types.tools import AgentTool, ToolSpec, ToolUse

import everstep
from everstep.integrations.strands.standins import STEP
from everstep.integrations.strands.states import Writes, noted, shared_state
from everstep.testing import ledger

for _error in (ContextWindowOverflowException, MaxTokensReachedException, ModelThrottledException):
    everstep.register(_error)  # Strands' own retries look at their types

CONTROL: Final = ("strands.multiagent.", "strands.agent.", "strands.event_loop.", "strands.vended_tools.stop")
"""The modules of tool functions that steer the agent itself: they change memory only, and follow from the log."""
CONTROL_CLASSES: Final = ("StructuredOutputTool", "_AgentAsTool")
MODEL_CONTRACT: Final[dict[str, Any]] = {"effect": "read", "cost": {"tokens": 1}}
"""With a cost, an answer is durable before anything is done with it, however fast it came."""

Price = Callable[[dict[str, Any]], float]


class DurableModel(Model):
    """A model whose calls are `read` steps. All other attributes are those of the real model."""

    def __init__(
        self, model: Model, name: str, price: Price | None, stream: str | None, contract: dict[str, Any]
    ) -> None:
        self._model = model
        self._supports_structured_output = bool(getattr(model, "_supports_structured_output", False))
        self._price = price
        self._stream = stream
        self._step = everstep.step(self._ask, name=name, **{**MODEL_CONTRACT, **contract})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def update_config(self, **model_config: Any) -> None:
        self._model.update_config(**model_config)

    def get_config(self) -> Any:
        return self._model.get_config()

    @property
    def stateful(self) -> bool:
        """Whether the provider keeps the conversation."""
        return bool(self._model.stateful)

    @property
    def context_window_limit(self) -> int | None:
        """How many tokens the model takes."""
        return self._model.context_window_limit

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.structured_output(*args, **kwargs)

    async def stream(
        self,
        messages: Any,
        tool_specs: Any = None,
        system_prompt: Any = None,
        *,
        tool_choice: Any = None,
        system_prompt_content: Any = None,
        model_state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Any, None]:
        """Ask the model in a step, and give the recorded chunks."""
        request = {"messages": messages, "tools": tool_specs, "system": system_prompt_content or system_prompt}
        request |= {"tool_choice": tool_choice, "model_state": model_state or None}
        live = {"tool_choice": tool_choice, "system_prompt_content": system_prompt_content, **kwargs}
        answer = await self._step(storable(request), (messages, tool_specs, system_prompt, model_state, live))
        if model_state is not None and answer["model_state"] is not None:
            model_state.clear()
            model_state.update(answer["model_state"])
        for chunk in answer["chunks"]:
            yield chunk

    async def _ask(self, request: dict[str, Any], call: everstep.Live[Any]) -> dict[str, Any]:
        messages, tool_specs, system_prompt, model_state, live = call
        if (url := ledger.offered()) != "":
            await asyncio.to_thread(ledger.ask, url, ledger.MODEL, everstep.key(), {})  # a crash test counts the calls
        state = dict(model_state or {})
        chunks: list[Any] = []
        tokens = everstep.stream(self._stream) if self._stream is not None else None
        async for chunk in self._model.stream(messages, tool_specs, system_prompt, model_state=state, **live):
            chunks.append(storable(chunk))
            text = chunk.get("contentBlockDelta", {}).get("delta", {}).get("text")
            if tokens is not None and text:
                tokens.append(text)
            if usage := chunk.get("metadata", {}).get("usage"):
                usd = self._price(dict(usage)) if self._price is not None else None
                everstep.charge(usd=usd, tokens=int(usage.get("totalTokens", 0)))
        return {"chunks": chunks, "model_state": storable(state) if model_state is not None else None}


class _InItsPlace(AgentTool):
    """The replacement of a tool."""

    def __init__(self, tool: AgentTool) -> None:
        super().__init__()
        self._tool = tool

    @property
    def tool_name(self) -> str:
        return self._tool.tool_name

    @property
    def tool_spec(self) -> ToolSpec:
        return self._tool.tool_spec

    @property
    def tool_type(self) -> str:
        return self._tool.tool_type


class ClosedTool(_InItsPlace):
    """A tool that is workflow code, such as an agent, and that is closed before its result is passed on.

    Strands leaves a tool's generator at its last event, and the garbage collector closes it: in a run no replay could
    find that moment again. An agent that is left open keeps its lock, and never works again.
    """

    async def stream(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Give the tool's events."""
        self._keep_to_the_history()
        last = None
        async with aclosing(self._tool.stream(tool_use, invocation_state, **kwargs)) as events:
            async for event in events:
                if isinstance(event, ToolInterruptEvent | ToolResultEvent):
                    last = event
                    break
                yield event
        if last is not None:
            yield last

    def _keep_to_the_history(self) -> None:
        """In runs of a release that left agents open, keep the lock of an agent that was called before."""
        if isinstance(self._tool, _AgentAsTool):
            called = getattr(self._tool, "everstep_was_called", False)
            if called and not everstep.patched("strands.agents-as-tools-are-closed"):
                self._tool._lock.acquire(blocking=False)
            self._tool.everstep_was_called = True  # type: ignore[attr-defined]


class DurableTool(_InItsPlace):
    """A tool whose calls are steps. The call's id is part of its arguments, and so of its `everstep.key()`."""

    def __init__(self, tool: AgentTool, agent: Any, contract: dict[str, Any]) -> None:
        super().__init__(tool)
        self._agent = agent
        self._raises = contract.get("effect") == "once" or "retry" in contract
        self._step = everstep.step(self._do, name=name_of(tool.tool_name), **contract)

    async def stream(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Do the call in a step, and emit what was recorded."""
        state = shared_state(self._agent)
        writes: Writes = {}
        live = (tool_use, invocation_state, kwargs, writes)
        try:
            done = await self._step(str(tool_use.get("toolUseId")), storable(tool_use.get("input")), live)
        except BaseException:
            state.drop(writes)
            raise
        if done.get("state") is not None:
            state.replace(done["state"])  # the previous release recorded the whole state
        state.settle(done.get("writes") or {})
        for data in done["streamed"]:
            yield ToolStreamEvent(tool_use, data)
        if done["interrupts"]:
            yield ToolInterruptEvent(tool_use, [Interrupt(**one) for one in done["interrupts"]])
        elif done["result"] is not None:
            yield ToolResultEvent(done["result"])

    async def _do(self, id: str, input: Any, call: everstep.Live[Any]) -> dict[str, Any]:
        tool_use, invocation_state, kwargs, writes = call
        done: dict[str, Any] = {"result": None, "streamed": [], "interrupts": []}
        with noted(self._agent, writes):
            try:
                async for event in self._tool.stream(tool_use, invocation_state, **kwargs):
                    self._take(event, done)
            except InterruptException as asked:
                done["interrupts"] = [_question(asked.interrupt)]
        if done["result"] is None and not done["interrupts"] and done["streamed"]:
            done["result"] = done["streamed"][-1]  # the last value of a tool that is not Strands' own is its result
        done["writes"] = storable(writes)
        return done

    def _take(self, event: Any, done: dict[str, Any]) -> None:
        if isinstance(event, ToolInterruptEvent):
            done["interrupts"] = [_question(one) for one in event.interrupts]
        elif isinstance(event, ToolResultEvent):
            if event.exception is not None and self._raises:
                raise event.exception  # the contract says what that means for the effect
            done["result"] = storable(event.tool_result)
        elif isinstance(event, ToolStreamEvent):
            done["streamed"].append(storable(event.get("tool_stream_event", {}).get("data")))
        else:
            done["streamed"].append(storable(event))


def _question(interrupt: Interrupt) -> dict[str, Any]:
    return {"id": interrupt.id, "name": interrupt.name, "reason": storable(interrupt.reason)}


def is_control(tool: AgentTool) -> bool:
    """Return True if a tool steers the agent itself, or is a step already: workflow code calls it directly."""
    function = getattr(tool, "__wrapped__", None)
    if isinstance(function, STEP):
        return True
    if isinstance(tool, DecoratedFunctionTool):
        return str(getattr(function, "__module__", "")).startswith(CONTROL)
    return type(tool).__name__ in CONTROL_CLASSES


def model_middleware(name: str, price: Price | None, stream: str | None, contract: dict[str, Any]) -> Any:
    """Return middleware that makes each model call a step."""

    async def call_model(context: InvokeModelContext, go_on: Any) -> AsyncGenerator[Any, None]:
        if not isinstance(context.model, DurableModel):  # other middleware has chosen another model
            context = context.replace(model=DurableModel(context.model, name, price, stream, contract))
        async for event in go_on(context):
            yield event

    return call_model


def tool_middleware(contracts: dict[str, dict[str, Any]]) -> Any:
    """Return middleware that makes each tool call a step."""

    async def call_tool(context: ExecuteToolContext, go_on: Any) -> AsyncGenerator[Any, None]:
        tool = context.tool
        if tool is not None:
            contract = contracts.get(tool.tool_name, {})
            own = ClosedTool(tool) if is_control(tool) else DurableTool(tool, context.agent, contract)
            context = context.replace(tool=own)
        async for event in go_on(context):
            yield event

    return call_tool


def name_of(text: str) -> str:
    """Return a text as a name of a step."""
    return "-".join(text.replace("#", " ").split())[:150] or "unnamed"


def storable(value: Any) -> Any:
    """Return a value as plain data. Anything else becomes its text: an effect that happened is never lost over it."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    if isinstance(value, Enum):
        return storable(value.value)
    if isinstance(value, dict):
        return {str(name): storable(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [storable(one) for one in value]
    return str(value)
