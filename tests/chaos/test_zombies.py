"""A lost session is not a death: who begins a `once` step again must know that the process which began it has ended."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from everstep.stores import processes
from everstep.stores.processes import machine_code
from everstep.testing.ledger import Mode
from tests.chaos.nursery import WorkerProcess
from tests.chaos.trial import Trial
from tests.waiting import wait_until

BODY_SECONDS = 1.5


def begun(trial: Trial) -> WorkerProcess:
    """Return a worker in the middle of a `once` body of which nobody outside has heard yet, with another beside it."""
    trial.ledger.behave("remit_slowly", Mode(honours_keys=False))
    worker = trial.begin_worker()
    trial.client.start("chaos_slow", 7, BODY_SECONDS, id="slow")
    wait_until(lambda: trial.open_effects(worker) > 0)
    return worker


def applied(trial: Trial) -> int:
    return sum(entry["kind"] == "applied" for entry in trial.ledger.entries())


def run_status(trial: Trial) -> str:
    (status,) = trial.statuses()
    return status


@pytest.mark.parametrize("how", ["restart", "end"])
def test_a_stopped_worker_that_lost_its_session_may_still_act_so_nobody_else_does(
    new_trial: Callable[..., Trial], how: str
) -> None:
    trial = new_trial(lease=30.0)
    stopped = begun(trial)
    stopped.send(signal.SIGSTOP)
    other = trial.begin_worker()
    wait_until(lambda: "started" in other.output.read_text())
    time.sleep(0.5)
    if how == "restart":
        trial.server.restart()
    else:
        trial.server.terminate(f"everstep {stopped.pid} %")
    wait_until(lambda: run_status(trial) == "held")
    assert applied(trial) == 0
    stopped.send(signal.SIGCONT)
    wait_until(lambda: applied(trial) == 1)
    trial.resolve_holds()
    wait_until(lambda: run_status(trial) == "completed")
    assert applied(trial) == 1
    assert "it is not proven that the process that began it has ended" in trial.log[-1]


@pytest.mark.parametrize("lease", [1.0, 30.0])
def test_a_worker_that_was_killed_has_ended_so_another_one_goes_on_without_a_person(
    new_trial: Callable[..., Trial], lease: float
) -> None:
    trial = new_trial(lease=lease)
    killed = begun(trial)
    trial.begin_worker()
    trial.workers.remove(killed)
    killed.end()
    wait_until(lambda: run_status(trial) in ("completed", "held"))
    assert (run_status(trial), applied(trial)) == ("completed", 1)


def test_a_process_has_ended_when_the_kernel_of_its_machine_says_so() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = processes.worker_name("host", 1)
    started = processes.start_time(process.pid)
    theirs = f"host-{process.pid}-{machine_code()}-{started:x}.00000001"
    reused = f"host-{process.pid}-{machine_code()}-{started - 1:x}.00000001"
    assert processes.worker_has_ended(reused), "its pid is another process's now"
    elsewhere = theirs.replace(machine_code(), "0000000000")
    assert processes.is_of_this_process(mine)
    assert not any(map(processes.worker_has_ended, (mine, theirs, elsewhere, "w", "a-b-c-d")))
    process.kill()
    wait_until(lambda: processes.worker_has_ended(theirs))  # although nobody has waited for it yet
    process.communicate()
    assert processes.worker_has_ended(theirs)
    assert not processes.worker_has_ended(elsewhere)
    assert not processes.is_of_this_process(theirs)
