"""Nodes that do not redo their work: a step that is called in a node is recorded under the node's place in its thread.

LangGraph runs a node again from its top when it is resumed after an `interrupt()` or a crash. Under an `EverstepSaver`
the steps that it calls then return their recorded outcomes. The place of a call does not depend on checkpoint ids,
which are new when checkpoints were lost: it is the thread and its branch, the nodes that lead there, the number of the
superstep of each, and the number of the call of that step in the node.
"""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from langchain_core.runnables.config import run_in_executor, var_child_runnable_config
from langgraph.errors import GraphBubbleUp

from everstep.adapters import INLINE, LEFT_OUT, call_outside_with, digest_of
from everstep.integrations.langgraph.branches import Standing

if TYPE_CHECKING:  # a real cycle: the saver is handed to the nodes whose calls it records
    from everstep.integrations.langgraph.saver import EverstepSaver

CHECKPOINTER: Final = "__pregel_checkpointer"
SCRATCHPAD: Final = "__pregel_scratchpad"
RUNTIME: Final = "__pregel_runtime"
TASK: Final = "__pregel_task_id"
PUSH: Final = "__pregel_push"
OUTER_MAX: Final = 10_000
"""The maximum number of nodes that run graphs and are remembered."""


class Calls:
    """The steps that each execution of a node has called so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: WeakKeyDictionary[Any, dict[Any, Counter[str]]] = WeakKeyDictionary()

    def number(self, configurable: dict[str, Any], step: str) -> int:
        """Return the number of this call of a step in this execution of a node."""
        scratchpad = configurable[SCRATCHPAD]
        info = getattr(configurable.get(RUNTIME), "execution_info", None)
        attempt = getattr(info, "node_attempt", 1)
        with self._lock:
            # LangGraph makes this function for each execution, so it lives as long.
            counters = self._counters.setdefault(scratchpad.get_null_resume, {})
            counter = counters.setdefault(attempt, Counter())
            counter[step] += 1
            return counter[step]


class Places:
    """The places of nodes: in which superstep of which graph, and if that runs in a node, the place of that."""

    def __init__(self) -> None:
        self._outer: dict[tuple[str, str], list[Any]] = {}

    def note(self, thread: str, config: Any, standing: "Standing") -> None:
        """Record the place of a node in which a graph begins to run."""
        namespace = config["configurable"].get("checkpoint_ns", "")
        metadata = config.get("metadata") or {}
        if namespace and "langgraph_step" in metadata:
            while len(self._outer) >= OUTER_MAX:
                del self._outer[next(iter(self._outer))]
            node = str(metadata.get("langgraph_checkpoint_ns", ""))
            place = self.of(thread, node, metadata, standing)
            # A node that runs several graphs in turn has a number after its own namespace from the second one on.
            number = namespace.removeprefix(node)
            self._outer[thread, namespace] = [*place, number] if number else place

    def of(self, thread: str, namespace: str, metadata: dict[str, Any], standing: "Standing") -> list[Any]:
        """Return the place of a node, in a form that is the same when it is run again."""
        inside, own = graph_of(namespace, metadata), namespace.rpartition("|")[2]
        place = self._outer.get((thread, inside)) if inside else []
        if place is None:
            place = [inside]  # its place is unknown: the ids are those of this life of the thread
        number = metadata.get("langgraph_step")
        if number is not None and not inside:
            number -= standing.skipped
        return [*place, own.partition(":")[0], number, _plain(metadata.get("langgraph_path"))]


def graph_of(namespace: str, metadata: Any) -> str:
    """Return the namespace of the graph that a node is in, or a task that a node has called."""
    parts = namespace.split("|")[:-1]
    path: Any = metadata.get("langgraph_path") or ()
    while len(path) > 2 and path[0] == PUSH and path[-1] is True:  # a task is below its caller
        parts, path = parts[:-1], path[1]
    return "|".join(parts)


def _plain(value: Any) -> Any:
    """Return a path without the parts that are new each time."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | bool) else ""


CALLS: Final = Calls()
NOT_INSIDE: Final[dict[type[Exception], str]] = {
    GraphBubbleUp: "calls interrupt() or leaves its graph in another way: do that in the node, before or after it."
}


def call_in_node(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step: in a node under an `EverstepSaver` the call is recorded."""
    config = var_child_runnable_config.get()
    configurable: Any = config.get("configurable", {}) if config is not None else {}
    saver: EverstepSaver | None = configurable.get(CHECKPOINTER)
    if config is None or not getattr(saver, "records_steps", False) or SCRATCHPAD not in configurable:
        return step.function(*args, **kwargs)
    assert saver is not None
    needs = getattr(step, "needs_approval", None)
    if needs is not None and needs(args, kwargs):
        from everstep.integrations.langgraph.tools import approve  # a real cycle: a tool is called in a node

        number = CALLS.number(configurable, f"approval of {step.name}")
        ask = partial(approve, step, args, kwargs, saver, config, f"approval {step.name} {number}")
        if step.is_async:
            where = CALLS.number(configurable, step.name)
            return _after(saver, ask, partial(recorded, saver, step, args, kwargs, config, where))
        ask()
    return recorded(saver, step, args, kwargs, config, "")


async def _after(saver: "EverstepSaver", ask: Callable[[], None], call: Callable[[], Any]) -> Any:
    """Call an async step after a person was asked; the store is used on a thread."""
    await saver.ground.soon(ask)
    return await call()


def recorded(
    saver: "EverstepSaver", step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], config: Any, name: str | int
) -> Any:
    """Call a step at its place in a thread. A name given for the call is its place in the node."""
    configurable, metadata = config["configurable"], config.get("metadata") or {}
    run = run_at(saver, step, config, name or CALLS.number(configurable, step.name))
    # The retention task reads from the first tag whether the run may still be asked for.
    tags = {"thread": str(configurable["thread_id"]), "node": str(metadata.get("langgraph_node", ""))}
    call = str(configurable.get(TASK, ""))
    return saver.ground.steps.call(step, args, kwargs, run, call, tags, NOT_INSIDE)


def run_at(saver: "EverstepSaver", step: Any, config: Any, where: str | int) -> str:
    """Return the id of the run for a call of a step."""
    configurable, metadata = config["configurable"], config.get("metadata") or {}
    thread = str(configurable["thread_id"])
    namespace = str(metadata.get("langgraph_checkpoint_ns", ""))
    standing = saver.branches.of_call(thread)
    begun = [saver.ground.born(thread), standing.branch]
    place = [thread, begun, saver.places.of(thread, namespace, metadata, standing), step.name, where]
    node, last = str(metadata.get("langgraph_node", "")), step.name.rpartition(".")[2]
    return f"{_word(thread)}/{_word(node)}/{_word(last)}/{digest_of(repr(place).encode()).hex()[:20]}"


def _word(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text)[:40].strip("-") or "x"


call_outside_with(call_in_node)
LEFT_OUT.add("child_runnable_config")  # callbacks of a graph belong to the workflow, and a step runs beside it
INLINE.add(run_in_executor.__module__)  # for conditions of edges and `def` nodes of a graph in a workflow
