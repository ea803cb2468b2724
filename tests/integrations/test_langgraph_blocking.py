"""Nothing of ours blocks the loop of an application, nor looks to a detector as if it did: `langgraph dev` has one."""

import asyncio
import operator
import time
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from blockbuster import BlockingError, blockbuster_ctx
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import everstep
from everstep.errors import StoreUnusable, ThreadActive
from everstep.integrations.langgraph import EverstepSaver, EverstepStore, tools
from everstep.stores.sqlite import connections
from tests.integrations.charging import DONE

THREAD: Any = {"configurable": {"thread_id": "t"}, "metadata": {"run_id": "1"}}


@pytest.fixture(autouse=True)
def detector(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What calls something that blocks, on any loop, gets an error: also in the background, where it is logged."""
    with blockbuster_ctx():
        yield
    assert "Blocking" not in caplog.text


class State(TypedDict, total=False):
    log: Annotated[list[Any], operator.add]
    deltas: Annotated[list[Any], DeltaChannel(lambda state, writes: [*(state or []), *writes])]


@everstep.step(effect="once")
async def charge(amount: int) -> str:
    DONE.append(amount)
    return f"charged {amount}"


@everstep.tool(effect="repeat")
async def ship(receipt: str) -> str:
    """Ship it."""
    return f"shipped, {receipt}"


async def pay(state: State) -> State:
    receipt = await charge(5)
    shipped = await tools([ship])[0].ainvoke(
        {"name": "ship", "args": {"receipt": receipt}, "id": "1", "type": "tool_call"}
    )
    answer = interrupt("well?")
    return {"log": [receipt, shipped.content, answer], "deltas": [answer]}


def graph(saver: EverstepSaver) -> Any:
    made = StateGraph(State)
    made.add_node("pay", pay)
    made.add_edge(START, "pay")
    return made.compile(checkpointer=saver)


async def use_saver(saver: EverstepSaver) -> None:
    """Use every async method of a saver, through LangGraph or by itself."""
    app = graph(saver)
    await app.ainvoke({"log": []}, THREAD)
    result = await app.ainvoke(Command(resume="yes"), THREAD)
    assert result["log"] == ["charged 5", "shipped, charged 5", "yes"]
    first = [one async for one in app.aget_state_history(THREAD)][-1]
    await app.ainvoke(None, first.config)  # time travel
    await app.aupdate_state(THREAD, {"log": ["by a person"]})
    async for _ in app.astream({"log": []}, THREAD):
        break
    await asyncio.gather(*(app.ainvoke({"log": []}, {"configurable": {"thread_id": f"t{n}"}}) for n in range(8)))
    assert await saver.aget_tuple(THREAD) is not None
    await saver.aget_delta_channel_history(config=THREAD, channels=["deltas"])
    await saver.acopy_thread("t", "u")
    await saver.aprune(["u"])
    await saver.adelete_for_runs(["1"])
    await saver.adelete_thread("u")
    assert len(DONE) == 11


async def use_store(store: EverstepStore) -> None:
    """Use every async method of a store."""
    await asyncio.gather(*(store.aput(("a", str(n)), "k", {"n": n}, ttl=5) for n in range(8)))
    assert (await store.aget(("a", "1"), "k")).value == {"n": 1}  # type: ignore[union-attr]
    assert len(await store.asearch(("a",), filter={"n": {"$gt": 3}})) == 4
    assert len(await store.alist_namespaces(prefix=("a",))) == 8
    await store.adelete(("a", "1"), "k")


async def test_a_saver_and_a_store_that_are_opened_on_a_loop_do_not_block_it(file_url: str) -> None:
    async with EverstepSaver(file_url) as saver, EverstepStore(saver) as store:
        await use_saver(saver)
        await use_store(store)


async def test_neither_do_those_that_are_opened_by_their_first_use(file_url: str) -> None:
    saver, store = EverstepSaver(file_url), EverstepStore(file_url)
    try:
        await use_store(store)
        await use_saver(saver)
    finally:
        await saver.aclose()
        await store.aclose()


def test_neither_do_those_that_were_opened_before(file_url: str) -> None:
    async def main() -> None:
        await use_saver(saver)
        await use_store(store)

    with EverstepSaver(file_url) as saver, EverstepStore(saver) as store:
        asyncio.run(main())


@everstep.workflow
async def selling(amount: int) -> str:
    return await charge(amount)


async def test_nor_does_opening_an_app_and_running_a_workflow(file_url: str) -> None:
    async with everstep.open(file_url, recover=True) as app:
        run = await app.start(selling, 5, id="r")
        assert await run.result() == "charged 5"
        assert [row.id for row in await app.list()] == ["r"]


@everstep.step
async def wait(begun: str) -> str:
    BEGUN.append(begun)
    while not GATE:
        await asyncio.sleep(0.01)
    return begun


BEGUN: list[str] = []
GATE: list[str] = []


async def test_what_the_engine_asks_the_kernel_does_not_count(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file of the store is where it was, and whether other processes live: it asks each time here."""
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.0)
    BEGUN.clear()
    GATE.clear()

    async def node(state: State) -> State:
        return {"log": [await wait("begun")]}

    made = StateGraph(State)
    made.add_node("node", node)
    made.add_edge(START, "node")
    async with EverstepSaver(file_url) as saver, EverstepSaver(file_url) as other, asyncio.timeout(60):
        app: Any = made.compile(checkpointer=saver)
        running = asyncio.create_task(app.ainvoke({"log": []}, THREAD))
        while not BEGUN and not running.done():
            await asyncio.sleep(0.01)
        with pytest.raises(ThreadActive):
            await made.compile(checkpointer=other).ainvoke(None, THREAD)  # type: ignore[call-overload]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        GATE.append("open")
        assert (await app.ainvoke(None, THREAD))["log"] == ["begun"]


async def test_async_methods_do_not_wait_for_a_server(postgres_saver: EverstepSaver) -> None:
    await use_saver(postgres_saver)
    await use_store(EverstepStore(postgres_saver))


async def test_what_blocks_is_found() -> None:
    with pytest.raises(BlockingError):
        time.sleep(0.001)


async def test_why_a_store_cannot_be_opened_is_told_where_it_is_first_needed() -> None:
    with pytest.raises(StoreUnusable, match="no folder"):
        async with EverstepSaver("sqlite:////no/such/folder/e.db"):
            pass
    saver = EverstepSaver("sqlite:////no/such/folder/e.db")
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="no folder"):
            await graph(saver).ainvoke({"log": []}, THREAD)
    await saver.aclose()
