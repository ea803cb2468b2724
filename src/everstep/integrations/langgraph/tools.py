"""Steps as tools of LangChain: a model calls them through `ToolNode` or an agent, and each call is recorded.

The place of a call is the id that the model gave it, once the checkpoint with the model's answer is durable. With
`durability="exit"` it never is while the graph runs, and another answer would have other ids: there the place is the
tool, its arguments and the superstep. The model never sees an outcome in doubt: the graph is interrupted, for a person.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any, Final

from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, ToolException
from langgraph.types import interrupt

import everstep
from everstep.adapters import digest_of
from everstep.errors import Misuse, Refused, RunHeld
from everstep.integrations.langgraph.nodes import CALLS, CHECKPOINTER, graph_of, recorded
from everstep.integrations.langgraph.questions import QUESTIONS, plain

DURABILITY: Final = "__pregel_durability"
CALL_ID: Final = "tool_call_id"
SAVED_SECONDS_MAX: Final = 30.0
"""How long a call waits for the checkpoint that asks for it, in seconds."""
PAUSE_SECONDS: Final = 0.001


def tools(steps: Iterable[Any]) -> list[BaseTool]:
    """Return steps as tools of LangChain, for `ToolNode`, an agent, or `model.bind_tools`.

    steps: functions with `@everstep.step` (or `@everstep.tool`); a plain function becomes a `repeat` step.
    """
    return [_tool(one) for one in steps]


def _tool(given: Any) -> BaseTool:
    step = given if hasattr(given, "effect") and hasattr(given, "function") else everstep.step(given)
    spec = getattr(step, "spec", None) or {}
    about = spec.get("description") or inspect.getdoc(step.function) or step.name
    name = step.name.rpartition(".")[2]
    if step.is_async:
        return StructuredTool.from_function(
            coroutine=_async_call(step), name=name, description=about, handle_tool_error=_told
        )
    return StructuredTool.from_function(func=_call(step), name=name, description=about, handle_tool_error=_told)


class RefusedByPerson(ToolException):
    """A person has refused a call. The model receives that, however the graph handles errors of tools."""


def _told(error: ToolException) -> str:
    if isinstance(error, RefusedByPerson):
        return str(error)
    raise error


def _with_signature(call: Callable[..., Any], step: Any) -> Callable[..., Any]:
    """Show LangChain the parameters of a step, and one more: the id of the call."""
    own = inspect.signature(step.function)
    if CALL_ID in own.parameters:
        raise Misuse(f"{step.name} has a parameter {CALL_ID!r}: the adapter needs that name.")
    annotations = {**step.signature.annotations, CALL_ID: Annotated[str, InjectedToolCallId]}
    keyword = inspect.Parameter(CALL_ID, inspect.Parameter.KEYWORD_ONLY, annotation=annotations[CALL_ID])
    parameters = [one.replace(annotation=annotations.get(one.name, Any)) for one in own.parameters.values()]
    call.__signature__ = own.replace(parameters=[*parameters, keyword])  # type: ignore[attr-defined]
    call.__annotations__ = annotations
    call.__name__ = step.name.rpartition(".")[2]
    call.__doc__ = inspect.getdoc(step.function)
    return call


def _call(step: Any) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        call_id = kwargs.pop(CALL_ID)
        begun = _begin(step, kwargs, call_id)
        while not begun.is_saved():
            time.sleep(PAUSE_SECONDS)
        begun.ask_person()
        while True:
            try:
                return begun.perform()
            except RunHeld as held:
                _tell_person(step, held)

    return _with_signature(call, step)


def _async_call(step: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(**kwargs: Any) -> Any:
        call_id = kwargs.pop(CALL_ID)
        begun = _begin(step, kwargs, call_id)
        while not await begun.soon(begun.is_saved):  # noqa: ASYNC110  # it becomes so in the store
            await asyncio.sleep(PAUSE_SECONDS)
        await begun.soon(begun.ask_person)
        while True:
            try:
                return await begun.perform()
            except RunHeld as held:
                _tell_person(step, held)

    return _with_signature(call, step)


def _tell_person(step: Any, held: RunHeld) -> None:
    """Interrupt the graph, because a person has to say whether a step happened."""
    interrupt({"held": step.name, "reason": held.reason, "what_to_do": str(held)})


def _stable_text(value: Any) -> str:
    """Return the `repr` of plain data, with the members of sets in an order that is the same in every process."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(_stable_text, value)))})"
    if type(value) is dict:
        pairs = (f"{_stable_text(key)}: {_stable_text(member)}" for key, member in value.items())
        return f"{{{', '.join(pairs)}}}"
    if type(value) is list:
        return f"[{', '.join(map(_stable_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_stable_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


