"""Several worker processes under a supervisor: it restarts them when they die, and passes signals on.

Each child is a worker of its own, with its own lease. The supervisor holds the other end of a pipe for each: if it is
killed, the children notice and stop in good order.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from everstep.stores.protocol import WorkerRow
from everstep.worker.health import Health

SUPERVISED: Final = "EVERSTEP_SUPERVISED"
"""Set for a child: its number, and the pipe that ends when its supervisor is gone."""
FIRST_PAUSE_SECONDS: Final = 0.5
PAUSE_SECONDS_MAX: Final = 30.0
LONG_LIFE_SECONDS: Final = 60.0
"""A child that lived for at least this many seconds is restarted without a longer pause."""
LOOK_SECONDS: Final = 0.05
GIVEN_UP: Final = 2
"""The exit status of a child that cannot work at all, because it was called wrongly or its files cannot be imported."""


class Child(msgspec.Struct):
    """A place for a worker process, and its current process."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    pipe: int = -1
    began: float = 0.0
    pause: float = FIRST_PAUSE_SECONDS
    again_at: float = 0.0
    restarts: int = 0


class Supervisor:
    """Keeps a number of processes running until it is told to stop."""

    def __init__(self, words: Sequence[str], count: int, tell: Callable[[str, str], None]) -> None:
        self._words = words
        self._tell = tell
        self.children = [Child(number) for number in range(1, count + 1)]
        self.stopping = 0
        """The signal that ends it."""
        self._signals: list[int] = []

    async def run(self) -> int:
        """Work until SIGTERM or SIGINT, and return the exit status: 0 if all children ended in good order."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for child in self.children:
                self._start(child)
            return await self._watch()
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def health(self, workers: Sequence[WorkerRow]) -> Health:
        """Return the state of the children, by what each says in its row among the workers."""
        by_pid = {row.pid: msgspec.json.decode(row.about) for row in workers}
        pids = {child.number: child.process.pid for child in self.children if child.process is not None}
        processes = [
            {"number": one.number, "pid": pids.get(one.number), "restarts": one.restarts, **by_pid.get(pid, {})}
            for one in self.children
            for pid in [pids.get(one.number, 0)]
        ]
        for facts in processes:
            facts.pop("workflows", None)
            facts.pop("left", None)
        all_there = all(pids.get(child.number) in by_pid for child in self.children)
        all_there = all_there and not any(facts.get("not_claiming") for facts in processes)
        facts = {"draining": bool(self.stopping), "processes": processes}
        return Health(bool(pids), all_there and not self.stopping, facts)

    def _note(self, number: int, frame: object) -> None:
        self._signals.append(number)

    async def _watch(self) -> int:
        worst = 0
        while True:
            while self._signals:
                self._pass_on(self._signals.pop(0))
            for child in self.children:
                status = child.process.poll() if child.process is not None else None
                if status is not None:
                    worst = max(worst, self._ended(child, status))
                    if status == GIVEN_UP and not self.stopping:
                        self._tell("stopping", f"process {child.number} cannot work, so none can")
                        return GIVEN_UP
            if self.stopping and all(child.process is None for child in self.children):
                return worst
            now = time.monotonic()
            for child in self.children:
                if child.process is None and not self.stopping and now >= child.again_at:
                    child.restarts += 1
                    self._start(child)
            await asyncio.sleep(LOOK_SECONDS)

    def _start(self, child: Child) -> None:
        reading, child.pipe = os.pipe()
        environment = {**os.environ, SUPERVISED: f"{child.number}:{reading}"}
        try:
            # A process group of its own: Ctrl-C reaches a child through its supervisor only, or it would count twice.
            child.process = subprocess.Popen(
                [sys.executable, "-m", "everstep", "worker", *self._words],
                env=environment,
                pass_fds=(reading,),
                process_group=0,
            )
        finally:
            os.close(reading)
        child.began = time.monotonic()

    def _ended(self, child: Child, status: int) -> int:
        """Record that a child has ended, and return what that means for the exit status."""
        assert child.process is not None
        pid, lived = child.process.pid, time.monotonic() - child.began
        child.process = None
        os.close(child.pipe)
        if self.stopping:
            return status if status > 0 else 128 - status if status < 0 else 0
        if status == GIVEN_UP:
            return status
        child.pause = FIRST_PAUSE_SECONDS if lived >= LONG_LIFE_SECONDS else min(child.pause * 2, PAUSE_SECONDS_MAX)
        child.again_at = time.monotonic() + child.pause
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        self._tell("restart", f"process {child.number} ({pid}) ended {how}; another begins in {child.pause:g} s")
        return 0

    def _pass_on(self, number: int) -> None:
        self.stopping = self.stopping or number
        for child in self.children:
            if child.process is not None:
                child.process.send_signal(number)

    def _end_all(self) -> None:
        """Stop all remaining children in good order: their pipes end, whatever happens here."""
        for child in self.children:
            if child.process is not None:
                os.close(child.pipe)
                child.process = None


def supervised() -> tuple[int, int] | None:
    """Return the number of this process and its pipe, if it is a supervisor's child."""
    number, _, pipe = os.environ.get(SUPERVISED, "").partition(":")
    return (int(number), int(pipe)) if number and pipe else None
