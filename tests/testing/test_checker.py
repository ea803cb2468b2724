"""A checker is only trusted while it catches every bug that is planted for it."""

import time
from collections.abc import Callable

import msgspec
import pytest

from everstep.model import events as ev
from everstep.model.budgets import Allotment, Amounts, Charge
from everstep.model.digests import shared_key
from everstep.model.forked import Forked
from everstep.stores.protocol import Delivery
from everstep.testing.checker import RULES, RunHistory, check
from everstep.testing.ledger import MODEL
from tests.testing.accounts import (
    KEY,
    START,
    Accounts,
    Line,
    entry,
    history,
    key_row,
    owner,
    paid,
    raw,
    sharer,
)


def planted(rule: str) -> Callable[[Callable[[Accounts], None]], Callable[[Accounts], None]]:
    """Mark a function that plants a bug, with the rule that names it."""

    def mark(function: Callable[[Accounts], None]) -> Callable[[Accounts], None]:
        BUGS.append((rule, function))
        return function

    return mark


BUGS: list[tuple[str, Callable[[Accounts], None]]] = []


def cut(accounts: Accounts, end: int, *more: Line) -> None:
    """Let the parent's history end early, with other events, as nobody else has seen it."""
    accounts.parent[end:] = more
    accounts.earlier.clear()


@planted("L1")
def an_acknowledged_start_is_missing(accounts: Accounts) -> None:
    accounts.journal.append({"verb": "start", "run": "lost", "state": "acknowledged", "pid": 1})


@planted("L1")
def a_started_run_is_never_driven(accounts: Accounts) -> None:
    accounts.more.append(history("idle", accounts.child[:1], status="queued"))
    accounts.journal.append({"verb": "start", "run": "idle", "state": "acknowledged", "pid": 1})


@planted("L1")
def a_child_is_recorded_and_not_in_the_store(accounts: Accounts) -> None:
    accounts.drop_child = True


@planted("L2")
def an_acknowledged_signal_is_gone(accounts: Accounts) -> None:
    del accounts.signals[0]


@planted("L2")
def a_signal_is_marked_consumed_without_an_event(accounts: Accounts) -> None:
    accounts.signals.append(Delivery(3, "order", "signal", "word", "w2", b"", START, "consumed"))


@planted("L2")
def an_ended_run_leaves_a_signal_pending(accounts: Accounts) -> None:
    accounts.signals.append(Delivery(3, "order", "signal", "word", "w2", b"", START, "pending"))


@planted("L3")
def a_step_runs_again_after_its_outcome(accounts: Accounts) -> None:
    accounts.parent.insert(7, ("step_started", "charge", 40, ev.StepStarted(2, "bb", attempt=3, because="crash")))


@planted("L3")
def the_ledger_is_asked_again_after_the_outcome(accounts: Accounts) -> None:
    accounts.ledger.append(entry("request", "order", "charge", 900))


@planted("L3")
def attempts_are_counted_from_one_again(accounts: Accounts) -> None:
    accounts.parent[5] = ("step_started", "charge", 31, ev.StepStarted(2, "bb", attempt=1))


@planted("L3")
def an_attempt_is_skipped(accounts: Accounts) -> None:
    accounts.parent[5] = ("step_started", "charge", 31, ev.StepStarted(2, "bb", attempt=3, because="retry"))


@planted("L3")
def a_parent_is_told_another_end_than_its_child_had(accounts: Accounts) -> None:
    accounts.parent[11] = ("child_ended", "", 70, ev.ChildEnded(4, "order.4", "failed", 2, raw('["p"]')))


@planted("L3")
def a_result_is_given_away_before_the_end_is_durable(accounts: Accounts) -> None:
    cut(accounts, 13)
    accounts.journal = [line for line in accounts.journal if line["verb"] != "append"]


