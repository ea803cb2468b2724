"""What is stored: little, verified, never code, and no longer than is wanted."""

import asyncio
import copy
import dataclasses
import enum
import importlib
import operator
import os
import random
import string
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import ormsgpack
import pydantic
import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

import everstep
from everstep.errors import Damaged, Misuse, NotDecodable
from everstep.integrations.langgraph import EverstepSaver, EverstepStore
from everstep.integrations.langgraph.serde import StrictSerializer
from tests.waiting import open_raw

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


class State(TypedDict, total=False):
    items: Annotated[list[Any], operator.add]
    thing: Any
    n: int


def growing(steps: int, saver: Any, size: int = 1000) -> Any:
    chance = random.Random(7)

    def grow(state: State) -> State:
        return {"items": ["".join(chance.choices(string.ascii_letters, k=size))], "n": state.get("n", 0) + 1}

    graph = StateGraph(State)
    graph.add_node("grow", grow)
    graph.add_edge(START, "grow")
    graph.add_conditional_edges("grow", lambda state: END if state["n"] % steps == 0 else "grow")
    return graph.compile(checkpointer=saver)


def path_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def run(app: Any, given: Any = None, **options: Any) -> Any:
    return app.invoke(given or {"items": []}, {**CONFIG, "recursion_limit": 2000}, **options)


def test_a_list_that_grows_is_stored_as_what_was_appended(file_url: str) -> None:
    with EverstepSaver(file_url, durability="process") as saver:
        whole = run(growing(800, saver))
    size = sum(path.stat().st_size for path in Path(path_of(file_url)).parent.glob("everstep.db*"))
    assert size < 5_000_000
    with EverstepSaver(file_url) as saver:
        assert growing(800, saver).get_state(CONFIG).values == whole
        assert len(saver.ground.saved.series("t")) == 1


def test_a_list_that_was_changed_in_the_middle_is_what_it_is(saver: EverstepSaver) -> None:
    def change(state: State) -> State:
        things = state["thing"]
        things[0]["text"] = "changed " * 20  # what LangGraph's own savers notice, too
        return {"thing": [*things, {"text": "new " * 30}]}

    graph = StateGraph(State)
    graph.add_node("change", change)
    graph.add_edge(START, "change")
    app = graph.compile(checkpointer=saver)
    app.invoke({"thing": [{"text": "old " * 30}]}, CONFIG)
    expected = [{"text": "changed " * 20}, {"text": "new " * 30}]
    assert app.get_state(CONFIG).values["thing"] == expected


def test_two_branches_of_one_list_do_not_mix(file_url: str) -> None:
    with EverstepSaver(file_url) as saver:
        app = growing(2, saver, 100)
        run(app)
        early = next(one for one in app.get_state_history(CONFIG) if len(one.values.get("items", [])) == 1)
        ends = [app.update_state(early.config, {"items": [letter * 100]}) for letter in "ab"]
        ends += [app.update_state(ends[0], {"items": ["c" * 100]}), app.update_state(ends[1], {"items": ["d" * 100]})]
    with EverstepSaver(file_url) as other:
        app = growing(2, other, 100)
        found = [[item[0] for item in app.get_state(end).values["items"][1:]] for end in ends]
        assert found == [["a"], ["b"], ["a", "c"], ["b", "d"]]


# -- damage -------------------------------------------------------------------------------------------------------
def damage(url: str, sql: str) -> None:
    connection = open_raw(path_of(url))
    connection.execute(sql)
    assert connection.changes() > 0
    connection.close()


