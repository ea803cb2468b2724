"""Calls of a model as steps: a recorded answer is not requested, and not paid for, again."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages, message_to_dict, messages_from_dict

import everstep
from everstep.adapters import CURRENT, digest_of
from everstep.testing import ledger

MADE_ANEW: Final = ("id", "response_metadata", "usage_metadata")
"""The fields of a message that do not count, because they are new each time."""


class Asking:
    """A question to a model. It is stored as a digest: the graph stores a growing conversation once."""

    def __init__(self, model: Any, messages: Sequence[Any], options: dict[str, Any]) -> None:
        self._model = model
        self._messages = convert_to_messages(messages)
        self._options = options

    def digest(self) -> str:
        """Return the digest of what is asked."""
        asked = [_that_counts(message) for message in self._messages]
        options = [(name, _plain_or_nothing(value)) for name, value in sorted(self._options.items())]
        return digest_of(msgspec.json.encode([asked, options], enc_hook=repr)).hex()

    # With an estimate of its cost, its answer is durable before anything is done with it.
    @everstep.step(name="ask_model", effect="read", cost={"tokens": 1})
    def ask(self, asked: str) -> dict[str, Any]:
        """Ask, and return the answer."""
        if url := _crash_test():
            ledger.ask(url, ledger.MODEL, everstep.key(), {})
        return _charged(self._model.invoke(self._messages, **self._options))

    @everstep.step(name="ask_model", effect="read", cost={"tokens": 1})
    async def ask_async(self, asked: str) -> dict[str, Any]:
        """Ask, and return the answer."""
        if url := _crash_test():
            await asyncio.to_thread(ledger.ask, url, ledger.MODEL, everstep.key(), {})
        return _charged(await self._model.ainvoke(self._messages, **self._options))


def _crash_test() -> str:
    """Return where a crash test counts the calls; empty outside of one."""
    return ledger.offered() if CURRENT.get() is not None else ""


def _charged(answer: BaseMessage) -> dict[str, Any]:
    """Charge what the model says that it has used, and return its answer in its stored form."""
    usage = getattr(answer, "usage_metadata", None)
    if usage and CURRENT.get() is not None:
        everstep.charge(tokens=int(usage["total_tokens"]))
    return message_to_dict(answer)


def _that_counts(message: BaseMessage) -> dict[str, Any]:
    return {name: value for name, value in message_to_dict(message)["data"].items() if name not in MADE_ANEW}


def _plain_or_nothing(value: Any) -> Any:
    """Return the value of an option, or None for an object, which another process could not compare."""
    try:
        return msgspec.Raw(msgspec.json.encode(value, order="deterministic"))
    except (TypeError, ValueError, RecursionError):
        return None


def ask_model(model: Any, messages: Sequence[Any], **options: Any) -> AIMessage:
    """Ask a model in a node, as `model.invoke(messages)` does, as a `read` step: its answer is recorded.

    model: a chat model of LangChain, or what `bind_tools` returns.
    """
    asking = Asking(model, messages, options)
    return cast(AIMessage, messages_from_dict([asking.ask(asking.digest())])[0])


async def aask_model(model: Any, messages: Sequence[Any], **options: Any) -> AIMessage:
    """The same in an `async` node."""
    asking = Asking(model, messages, options)
    return cast(AIMessage, messages_from_dict([await asking.ask_async(asking.digest())])[0])
