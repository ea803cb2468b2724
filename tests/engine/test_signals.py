"""Signals: acknowledged means durable, consumed once, in order; what does not decode is rejected visibly."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.process import resting
from everstep.errors import Misuse, RunEnded, UnknownRun, WrongType
from everstep.stores.protocol import Post
from tests.engine.resume_helpers import Gate, Machine, Program


@workflow
async def three_words() -> list[str]:
    return [await everstep.receive("word", str) for _ in range(3)]


@workflow
async def one_word() -> str:
    return await everstep.receive("word", str)


@workflow
async def one_number() -> int:
    return await everstep.receive("number", int)


async def test_signals_arrive_in_the_order_in_which_they_were_sent(machine: Machine) -> None:
    _, run = await machine.start(three_words, id="r")
    for word in ("a", "b", "c"):
        await run.signal("word", word)
    assert await run.result() == ["a", "b", "c"]
    assert [body.number for body in machine.bodies("r", "signal_received")] == [1, 2, 3]


async def test_signals_that_came_before_the_receive_wait_for_it(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> None:
        await gate.wait()

    @workflow
    async def flow() -> list[str]:
        await slow()
        return [await everstep.receive("word", str), await everstep.receive("word", str)]

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.signal("word", "a")
    await run.signal("other", "x")
    await run.signal("word", "b")
    gate.opened.set()
    assert await run.result() == ["a", "b"]


async def test_signals_before_the_receive_survive_a_crash(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> None:
        await gate.wait()

    @workflow
    async def flow() -> str:
        await slow()
        return await everstep.receive("word", str)

    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.signal("word", "kept")
    await machine.kill(app)
    gate.opened.set()
    worker = await machine.worker()
    await machine.until_status("r", "completed")
    assert await worker.get("r").result() == "kept"


async def test_an_acknowledged_signal_is_durable_even_if_nobody_ever_looked_at_it(machine: Machine) -> None:
    app, _ = await machine.start(one_word, id="r")
    await machine.rest(app)
    await machine.kill(app)
    sender = await machine.boot()
    await sender.signal("r", "word", "kept")
    await machine.kill(sender)
    assert [(one.name, one.state) for one in machine.store.signals("r")] == [("word", "pending")]
    worker = await machine.worker()
    await machine.until_status("r", "completed")
    assert await worker.get("r").result() == "kept"
    assert [one.state for one in machine.store.signals("r")] == ["consumed"]


async def test_a_signal_with_an_id_is_delivered_once_however_often_it_is_sent(machine: Machine) -> None:
    _, run = await machine.start(three_words, id="r")
    for _ in range(3):
        await run.signal("word", "a", id="one")
    other = await machine.boot()
    await other.signal("r", "word", "a", id="one")
    await run.signal("word", "a", id="two")
    await run.signal("word", "a")
    assert await run.result() == ["a", "a", "a"]
    await run.signal("word", "a", id="one")  # it was delivered, so the answer is the same, also now
    assert len(machine.store.signals("r")) == 3


async def test_a_signal_is_not_consumed_twice_when_the_process_dies_while_it_is_taken(machine: Machine) -> None:
    @workflow
    async def collect() -> list[str]:
        words: list[str] = []
        while (word := await everstep.receive("word", str)) != "end":
            words.append(word)
        return words

    app, run = await machine.start(collect, id="r")
    sent = []
    for number in range(12):
        await run.signal("word", str(number))
        sent.append(str(number))
        if number % 3 == 2:  # whatever was not durable by now is taken again
            await machine.kill(app)
            app = await machine.worker()
            run = app.get("r")
    await run.signal("word", "end")
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == sent


async def test_two_receives_at_once_get_one_signal_each_the_first_the_first(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        return list(await asyncio.gather(everstep.receive("word", str), everstep.receive("word", str)))

    app, run = await machine.start(flow, id="r")
    await machine.rest(app)
    await run.signal("word", "a")
    await run.signal("word", "b")
    assert await run.result() == ["a", "b"]


async def test_a_receive_that_gave_up_takes_no_signal(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        words = []
        for timeout in (10, 10, None):
            try:
                words.append(await everstep.receive("word", str, timeout=timeout))
            except TimeoutError:
                words.append("-")
        return words

    app, run = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.advance(11)
    await machine.advance(11)
    await run.signal("word", "a")
    assert await run.result() == ["-", "-", "a"]
    assert machine.replay("r").differences == []


@pytest.mark.parametrize("value", ["not a number", None, 1.5, [1], {"a": 1}, True])
async def test_a_signal_of_another_type_is_rejected_visibly_and_the_receive_goes_on_waiting(
    machine: Machine, value: Any
) -> None:
    app, run = await machine.start(one_number, id="r")
    await machine.rest(app)
    with pytest.raises(WrongType, match="as int, and this is not a int"):
        await run.signal("number", value)
    await machine.send_unseen(app, "r", "number", value)
    await machine.until(lambda: "signal_rejected" in machine.kinds("r"))
    await machine.rest(app)
    assert machine.status("r") == "waiting"
    (rejected,) = machine.bodies("r", "signal_rejected")
    assert (rejected.name, rejected.number) == ("number", 1)
    assert "int" in rejected.why
    await run.signal("number", 7)
    assert await run.result() == 7
    assert machine.replay("r").differences == []


async def test_a_rejected_signal_stays_rejected_after_a_crash(machine: Machine) -> None:
    app, _ = await machine.start(one_number, id="r")
    await machine.send_unseen(app, "r", "number", "x")
    await machine.until(lambda: "signal_rejected" in machine.kinds("r"))
    await machine.rest(app)
    await machine.kill(app)
    worker = await machine.worker()
    await worker.signal("r", "number", 8)
    await machine.until_status("r", "completed")
    assert machine.kinds("r").count("signal_rejected") == 1


async def test_a_damaged_payload_in_the_inbox_is_rejected_as_well(machine: Machine) -> None:
    app, run = await machine.start(one_number, id="r")
    await machine.rest(app)
    await machine.kill(app)
    machine.sql(
        "INSERT INTO signals (run, kind, name, id, value, at, state) "
        "VALUES ('r', 'signal', 'number', '', ?, 1, 'pending')",
        b'{"not": "an envelope"}',
    )
    worker = await machine.worker()
    await machine.until(lambda: "signal_rejected" in machine.kinds("r"))
    await worker.signal("r", "number", 9)
    await machine.until_status("r", "completed")
    del run


async def test_a_signal_to_an_ended_run_is_refused_with_its_status(machine: Machine) -> None:
    @workflow
    async def flow() -> None:
        return None

    _, run = await machine.start(flow, id="r")
    await run.result()
    with pytest.raises(RunEnded, match="completed") as caught:
        await run.signal("word", "late")
    assert caught.value.status == "completed"
    assert machine.store.signals("r") == []


async def test_a_signal_that_nobody_took_is_visibly_undelivered_when_the_run_ends(machine: Machine) -> None:
    app, run = await machine.start(one_word, id="r")
    await machine.rest(app)
    await machine.stop(app)
    sender = await machine.boot()
    await sender.signal("r", "word", "a")
    await sender.cancel("r", now=True)
    assert [(one.kind, one.state) for one in machine.store.signals("r")] == [("signal", "undelivered")]
    del run


async def test_a_signal_to_an_unknown_run_says_so_and_a_wrong_name_too(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(UnknownRun, match="nobody"):
        await app.signal("nobody", "word", 1)
    await app.start(one_word, id="r")
    for name in ("", "two words", "a#b", "x" * 201, "\x00"):
        with pytest.raises(Misuse, match="name for a signal"):
            await app.signal("r", name, 1)


async def test_a_signal_to_a_held_run_waits_until_it_is_resolved(machine: Machine) -> None:
    app, run = await machine.start(one_word, id="r")
    await machine.rest(app)
    await app.hold("r")
    await machine.until_status("r", "held")
    await run.signal("word", "patience")
    await machine.rest(app)
    assert [one.state for one in machine.store.signals("r") if one.kind == "signal"] == ["pending"]
    await app.resolve("r", "retry")
    assert await run.result() == "patience"


async def test_a_signal_to_a_running_run_is_taken_while_its_step_runs(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        await gate.wait()
        return "slow"

    @workflow
    async def flow() -> list[str]:
        return list(await asyncio.gather(slow(), everstep.receive("word", str)))

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.signal("word", "meanwhile")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    gate.opened.set()
    assert await run.result() == ["slow", "meanwhile"]


async def test_a_signal_from_another_app_reaches_a_waiting_run(machine: Machine) -> None:
    app, run = await machine.start(one_word, id="r")
    await machine.rest(app)
    other = await machine.boot()
    await other.signal("r", "word", "hello")
    assert await run.result(timeout=60) == "hello", "no time passes on its clock, so no lease and no timer wakes it"


def test_a_signal_from_another_process_reaches_the_run(tmp_path: Path) -> None:
    @workflow(name="greeting")
    async def greeting() -> str:
        return await everstep.receive("word", str)

    async def main() -> str:
        async with everstep.open(str(tmp_path / "runs.db")) as app:
            run = await app.start(greeting, id="r")
            sender = Program(
                tmp_path,
                """
                async def main():
                    async with everstep.open(URL) as app:
                        await app.signal("r", "word", "from afar", id="once")
                        await app.signal("r", "word", "from afar", id="once")
                        print("sent")
                asyncio.run(main())
                """,
            )
            result = await run.result(timeout=60)
            status, out, err = await asyncio.to_thread(sender.end)
            assert (status, out.strip()) == (0, "sent"), err
            return result

    assert asyncio.run(main()) == "from afar"


async def test_large_signals_come_whole(machine: Machine) -> None:
    text = "x" * 300_000
    app, run = await machine.start(one_word, id="r")
    await machine.rest(app)
    await run.signal("word", text)
    assert await run.result() == text
    assert len(machine.events("r")) == 4
    await machine.stop(app)
    assert machine.replay("r").differences == []


async def test_more_runs_with_a_signal_than_there_is_room_for_are_all_taken_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have left memory, and one look finds only as many as may run at once; nothing else says look again."""
    monkeypatch.setattr(resting, "RESTING_MAX", 0)

    @workflow
    async def waiting() -> int:
        return await everstep.receive("word", int)

    app = await machine.boot(concurrency=2)
    runs = [await app.start(waiting, id=f"r{number}") for number in range(9)]
    await machine.until(lambda: not app.drivers)
    posts = [Post(run.id, "signal", "word", value=b"[7]", at=1) for run in runs]
    await asyncio.gather(*(app.committer.submit(post) for post in posts))
    app.pump.nudge()
    await machine.until(lambda: all(machine.status(run.id) == "completed" for run in runs))