def moved(accounts: Accounts, *moves: ev.GraphMoved) -> None:
    """Let the parent be a run of a graph that has moved so."""
    nodes = {"a": {"kind": "code"}, "b": {"kind": "code"}}
    started = ev.GraphStarted(1, "g", nodes, [["<start>", "a"], ["a", "b"]])
    lines: list[Line] = [("graph_started", "", START, started)]
    lines += [("graph_moved", "", START, move) for move in moves]
    cut(accounts, 1, *lines, accounts.parent[-1])
    accounts.journal.clear()
    accounts.signals.clear()
    accounts.drop_child = True


@planted("G1")
def a_node_begins_twice(accounts: Accounts) -> None:
    moved(accounts, ev.GraphMoved(2, "", begins=["a"]), ev.GraphMoved(3, "a", begins=["a"]), ev.GraphMoved(4, "a"))


@planted("G1")
def a_node_finishes_that_had_not_begun(accounts: Accounts) -> None:
    moved(accounts, ev.GraphMoved(2, "", begins=["a"]), ev.GraphMoved(3, "a"), ev.GraphMoved(4, "b"))


@planted("G1")
def a_queued_node_is_forgotten(accounts: Accounts) -> None:
    moved(accounts, ev.GraphMoved(2, "", begins=["a"], queued=["b"]), ev.GraphMoved(3, "a"))


@planted("L4")
def a_timer_fires_early(accounts: Accounts) -> None:
    accounts.parent[8] = ("timer_fired", "", 60, ev.TimerFired(3))


@planted("L4")
def a_timer_fires_twice(accounts: Accounts) -> None:
    accounts.parent.insert(9, ("timer_fired", "", 62, ev.TimerFired(3)))


@planted("L4")
def a_back_off_is_cut_short_by_a_crash(accounts: Accounts) -> None:
    accounts.parent[5] = ("step_started", "charge", 25, ev.StepStarted(2, "bb", attempt=2, because="crash"))


@planted("L4")
def a_timer_never_fires(accounts: Accounts) -> None:
    accounts.more.append(history("asleep", accounts.child[:1], wake_at=START))
    accounts.now = START + 60_000_000


@planted("L5")
def an_event_that_was_durable_has_changed(accounts: Accounts) -> None:
    accounts.parent[2] = ("step_completed", "look", 9, ev.StepCompleted(1, raw('["other"]')))


@planted("L5")
def the_tail_of_a_history_is_gone(accounts: Accounts) -> None:
    accounts.earlier.append(history("order", [*accounts.parent, accounts.parent[-1]]))


@planted("L5")
def a_whole_run_is_gone(accounts: Accounts) -> None:
    accounts.earlier.append(history("gone", accounts.child))


@planted("L5")
def the_row_names_another_head(accounts: Accounts) -> None:
    accounts.row["head_seq"] = 13


@planted("L5")
def time_goes_backwards(accounts: Accounts) -> None:
    accounts.parent[12] = ("signal_awaited", "", 50, ev.SignalAwaited(5, "word", "str"))


@planted("D1")
def a_run_has_two_ends(accounts: Accounts) -> None:
    accounts.parent.append(("run_completed", "", 73, ev.RunCompleted(raw('["again"]'))))


@planted("D1")
def two_callers_get_different_results(accounts: Accounts) -> None:
    accounts.journal[-1]["value"] = "other"


@planted("D1")
def the_row_does_not_know_the_end(accounts: Accounts) -> None:
    accounts.row["status"] = "running"


@planted("D2")
def a_step_has_two_outcomes(accounts: Accounts) -> None:
    accounts.parent.insert(7, ("step_completed", "charge", 40, ev.StepCompleted(2, raw('["y"]'), attempt=2)))


@planted("D2")
def a_child_ends_twice(accounts: Accounts) -> None:
    accounts.parent.insert(12, ("child_ended", "", 70, ev.ChildEnded(4, "order.4", "completed", 0, raw('["p"]'))))


@planted("D3")
def an_effect_is_applied_twice(accounts: Accounts) -> None:
    accounts.ledger.append(entry("applied", "order", "charge", 34))


