"""What type checkers must refuse: each line with `# refused`. Checked by `test_typing.py`, never run."""

import sqlite3

import everstep
from everstep import STORE, Live, step, tool, transaction, workflow


class Client:
    name = "client"


@step
async def bare(number: int) -> str:
    return str(number)


@step
async def live(client: Live[Client]) -> str:
    return client.nothing  # refused


@step(effect="sometimes")  # refused
async def unknown_contract() -> None: ...


@transaction("shop.db")
def book(connection: sqlite3.Connection, amount: int) -> str:
    return str(amount)


@transaction(STORE)  # refused
def wrong_connection(connection: sqlite3.Connection, amount: int) -> str:
    return str(amount)


@transaction(5)  # refused
def wrong_database(connection: sqlite3.Connection) -> None: ...


@tool
async def search(query: str) -> list[str]:
    return [query]


@tool(approval=True)
def count_words(text: str) -> int:
    return len(text)


@tool(aproval=True)  # refused
def misspelt() -> None: ...


@workflow
async def flow(topic: str, count: int) -> int:
    await search(5)  # refused
    await bare("one")  # refused
    await bare(1, 2)  # refused
    number: int = await bare(1)  # refused
    await live("client")  # refused
    return number


@workflow
def plain(text: str) -> int:
    book("five")  # refused
    book()  # refused
    book(5, 6)  # refused
    sold: int = book(5)  # refused
    found: str = count_words("x")  # refused
    return len(text + found) + sold


@workflow(on_existing="perhaps")  # refused
async def unknown_policy() -> None: ...


async def driving() -> None:
    async with everstep.open("memory:") as app:
        await app.start(flow, "tides")  # refused
        await app.start(flow, 3, "tides")  # refused
        await app.start(flow, "tides", 3, "more")  # refused
        await app.start(plain, 5)  # refused
        await app.start(plain, "x", topic="tides")  # refused
        await app.start(plain, "x", kwargs=["tides"])  # refused
        await app.run(plain, "x", priority="high")  # refused
        await app.start(plain, "x", on_existing="perhaps")  # refused
        run = await app.start(flow, "tides", 3)
        text: str = await run.result()  # refused
        await app.run(plain, text, text)  # refused


def blocking() -> None:
    everstep.run(flow, "tides")  # refused
    everstep.run(flow, "tides", count=3)  # refused
    text: str = everstep.run(plain, "x")  # refused
    with everstep.open() as app:
        app.start(flow, text)  # refused
        text = app.run(plain, "x")  # refused
        app.signal("x")  # refused
        app.list(state="held")  # refused
        text = app.forget_keys(older_than=5)  # refused
        app.fork("x", at="start")  # refused
        app.start(plain, "x").status("now")  # refused
        app.get_schedule("daily").pause(reason="x")  # refused
    with everstep.connect() as client:
        client.cancel("x", grace=[5])  # refused
    everstep.blocking.sleep(None)  # refused
    everstep.blocking.files.write("a.txt")  # refused


async def asking() -> None:
    async with everstep.connect() as client:
        await client.approve("x", by=5)  # refused


class Review:
    good: bool = False


graph = everstep.Graph("review", state=Review)
graph.node(bare, join="some")  # refused
graph.edge("bare", "bare", when=lambda state: state.nothing)  # refused
graph.draw("png")  # refused


async def drive_graph() -> None:
    async with everstep.open() as app:
        await app.run(graph, "tides")  # refused
        await app.start(graph)  # refused


@workflow
async def starts() -> str:
    await everstep.start(plain, 5)  # refused
    await everstep.start(flow, "tides")  # refused
    return await (await everstep.start(plain, "x")).result()  # refused
