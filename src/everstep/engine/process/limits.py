"""Named limits of steps: an attempt at a step with `limit=` waits until the limit has a slot for it.

A slot is taken before the attempt is begun, so a waiting step has not happened, whatever happens to this process: the
history records it as withheld. The store decides whether there is room, so a limit holds over all workers; slots of a
worker that is gone no longer count. A slot is given back when the body ends, or leaves this process (see `returns.py`).
"""

import asyncio
import functools
from typing import Any, Final

import msgspec

from everstep.engine.code.commands import StepCall, preview_of
from everstep.engine.code.step_state import SLOT, StepState
from everstep.engine.history.clock import microseconds, set_alarm
from everstep.engine.process.process import Process
from everstep.engine.run.driver import Driver
from everstep.errors import Misuse
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.stores.protocol import Accepted
from everstep.stores.rows.queues import FreeSlot, NoSlot, QueueRow, TakeSlot, room_of

LOOK_SECONDS: Final = 0.1
"""Poll interval for dropping cancelled waiters and finding free slots, in seconds."""
OVER: Final = "limit"


class Wait(msgspec.Struct, gc=False):
    """An attempt that waits for a slot."""

    driver: "Driver"
    call: StepCall
    because: str

    @property
    def is_over(self) -> bool:
        """Whether it is no longer wanted, or its run has left this process."""
        driver, number = self.driver, self.call.call
        if driver.stopped or driver.ending or driver.hold or self.call.cancelled:
            return True
        return driver.attempts.of(number) is None or number not in driver.execution.steps

    @property
    def is_cancelled(self) -> bool:
        """Whether the code was cancelled meanwhile, and waits to learn that this has not happened.

        Only another attempt tells whether an attempt that was cut off has happened, so that one is waited for.
        """
        return self.because != "crash" and (self.call.future.is_cancel_wanted or self.driver.end_wanted)


