"""The state of an agent, written by tools that run at the same time.

Tools see each other's writes at once, as in Strands. Workflow code sees what a tool wrote when the tool's outcome is
recorded, because in a replay nothing else is visible. Each write has a number, so that of two tools that wrote the same
name the later write is kept, whichever tool ends first.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from strands.agent.state import AgentState

from everstep.integrations.strands.standins import in_workflow

Writes = dict[str, list[Any]]
"""By name: the number of the write, and the value; a deleted name has no value."""

_WRITES: "ContextVar[Writes | None]" = ContextVar("everstep_strands_writes", default=None)
"""What the tool whose body runs here has written so far."""


class SharedState(AgentState):
    """The state of a run's agent: the view of workflow code, and the view of tools' bodies."""

    def __init__(self, initial_state: dict[str, Any] | None = None) -> None:
        self._settled: Writes = {}
        self._live: Writes = {}
        self._by_unknown_threads: Writes = {}
        super().__init__(initial_state)

    @property
    def _data(self) -> dict[str, Any]:
        """The view of the caller: `AgentState` reads it."""
        seen = self._settled if in_workflow() else self._live
        return {name: write[1] for name, write in seen.items() if len(write) == 2}

    @_data.setter
    def _data(self, values: dict[str, Any]) -> None:
        self._settled = {name: [0, value] for name, value in values.items()}
        self._live = dict(self._settled)

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._validate_key(key)
        self._validate_json_serializable(value)
        self._write(key, [copy.deepcopy(value)])

    def delete(self, key: str) -> None:
        """Delete a name."""
        self._validate_key(key)
        self._write(key, [])

    def _write(self, name: str, value: list[Any]) -> None:
        with self._lock:
            self._version += 1
            if in_workflow():
                self.settle({name: [1 + _newest(self._settled), *value]})
                return
            written = _WRITES.get()
            write = [1 + max(_newest(self._settled), _newest(self._live)), *value]
            self._live[name] = write
            (self._by_unknown_threads if written is None else written)[name] = write

    def settle(self, writes: Writes) -> None:
        """Show workflow code what a tool wrote, and in a replay show it to tools as well."""
        with self._lock:
            for name, write in writes.items():
                for seen in (self._settled, self._live):
                    if name not in seen or seen[name][0] < write[0]:
                        seen[name] = write

    def replace(self, values: dict[str, Any]) -> None:
        """Replace the whole state."""
        number = 1 + _newest(self._settled)
        gone: Writes = {name: [number] for name in self._settled if name not in values}
        self.settle(gone | {name: [number, value] for name, value in values.items()})

    def drop(self, writes: Writes) -> None:
        """Discard the writes of a tool whose outcome is no result: a replay does not see them either."""
        with self._lock:
            for name, write in writes.items():
                if self._live.get(name) is write:
                    self._live[name] = self._settled.get(name, [0])

    def written_by_unknown_threads(self) -> Writes:
        """Return what threads without a tool's context have written since the last call."""
        with self._lock:
            taken, self._by_unknown_threads = self._by_unknown_threads, {}
        return taken


def _newest(writes: Writes) -> int:
    return max((write[0] for write in writes.values()), default=0)


def shared_state(agent: Any) -> SharedState:
    """Return an agent's shared state. Strands sometimes gives an agent a new state, which is made shared first."""
    if not isinstance(agent.state, SharedState):
        agent.state = SharedState(agent.state.get())
    state: SharedState = agent.state
    return state


@contextmanager
def noted(agent: Any, writes: Writes) -> Iterator[None]:
    """Record the writes of a tool's body. Writes of a thread without the body's context end up with the next body."""
    state = shared_state(agent)
    token = _WRITES.set(writes)
    try:
        yield
        if agent.state is not state:  # the tool gave its agent another state: the differences count as writes
            given, agent.state = agent.state.get(), state
            for name in set(state.get()) - set(given):
                state.delete(name)
            for name, value in given.items():
                state.set(name, value)
    finally:
        _WRITES.reset(token)
    writes |= state.written_by_unknown_threads()
