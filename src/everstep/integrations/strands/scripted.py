"""A model without a network: it answers from a script. For tests, examples and crash tests."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from strands.models.model import Model

Answer = str | list[tuple[str, dict[str, Any]]]
"""A text; or calls of tools, each a name and its arguments."""


class ScriptedModel(Model):
    """Answers by the number of its answers in the conversation so far; after the script's end, with its last answer.

    seconds: how long each answer takes.
    """

    def __init__(self, *answers: Answer, seconds: float = 0.0) -> None:
        self.answers = answers
        self.seconds = seconds
        self.calls = 0
        """How often it was called in this process."""

    def update_config(self, **model_config: Any) -> None:
        """It has no settings."""

    def get_config(self) -> dict[str, Any]:
        """Return its settings: none."""
        return {}

    def structured_output(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """It has no structured output."""
        raise NotImplementedError("A ScriptedModel has no structured output.")

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Give the chunks of the next answer. Equal conversations get equal ids of tool calls."""
        self.calls += 1
        await asyncio.sleep(self.seconds)
        turn = sum(1 for one in messages if one["role"] == "assistant")
        answer = self.answers[min(turn, len(self.answers) - 1)]
        yield {"messageStart": {"role": "assistant"}}
        for number, block in enumerate([answer] if isinstance(answer, str) else answer):
            if isinstance(block, str):
                yield {"contentBlockStart": {"start": {}}}
                yield {"contentBlockDelta": {"delta": {"text": block}}}
            else:
                use = {"name": block[0], "toolUseId": f"call-{turn}-{number}"}
                yield {"contentBlockStart": {"start": {"toolUse": use}}}
                yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(block[1])}}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(answer, str) else "tool_use"}}
        usage = {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}