class ToolCall:
    """One call of a tool by a model."""

    def __init__(self, step: Any, kwargs: dict[str, Any], saver: Any, config: Any, call_id: str) -> None:
        self._step, self._kwargs, self._saver, self._config, self._id = step, kwargs, saver, config, call_id
        self._until = time.monotonic() + SAVED_SECONDS_MAX
        if config["configurable"].get(DURABILITY) == "exit":
            arguments = digest_of(_stable_text(sorted(kwargs.items())).encode()).hex()
            number = CALLS.number(config["configurable"], f"{step.name} {arguments}")
            self._id = f"{arguments} {number}"

    async def soon(self, function: Callable[[], Any]) -> Any:
        """Run a function that uses the store, on a thread."""
        return await self._saver.ground.soon(function)

    def is_saved(self) -> bool:
        """Return True if the checkpoint that asks for this call is durable."""
        configurable = self._config["configurable"]
        metadata = self._config.get("metadata") or {}
        namespace = graph_of(str(metadata.get("langgraph_checkpoint_ns", "")), metadata)
        id = (configurable.get("checkpoint_map") or {}).get(namespace)
        if configurable.get(DURABILITY) == "exit" or not id:
            return True
        if self._saver.ground.saved.state(str(configurable["thread_id"]), namespace, id) is not None:
            return True
        if time.monotonic() > self._until:
            raise Misuse(
                f"The checkpoint {id} that asks for {self._step.name} was not saved in {SAVED_SECONDS_MAX:.0f} s."
            )
        return False

    def ask_person(self) -> None:
        """Ask a person to approve exactly these arguments, if the tool requires that."""
        needs = getattr(self._step, "needs_approval", None)
        if needs is not None and needs((), self._kwargs):
            try:
                approve(self._step, (), self._kwargs, self._saver, self._config, self._approval())
            except Refused as refused:
                raise RefusedByPerson(str(refused)) from refused

    def _approval(self) -> str:
        """Return the name of the question. No id that a model may give looks like a step's name and a number."""
        is_ours = self._config["configurable"].get(DURABILITY) == "exit"
        return f"approval {self._id}" if is_ours or " " not in self._id else f"approval {self._id!r}"

    def perform(self) -> Any:
        """Do the call, or return its recorded outcome."""
        return recorded(self._saver, self._step, (), self._kwargs, self._config, f"call {self._id}")


class PlainCall(ToolCall):
    """A call without a record."""

    def __init__(self, step: Any, kwargs: dict[str, Any]) -> None:
        self._step, self._kwargs = step, kwargs

    async def soon(self, function: Callable[[], Any]) -> Any:
        """Run a function directly: nothing here uses a store."""
        return function()

    def is_saved(self) -> bool:
        """Return True: nothing is saved."""
        return True

    def ask_person(self) -> None:
        """Do nothing: outside of a graph no person is asked; in a workflow the tool itself asks."""

    def perform(self) -> Any:
        """Call the step: in a workflow it belongs to the run."""
        return self._step(**self._kwargs)


def _begin(step: Any, kwargs: dict[str, Any], call_id: str) -> ToolCall:
    config = var_child_runnable_config.get()
    saver: Any = config["configurable"].get(CHECKPOINTER) if config is not None and "configurable" in config else None
    if not getattr(saver, "records_steps", False):
        return PlainCall(step, kwargs)
    return ToolCall(step, kwargs, saver, config, call_id)


@everstep.step(name="shown", effect="read")
def shown(tool: str, arguments: Any) -> bool:
    """Record what a person saw."""
    return True


def approve(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saver: Any, config: Any, name: str) -> None:
    """Interrupt the graph until a person has answered `True` to exactly these arguments; any other answer refuses
    the call.
    """
    arguments = plain(step.shown(args, kwargs))
    # It is recorded, so that other arguments at this place, when the node is run again, do not count as approved.
    recorded(saver, shown, (step.name, arguments), {}, config, name)
    answer = QUESTIONS.ask(saver, config, name, {"approve": step.name, "arguments": arguments})
    if answer is not True:
        why = f": {answer}" if isinstance(answer, str) and answer else ""
        raise Refused(f"{step.name} was refused by a person{why}.")
