"""A signal whose handler raises, at any line of a store, takes no lock with it: what is asked next is answered."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everstep.stores.brief import Busy
from everstep.stores.protocol import StartRun
from tests.stores.kit import SqliteHarness, new_run

SIGNALS = 300


class Interrupted(BaseException):
    """What the handler raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def until_interrupted(ask: Callable[[], Any], seconds: float) -> None:
    """Ask again and again, until the signal comes after this time."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            ask()
    except Interrupted:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("what", ["commit", "commit without waiting", "changed", "read"])
def test_no_lock_is_kept_by_a_signal_at_any_line(sqlite: SqliteHarness, what: str) -> None:
    store, number = sqlite.store, iter(range(10**9))

    def start(**how: bool) -> Any:
        return store.commit([StartRun(new_run(f"r{next(number)}"))], **how)

    def start_at_once() -> None:
        with contextlib.suppress(Busy):  # once a second a thread is to look where the file is
            start(patient=False)

    ask: dict[str, Callable[[], Any]] = {
        "commit": start,
        "commit without waiting": start_at_once,
        "changed": store.changed,
        "read": lambda: store.run("r0"),
    }
    for count in range(SIGNALS):
        until_interrupted(ask[what], 0.0005 + count * 1e-6)
        assert not store._writer._lock.locked()
        assert not store._reader._lock.locked()
    start()
