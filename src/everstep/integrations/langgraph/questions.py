"""Questions to a person, each with its own answer.

LangGraph gives answers to the calls of `interrupt()` in a node by their order. Tools that run at the same time come in
another order when the node is run again: one would get the answer to another one's question. So a call takes an answer
only if the question that a person saw, which LangGraph has saved, is exactly its own.
"""

import dataclasses
import threading
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import msgspec
from langgraph.errors import GraphInterrupt
from langgraph.types import interrupt
from pydantic import BaseModel

import everstep
from everstep.integrations.langgraph.nodes import SCRATCHPAD, TASK, graph_of, recorded, run_at

if TYPE_CHECKING:  # a real cycle: the saver lets a node's questions be asked again
    from everstep.integrations.langgraph.saver import EverstepSaver

SEND: Final = "__pregel_send"
RESUME: Final = "__resume__"
INTERRUPT: Final = "__interrupt__"


@everstep.step(name="asked", effect="read")
def asked(call: str, question: Any) -> list[Any]:
    """Record which call has asked a person what."""
    return [call, question]


@everstep.step(name="answered", effect="read")
def answered(questions: list[Any]) -> list[Any]:
    """Record what the person saw who gave an answer."""
    return questions


@everstep.step(name="claimed", effect="read")
def claimed(call: str) -> str:
    """Record which call has taken an answer, because another one may ask the same."""
    return call


class Asked:
    """The questions of one execution of a node."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shown: GraphInterrupt | None = None
        """The interrupt of this execution: one question at a time."""


class Questions:
    """The questions of the nodes that run here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executions: WeakKeyDictionary[Any, Asked] = WeakKeyDictionary()

    def ask(self, saver: "EverstepSaver", config: Any, call: str, question: Any) -> Any:
        """Return the answer to this question of a call, or interrupt the graph with it."""
        configurable = config["configurable"]
        scratchpad = configurable[SCRATCHPAD]
        with self._lock:
            execution = self._executions.setdefault(scratchpad.get_null_resume, Asked())
        with execution.lock:
            answers: list[Any] = scratchpad.resume
            if (given := scratchpad.get_null_resume(True)) is not None:
                answers.append(given)
                configurable[SEND]([(RESUME, [*answers])])  # it is kept for the call that asked
            for number, answer in enumerate(answers):
                if self._is_answer_to(saver, config, number, len(answers), call, question):
                    scratchpad.interrupt_counter()  # as `interrupt()` itself counts
                    configurable[SEND]([(RESUME, [*answers])])
                    return answer
            if execution.shown is not None:
                raise execution.shown
            while scratchpad.interrupt_counter() < len(answers) - 1:
                pass  # the answers so far belong to other calls
            of, place = _found(saver, config, asked, f"question {len(answers)}")
            if of is None:  # otherwise the graph was run again without an answer: that question stays
                of = recorded(saver, asked, (call, question), {}, config, place)
            try:
                return interrupt(of[1])
            except GraphInterrupt as shown:
                execution.shown = shown
                raise

    def _is_answer_to(
        self, saver: "EverstepSaver", config: Any, number: int, count: int, call: str, question: Any
    ) -> bool:
        """Return True if an answer is to this question of this call."""
        questions, place = _found(saver, config, answered, f"answer {number}")
        if questions is None:
            if number < count - 1:
                return False  # the answer came before this call was reached
            questions = recorded(saver, answered, (_shown(saver, config),), {}, config, place)
        if question not in questions:
            return False
        by, place = _found(saver, config, claimed, f"claim {number}")
        return bool((by or recorded(saver, claimed, (call,), {}, config, place)) == call)


def _found(saver: "EverstepSaver", config: Any, step: Any, what: str) -> tuple[Any, str]:
    """Return a recorded value, or None, and its place."""
    place = f"{what} of {config['configurable'].get(TASK, '')}"
    while (row := saver.ground.store.run(run := run_at(saver, step, config, place))) is not None:
        if row.status == "completed":
            return saver.ground.blocking.get(run).result(), place
        place += " again"  # a crash cut that one off before it had a result
    return None, place


def _shown(saver: "EverstepSaver", config: Any) -> list[Any]:
    """Return what this node last showed to a person."""
    configurable, metadata = config["configurable"], config.get("metadata") or {}
    thread, namespace = str(configurable["thread_id"]), graph_of(metadata.get("langgraph_checkpoint_ns", ""), metadata)
    state = (configurable.get("checkpoint_map") or {}).get(namespace, "")
    rows = saver.threads.writes(thread, namespace, [state])
    own = [row for row in rows if row.channel == INTERRUPT and row.call == configurable.get(TASK)]
    values = [one.value for row in own for one in saver.threads.value(thread, row, saver.serde)]
    return [
        value for value in values if isinstance(value, dict) and "approve" in value
    ]  # other values may not be storable


def plain(value: Any) -> Any:
    """Return arguments as a person sees them: lists and dicts, also for the application's classes."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return value


QUESTIONS: Final = Questions()
