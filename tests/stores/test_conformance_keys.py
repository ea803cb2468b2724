"""What every store does with the keys of effects."""

from typing import Any

import pytest

from everstep.stores.protocol import (
    Accepted,
    Append,
    HoldRow,
    Needs,
    Post,
    Refused,
    RestartRun,
    StartRun,
    Verdict,
)
from everstep.stores.rows.keys import (
    EffectFilter,
    EffectRow,
    ForgetKeys,
    Forgotten,
    KeyChanges,
    KeyClaim,
    KeyEnd,
    KeyShare,
    KeyUndoing,
    KeyWait,
    SettleKey,
)
from everstep.stores.rows.transfer import Deleted, DeletePart
from tests.stores.kit import Harness, append_to, new_run

K = "invoice:7"


def claim(key: str = K, call: int = 1, **fields: Any) -> KeyClaim:
    return KeyClaim(
        **{"key": key, "call": call, "seq": 2, "step": "charge", "arguments": "d", "effect": "once", **fields}
    )


def keyed(harness: Harness, run: str, at: int = 10, status: str = "running", **changes: Any) -> Append:
    """Return an append of one event that changes keys, to a run that is started if need be."""
    row = harness.store.run(run) or harness.start(run, status="running")
    return append_to(row, status=status, at=at, keys=KeyChanges(**changes))


def take(harness: Harness, run: str, key: str = K, **fields: Any) -> Verdict:
    return harness.one(keyed(harness, run, claims=[claim(key, **fields)]))


def end(harness: Harness, run: str, key: str = K, call: int = 1, outcome: bytes | None = None) -> Verdict:
    digest = "h" if outcome is not None else ""
    return harness.one(keyed(harness, run, at=20, ends=[KeyEnd(claim(key, call), outcome, digest)]))


def undo(harness: Harness, run: str, then: Any = "undone", call: int = 1, **fields: Any) -> Verdict:
    return harness.one(keyed(harness, run, at=20, undoing=[KeyUndoing(K, call, then, **fields)]))


def share(harness: Harness, run: str, digest: str = "h", call: int = 4) -> Verdict:
    return harness.one(keyed(harness, run, at=20, shares=[KeyShare(K, call, digest)]))


def wait(harness: Harness, run: str, key: str = K, call: int = 1) -> Verdict:
    return harness.one(keyed(harness, run, waits=[KeyWait(key, call)]))


def effect(harness: Harness, key: str = K) -> EffectRow:
    row = harness.store.effect(key)
    assert row is not None
    return row


def told(harness: Harness, run: str) -> list[tuple[str, str]]:
    """Return what a run's inbox has about keys."""
    return [(one.name, one.id) for one in harness.store.inbox(run) if one.kind == "key"]


# -- claims ---------------------------------------------------------------------------------------------------------
def test_a_claimed_key_has_its_owner(harness: Harness) -> None:
    append = keyed(harness, "a", at=9, claims=[claim(call=4, seq=5, arguments="x", effect="repeat")])
    assert harness.one(append) == Accepted()
    assert harness.store.effect(K) == EffectRow(
        key=K,
        state="under-way",
        run="a",
        generation=1,
        call=4,
        seq=5,
        step="charge",
        effect="repeat",
        arguments="x",
        begun_at=9,
        changed_at=9,
    )
    assert harness.store.effect("another") is None


def test_a_key_that_another_step_has_refuses_the_append_and_changes_nothing(harness: Harness) -> None:
    take(harness, "a")
    before = harness.start("b", status="running")
    append = keyed(harness, "b", claims=[claim("free", 1), claim(K, 2), claim("also free", 3)])
    assert harness.one(append) == Refused("key", (2,))
    assert harness.row("b") == before
    assert len(harness.store.events("b", 1)) == 1
    assert harness.store.effect("free") is None
    assert harness.one(keyed(harness, "b", claims=[claim("free", 1)])) == Accepted()


