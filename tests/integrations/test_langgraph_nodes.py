"""Nodes that do not redo their work: steps in nodes, and steps as tools."""

import asyncio
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send, interrupt

import everstep
from everstep.errors import IdConflict, Misuse, RunHeld
from everstep.integrations.langgraph import EverstepSaver, EverstepStore, aask_model, ask_model, tools
from tests.waiting import open_raw
from tests.worlds.ledger import DONE


class State(TypedDict, total=False):
    log: Annotated[list[Any], operator.add]
    amount: int


@everstep.step(effect="once")
def charge(amount: int) -> str:
    DONE.append(("charge", amount, everstep.key()))
    return f"charged {amount}"


@everstep.step
async def send(to: str, *, text: str = "") -> str:
    await asyncio.sleep(0)
    DONE.append(("send", to))
    return f"sent to {to}"


@everstep.step(effect="once")
def risk(what: str) -> str:
    DONE.append(("risk", what))
    raise ConnectionError("the answer was lost")


def thread(name: str = "t") -> Any:
    return {"configurable": {"thread_id": name}}


def one_node(node: Callable[..., Any], saver: Any, **options: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("node", node, **options)
    graph.add_edge(START, "node")
    return graph.compile(checkpointer=saver)


def amounts() -> list[Any]:
    return [amount for what, amount, *_ in DONE if what == "charge"]


def test_an_effect_before_an_interrupt_happens_once_and_the_approved_amount_is_charged(saver: EverstepSaver) -> None:
    def pay(state: State) -> State:
        first = charge(state["amount"])
        approved = interrupt({"amount": state["amount"] * 2})
        return {"log": [first, charge(approved)]}

    app = one_node(pay, saver)
    shown = app.invoke({"amount": 5}, thread())["__interrupt__"][0].value
    assert app.invoke(Command(resume=shown["amount"]), thread())["log"] == ["charged 5", "charged 10"]
    assert amounts() == [5, 10]
    assert len({key for _, _, key in DONE}) == 2


def test_async_steps_run_on_the_loop_of_their_caller(saver: EverstepSaver) -> None:
    loops = []

    @everstep.step
    async def where() -> str:
        loops.append(asyncio.get_running_loop())
        return "here"

    async def node(state: State) -> State:
        loops.append(asyncio.get_running_loop())
        found = await asyncio.gather(where(), send("ann"), send(to="bob"))
        return {"log": [*found, interrupt("?")]}

    async def main() -> Any:
        app = one_node(node, saver)
        await app.ainvoke({"log": []}, thread())
        return await app.ainvoke(Command(resume=0), thread())

    assert asyncio.run(main())["log"] == ["here", "sent to ann", "sent to bob", 0]
    assert [to for _, to in DONE] == ["ann", "bob"]
    assert len(set(map(id, loops))) == 1


def test_a_step_that_failed_is_tried_again_when_its_node_is(saver: EverstepSaver) -> None:
    tried: list[int] = []

    @everstep.step
    def flaky() -> str:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("not yet")
        return "at last"

    def node(state: State) -> State:
        return {"log": [charge(1), flaky()]}

    app = one_node(
        node, saver, retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False, retry_on=ValueError)
    )
    with pytest.raises(ValueError, match="not yet"):
        app.invoke({"log": []}, thread())
    assert app.invoke(None, thread())["log"] == ["charged 1", "at last"]
    assert (amounts(), len(tried)) == ([1], 3)


def test_other_arguments_at_the_same_place_are_refused_and_nothing_is_done(saver: EverstepSaver) -> None:
    given = iter([5, 6])

    def node(state: State) -> State:
        return {"log": [charge(next(given)), interrupt("?")]}

    app = one_node(node, saver)
    app.invoke({"log": []}, thread())
    with pytest.raises(IdConflict, match="called with other arguments than before"):
        app.invoke(Command(resume=1), thread())
    assert amounts() == [5]


