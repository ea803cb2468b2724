"""Every option is checked where it is declared: a wrong one is `Misuse`, with its name and what to write instead."""

import asyncio
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Budget, Graph, Retention, Retry, Webhook, pipeline, step, tool, transaction, workflow
from everstep.errors import Misuse


class Rude:
    """An object whose text cannot be read."""

    def __repr__(self) -> str:
        raise SystemExit

    __str__ = __repr__


class Liar:
    """An object whose class, text, length, truth and order cannot be asked for."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __bool__ = __eq__ = __hash__ = __iter__ = __index__ = __float__ = __lt__ = __repr__  # type: ignore[assignment]


class Stop(SystemExit):
    """A stop of a user's own."""


HALF = "\ud800"
"""Half a character, which UTF-8 cannot encode."""


@dataclass
class State:
    text: str = ""


def generating(*args: Any) -> Any:
    yield 1


async def generating_too(*args: Any) -> Any:
    yield 1


class Generating:
    def __call__(self, *args: Any) -> Any:
        yield 1


GENERATORS = [generating, generating_too, functools.partial(generating, 1), Generating()]
NO_SECONDS = [10**400, "-5s", "soon", "5", True, math.nan, math.inf, -1, -0.5, 1e300, [], 5j, Rude(), object]
NO_COUNT = ["3", 3.0, 2.5, True, math.nan, -1, [], Rude(), Liar(), 10**30]
STOPS = [BaseException, [KeyboardInterrupt], SystemExit, (ValueError, GeneratorExit), asyncio.CancelledError, Stop]
NO_TYPES = ["ValueError", 3, [ValueError()], (int,), {"a": 1}, [None], Rude(), Liar(), *STOPS]
NO_FLAG = [1, 0, "yes", None, [], Rude()]
NO_FUNCTION = [3, "text", [], Rude()]


def stepped(**options: Any) -> None:
    @step(**options)
    async def one(number: int = 0) -> None:
        pass


def once(**options: Any) -> None:
    stepped(effect="once", **options)


def tooled(**options: Any) -> None:
    @tool(**options)
    async def one(number: int = 0) -> None:
        """Do it."""


def transacted(**options: Any) -> None:
    @transaction(everstep.STORE, **options)
    def one(connection: Any) -> None:
        pass


def worked(**options: Any) -> None:
    @workflow(**options)
    async def declared_wrongly() -> None:
        pass


def graph(**options: Any) -> None:
    Graph("wrong", state=State, **options)


def node(**options: Any) -> None:
    async def one(state: State) -> None:
        pass

    Graph("wrong", state=State).node(one, **options)


def edge(**options: Any) -> None:
    Graph("wrong", state=State).edge(**{"source": "a", "target": "b", **options})


def each(**options: Any) -> None:
    Graph("wrong", state=State).each(**{"source": "a", "target": "b", "over": "text", **options})


def approving(**options: Any) -> None:
    made = Graph("wrong", state=State)
    made.approval(**{"name": "a", "about": lambda state: state, "into": "text", **options})


def opened(**options: Any) -> None:
    everstep.open(**{"url": "memory:", **options})


@workflow
async def fine(number: int = 0) -> int:
    return number


def in_app(verb: str) -> Callable[..., None]:
    def do(**options: Any) -> None:
        async def main() -> None:
            async with everstep.open("memory:") as app:
                match verb:
                    case "start":
                        await app.start(fine, **options)
                    case "queue":
                        await app.queue("q", **options)
                    case "limit":
                        await app.limit("l", **options)
                    case "schedule":
                        await app.schedule(fine, **{"name": "s", "every": 60, **options})
                    case "cancel":
                        await app.start(fine, id="r", delay=60)
                        await app.cancel("r", **options)

        asyncio.run(main())

    return do


def connected(**options: Any) -> None:
    async def main(folder: Any = None) -> None:
        async with everstep.connect("memory:") as client:
            await client.start("fine", **options)

    asyncio.run(main())