def test_of_two_claims_in_one_batch_the_first_wins_and_the_second_spoils_nothing(harness: Harness) -> None:
    for run in "abcd":
        harness.start(run, status="running")
    batch = [keyed(harness, run, claims=[claim()]) for run in "ab"]
    others = [append_to(harness.row(run)) for run in "cd"]
    verdicts = harness.do(others[0], batch[0], batch[1], others[1])
    assert verdicts == [Accepted(), Accepted(), Refused("key", (1,)), Accepted()]
    assert effect(harness).run == "a"
    assert [harness.row(run).head_seq for run in "abcd"] == [2, 1, 2, 2]


def test_one_append_cannot_have_one_key_twice(harness: Harness) -> None:
    assert harness.one(keyed(harness, "a", claims=[claim(K, 1), claim(K, 2)])) == Refused("key", (2,))
    assert harness.store.effect(K) is None


def test_whoever_has_a_key_may_claim_it_again(harness: Harness) -> None:
    take(harness, "a", seq=2)
    assert harness.one(keyed(harness, "a", at=30, claims=[claim(seq=9)])) == Accepted()
    row = effect(harness)
    assert (row.seq, row.begun_at, row.changed_at) == (9, 10, 30)
    assert take(harness, "a", call=2) == Refused("key", (2,)), "another call of the same run is another step"


def test_a_fenced_append_claims_nothing(harness: Harness) -> None:
    append = keyed(harness, "a", claims=[claim()])
    append.epoch += 1
    assert harness.one(append) == Refused("fenced")
    append = keyed(harness, "a", claims=[claim()])
    append.expected_digest = b"other"
    assert harness.one(append) == Refused("head")
    assert harness.store.effect(K) is None


def test_a_fenced_append_ends_nothing(harness: Harness) -> None:
    take(harness, "a")
    append = keyed(harness, "a", ends=[KeyEnd(claim(), b"1", "h")])
    append.epoch += 1
    assert harness.one(append) == Refused("fenced")
    assert effect(harness).state == "under-way"


# -- ends -----------------------------------------------------------------------------------------------------------
def test_an_outcome_stays_under_the_key(harness: Harness) -> None:
    take(harness, "a")
    assert end(harness, "a", outcome=b"\x00\xff") == Accepted()
    row = effect(harness)
    assert (row.state, row.outcome, row.digest, row.begun_at, row.changed_at) == ("done", b"\x00\xff", "h", 10, 20)
    assert take(harness, "b") == Refused("key", (1,))
    assert take(harness, "a") == Refused("key", (1,)), "what is done is not begun again, not even by its owner"


def test_without_an_outcome_the_key_is_free_and_leaves_nothing_behind(harness: Harness) -> None:
    take(harness, "a")
    end(harness, "a")
    assert harness.store.effect(K) is None
    assert take(harness, "b") == Accepted()


@pytest.mark.parametrize("outcome", [None, b"1"])
def test_the_end_of_a_step_that_does_not_have_the_key_changes_nothing(harness: Harness, outcome: bytes | None) -> None:
    take(harness, "a")
    before = effect(harness)
    assert end(harness, "b", outcome=outcome) == Accepted()
    assert end(harness, "a", call=2, outcome=outcome) == Accepted()
    assert effect(harness) == before
    end(harness, "a", outcome=b"2")
    before = effect(harness)
    end(harness, "a", outcome=outcome)
    assert effect(harness) == before, "what is done has one outcome"


def test_an_outcome_is_kept_if_nobody_has_the_key_any_more(harness: Harness) -> None:
    end(harness, "a", outcome=b"1")
    row = effect(harness)
    assert (row.state, row.run, row.step, row.arguments, row.outcome) == ("done", "a", "charge", "d", b"1")


def test_a_claim_and_its_end_in_one_append(harness: Harness) -> None:
    harness.one(keyed(harness, "a", claims=[claim()], ends=[KeyEnd(claim())]))
    assert harness.store.effect(K) is None


