"""What may be a step, what crosses its border, and what its code may ask for."""

import asyncio
import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Live, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.errors import Misuse, NotEncodable, StepError
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, add, echo, once_live, outcome, play, prove, prove_life, settle
from tests.lasting import LastingStore


# -- kinds of functions -----------------------------------------------------------------------------------------------
class Account:
    """Methods as steps: `self` reaches the body and is not stored."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.lock = threading.Lock()  # nothing could store this

    @step
    async def pay(self, amount: int, *, note: str = "") -> str:
        return f"{self.owner} pays {amount}{note}"

    @step(effect="read")
    def balance(self, of: str) -> str:
        return f"{self.owner} has {of}"

    @staticmethod
    @step
    async def rate(currency: str) -> str:
        return f"rate of {currency}"


@workflow
async def method_flow() -> list[str]:
    account = Account("ann")
    return [
        await account.pay(5),
        await account.pay(6, note="!"),
        await asyncio.to_thread(account.balance, "much"),
        await Account.rate("EUR"),
    ]


@workflow
def plain_method_flow() -> str:
    return Account("bob").balance("little")


def test_methods_are_steps_and_self_is_not_stored() -> None:
    life = prove_life(method_flow)
    assert life.value == ["ann pays 5", "ann pays 6!", "ann has much", "rate of EUR"]
    assert [body.preview for body in life.bodies("step_started")][:1] == ["[[5]]"]
    assert prove(plain_method_flow) == "bob has little"


def test_a_method_outside_a_run_is_the_plain_method() -> None:
    assert Account("ann").balance("x") == "ann has x"
    assert asyncio.run(Account("ann").pay(1)) == "ann pays 1"


class Client:
    def __init__(self) -> None:
        self.calls = 0
        self.lock = threading.Lock()

    async def create(self, name: str) -> str:
        self.calls += 1
        return f"created {name}"


CLIENT = Client()


@step
async def use(client: Live[Client], name: str, *, other: Live[Client | None] = None) -> list[Any]:
    return [client is CLIENT, other is CLIENT, await client.create(name)]


def test_a_live_parameter_is_handed_through_and_not_stored() -> None:
    @workflow
    async def flow() -> list[Any]:
        return await use(CLIENT, "x", other=CLIENT)

    life = prove_life(flow)
    assert life.value == [True, True, "created x"]
    assert "Client" not in life.bodies("step_started")[0].preview


def test_functions_of_others_become_steps_in_place() -> None:
    @workflow
    async def flow() -> list[Any]:
        created = await step(CLIENT.create, name="create", effect="read")("y")
        power = await asyncio.to_thread(step(functools.partial(pow, 2), name="power"), 10)
        return [created, power]

    life = prove_life(flow)
    assert life.value == ["created y", 1024]
    assert [event.step for event in life.events if event.kind == "step_started"] == ["create", "power"]


class Greeter:
    async def __call__(self, name: str) -> str:
        return f"hello {name}"


def test_an_object_with_an_async_call_is_an_async_step() -> None:
    greet = step(Greeter(), name="greet")

    @workflow
    async def flow() -> str:
        return str(await greet("ann"))

    assert prove(flow) == "hello ann"


def test_a_step_called_in_a_step_s_body_is_the_plain_function() -> None:
    @step
    async def outer() -> list[Any]:
        return [await echo("inner"), add(1, 2), everstep.current().step]

    @workflow
    async def flow() -> list[Any]:
        return await outer()

    life = prove_life(flow)
    assert life.value[:2] == ["inner", 3]
    assert life.kinds().count("step_started") == 1


def test_outside_a_run_a_step_and_a_workflow_are_the_plain_functions() -> None:
    thing = object()
    assert asyncio.run(echo(thing)) is thing
    assert add(1, 2) == 3
    assert asyncio.run(keys_free(1)) == 2


@workflow
async def keys_free(number: int) -> int:
    return number + await echo(1)


def test_what_belongs_into_a_step_or_workflow_says_so_elsewhere() -> None:
    for call in (everstep.key, everstep.heartbeat, everstep.now, everstep.random, everstep.uuid, everstep.current):
        with pytest.raises(Misuse):
            call()

    @workflow
    async def flow() -> None:
        everstep.key()

    assert isinstance(once_live(flow).error, Misuse)

    @step
    async def body() -> None:
        everstep.now()

    @workflow
    async def other() -> None:
        await body()

    assert isinstance(once_live(other).error, Misuse)


# -- what crosses the border ------------------------------------------------------------------------------------------
class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    id: int
    lines: list[str] = field(default_factory=list)
    pair: tuple[int, int] = (0, 0)


@step(effect="read")
async def spoil(order: Order, names: list[str]) -> Order:
    order.lines.append("spoiled")
    names.append("spoiled")
    return order


KEPT: list[Any] = []


@step(effect="read")
async def keep() -> list[str]:
    KEPT.append(["kept"])
    return KEPT[-1]  # type: ignore[no-any-return]


def test_code_and_bodies_never_share_an_object() -> None:
    @workflow
    async def flow() -> list[Any]:
        order, names = Order(1), ["a"]
        returned = await spoil(order, names)
        kept = await keep()
        kept.append("by the code")
        KEPT[-1:] = []
        return [order.lines, names, returned.lines, type(returned).__name__, kept]

    assert prove(flow) == [[], ["a"], ["spoiled"], "Order", ["kept", "by the code"]]


def test_an_argument_is_what_it_was_when_the_step_was_called() -> None:
    @step
    async def length(names: list[str]) -> int:
        return len(names)

    @workflow
    async def flow() -> int:
        names = ["a"]
        task = asyncio.create_task(length(names))
        await asyncio.sleep(0)
        names.append("b")  # after the call, before its body starts
        return await task

    assert prove(flow) == 1


@step(effect="read")
async def typed(kind: str) -> Any:
    return {
        "tuple": (1, (2, 3)),
        "set": {3, 1, 2},
        "bytes": b"\x00\xff",
        "keys": {1: "a", 2: "b"},
        "ordered": OrderedDict(a=1),
        "enum": Colour.RED,
        "order": Order(1, ["x"], (1, 2)),
        "float": 0.1,
        "big": 10**30,
        "none": None,
        "nested": [{"a": (1, None)}],
    }[kind]


@step(effect="read")
async def typed_order() -> Order:
    return Order(7, ["x"], (1, 2))


@step(effect="read")
async def typed_enum() -> Colour:
    return Colour.RED


def test_code_sees_the_same_types_live_and_replayed() -> None:
    kinds = ["tuple", "set", "bytes", "keys", "float", "big", "none", "nested"]

    @workflow
    async def flow() -> list[str]:
        told = [f"{type(value).__name__} {value!r}" for value in [await typed(kind) for kind in kinds]]
        order, colour = await typed_order(), await typed_enum()
        return [*told, repr(order), repr(colour), str(order.pair.__class__.__name__)]

    assert prove(flow) == [
        "tuple (1, (2, 3))",
        "set {1, 2, 3}",
        "bytes b'\\x00\\xff'",
        "dict {1: 'a', 2: 'b'}",
        "float 0.1",
        f"int {10**30}",
        "NoneType None",
        "list [{'a': (1, None)}]",
        "Order(id=7, lines=['x'], pair=(1, 2))",
        "<Colour.RED: 'red'>",
        "tuple",
    ]


class Rejected(Exception):
    """Registered: comes back as itself."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code


