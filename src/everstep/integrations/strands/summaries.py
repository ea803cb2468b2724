"""A conversation manager that summarizes: the summary is a step.

Strands asks for a summary in the middle of a plain call, where a run cannot wait. So the summary is made just before
that: the manager's own code says which messages it would summarize, a step summarizes them, and when Strands asks, the
answer is there.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator
from typing import Any

from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import HookRegistry
from strands.hooks.events import BeforeModelCallEvent
from strands.middleware.stages import InvokeModelContext
from strands.types.exceptions import ContextWindowOverflowException

import everstep
from everstep.errors import Misuse
from everstep.integrations.strands.calls import MODEL_CONTRACT, storable


class _Wanted(BaseException):
    """Carries the messages that would be summarized. It passes every `except Exception` on its way."""

    def __init__(self, messages: list[Any]) -> None:
        super().__init__()
        self.messages = messages


class Summaries:
    """Makes the summaries of one agent of a run for the run's own manager."""

    def __init__(
        self, manager: SummarizingConversationManager, summarizer: Any, name: str, options: dict[str, Any]
    ) -> None:
        """Take the run's own manager, and the run's own copy of the agent that it has for summaries, if any."""
        self._own = manager
        self._plain = copy.copy(manager)  # it summarizes as Strands does, in the step's body
        self._plain.summarization_agent = summarizer
        self._ready: Any = None
        self._step = everstep.step(self._summarize, name=name, **{**MODEL_CONTRACT, **options})
        manager._generate_summary = self._take  # type: ignore[method-assign]

    def hook_into(self, hooks: HookRegistry) -> None:
        """Replace the manager's own callback, which could not wait."""
        for entry in hooks._registered_callbacks.get(BeforeModelCallEvent, []):
            if entry.callback == self._own._on_before_model_call_threshold:
                entry.callback = self.before_model_call

    async def call_model(self, context: InvokeModelContext, go_on: Any) -> AsyncGenerator[Any, None]:
        """Middleware: a model whose window is full is asked again, after the manager has reduced the conversation."""
        try:
            async for event in go_on(context):
                yield event
        except ContextWindowOverflowException:
            await self.prepare(context.agent)
            raise

    async def prepare(self, agent: Any) -> None:
        """Make a summary, if the manager would ask for one now."""
        messages = self._wanted(agent)
        if messages is None:
            return
        try:
            self._ready = await self._step(storable(messages), (messages, agent))
        except everstep.Error:
            raise
        except Exception as error:  # noqa: BLE001  # Strands decides what a failed summary means
            self._ready = error

    async def before_model_call(self, event: BeforeModelCallEvent) -> None:
        """Compress ahead, if the manager does so, as Strands would do here."""
        threshold, tokens = self._own._compression_threshold, event.projected_input_tokens
        if threshold is not None and tokens is not None and self._is_used(event.agent.model, tokens, threshold):
            await self.prepare(event.agent)
        self._own._on_before_model_call_threshold(event)

    def _is_used(self, model: Any, tokens: int, threshold: float) -> bool:
        """Return True if a model's window is used up to a threshold. Checked only if it matters, because Strands
        may warn.
        """
        return bool(model.estimate_utilization(tokens) >= threshold)

    def _wanted(self, agent: Any) -> list[Any] | None:
        """Return the messages that the manager would summarize now."""

        def found(messages: list[Any], _: Any) -> Any:
            raise _Wanted(messages)

        probe, looked_at = copy.copy(self._plain), copy.copy(agent)
        probe.__dict__.update(self._own.__dict__, _generate_summary=found)
        looked_at.messages = copy.deepcopy(agent.messages)
        try:
            probe.reduce_context(looked_at)
        except _Wanted as wanted:
            return wanted.messages
        except Exception:  # noqa: BLE001  # it has nothing to summarize: asked in earnest, it says so again
            return None
        return None

    async def _summarize(self, messages: list[Any], call: everstep.Live[Any]) -> Any:
        wanted, agent = call
        return storable(await asyncio.to_thread(self._plain._generate_summary, wanted, agent))

    def _take(self, messages: list[Any], agent: Any) -> Any:
        ready, self._ready = self._ready, None
        if isinstance(ready, Exception):
            raise ready
        if ready is None:
            raise Misuse("A summary was asked for outside of a model call: in a run it is made when a call needs it.")
        return ready
