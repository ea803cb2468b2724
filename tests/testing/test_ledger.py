"""The ledger behaves as the outside world does: slow, forgetful, silent; and what it wrote is what happened."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger, LedgerFailed, Mode, apply, ask


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.start(tmp_path) as ledger:
        yield ledger


def kinds(ledger: Ledger) -> list[str]:
    return [entry["kind"] for entry in ledger.entries()]


def test_an_effect_is_entered_when_it_is_asked_for_and_when_it_is_applied(ledger: Ledger) -> None:
    value = apply(ledger.url, "charge", "k1", {"amount": 5})
    first, second = ledger.entries()
    assert (first["kind"], second["kind"]) == ("request", "applied")
    assert (second["effect"], second["key"], second["arguments"]) == ("charge", "k1", {"amount": 5})
    assert first["digest"] == second["digest"]
    assert second["at"] >= first["at"] > 0
    assert value == apply(ledger.url, "charge", "k2", {"amount": 5}) != apply(ledger.url, "charge", "k3", {"amount": 6})


def test_a_key_that_is_honoured_is_applied_once_and_answered_alike(ledger: Ledger) -> None:
    assert apply(ledger.url, "charge", "k1", 5) == apply(ledger.url, "charge", "k1", 6)
    assert kinds(ledger) == ["request", "applied", "request"]


def test_a_key_that_is_forgotten_is_applied_each_time(ledger: Ledger) -> None:
    ledger.behave("charge", Mode(honours_keys=False))
    apply(ledger.url, "charge", "k1", 5)
    apply(ledger.url, "charge", "k1", 5)
    assert kinds(ledger) == ["request", "applied", "request", "applied"]


def test_it_refuses_then_loses_its_answer_then_fails_then_answers(ledger: Ledger) -> None:
    ledger.behave("charge", Mode(refuses=1, loses=1, fails=1))
    with pytest.raises(LedgerFailed):
        apply(ledger.url, "charge", "k1", 5)
    assert kinds(ledger) == ["request"]
    with pytest.raises(ConnectionError):
        apply(ledger.url, "charge", "k1", 5)
    assert kinds(ledger)[1:] == ["request", "applied"]
    with pytest.raises(LedgerFailed):
        apply(ledger.url, "charge", "k1", 5)
    assert apply(ledger.url, "charge", "k1", 5).startswith("charge-")
    assert kinds(ledger).count("applied") == 1


def test_a_slow_effect_whose_sender_gave_up_is_applied_all_the_same(ledger: Ledger) -> None:
    ledger.behave("charge", Mode(delay=0.2))
    with pytest.raises(TimeoutError):
        apply(ledger.url, "charge", "k1", 5, timeout=0.05)
    assert kinds(ledger) == ["request", "applied"]


def test_asking_applies_nothing(ledger: Ledger) -> None:
    ask(ledger.url, "look", "k1", 5)
    assert kinds(ledger) == ["request"]


def test_books_do_not_mix(ledger: Ledger) -> None:
    apply(ledger.book("a").url, "charge", "k1", 5)
    apply(ledger.book("b").url, "charge", "k1", 5)
    assert [len(ledger.book(name).entries()) for name in ("a", "b")] == [2, 2]
    assert ledger.entries() == []


def test_started_again_it_knows_what_it_has_applied(tmp_path: Path) -> None:
    with Ledger.start(tmp_path) as ledger:
        value = apply(ledger.url, "charge", "k1", 5)
    with Ledger.start(tmp_path) as ledger:
        assert apply(ledger.url, "charge", "k1", 9) == value
        assert kinds(ledger) == ["request", "applied", "request"]
