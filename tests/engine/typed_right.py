"""What type checkers must accept, and the types they must see. Checked by `test_typing.py`, never run."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import apsw

import everstep
from everstep import STORE, Live, Retry, Run, step, tool, transaction, workflow
from everstep.testing import crash_everywhere, replaced


class Client:
    name = "client"


@tool(approval=True, timeout="1m")
async def search(query: str, limit: int = 3) -> list[str]:
    return [query] * limit


@tool
def count_words(text: str) -> int:
    return len(text)


class Shelf:
    @tool
    async def take(self, item: str) -> bool:
        return bool(item)


class Account:
    @step
    async def pay(self, amount: int) -> str:
        return str(amount)


@step
async def bare(number: int, *, scale: float = 1.0) -> str:
    return str(number * scale)


@step(effect="read", retry=Retry(attempts=3), timeout=5, fallback="none")
def optioned(text: str) -> list[str]:
    return [text]


@step
async def live(client: Live[Client], count: int) -> str:
    assert_type(client, Client)
    return client.name * count


@transaction("shop.db", retry=Retry(attempts=3), timeout=5)
def book(connection: sqlite3.Connection, amount: int, note: str = "") -> str:
    return f"{amount} {note}"


@transaction(STORE)
async def keep(connection: apsw.Connection, text: str) -> int:
    return len(text)


class Till:
    @transaction(Path("shop.db"))
    def sell(self, connection: sqlite3.Connection, item: str) -> bool:
        return bool(item)


@workflow
async def flow(topic: str, count: int) -> dict[str, int]:
    assert_type(await bare(count), str)
    assert_type(await bare(count, scale=2), str)
    assert_type(await asyncio.to_thread(optioned, topic), list[str])
    assert_type(await live(Client(), 2), str)
    assert_type(await Account().pay(3), str)
    assert_type(await everstep.receive("word", str), str)
    assert_type(await everstep.receive("word", bool, timeout=5), bool)
    assert_type(await step(bare, name="other")(1), str)
    assert_type(await asyncio.gather(bare(1), bare(2)), tuple[str, str])
    assert_type(await search("tides", limit=2), list[str])
    assert_type(await asyncio.to_thread(count_words, "tides"), int)
    assert_type(await Shelf().take("lamp"), bool)
    assert_type(search.spec["name"], str)
    assert_type(await asyncio.to_thread(book, 5), str)
    assert_type(await asyncio.to_thread(book, 5, note="x"), str)
    assert_type(await keep("text"), int)
    assert_type(await asyncio.to_thread(Till().sell, "lamp"), bool)
    child = await other(1)
    assert_type(child, bool)
    started = await everstep.start(other, 1, id="other-1")
    assert_type(await started.result(), bool)
    assert_type(await (await everstep.start(plain, "text")).result(), int)
    assert_type(await (await everstep.start("other", 1)).result(), Any)
    assert_type(await (await everstep.start(named_only, "tides", kwargs={"reader": "ann"})).result(), bytes)
    assert_type(await everstep.sleep("2s"), None)
    assert_type(await everstep.receive("word", str, timeout=timedelta(days=1)), str)
    return {topic: count}


@workflow(timeout="1h")
async def named_only(topic: str, *, reader: str) -> bytes:
    return f"{topic} {reader}".encode()


@workflow(timeout=60)
async def other(number: int) -> bool:
    return number > 0


@workflow
def plain(text: str) -> int:
    assert_type(optioned(text), list[str])
    assert_type(book(5), str)
    assert_type(Till().sell("lamp"), bool)
    assert_type(everstep.blocking.receive("word", str), str)
    return len(text)


signature: Callable[[str, int], Coroutine[Any, Any, dict[str, int]]] = flow
plain_signature: Callable[[str], int] = plain


async def driving() -> None:
    async with everstep.open("memory:") as app:
        assert_type(app, everstep.App)
        run = await app.start(flow, "tides", 3, id="x")
        assert_type(run, Run[dict[str, int]])
        assert_type(await run.result(), dict[str, int])
        assert_type(await run.result(timeout=60), dict[str, int])
        assert_type(await app.run(plain, "text"), int)
        assert_type(await (await app.start(plain, "text")).result(), int)
        named = await app.start(named_only, "tides", kwargs={"reader": "ann"}, id="z", delay="2s")
        assert_type(named, Run[bytes])
        assert_type(await app.run(flow, kwargs={"topic": "tides", "count": 3}), dict[str, int])
        assert_type(await app.run(plain, kwargs={"text": "tides"}, delay=timedelta(hours=1)), int)


def faking() -> None:
    with replaced(optioned, lambda text: [text]) as fake:
        assert_type(fake.calls, list[dict[str, Any]])
    with replaced(search, lambda query, limit=3: [query]):
        pass


def crash_testing() -> None:
    assert_type(crash_everywhere(plain, "text", most=1).holds, bool)


def blocking() -> None:
    assert_type(everstep.run(flow, "tides", 3), dict[str, int])
    assert_type(everstep.run(plain, "text", id="y"), int)
    assert_type(everstep.run(named_only, "tides", kwargs={"reader": "ann"}), bytes)
    assert_type(everstep.run(plain, kwargs={"text": "tides"}, id="y"), int)
    with everstep.open() as app:
        assert_type(app.start(flow, "tides", 3).result(), dict[str, int])
        assert_type(app.start(named_only, kwargs={"topic": "tides", "reader": "ann"}).result("2s"), bytes)
        assert_type(app.run(plain, kwargs={"text": "tides"}), int)
        assert_type(app.run(plain, "text"), int)
        assert_type(app.signal("x", "word", 5, id="once"), bool)  # not ty
        assert_type(app.forget_keys(older_than=5), int)  # not ty
        assert_type(app.fork("x", at=3, args=["tides"]).id, str)  # not ty
        assert_type(app.start(flow, "tides", 3).published(), dict[str, Any])  # not ty
        assert_type(app.start(flow, "tides", 3).verify(outside=True).sound, bool)  # not ty
        assert_type(app.schedule(flow, "tides", 3, every=60).trigger(), str)  # not ty
    with everstep.connect() as client:
        assert_type(client.signal("x", "word"), bool)  # not ty
        assert_type(client.start("flow", "tides", 3, priority=2).id, str)


async def asking() -> None:
    async with everstep.connect() as client:
        assert_type(await client.signal("x", "word"), bool)  # not ty


@workflow
def waits() -> None:
    assert_type(everstep.blocking.sleep(5), None)
    assert_type(everstep.blocking.files.write("a.txt", b"text"), None)


def testing(connection: sqlite3.Connection) -> None:
    assert_type(book(connection, 5, note="x"), str)


# -- graphs -----------------------------------------------------------------------------------------------------------
class Review:
    text: str = ""
    good: bool = False


graph = everstep.Graph("review", state=Review, reduce={"text": lambda old, new: old + new})


@graph.node
async def draft(state: Review) -> dict[str, str]:
    return {"text": "draft"}


@graph.node(effect="read", retry=Retry(attempts=2))
def check(state: Review) -> dict[str, bool]:
    return {"good": True}


graph.edge("draft", "check", when=lambda state: not state.good)
graph.each("check", "draft", over=lambda state: state.text.split())
graph.approval("approve", lambda state: state.text, into="good", timeout=5)


async def drive_graph() -> None:
    assert_type(await draft(Review()), dict[str, str])
    async with everstep.open() as app:
        assert_type(await app.run(graph, Review(), id="g"), Review)
        assert_type(await (await app.start(graph, Review())).result(), Review)
    assert_type(everstep.run(graph, Review()), Review)
    assert_type(await graph(Review()), Review)