def test_what_was_undone_may_be_done_again_in_another_round(harness: Harness) -> None:
    take(harness, "a")
    undo(harness, "a")
    assert effect(harness).state == "under-way", "what was not done cannot be undone"
    end(harness, "a", outcome=b"1")
    undo(harness, "a")
    row = effect(harness)
    assert (row.state, row.round, row.outcome) == ("free", 1, None)
    assert take(harness, "b") == Refused("key", (1,)), "of the round before"
    assert take(harness, "b", round=1) == Accepted()
    assert (effect(harness).run, effect(harness).round) == ("b", 1)
    end(harness, "b")
    assert (effect(harness).state, effect(harness).round) == ("free", 1), "the round is kept"
    assert take(harness, "a", call=3, round=1) == Accepted()
    assert end(harness, "a", call=3, outcome=b"2") == Accepted()
    assert (effect(harness).state, effect(harness).round) == ("done", 1)


def test_a_later_generation_frees_the_key_of_a_step_that_an_older_one_did(harness: Harness) -> None:
    take(harness, "a")
    end(harness, "a", outcome=b"1")
    undo(harness, "a", call=-1, own_call=1, generation=7)
    assert effect(harness).state == "done", "another generation's step did it"
    undo(harness, "a", call=-1, own_call=1, generation=1)
    assert (effect(harness).state, effect(harness).round) == ("free", 1)


def test_while_a_key_is_being_undone_nobody_shares_its_outcome_or_takes_it(harness: Harness) -> None:
    take(harness, "a")
    assert share(harness, "b") == Refused("key", (4,)), "it is not done yet"
    undo(harness, "a", "begun")
    assert effect(harness).state == "under-way", "what was not done cannot be undone"
    end(harness, "a", outcome=b"1")
    assert share(harness, "b", digest="other") == Refused("key", (4,))
    assert share(harness, "b") == Accepted()
    assert undo(harness, "b", "begun") == Accepted()
    assert effect(harness).state == "done", "another run does not undo it"
    head = harness.row("b").head_seq
    undo(harness, "a", "begun")
    assert (effect(harness).state, effect(harness).outcome) == ("undoing", b"1")
    assert share(harness, "b") == Refused("key", (4,))
    assert take(harness, "b") == Refused("key", (1,))
    assert harness.row("b").head_seq == head, "a refused append changes nothing"
    wait(harness, "b", call=5)
    assert (told(harness, "b"), harness.store.waiters(K)) == ([], [("b", 5)])
    assert harness.one(ForgetKeys(10**9)) == Forgotten(0)
    for by_hand in (SettleKey(K, 50), SettleKey(K, 50, b"2", "h")):
        assert harness.one(by_hand) == Refused("key"), "its run may still undo it"
    assert harness.store.effects(EffectFilter(state="undoing")) == [effect(harness)]
    undo(harness, "a", "begun")
    assert (effect(harness).state, told(harness, "b")) == ("undoing", [])


@pytest.mark.parametrize("then", ["undone", "kept"])
def test_the_end_of_undoing_tells_who_waits(harness: Harness, then: str) -> None:
    take(harness, "a")
    end(harness, "a", outcome=b"1")
    undo(harness, "a", "begun")
    wait(harness, "b", call=5)
    undo(harness, "a", then)
    assert told(harness, "b") == [(K, "5")]
    row = effect(harness)
    if then == "kept":
        assert (row.state, row.round, row.outcome) == ("done", 0, b"1")
        assert share(harness, "b") == Accepted()
    else:
        assert (row.state, row.round, row.outcome) == ("free", 1, None)
        assert share(harness, "b") == Refused("key", (4,))
        assert take(harness, "b", round=1) == Accepted()


@pytest.mark.parametrize("outcome", [None, b"2"])
def test_a_key_whose_run_ended_while_it_was_being_undone_waits_for_a_person(
    harness: Harness, outcome: bytes | None
) -> None:
    take(harness, "a")
    end(harness, "a", outcome=b"1")
    undo(harness, "a", "begun")
    wait(harness, "b", call=5)
    harness.one(keyed(harness, "a", status="cancelled"))
    assert (effect(harness).state, told(harness, "b")) == ("undoing", [])
    assert harness.one(SettleKey(K, 50, outcome, "h" if outcome else "")) == Accepted()
    row = effect(harness)
    assert (row.state, row.round) == (("free", 1) if outcome is None else ("done", 0))
    assert told(harness, "b") == [(K, "5")]


