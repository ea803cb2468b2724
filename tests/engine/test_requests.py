"""Requests: one answer for an id, validated before the code sees them, durable before anybody is given the answer."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import everstep
from everstep import blocking, step, workflow
from everstep.engine.app.app import App
from everstep.engine.verbs.ask import find_answer
from everstep.errors import (
    Damaged,
    IdConflict,
    Misuse,
    NoAnswer,
    NotDecodable,
    NotEncodable,
    RequestRefused,
    RunEnded,
    RunHeld,
    UnknownRun,
)
from everstep.stores.protocol import Operation, Verdict
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine, Program
from tests.waiting import DEADLINE_SECONDS


@dataclass
class Change:
    old: str
    new: str


@step
async def shout(text: str) -> str:
    return text.upper()


@workflow
async def parrot() -> list[str]:
    said = []
    async for request in everstep.requests("say", str, answer=str):
        if request.value == "end":
            request.answer("bye")
            break
        said.append(await shout(request.value))
        request.answer(said[-1])
    return said


async def test_a_run_answers_what_it_is_asked(machine: Machine) -> None:
    app, run = await machine.start(parrot, id="r")
    assert await run.ask("say", "a") == "A"
    assert await app.ask("r", "say", "b") == "B"
    assert await run.ask("say", "end") == "bye"
    assert await run.result() == ["A", "B"]
    assert machine.replay("r").differences == []
    assert check(export_histories(machine.store)) == []


async def test_asking_again_with_an_id_gives_the_same_answer_and_is_one_request(machine: Machine) -> None:
    _, run = await machine.start(parrot, id="r")
    answers = await asyncio.gather(*(run.ask("say", "a", id="one") for _ in range(5)))
    assert answers == ["A"] * 5
    other = await machine.boot()
    assert await other.ask("r", "say", "a", id="one") == "A"
    await run.ask("say", "end")
    assert await run.result() == ["A"]
    assert await other.ask("r", "say", "a", id="one") == "A", "also when the run has ended"
    assert len(machine.bodies("r", "request_answered")) == 2


@pytest.mark.parametrize(("name", "value"), [("say", "b"), ("other", "a")])
async def test_an_id_that_belongs_to_another_request_is_refused(machine: Machine, name: str, value: str) -> None:
    _, run = await machine.start(parrot, id="r")
    await run.ask("say", "a", id="one")
    with pytest.raises(IdConflict, match="'one' belongs to another request"):
        await run.ask(name, value, id="one")


@pytest.mark.parametrize("value", [1, None, ["a"], {"a": 1}])
async def test_a_value_of_another_type_is_refused_before_the_code_sees_it(machine: Machine, value: Any) -> None:
    _, run = await machine.start(parrot, id="r")
    with pytest.raises(RequestRefused, match=r"'say' was refused: .*not a str|Expected `str`"):
        await run.ask("say", value)
    await run.ask("say", "end")
    assert await run.result() == []
    assert [body.refused for body in machine.bodies("r", "request_answered")] == ["type", ""]
    assert machine.replay("r").differences == []


async def test_a_dataclass_comes_as_itself_and_so_does_its_answer(machine: Machine) -> None:
    @workflow
    async def renaming() -> None:
        async for request in everstep.requests("rename", Change, answer=Change):
            assert isinstance(request.value, Change)
            request.answer(Change(request.value.new, request.value.old))
            break

    _, run = await machine.start(renaming, id="r")
    assert await run.ask("rename", {"old": "a", "new": "b"}, answer=Change) == Change("b", "a")
    await run.result()


async def test_a_refusal_reaches_whoever_asked_as_an_error(machine: Machine) -> None:
    @step
    async def fail() -> None:
        raise KeyError("nothing of that name")

    @workflow
    async def strict() -> str:
        async for request in everstep.requests("do", int):
            if request.value == 0:
                request.refuse("not zero")
            elif request.value == 1:
                try:
                    await fail()
                except KeyError as error:
                    request.refuse(error)
            else:
                request.answer()
                break
        return "done"

    _, run = await machine.start(strict, id="r")
    for _ in range(2):
        with pytest.raises(RequestRefused, match=r"^not zero$"):
            await run.ask("do", 0, id="zero")
    with pytest.raises(KeyError, match="nothing of that name"):
        await run.ask("do", 1)
    assert await run.ask("do", 2) is None
    assert await run.result() == "done"
    assert machine.replay("r").differences == []


async def test_a_failure_of_the_code_reaches_whoever_asked(machine: Machine) -> None:
    @workflow
    async def broken() -> None:
        async for request in everstep.requests("do"):
            raise ValueError(request.id)

    _, run = await machine.start(broken, id="r")
    with pytest.raises(RunEnded, match=r"ended without having answered it \(failed\)") as raised:
        await run.ask("do", 1, id="x")
    assert raised.value.status == "failed"
    assert isinstance(raised.value.__cause__, ValueError)


async def test_a_run_that_ended_does_not_answer(machine: Machine) -> None:
    app, run = await machine.start(parrot, id="r")
    nobody = asyncio.ensure_future(run.ask("other", 1, id="left"))
    await machine.until(lambda: machine.kinds("r", "request_received"))
    await run.ask("say", "end")
    for asked in (nobody, run.ask("other", 1, id="left"), run.ask("say", "b")):
        with pytest.raises(RunEnded) as raised:
            await asked
        assert raised.value.status == "completed"
    with pytest.raises(UnknownRun):
        await app.ask("nobody", "say", "a")


async def test_a_cancelled_run_tells_whoever_asked(machine: Machine) -> None:
    _, run = await machine.start(parrot, id="r")
    nobody = asyncio.ensure_future(run.ask("other", 1))
    await machine.until(lambda: machine.kinds("r", "request_received"))
    await run.cancel()
    with pytest.raises(RunEnded, match="cancelled"):
        await nobody


async def test_a_held_run_tells_whoever_asks_and_answers_when_it_goes_on(machine: Machine) -> None:
    app, run = await machine.start(parrot, id="r")
    await machine.until_status("r", "waiting")
    await app.hold("r", "have a look")
    with pytest.raises(RunHeld, match="ask again with id='one'") as raised:
        await run.ask("say", "a", id="one")
    assert raised.value.reason == "asked"
    await app.resolve("r", "retry")
    assert await run.ask("say", "a", id="one") == "A"


async def test_who_gives_up_waiting_may_ask_again(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        await gate.wait()
        return "done"

    @workflow
    async def lazy() -> None:
        async for request in everstep.requests("do"):
            request.answer(await slow())
            break

    _, run = await machine.start(lazy, id="r")
    with pytest.raises(NoAnswer, match=r"ask again with id='(.+)'") as raised:
        await run.ask("do", 1, timeout=0.05)
    assert isinstance(raised.value, TimeoutError)
    gate.opened.set()
    assert await run.ask("do", 1, id=raised.value.id) == "done"
    assert len(machine.store.signals("r")) == 1


async def test_an_answer_reaches_nobody_before_it_is_on_disk(machine: Machine) -> None:
    app, run = await machine.start(parrot, id="r")
    await machine.until_status("r", "waiting")
    held, real = threading.Event(), app.store.commit

    def slow(operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        if any(getattr(one, "beside", None) for one in operations):
            held.wait(5)
        return real(operations, **how)

    app.store.commit = slow  # type: ignore[method-assign]
    app.committer._seconds = 1.0  # slow commits are made on a thread
    asked = asyncio.ensure_future(run.ask("say", "a"))
    done, _ = await asyncio.wait([asked], timeout=0.2)
    assert not done
    assert machine.kinds("r", "request_answered") == []
    held.set()
    assert await asked == "A"
    assert machine.kinds("r", "request_answered") == ["request_answered"]


async def test_a_process_that_dies_between_taking_and_answering_loses_nothing(machine: Machine) -> None:
    gate, calls = Gate(), []

    @step
    async def work(value: int) -> int:
        calls.append(value)
        await gate.wait()
        return value * 2

    @workflow
    async def doubling() -> None:
        async for request in everstep.requests("double", int):
            request.answer(await work(request.value))
            if request.value == 0:
                break

    app, _ = await machine.start(doubling, id="r")
    other = await machine.boot()
    asked = asyncio.ensure_future(other.ask("r", "double", 21, id="one"))
    await gate.reached.wait()
    await machine.kill(app)
    gate.opened.set()
    worker = await machine.worker()
    assert await asked == 42
    assert await worker.ask("r", "double", 21, id="one") == 42
    assert calls == [21, 21]
    assert len(machine.bodies("r", "request_received")) == 1


async def test_requests_that_came_before_the_code_asked_for_them_survive_a_crash(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> None:
        await gate.wait()

    @workflow
    async def late() -> list[str]:
        await slow()
        said = []
        async for request in everstep.requests("say", str):
            said.append(request.value)
            request.answer(len(said))
            if len(said) == 2:
                break
        return said

    app, _ = await machine.start(late, id="r")
    await gate.reached.wait()
    other = await machine.boot()
    asked = [asyncio.ensure_future(other.ask("r", "say", word, id=word)) for word in ("a", "b")]
    await machine.until(lambda: len(machine.store.signals("r")) == 2)
    await machine.kill(app)
    gate.opened.set()
    worker = await machine.worker()
    assert sorted(await asyncio.gather(*asked)) == [1, 2]
    assert sorted(await worker.get("r").result()) == ["a", "b"]


async def test_a_request_is_answered_once(machine: Machine) -> None:
    @workflow
    async def twice() -> list[str]:
        wrong = []
        async for request in everstep.requests("do"):
            request.answer(1)
            for again in (request.answer, request.refuse):
                try:
                    again("other")
                except Misuse as error:
                    wrong.append(str(error))
            break
        return wrong

    _, run = await machine.start(twice, id="r")
    assert await run.ask("do", id="x") == 1
    assert [text.endswith("a request has one.") for text in await run.result()] == [True, True]


async def test_an_answer_that_cannot_be_stored_is_an_error_in_the_code_and_may_be_given_again(machine: Machine) -> None:
    @workflow
    async def clumsy() -> str:
        async for request in everstep.requests("do"):
            try:
                request.answer(object())
            except NotEncodable:
                request.answer("better")
            break
        return "done"

    _, run = await machine.start(clumsy, id="r")
    assert await run.ask("do") == "better"


async def test_several_requests_under_way_are_answered_in_any_order(machine: Machine) -> None:
    gates = {"a": Gate(), "b": Gate()}

    @step
    async def work(name: str) -> str:
        await gates[name].wait()
        return name * 2

    @workflow
    async def pool() -> None:
        async def serve(request: Any) -> None:
            request.answer(await work(request.value))

        async with asyncio.TaskGroup() as group:
            count = 0
            async for request in everstep.requests("work", str):
                group.create_task(serve(request))
                count += 1
                if count == 2:
                    break

    _, run = await machine.start(pool, id="r")
    asked = {name: asyncio.ensure_future(run.ask("work", name)) for name in ("a", "b")}
    for gate in gates.values():
        await gate.reached.wait()
    gates["b"].opened.set()
    assert await asked["b"] == "bb"
    assert not asked["a"].done()
    gates["a"].opened.set()
    assert await asked["a"] == "aa"
    await run.result()
    assert machine.replay("r").differences == []


async def test_a_def_workflow_takes_requests_too(machine: Machine) -> None:
    @workflow
    def plain() -> list[int]:
        taken = []
        for request in blocking.requests("add", int):
            taken.append(request.value)
            request.answer(sum(taken))
            if request.value == 0:
                break
        return taken

    _, run = await machine.start(plain, id="r")
    assert [await run.ask("add", number) for number in (2, 3, 0)] == [2, 5, 5]
    assert await run.result() == [2, 3, 0]
    assert machine.replay("r").differences == []


async def test_a_timeout_ends_the_wait_for_requests(machine: Machine) -> None:
    @workflow
    async def patient() -> int:
        count = 0
        try:
            async with asyncio.timeout(60):
                async for request in everstep.requests("do"):
                    count += 1
                    request.answer(count)
        except TimeoutError:
            return count
        return -1

    _, run = await machine.start(patient, id="r")
    assert await run.ask("do") == 1
    await machine.advance(61)
    assert await run.result() == 1
    assert machine.replay("r").differences == []


async def test_code_that_now_answers_otherwise_is_found_before_anything_is_done(machine: Machine) -> None:
    word = ["old"]

    @workflow
    async def changing() -> None:
        async for request in everstep.requests("do"):
            request.answer(word[0])

    app, run = await machine.start(changing, id="r")
    assert await run.ask("do", id="x") == "old"
    await machine.stop(app)
    word[0] = "new"
    (difference,) = machine.replay("r").differences
    assert difference.what == "answer"
    assert difference.acceptable
    worker = await machine.worker()
    await worker.signal("r", "wake")
    await machine.until_status("r", "held")
    assert await worker.ask("r", "do", id="x") == "old", "what was given stays given"
    await worker.resolve("r", "accept")
    assert await worker.ask("r", "do", id="y") == "new"


async def test_a_checkpoint_keeps_requests_that_nobody_has_taken(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> None:
        await gate.wait()

    @workflow
    async def looping() -> int:
        state = 0
        while state < 3:
            state = await everstep.checkpoint(state)
            await shout("x")
            if state == 1:
                await slow()
            state += 1
        async for request in everstep.requests("do"):
            request.answer(state)
            break
        return state

    app, _ = await machine.start(looping, id="r")
    await gate.reached.wait()
    other = await machine.boot()
    asked = asyncio.ensure_future(other.ask("r", "do", id="x"))
    await machine.until(lambda: machine.kinds("r", "request_received"))
    gate.opened.set()
    assert await asked == 3
    assert machine.replay("r").differences == []
    assert await app.get("r").result() == 3


async def test_a_checkpoint_with_a_request_under_way_is_refused(machine: Machine) -> None:
    @workflow
    async def hasty() -> None:
        async for request in everstep.requests("do"):
            await everstep.checkpoint(1)
            request.answer()

    _, run = await machine.start(hasty, id="r")
    with pytest.raises(RunEnded) as raised:
        await run.ask("do")
    assert "a request without an answer" in str(raised.value.__cause__)


async def test_a_retried_run_keeps_the_answer_that_was_given(machine: Machine) -> None:
    fails = [True]

    @step
    async def shaky() -> int:
        if fails[0]:
            raise ConnectionError("down")
        return 2

    @workflow
    async def flow() -> int:
        try:
            value = await shaky()
        except ConnectionError:
            value = 1
        async for request in everstep.requests("do"):
            request.answer(value)
            if request.value == "last":
                break
        if value == 1:
            raise LookupError("later")
        return value

    app, run = await machine.start(flow, id="r")
    assert await run.ask("do", "x", id="x") == 1
    assert await run.ask("do", "last", id="last") == 1
    with pytest.raises(LookupError):
        await run.result()
    fails[0] = False
    await app.retry("r")
    with pytest.raises(LookupError):
        await run.result()
    assert await run.ask("do", "x", id="x") == 1
    assert check(export_histories(machine.store)) == []


async def test_who_asked_before_a_restart_is_told(machine: Machine) -> None:
    app, run = await machine.start(parrot, id="r")
    with pytest.raises(NoAnswer):
        await run.ask("other", 1, id="old", timeout=0.05)
    assert await run.ask("say", "a", id="answered") == "A"
    await run.ask("say", "end")
    await app.start(parrot, id="r", on_existing="restart")
    with pytest.raises(RunEnded, match="before the run was restarted"):
        await run.ask("other", 1, id="old")
    assert await run.ask("say", "a", id="answered") == "A"
    assert await run.ask("say", "b") == "B"


async def test_an_answer_of_another_type_than_wanted_is_an_error(machine: Machine) -> None:
    _, run = await machine.start(parrot, id="r")
    with pytest.raises(NotDecodable, match=r"not a int|Expected `int`"):
        await run.ask("say", "a", answer=int)


@pytest.mark.parametrize("id", ["", "x" * 201, "a\nb", 3])
async def test_an_id_that_is_none_is_refused(machine: Machine, id: Any) -> None:
    app, _ = await machine.start(parrot, id="r")
    with pytest.raises(Misuse, match="id of a request"):
        await app.ask("r", "say", "a", id=id)


async def test_large_requests_and_answers_are_kept_beside_the_history(machine: Machine) -> None:
    _, run = await machine.start(parrot, id="r")
    assert await run.ask("say", "a" * 100_000, id="large") == "A" * 100_000
    assert machine.bodies("r", "request_answered")[0].ref
    other = await machine.boot()
    assert await other.ask("r", "say", "a" * 100_000, id="large") == "A" * 100_000


async def test_a_table_of_answers_that_lies_is_not_believed(machine: Machine) -> None:
    _, run = await machine.start(parrot, id="r")
    assert await run.ask("say", "a", id="one") == "A"
    assert await run.ask("say", "b", id="two") == "B"
    machine.sql("UPDATE answers SET seq = (SELECT max(seq) FROM answers)")
    assert await run.ask("say", "a", id="one") == "A", "the history knows"
    machine.sql("UPDATE answers SET seq = 2")
    assert await run.ask("say", "b", id="two") == "B"
    machine.sql(
        "UPDATE events SET body = CAST(replace(body, '\"A\"', '\"X\"') AS BLOB) WHERE kind = 'request_answered'"
    )
    with pytest.raises(Damaged):
        await run.ask("say", "a", id="one")


SERVER = """
@workflow
async def serve() -> int:
    count = 0
    async for request in everstep.requests("count", int):
        count += 1
        request.answer([request.value, count])
        if request.value < 0:
            break
    return count

