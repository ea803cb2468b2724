"""What proves that a worker has ended, so that nothing of it acts any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.stores import processes
from everstep.stores.sqlite import SqliteStore
from tests.waiting import wait_until


# -- what proves that a worker has ended ------------------------------------------------------------------------------
def stores(folder: Path) -> tuple[SqliteStore, SqliteStore]:
    return SqliteStore(folder / "runs.db"), SqliteStore(folder / "runs.db")


def test_a_worker_that_left_has_ended_and_one_without_a_row_has_not(tmp_path: Path) -> None:
    one, two = stores(tmp_path)
    one.register_worker("w", 1, "host", 1)
    assert not two.has_ended("w")
    one.leave("w")
    assert two.has_ended("w")
    assert not two.has_ended("never seen")
    one.close()
    two.close()


def test_a_worker_whose_lock_is_free_has_ended_also_when_it_was_buried(tmp_path: Path) -> None:
    one, two = stores(tmp_path)
    one.register_worker("w", 1, "host", 1)
    assert not two.has_ended("w")
    one.close()
    assert two.has_ended("w")
    assert two.bury_dead(0) == ["w"]
    assert two.has_ended("w")
    two.close()


@pytest.mark.parametrize("how", ["deleted", "replaced", "copied"])
def test_a_lock_on_another_file_proves_nothing(tmp_path: Path, how: str) -> None:
    one, two = stores(tmp_path)
    one.register_worker("w", 1, "host", 2_000_000_000_000_000)
    assert two.bury_dead(0) == []
    live = tmp_path / "runs.db-live"
    content = live.read_bytes()
    live.unlink()
    if how == "replaced":
        other = SqliteStore(tmp_path / "other.db")
        other.register_worker("x", 1, "host", 1)
        other.close()
        (tmp_path / "other.db-live").rename(live)
    elif how == "copied":
        live.write_bytes(content)
    assert two.bury_dead(1_000) == []
    assert not two.has_ended("w")
    assert one.renew("w", 2_000_000_000_000_000, 1_000)
    assert two.bury_dead(1_000) == []
    one.close()
    assert two.bury_dead(1_000) == ["w"], "the lock was taken again on the file that is there"
    two.close()


def test_a_worker_whose_lock_cannot_be_looked_at_is_removed_when_its_lease_has_lapsed_and_may_still_act(
    tmp_path: Path,
) -> None:
    one, two = stores(tmp_path)
    one.register_worker("w", 1, "host", 1_000)
    (tmp_path / "runs.db-live").unlink()
    assert two.bury_dead(999) == []
    assert two.bury_dead(1_001) == ["w"]
    assert not two.has_ended("w")
    one.close()
    two.close()


def test_a_lock_that_was_handed_over_outlives_its_store(tmp_path: Path) -> None:
    one, two = stores(tmp_path)
    one.register_worker("w", 1, "host", 1)
    release = one.hand_over_lock("w")
    one.close()
    assert two.bury_dead(2_000_000_000_000_000) == []
    assert not two.has_ended("w")
    release()
    assert two.has_ended("w")
    two.close()


def test_start_times_of_another_time_namespace_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted from another moment, so that a living process would be taken for a later one."""
    link = os.readlink

    def in_namespace(number: int) -> str:
        times = f"time:[{number}]"
        monkeypatch.setattr(os, "readlink", lambda path: times if path == "/proc/self/ns/time" else link(path))
        return processes.machine.__wrapped__()

    names = {in_namespace(number) for number in (4026531834, 4026532500, 4026532501)}
    assert len(names) == 3
    assert in_namespace(4026531834) == processes.machine()


ENDS_ITS_FIRST_THREAD = """
import ctypes, sys, threading
def stay():
    print("here", flush=True)
    sys.stdin.read()
    import os; os._exit(0)
threading.Thread(target=stay).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what other systems say about threads is not looked at")
def test_a_process_whose_first_thread_has_ended_has_not(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", ENDS_ITS_FIRST_THREAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "here\n"
    wait_until(lambda: processes._state(other.pid)[0] == "Z")
    assert not processes.has_ended(other.pid, processes.machine())
    assert other.stdin is not None
    other.stdin.close()
    wait_until(lambda: processes.has_ended(other.pid, processes.machine()))
    other.wait()
