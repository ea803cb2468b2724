"""`durable(…)`: in a workflow an agent whose calls are steps of the run, and outside of one a run for each call."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

from strands.agent import Agent
from strands.agent.agent_result import AgentResult
from strands.multiagent.base import MultiAgentResult
from strands.types.exceptions import EventLoopException

import everstep
from everstep.adapters import Generators
from everstep.errors import Misuse
from everstep.integrations.strands import standins
from everstep.integrations.strands.calls import Price, storable
from everstep.integrations.strands.copies import Options, own_copy

OF_STRANDS = ("strands.", "everstep.integrations.strands.")
"""The modules whose generators belong to a call. Those of hooks and tools belong to the application."""

_DECLARED: "WeakValueDictionary[str, Durable]" = WeakValueDictionary()
"""The objects that `durable(…, id=…)` has made in this process, by id, where a run finds its agent."""


class Durable:
    """An agent, a graph or a swarm whose calls are durable. Everything else is as it is in Strands."""

    def __init__(self, subject: Any, options: Options, id: str | None, url: str | None) -> None:
        self._subject = subject
        self._options = options
        self._id = id
        self._url = url
        self._turn = 0
        self._before: dict[str, Any] | None = None
        self._own: Any = None
        self._stream: _Stream | None = None
        self._is_of_a_run = standins.in_workflow()
        if id is not None:
            _DECLARED[id] = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside() if standins.in_workflow() else self._subject, name)

    def _inside(self) -> Any:
        if not self._is_of_a_run:
            raise Misuse("Call durable(…) in the workflow itself, for each run has its own copy of the conversation.")
        if self._own is None:
            self._own = own_copy(self._subject, self._options)
        return self._own

    # -- in a workflow -----------------------------------------------------------------------------------------------
    async def invoke_async(self, prompt: Any = None, **options: Any) -> Any:
        """Do what it does in Strands, in the run of the workflow that calls it.

        Interrupts become approvals: the run waits for a person, and continues with the answer.
        """
        if not standins.in_workflow():
            if self._id is None:
                raise _outside()
            return await self._turn_async(prompt, options)
        own = self._inside()
        result = await self._call(own, prompt, options)
        while interrupts := list(getattr(result, "interrupts", None) or ()):
            answers = await asyncio.gather(*(_asked(one) for one in interrupts))
            given = [
                {"interruptResponse": {"interruptId": one.id, "response": answer}}
                for one, answer in zip(interrupts, answers, strict=True)
            ]
            result = await self._call(own, given, options)
        return result

    async def _call(self, own: Any, prompt: Any, options: dict[str, Any]) -> Any:
        """Make one call, and close everything that it opened: an agent that is left open keeps its lock."""
        await self._close_stream()
        with Generators() as begun:
            try:
                return await _unwrapped(own.invoke_async(prompt, **options))
            finally:
                await begun.close(OF_STRANDS)

    def stream_async(self, prompt: Any = None, **options: Any) -> AsyncIterator[Any]:
        """Give the events of one call, from the record. An interrupt is the last event's, as in Strands.

        An abandoned stream is closed when the agent is called again.
        """
        if not standins.in_workflow():
            raise _outside()
        return _Stream(self, prompt, options)

    async def _close_stream(self) -> None:
        if self._stream is not None and not self._stream.is_running:
            left, self._stream = self._stream, None
            await left.aclose()

    # -- outside of one ----------------------------------------------------------------------------------------------
    def __call__(self, prompt: Any = None, **options: Any) -> Any:
        """Make one call as a separate run, and wait. Run the script again after a crash, and it continues."""
        if standins.in_workflow():
            raise Misuse("In a workflow, write `await durable(agent).invoke_async(prompt)`.")
        arguments = self._next(prompt, options)
        with everstep.open(self._url) as app:
            done = app.run(strands_turn, *arguments, id=f"{self._id}.{self._turn}")
        return self._took(done)

    async def _turn_async(self, prompt: Any, options: dict[str, Any]) -> Any:
        arguments = self._next(prompt, options)
        async with everstep.open(self._url) as app:
            done = await app.run(strands_turn, *arguments, id=f"{self._id}.{self._turn}")
        return self._took(done)

    def _next(self, prompt: Any, options: dict[str, Any]) -> tuple[str, Any, dict[str, Any] | None]:
        if self._id is None:
            raise _outside()
        if options:
            raise Misuse(f"Outside a workflow durable() takes the prompt alone, not {', '.join(options)}.")
        self._turn += 1
        return _name(self._subject), storable(prompt), self._before

    def _took(self, done: dict[str, Any]) -> Any:
        self._before = done["after"]
        result = done["result"]
        if result.get("type") != "agent_result":
            return MultiAgentResult.from_dict(result)
        if isinstance(self._subject, Agent) and self._before is not None:
            self._subject.messages[:] = self._before["messages"]
            for name, value in self._before["state"].items():
                self._subject.state.set(name, value)
        return AgentResult.from_dict(result)


class _Stream:
    """The events of one call. It is not a generator, because no replay could tell when the garbage collector closes
    one.
    """

    def __init__(self, durable: Durable, prompt: Any, options: dict[str, Any]) -> None:
        self._durable = durable
        self._call = (prompt, options)
        self._events: Any = None
        self._begun = Generators()
        self._is_closed = False
        self.is_running = False

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> Any:
        if self._is_closed:
            raise Misuse("This stream was left: its agent has been called again since. Read a stream to its end first.")
        if self._events is None:
            await self._durable._close_stream()
            prompt, options = self._call
            self._events = self._durable._inside().stream_async(prompt, **options)
            if self._durable._stream is None:  # otherwise another stream is being read: Strands refuses this one
                self._durable._stream = self
        self.is_running = True
        try:
            with self._begun:
                return await anext(self._events)
        except BaseException:
            await self._begun.close(OF_STRANDS)
            raise
        finally:
            self.is_running = False

    async def aclose(self) -> None:
        """Abandon the stream: what it has begun is closed."""
        self._is_closed = True
        with self._begun:
            await self._begun.close(OF_STRANDS)


@everstep.workflow(name="strands_turn")
async def strands_turn(name: str, prompt: Any, before: dict[str, Any] | None) -> dict[str, Any]:
    """One call of a declared agent, graph or swarm, as a separate run."""
    declared = _declared(everstep.current().run, name)
    called = Durable(declared._subject, declared._options, None, None)
    own = called._inside()
    if before is not None and isinstance(own, Agent):
        own.messages[:] = before["messages"]
        for key, value in before["state"].items():
            own.state.set(key, value)
    result = await called.invoke_async(prompt)
    after = None
    if isinstance(own, Agent):
        after = {"messages": storable(own.messages), "state": storable(own.state.get())}
    return {"result": storable(result.to_dict()), "after": after}


def _declared(run: str, name: str) -> Durable:
    """Return the agent of a run. Many agents have no name, so it is found by the run's id."""
    found = _DECLARED.get(run.rpartition(".")[0])
    if found is not None and _name(found._subject) == name:
        return found
    others = {id(one._subject): one for one in [*_DECLARED.values()] if _name(one._subject) == name}
    if len(others) != 1:
        which = f"There is no agent {name!r}" if not others else f"Several agents are called {name!r}"
        raise Misuse(f"{which} in this process: durable(agent, id=…) declares one, and an agent can have a name.")
    return others.popitem()[1]