async def main():
    async with everstep.open(URL, recover=True) as app:
        run = await app.start(serve, id="r")
        print("up", flush=True)
        print(await run.result(), flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""

ASKER = """
with everstep.open(URL) as app:
    print(app.get("r").ask("count", int(sys.argv[2]), id=sys.argv[3], timeout=20), flush=True)
"""


async def test_another_process_asks_and_both_may_be_killed(machine: Machine) -> None:
    (machine.folder / "asker").mkdir()
    server = await asyncio.to_thread(Program, machine.folder, SERVER)
    assert await asyncio.to_thread(server.line) == "up"

    def ask(value: int, id: str, at: str = "") -> tuple[int, str]:
        path = machine.folder / "asker" / "runs.db"
        if not path.exists():
            path.symlink_to(machine.path)
        environment = {"EVERSTEP_CRASH_AT": at} if at else {}
        asker = Program(machine.folder / "asker", ASKER, str(value), id, environment=environment)
        status, out, err = asker.end()
        assert status in (0, -9), err
        return status, out.strip()

    assert await asyncio.to_thread(ask, 5, "a") == (0, "[5, 1]")
    assert await asyncio.to_thread(ask, 6, "b", "request.posted:1") == (-9, ""), "killed before it knew of its request"
    assert await asyncio.to_thread(ask, 6, "b") == (0, "[6, 2]")
    await asyncio.to_thread(server.kill)
    late = asyncio.ensure_future(asyncio.to_thread(ask, 7, "c"))
    await machine.until(lambda: len(machine.store.signals("r")) == 3)
    server = await asyncio.to_thread(Program, machine.folder, SERVER)
    assert await asyncio.to_thread(server.line) == "up"
    assert await late == (0, "[7, 3]")
    assert await asyncio.to_thread(ask, 5, "a") == (0, "[5, 1]")
    assert await asyncio.to_thread(ask, -1, "d") == (0, "[-1, 4]")
    assert await asyncio.to_thread(server.end) == (0, "4\n", "")


@workflow
async def echo() -> None:
    async for request in everstep.requests("say", str, answer=str):
        everstep.stream("said").append(request.value)
        request.answer(request.value)


def blind(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep an app from hearing of what others write, as if it took a run over before its next look."""
    monkeypatch.setattr(app.watchers, "look_at_what_is_elsewhere", lambda: None)


async def test_an_answer_of_the_driver_before_is_found_by_who_takes_the_run_over(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await machine.boot(), await machine.boot()
    await first.start(echo, id="r")
    blind(second, monkeypatch)
    asking = asyncio.create_task(second.ask("r", "say", "tides", id="one"))
    await machine.until(lambda: "request_answered" in machine.kinds("r"))
    await machine.rest(first)
    assert not asking.done()
    await machine.stop(first)
    assert await second.take_up_run("r")
    assert await asyncio.wait_for(asking, DEADLINE_SECONDS) == "tides"


async def test_an_entry_of_the_driver_before_is_found_by_who_takes_the_run_over(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await machine.boot(), await machine.boot()
    run = await first.start(echo, id="r")
    entries = second.get("r").stream("said")
    reading = asyncio.ensure_future(anext(entries))
    await machine.until(lambda: "r" in second.watchers)
    blind(second, monkeypatch)
    await run.ask("say", "tides")
    assert not reading.done()
    await machine.stop(first)
    assert await second.take_up_run("r")
    assert (await asyncio.wait_for(reading, DEADLINE_SECONDS)).value == "tides"
    await entries.aclose()


async def test_an_answer_that_comes_while_it_is_looked_for_is_not_missed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, _ = await machine.start(echo, id="r")
    real, came_between = app.read, asyncio.Event()

    async def read(function: Any, *args: Any, **named: Any) -> Any:
        found = await real(function, *args, **named)
        if function is find_answer and not came_between.is_set():
            assert found is None
            came_between.set()
            app.drivers["r"].take_inbox_and_deadlines()
            await machine.until(lambda: "request_answered" in machine.kinds("r"))
            await machine.rest(app)
        return found

    monkeypatch.setattr(app, "wake", lambda run: None)  # what was asked is found only after the first look
    monkeypatch.setattr(app, "read", read)
    asking = asyncio.create_task(app.ask("r", "say", "tides"))
    await machine.until(came_between.is_set)
    assert await asyncio.wait_for(asking, DEADLINE_SECONDS) == "tides"