@planted("D3")
def an_atomic_step_is_applied_by_two_attempts(accounts: Accounts) -> None:
    accounts.child[1] = ("step_started", "pack", 64, ev.StepStarted(1, "dd", "atomic"))
    accounts.ledger.append(entry("applied", "order.4", "pack", 67))


@planted("D3")
def a_failed_atomic_step_has_happened(accounts: Accounts) -> None:
    accounts.child[1] = ("step_started", "pack", 64, ev.StepStarted(1, "dd", "atomic"))
    accounts.child[2] = ("step_failed", "pack", 68, ev.StepFailed(1))


@planted("D3")
def a_completed_step_was_never_applied(accounts: Accounts) -> None:
    del accounts.ledger[2]


@planted("D3")
def a_completed_read_was_never_made(accounts: Accounts) -> None:
    accounts.ledger[0] = entry("request", "order", "look#2", 5)


@planted("D3")
def an_effect_has_begun_before_its_intent_was_durable(accounts: Accounts) -> None:
    cut(accounts, 3)
    accounts.journal.clear()
    accounts.signals.clear()
    accounts.settled, accounts.drop_child = False, True


def renamed(accounts: Accounts) -> Accounts:
    """Let the ledger know what `charge` and `look` do by other names."""
    for one in accounts.ledger:
        one["effect"] = {"charge": "payment", "look": MODEL}.get(one["effect"], one["effect"])
    return accounts


@planted("D3")
def an_effect_of_another_name_is_applied_twice(accounts: Accounts) -> None:
    accounts.ledger.append(entry("applied", "order", "charge", 34))
    renamed(accounts)


@planted("D4")
def a_signal_is_consumed_twice(accounts: Accounts) -> None:
    accounts.parent.insert(11, ("signal_received", "", 64, ev.SignalReceived(1, "word", raw('["z"]'))))


@planted("D4")
def a_signal_sent_twice_with_one_id_is_delivered_twice(accounts: Accounts) -> None:
    accounts.signals.append(Delivery(3, "order", "signal", "word", "w1", b"", START, "consumed"))
    accounts.parent.insert(11, ("signal_received", "", 64, ev.SignalReceived(3, "word", raw('["z"]'), id="w1")))


@planted("D4")
def a_signal_is_taken_and_stays_pending(accounts: Accounts) -> None:
    accounts.signals[0].state = "pending"


@planted("D5")
def a_fenced_process_writes(accounts: Accounts) -> None:
    accounts.journal[5]["epoch"] = 1
    accounts.journal[3]["epoch"] = 2


@planted("D5")
def an_epoch_has_two_owners(accounts: Accounts) -> None:
    accounts.journal[4]["epoch"] = 1


@planted("D5")
def two_processes_write_in_one_epoch(accounts: Accounts) -> None:
    accounts.journal[5] |= {"epoch": 1, "pid": 2}


@planted("D5")
def one_event_is_written_twice(accounts: Accounts) -> None:
    accounts.journal[5]["first"] = 8


@planted("D5")
def an_epoch_goes_down(accounts: Accounts) -> None:
    accounts.earlier[0].row.epoch = 3


@planted("D6")
def one_id_has_two_runs(accounts: Accounts) -> None:
    accounts.more.append(history("order.4", accounts.child, epoch=1))


@planted("D6")
def a_history_begins_twice(accounts: Accounts) -> None:
    accounts.parent.insert(8, (*accounts.parent[0][:2], 41, *accounts.parent[0][3:]))


@planted("D7")
def the_key_changes_with_the_attempt(accounts: Accounts) -> None:
    accounts.ledger[3] = {**accounts.ledger[3], "key": accounts.ledger[0]["key"]}


@planted("D7")
def the_arguments_change_with_the_attempt(accounts: Accounts) -> None:
    accounts.ledger[3] = {**accounts.ledger[3], "digest": "8"}