DECLARATIONS: dict[str, tuple[Callable[..., Any], dict[str, list[Any]]]] = {
    "@step": (
        stepped,
        {
            "retry": [3, "3", True, {"attempts": 3}, Retry, Rude()],
            "timeout": [*NO_SECONDS, 0],
            "raises": NO_TYPES,
            "fallback": GENERATORS,
            "key": [3, b"key", [], "no-parameter", "{unknown}", "{", Rude()],
            "compensate": [3, "undo", *GENERATORS],
            "secret": NO_FLAG,
            "cost": [3, "1", {"usd": "1"}, {"usd": -1}, {"usd": math.nan}, {"tokens": 1.5}, {"euro": 1}, *GENERATORS],
            "limit": [3, "", "two words", HALF, [], Rude(), Liar()],
            "name": [3, "two words", "#", HALF, [], Rude(), Liar()],
            "effect": ["twice", 3, None, [], Rude(), Liar()],
            "timeot": [5],
        },
    ),
    "@step, once": (
        once,
        {
            "probe": [*NO_FUNCTION, *GENERATORS],
            "probe_for": NO_SECONDS,
            "settle": NO_SECONDS,
            "not_done": NO_TYPES,
        },
    ),
    "@tool": (
        tooled,
        {
            "approval": ["yes", 1, None, *GENERATORS],
            "approval_timeout": NO_SECONDS,
            "description": [3, HALF, [], Rude()],
            "retry": [3],
            "needs_approval": [True],
        },
    ),
    "@transaction": (
        transacted,
        {"retry": [3], "timeout": NO_SECONDS, "raises": NO_TYPES, "secret": NO_FLAG, "probe": [print]},
    ),
    "@workflow": (
        worked,
        {
            "name": [3, "two words", HALF, Rude()],
            "version": [[], True, None, HALF, 10**5000, Rude(), Liar()],
            "queue": [3, "two words", None, HALF, Rude()],
            "timeout": [*NO_SECONDS, 0],
            "on_existing": ["replace", 3, None, Rude(), Liar()],
            "on_parent_end": ["die", 3, None, Rude(), Liar()],
            "budget": [3, "1", {"usd": 1}, Rude()],
            "retry": [Retry()],
        },
    ),
    "Retry": (
        Retry,
        {
            "attempts": [*NO_COUNT, 0],
            "first": NO_SECONDS,
            "most": NO_SECONDS,
            "retry_after_most": NO_SECONDS,
            "factor": ["2", True, 0.5, math.nan, math.inf, 10**400, Rude()],
            "jitter": ["0.1", True, -0.1, 1.5, math.nan, 10**400, Rude()],
            "only": NO_TYPES,
            "never": NO_TYPES,
            "then": ["give up", 3, None, Rude(), Liar()],
        },
    ),
    "Budget": (
        Budget,
        {
            "usd": ["1", True, -1, math.nan, math.inf, [], 10**5000, Rude(), Liar()],
            "tokens": NO_COUNT,
            "steps": NO_COUNT,
            "seconds": ["-5s", "soon", True, math.nan, math.inf, -1, 0, 10**400, Rude(), Liar()],
            "then": ["wait", 3, None, Rude(), Liar()],
        },
    ),
    "Graph": (
        graph,
        {
            "max_concurrency": [*NO_COUNT, 0],
            "limit": [*NO_COUNT, 0],
            "timeout": NO_SECONDS,
            "reduce": [3, "text", {"text": 3}, Rude()],
            "budget": [3],
        },
    ),
    "graph.migrate": (
        lambda **options: Graph("wrong", state=State).migrate(**{"name": "m", "nodes": {"a": "b"}, **options}),
        {"name": [3, HALF, Rude()], "nodes": [1, "x", [], None, print, {"a": 1}, {1: "a"}, Rude(), Liar()]},
    ),
    "graph.node": (
        node,
        {
            "name": [3, "two words", "", [], HALF, Rude()],
            "effect": ["twice", 3, Rude()],
            "join": ["some", 3, None, Rude()],
            "limit": [*NO_COUNT, 0],
            "retry": [3, "3", Rude()],
            "timeout": [*NO_SECONDS, 0],
            "budget": [3, Rude()],
            "secret": [True],
        },
    ),
    "graph.edge": (edge, {"source": [3, None, Rude()], "target": [3, Rude()], "when": [*NO_FUNCTION, *GENERATORS]}),
    "graph.each": (each, {"over": [3, None, "unknown", *GENERATORS], "when": NO_FUNCTION}),
    "graph.approval": (
        approving,
        {
            "about": [*NO_FUNCTION, *GENERATORS],
            "into": [3, "unknown", "", HALF],
            "timeout": NO_SECONDS,
            "join": ["some"],
        },
    ),
    "pipeline": (lambda work: pipeline(work, name="p"), {"work": [3, "text", []]}),
    "Retention": (
        Retention,
        {
            "runs": ["1", True, math.nan, -1, 10**400, 1e300, Liar()],
            "keep": NO_COUNT,
            "every": [0, "1", math.inf, 10**400, Liar()],
        },
    ),
    "Webhook": (
        lambda **options: Webhook(**{"url": "http://localhost/", **options}),
        {
            "timeout": [*NO_SECONDS, 0],
            "url": [1, [], None, True, b"x", HALF, object(), Rude(), Liar()],
            "secret": ["", 1, b"x", [], True, HALF, object(), Rude(), Liar()],
            "headers": [1, ["a"], {"a": 1}, {1: "a"}, {"a": None}, Rude(), Liar()],
            "name": [1, HALF, Rude()],
        },
    ),
    "register": (
        lambda **options: everstep.register(State, **{"encode": print, "decode": print, **options}),
        {"encode": [*NO_FUNCTION, 1, Liar(), *GENERATORS], "decode": [*NO_FUNCTION, 1, Liar(), *GENERATORS]},
    ),
    "transaction": (lambda database: transaction(database), {"database": [HALF, 1]}),
    "everstep.open": (
        opened,
        {
            "recover": NO_FLAG,
            "lease": [*NO_SECONDS, 0],
            "durability": ["always", 3, Rude(), Liar()],
            "queues": ["default", 3, [3], ["two words"], [HALF], Rude(), Liar()],
            "url": [3, b"memory:", HALF, Rude()],
            "retention": ["1", math.nan, True, 10**400, Liar()],
            "patience": [*NO_SECONDS, 0, None, Liar()],
            "on_hold": [3, Liar()],
        },
    ),
    "app.start": (
        in_app("start"),
        {
            "id": [3, "", "two words", HALF, Rude(), Liar()],
            "on_existing": ["replace", 3, Rude()],
            "queue": [3, "two words", HALF, Rude()],
            "priority": ["1", True, 1.5, 10**30, Rude()],
            "delay": ["-5s", "soon", True, math.nan, math.inf, -1, 1e300, Rude()],
            "tags": [["a"], "a", {"a": 1}, {1: "a"}, {"a": None}, {"a": HALF}, {HALF: "a"}, 3, Rude()],
        },
    ),
    "client.start": (
        connected,
        {"priority": ["1", True], "delay": ["soon", math.nan, -1], "tags": [["a"], {"a": 1}], "queue": [3]},
    ),
    "app.queue": (
        in_app("queue"),
        {
            "concurrency": NO_COUNT,
            "per_worker": [*NO_COUNT, 0],
            "per_key": NO_COUNT,
            "rate": [3, (1,), ("1", 1), (1, 0), (1, math.nan), (True, 1), Rude()],
            "paused": ["yes", 1, Rude()],
        },
    ),
    "app.limit": (in_app("limit"), {"concurrency": NO_COUNT, "rate": [3, (0, 1), (1, -1), (1, math.inf)]}),
    "app.schedule": (
        in_app("schedule"),
        {
            "name": [3, "two words", Rude()],
            "every": ["60", True, math.nan, math.inf, -1, 1e300, Rude()],
            "offset": ["60", True, math.nan, Rude()],
            "jitter": ["60", True, math.nan, -1, Rude()],
            "cron": ["often", 3, Rude()],
            "zone": ["Nowhere", 3, Rude()],
            "overlap": ["perhaps", 3, Rude()],
            "catch_up": ["perhaps", 3, Rude()],
            "catch_up_max": ["3", True, 0, 1.5, Rude()],
            "queue": [3, "two words"],
            "priority": ["1", True, 1.5],
            "tags": [["a"], {"a": 1}],
        },
    ),
    "app.cancel": (in_app("cancel"), {"grace": ["-5s", "soon", True, math.nan, math.inf, -1, Rude()]}),
}
CASES = [
    pytest.param(declare, option, value, id=f"{name}({option}={type(value).__name__} {number})")
    for name, (declare, options) in DECLARATIONS.items()
    for option, values in options.items()
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("declare", "option", "value"), CASES)
def test_a_wrong_option_is_refused_where_it_is_declared(declare: Any, option: str, value: Any) -> None:
    more = {"approval": True} if option == "approval_timeout" else {}
    with pytest.raises(Misuse) as refused:
        declare(**{option: value}, **more)
    text = str(refused.value)
    named = {"cost": ("cost", "usd", "tokens"), "work": ("work",)}.get(option, (option, option.replace("_", " ")))
    assert any(one in text for one in named) or "is not a " in text or "is no database" in text, text
    if any(value is one for one in GENERATORS):
        assert "everstep.stream" in text