def test_an_outcome_in_doubt_is_for_a_person_and_then_the_thread_goes_on(saver: EverstepSaver) -> None:
    app = one_node(lambda state: {"log": [risk("it")]}, saver)
    for given in ({"log": []}, None):
        with pytest.raises(RunHeld, match="everstep resolve"):
            app.invoke(given, thread())
    (hold,) = saver.ground.blocking.holds()
    saver.ground.blocking.resolve(hold.run, "done", value="a person says so", note="looked")
    assert app.invoke(None, thread())["log"] == ["a person says so"]
    assert DONE == [("risk", "it")]


def test_each_lap_and_each_branch_does_its_own_work(saver: EverstepSaver) -> None:
    def inner_node(state: State) -> State:
        return {"log": [charge(1)]}

    inner = StateGraph(State)
    inner.add_node("pay", inner_node)
    inner.add_edge(START, "pay")
    graph = StateGraph(State)
    graph.add_node("lap", inner.compile())
    graph.add_node("count", lambda state: {"amount": state.get("amount", 0) + 1})
    graph.add_node("branch", lambda state: {"log": [charge(2)]})
    graph.add_edge(START, "lap").add_edge("lap", "count").add_edge("branch", END)
    graph.add_conditional_edges(
        "count", lambda state: "lap" if state["amount"] < 3 else [Send("branch", {"amount": n}) for n in range(3)]
    )
    app = graph.compile(checkpointer=saver)
    app.invoke({"log": []}, thread())
    assert amounts() == [1, 1, 1, 2, 2, 2]
    app.invoke({"log": [], "amount": 0}, thread())
    assert amounts() == [1, 1, 1, 2, 2, 2] * 2


def test_a_thread_that_was_deleted_and_begins_anew_does_its_work_anew(saver: EverstepSaver) -> None:
    app = one_node(lambda state: {"log": [charge(1)]}, saver)
    app.invoke({"log": []}, thread())
    saver.delete_thread("t")
    app.invoke({"log": []}, thread())
    assert amounts() == [1, 1]


def test_a_person_who_goes_back_in_time_does_things_again_unless_their_key_says_what_they_are(
    saver: EverstepSaver,
) -> None:
    @everstep.step(effect="once", key="order:{amount}")
    def charge_order(amount: int) -> str:
        return charge.function(amount)  # type: ignore[attr-defined,no-any-return]

    def node(state: State) -> State:
        return {"log": [charge(state["amount"]), charge_order(10 * state["amount"])]}

    app = one_node(node, saver)
    app.invoke({"amount": 1}, thread())
    first = next(one.config for one in app.get_state_history(thread()) if one.next == ("node",))
    assert app.invoke(None, first)["log"] == ["charged 1", "charged 10"]
    assert amounts() == [1, 10, 1]
    changed = app.update_state(first, {"amount": 2})
    assert app.invoke(None, changed)["log"] == ["charged 2", "charged 20"]
    assert amounts() == [1, 10, 1, 2, 20]


def test_another_branch_of_a_thread_that_lost_checkpoints_does_its_own_work_once(saver: EverstepSaver) -> None:
    app = one_node(lambda state: {"log": [charge(state["amount"])]}, saver)
    for amount in (1, 2, 2, 1):
        app.invoke({"amount": amount}, thread())
        saver.delete_for_runs([])
        newest = [(one.namespace, one.id) for one in saver.threads.rows("t", None)]
        saver.threads.forget_states("t", newest)
    assert amounts() == [1, 2]