@planted("D7")
def the_recorded_arguments_change_with_the_attempt(accounts: Accounts) -> None:
    accounts.parent[5] = ("step_started", "charge", 31, ev.StepStarted(2, "ee", attempt=2, because="retry"))


@planted("R1")
def an_outcome_stands_before_its_command(accounts: Accounts) -> None:
    accounts.parent[1], accounts.parent[2] = accounts.parent[2], accounts.parent[1]


@planted("R1")
def a_command_is_missing(accounts: Accounts) -> None:
    accounts.parent[12] = ("signal_awaited", "", 71, ev.SignalAwaited(6, "word", "str"))


@planted("D8")
def two_runs_have_one_key(accounts: Accounts) -> None:
    accounts.more += [owner("a", keys=[key_row("a")]), owner("b", keys=[key_row("b")])]


@planted("D8")
def an_action_was_done_twice_under_one_key(accounts: Accounts) -> None:
    accounts.more += [owner("a", paid(), keys=[key_row("a", "done")]), owner("b", paid())]


@planted("D8")
def what_is_done_is_begun_again(accounts: Accounts) -> None:
    accounts.more += [owner("a", paid(), keys=[key_row("a", "done")]), owner("b", keys=[key_row("b")])]


@planted("D8")
def a_step_is_begun_without_its_key(accounts: Accounts) -> None:
    accounts.more.append(owner("a"))


@planted("D8")
def the_key_of_a_failed_step_is_not_free(accounts: Accounts) -> None:
    accounts.more.append(owner("a", ("step_failed", "pay", 5, ev.StepFailed(1)), keys=[key_row("a")]))


@planted("D8")
def the_key_of_a_repeatable_step_is_not_free_when_its_run_has_ended(accounts: Accounts) -> None:
    end: Line = ("run_cancelled", "", 9, ev.RunCancelled())
    accounts.more.append(owner("a", end, effect="repeat", keys=[key_row("a", effect="repeat")]))


@planted("D8")
def the_table_has_an_outcome_that_no_history_has(accounts: Accounts) -> None:
    accounts.more.append(owner("a", keys=[key_row("a", "done")]))


@planted("D8")
def a_step_shares_what_nobody_did(accounts: Accounts) -> None:
    accounts.more += [owner("a", keys=[key_row("a")]), sharer("b", "a")]


@planted("D8")
def a_step_shares_another_outcome(accounts: Accounts) -> None:
    accounts.more += [owner("a", paid(), keys=[key_row("a", "done")]), sharer("b", "a", '["q"]')]


@planted("D8")
def a_step_shares_although_it_has_the_key_itself(accounts: Accounts) -> None:
    shared: Line = ("step_shared", "pay", 6, ev.StepShared(1, raw('["p"]'), run="gone", seq=2))
    accounts.more.append(owner("a", shared))


@planted("D8")
def a_step_that_waits_for_its_key_is_completed(accounts: Accounts) -> None:
    made = sharer("b", "gone")
    lines: list[Line] = [(e.kind, e.step, 0, ev.decode_body(e.kind, e.body)) for e in made.events[:2]]
    accounts.more.append(history("b", [*lines, ("step_completed", "pay", 5, ev.StepCompleted(1, attempt=0))]))


@planted("D3")
def an_action_is_applied_twice_under_one_key(accounts: Accounts) -> None:
    failed: Line = ("step_failed", "pay", 5, ev.StepFailed(1))
    accounts.more += [owner("a", failed), owner("b", paid(), keys=[key_row("b", "done")])]
    key = shared_key("0e" * 16, KEY, "pay", "ee", 0)
    for kind in ("request", "applied", "request", "applied"):
        accounts.ledger.append({**entry(kind, "order", "charge", 3), "effect": "pay", "key": key})


@planted("S1")
def a_step_that_failed_is_compensated(accounts: Accounts) -> None:
    accounts.saga[7] = ("compensation_started", "", 7, ev.CompensationStarted(4, "failure", [3, 1, 2], cause=3))


