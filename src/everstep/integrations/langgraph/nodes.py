"""Nodes that do not redo their work: a step that is called in a node is recorded under the node's place in its thread.

LangGraph runs a node again from its top when it is resumed after an `interrupt()` or a crash. Under an `EverstepSaver`
the steps that it calls then return what they came to. The place of a call does not depend on checkpoint ids, which are
made anew when checkpoints were lost: it is the thread and its branch, the nodes that lead there, the number of the
superstep of each, and which call of that step it is in the node.
"""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from langchain_core.runnables.config import run_in_executor, var_child_runnable_config
from langgraph.errors import GraphBubbleUp

from everstep.adapters import INLINE, call_outside_with, digest_of
from everstep.integrations.langgraph.branches import Standing

if TYPE_CHECKING:  # a real cycle: the saver is handed to the nodes whose calls it records
    from everstep.integrations.langgraph.saver import EverstepSaver

CHECKPOINTER: Final = "__pregel_checkpointer"
SCRATCHPAD: Final = "__pregel_scratchpad"
RUNTIME: Final = "__pregel_runtime"
TASK: Final = "__pregel_task_id"
PUSH: Final = "__pregel_push"
OUTER_MAX: Final = 10_000
"""So many nodes that run graphs are remembered."""


class Calls:
    """Which steps each execution of a node has called so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: WeakKeyDictionary[Any, dict[Any, Counter[str]]] = WeakKeyDictionary()

    def number(self, configurable: dict[str, Any], step: str) -> int:
        """Return which call of a step in this execution of a node this one is."""
        scratchpad = configurable[SCRATCHPAD]
        info = getattr(configurable.get(RUNTIME), "execution_info", None)
        attempt = getattr(info, "node_attempt", 1)
        with self._lock:
            # A function that LangGraph makes for each execution: it lives as long.
            counters = self._counters.setdefault(scratchpad.get_null_resume, {})
            counter = counters.setdefault(attempt, Counter())
            counter[step] += 1
            return counter[step]


class Places:
    """Where nodes are: in which superstep of which graph, and if that runs in a node, where that is."""

    def __init__(self) -> None:
        self._outer: dict[tuple[str, str], list[Any]] = {}

    def note(self, thread: str, config: Any, standing: "Standing") -> None:
        """A graph begins to run in a node: remember where the node is."""
        namespace = config["configurable"].get("checkpoint_ns", "")
        metadata = config.get("metadata") or {}
        if namespace and "langgraph_step" in metadata:
            while len(self._outer) >= OUTER_MAX:
                del self._outer[next(iter(self._outer))]
            node = str(metadata.get("langgraph_checkpoint_ns", ""))
            place = self.of(thread, node, metadata, standing)
            # A node that runs graphs one after the other has a number behind its own namespace from the second one on.
            number = namespace.removeprefix(node)
            self._outer[thread, namespace] = [*place, number] if number else place

    def of(self, thread: str, namespace: str, metadata: dict[str, Any], standing: "Standing") -> list[Any]:
        """Return where a node is, in a form that is the same when it is run again."""
        inside, own = graph_of(namespace, metadata), namespace.rpartition("|")[2]
        place = self._outer.get((thread, inside)) if inside else []
        if place is None:
            place = [inside]  # nobody has told where that is: its ids are those of this life of the thread
        number = metadata.get("langgraph_step")
        if number is not None and not inside:
            number -= standing.skipped
        return [*place, own.partition(":")[0], number, _plain(metadata.get("langgraph_path"))]


def graph_of(namespace: str, metadata: Any) -> str:
    """Return the namespace of the graph that a node is in, or a task that a node has called."""
    parts = namespace.split("|")[:-1]
    path: Any = metadata.get("langgraph_path") or ()
    while len(path) > 2 and path[0] == PUSH and path[-1] is True:  # a task: it is below whoever called it
        parts, path = parts[:-1], path[1]
    return "|".join(parts)


def _plain(value: Any) -> Any:
    """Return a path without what is made anew each time."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | bool) else ""


CALLS: Final = Calls()
NOT_INSIDE: Final[dict[type[Exception], str]] = {
    GraphBubbleUp: "calls interrupt() or leaves its graph in another way: do that in the node, before or after it."
}


def call_in_node(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what a call of a step means here: in a node under an `EverstepSaver` it is recorded."""
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
    """Call a step at its place in a thread; with a name of its own for the call, that is its place in the node."""
    configurable, metadata = config["configurable"], config.get("metadata") or {}
    run = run_at(saver, step, config, name or CALLS.number(configurable, step.name))
    # By the first the collector sees whether it may still be asked for.
    tags = {"thread": str(configurable["thread_id"]), "node": str(metadata.get("langgraph_node", ""))}
    call = str(configurable.get(TASK, ""))
    return saver.ground.steps.call(step, args, kwargs, run, call, tags, NOT_INSIDE)


def run_at(saver: "EverstepSaver", step: Any, config: Any, where: str | int) -> str:
    """Return the id of the run that a call of a step is."""
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
INLINE.add(run_in_executor.__module__)  # conditions of edges and `def` nodes, when a graph runs in a workflow
