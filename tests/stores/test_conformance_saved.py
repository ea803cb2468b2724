"""What every store does with what frameworks save: threads, their states, parts and writes, and items."""

from typing import Any

from everstep.stores.protocol import Accepted, Refused
from everstep.stores.rows.saved import (
    ChangeItems,
    ChangeThread,
    FreeThread,
    SavedItem,
    SavedPart,
    SavedState,
    SavedWrite,
    Taken,
    TakeThread,
    ThreadOwner,
)
from tests.stores.kit import Harness

TAKEN, FENCED = Refused("taken"), Refused("fenced")


def state(id: str, namespace: str = "", parent: str = "", **fields: Any) -> SavedState:
    return SavedState(namespace, id, parent, **{"origin": "", "body": b"b", "digest": b"d", "at": 5, **fields})


def part(number: int, value: bytes = b"v", series: str = "s", channel: str = "c") -> SavedPart:
    return SavedPart("", channel, series, number, value, b"digest of " + value)


def write(call: str, place: int = 0, state: str = "1", path: str = "", body: bytes = b"w") -> SavedWrite:
    return SavedWrite("", state, call, place, path, "channel", body, b"d")


def change(harness: Harness, thread: str = "t", **changes: Any) -> Any:
    return harness.one(ChangeThread(thread, 10, **changes))


def worker(harness: Harness, name: str, lease_until: int = 2**60) -> str:
    harness.store.register_worker(name, 1, "host", lease_until)
    return name


def test_states_are_found_by_their_ids_and_listed_with_the_newest_first(harness: Harness) -> None:
    rows = [state("1"), state("2", parent="1", origin="o"), state("2", "sub"), state("3", parent="2", body=b"\0\xff")]
    assert change(harness, states=rows) == Accepted()
    change(harness, "other", states=[state("9")])
    saved = harness.store.saved
    assert saved.state("t", "", "3") == rows[3]
    assert saved.state("t", "sub", "3") is None
    assert saved.states("t") == [rows[3], rows[2], rows[1], rows[0]]
    assert saved.states("t", "") == [rows[3], rows[1], rows[0]]
    assert saved.states("t", "", ("3", ""), 1) == [rows[1]]
    assert saved.states("t", None, ("2", "sub"), 9) == [rows[1], rows[0]]
    assert saved.lineage("t", "", "3") == [rows[3], rows[1], rows[0]]
    assert saved.lineage("t", "", "3", 2) == [rows[3], rows[1]]
    assert saved.threads() == ["other", "t"]
    assert saved.threads("other", 1) == ["t"]
    assert saved.threads(before=5) == []
    assert saved.threads(before=6) == ["other", "t"]
    assert saved.of_origins(["o", "p"]) == [("t", "", "2")]
    assert saved.of_origins([""]) == []


def test_a_state_that_is_saved_again_is_replaced(harness: Harness) -> None:
    change(harness, states=[state("1")])
    again = state("1", parent="0", origin="o", body=b"new", digest=b"e", at=7)
    change(harness, states=[again])
    assert harness.store.saved.states("t") == [again]


def test_of_writes_the_first_stays_or_the_last_as_is_said(harness: Harness) -> None:
    change(harness, writes=[write("b", 0), write("b", 1, path="~1")], rewrites=[write("a", -1, path="~0")])
    change(harness, writes=[write("b", 0, body=b"second"), write("c", 0)], rewrites=[write("a", -1, body=b"last")])
    change(harness, writes=[write("b", 0, state="2")])
    saved = harness.store.saved
    first = [write("a", -1, body=b"last"), write("b", 0), write("c", 0), write("b", 1, path="~1")]
    assert saved.writes("t", "", ["1"]) == first
    assert saved.writes("t", "", ["1", "2"]) == [*first, write("b", 0, state="2")]
    assert saved.writes("t", "x", ["1"]) == []


def test_a_series_goes_on_in_one_way_only(harness: Harness) -> None:
    assert change(harness, parts=[part(0), part(1)]) == Accepted()
    assert change(harness, parts=[part(1), part(2)], states=[state("1")]) == Accepted()
    assert change(harness, parts=[part(2, b"other"), part(3)], states=[state("2")]) == Refused("key")
    saved = harness.store.saved
    assert saved.parts("t", "", "c", "s", 1) == [part(0), part(1)]
    assert saved.parts("t", "", "c", "s", 9) == [part(0), part(1), part(2)]
    assert [one.id for one in saved.states("t")] == ["1"]
    change(harness, parts=[part(0, series="r")])
    assert sorted(saved.series("t")) == [("", "c", "r"), ("", "c", "s")]


