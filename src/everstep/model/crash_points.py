"""Named places where a test may kill the process: before, inside and after every durable write.

Nothing happens at a crash point unless it is armed by the environment, which is read once, at import:

    EVERSTEP_CRASH_AT=name:count        SIGKILL this process when it passes `name` for the count-th time
    EVERSTEP_CRASH_AT=name:count:stop   SIGSTOP it instead: a zombie that a test wakes later
    EVERSTEP_CRASH_COUNT=path           append the name of every point passed to this file, a line each

A test counts the points of a workload first and then breaks at each of them.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Final

from everstep.errors import Misuse
from everstep.model.own_files import append_to

TABLE: Final[dict[str, str]] = {
    "store.commit.before": "a transaction of the committer is about to begin",
    "store.commit.written": "its statements are done and its COMMIT is not",
    "store.commit.after": "it is durable, and no caller knows yet",
    "store.create.before": "there is no file yet",
    "store.create.after": "there is an empty file",
    "store.switch.before": "the file is about to be switched to its write-ahead log",
    "store.switch.after": "it is switched",
    "store.close.before": "the store is about to be closed, which moves its log into the file",
    "store.close.after": "it is closed",
    "store.migrate.before": "a migration is about to begin",
    "store.migrate.written": "its statements are done and its COMMIT is not",
    "store.migrate.after": "it is durable",
    "store.register_worker.before": "a worker is about to be entered",
    "store.register_worker.written": "its row is written and its lock is held; not committed",
    "store.register_worker.after": "it is entered",
    "store.renew.before": "a lease is about to be renewed",
    "store.renew.written": "written, not committed",
    "store.renew.after": "prolonged",
    "store.leave.before": "a worker is about to give back its runs",
    "store.leave.written": "written, not committed",
    "store.leave.after": "given back; its liveness lock is still held",
    "store.bury.before": "dead workers were found",
    "store.bury.written": "their rows are removed; not committed",
    "store.bury.after": "they are buried",
    "transaction.before": "an atomic step is about to begin its transaction",
    "transaction.written": "its body has ended and its marker is written; its COMMIT is not",
    "transaction.after": "it is committed, and the run does not know yet",
    "transaction.void.before": "an atomic step is not done, and earlier attempts are about to be ruled out",
    "transaction.void.written": "the void marker is written, not committed",
    "transaction.void.after": "it is committed, and the run does not know yet",
    "markers.forget.before": "the markers of an ended run are about to be deleted",
    "markers.forget.written": "they are deleted; not committed",
    "markers.forget.after": "they are gone",
    "probe.before": "a probe is about to ask the outside",
    "probe.after": "a probe has answered and its answer is not recorded",
    "body.before": "a step's body is about to start; its intent is durable if its contract needs one",
    "body.after": "a body has ended and its outcome is not recorded",
    "attempt.again": "another attempt at a step is about to be recorded",
    "key.refused": "another step got the key first; the unit that claimed it is about to be built again",
    "key.woken": "a step that waits for a key was woken because the key has changed, and has not read it yet",
    "key.shared": "the outcome of another step was read and is not recorded",
    "outcome.recorded": "an outcome is in the history in memory; the code has not seen it and it is not durable",
    "outcome.applied": "the code has seen an outcome; what it asks for now is not recorded",
    "checkpoint.recorded": "a checkpoint and its event are in memory; neither is durable",
    "checkpoint.archived": "a damaged checkpoint was found and is about to be archived, with the note that says so",
    "graph.moved": "a graph's move is in the history in memory; it is not durable, and what it begins has not begun",
    "unit.durable": "what a run wrote is durable; the work that waited for it has not begun",
    "delivery.posted": "a signal or cancel is in an inbox, and its sender does not know yet",
    "request.posted": "a request is in an inbox, and its sender does not know yet",
    "request.answered": "an answer is in the history in memory; it is not durable, and its sender does not have it",
    "stream.gathered": "what bodies appended to streams is in memory, in order; it is not durable",
    "delivery.taken": "a delivery is about to be taken from the inbox into the history",
    "child.adopted": "a child run is in the store, and no worker drives it yet",
    "budget.reserved": "a step's estimate is in the history in memory; it is not durable and the body has not begun",
    "budget.withheld": "the budget has no room for a call; that is not durable, and nothing is decided about it",
    "budget.charged": "what a body was charged beyond its estimate is in the history in memory, and not durable",
    "budget.allotted": "a child's allotment is in the history in memory; neither it nor the child is durable",
    "limit.withheld": "a step waits for a slot of its limit, which is in the history in memory, and not durable",
    "limit.taken": "a slot is taken and durable, and the attempt that it is for is not begun",
    "run.claimed": "a run was claimed and its history is not loaded",
    "run.replayed": "its code was replayed and nothing new was done",
    "compensation.begin": "a run has failed or is rolled back, and the start of its compensation is not recorded",
    "rollback.claimed": "an ended run was claimed to be rolled back, and that is not recorded",
    "drift.judged": "a function has decided about drift, and its decision is not recorded",
    "notification.taken": "a notification of a hold is taken and not sent",
    "notification.answered": "it was sent and answered, and that is not recorded",
    "notification.settled": "that is written down",
    "run.continue": "a run's code continues with a fresh history; neither the old end nor the new start is recorded",
    "run.continued": "the fresh history is durable, and no worker drives it yet",
    "outbox.written": "a start or a signal is written in a caller's transaction, which is still open",
    "schedule.due": "a tick is due, and neither its run nor the changed schedule is written",
    "schedule.fired": "the run of a tick and its schedule are durable, and no worker drives the run yet",
    "gc.judged": "families of runs were found old enough to delete, and none of them is claimed yet",
    "run.fork": "a fork is about to be written, and nothing of it is in the store",
    "run.forked": "a fork is durable, and neither its driver nor its caller knows",
    "run.end": "a run's code has ended and its end is not recorded",
    "run.ended": "a run's end is durable, and nothing that waits for it knows yet",
}
"""Every crash point and the moment that it marks. An armed process refuses to pass a point that is not listed."""

POINTS: Final[frozenset[str]] = frozenset(TABLE)


unarmed: Final[Callable[[str], object]] = bool
"""Do nothing. A step passes a dozen points, so this is a function in C."""


class _Armed:
    """Counts the points that the process passes, and kills or stops it at the chosen one."""

    def __init__(self, at: str, count_path: str) -> None:
        self._name, self._count, self._signal = _parsed(at) if at else ("", 0, signal.SIGKILL)
        self._passed = 0
        self._lock = threading.Lock()
        self._counter = append_to(count_path) if count_path else None

    def __call__(self, name: str) -> None:
        if name not in POINTS:
            raise Misuse(f"The crash point {name!r} is not in the table of everstep.model.crash_points.")
        if self._counter is not None:
            os.write(self._counter, f"{name}\n".encode())
        if name != self._name:
            return
        with self._lock:
            self._passed += 1
            is_the_one = self._passed == self._count
        if is_the_one:
            # The signal is sent to this very thread: another thread may take it otherwise, and this one runs on for a
            # moment.
            signal.pthread_kill(threading.get_ident(), self._signal)


def _parsed(at: str) -> tuple[str, int, signal.Signals]:
    name, _, rest = at.partition(":")
    count, _, how = rest.partition(":")
    if name not in POINTS or not count.isdigit() or how not in ("", "stop"):
        raise Misuse(f"EVERSTEP_CRASH_AT={at!r}: it is name:count or name:count:stop, with a name of the table.")
    return name, int(count), signal.SIGSTOP if how else signal.SIGKILL


def armed_by(environment: Mapping[str, str]) -> Callable[[str], object]:
    """Return the function that the environment asks for: an armed one, or one that does nothing."""
    at, count_path = environment.get("EVERSTEP_CRASH_AT", ""), environment.get("EVERSTEP_CRASH_COUNT", "")
    return _Armed(at, count_path) if at or count_path else unarmed


crash_point: Final[Callable[[str], object]] = armed_by(os.environ)
"""Pass a crash point by its name."""
