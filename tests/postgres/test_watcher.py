"""The thread of the lasting session: whatever it raises, it goes on; without a thread, that is said and tried again."""

import threading

import pytest

from everstep.errors import StoreError
from everstep.stores.postgres import PostgresStore
from everstep.stores.postgres.connections import Outage
from everstep.stores.postgres.watching import Watcher
from tests.waiting import wait_until


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
        wait_until(lambda: fails(store))
        is_broken = False
        wait_until(lambda: not fails(store))
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


def test_sessions_that_read_are_made_again_although_only_they_were_lost(url: str) -> None:
    """While no connection can be had for a moment: the lasting session is sound, and says that the server is."""
    store = PostgresStore(url)
    try:
        store.changed()
        patience = store._reader._patience
        wait_until(lambda: patience.is_watched)
        patience.note(Outage("too many connections"))
        patience._since -= 60.0
        store._reader.close()
        wait_until(lambda: answers(store))
        assert patience.seconds() == 0
    finally:
        store.close()


def answers(store: PostgresStore) -> bool:
    try:
        store.workers()
    except StoreError:
        return False
    return True
