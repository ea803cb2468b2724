"""Time travel with steps in nodes: each branch does its own work, once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

import everstep
from everstep.integrations.langgraph import EverstepSaver
from tests.integrations.charging import DONE, THREAD, State, charge


def laps(saver: EverstepSaver) -> Any:
    graph = StateGraph(State)
    graph.add_node("node", lambda state: {"log": [charge(1)]})
    graph.add_edge(START, "node")
    graph.add_conditional_edges("node", lambda state: "node" if len(state["log"]) < 4 else END)
    return graph.compile(checkpointer=saver)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("way", ["from there", "changed there", "new input there"])
def test_each_branch_does_its_own_work_also_in_supersteps_of_the_same_numbers(
    way: str, durability: Any, saver: EverstepSaver
) -> None:
    app = laps(saver)
    app.invoke({"log": []}, THREAD)
    early = next(one.config for one in app.get_state_history(THREAD) if len(one.values["log"]) == 1)
    for branch in (1, 2, 3):
        given = {"log": []} if way == "new input there" else None
        where = app.update_state(early, {"amount": 1}) if way == "changed there" else early
        assert app.invoke(given, where, durability=durability)["log"] == ["charged 1"] * 4
        assert len(DONE) == 4 + 3 * branch


def ask(state: State) -> State:
    return {"log": [charge(5), interrupt("ship?")]}


def asking(saver: EverstepSaver) -> Any:
    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    return graph.compile(checkpointer=saver)


@pytest.mark.parametrize("is_changed", [True, False])
def test_in_a_branch_an_effect_before_an_interrupt_happens_once(is_changed: bool, file_url: str) -> None:
    with EverstepSaver(file_url) as saver:
        app = asking(saver)
        app.invoke({"amount": 1}, THREAD)
        app.invoke(Command(resume=1), THREAD)
        asked = next(one.config for one in app.get_state_history(THREAD) if one.next == ("ask",))
        app.invoke(None, app.update_state(asked, {"amount": 2}) if is_changed else asked)
        assert DONE == [5, 5]
    with EverstepSaver(file_url) as saver:  # which knows nothing of the first one
        assert asking(saver).invoke(Command(resume=2), THREAD)["log"] == ["charged 5", 2]
        assert DONE == [5, 5]


def test_an_answer_that_is_given_a_second_time_does_nothing_a_second_time(saver: EverstepSaver) -> None:
    app = asking(saver)
    app.invoke({"amount": 1}, THREAD)
    asked = app.get_state(THREAD).config
    for _ in range(2):  # as a browser does that sends its form again, with the checkpoint in it
        assert app.invoke(Command(resume=1), asked)["log"] == ["charged 5", 1]
    assert DONE == [5]


def test_a_branch_that_lost_its_checkpoints_does_not_do_its_work_again(saver: EverstepSaver) -> None:
    app = laps(saver)
    app.invoke({"log": []}, THREAD)
    early = next(one.config for one in app.get_state_history(THREAD) if len(one.values["log"]) == 1)
    there = {row.id for row in saver.threads.rows("t", None)}
    app.invoke(None, early)
    *lost, first = [row.id for row in saver.threads.rows("t", None) if row.id not in there]
    saver.threads.forget_states("t", [("", id) for id in lost])
    assert len(DONE) == 7
    for begins in ({**THREAD["configurable"], "checkpoint_id": first}, THREAD["configurable"]):
        assert app.invoke(None, {"configurable": begins})["log"] == ["charged 1"] * 4
        assert len(DONE) == 7


def test_graphs_of_many_threads_at_a_time_find_their_branches(saver: EverstepSaver) -> None:
    app = asking(saver)

    def go(number: int) -> None:
        thread: Any = {"configurable": {"thread_id": f"t-{number}"}}
        for _ in range(3):
            app.invoke({"amount": number}, thread)
            app.invoke(Command(resume=number), thread)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(go, number) for number in range(24)]:
            done.result()
    assert len(DONE) == 72


# -- to go on from a checkpoint by its name ----------------------------------------------------------------------------
def failing(saver: EverstepSaver, fails: list[bool], nested: str = "") -> Any:
    """Two laps of a node that charges, and fails in the second one after that; or of one that runs a graph with it."""

    def pay(state: State) -> State:
        receipt = charge(5)
        if state["log"] and fails:
            raise RuntimeError("the process dies here")
        return {"log": [receipt]}

    inner = StateGraph(State)
    inner.add_node("pay", pay)
    inner.add_edge(START, "pay")
    inside = inner.compile()

    def run_graph(state: State) -> State:
        return {"log": inside.invoke(state)["log"][-1:]}

    async def await_graph(state: State) -> State:
        return {"log": (await inside.ainvoke(state))["log"][-1:]}

    graph = StateGraph(State)
    graph.add_node("node", {"": pay, "invoke": run_graph, "ainvoke": await_graph}[nested])
    graph.add_edge(START, "node")
    graph.add_conditional_edges("node", lambda state: "node" if len(state["log"]) < 2 else END)
    return graph.compile(checkpointer=saver)


def invoked(app: Any, nested: str, *given: Any, **options: Any) -> Any:
    return asyncio.run(app.ainvoke(*given, **options)) if nested == "ainvoke" else app.invoke(*given, **options)


@pytest.mark.parametrize("nested", ["", "invoke", "ainvoke"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("names_it", ["always", "once", "the newest"])
def test_going_on_from_the_newest_checkpoint_by_its_name_does_nothing_again(
    names_it: str, durability: Any, nested: str, file_url: str
) -> None:
    fails = [True]
    with EverstepSaver(file_url) as saver:
        app = failing(saver, fails, nested)
        with pytest.raises(RuntimeError):
            invoked(app, nested, {"log": []}, THREAD, durability=durability)
        where = app.get_state(THREAD).config
        for _ in range(3):
            with pytest.raises(RuntimeError):
                invoked(app, nested, None, where, durability=durability)
            where = {"always": where, "once": THREAD, "the newest": app.get_state(THREAD).config}[names_it]
        assert DONE == [5, 5], "one for each lap"
    fails.clear()
    with EverstepSaver(file_url) as saver:  # which knows nothing of the first one
        app = failing(saver, fails, nested)
        assert invoked(app, nested, None, where, durability=durability)["log"] == ["charged 5"] * 2
        assert DONE == [5, 5]
        early = [one.config for one in app.get_state_history(THREAD) if one.values["log"] == [] and one.next]
        for branch in (1, 2) if early else ():  # but that is time travel
            assert invoked(app, nested, None, early[0], durability=durability)["log"] == ["charged 5"] * 2
            assert len(DONE) == 2 + 2 * branch


def with_a_graph_as_node(saver: EverstepSaver, fails: list[bool]) -> Any:
    """A node that charges, and a graph of two more, of which the second one fails after that."""

    def last(state: State) -> State:
        receipt = charge(3)
        if fails:
            raise RuntimeError("the process dies here")
        return {"log": [receipt]}

    inner = StateGraph(State)
    inner.add_node("next", lambda state: {"log": [charge(2)]})
    inner.add_node("last", last)
    inner.add_edge(START, "next")
    inner.add_edge("next", "last")
    graph = StateGraph(State)
    graph.add_node("first", lambda state: {"log": [charge(1)]})
    graph.add_node("inner", inner.compile())
    graph.add_edge(START, "first")
    graph.add_edge("first", "inner")
    return graph.compile(checkpointer=saver)


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_by_its_name_a_thread_goes_on_in_a_graph_that_is_a_node(
    durability: Any, keep: int | None, file_url: str
) -> None:
    fails = [True]
    where = THREAD
    for _ in range(3):
        with EverstepSaver(file_url, keep=keep) as saver:
            app = with_a_graph_as_node(saver, fails)
            with pytest.raises(RuntimeError):
                app.invoke(None if where is not THREAD else {"log": []}, where, durability=durability)
            where = app.get_state(THREAD).config
        assert DONE == [1, 2, 3]
    fails.clear()
    with EverstepSaver(file_url, keep=keep) as saver:
        log = with_a_graph_as_node(saver, fails).invoke(None, where, durability=durability)["log"]
    assert log[-1] == "charged 3"
    assert DONE == [1, 2, 3]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_branch_that_fails_before_its_first_checkpoint_goes_on_when_it_is_begun_again(
    durability: Any, saver: EverstepSaver
) -> None:
    fails: list[bool] = []
    app = failing(saver, fails)
    app.invoke({"log": []}, THREAD)
    early = next(one.config for one in app.get_state_history(THREAD) if len(one.values["log"]) == 1)
    fails.append(True)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            app.invoke(None, early, durability=durability)
    assert DONE == [5, 5, 5]
    fails.clear()
    assert app.invoke(None, early, durability=durability)["log"] == ["charged 5"] * 2
    assert DONE == [5, 5, 5]


def test_new_input_at_the_newest_checkpoint_is_a_new_turn(saver: EverstepSaver) -> None:
    app = laps(saver)
    for turn in (1, 2, 3):
        where = app.get_state(THREAD).config if turn > 1 else THREAD
        app.invoke({"log": []}, where)
        assert len(DONE) == 3 + turn


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_command_at_the_newest_checkpoint_by_its_name_does_nothing_again(
    durability: Any, saver: EverstepSaver
) -> None:
    fails = [True]
    app = failing(saver, fails)
    with pytest.raises(RuntimeError):
        app.invoke({"log": []}, THREAD)
    fails.clear()
    app.invoke(Command(update={"amount": 1}), app.get_state(THREAD).config, durability=durability)
    assert DONE == [5, 5]


def test_a_node_after_a_change_by_a_person_and_in_a_copied_thread_is_another_call(saver: EverstepSaver) -> None:
    app = asking(saver)
    app.invoke({"amount": 1}, THREAD)
    saver.copy_thread("t", "copy")
    copied: Any = {"configurable": {"thread_id": "copy"}}
    assert app.invoke(Command(resume=1), copied)["log"] == ["charged 5", 1]
    assert DONE == [5, 5]
    app.update_state(THREAD, {"amount": 2})
    app.invoke(None, THREAD)
    assert DONE == [5, 5, 5]
    assert app.invoke(Command(resume=2), THREAD)["log"] == ["charged 5", 2]
    assert DONE == [5, 5, 5]


# -- copies of one checkpoint ------------------------------------------------------------------------------------------
@everstep.step(effect="once")
def take_number() -> int:
    DONE.append(len(DONE))
    return DONE[-1]


def counting(saver: EverstepSaver, fails: list[bool]) -> Any:
    """Four laps of a node that takes a number; one that fails does so after that, but not in the first lap."""

    def count(state: State) -> State:
        number = take_number()
        if fails and state["log"]:
            raise RuntimeError("the process dies here")
        return {"log": [number]}

    graph = StateGraph(State)
    graph.add_node("node", count)
    graph.add_edge(START, "node")
    graph.add_conditional_edges("node", lambda state: "node" if len(state["log"]) < 4 else END)
    return graph.compile(checkpointer=saver)


def fail(app: Any, fails: list[bool], where: Any, given: Any = None, **options: Any) -> Any:
    """Let a graph fail, and return the checkpoint that is the newest then."""
    fails.append(True)
    with pytest.raises(RuntimeError):
        app.invoke(given, where, **options)
    fails.clear()
    return app.get_state(THREAD).config


def after_one_lap(app: Any) -> Any:
    return next(one.config for one in app.get_state_history(THREAD) if len(one.values["log"]) == 1)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_two_copies_of_one_checkpoint_do_their_own_work(durability: Any, saver: EverstepSaver) -> None:
    fails: list[bool] = []
    app = counting(saver, fails)
    assert app.invoke({"log": []}, THREAD)["log"] == [0, 1, 2, 3]
    early = after_one_lap(app)
    left = fail(app, fails, early, durability=durability)
    assert app.invoke(None, early, durability=durability)["log"] == [0, 4, 5, 6], "it goes on with what failed"
    assert app.invoke(None, left, durability=durability)["log"] == [0, 7, 8, 9]
    assert app.invoke(None, left, durability=durability)["log"] == [0, 10, 11, 12]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("is_newest", [True, False])
def test_what_a_person_changes_and_what_a_copy_goes_on_with_do_not_mix(
    is_newest: bool, durability: Any, saver: EverstepSaver
) -> None:
    fails: list[bool] = []
    app = counting(saver, fails)
    if is_newest:
        early = fail(app, fails, THREAD, {"log": []})
    else:
        app.invoke({"log": []}, THREAD)
        early = after_one_lap(app)
    left = fail(app, fails, early, durability=durability)
    own = DONE[-1]
    changed = app.update_state(early, {"amount": 2})
    done = len(DONE)
    assert app.invoke(None, changed, durability=durability)["log"] == [0, done, done + 1, done + 2]
    assert app.invoke(None, left, durability=durability)["log"] == [0, own, done + 3, done + 4]


def test_a_copy_of_which_another_copy_failed_is_still_where_the_branch_goes_on(saver: EverstepSaver) -> None:
    fails: list[bool] = []
    app = counting(saver, fails)
    app.invoke({"log": []}, THREAD)
    early = after_one_lap(app)
    left = fail(app, fails, early)
    fail(app, fails, early)
    fail(app, fails, left)  # which is not the newest, so that it is copied as well
    assert app.invoke(None, early)["log"] == [0, 4, 5, 6]