@planted("S1")
def a_step_that_was_skipped_is_compensated(accounts: Accounts) -> None:
    accounts.saga[4] = ("step_completed", "fly", 4, ev.StepCompleted(1, skipped=True))


@planted("S1")
def a_step_is_compensated_twice(accounts: Accounts) -> None:
    accounts.saga[12:12] = [
        ("step_started", "unfly", 12, ev.StepStarted(7, "a4", compensates=1)),
        ("step_completed", "unfly", 12, ev.StepCompleted(7)),
    ]


@planted("S1")
def compensation_begins_with_what_is_compensated(accounts: Accounts) -> None:
    accounts.saga[12:12] = [("compensation_started", "", 12, ev.CompensationStarted(7, "rollback", [1]))]


@planted("S2")
def compensations_run_in_the_order_of_completion(accounts: Accounts) -> None:
    accounts.saga[7] = ("compensation_started", "", 7, ev.CompensationStarted(4, "failure", [2, 1], cause=3))
    accounts.saga[8], accounts.saga[10] = (
        ("step_started", "unsleep", 8, ev.StepStarted(5, "a5", compensates=2)),
        ("step_started", "unfly", 10, ev.StepStarted(6, "a4", compensates=1)),
    )


@planted("S2")
def compensations_run_in_another_order_than_planned(accounts: Accounts) -> None:
    accounts.saga[8], accounts.saga[10] = (
        ("step_started", "unsleep", 8, ev.StepStarted(5, "a5", compensates=2)),
        ("step_started", "unfly", 10, ev.StepStarted(6, "a4", compensates=1)),
    )


@planted("S2")
def the_code_goes_on_while_it_is_undone(accounts: Accounts) -> None:
    accounts.saga[12:12] = [("step_started", "drive#2", 12, ev.StepStarted(7, "a3"))]


@planted("S2")
def a_compensated_run_is_retried(accounts: Accounts) -> None:
    accounts.saga.append(("run_retried", "", 30, ev.RunRetried(7, "0c" * 16, 3)))


@planted("S3")
def a_compensation_is_lost(accounts: Accounts) -> None:
    del accounts.saga[10:12]


@planted("S3")
def a_run_fails_and_compensates_nothing(accounts: Accounts) -> None:
    del accounts.saga[7:12]


@planted("S3")
def a_rollback_leaves_something_out(accounts: Accounts) -> None:
    accounts.saga[12] = ("run_cancelled", "", 12, ev.RunCancelled(rolled_back=True))
    del accounts.saga[10:12]


def test_a_run_that_was_cancelled_may_leave_compensations_for_a_rollback() -> None:
    accounts = Accounts()
    given_up: list[Line] = [
        *accounts.saga[:10],
        ("run_cancelled", "", 12, ev.RunCancelled(forced=True)),
        ("rollback_requested", "", 20, ev.RollbackRequested()),
        ("compensation_started", "", 21, ev.CompensationStarted(6, "rollback", [2], forced=True)),
        ("step_started", "unsleep", 22, ev.StepStarted(7, "a5", compensates=2)),
        ("step_completed", "unsleep", 23, ev.StepCompleted(7)),
        ("run_cancelled", "", 24, ev.RunCancelled(rolled_back=True)),
    ]
    accounts.saga = given_up
    assert accounts.check() == []


def with_budgets(accounts: Accounts, limit: int = 100, allotted: int = 50, used: int = 30) -> None:
    """Let the parent have a budget, of which the child was allotted something and used some."""
    given = Allotment(allotted, by="order")
    accounts.parent[0][3].budget = Allotment(limit)  # type: ignore[attr-defined]
    accounts.parent[3][3].cost = accounts.parent[5][3].cost = Charge(20)  # type: ignore[attr-defined]
    accounts.parent[9][3].allotted = given  # type: ignore[attr-defined]
    accounts.parent[11][3].used = Amounts(used, steps=1)  # type: ignore[attr-defined]
    accounts.child[0][3].budget = given  # type: ignore[attr-defined]
    accounts.child[1][3].cost = Charge(40)  # type: ignore[attr-defined]
    accounts.child[2][3].charged = Charge(30)  # type: ignore[attr-defined]