def test_steps_are_plain_functions_under_another_checkpointer_and_the_runs_own_in_a_workflow(file_url: str) -> None:
    from langgraph.checkpoint.memory import InMemorySaver

    app = one_node(lambda state: {"log": [charge_plainly()]}, InMemorySaver())
    assert app.invoke({"log": []}, thread())["log"] == ["plain"]

    async def node(state: State) -> State:
        return {"log": [await send("ann"), await send("bob")]}

    @everstep.workflow
    async def around() -> list[str]:
        found: list[str] = (await one_node(node, None).ainvoke({"log": []}))["log"]
        return found

    @everstep.workflow
    async def wrongly() -> None:
        await one_node(node, outside).ainvoke({"log": []}, thread())

    outside = EverstepSaver("memory:")
    assert everstep.run(around, id="r", url=file_url) == ["sent to ann", "sent to bob"]
    assert everstep.run(around, id="r", url=file_url) == ["sent to ann", "sent to bob"]
    assert DONE == [("send", "ann"), ("send", "bob")]
    with pytest.raises(Misuse, match="needs no EverstepSaver"):
        everstep.run(wrongly, url=file_url)
    outside.close()


@everstep.step
def charge_plainly() -> str:
    return "plain"


# -- tools --------------------------------------------------------------------------------------------------------
class Scripted(GenericFakeChatModel):
    """A model that says what it was told to say."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self


def agent(saver: Any, calls: list[dict[str, Any]], *, steps: Any = (charge, send, risk), **options: Any) -> Any:
    asking = [AIMessage("", tool_calls=calls)] if calls else []
    script = Scripted(messages=iter([*asking, AIMessage("that is all")]))
    graph = StateGraph(State, input_schema=Talk, output_schema=Talk)
    graph.add_node("model", lambda state: {"messages": [script.invoke(state["messages"])]}, input_schema=Talk)
    graph.add_node("tools", ToolNode(tools(steps), **options), input_schema=Talk)
    graph.add_edge(START, "model").add_edge("tools", "model")
    graph.add_conditional_edges(
        "model", lambda state: "tools" if getattr(state["messages"][-1], "tool_calls", None) else END
    )
    return graph.compile(checkpointer=saver)


class Talk(TypedDict):
    messages: Annotated[list[Any], operator.add]


def call(name: str, id: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "args": arguments, "id": id, "type": "tool_call"}


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_each_call_of_a_tool_is_recorded_under_its_id(durability: Any, saver: EverstepSaver) -> None:
    calls = [call("charge", "1", amount=5), call("charge", "2", amount=5), call("send", "3", to="ann")]
    app = agent(saver, calls)
    said = asyncio.run(app.ainvoke({"messages": []}, thread(), durability=durability))["messages"]
    assert [one.content for one in said] == ["", "charged 5", "charged 5", "sent to ann", "that is all"]
    assert sorted(one[:2] for one in DONE) == [("charge", 5), ("charge", 5), ("send", "ann")]
    lost = [(one.namespace, one.id) for one in saver.threads.rows("t", None)][:2]
    saver.threads.forget_states("t", lost)
    given, calls = ({"messages": []}, calls) if durability == "exit" else (None, [])
    again = asyncio.run(agent(saver, calls).ainvoke(given, thread(), durability=durability))["messages"]
    assert [one.content for one in again][1:4] == ["charged 5", "charged 5", "sent to ann"]
    assert len(DONE) == 3


def test_a_call_in_doubt_interrupts_the_graph_and_is_never_told_to_the_model(saver: EverstepSaver) -> None:
    app = agent(saver, [call("risk", "1", what="it")], handle_tool_errors=True)
    stopped = app.invoke({"messages": []}, thread())
    (asked,) = stopped["__interrupt__"]
    assert (asked.value["held"], asked.value["reason"]) == ("risk", "in-doubt")
    assert [one.type for one in stopped["messages"]] == ["ai"]
    assert "__interrupt__" in app.invoke(Command(resume=True), thread())
    (hold,) = saver.ground.blocking.holds()
    saver.ground.blocking.resolve(hold.run, "done", value="it worked", note="looked")
    said = app.invoke(Command(resume=True), thread())["messages"]
    assert [one.content for one in said] == ["", "it worked", "that is all"]
    assert DONE == [("risk", "it")]


@everstep.tool(effect="once", approval=lambda amount: amount > 10)
def pay(amount: int) -> str:
    """Pay somebody.

    Args:
        amount: how much, in euros
    """
    DONE.append(("charge", amount))
    return f"paid {amount}"


@pytest.mark.parametrize(("answer", "said"), [(True, "paid 50"), (False, "refused"), ("too much", "too much")])
def test_a_person_approves_just_the_arguments_that_a_tool_is_called_with(
    answer: Any, said: str, saver: EverstepSaver
) -> None:
    calls = [call("pay", "1", amount=5), call("pay", "2", amount=50)]
    app = agent(saver, calls, steps=[pay], handle_tool_errors=True)
    (asked,) = app.invoke({"messages": []}, thread())["__interrupt__"]
    assert asked.value == {"approve": "pay", "arguments": {"amount": 50}}
    answered = app.invoke(Command(resume=answer), thread())["messages"]
    assert said in answered[2].content
    assert amounts() == ([5, 50] if answer is True else [5])


def test_other_arguments_than_a_person_was_shown_are_not_approved(saver: EverstepSaver) -> None:
    given = iter([50, 51])
    app = one_node(lambda state: {"log": [pay(next(given))]}, saver)
    assert app.invoke({"log": []}, thread())["__interrupt__"][0].value["arguments"] == {"amount": 50}
    with pytest.raises(IdConflict, match="other arguments"):
        app.invoke(Command(resume=True), thread())
    assert amounts() == []


def test_what_a_model_said_is_not_asked_for_again(saver: EverstepSaver) -> None:
    asked: list[Any] = []

    class Counting(Scripted):
        def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
            asked.append(len(messages))
            return super()._generate(messages, *args, **options)

    def script() -> Any:
        calls = [call("charge", "1", amount=1)]
        return iter([AIMessage("one", tool_calls=calls, id="a"), AIMessage("two", id="b")])

    model = Counting(messages=script())

    def node(state: State) -> State:
        said = [ask_model(model, [("user", "hello")]), ask_model(model, [("user", "hello"), ("user", "more")])]
        return {"log": [*said, interrupt("?")]}

    async def async_node(state: State) -> State:
        return {"log": [await aask_model(model, [("user", "hello")]), interrupt("?")]}

    app = one_node(node, saver)
    app.invoke({"log": []}, thread())
    first, second, answer = app.invoke(Command(resume=1), thread())["log"]
    assert (first.content, first.tool_calls[0]["args"], second.content, answer) == ("one", {"amount": 1}, "two", 1)
    assert asked == [1, 2]
    model.messages = script()
    app = one_node(async_node, saver)
    asyncio.run(app.ainvoke({"log": []}, thread("async")))
    assert asyncio.run(app.ainvoke(Command(resume=2), thread("async")))["log"][0].content == "one"
    assert asked == [1, 2, 1]


def test_plain_options_of_a_model_are_arguments_and_objects_are_not(saver: EverstepSaver) -> None:
    options: dict[str, Any] = {"stop": ["."], "extra": {"b": 1, "a": 2}, "handler": object()}

    def node(state: State) -> State:
        model = Scripted(messages=iter([AIMessage("one")]))
        return {"log": [ask_model(model, [("user", "hello")], **options).content, interrupt("?")]}

    app = one_node(node, saver)
    app.invoke({"log": []}, thread())
    options["handler"], options["extra"] = object(), {"a": 2, "b": 1}
    app.invoke(None, thread())
    options["stop"] = ["!"]
    with pytest.raises(IdConflict, match="other arguments"):
        app.invoke(Command(resume=1), thread())
    options["stop"] = ["."]
    assert app.invoke(Command(resume=1), thread())["log"] == ["one", 1]


def test_a_saver_and_a_store_share_one_place(saver: EverstepSaver) -> None:
    with EverstepStore(saver) as store:
        store.put(("a",), "k", {"v": 1})
        assert store.get(("a",), "k").value == {"v": 1}  # type: ignore[union-attr]
    assert saver.get_tuple(thread()) is None


def test_one_function_may_be_several_steps_and_methods_are_steps(saver: EverstepSaver) -> None:
    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        @everstep.step
        def say(self, word: str) -> str:
            DONE.append((self.name, everstep.current().step))
            return f"{self.name}: {word}"

    def act(word: str) -> str:
        DONE.append((everstep.current().step, word))
        return word

    one, other = everstep.step(act, name="one"), everstep.step(act, name="other", effect="once")
    ann, bob = Client("ann"), Client("bob")

    def node(state: State) -> State:
        return {"log": [one("a"), other("a"), ann.say("hi"), bob.say("hi"), ann.say("hi"), interrupt("?")]}

    app = one_node(node, saver)
    app.invoke({"log": []}, thread())
    assert app.invoke(Command(resume=1), thread())["log"] == ["a", "a", "ann: hi", "bob: hi", "ann: hi", 1]
    names = [name for name, _ in DONE]
    assert names == ["one", "other", "ann", "bob", "ann"]
    kinds = {row.workflow for row in saver.ground.blocking.list()}
    assert {"step:one", "step:other"} < kinds


def test_what_is_handed_through_reaches_the_body_and_is_not_stored(saver: EverstepSaver) -> None:
    class Client:
        pass

    @everstep.step
    def send_by(client: everstep.Live[Client], to: str, *, times: int = 1) -> str:
        DONE.append((client, to, times))
        return to

    @everstep.step
    async def send_soon(to: str, client: everstep.Live[Client]) -> str:
        DONE.append((client, to, 0))
        return to

    client = Client()

    async def node(state: State) -> State:
        return {"log": [send_by(client, "ann", times=2), await send_soon("bob", client=client), interrupt("?")]}

    app = one_node(node, saver)
    asyncio.run(app.ainvoke({"log": []}, thread()))
    client = Client()
    assert asyncio.run(app.ainvoke(Command(resume=1), thread()))["log"] == ["ann", "bob", 1]
    assert [one[1:] for one in DONE] == [("ann", 2), ("bob", 0)]
    assert all(isinstance(one[0], Client) for one in DONE)


def test_a_transaction_in_a_node_is_committed_once(saver: EverstepSaver, tmp_path: Path) -> None:
    @everstep.transaction(f"sqlite:///{tmp_path}/other.db")
    def add(connection: Any, name: str) -> str:
        connection.execute("CREATE TABLE IF NOT EXISTS names (name TEXT)")
        connection.execute("INSERT INTO names VALUES (?)", (name,))
        return name

    def node(state: State) -> State:
        added: Any = add("ann")  # type: ignore[call-arg,arg-type]  # the connection is not the caller's to give
        return {"log": [added, interrupt("?")]}

    app = one_node(node, saver)
    app.invoke({"log": []}, thread())
    assert app.invoke(Command(resume=1), thread())["log"] == ["ann", 1]
    connection = open_raw(f"{tmp_path}/other.db")
    assert list(connection.execute("SELECT name FROM names")) == [("ann",)]
    connection.close()


def test_an_interrupt_inside_a_step_is_a_mistake_that_is_explained(saver: EverstepSaver) -> None:
    @everstep.step(effect="once")
    def asks() -> str:
        return str(interrupt("in here?"))

    app = one_node(lambda state: {"log": [asks()]}, saver)
    with pytest.raises(everstep.Fatal, match=r"calls interrupt\(\)"):
        app.invoke({"log": []}, thread())
    assert saver.ground.blocking.holds() == []


def test_whoever_is_interrupted_in_a_body_is_and_the_app_lives_on(saver: EverstepSaver) -> None:
    tried: list[int] = []

    @everstep.step
    def body() -> str:
        tried.append(1)
        if len(tried) == 1:
            raise KeyboardInterrupt
        return "later"

    app = one_node(lambda state: {"log": [body()]}, saver)
    with pytest.raises(KeyboardInterrupt):
        app.invoke({"log": []}, thread())
    assert app.invoke(None, thread())["log"] == ["later"]