class Unknown(Exception):
    """Not registered."""


everstep.register(Rejected)


@step(effect="read")
async def raises(kind: str) -> None:
    if kind == "builtin":
        raise FileNotFoundError(2, "not there", "x.txt")
    if kind == "key":
        raise KeyError("missing")
    if kind == "registered":
        raise Rejected(402, "no money")
    if kind == "unknown":
        raise Unknown("what is this")
    if kind == "cause":
        raise RuntimeError("outer") from ValueError("inner")
    if kind == "unicode":
        b"\xff".decode("utf-8")
    raise ExceptionGroup("several", [ValueError("one"), Rejected(1, "two"), Unknown("three")])


def described(error: BaseException) -> str:
    text = f"{type(error).__name__} {error}"
    if isinstance(error, BaseExceptionGroup):
        text += str([described(one) for one in error.exceptions])
    if error.__cause__ is not None:
        text += f" <- {described(error.__cause__)}"
    return text


def test_exceptions_come_back_as_themselves_live_and_replayed() -> None:
    @workflow
    async def flow() -> list[Any]:
        told: list[Any] = []
        for kind in ("builtin", "key", "registered", "unknown", "cause", "unicode", "group"):
            try:
                await raises(kind)
            except Exception as error:  # noqa: BLE001
                told.append(described(error))
                told += [getattr(error, name) for name in ("filename", "code", "reason") if hasattr(error, name)]
        return told

    assert prove(flow) == [
        "FileNotFoundError [Errno 2] not there: 'x.txt'",
        "x.txt",
        "KeyError 'missing'",
        "Rejected 402 no money",
        402,
        "Unknown what is this",
        "RuntimeError outer <- ValueError inner",
        "UnicodeDecodeError 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "invalid start byte",
        "ExceptionGroup several (3 sub-exceptions)['ValueError one', 'Rejected 1 two', 'Unknown three']",
    ]


def test_a_workflow_s_own_cancelled_error_does_not_cancel_whoever_waits_for_its_result() -> None:
    @workflow
    async def flow() -> None:
        raise asyncio.CancelledError("mine")

    assert isinstance(prove_life(flow).error, everstep.errors.RunFailed)