class Limits:
    """The attempts of this process that wait for slots, and those that have one."""

    def __init__(self, app: Process) -> None:
        self._app = app
        self._waiting: dict[str, dict[tuple[str, int], Wait]] = {}
        self._held: dict[tuple[str, int], tuple[str, Driver]] = {}
        self._owed: set[tuple[str, int]] = set()
        """Slots that are no longer used here, until the store has taken them back."""
        self._asked: set[tuple[str, int]] = set()
        """Slots that were requested from the store, until it has answered."""
        self._look_later: asyncio.TimerHandle | None = None
        self._alarms: dict[str, int] = {}

    def begin(self, driver: "Driver", call: StepCall) -> None:
        """Begin a step with a limit that the code asked for."""
        if driver.execution.kept is not None and driver.attempts.take_kept(call):
            return
        if driver.budgets is not None and call.keyed is None and not driver.attempts.has_room(call):
            return
        self.withhold(driver, call)

    def withhold(self, driver: "Driver", call: StepCall, because: str = OVER, *, again: bool = False) -> None:
        """Record that an attempt waits for a slot, and begin it when it has one."""
        attempts = driver.attempts.of(call.call)
        if attempts is None:
            attempts = driver.attempts.note(call.call, StepState())
        attempts.due = SLOT
        body = ev.CallWithheld(
            call.call, call.kind, OVER, call.arguments.digest, call.target.effect, attempt=attempts.attempt, again=again
        )
        body.source, body.key, body.secret, body.limit = (
            call.source,
            call.own_key,
            call.is_secret,
            call.target.limit or "",
        )
        body.preview = "" if call.is_secret else preview_of(call.arguments)
        body.part = driver.budgets.part_of(call.call) if driver.budgets is not None else 0
        driver.record("call_withheld", call.step, body)
        crash_point("limit.withheld")
        driver.writer.save(waited_for=False)
        self.ask(driver, call, because)

    def ask(self, driver: "Driver", call: StepCall, because: str) -> None:
        """Wait for a slot. It is already recorded that the attempt waits."""
        name = call.target.limit
        assert name is not None
        driver.attempts.want_slot(call.call)
        self._waiting.setdefault(name, {})[driver.run, call.call] = Wait(driver, call, because)
        self._try(name)

    def look(self) -> None:
        """Look again, because slots may be free."""
        for name in list(self._waiting):
            self._try(name)

    # -- taking ----------------------------------------------------------------------------------------------------
    def _try(self, name: str) -> None:
        if not self._app.draining:
            self._app.background.keep(f"limit {name}", functools.partial(self._take, name))
        self._look_soon()

    def _look_again(self) -> None:
        self._look_later = None
        self._app.background.attempt("limits", self._look_closely)
        if self._held or self._waiting:
            self._look_soon()

    def _look_closely(self) -> None:
        for key, (_, driver) in list(self._held.items()):
            if not self._is_in_use(driver, key[1]):
                self.free(*key)
        for name in list(self._waiting):
            self._drop_unwanted(name)
        self.look()

    def _look_soon(self) -> None:
        if self._look_later is None:
            self._look_later = self._app.loop.call_later(LOOK_SECONDS, self._look_again)

    def _is_in_use(self, driver: "Driver", call: int) -> bool:
        if self._app.acting.where(driver.run, call):
            return True
        if driver.stopped:
            return False
        attempts = driver.attempts
        claims = attempts.has_keys and attempts.keys.is_claiming
        return claims or call in attempts.running or call in attempts.starting

    def _drop_unwanted(self, name: str) -> None:
        waiting = self._waiting[name]
        for key, wait in list(waiting.items()):
            if wait.is_over:
                self._forget(waiting, key)
            elif wait.is_cancelled:
                self._forget(waiting, key)
                wait.driver.call(self._give_up, wait)
        if not waiting:
            del self._waiting[name]

    def _give_up(self, wait: Wait) -> None:
        wait.driver.attempts.settle_as_not_done(wait.call)
        wait.driver.come_to_rest()

    def _forget(self, waiting: dict[tuple[str, int], Wait], key: tuple[str, int]) -> Wait:
        wait = waiting.pop(key)
        if not wait.driver.stopped:
            wait.driver.attempts.slots_wanted = set(wait.driver.attempts.slots_wanted) - {key[1]}
        return wait

    async def _take(self, name: str) -> None:
        """Take as many slots as seem to be free, for the attempts that have waited longest."""
        app = self._app
        while name in self._waiting and not app.draining:
            self._drop_unwanted(name)
            room, next_at = await app.read(self._room, name)
            # An earlier attempt at the same step may still act, and has the slot; or the slot is being given back.
            waiting = self._waiting.get(name, ())
            busy = self._held.keys() | self._owed | self._asked
            chosen = [key for key in waiting if key not in busy][:room]
            if not chosen:
                self._wake_at(name, next_at)
                return
            at, worker = app.clock.now(), app.worker
            takes: list[asyncio.Future[Any]] = []
            for run, call in chosen:
                takes.append(app.committer.submit(TakeSlot(name, run, call, worker, at)))
                self._asked.add((run, call))
                # The callback runs whatever happens to this task: an unknown slot would be lost for as long as the
                # worker lives.
                takes[-1].add_done_callback(functools.partial(self._answered, name, (run, call)))
            await asyncio.wait(takes)
            if any(isinstance(take.result(), NoSlot) for take in takes):
                return

    def _answered(self, name: str, key: tuple[str, int], take: "asyncio.Future[Any]") -> None:
        self._asked.discard(key)
        verdict = None if take.cancelled() or take.exception() is not None else take.result()
        if isinstance(verdict, Accepted):
            self._taken(name, key)
        elif isinstance(verdict, NoSlot):
            self._wake_at(name, verdict.next_at)

    def _room(self, name: str) -> tuple[int, int | None]:
        """Return how many slots seem to be free. The store decides when they are taken."""
        store = self._app.store
        rows: list[QueueRow] = [row for row in store.queues() if (row.kind, row.name) == ("limit", name)]
        if not rows:
            return room_of(None, 0, 0)
        used = sum(slot.name == name for slot in store.slots())
        return room_of(rows[0], self._app.clock.now(), used)

    def _wake_at(self, name: str, at: int | None) -> None:
        if at is not None and self._alarms.get(name, 0) < self._app.clock.now():
            self._alarms[name] = at
            set_alarm(self._app.clock, self._app.loop, at + microseconds(0.000001), lambda: self._try(name))

    def _taken(self, name: str, key: tuple[str, int]) -> None:
        crash_point("limit.taken")
        waiting = self._waiting.get(name, {})
        wait = self._forget(waiting, key) if key in waiting else None
        if not waiting:
            self._waiting.pop(name, None)
        if wait is None or wait.is_over or self._app.draining:
            self._give_back(name, key)
            return
        self._held[key] = (name, wait.driver)
        wait.driver.call(self._begin, wait)

    def _begin(self, wait: Wait) -> None:
        wait.driver.attempts.tell_when_over(functools.partial(self.free, wait.driver.run))
        wait.driver.attempts.begin_again(wait.call.call, wait.because, has_slot=True)
        wait.driver.come_to_rest()

    # -- giving back -----------------------------------------------------------------------------------------------
    def free(self, run: str, call: int) -> None:
        """Free the slot of a body that has ended or is no longer waited for, unless something of it still acts."""
        if (run, call) not in self._held:
            return
        if self._app.acting.where(run, call):
            self._look_soon()
            return
        name, _ = self._held.pop((run, call))
        self._give_back(name, (run, call))

    def _give_back(self, name: str, key: tuple[str, int]) -> None:
        self._owed.add(key)
        try:
            self._app.returns.give_back(
                FreeSlot(name, *key, self._app.worker), functools.partial(self._is_back, name, key)
            )
        except Misuse:
            pass  # this app is closed, and a worker that is gone has no slots

    def _is_back(self, name: str, key: tuple[str, int]) -> None:
        self._owed.discard(key)
        if name in self._waiting:
            self._try(name)
