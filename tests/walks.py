"""How long a way is: each call of a function of Everstep from a user's call to the disk and back.

python -m tests.walks repeat    one live step of this contract: also `read` and `once`
python -m tests.walks put       one checkpoint of LangGraph

`docs/architecture.md` has a table of the figures, and `tests/engine/test_walks.py` keeps it true.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypedDict

import everstep

PACKAGE = str(Path(everstep.__file__).parent) + os.sep


class Call(NamedTuple):
    """A call of a function of Everstep: its file, its name, and how many of them it is inside of."""

    file: str
    name: str
    depth: int


class Walk:
    """The calls of all threads, as long as it `is_on`. Of what is written in C, nothing is seen."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_on = False
        self._depths: dict[int, int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if not self.is_on or event not in ("call", "return") or not file.startswith(PACKAGE):
            return
        thread = threading.get_ident()
        depth = self._depths.get(thread, 0)
        if event == "call":
            self.calls.append(Call(file.removeprefix(PACKAGE), frame.f_code.co_qualname, depth))
        self._depths[thread] = max(0, depth + (1 if event == "call" else -1))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at each call within the block, on this thread and on those that begin in it."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @property
    def files(self) -> set[str]:
        """The files that the calls lead through."""
        return {call.file for call in self.calls}


def step_of(effect: Any) -> Walk:
    """Return the way of the second step of a run: what is made once per process is there by then."""
    walk = Walk()

    @everstep.step(effect=effect)
    async def act(x: int) -> int:
        return x + 1

    @everstep.workflow
    async def acting() -> int:
        await act(0)
        walk.is_on = True
        result = await act(1)
        walk.is_on = False
        return result

    with walk.watching():
        assert everstep.run(acting, url="sqlite:///walk.db") == 2
    return walk


class Number(TypedDict):
    x: int


def put() -> Walk:
    """Return the way of the second checkpoint of a thread."""
    from langgraph.graph import END, START, StateGraph  # only here: steps are walked without it

    from everstep.integrations.langgraph import EverstepSaver

    walk, puts = Walk(), [0]
    builder: Any = StateGraph(Number)
    for name in "ab":
        builder.add_node(name, lambda state: {"x": state["x"] + 1})
    builder.add_edge(START, "a")
    builder.add_edge("a", "b")
    builder.add_edge("b", END)
    with EverstepSaver("sqlite:///walk.db") as saver:
        graph = builder.compile(checkpointer=saver)
        plain_put = saver.put

        def put_seen(*args: Any, **kwargs: Any) -> Any:
            puts[0] += 1
            walk.is_on = puts[0] == 2
            try:
                return plain_put(*args, **kwargs)
            finally:
                walk.is_on = False

        graph.invoke({"x": 0}, {"configurable": {"thread_id": "warm"}}, durability="sync")
        saver.put = put_seen  # type: ignore[method-assign]
        with walk.watching():
            graph.invoke({"x": 0}, {"configurable": {"thread_id": "walked"}}, durability="sync")
    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "repeat": lambda: step_of("repeat"),
    "read": lambda: step_of("read"),
    "once": lambda: step_of("once"),
    "put": put,
}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        walked = WALKS[sys.argv[1]]()
    for call in walked.calls:
        print("  " * call.depth + f"{call.file} {call.name}")
    print(len(walked.calls), len(walked.files))