def test_a_step_of_an_older_generation_is_the_newest_one_s_while_that_undoes_it(harness: Harness) -> None:
    carried = {"call": -1, "own_call": 1, "generation": 1}
    take(harness, "a")
    end(harness, "a", outcome=b"1")
    undo(harness, "a", "begun", call=-1, own_call=1, generation=7)
    assert effect(harness).state == "done"
    for then, place in (("begun", (1, -1)), ("kept", (1, 1)), ("begun", (1, -1))):
        undo(harness, "a", then, **carried)
        assert (effect(harness).generation, effect(harness).call) == place
    undo(harness, "a", "undone", **carried)
    assert (effect(harness).state, effect(harness).round) == ("free", 1)


def test_done_and_undoing_in_one_append(harness: Harness) -> None:
    """A step completes and its code fails in one turn: its outcome is never shared."""
    take(harness, "a")
    wait(harness, "b", call=5)
    harness.one(keyed(harness, "a", ends=[KeyEnd(claim(), b"1", "h")], undoing=[KeyUndoing(K, 1, "begun")]))
    assert effect(harness).state == "undoing"
    assert share(harness, "b") == Refused("key", (4,))


def test_a_key_without_a_row_is_of_no_round(harness: Harness) -> None:
    assert take(harness, "a", round=1) == Refused("key", (1,))


# -- waiting --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("outcome", [None, b"1"])
def test_whoever_waits_is_told_once_when_the_key_changes(harness: Harness, outcome: bytes | None) -> None:
    take(harness, "a")
    for run, call in (("c", 9), ("b", 5), ("b", 3)):
        wait(harness, run, call=call)
        wait(harness, run, call=call)
    assert harness.store.waiters(K) == [("b", 3), ("b", 5), ("c", 9)]
    assert told(harness, "b") == []
    end(harness, "a", outcome=outcome)
    assert told(harness, "b") == [(K, "3"), (K, "5")]
    assert told(harness, "c") == [(K, "9")]
    assert harness.store.waiters(K) == []
    (first, *_) = harness.store.inbox("b")
    assert (first.value, first.at, first.state) == (b"", 20, "pending")
    end(harness, "a", outcome=outcome)
    assert told(harness, "c") == [(K, "9")]


@pytest.mark.parametrize("state", ["nobody's", "done", "free"])
def test_whoever_would_wait_for_a_key_that_is_not_under_way_is_told_at_once(harness: Harness, state: str) -> None:
    if state != "nobody's":
        take(harness, "a")
        end(harness, "a", outcome=b"1")
    if state == "free":
        undo(harness, "a")
    wait(harness, "b", call=2)
    assert told(harness, "b") == [(K, "2")]
    assert harness.store.waiters(K) == []


def test_a_step_may_wait_for_a_key_of_its_own_run(harness: Harness) -> None:
    harness.one(keyed(harness, "a", claims=[claim()], waits=[KeyWait(K, 2)]))
    assert harness.store.waiters(K) == [("a", 2)]
    end(harness, "a", outcome=b"1")
    assert told(harness, "a") == [(K, "2")]


def test_a_run_that_has_ended_is_not_told(harness: Harness) -> None:
    take(harness, "a")
    wait(harness, "b")
    harness.end("b", "cancelled")
    end(harness, "a", outcome=b"1")
    assert harness.store.signals("b") == []
    assert harness.store.waiters(K) == []


def test_waiting_while_ending_tells_nobody(harness: Harness) -> None:
    harness.one(keyed(harness, "a", status="failed", waits=[KeyWait(K, 1)]))
    assert harness.store.signals("a") == []


