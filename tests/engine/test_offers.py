"""What several threads of a framework write at the same time: one of them commits for all, and each has its verdict."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from everstep.engine.app.ground import Ground, ground_of
from everstep.errors import StoreError
from everstep.stores.protocol import Accepted, Verdict
from everstep.stores.rows.saved import ChangeItems, SavedItem
from tests.waiting import DEADLINE_SECONDS, wait_until

THREADS = 5


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    made = ground_of(f"sqlite:///{tmp_path / 'runs.db'}")
    yield made
    made.close()


class Gate:
    """The store of a ground, whose commits wait until they are let through, and may then fail."""

    def __init__(self, ground: Ground, patch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self.opened = threading.Event()
        self.errors: list[BaseException] = []
        self._commit = ground.store.commit
        patch.setattr(ground.store, "commit", self._wait_and_commit)

    def _wait_and_commit(self, operations: Sequence[Any], **how: bool) -> list[Verdict]:
        self.batches.append(len(operations))
        assert self.opened.wait(DEADLINE_SECONDS)
        if self.errors:
            raise self.errors.pop(0)
        return self._commit(operations, **how)


class Caller(threading.Thread):
    """A thread that puts an item."""

    def __init__(self, ground: Ground, key: str, linger_seconds: float = 0.0) -> None:
        super().__init__()
        self.verdict: Verdict | BaseException | None = None
        self._ground = ground
        self._change = ChangeItems([SavedItem("n.", key, b"1", 1, 1)])
        self._linger_seconds = linger_seconds
        self.start()

    def run(self) -> None:
        try:
            self.verdict = self._ground.commit(self._change, self._linger_seconds)
        except BaseException as error:  # noqa: BLE001 - also what ends a process
            self.verdict = error


def meet(ground: Ground, gate: Gate) -> tuple[Caller, list[Caller]]:
    """Let one thread commit, and others offer something meanwhile; then let all of it through."""
    first = Caller(ground, "first")
    wait_until(lambda: gate.batches)
    others = [Caller(ground, f"k{number}", DEADLINE_SECONDS * (number % 2)) for number in range(THREADS)]
    wait_until(lambda: len(ground._offers) == THREADS)
    gate.opened.set()
    for one in (first, *others):
        one.join(DEADLINE_SECONDS)
    return first, others


def test_what_is_offered_while_another_thread_commits_goes_into_the_next_transaction(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(ground, monkeypatch)
    first, others = meet(ground, gate)
    assert gate.batches == [1, THREADS]
    assert [one.verdict for one in (first, *others)] == [Accepted()] * (1 + THREADS)
    assert len(ground.saved.items("n.", 2)) == 1 + THREADS


def test_a_failed_commit_is_told_to_those_whose_offers_it_had(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(ground, monkeypatch)
    gate.errors.append(StoreError("lost"))
    first, others = meet(ground, gate)
    assert isinstance(first.verdict, StoreError)
    assert [one.verdict for one in others] == [Accepted()] * THREADS


def test_an_interrupted_commit_leaves_no_other_thread_waiting(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(ground, monkeypatch)
    wait = gate._wait_and_commit

    def interrupted(operations: Sequence[Any], **how: bool) -> list[Verdict]:
        if len(operations) > 1:
            raise KeyboardInterrupt
        return wait(operations, **how)

    monkeypatch.setattr(ground.store, "commit", interrupted)
    first, others = meet(ground, gate)
    assert first.verdict == Accepted()
    errors = [one.verdict for one in others]
    assert [type(error) for error in errors].count(KeyboardInterrupt) == 1, "the thread that was interrupted"
    assert [type(error) for error in errors].count(StoreError) == THREADS - 1
