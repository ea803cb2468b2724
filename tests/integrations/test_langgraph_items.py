"""EverstepStore does what LangGraph's own store in memory does, and keeps it."""

import math
from typing import Any

import pytest
from langgraph.store.base import GetOp, InvalidNamespaceError, ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from everstep.adapters import ChangeItems
from everstep.errors import Misuse
from everstep.integrations.langgraph import EverstepSaver, EverstepStore


def embed(texts: list[str]) -> list[list[float]]:
    return [[float(text.count(letter)) for letter in "abcdef"] for text in texts]


def told(store: Any) -> list[Any]:
    """Put and ask, and return all answers, without times."""
    for number in range(5):
        text = "abcdef"[number] * 3
        store.put(("people", f"p{number}"), "name", {"n": number, "deep": {"list": [number, 2]}, "text": text})
    store.put(("people", "p1"), "other", {"n": 10, "text": "cab"})
    store.put(("places",), "here", {"n": 1, "text": "fed"}, index=False)
    store.put(("people", "p2"), "kept", {"n": 7, "text": ""})
    store.delete(("people", "p2"), "name")
    store.put(("people", "p3"), "name", {"n": 33, "text": "ddd"})
    found = [
        store.get(("people", "p3"), "name").value,
        store.get(("people", "p2"), "name"),
        store.list_namespaces(),
        store.list_namespaces(prefix=("people",), max_depth=1),
        store.list_namespaces(suffix=("*",), limit=2, offset=1),
    ]
    filters: list[Any] = [{}, {"n": 10}, {"n": {"$gt": 1, "$lte": 10}}, {"deep": {"list": [1, 2]}}, {"n": {"$ne": 1}}]
    for filter in filters:
        items = store.search(("people",), filter=filter, limit=100)
        found.append(sorted((one.namespace, one.key, one.value["n"]) for one in items))
    scored = store.search((), query="aab", limit=2)
    found.append([(one.namespace, one.key, round(one.score, 6)) for one in scored])
    return found


def test_it_answers_as_langgraphs_own_store_does(url: str) -> None:
    index: Any = {"dims": 6, "embed": embed, "fields": ["text"]}
    with EverstepStore(url, index=index) as store:
        assert told(store) == told(InMemoryStore(index=index))


def test_items_outlive_their_process_and_know_when_they_were_made(url: str) -> None:
    with EverstepStore(url) as store:
        store.put(("a", "b"), "k", {"v": 1})
        created = store.get(("a", "b"), "k").created_at  # type: ignore[union-attr]
    with EverstepStore(url) as store:
        store.put(("a", "b"), "k", {"v": 2})
        item = store.get(("a", "b"), "k")
        assert item is not None
        assert (item.value, item.created_at) == ({"v": 2}, created)
        assert item.updated_at > created


async def test_a_batch_reads_what_was_there_before_it(file_url: str) -> None:
    with EverstepSaver(file_url) as saver, EverstepStore(saver) as store:
        put, get = PutOp(("a",), "k", {"v": 1}), GetOp(("a",), "k")
        assert await store.abatch([put, get]) == [None, None]
        (item,) = await store.abatch([get])
        assert item.value == {"v": 1}  # type: ignore[union-attr]


def test_an_item_lives_on_while_it_is_looked_at(file_url: str) -> None:
    now = [1_000_000_000_000_000]
    with EverstepStore(file_url) as store:
        store._ground.now = lambda: now[0]
        store.put(("a",), "k", {"v": 1}, ttl=1)
        now[0] += 50_000_000
        assert store.get(("a",), "k", refresh_ttl=False) is not None
        now[0] += 5_000_000
        assert store.search(("a",)) != []
        now[0] += 50_000_000
        assert store.get(("a",), "k") is not None
        now[0] += 61_000_000
        assert store.get(("a",), "k") is None
        assert store.list_namespaces() == []
        store.put(("b",), "k", {"v": 1}, ttl=1)
        assert store._ground.saved.dead_items(now[0]) == []


@pytest.mark.parametrize("key", ["'", '") OR 1=1 --', "n') IS NOT NULL --"])
def test_a_filter_is_never_part_of_a_statement(key: str, file_url: str) -> None:
    with EverstepStore(file_url) as store:
        store.put(("a",), "k", {"n": 1})
        assert store.search(("a",), filter={key: 1}) == []
        assert store.search((key.replace(".", ""),)) == []


