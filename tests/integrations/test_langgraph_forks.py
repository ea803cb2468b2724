"""Processes that are forked after a saver was opened: nothing is done in the name of the process that opened it."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import everstep
from everstep.errors import Misuse
from everstep.integrations.langgraph import EverstepSaver, EverstepStore

THREAD: Any = {"configurable": {"thread_id": "t"}}
REFUSED, DID = 3, 4


class State(TypedDict, total=False):
    done: str


@everstep.step(effect="once")
def charge() -> str:
    return "charged"


def ask(state: State) -> State:
    interrupt("charge?")
    return {"done": charge()}


def app_of(saver: EverstepSaver) -> Any:
    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    return graph.compile(checkpointer=saver)


def in_fork(work: Callable[[], Any]) -> int:
    """Do it in a fork of this process, and return how that ended; by a signal if it hung."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(DID)
        except Misuse as refused:
            os._exit(REFUSED if "is a fork of it" in str(refused) else 5)
        except BaseException:  # noqa: BLE001  # whatever it is, the fork must not go on as a test
            traceback.print_exc()
        os._exit(6)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_of_the_process_that_opened_a_saver_is_told_to_open_its_own(url: str) -> None:
    with EverstepSaver(url) as saver, EverstepStore(saver) as store:
        app = app_of(saver)
        app.invoke({}, THREAD)
        assert in_fork(lambda: app.invoke(Command(resume=True), THREAD)) == REFUSED
        assert in_fork(lambda: app.get_state(THREAD)) == REFUSED
        assert in_fork(lambda: store.put(("a",), "k", {"v": 1})) == REFUSED
        assert in_fork(saver.close) == DID  # as at the end of `with`: it takes nothing from the other
        assert app.invoke(Command(resume=True), THREAD) == {"done": "charged"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_opens_its_own_and_an_app_refuses_as_well(file_url: str) -> None:
    def own() -> None:
        with EverstepSaver(file_url) as saver:
            assert app_of(saver).invoke(Command(resume=True), THREAD) == {"done": "charged"}

    with EverstepSaver(file_url) as saver, everstep.open(file_url) as app:
        app_of(saver).invoke({}, THREAD)
        assert in_fork(app.list) == REFUSED
        assert in_fork(app.close) == DID
        assert in_fork(own) == DID
        assert len(app.list()) == 1