def published() -> None:
    everstep.publish(HALF, 1)


def streamed() -> None:
    everstep.stream(HALF).append(1)


async def received() -> None:
    await everstep.receive(HALF)


def patched() -> None:
    everstep.patched(HALF)


async def approved() -> None:
    await everstep.approval(HALF, 1)


async def started() -> None:
    await everstep.start(fine, 1, id=HALF)


@pytest.mark.parametrize("call", [published, streamed, received, patched, approved, started])
async def test_a_name_with_half_a_character_is_refused_by_the_call_that_gives_it(call: Any) -> None:
    @workflow
    async def giving() -> str:
        try:
            if asyncio.iscoroutinefunction(call):
                await call()
            else:
                call()
        except Misuse:
            return "refused"
        return "taken"

    async with everstep.open("memory:") as app:
        run = await app.start(giving, id="r")
        assert await run.result(timeout=60) == "refused"
        with pytest.raises(Misuse):
            await app.signal("r", HALF, 1)


@pytest.mark.parametrize("function", GENERATORS)
def test_a_generator_is_no_step_workflow_or_node(function: Any) -> None:
    with pytest.raises(Misuse, match=r"everstep\.stream"):
        step(function, name="one")
    with pytest.raises(Misuse, match=r"everstep\.stream"):
        tool(function, name="one")
    with pytest.raises(Misuse, match=r"everstep\.stream|is for functions"):
        workflow(function)
    with pytest.raises(Misuse, match=r"everstep\.stream"):
        Graph("g", state=State).node(function, name="one")


def test_right_options_are_taken(tmp_path: Path) -> None:
    stepped(retry=Retry(attempts=1, only=ValueError, never=[OSError]), timeout=1, raises={KeyError}, secret=True)
    stepped(retry=None, timeout=0.5, cost={"usd": 0.5}, limit="one", key="k:{number}", fallback=3)
    once(probe=print, probe_for=0, settle=0, not_done=(one for one in (ValueError,)))
    tooled(approval=lambda number: True, approval_timeout=0, description="d")
    worked(version=2, timeout=1, budget=Budget(usd=1, tokens=0, seconds=0.5))
    in_app("start")(priority=-1, delay=0, tags={"a": "b"})
    in_app("queue")(concurrency=0, rate=(1, 0.5), per_key=1, paused=True)
    opened(lease=0.5, queues=("default", "a"), recover=True)