def test_what_is_forgotten_is_gone_and_nothing_else(harness: Harness) -> None:
    change(harness, states=[state("1"), state("2")], parts=[part(0), part(0, series="r")], writes=[write("a")])
    change(harness, writes=[write("a", state="2")])
    change(harness, "other", states=[state("1")], parts=[part(0)], writes=[write("a")])
    change(harness, forgotten=[("", "1")], unneeded=[("", "c", "s")])
    saved = harness.store.saved
    assert [one.id for one in saved.states("t")] == ["2"]
    assert saved.series("t") == [("", "c", "r")]
    assert saved.writes("t", "", ["1", "2"]) == [write("a", state="2")]
    change(harness, everything=True, states=[state("7")])
    assert [one.id for one in saved.states("t")] == ["7"]
    assert (saved.series("t"), saved.writes("t", "", ["2"])) == ([], [])
    assert saved.states("other") == [state("1")]
    assert saved.parts("other", "", "c", "s", 9) == [part(0)]


def test_a_thread_is_run_by_one_living_worker(harness: Harness) -> None:
    one, other = worker(harness, "one"), worker(harness, "other")
    assert harness.one(TakeThread("t", one, 10)) == Taken(1, 10)
    assert harness.one(TakeThread("t", one, 11)) == Taken(1, 10)
    assert harness.one(TakeThread("t", other, 11)) == TAKEN
    assert harness.store.saved.owner("t") == ThreadOwner("one", 1, 11, 10)
    assert change(harness, states=[state("1")], worker=other) == TAKEN
    assert change(harness, states=[state("1")]) == TAKEN
    assert change(harness, states=[state("1")], worker=one) == Accepted()
    assert change(harness, states=[state("2")], worker=one, epoch=1) == Accepted()
    assert harness.one(FreeThread("t", other, 1)) == FENCED
    assert harness.one(FreeThread("t", one, 1)) == Accepted()
    assert harness.one(TakeThread("t", other, 12)) == Taken(2, 10)
    assert change(harness, states=[state("3")], worker=one, epoch=1) == FENCED
    assert harness.one(FreeThread("t", one, 1)) == FENCED
    assert [state.id for state in harness.store.saved.states("t")] == ["2", "1"]
    assert harness.store.saved.owner("none") is None


def test_a_thread_of_a_worker_that_is_gone_is_free(harness: Harness) -> None:
    lapsed, other = worker(harness, "lapsed", lease_until=20), worker(harness, "other")
    assert harness.one(TakeThread("t", lapsed, 10)) == Taken(1, 10)
    assert harness.one(TakeThread("t", other, 15)) == TAKEN
    assert harness.one(TakeThread("t", other, 10**18)) == TAKEN, "whatever the clock of the one who takes says"
    assert harness.store.lapse("lapsed", 20)
    assert harness.one(TakeThread("t", other, 20)) == Taken(2, 10)
    assert change(harness, worker=lapsed, epoch=1) == FENCED
    harness.store.leave(other)
    assert harness.one(TakeThread("t", lapsed, 15)) == Taken(3, 10)


def test_a_thread_that_was_deleted_is_born_again(harness: Harness) -> None:
    one = worker(harness, "one")
    assert harness.one(TakeThread("t", one, 10)) == Taken(1, 10)
    change(harness, everything=True, worker=one)
    assert harness.one(TakeThread("t", one, 11)) == Taken(1, 10)
    harness.one(FreeThread("t", one, 1))
    change(harness, everything=True)
    assert harness.one(TakeThread("t", one, 12)) == Taken(1, 12)