@planted("B1")
def a_step_begins_for_which_there_is_no_room(accounts: Accounts) -> None:
    with_budgets(accounts, limit=15)


@planted("B1")
def a_failed_attempt_is_not_counted(accounts: Accounts) -> None:
    with_budgets(accounts, limit=39)


@planted("B1")
def a_child_begins_a_step_beyond_its_allotment(accounts: Accounts) -> None:
    with_budgets(accounts, allotted=39)


@planted("B2")
def a_child_has_more_than_it_was_allotted(accounts: Accounts) -> None:
    with_budgets(accounts)
    accounts.child[0][3].budget = Allotment(60, by="order")  # type: ignore[attr-defined]


@planted("B2")
def a_parent_is_told_less_than_its_child_used(accounts: Accounts) -> None:
    with_budgets(accounts, used=29)


def test_accounts_that_agree_break_no_rule() -> None:
    assert Accounts().check() == []
    accounts = Accounts()
    with_budgets(accounts)
    accounts.earlier.clear()  # of a run without a budget
    assert accounts.check() == []


@pytest.mark.parametrize(("rule", "plant"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_bug_is_caught_by_its_rule(rule: str, plant: Callable[[Accounts], None]) -> None:
    accounts = Accounts()
    plant(accounts)
    assert rule in {violation.rule for violation in accounts.check()}


def test_an_effect_is_known_by_its_steps_key_whatever_its_name_and_a_model_call_is_no_second_effect() -> None:
    accounts = renamed(Accounts())
    accounts.ledger.append({**entry("request", "order", "charge", 12), "effect": MODEL, "digest": "other"})
    assert accounts.check() == []


def test_one_key_in_many_runs_is_sound() -> None:
    failed: Line = ("step_failed", "pay", 5, ev.StepFailed(1))
    fallen_back = paid(fallback=True)
    histories = [
        owner("failed", failed),
        owner("fallen back", fallen_back),
        owner("stopped", ("run_cancelled", "", 9, ev.RunCancelled()), effect="repeat"),
        owner("done", paid(), keys=[key_row("done", "done")]),
        sharer("shares", "done"),
        sharer("shares with one that was deleted", "gone"),
        sharer("was told by a person", "failed", by="ann"),
    ]
    key = shared_key("0e" * 16, KEY, "pay", "ee", 0)
    ledger = [{**entry(kind, "order", "charge", 3), "effect": "pay", "key": key} for kind in ("request", "applied")]
    assert check(histories, ledger=[*ledger, ledger[0]]) == []
    in_doubt = owner("in doubt", ("run_cancelled", "", 9, ev.RunCancelled()), keys=[key_row("in doubt")])
    assert check([in_doubt]) == []
    lines: list[Line] = [("run_started", "", 0, ev.RunStarted("pay", "", 1, "3.11", "0d" * 16))]
    lines.append(("key_taken", "pay", 1, ev.KeyTaken(1, KEY, "ee", "once", run="failed", seq=2)))
    lines.append(("key_taken", "pay", 3, ev.KeyTaken(1, KEY, "ee", "once", again=True)))
    lines.append(("step_started", "pay", 4, ev.StepStarted(1, "ee", "once", because="freed", key=KEY)))
    lines.append(("attempt_failed", "pay", 5, ev.AttemptFailed(1, 1, START)))
    lines.append(("step_started", "pay", 5, ev.StepStarted(1, "ee", "once", attempt=2, because="retry", key=KEY)))
    lines.append(paid(attempt=2))
    assert check([history("waited", lines)]) == []


def forked_from_order(accounts: Accounts, **changes: object) -> None:
    """Add a run that was forked from the parent at its fifth event."""
    source = accounts.histories()[0]
    origin = Forked("order", 1, 5, source.events[4].digest.hex(), START + 900, "0f" * 16)
    started = msgspec.structs.replace(accounts.parent[0][3], forked=msgspec.structs.replace(origin, **changes))
    lines = [("run_started", *accounts.parent[0][1:3], started), *accounts.parent[1:5]]
    accounts.more.append(history("fork", lines, status="queued"))


@planted("F1")
def a_fork_begins_with_something_else(accounts: Accounts) -> None:
    forked_from_order(accounts)
    fork = accounts.more[-1]
    body = ev.encode_body(ev.StepStarted(1, "zz"))
    fork.events[1] = fork.events[1]._replace(body=body)  # type: ignore[index]


@planted("F1")
def a_fork_names_an_event_that_is_not_there(accounts: Accounts) -> None:
    forked_from_order(accounts, head="00" * 16)


def test_a_fork_that_is_what_it_says_is_sound() -> None:
    accounts = Accounts()
    forked_from_order(accounts)
    assert accounts.check() == []


def test_every_rule_has_a_planted_bug() -> None:
    assert {rule for rule, _ in BUGS} == set(RULES)
    assert len(BUGS) >= 25


@pytest.mark.parametrize("change", ["body", "digest", "seq"])
def test_a_damaged_event_is_found(change: str) -> None:
    sound = Accounts().histories()[0]
    values = {"body": b"{}", "digest": b"\0" * 16, "seq": 99}
    events = list(sound.events)
    events[4] = events[4]._replace(**{change: values[change]})
    found = check([RunHistory(sound.row, 1, events, sound.signals), *Accounts().histories()[1:]])
    assert ("L5", 99 if change == "seq" else 5) in {(violation.rule, violation.seq) for violation in found}


def test_a_violation_names_its_rule_run_and_event() -> None:
    accounts = Accounts()
    a_timer_fires_early(accounts)
    assert [str(one) for one in accounts.check()] == ["L4 order event 9: timer_fired fires 1000 microseconds early"]


def test_a_stopped_process_that_wakes_may_ask_late() -> None:
    accounts = Accounts()
    the_ledger_is_asked_again_after_the_outcome(accounts)
    assert check(accounts.histories(), ledger=accounts.ledger, faults=["zombie"]) == []


def test_a_retried_run_ends_a_second_time_and_gives_its_calls_numbers_again() -> None:
    def failing(call: int) -> list[Line]:
        return [
            ("step_started", "charge", 10, ev.StepStarted(call, "bb")),
            ("step_failed", "charge", 20, ev.StepFailed(call)),
        ]

    lines = [
        Accounts().parent[0],
        *failing(1),
        ("timer_started", "", 21, ev.TimerStarted(2, 0, START)),
        ("run_failed", "", 22, ev.RunFailed(call=1)),
        ("run_retried", "", 30, ev.RunRetried(3, "0c" * 16, 1)),
        ("step_started", "charge", 31, ev.StepStarted(1, "bb", attempt=2, because="person")),
        ("step_completed", "charge", 32, ev.StepCompleted(1, attempt=2)),
        ("timer_started", "", 33, ev.TimerStarted(2, 0, START)),
        ("run_completed", "", 34, ev.RunCompleted()),
    ]
    assert check([history("order", lines)]) == []
    assert {violation.rule for violation in check([history("order", [*lines, lines[-1]])])} == {"D1"}


def test_the_time_it_takes_grows_no_faster_than_the_history() -> None:
    def seconds(steps: int) -> float:
        lines = [Accounts().parent[0]]
        for call in range(1, steps + 1):
            lines.append(("step_started", f"look#{call}", call, ev.StepStarted(call, "aa", "read")))
            lines.append(("step_completed", f"look#{call}", call, ev.StepCompleted(call)))
        long = history("order", lines)
        began = time.process_time()  # others may be at work meanwhile
        assert check([long], earlier=[long]) == []
        return time.process_time() - began

    assert min(seconds(8000) for _ in range(3)) < 30 * min(seconds(800) for _ in range(3))
