"""EverstepStore does what LangGraph's own store in memory does, and keeps it."""

import asyncio
from typing import Any

import pytest
from langgraph.store.base import GetOp, PutOp
from langgraph.store.memory import InMemoryStore

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


def test_a_batch_reads_what_was_there_before_it(file_url: str) -> None:
    async def main() -> None:
        with EverstepSaver(file_url) as saver, EverstepStore(saver) as store:
            put, get = PutOp(("a",), "k", {"v": 1}), GetOp(("a",), "k")
            assert await store.abatch([put, get]) == [None, None]
            (item,) = await store.abatch([get])
            assert item.value == {"v": 1}  # type: ignore[union-attr]

    asyncio.run(main())


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
