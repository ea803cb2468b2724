"""Old threads and expired items are deleted only if they are still old when the store deletes them."""

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.store.base import GetOp, PutOp

from everstep.adapters import ChangeItems, ChangeThread, Ground
from everstep.integrations.langgraph import EverstepSaver, EverstepStore
from tests.postgres.server import server

DAY = 86400
LONG = "a text that is stored in a part of its own, beside its state " * 10


class State(TypedDict, total=False):
    items: Annotated[list[str], operator.add]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of each kind."""
    if request.param != "postgres":
        yield "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/everstep.db"
        return
    schema = server().fresh_schema()
    yield server().url(schema)
    server().drop(schema)


class Days:
    """A clock that a test moves."""

    def __init__(self, ground: Ground) -> None:
        self._now = ground.now()
        ground.now = lambda: self._now

    def pass_by(self, days: float) -> None:
        self._now += round(days * DAY * 1_000_000)


def before_first(
    ground: Ground, is_it: Callable[[Any], bool], hook: Callable[[], object]
) -> list[Callable[[], object]]:
    """Let something happen just before the first such operation is done. What is returned is empty afterwards."""
    commit, left = ground.commit, [hook]

    def gated(operation: Any, linger_seconds: float = 0.0) -> Any:
        if left and is_it(operation):
            left.pop()()
        return commit(operation, linger_seconds)

    ground.commit = gated  # type: ignore[method-assign]
    return left


def deletes_thread(operation: Any) -> bool:
    return isinstance(operation, ChangeThread) and operation.everything


def writing(saver: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("write", lambda state: {"items": [f"{len(state['items'])} {LONG}"]})
    graph.add_edge(START, "write")
    graph.add_edge("write", END)
    return graph.compile(checkpointer=saver)


def named(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def items_of(app: Any, thread: str) -> list[str]:
    found: list[str] = app.get_state(named(thread)).values.get("items", [])
    return found


@pytest.mark.parametrize("by", ["an invocation", "a person", "an invocation that goes on"])
def test_a_thread_that_is_used_after_it_was_found_old_keeps_all_it_has(where: str, by: str) -> None:
    with EverstepSaver(where) as saver:
        days, app, streams = Days(saver.ground), writing(saver), list[Any]()
        for thread in ("again", "old"):
            app.invoke({"items": ["first"]}, named(thread))
        before = items_of(app, "again")

        def use() -> None:
            if by == "a person":
                app.update_state(named("again"), {"items": ["second"]})
            elif by == "an invocation":
                app.invoke({"items": ["second"]}, named("again"))
            else:
                streams.append(app.stream({"items": ["second"]}, named("again")))
                next(streams[0])

        days.pass_by(31)
        left = before_first(saver.ground, deletes_thread, use)
        assert saver.forget_threads(older_than=30 * DAY) == ["old"]
        assert not left, "it was used meanwhile"
        for stream in streams:
            list(stream)
        after = items_of(app, "again")
        assert after[:3] == [*before, "second"]
        assert items_of(app, "old") == []
        app.invoke({"items": ["third"]}, named("again"))
        assert items_of(app, "again")[: len(after) + 1] == [*after, "third"]
        days.pass_by(31)
        assert saver.forget_threads(older_than=30 * DAY) == ["again"]


@pytest.mark.parametrize("ttl", [None, 5.0], ids=["for ever", "for a time"])
def test_an_item_that_is_put_after_it_was_found_expired_is_kept(where: str, ttl: float | None) -> None:
    with EverstepStore(where) as store:
        days = Days(store._ground)
        for key in ("again", "old"):
            store.put(("a",), key, {"v": 1}, ttl=1)
        days.pass_by(1)
        sweeps: Callable[[Any], bool] = lambda operation: isinstance(operation, ChangeItems)  # noqa: E731
        left = before_first(store._ground, sweeps, lambda: store.put(("a",), "again", {"v": 2}, ttl=ttl))
        store.put(("b",), "k", {"v": 1}, ttl=1)
        assert not left, "it was put meanwhile"
        found = store.get(("a",), "again")
        assert found is not None
        assert found.value == {"v": 2}
        assert store._ground.saved.dead_items(store._ground.now()) == [], "the other one was swept"
        assert store.get(("a",), "old") is None


def test_an_item_that_is_looked_at_in_a_batch_is_not_swept_by_it(where: str) -> None:
    """Its time was not over when it was read; when the batch is written, a moment later, it would be."""
    with EverstepStore(where) as store:
        days = Days(store._ground)
        store.put(("a",), "k", {"v": 1}, ttl=1)
        days.pass_by(59 / DAY)
        now, asked = store._ground.now, list[int]()

        def later() -> int:
            asked.append(now() + len(asked) * 2_000_000)
            return asked[-1]

        store._ground.now = later
        (found, _) = store.batch([GetOp(("a",), "k"), PutOp(("b",), "k", {"v": 1}, ttl=1)])
        assert found is not None
        store._ground.now = now
        assert store.get(("a",), "k") is not None