def test_items_that_have_no_number_are_not_what_a_search_for_numbers_looks_for(file_url: str) -> None:
    with EverstepStore(file_url) as store:
        for key, value in {"five": {"n": 5}, "none": {"m": 1}, "text": {"n": "many"}}.items():
            store.put(("a",), key, value)
        assert [one.key for one in store.search(("a",), filter={"n": {"$gt": 3}})] == ["five"]
        assert store.search(("a",), filter={"n": {"$lte": 3}}) == []


ALIKE: list[tuple[str, ...]] = [
    ("tenant", "ann"),
    ("tenant.ann",),
    ("tenant.ann", ""),
    ("tenant", "", "ann"),
    ("tenant\x1b1ann",),
    ("tenant\x1b", "1ann"),
    ("tenant\x1b01ann",),
    ("tenant\x1b.ann",),
    ("tenant", "ann."),
    ("tenant", "\U0010ffff"),
    ("\U0010ffff", "tenant"),
    ("*", "ann"),
]
"""Namespaces that are the same, or one below the other, if their labels are only joined."""


def test_no_two_namespaces_are_the_same(url: str) -> None:
    with EverstepStore(url) as store, EverstepStore("memory:") as other:
        plain = InMemoryStore()
        for each in (store, other, plain):
            each.batch([PutOp(one, "k", {"of": list(one)}) for one in ALIKE])
        for one in ALIKE:
            get, search = GetOp(one, "k"), SearchOp(one, limit=100)
            ends = [ListNamespacesOp((MatchCondition(kind, one),)) for kind in ("prefix", "suffix")]
            (item, found, *listed), (_, _, *others), (_, wanted, *right) = (
                each.batch([get, search, *ends]) for each in (store, other, plain)
            )
            assert (item.namespace, item.value) == (one, {"of": list(one)})  # type: ignore[union-attr]
            assert {each.namespace for each in found} == {each.namespace for each in wanted}  # type: ignore[union-attr]
            assert listed == others == right
        assert {each.namespace for each in store.search((), limit=100)} == set(ALIKE)
        store.batch([PutOp(("tenant.ann",), "k", None)])
        assert store.get(("tenant", "ann"), "k") is not None
        assert store.batch([GetOp(("tenant.ann",), "k")]) == [None]


def test_what_is_no_text_is_not_taken_for_one(file_url: str) -> None:
    with EverstepStore(file_url) as store:
        store.put(("1",), "1", {"v": 1})
        for wrong in ((1,), ("1", None)):
            with pytest.raises(InvalidNamespaceError, match="is a text, not"):
                store.batch([GetOp(wrong, "1")])  # type: ignore[arg-type]
        for op in (GetOp(("1",), 1), PutOp(("1",), 1, {"v": 2})):  # type: ignore[arg-type]
            with pytest.raises(Misuse, match="is a text, not int"):
                store.batch([op])


def test_items_are_where_they_were_before_points_were_written_in_another_way(file_url: str) -> None:
    with EverstepStore(file_url) as store:
        for namespace in ("users.ann.", "users.a\x1b[0mb.", "users.."):
            store.put(("made",), "k", {"of": namespace})
            made = store._ground.saved.item("made.", "k", 1)
            assert made is not None
            store._ground.commit(ChangeItems([made._replace(namespace=namespace)]))
        for labels in (("users", "ann"), ("users", "a\x1b[0mb"), ("users", "")):
            (found,) = store.batch([GetOp(labels, "k")])
            assert found.value == {"of": ".".join((*labels, ""))}  # type: ignore[union-attr]
        assert len(store.search(("users",))) == 3


@pytest.mark.parametrize("ttl", [math.nan, math.inf, -math.inf, 1e300, "5", True])
def test_a_time_to_live_is_a_finite_number_of_minutes(ttl: Any, file_url: str) -> None:
    with pytest.raises(Misuse, match=r"ttl=.*: it is a finite number of minutes"):
        EverstepStore(file_url, ttl={"default_ttl": ttl})
    with EverstepStore(file_url) as store:
        with pytest.raises(Misuse, match=r"ttl=.*: it is a finite number of minutes"):
            store.batch([PutOp(("a",), "first", {"n": 1}), PutOp(("a",), "k", {"n": 1}, ttl=ttl)])
        assert store.search(("a",)) == []
