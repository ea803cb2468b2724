"""Stopping in good order: what runs gets a little time, and what must not be cut off gets more."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from everstep.engine.driver import Driver

ONCE_SECONDS: Final = 10.0
"""How long closing waits at least for a body whose effect nobody could tell afterwards."""


async def wait_for_bodies(drivers: "Mapping[str, Driver]", seconds: float, *, can_save: Callable[[], bool]) -> None:
    """Let running bodies end. Threads cannot be stopped, so they get a little time in any case.

    What must not happen twice and is about to begin is waited for as well, unless nothing can become durable any more.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        passed = loop.time() - began
        attempts = [driver.attempts for driver in drivers.values()]
        begun = attempts if can_save() else [one.bodies for one in attempts]
        must_wait = any(one.must_not_be_cut_off() for one in begun) and passed < max(seconds, ONCE_SECONDS)
        if not must_wait and not (any(one.bodies.running for one in attempts) and passed < seconds):
            return
        await asyncio.sleep(0.02)
