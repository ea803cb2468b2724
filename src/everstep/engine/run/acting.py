"""What the apps of this process have begun and may still do, even after an app is closed.

Only an attempt's own end, or the kernel, proves that it cannot act any more. This module sees its end: an app, and any
other app of the process, asks here whether the body of a step, or anything that it started, still runs.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple
from weakref import WeakValueDictionary

from everstep.effects.descent import begun_and_not_ended
from everstep.engine.run.threads import Threads
from everstep.model.untrusted import logger
from everstep.stores.processes import HOST_CHARACTERS_MAX, is_of_this_process, worker_has_ended
from everstep.stores.protocol import Store
from everstep.stores.rows.workers import GoneRow

log = logger("everstep.app")

LOOK_SECONDS: Final = 0.05
"""How often a closed app checks whether the bodies that it left behind have ended, in seconds."""

_apps: Final[WeakValueDictionary[str, "Acting"]] = WeakValueDictionary()
"""By the names of their workers. An acting body keeps its app here: it refers to its attempt, and that to the app."""


class Acting:
    """What one app has begun, and may still do."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, threads: Threads, bodies: Callable[[], Iterable[tuple[str, int]]]
    ) -> None:
        self._loop = loop
        self._threads = threads
        self._bodies = bodies
        """Gives the run and the call of each body that runs."""
        self._names: set[str] = set()

    def enter(self, worker: str) -> None:
        """Attribute what the app begins from now on to this worker."""
        self._names.add(worker)
        _apps[worker] = self

    def where(self, run: str, call: int) -> str:
        """Return what of a step still runs; "" if nothing does."""
        return next(
            (what for acting_run, acting_call, what in self._all() if (acting_run, acting_call) == (run, call)), ""
        )

    def runs(self) -> set[str]:
        """Return the runs with a step that still acts. May be called on any thread."""
        return {run for run, _, _ in self._all()}

    def left_behind(self, run: str, call: int) -> str:
        """Return what still runs of a step whose body has ended; "" if nothing does."""
        return next((what for of_run, of_call, what in self._beside() if (of_run, of_call) == (run, call)), "")

    def _all(self) -> Iterator[tuple[str, int, str]]:
        yield from self._beside()
        for run, call in self._bodies():
            yield run, call, "its body"

    def _beside(self) -> Iterator[tuple[str, int, str]]:
        """Yield what acts without being waited for as the body itself is."""
        for one in self._threads.acting():
            if one.call > 0:
                yield one.run, one.call, "its body on a thread"
        for begun_in, what in begun_and_not_ended(self._loop):
            if begun_in.worker in self._names and begun_in.call > 0:
                yield begun_in.run, begun_in.call, what

    def keep_until_ended(self, release: Callable[[], None]) -> None:
        """Call `release` when nothing that this app has begun acts any more. The app is closed, so a thread checks."""

        def wait() -> None:
            while self.runs():
                time.sleep(LOOK_SECONDS)
            release()

        try:
            threading.Thread(target=wait, name="everstep-leaving", daemon=True).start()
        except RuntimeError:  # no thread can be had: the lock is freed when the process ends
            log.warning("No thread can be started; the runs of steps that still act are free when this process ends.")


def where_in_process(worker: str, run: str, call: int) -> str | None:
    """Return what still runs of a step that a worker of this process began, "" if nothing; None for another process."""
    if not is_of_this_process(worker):
        return None
    acting = _apps.get(worker)
    return acting.where(run, call) if acting is not None else ""


def may_act(store: "Store", worker: str, run: str) -> bool:
    """Return True if a worker may still act for a run, because the opposite is not proven."""
    if not is_of_this_process(worker):
        return not has_ended(store, worker)
    acting = _apps.get(worker)
    return acting is not None and run in acting.runs()


class Whereabouts(NamedTuple):
    """What a store knows of a worker of another process."""

    state: Literal["ended", "there", "lost"]
    """Whether it provably cannot act any more or was declared gone, is registered, or is neither."""
    has_lease: bool = False
    host_gone_at: int | None = None
    """When its host was last declared gone, if ever."""


def whereabouts(store: "Store", workers: Collection[str]) -> dict[str, Whereabouts]:
    """Return where workers of other processes are."""
    others = [worker for worker in workers if not is_of_this_process(worker)]
    rows = {row.id: row for row in store.workers()} if others else {}
    hosts = store.gone("host") if others else []
    found: dict[str, Whereabouts] = {}
    for worker in others:
        said_at = max((row.at for row in hosts if is_on_host(worker, row.name)), default=None)
        if has_ended(store, worker):
            found[worker] = Whereabouts("ended")
        elif row := rows.get(worker):
            found[worker] = Whereabouts("there", row.has_lease, said_at)
        else:
            found[worker] = Whereabouts("lost", host_gone_at=said_at)
    return found


def has_ended(store: "Store", worker: str) -> bool:
    """Return True if a worker of another process provably cannot act any more, or was declared gone."""
    return worker_has_ended(worker) or store.has_ended(worker)


def process_of(worker: str) -> dict[str, Any]:
    """Return the process and the machine that a worker's id names."""
    parts = worker.rsplit("-", 3)
    return {"pid": int(parts[1]), "host": parts[0]} if len(parts) == 4 and parts[1].isdigit() else {}


def is_on_host(worker: str, host: str) -> bool:
    """Tell whether a worker's name says that it is, or was, on a host."""
    return host_of(worker) == host[:HOST_CHARACTERS_MAX]


def host_of(worker: str) -> str:
    """Return the host that a worker's name says, cut to as much as names have of it; "" if it says none."""
    return str(process_of(worker).get("host", ""))


def is_declared_gone(store: Store, worker: str, host: str, opened_at: int) -> "GoneRow | None":
    """Return the declaration that a worker, or its host since its app was opened, is gone; else None."""
    said = store.gone("worker", worker) if worker else []
    said += [row for row in store.gone("host", host) if row.at >= opened_at]
    return said[0] if said else None
