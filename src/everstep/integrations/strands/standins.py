"""What Strands gets from the machine: inside a workflow it gets the run's own clock, ids and threads instead.

Its modules call `time.time()`, `uuid.uuid4()`, `asyncio.to_thread()` and, in graphs, poll ten times a second. In a
replay all that would differ. Each of these modules gets a stand-in that uses the run when it is called in a workflow,
and the real module everywhere else.
"""

import asyncio
import functools
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, Final

import everstep

STEP: Final[Any] = type(everstep.step(lambda: None, name="nothing"))
"""The class of steps."""
POLL_SECONDS: Final = 0.1
"""How often a graph checks whether its nodes are done, in seconds. They also report it themselves."""

CANCEL_POLL_SECONDS: Final = 0.05
"""How often a called agent checks whether its caller was cancelled, in seconds."""


def in_workflow() -> bool:
    """Return True if workflow code is running here, and not the body of a step."""
    try:
        return not everstep.current().step
    except everstep.errors.Misuse:
        return False


class _StandIn(ModuleType):
    """A module in which some functions are replaced."""

    def __init__(self, real: ModuleType, **others: Any) -> None:
        super().__init__(real.__name__)
        self._real = real
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _time() -> float:
    return everstep.now().timestamp() if in_workflow() else time.time()


def _monotonic() -> float:
    return everstep.now().timestamp() if in_workflow() else time.monotonic()


def _uuid4() -> uuid.UUID:
    return everstep.uuid() if in_workflow() else uuid.uuid4()


async def _to_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a `def` step durably. Any other function that comes here in a workflow is Strands' own, and only changes
    memory.
    """
    if not in_workflow():
        return await asyncio.to_thread(function, *args, **kwargs)
    if isinstance(function, STEP):
        if function.is_async:
            return await function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


async def _wait_for(awaitable: Awaitable[Any], timeout: float | None) -> Any:  # as asyncio has it
    if timeout == POLL_SECONDS and in_workflow():
        return await awaitable
    return await asyncio.wait_for(awaitable, timeout)


async def _sleep(seconds: float, result: Any = None) -> Any:  # as asyncio has it
    """Skip the poll for a cancel: a called agent checks whenever it continues anyway."""
    if seconds == CANCEL_POLL_SECONDS and in_workflow() and everstep.patched("strands.cancels-are-not-polled"):
        await asyncio.get_running_loop().create_future()
    return await asyncio.sleep(seconds, result)


_PLACES: Final = {
    "time": (
        "strands.event_loop.streaming",
        "strands.multiagent.graph",
        "strands.multiagent.swarm",
        "strands.telemetry.metrics",
        "strands.tools.executors._executor",
    ),
    "uuid": ("strands.event_loop.event_loop", "strands.telemetry.metrics", "strands.types.content"),
    "asyncio": ("strands.agent.agent", "strands.multiagent.graph", "strands.tools.decorator"),
}


@functools.cache
def install() -> None:
    """Install the stand-ins, once in a process."""
    stand_ins = {
        "time": _StandIn(time, time=_time, monotonic=_monotonic),
        "uuid": _StandIn(uuid, uuid4=_uuid4),
        "asyncio": _StandIn(asyncio, sleep=_sleep, to_thread=_to_thread, wait_for=_wait_for),
    }
    for name, places in _PLACES.items():
        for place in places:
            module = sys.modules.get(place)
            if module is not None and hasattr(module, name):
                setattr(module, name, stand_ins[name])
    _let_states_begin_at_the_runs_time()


def _let_states_begin_at_the_runs_time() -> None:
    """Replace the default start time of a swarm's state, which was bound to `time.time` before the stand-in existed."""
    from strands.multiagent.swarm import SwarmState

    begin = SwarmState.__init__

    @functools.wraps(begin)
    def __init__(self: SwarmState, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it takes that place
        if in_workflow():
            kwargs.setdefault("start_time", _time())
        begin(self, *args, **kwargs)

    SwarmState.__init__ = __init__  # type: ignore[method-assign]