def test_a_waiting_run_that_was_told_is_due(harness: Harness) -> None:
    take(harness, "a")
    harness.one(keyed(harness, "b", status="waiting", waits=[KeyWait(K, 1)]))
    assert harness.due() == ["a"]
    end(harness, "a", outcome=b"1")
    assert "b" in harness.due()


def test_one_run_may_be_told_of_a_call_again_and_again(harness: Harness) -> None:
    for _ in range(3):
        wait(harness, "a")
    assert told(harness, "a") == [(K, "1")] * 3
    harness.one(append_to(harness.row("a"), consumed=[1, 2]))
    assert told(harness, "a") == [(K, "1")]


def test_within_a_batch_who_waits_and_ends_and_is_told_is_by_its_order(harness: Harness) -> None:
    """Also where many operations are done together."""
    take(harness, "a")
    wait(harness, "b")
    wait(harness, "c")
    ends = keyed(harness, "a", ends=[KeyEnd(claim(), b"1", "h")])
    first, last = append_to(harness.row("b"), status="completed"), append_to(harness.row("c"), status="completed")
    others = [append_to(harness.start(f"r{n}", status="running")) for n in range(5)]
    assert harness.do(*others, first, ends, last) == [Accepted()] * 8
    assert harness.store.signals("b") == []
    assert [one.state for one in harness.store.signals("c")] == ["undelivered"]


# -- ends of runs ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_the_end_of_a_run_frees_what_may_be_repeated_and_keeps_what_is_in_doubt(harness: Harness, status: str) -> None:
    claims = [claim("repeat", 1, effect="repeat"), claim("once", 2), claim("done", 3, effect="repeat")]
    harness.one(keyed(harness, "a", claims=[*claims, claim("atomic", 4, effect="atomic")]))
    end(harness, "a", "done", 3, b"1")
    wait(harness, "b", "repeat", 7)
    wait(harness, "b", "once", 8)
    assert harness.end("a", status) == Accepted()
    states = {key: row.state for key in ("repeat", "once", "done", "atomic") if (row := harness.store.effect(key))}
    assert states == {"once": "under-way", "done": "done", "atomic": "under-way"}
    assert told(harness, "b") == [("repeat", "7")]
    assert harness.store.waiters("once") == [("b", 8)]


def test_ends_of_many_runs_with_keys_in_one_batch(harness: Harness) -> None:
    for n in range(6):
        harness.one(keyed(harness, f"r{n}", claims=[claim(f"k{n}", effect="repeat" if n % 2 else "once")]))
    ends = [append_to(harness.row(f"r{n}"), status="completed") for n in range(6)]
    assert harness.do(*ends) == [Accepted()] * 6
    assert sorted(row.key for row in harness.store.effects(EffectFilter())) == ["k0", "k2", "k4"]


def test_a_claim_in_the_append_that_ends_its_run_is_free_at_once(harness: Harness) -> None:
    harness.one(keyed(harness, "a", status="completed", claims=[claim(effect="repeat")]))
    assert harness.store.effect(K) is None


def test_a_new_generation_is_another_owner_and_takes_over_what_the_same_step_left(harness: Harness) -> None:
    take(harness, "a")
    harness.end("a", "cancelled")
    harness.one(RestartRun(0, new_run("a", generation=2, status="running")))
    for other in (claim(step="refund"), claim(arguments="y")):
        assert harness.one(keyed(harness, "a", claims=[other])) == Refused("key", (1,))
    end(harness, "a", outcome=b"1")
    assert (effect(harness).state, effect(harness).generation) == ("under-way", 1)
    assert harness.one(keyed(harness, "b", claims=[claim()])) == Refused("key", (1,))
    assert harness.one(keyed(harness, "a", claims=[claim()])) == Accepted()
    assert (effect(harness).state, effect(harness).generation, effect(harness).round) == ("under-way", 2, 0)
    end(harness, "a", outcome=b"1")
    assert (effect(harness).state, effect(harness).outcome) == ("done", b"1")