async def _unwrapped(call: Any) -> Any:
    """Unwrap errors of the engine: Strands wraps what is raised in its loop."""
    try:
        return await call
    except EventLoopException as error:
        if isinstance(error.original_exception, everstep.Error):
            raise error.original_exception from None
        raise


async def _asked(interrupt: Any) -> Any:
    return await everstep.approval(str(interrupt.name), storable(interrupt.reason))


def _name(subject: Any) -> str:
    name = getattr(subject, "name", None) or getattr(subject, "id", None) or type(subject).__name__
    return str(name)


def _outside() -> Misuse:
    return Misuse(
        'durable() was called outside a workflow. Give it an id there: `durable(agent, id="report-17")(prompt)` makes '
        "a run around the call; or call it in an @everstep.workflow."
    )


def durable(
    subject: Any,
    *,
    id: str | None = None,
    url: str | None = None,
    contracts: dict[str, dict[str, Any]] | None = None,
    price: Price | None = None,
    stream: str | None = None,
    model: dict[str, Any] | None = None,
) -> Durable:
    """Make the calls of an agent, a graph or a swarm of Strands durable: each model call and each tool call is a step.

        @everstep.workflow
        async def report(topic: str) -> str:
            return str(await durable(agent).invoke_async(f"Write about {topic}"))

    In a workflow the calls are steps of its run. Outside of one, with an `id`, each call is a run of its own, and
    a script that is run again after a crash continues: `durable(agent, id="report-17")("Write about tides")`.

    A tool that is an `@everstep.tool` or `@everstep.step` under Strands' `@tool` has its own contract; others are
    `repeat`, unless `contracts` says otherwise.

    contracts: options of `@step` by the names of tools, such as `{"send_mail": {"effect": "once"}}`.
    price: what a usage costs in dollars: a function of Strands' usage. Tokens are charged anyway.
    stream: the name of a stream that tokens are appended to as they arrive.
    model: options of `@step` for model calls, such as `{"timeout": 60, "limit": "llm"}`.
    """
    standins.install()
    options = Options(contracts or {}, price, stream, model or {})
    return Durable(subject, options, id, url)