def test_a_thread_that_was_changed_or_taken_since_a_time_is_not_forgotten_as_an_old_one(harness: Harness) -> None:
    one, saved = worker(harness, "one"), harness.store.saved

    def forget(since: int, thread: str = "t", **changes: Any) -> Any:
        return change(harness, thread, everything=True, unchanged_since=since, **changes)

    rows = {"parts": [part(0)], "writes": [write("a")]}
    for thread in ("t", "taken", "other"):
        change(harness, thread, states=[state("1", at=5), state("2", "sub", at=7)], **rows)
    assert harness.one(TakeThread("taken", one, 9)) == Taken(1, 9)
    assert forget(8, "taken") == TAKEN
    assert forget(8, "taken", worker=one, epoch=2) == FENCED
    assert forget(9, "taken", worker=one, epoch=1) == Refused("changed")
    harness.one(FreeThread("taken", one, 1))
    assert forget(9, "taken") == Refused("changed")
    assert forget(7) == Refused("changed")
    assert saved.owner("t") is None
    assert forget(8, "none") == Refused("changed")
    for thread in ("t", "taken", "other"):
        assert [one.id for one in saved.states(thread)] == ["2", "1"]
        assert saved.series(thread) == [("", "c", "s")]
        assert saved.writes(thread, "", ["1"]) == [write("a")]
    assert forget(8) == Accepted()
    assert forget(10, "taken") == Accepted()
    for thread in ("t", "taken"):
        assert (saved.states(thread), saved.series(thread), saved.writes(thread, "", ["1"])) == ([], [], [])
        assert saved.owner(thread) is None
    assert [one.id for one in saved.states("other")] == ["2", "1"]
    assert harness.one(TakeThread("t", one, 12)) == Taken(1, 12)


def test_items_live_until_their_time_is_over(harness: Harness) -> None:
    a, b, c = (
        SavedItem("n.", "a", b"1", 5, 5),
        SavedItem("n.x.", "b", b"2", 5, 5, 20, 1.5),
        SavedItem("o.", "a", b"3", 6, 6),
    )
    harness.one(ChangeItems([c, b, a]))
    harness.one(ChangeItems([a._replace(value=b"new", created_at=7, updated_at=7)]))
    a, saved = a._replace(value=b"new", updated_at=7), harness.store.saved
    assert (saved.item("n.", "a", 100), saved.item("n.x.", "b", 19), saved.item("n.x.", "b", 20)) == (a, b, None)
    assert saved.items("n.", 10) == [a, b]
    assert saved.items("n.", 10, ("n.", "a")) == [b]
    assert saved.items("", 30, limit=1) == [a]
    assert saved.namespaces(10) == ["n.", "n.x.", "o."]
    assert saved.namespaces(30, "n.") == ["o."]
    assert saved.dead_items(20) == [("n.x.", "b")]
    harness.one(ChangeItems(seen=[("n.x.", "b", 40), ("n.", "a", 40)]))
    assert saved.dead_items(30) == []
    assert saved.item("n.", "a", 50) == a
    expired = [("n.", "a", 60), ("n.x.", "b", 39), ("none", "a", 60)]
    harness.one(ChangeItems(expired=expired))
    harness.one(ChangeItems(seen=[("n.x.", "b", 50)], expired=[("n.x.", "b", 40)]))
    harness.one(ChangeItems([b._replace(expires_at=70)], expired=[("n.x.", "b", 50)]))
    assert saved.item("n.x.", "b", 60) == b._replace(expires_at=70)
    assert saved.item("n.", "a", 60) == a
    harness.one(ChangeItems(expired=[("n.x.", "b", 70)]))
    assert saved.dead_items(100) == []
    harness.one(ChangeItems(deleted=[("n.", "a"), ("none", "a")]))
    assert saved.item("n.", "a", 1) is None


def test_a_thread_that_comes_from_another_store_keeps_when_it_was_begun(harness: Harness) -> None:
    rows = {"states": [state("1")], "parts": [part(0)], "rewrites": [write("c")]}
    assert change(harness, everything=True, born=3, **rows) == Accepted()
    owner = harness.store.saved.owner("t")
    assert owner is not None
    assert (owner.owner, owner.born) == (None, 3)
    taken = harness.one(TakeThread("t", worker(harness, "a"), 20))
    assert isinstance(taken, Taken)
    assert taken.born == 3
    assert change(harness, everything=True, born=4, worker="a", epoch=taken.epoch) == Accepted()
    assert harness.store.saved.owner("t").born == 3, "whoever runs it now does not get another"  # type: ignore[union-attr]
