"""The thread of the lasting session: whatever it raises, it goes on; without a thread, that is said and tried again."""

import threading
import time
from typing import Any

import pytest

from everstep.errors import StoreError
from everstep.stores.postgres import PostgresStore
from everstep.stores.postgres.watching import Watcher

WAIT_SECONDS_MAX = 20.0


def until(is_so: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fails(store: PostgresStore) -> bool:
    try:
        store.check_watcher()
    except TypeError:
        return True
    return False


def test_a_watcher_that_raises_says_so_and_goes_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, is_broken = Watcher._hear, True

    def raises(self: Watcher) -> None:
        if is_broken:
            raise TypeError("broken")
        real(self)

    monkeypatch.setattr(Watcher, "_hear", raises)
    store = PostgresStore(url)
    try:
        store.changed()
        until(lambda: fails(store))
        is_broken = False
        until(lambda: not fails(store))
        store.register_worker("w", 1, "here", store.now() + 60_000_000)
        assert [row.id for row in store.workers()] == ["w"]
    finally:
        store.close()


def test_a_watcher_without_a_thread_is_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, is_refused = threading.Thread.start, True

    def refuse(thread: threading.Thread) -> None:
        if is_refused and thread.name == "everstep-watcher":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = PostgresStore(url)
    try:
        store.changed()
        with pytest.raises(StoreError, match="no thread"):
            store.register_worker("w", 1, "here", store.now() + 60_000_000)
        is_refused = False
        store.register_worker("w", 1, "here", store.now() + 60_000_000)
        assert [row.id for row in store.workers()] == ["w"]
    finally:
        store.close()
