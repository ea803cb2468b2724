"""Whoever breaks things at random: a seed decides what, whom and when. What was done stands in the trial's log."""

import random
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.trial import Trial

STOP_SECONDS = 1.0
"""So much longer than its lease a stopped worker sleeps."""
PATIENCE_SECONDS = 1.0
"""So long the agent waits for an effect to begin."""


class Agent:
    """Breaks workers, sessions and the server."""

    def __init__(self, trial: Trial, seed: int) -> None:
        self._trial = trial
        self._chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self._deeds: dict[str, Callable[[], None]] = {
            "sessions": self.end_sessions,
            "listeners": self.end_listeners,
            "replies": self.lose_replies,
            "cuts": self.cut,
            "stops": self.stop,
            "crowds": self.crowd,
        }
        trial.note(f"seed {seed}")

    def _do(self, name: str, what: str = "") -> None:
        self.done[name] += 1
        self._trial.note(f"{name} {what}".rstrip())

    def pause(self, most: float) -> None:
        """Wait for a while, and look after those that were stopped or have ended."""
        time.sleep(self._chance.uniform(0.0, most))
        self._trial.wake_stopped()
        self._trial.replace_ended()

    def restart(self) -> None:
        """Restart the server at once, as if its machine had lost its power."""
        self._do("restarts")
        self._trial.server.restart("immediate")

    def kill(self) -> bool:
        """Kill one of the workers that are awake: at any instant, or, three times out of four, inside an effect."""
        awake = [worker for worker in self._trial.workers if not worker.stopped_until]
        if not awake:
            return False
        if self._chance.random() < 0.75:
            until = time.monotonic() + PATIENCE_SECONDS
            while not (busy := [worker for worker in awake if self._trial.open_effects(worker)]):
                if time.monotonic() > until:
                    break
                time.sleep(0.005)
            awake = busy or awake
        worker = self._chance.choice(awake)
        killed = self._trial.kill(worker)
        if killed:
            self._do("kills", f"{worker.pid}, {self._trial.kills[-1].open_effects} effects open")
        return killed

    def anything(self) -> None:
        """Do one of the smaller deeds."""
        self._deeds[self._chance.choice(sorted(self._deeds))]()

    # -- smaller deeds ----------------------------------------------------------------------------------------------
    def end_sessions(self) -> None:
        """Let the server end some sessions of workers, whatever they are doing."""
        count = self._trial.server.end_sessions("everstep%", self._chance.randint(1, 8), self._chance.random())
        self._do("sessions", str(count))

    def end_listeners(self) -> None:
        """End only the sessions by which workers listen and are seen to live."""
        count = self._trial.server.end_sessions("everstep % l", self._chance.randint(1, 4), self._chance.random())
        self._do("listeners", str(count))

    def lose_replies(self) -> None:
        """Lose the replies to the next commits that go through the proxy."""
        self._trial.proxy.to_lose += self._chance.randint(1, 3)
        self._do("replies")

    def cut(self) -> None:
        """Cut all connections through the proxy."""
        self._trial.proxy.cut_all()
        self._do("cuts")

    def stop(self) -> None:
        """Stop a worker for longer than its lease lasts. At least two others stay awake."""
        awake = [worker for worker in self._trial.workers if not worker.stopped_until]
        if len(awake) < 3:
            return
        worker = self._chance.choice(awake)
        self._trial.faults.append("zombie")
        self._trial.stop_for(worker, self._trial.lease + STOP_SECONDS)
        self._do("stops", str(worker.pid))

    def crowd(self) -> None:
        """Take all connections that are free, end some of the workers' own, and take those as well, for a while."""
        server = self._trial.server
        with server.crowded() as first:
            ended = server.end_sessions("everstep%", 6, self._chance.random())
            with server.crowded() as more:
                time.sleep(self._chance.uniform(0.1, 0.6))
        self._do("crowds", f"{first + more} strangers, {ended} sessions ended")
