"""Threads and items of LangGraph move between stores by a file, and are verified like runs."""

import json
import operator
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from click.testing import CliRunner
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

import everstep
from everstep import step
from everstep.cli import main
from everstep.engine.app.ground import Right
from everstep.errors import IdConflict, ThreadActive
from everstep.integrations.langgraph import EverstepSaver, EverstepStore
from tests.waiting import open_raw
from tests.worlds.ledger import PAID

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    items: Annotated[list[str], operator.add]


@step(effect="once", name="pay_in_a_node")
def pay(amount: str) -> str:
    PAID.append(amount)
    return f"receipt {amount}"


def node(state: State) -> State:
    receipt = pay("7")
    answer = interrupt("go on?")
    return {"items": [f"{receipt} {answer}" + "x" * 500]}


def graph_with(saver: EverstepSaver) -> Any:
    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.add_edge("node", END)
    return graph.compile(checkpointer=saver)


def everstep_says(*words: str) -> Any:
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_thread_goes_on_in_another_store_and_what_its_nodes_did_is_not_done_again(tmp_path: Path) -> None:
    here, there, file = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db", str(tmp_path / "t.jsonl")
    with EverstepSaver(here) as saver:
        graph_with(saver).invoke({"items": ["y" * 500]}, CONFIG)
        history = [one.config for one in graph_with(saver).get_state_history(CONFIG)]
    assert PAID == ["7"]
    said = everstep_says("export", file, "--thread", "t", "--url", here)
    assert said["threads"] == ["t"]
    assert len(said["runs"]) == 1, "the step of its node comes along"
    assert everstep_says("import", file, "--url", there)["threads"] == ["t"]
    with EverstepSaver(there) as saver:
        app = graph_with(saver)
        assert [one.config for one in app.get_state_history(CONFIG)] == history
        assert app.get_state(CONFIG).next == ("node",)
        assert app.invoke(Command(resume="yes"), CONFIG)["items"][1].startswith("receipt 7 yes")
    assert PAID == ["7"], "the place of the step is the same: when the thread was begun came along"
    said = everstep_says("verify", "--all", "--url", there)
    assert [(one["kind"], one["name"], one["sound"]) for one in said["others"]] == [("thread", "t", True)]
    done = CliRunner().invoke(main, ["import", file, "--url", there])
    assert "already" in done.output
    assert everstep_says("import", file, "--skip-existing", "--url", there)["threads"] == []


def test_items_keep_their_namespaces_keys_and_times(tmp_path: Path) -> None:
    here, there, file = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db", str(tmp_path / "i.jsonl")
    with EverstepStore(here) as store:
        store.put(("users", "ann"), "k", {"text": "größe"})
        store.put(("users",), "k", {"n": 1}, ttl=60)
        before = [store.get(("users", "ann"), "k"), store.get(("users",), "k")]
    assert everstep_says("export", file, "--all", "--url", here)["items"] == 2
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert sorted(line[1][0] for line in lines if line[0] == "item") == [["users"], ["users", "ann"]]
    assert everstep_says("import", file, "--url", there)["items"] == 2
    with EverstepStore(there) as store:
        assert [store.get(("users", "ann"), "k"), store.get(("users",), "k")] == before
        with pytest.raises(IdConflict), everstep.open(there) as app:
            app.import_(file)


def test_a_thread_that_is_being_run_is_not_exported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with EverstepSaver(url) as saver:
        graph_with(saver).invoke({"items": []}, CONFIG)
        call = Counter[str]()  # whatever can be referred to
        saver.ground.take(Right("t", call))
        with everstep.open(url) as app, pytest.raises(ThreadActive):
            app.export([], str(tmp_path / "t.jsonl"), threads=["t"])
    assert not list(tmp_path.glob("t.jsonl*"))
    assert not call


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE saved_states SET body = x'00' WHERE rowid = 1",
        "UPDATE saved_parts SET value = x'90'",
        "DELETE FROM saved_parts",
        "UPDATE saved_writes SET body = x'c0'",
        "UPDATE saved_items SET value = x'c1'",
    ],
)
def test_damage_is_found_by_verify_and_never_exported(tmp_path: Path, damage: str) -> None:
    url, file = f"sqlite:///{tmp_path}/a.db", str(tmp_path / "t.jsonl")
    with EverstepSaver(url) as saver:
        graph_with(saver).invoke({"items": ["y" * 500]}, CONFIG)
        EverstepStore(saver).put(("users",), "k", {"n": 1})
    assert everstep_says("verify", "--all", "--url", url)["sound"]
    connection = open_raw(tmp_path / "a.db")
    connection.execute(damage)
    connection.close()
    done = CliRunner().invoke(main, ["verify", "--all", "--url", url])
    assert done.exit_code == 1
    assert "1 damaged" in done.output
    done = CliRunner().invoke(main, ["export", "--all", "--leave", file, "--url", url])
    assert done.exit_code == 1
    assert not Path(file).exists()


def test_a_damaged_file_of_a_thread_imports_nothing(tmp_path: Path) -> None:
    here, there, file = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db", tmp_path / "t.jsonl"
    with EverstepSaver(here) as saver:
        graph_with(saver).invoke({"items": ["y" * 500]}, CONFIG)
    everstep_says("export", str(file), "--thread", "t", "--url", here)
    lines = file.read_bytes().splitlines(keepends=True)
    part = next(at for at, line in enumerate(lines) if line.startswith(b'["part"'))
    file.write_bytes(b"".join(lines[:part] + lines[part + 1 :]))
    done = CliRunner().invoke(main, ["import", str(file), "--url", there])
    assert done.exit_code == 1
    assert "does not match its digest" in done.output
