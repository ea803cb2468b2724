"""Strands' conversation manager that summarizes, in a run: the summary is a step, and the rest is as in Strands."""

from copy import deepcopy
from typing import Any

import pytest
from strands import Agent
from strands.agent.conversation_manager import SummarizingConversationManager

import everstep
from everstep.integrations.strands import ScriptedModel, durable
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine
from tests.integrations.strands_shop import DONE, Overflowing, agent, look_up

LOOKS = [("look_up", {"topic": "tides"}), ("look_up", {"topic": "ships"})]


class Summarizing(Overflowing):
    """A model whose window is full at its second call, and that can summarize."""

    def __init__(self, *answers: Any, summary: str = "what was said so far") -> None:
        super().__init__(*answers)
        self.summary = ScriptedModel(summary)

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        asked = messages[-1]["content"][-1].get("text") == "Please summarize this conversation."
        source = self.summary.stream([], *args) if asked else super().stream(messages, *args, **kwargs)
        async for chunk in source:
            yield chunk


class Small(Summarizing):
    """A model with a small window, that never says that it is full."""

    context_window_limit = 60
    calls = 5


def manager(**options: Any) -> SummarizingConversationManager:
    return SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=1, **options)


def reactive() -> Agent:
    return agent(model=Summarizing(LOOKS, LOOKS, "done"), conversation_manager=manager())


TALKED = [
    {"role": role, "content": [{"text": f"{role} says something long, number {number}, about the tides"}]}
    for number in range(4)
    for role in ("user", "assistant")
]


def proactive() -> Agent:
    chosen = manager(proactive_compression={"compression_threshold": 0.5})
    return agent(
        model=Small(LOOKS, "done", "done", "done", "done"), conversation_manager=chosen, messages=deepcopy(TALKED)
    )


def by_another_model() -> Agent:
    return agent(
        model=Overflowing(LOOKS, "done"), aux_model=ScriptedModel("the other's words"), conversation_manager=manager()
    )


def by_another_agent() -> Agent:
    summarizer = Agent(
        name="summarizer",
        model=ScriptedModel("first words", "its own words"),
        tools=[look_up],
        callback_handler=None,
    )
    return agent(model=Overflowing(LOOKS, "done"), conversation_manager=manager(summarization_agent=summarizer))


def with_a_first_message_that_stays() -> Agent:
    model = Summarizing(LOOKS, LOOKS, "done")
    return agent(model=model, conversation_manager=manager(pin_first=1), messages=deepcopy(TALKED))


def that_cannot_summarize() -> Agent:
    return agent(model=Summarizing(LOOKS, "done", summary=""), conversation_manager=manager())


def with_too_little_to_summarize() -> Agent:
    chosen = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=50)
    return agent(model=Summarizing(LOOKS, "done"), conversation_manager=chosen)


class Told:
    """What the workflow is told, set by the test."""

    subject: Any = None


async def talk(called: Any) -> Any:
    try:
        said = [str(await called.invoke_async("first")).strip(), str(await called.invoke_async("second")).strip()]
    except Exception as error:  # noqa: BLE001  # compared with what plain Strands raises
        said = [str(error)]
    spoken = [[one["role"], one["content"]] for one in called.messages]
    state = called.conversation_manager.get_state()
    return [said, spoken, state["removed_message_count"], (state["summary_message"] or {}).get("content")]


@everstep.workflow
async def talked() -> Any:
    return await talk(durable(Told.subject))


PROGRAMS = [
    reactive,
    proactive,
    by_another_model,
    by_another_agent,
    with_a_first_message_that_stays,
    that_cannot_summarize,
    with_too_little_to_summarize,
]


@pytest.mark.parametrize("build", PROGRAMS)
async def test_a_conversation_is_summarized_as_in_plain_strands(machine: Machine, build: Any) -> None:
    DONE.clear()
    plain, done = await talk(build()), list(DONE)
    DONE.clear()
    Told.subject = build()
    app = await machine.boot()
    assert await app.run(talked, id="r") == plain
    assert done == DONE
    summaries = [one.step for one in machine.events("r") if one.kind == "step_started" and "summary" in one.step]
    assert (summaries == []) is (build is with_too_little_to_summarize)
    calls = Told.subject.model.calls
    assert machine.replay("r").differences == []
    assert check(export_histories(machine.store)) == []
    assert Told.subject.model.calls == calls, "a replay asks no model"


async def test_what_a_summary_costs_is_charged(machine: Machine) -> None:
    Told.subject = reactive()
    app = await machine.boot()
    await app.run(talked, id="r")
    ended = {one.seq: one for one in machine.events("r") if one.kind == "step_completed"}
    charged = {
        one.step: body.charged for one, body in zip(ended.values(), machine.bodies("r", "step_completed"), strict=True)
    }
    assert charged["model.summary"] is not None
    assert charged["model.summary"].tokens == 15
