"""A worker that starts before its database: it waits until the server can be reached, and says so."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from everstep.engine.app.opening import opened_elsewhere
from everstep.errors import StoreUnreachable
from everstep.stores.protocol import Store
from everstep.worker.health import Health

FIRST_SECONDS: Final = 0.5
MOST_SECONDS: Final = 15.0
"""The longest pause between attempts to reach a server: 0.5, 1, 2 … 15 seconds."""


def waiting_health() -> Health:
    """Return the state of a worker that waits for its database: it works, and should get nothing yet."""
    return Health(True, False, {"waiting": "the database cannot be reached"})


async def open_when_there(
    open_one: Callable[[], Store], tell: Callable[[str, str], None], stop: asyncio.Event
) -> Store | None:
    """Open a store. While its server cannot be reached, say so and try again; None if `stop` is set first.

    Any other error, such as a wrong password, is raised at once: waiting does not repair it.
    """
    stopping = asyncio.ensure_future(stop.wait())
    try:
        for failures in itertools.count():
            opening = asyncio.ensure_future(opened_elsewhere(open_one))
            await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                opening.cancel()
                return None
            try:
                return opening.result()
            except StoreUnreachable as error:
                pause = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures, 20))
                tell("waiting", f"{error} It is tried again in {pause:g} s.")
            if (await asyncio.wait([stopping], timeout=pause))[0]:
                return None
    finally:
        stopping.cancel()
    raise AssertionError("unreachable")
