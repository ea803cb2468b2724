"""The machine's clock is set back and forth by years between a crash and the resume: same result, nothing doubled."""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from everstep.testing.clock import FakeClock
from everstep.testing.ledger import Ledger, Mode
from tests import forked
from tests.engine.resume_helpers import Machine
from tests.waiting import DEADLINE_SECONDS, wait_until

PROGRAM = Path(__file__).with_name("clocked.py")
YEAR = 365 * 86400 * 1_000_000
SHIFTS = (-10 * YEAR, -YEAR, -3600 * 1_000_000, 0, 3600 * 1_000_000, YEAR, 10 * YEAR)
POINTS = (
    "unit.durable",
    "store.commit.after",
    "body.after",
    "outcome.recorded",
    "run.replayed",
    "store.commit.written",
)
TRIALS = 6
EXPECTED: list[Any] = []
"""The result of an undisturbed run."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger.start(tmp_path_factory.mktemp("clock") / "ledger") as ledger:
        ledger.behave("note", Mode(refuses=1))
        ledger.behave("pay", Mode(loses=1, honours_keys=False))
        yield ledger


def life(folder: Path, book: Ledger, shift: int, at: str = "") -> tuple[int, str]:
    """Let a process with a clock of its own go on with the run, and return its exit status. A lost timer never ends."""
    environment = {**os.environ, **({"EVERSTEP_CRASH_AT": at} if at else {})}
    command = [sys.executable, str(PROGRAM), str(folder), book.url, str(book.folder / "ledger.jsonl"), str(shift)]
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    return done.returncode, done.stderr


def kinds_in(path: Path) -> list[str]:
    """Return the kinds of the run's events, as somebody who only looks sees them."""
    if not path.exists():
        return []
    store = SqliteStore(path)
    try:
        return [event.kind for event in store.events("r", 1)]
    finally:
        store.close()


def trial(folder: Path, ledger: Ledger, seed: int) -> list[str]:
    """Kill the program twice and let it end, each time with another clock. Returns what is wrong."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    book = ledger.book(f"clock-{seed}")
    problems, shifts = [], []
    for kill in (True, True, False):
        shift = chance.choice(SHIFTS)
        shifts.append(shift // 1_000_000)
        at = f"{chance.choice(POINTS)}:{chance.randint(1, 9)}" if kill else ""
        status, error = life(folder, book, shift, at)
        if status not in ((0, -signal.SIGKILL) if kill else (0,)):
            problems.append(f"it ended with {status}: {error[-800:]}")
    store = SqliteStore(folder / "runs.db")
    histories = export_histories(store)
    store.close()
    problems += [str(violation) for violation in check(histories)]  # the ledger's clock is another: it only counts
    problems += [
        f"{history.row.id} is {history.row.status}" for history in histories if history.row.status != "completed"
    ]
    applied = Counter(entry["effect"] for entry in book.entries() if entry["kind"] == "applied")
    if applied != {"note": 6, "pay": 3}:
        problems.append(f"applied were {applied}")
    result = json.loads((folder / "result").read_text()) if (folder / "result").exists() else []
    if [one for one in result if one != "waited"] != EXPECTED or result.count("waited") != 3:
        problems.append(f"the result is {result}")
    return [f"seed {seed}, shifts {shifts}: {problem}" for problem in problems]


def test_whatever_the_clocks_of_its_processes_say_a_run_has_the_same_result(tmp_path: Path, ledger: Ledger) -> None:
    undisturbed = ledger.book("clock-undisturbed")
    (tmp_path / "undisturbed").mkdir()
    status, error = life(tmp_path / "undisturbed", undisturbed, 0)
    assert status == 0, error
    EXPECTED[:] = [one for one in json.loads((tmp_path / "undisturbed" / "result").read_text()) if one != "waited"]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda seed: trial(tmp_path / f"trial-{seed}", ledger, seed), range(TRIALS)))
    problems = [problem for problems in found for problem in problems]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("shift", [-10 * YEAR, -3600 * 1_000_000, 10 * YEAR])
def test_while_no_process_runs_the_clock_is_set_and_a_timer_waits_for_no_more_than_was_left(
    tmp_path: Path, ledger: Ledger, shift: int
) -> None:
    """A process is killed while its run sleeps five seconds; the next one has another clock."""
    book = ledger.book(f"sleeper{shift}")
    command = [sys.executable, str(PROGRAM), str(tmp_path), book.url, str(book.folder / "ledger.jsonl")]
    first = forked.Program([*command, "0", "sleeper"])
    wait_until(lambda: "timer_started" in kinds_in(tmp_path / "runs.db") or first.poll() is not None)
    assert first.poll() is None
    slept = time.monotonic()
    time.sleep(2.5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    # A jump of the clock that was waited for would take an hour, or years.
    assert forked.run([*command, str(shift), "sleeper"], timeout=DEADLINE_SECONDS).returncode == 0
    assert json.loads((tmp_path / "result").read_text()) == "awake"
    if shift < 0:
        assert time.monotonic() - slept > 5, "it woke up early"
    assert [entry["effect"] for entry in book.entries() if entry["kind"] == "applied"] == ["note"]
    kinds = kinds_in(tmp_path / "runs.db")
    assert kinds.count("timer_fired") == kinds.count("timer_started") == 1
    store = SqliteStore(tmp_path / "runs.db")
    assert [str(violation) for violation in check(export_histories(store))] == []
    store.close()


@pytest.mark.parametrize("shift", [-10 * YEAR, 10 * YEAR])
def test_a_timer_waits_for_what_is_left_of_it_whatever_year_it_is(tmp_path: Path, shift: int) -> None:
    """The clock of a file goes on from where its workers had been, and never back."""
    at = [100 * YEAR]
    store = SqliteStore(tmp_path / "runs.db", clock=lambda: at[0])
    store.register_worker("w", 1, "host", at[0] + 30)
    later = at[0] + 5_000_000
    assert store.renew("w", later + 30, later)
    store.close()
    at[0] += shift
    store = SqliteStore(tmp_path / "runs.db", clock=lambda: at[0])
    assert store.now() == max(later, at[0])
    at[0] = later + 7
    assert store.now() == later + 7, "the machine's clock was put right"
    store.close()


async def test_a_process_s_own_time_goes_on_when_the_machine_s_is_set_back(machine: Machine) -> None:
    """It notes the time with its lease, so the next process begins no earlier than that."""
    app = await machine.boot()
    await app.become_worker()
    began = machine.clock.now()
    machine.clock.advance(1000)
    app.pump.nudge()
    await machine.until(lambda: machine.store._read_latest() >= began + 1000 * 1_000_000)
    await machine.kill(app)
    machine.clock = FakeClock(began - YEAR)
    other = machine.open_store()
    assert other.now() >= began + 1000 * 1_000_000
    other.close()