def test_an_outcome_that_cannot_be_stored_names_the_place() -> None:
    attempts: list[int] = []

    @step(retry=Retry(attempts=3, first=0))
    async def socket_like() -> Any:
        attempts.append(1)
        return {"rows": [1, threading.Lock()]}

    @workflow
    async def flow() -> str:
        try:
            await socket_like()
        except NotEncodable as error:
            return f"{error.path} | {error}"
        return "?"

    text = once_live(flow).value
    assert "['rows'][1]" in text or "rows[1]" in text or ".rows.1" in text, text
    assert "socket_like" in text
    assert "lock" in text
    assert attempts == [1]  # doing it again would not help


def test_an_argument_that_cannot_be_stored_names_the_place_and_calls_nothing() -> None:
    begun: list[int] = []

    @step
    async def takes(first: int, second: Any) -> None:
        begun.append(1)

    @workflow
    async def flow() -> str:
        try:
            await takes(1, {"a": threading.Lock()})
        except NotEncodable as error:
            return str(error)
        return "?"

    life = prove_life(flow)
    assert "takes" in life.value
    assert "'a'" in life.value or ".a" in life.value or "[a]" in life.value, life.value
    assert begun == []
    assert "step_started" not in life.kinds()


def test_a_call_with_wrong_arguments_is_the_usual_type_error() -> None:
    @workflow
    async def flow() -> str:
        try:
            await echo()  # type: ignore[call-arg]
        except TypeError as error:
            return str(error)
        return "?"

    assert "value" in prove(flow)


def test_a_result_of_the_workflow_that_cannot_be_stored_fails_the_run() -> None:
    @workflow
    async def flow() -> Any:
        return [threading.Lock()]

    error = prove_life(flow).error
    assert isinstance(error, NotEncodable)


def test_large_values_go_beside_the_history_and_come_back_whole() -> None:
    @step(effect="read")
    async def large(count: int, text: str) -> str:
        return text + "y" * count

    @workflow
    async def flow(text: str) -> list[Any]:
        first = await large(20_000, text)
        second = await large(9_000, first)
        everstep.publish("large", second)
        return [len(first), len(second), second]

    text = "".join(chr(97 + n % 26) for n in range(30_000))
    life = prove_life(flow, text)
    assert life.value == [50_000, 59_000, text + "y" * 29_000]
    assert all(len(event.body) < 9_000 for event in life.events)


def test_five_megabytes_go_through_a_file_and_a_second_app(tmp_path: Path) -> None:
    size = 5_000_000

    @step
    async def megabytes() -> bytes:
        return bytes(size)

    @workflow
    async def flow() -> list[Any]:
        data = await megabytes()
        word = await everstep.receive("word", str)
        return [len(data), data == bytes(size), word]

    async def main() -> Any:
        url = str(tmp_path / "store.db")
        async with everstep.open(url) as app:
            await app.start(flow, id=RUN)
            await settle(app)
        async with everstep.open(url) as app:
            handle = await app.start(flow, id=RUN)
            await handle.signal("word", "go")
            return await handle.result(timeout=60)

    assert asyncio.run(main()) == [size, True, "go"]


# -- what code may ask for --------------------------------------------------------------------------------------------
def test_current_says_where_code_is() -> None:
    @step(name="where")
    async def where() -> list[Any]:
        current = everstep.current()
        return [current.run, current.workflow, current.step, current.attempt >= 1]

    @workflow(name="here")
    async def flow() -> list[Any]:
        current = everstep.current()
        return [current.run, current.workflow, current.step, await where(), await where()]

    assert prove(flow) == [RUN, "here", "", [RUN, "here", "where", True], [RUN, "here", "where#2", True]]


def test_published_values_can_be_read_while_the_run_waits_and_after_it() -> None:
    @workflow
    async def flow() -> None:
        everstep.publish("progress", {"done": 1})
        await asyncio.sleep(10)
        everstep.publish("progress", {"done": (2, 2)})
        everstep.publish("other", None)

    async def main() -> None:
        clock = FakeClock()
        app = await App(LastingStore(), clock=clock).open()
        handle = await app.start(flow, id=RUN)
        await settle(app)
        assert await handle.published() == {"progress": {"done": 1}}
        await play(app, clock)
        await outcome(handle)
        assert await handle.published() == {"progress": {"done": (2, 2)}, "other": None}
        await app.close()

    asyncio.run(main())
    prove(flow)


def test_options_that_make_no_sense_are_refused_when_declared() -> None:
    for options in ({"timeout": 0}, {"effect": "sometimes"}, {"name": "with space"}):
        with pytest.raises(Misuse):
            step(echo, **options)  # type: ignore[call-overload]
    for policy in ({"attempts": 0}, {"jitter": 2}, {"factor": 0.5}, {"then": "pray"}):
        with pytest.raises(Misuse):
            Retry(**policy)  # type: ignore[arg-type]
    with pytest.raises(Misuse):
        step(3)  # type: ignore[type-var]


def test_a_step_error_names_the_type_and_the_text() -> None:
    error = StepError("Unknown", "text")
    assert (error.type, error.message, str(error)) == ("Unknown", "text", "Unknown: text")