def test_a_restart_gives_back_the_keys_of_what_may_be_repeated(harness: Harness) -> None:
    take(harness, "a", effect="repeat")
    hold = HoldRow(id="h", run="a", reason="damaged")
    harness.one(append_to(harness.row("a"), status="held", hold=hold))
    harness.one(keyed(harness, "b", waits=[KeyWait(K, 1)]))
    resolved = HoldRow(id="h", run="a", reason="damaged", resolved_at=9, resolution="restart")
    new = new_run("a", generation=2, status="running")
    assert harness.one(RestartRun(harness.row("a").epoch, new, resolved)) == Accepted()
    assert harness.store.effect(K) is None
    assert [one.kind for one in harness.store.inbox("b")] == ["key"]


def test_an_end_that_is_refused_frees_nothing(harness: Harness) -> None:
    take(harness, "a", effect="repeat")
    harness.one(Post("a", "cancel"))
    assert harness.end("a") == Refused("inbox")
    assert effect(harness).state == "under-way"


# -- by hand --------------------------------------------------------------------------------------------------------
def test_by_hand_nothing_is_decided_while_the_owner_may_settle_it(harness: Harness) -> None:
    take(harness, "a")
    for settle in (SettleKey(K, 50), SettleKey(K, 50, b"1", "h")):
        assert harness.one(settle) == Refused("key")
    assert harness.one(SettleKey("nobody's", 50)) == Refused("missing")
    assert effect(harness).state == "under-way"


def test_by_hand_what_an_ended_run_left_in_doubt_is_freed(harness: Harness) -> None:
    take(harness, "a")
    wait(harness, "b")
    harness.end("a", "cancelled")
    assert harness.one(SettleKey(K, 50, by="ann", note="asked the bank")) == Accepted()
    row = effect(harness)
    assert (row.state, row.round, row.by, row.note, row.changed_at) == ("free", 0, "ann", "asked the bank", 50)
    assert told(harness, "b") == [(K, "1")]
    assert harness.one(SettleKey(K, 51)) == Refused("missing"), "it is free"
    assert take(harness, "b") == Accepted(), "in the same round: the first may have reached its receiver"
    assert (effect(harness).by, effect(harness).note) == ("", "")


def test_by_hand_what_an_ended_run_left_in_doubt_is_given_an_outcome(harness: Harness) -> None:
    take(harness, "a")
    wait(harness, "b")
    harness.end("a", "failed")
    assert harness.one(SettleKey(K, 50, b"1", "h", "ann", "seen")) == Accepted()
    row = effect(harness)
    assert (row.state, row.outcome, row.digest, row.by, row.run) == ("done", b"1", "h", "ann", "a")
    assert told(harness, "b") == [(K, "1")]
    assert harness.one(SettleKey(K, 51, b"2", "h")) == Refused("key"), "it has an outcome"


def test_by_hand_what_an_earlier_generation_left_behind_is_decided(harness: Harness) -> None:
    take(harness, "a")
    harness.end("a", "cancelled")
    harness.one(RestartRun(0, new_run("a", generation=2, status="running")))
    assert harness.one(SettleKey(K, 50)) == Accepted()


def test_by_hand_what_is_done_is_freed_for_another_round(harness: Harness) -> None:
    take(harness, "a")
    end(harness, "a", outcome=b"1")
    assert harness.one(SettleKey(K, 50)) == Accepted()
    assert (effect(harness).state, effect(harness).round, effect(harness).outcome) == ("free", 1, None)


def test_deciding_by_hand_in_a_batch_with_others(harness: Harness) -> None:
    take(harness, "a")
    end(harness, "a", outcome=b"1")
    others = [append_to(harness.start(f"r{n}", status="running")) for n in range(3)]
    mine = keyed(harness, "b", claims=[claim(round=1)])
    assert harness.do(*others, SettleKey(K, 50), mine) == [Accepted()] * 5
    assert effect(harness).run == "b"