NEWEST = "(SELECT max(id) FROM saved_states)"
DAMAGES = {
    "the body of a state": f"UPDATE saved_states SET body = x'00' WHERE id = {NEWEST}",
    "the parent of a state": f"UPDATE saved_states SET parent = 'x' WHERE id = {NEWEST}",
    "a digest": f"UPDATE saved_states SET digest = x'00' WHERE id = {NEWEST}",
    "a part": "UPDATE saved_parts SET value = x'01' WHERE number = (SELECT max(number) FROM saved_parts)",
    "a part that is missing": "DELETE FROM saved_parts WHERE number = (SELECT max(number) FROM saved_parts)",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_last_one_that_is_sound(what: str, file_url: str) -> None:
    with EverstepSaver(file_url) as saver:
        whole = run(growing(5, saver))
        newest = saver.get_tuple(CONFIG)
    damage(file_url, DAMAGES[what])
    with EverstepSaver(file_url) as saver:
        app = growing(5, saver)
        found = app.get_state(CONFIG)
        assert found.config != newest.config  # type: ignore[union-attr]
        assert len(saver.get_tuple(CONFIG).checkpoint["channel_values"]["items"]) == 4  # type: ignore[union-attr]
        with pytest.raises(Damaged):
            saver.get_tuple(newest.config)  # type: ignore[union-attr]
        assert app.invoke(None, CONFIG) == whole


def test_of_a_call_with_a_damaged_write_nothing_is_believed(file_url: str) -> None:
    with EverstepSaver(file_url) as saver:
        saver.put(CONFIG, {**empty_checkpoint(), "id": "1"}, {}, {})
        at: Any = {"configurable": {**CONFIG["configurable"], "checkpoint_id": "1"}}
        saver.put_writes(at, [("a", 1), ("b", 2)], "first")
        saver.put_writes(at, [("a", 3)], "second")
        damage(file_url, "UPDATE saved_writes SET body = x'00' WHERE call = 'first' AND place = 0")
        assert saver.get_tuple(CONFIG).pending_writes == [("second", "a", 3)]  # type: ignore[union-attr]
        with pytest.raises(Damaged):
            saver.get_delta_channel_history(config=_child(saver), channels=["a"])


def _child(saver: EverstepSaver) -> Any:
    at: Any = {"configurable": {**CONFIG["configurable"], "checkpoint_id": "1"}}
    return saver.put(at, {**empty_checkpoint(), "id": "2"}, {}, {})


# -- stored bytes are never code ----------------------------------------------------------------------------------
class Plain(BaseModel):
    name: str


CALLED: list[Any] = []


class Evil:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        CALLED.append(args)


def hostile(code: int, *parts: Any) -> tuple[str, bytes]:
    return "msgpack", ormsgpack.packb(ormsgpack.Ext(code, ormsgpack.packb(parts)))


CALLING = (0, 1, 2, 4, 5)
"""The kinds of values that LangGraph makes by calling what they name."""


@pytest.mark.parametrize("code", range(8))
def test_bytes_that_name_something_to_call_are_not_believed(code: int, tmp_path: Path) -> None:
    serde, file = StrictSerializer(), tmp_path / "made by hostile bytes"
    for given in (
        hostile(code, "os", "system", f"touch '{file}'", "__call__"),
        hostile(code, "os", "mkdir", [str(file)]),
        hostile(code, __name__, "Evil", {"a": 1}),
        hostile(code, "subprocess", "Popen", [["touch", str(file)]]),
    ):
        with pytest.raises(NotDecodable) if code in CALLING else nullcontext():
            serde.loads_typed(given)
    assert not file.exists()
    assert CALLED == []
    JsonPlusSerializer().loads_typed(hostile(0, __name__, "Evil", 1))
    assert CALLED == [(1,)], "LangGraph's own serializer would have called it, so the bytes are right"
    CALLED.clear()


def test_nothing_is_imported_because_stored_bytes_name_it(tmp_path: Path) -> None:
    module = tmp_path / "never_imported.py"
    module.write_text("raise SystemExit('imported')")
    code = f"""
import sys, ormsgpack, everstep.errors
sys.path.insert(0, {str(tmp_path)!r})
from everstep.integrations.langgraph.serde import StrictSerializer
bad = ormsgpack.packb(ormsgpack.Ext(2, ormsgpack.packb(["never_imported", "X", {{}}])))
try:
    StrictSerializer().loads_typed(("msgpack", bad))
except everstep.errors.NotDecodable as error:
    print("never_imported" in sys.modules, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("False A saved value is of type never_imported.X."), done.stderr
    assert "allowed=[('never_imported', 'X')]" in done.stdout


KINDS_OF_DATA = """
import dataclasses, enum, typing, pydantic
@dataclasses.dataclass
class Order: amount: int
class Colour(enum.Enum): RED = "red"
class Pair(typing.NamedTuple):
    one: int
class Model(pydantic.BaseModel): amount: int
VALUES = {"Order": Order(5), "Colour": Colour.RED, "Pair": Pair(1), "Model": Model(amount=5)}
"""


@pytest.mark.parametrize("name", ["Order", "Colour", "Pair", "Model"])
def test_a_value_whose_module_is_not_imported_yet_is_an_error_and_not_another_value(
    name: str, tmp_path: Path, file_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_later.py").write_text(KINDS_OF_DATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    value = importlib.import_module("imported_later").VALUES[name]
    with EverstepSaver(file_url) as saver, EverstepStore(saver) as store:
        app = growing(1, saver)
        app.update_state(CONFIG, {"thing": [{"deep": value}]})
        store.put(("a",), "k", {"thing": value})
        module = sys.modules.pop("imported_later")
        for read in (lambda: app.get_state(CONFIG), lambda: list(saver.list(CONFIG)), lambda: store.get(("a",), "k")):
            with pytest.raises(NotDecodable, match=rf"imported_later.{name}.*import it first.*allowed=") as error:
                read()
            assert error.value.path == f"imported_later.{name}"
        sys.modules["imported_later"] = module
        assert app.get_state(CONFIG).values["thing"] == [{"deep": value}]
        assert store.get(("a",), "k").value == {"thing": value}  # type: ignore[union-attr]
        sys.modules.pop("imported_later")
    with EverstepSaver(file_url, allowed=[("imported_later", name)]) as saver:
        thing = growing(1, saver).get_state(CONFIG).values["thing"][0]["deep"]
        assert type(thing).__name__ == name
    sys.modules.pop("imported_later")


@pytest.mark.parametrize("kind", ["pickle", "json", "yaml"])
def test_other_kinds_of_bytes_are_not_read(kind: str) -> None:
    with pytest.raises(Damaged, match="never written"):
        StrictSerializer().loads_typed((kind, b"cos\nsystem\n(S'true'\ntR."))


def test_plain_data_comes_back_as_itself_and_other_types_when_they_are_allowed() -> None:
    strict = StrictSerializer()
    assert strict.loads_typed(strict.dumps_typed(Plain(name="ann"))) == Plain(name="ann")
    allowing = StrictSerializer([Evil]).with_msgpack_allowlist([("os", "getpid")])
    assert isinstance(allowing.loads_typed(hostile(0, __name__, "Evil", 1)), Evil)
    CALLED.clear()


@pytest.mark.parametrize("key", ["'", "x') OR 1=1 --", 'a"b', "$.a"])
def test_the_keys_of_a_filter_are_never_part_of_a_statement(key: str, saver: EverstepSaver) -> None:
    saver.put(CONFIG, {**empty_checkpoint(), "id": "1"}, {"source": "loop", "odd": 1}, {})  # type: ignore[typeddict-unknown-key]
    assert list(saver.list(None, filter={key: 1})) == []
    assert len(list(saver.list(None, filter={"odd": 1}))) == 1


# -- using it -----------------------------------------------------------------------------------------------------
def test_it_is_used_from_many_threads_loops_and_copies_while_it_is_listed(saver: EverstepSaver) -> None:
    def use(number: int) -> None:
        mine = copy.copy(saver)
        config: Any = {"configurable": {"thread_id": f"t{number}", "checkpoint_ns": ""}}
        app = growing(5, mine, 50)
        for lap in range(2):
            if lap:
                asyncio.run(app.ainvoke({"items": []}, config))
            else:
                app.invoke({"items": []}, config)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    listed = 0
    while any(one.is_alive() for one in threads):
        for found in saver.list(None):
            listed += 1
            saver.put_writes(found.config, [("seen", True)], "a looker")
    for one in threads:
        one.join()
    for number in range(6):
        state = growing(5, saver, 50).get_state({"configurable": {"thread_id": f"t{number}"}})
        assert (len(state.values["items"]), state.values["n"]) == (10, 10)
    assert listed


def test_old_checkpoints_go_if_that_is_wanted(file_url: str) -> None:
    with EverstepSaver(file_url, keep=3) as saver:
        whole = run(growing(50, saver, 100))
        assert len(list(saver.list(CONFIG))) < 25
        assert growing(50, saver, 100).get_state(CONFIG).values == whole
    with pytest.raises(Misuse, match="keep=0"):
        EverstepSaver("memory:", keep=0)


def test_threads_that_nobody_uses_go_and_what_living_ones_did_stays(file_url: str) -> None:
    @everstep.step
    def act(name: str) -> str:
        return name

    def app(saver: Any) -> Any:
        graph = StateGraph(State)
        graph.add_node("act", lambda state: {"items": [act(state["thing"])]})
        graph.add_edge(START, "act")
        return graph.compile(checkpointer=saver)

    with EverstepSaver(file_url) as saver:
        for name in ("old", "new"):
            app(saver).invoke({"thing": name}, {"configurable": {"thread_id": name}})
            if name == "old":
                begun = saver.ground.now()
        assert saver.ground.blocking.gc(older_than=0).runs == []
        assert saver.forget_threads((saver.ground.now() - begun) / 1e6) == ["old"]
        assert [one.config["configurable"]["thread_id"] for one in saver.list(None)].count("new") == 3
        (gone,) = saver.ground.blocking.gc(older_than=0).runs
        assert gone.startswith("old/act/act/")


async def test_an_app_with_the_loop_of_an_application_is_not_shared(file_url: str) -> None:
    async with everstep.open(file_url) as app:
        with pytest.raises(Misuse, match="cannot be shared"):
            EverstepSaver(app)


def test_an_app_that_is_open_already_is_shared(file_url: str) -> None:
    with everstep.open(file_url) as app:
        with EverstepSaver(app) as saver:
            run(growing(2, saver))
        assert app.list() == []
    assert os.path.exists(path_of(file_url))


# -- code of types that nobody allowed ---------------------------------------------------------------------------------
class Level(enum.Enum):
    LOW = 1

    @classmethod
    def _missing_(cls, value: object) -> "Level":
        CALLED.append(("missing", value))
        return cls.LOW


@dataclasses.dataclass(frozen=True)
class Derived:
    name: str
    level: Level = Level.LOW
    length: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        CALLED.append(("post_init", self.name))
        object.__setattr__(self, "length", len(self.name))


class Pair(NamedTuple):
    first: str
    second: int


class Within(pydantic.BaseModel):
    names: tuple[str, ...] = ()


class Checked(pydantic.BaseModel):
    name: str
    within: Within = Within()
    _seen: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("name")
    @classmethod
    def look(cls, value: str) -> str:
        CALLED.append(("validator", value))
        return value

    @pydantic.model_validator(mode="before")
    @classmethod
    def look_first(cls, value: Any) -> Any:
        CALLED.append(("before", value))
        return value

    def model_post_init(self, context: Any) -> None:
        CALLED.append(("model_post_init", self.name))


class Made(pydantic.BaseModel):
    name: str

    def __init__(self, **given: Any) -> None:
        CALLED.append(("init", given))
        super().__init__(**given)


OWN_CODE: list[Any] = [
    Derived("ann"),
    {"within": [Derived("ann"), {Derived("bob")}]},
    Pair("ann", 1),
    Level.LOW,
    Checked(name="ann", within=Within(names=("x", "y"))),
    [Made(name="ann")],
]
CALLED.clear()


@pytest.mark.parametrize("value", OWN_CODE)
def test_a_type_that_nobody_allowed_comes_back_and_none_of_its_code_is_run(value: Any) -> None:
    serde = StrictSerializer()
    stored = serde.dumps_typed(value)
    CALLED.clear()
    back = serde.loads_typed(stored)
    assert CALLED == []
    assert back == value
    assert type(back) is type(value)


def test_what_does_not_fit_such_a_type_is_refused_and_shown_to_none_of_its_code() -> None:
    serde = StrictSerializer()
    CALLED.clear()
    for code, name, given in ((0, "Level", 666), (2, "Derived", {"other": 1}), (5, "Checked", {"name": ["x"]})):
        with pytest.raises(Damaged, match="allowed="):
            serde.loads_typed(hostile(code, __name__, name, given))
    assert CALLED == []
    allowing = StrictSerializer([Derived])
    assert allowing.loads_typed(hostile(2, __name__, "Derived", {"name": "ann"})) == Derived("ann")
    assert ("post_init", "ann") in CALLED, "what is allowed by name is made as its class makes it"
    CALLED.clear()
