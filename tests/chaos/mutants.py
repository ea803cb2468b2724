"""Bugs that are planted into the processes of a stop-and-close trial. A judge that misses them judges nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

import everstep
from everstep.engine.process.host import Host
from everstep.engine.run.doubts import Doubts
from everstep.stores.sqlite.liveness import LiveLocks
from tests.chaos import stopping


def plant(name: str) -> None:
    """Plant one into this process."""
    MUTANTS[name]()


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace something that must be there: a mutant of what is not there is none."""
    assert hasattr(owner, name), f"{owner.__name__}.{name} has another name now: give it here"
    setattr(owner, name, value)


def believe_that_all_has_ended() -> None:
    """Nothing that was begun is taken for alive, and whoever closes lets go of everything."""
    replace(Doubts, "may_still_act", lambda self, call: "")
    replace(Doubts, "_is_unseen", lambda self, call: "")
    replace(Host, "_leave", lambda self, acting: self.store.leave(self.worker))


def forget_that_it_is_once() -> None:
    """What must not happen twice is done again like anything else."""
    for step in stopping.STEPS.values():
        step.effect, step.probe = "repeat", None


def see_nobody_alive() -> None:
    """The lock of a living process is taken for a free one."""
    replace(LiveLocks, "is_held", lambda self, place: False)


def acknowledge_no_start() -> None:
    """A start is acknowledged that is not in the store."""

    async def start(self: Any, *args: Any, **options: Any) -> None: ...

    replace(everstep.App, "start", start)


def acknowledge_no_signal() -> None:
    """A signal is acknowledged that is not in the store."""

    async def signal(self: Any, *args: Any, **options: Any) -> None: ...

    replace(everstep.App, "signal", signal)


def do_nothing() -> None:
    """A step is completed that was not done."""

    async def nothing(number: int) -> str:
        return "done"

    replace(stopping.stamp, "function", nothing)


def never_close() -> None:
    """Closing does not come to an end."""

    async def close(self: Any, drain: float = 0.0) -> None:
        await asyncio.Event().wait()

    replace(everstep.App, "close", close)


def end_runs_when_closing() -> None:
    """Stopping is taken for an outcome."""
    _before_closing(lambda app, run: app.cancel(run, now=True))


def hold_runs_when_closing() -> None:
    """A run is held for which nothing is in doubt."""
    _before_closing(lambda app, run: app.hold(run))


def _before_closing(do: Callable[[Any, str], Any]) -> None:
    before = everstep.App.close

    async def close(self: Any, drain: float = 0.0) -> None:
        for run in list(self.drivers):
            await do(self, run)
        await before(self, drain)

    replace(everstep.App, "close", close)


def take_up_nothing() -> None:
    """Runs whose process is gone are left alone."""
    begin = everstep.App.__init__

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **{**options, "recover": False})

    replace(everstep.App, "__init__", __init__)


MUTANTS = {
    one.__name__: one
    for one in (
        *(believe_that_all_has_ended, forget_that_it_is_once, see_nobody_alive, acknowledge_no_start),
        *(acknowledge_no_signal, do_nothing, never_close, end_runs_when_closing, hold_runs_when_closing),
        take_up_nothing,
    )
}