# -- keeping and forgetting -----------------------------------------------------------------------------------------
def test_old_keys_are_forgotten_but_none_that_is_under_way(harness: Harness) -> None:
    for n in range(4):
        harness.one(keyed(harness, f"r{n}", at=n, claims=[claim(f"k{n}")]))
    for n in (0, 1, 3):
        harness.one(keyed(harness, f"r{n}", at=10 + n, ends=[KeyEnd(claim(f"k{n}"), b"1", "h")]))
    assert harness.one(ForgetKeys(before=11)) == Forgotten(1)
    assert harness.one(ForgetKeys(before=99, limit=1)) == Forgotten(1)
    assert [row.key for row in harness.store.effects(EffectFilter())] == ["k3", "k2"]
    assert harness.one(ForgetKeys(before=99)) == Forgotten(1)
    assert harness.one(ForgetKeys(before=99)) == Forgotten(0)
    assert [row.key for row in harness.store.effects(EffectFilter())] == ["k2"]


def test_a_key_that_a_run_counts_on_is_not_forgotten_while_that_run_may_go_on(harness: Harness) -> None:
    for n in range(2):
        take(harness, "owner", f"k{n}", call=n + 1)
        end(harness, "owner", f"k{n}", n + 1, b"1")
    assert harness.one(keyed(harness, "user", relies=["k0", "none"])) == Refused("key")
    assert harness.one(keyed(harness, "user", relies=["k0"])) == Accepted()
    assert harness.one(StartRun(new_run("fork"), Needs(["owner"], ["k0", "k1"]))) == Accepted()
    assert (harness.store.old_keys(99), harness.one(ForgetKeys(before=99))) == (0, Forgotten(0))
    harness.end("fork", "cancelled")
    assert harness.one(ForgetKeys(before=99)) == Forgotten(1)
    harness.end("user", "failed")
    assert harness.one(ForgetKeys(before=99)) == Forgotten(0), "it may be retried"
    assert harness.one(DeletePart("user", harness.row("user").epoch, 9)) == Deleted(4, True)
    assert harness.one(ForgetKeys(before=99)) == Forgotten(1)
    take(harness, "owner", "k0")
    end(harness, "owner", "k0", outcome=b"1")
    assert harness.one(ForgetKeys(before=99)) == Forgotten(1), "who counted on it before does so no more"


def test_keys_are_listed_by_what_changed_last(harness: Harness) -> None:
    for n, (key, run) in enumerate([("mail:b", "a"), ("mail:a", "b"), ("pay:%", "b"), ("Mail:", "c"), ("mäil:☃", "c")]):
        harness.one(keyed(harness, run, at=n, claims=[claim(key, n + 1, step="send" if n % 2 else "charge")]))
    harness.one(keyed(harness, "a", at=30, ends=[KeyEnd(claim("mail:b", 1), b"1", "h")]))

    def listed(**wanted: Any) -> list[str]:
        return [row.key for row in harness.store.effects(EffectFilter(**wanted))]

    assert listed() == ["mail:b", "mäil:☃", "Mail:", "pay:%", "mail:a"]
    assert listed(limit=2, offset=1) == ["mäil:☃", "Mail:"]
    assert listed(prefix="mail:") == ["mail:b", "mail:a"]
    assert listed(prefix="mä") == ["mäil:☃"]
    assert listed(prefix="%") == []
    assert listed(run="b") == ["pay:%", "mail:a"]
    assert listed(step="send") == ["Mail:", "mail:a"]
    assert listed(state="done") == ["mail:b"]
    assert listed(state="under-way", run="c", step="charge") == ["mäil:☃"]


def test_a_store_has_random_bits_of_its_own(harness: Harness) -> None:
    assert len(bytes.fromhex(harness.store.entropy)) == 16


def test_keys_outlive_their_runs(harness: Harness) -> None:
    take(harness, "a")
    end(harness, "a", outcome=b"1")
    harness.end("a")
    harness.one(RestartRun(0, new_run("a", generation=2)))
    assert effect(harness).outcome == b"1"
