"""Probes: what each answer does, how long they are asked, and that nothing is repeated while somebody may still act."""

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest

import everstep
from everstep import Done, NotDone, Retry, Unknown, step, workflow
from everstep.errors import RunCancelled, RunHeld
from tests.engine.resume_helpers import Gate, Machine, freeze
from tests.worlds.ledger import NOTES


class Bank:
    """A body whose first attempt loses its answer, and a probe that answers as told; both write down their key."""

    def __init__(self, *answers: Any, is_async: bool = False, **options: Any) -> None:
        self.answers = list(answers)
        self.keys: set[str] = set()
        self.asked_at: list[float] = []
        self.clock: Any = None
        bank = self

        def probe(key: str, amount: int, to: str = "") -> Any:
            NOTES.append("ask")
            assert (amount, to) == (3, "ann"), "a probe gets the step's arguments"
            assert everstep.key() == key, "it may ask for the key as the body does"
            bank.keys.add(key)
            bank.asked_at.append(bank.clock.now() / 1e6)
            answer = bank.answers.pop(0)
            if isinstance(answer, Exception) and not isinstance(answer, NotDone):
                raise answer
            return answer

        async def async_probe(key: str, amount: int, to: str = "") -> Any:
            await asyncio.sleep(0)
            return probe(key, amount, to)

        @step(effect="once", probe=async_probe if is_async else probe, **options)
        async def pay(amount: int, to: str = "") -> str:
            NOTES.append("pay")
            bank.keys.add(everstep.key())
            if NOTES.count("pay") == 1:
                raise OSError("the answer was lost")
            return "paid at last"

        @workflow
        async def flow() -> str:
            return await pay(3, to="ann")

        self.pay = pay
        self.flow = flow

    async def start(self, machine: Machine, flow: Any = None) -> Any:
        self.clock = machine.clock
        self.began = machine.clock.now() / 1e6
        app = await machine.boot()
        return await app.start(flow or self.flow, id="r")

    def seconds(self) -> list[float]:
        """Return when it was asked, in seconds from the start."""
        return [round(at - self.began, 3) for at in self.asked_at]


async def assert_held(machine: Machine, run: Any, text: str = "") -> None:
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    hold = machine.hold("r")
    assert hold.reason == "in-doubt"
    assert text in hold.summary, hold.summary


# -- answers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async"])
async def test_done_is_adopted_without_running(machine: Machine, is_async: bool) -> None:
    bank = Bank(Done("receipt 9"), is_async=is_async)
    run = await bank.start(machine)
    assert await run.result(timeout=60) == "receipt 9"
    assert NOTES == ["pay", "ask"]
    assert len(bank.keys) == 1, "the probe is given the body's key"
    assert machine.bodies("r", "step_completed")[0].adopted
    assert not machine.replay("r").differences


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async"])
async def test_not_done_is_done_again_with_the_same_key(machine: Machine, is_async: bool) -> None:
    bank = Bank(NotDone(), is_async=is_async)
    run = await bank.start(machine)
    assert await run.result(timeout=60) == "paid at last"
    assert NOTES == ["pay", "ask", "pay"]
    assert len(bank.keys) == 1
    assert [body.because for body in machine.bodies("r", "step_started")] == ["", "not-done"]
    assert not machine.replay("r").differences


async def test_not_done_may_be_raised_as_well(machine: Machine) -> None:
    def probe(key: str) -> Any:
        raise NotDone("the bank has never heard of it")

    @step(effect="once", probe=probe)
    async def pay() -> int:
        NOTES.append("pay")
        if len(NOTES) == 1:
            raise OSError("reset")
        return len(NOTES)

    @workflow
    async def flow() -> int:
        return await pay()

    app = await machine.boot()
    assert await app.run(flow, id="r") == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Unknown("the bank sleeps"), "the bank sleeps"),
        (ConnectionError("no route"), "ConnectionError: no route"),
        (None, "NoneType"),
        (True, "bool"),
        (Done, "the class Done"),
        (Done(object()), "object"),
    ],
)
async def test_a_probe_that_does_not_know_is_asked_again(machine: Machine, answer: Any, why: str) -> None:
    bank = Bank(answer, Done("receipt"))
    run = await bank.start(machine)
    await machine.rest()
    (told,) = machine.bodies("r", "probe_answered")
    assert told.answer == "unknown"
    assert why in told.why
    assert NOTES == ["pay", "ask"]
    await machine.advance(1)
    assert await run.result(timeout=60) == "receipt"
    assert NOTES == ["pay", "ask", "ask"]
    assert not machine.replay("r").differences


# -- patience ----------------------------------------------------------------------------------------------------------
async def test_questions_come_with_growing_pauses_and_then_a_person_is_asked(machine: Machine) -> None:
    bank = Bank(*[Unknown()] * 100)
    run = await bank.start(machine)
    for _ in range(700):
        await machine.rest()
        if machine.status("r") == "held" or not machine.clock.advance_to_next():
            break
    await assert_held(machine, run, "after 600 s")
    times = bank.seconds()
    pauses = [round(b - a, 3) for a, b in pairwise(times)]
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(pauses[6:]) == {60}
    assert 540 < times[-1] <= 600
    assert NOTES.count("pay") == 1


@pytest.mark.parametrize(("probe_for", "asked"), [(0.0, 1), (1.0, 2), (3.5, 3)])
async def test_probe_for_says_how_long(machine: Machine, probe_for: float, asked: int) -> None:
    bank = Bank(*[Unknown()] * 9, probe_for=probe_for)
    run = await bank.start(machine)
    await machine.rest()
    for _ in range(5):
        await machine.advance(1)
    await assert_held(machine, run, f"after {probe_for:g} s")
    assert NOTES[0] == "pay"
    assert NOTES[1:] == ["ask"] * asked


async def test_settle_waits_before_the_first_question(machine: Machine) -> None:
    bank = Bank(Unknown(), Done("receipt"), settle=10.0, probe_for=5.0)
    run = await bank.start(machine)
    await machine.rest()
    await machine.advance(9.9)
    assert NOTES == ["pay"]
    await machine.advance(0.2)
    assert NOTES == ["pay", "ask"]
    await machine.advance(1)
    assert await run.result(timeout=60) == "receipt", "probe_for counts from the first question"


async def test_a_restart_neither_forgets_the_doubt_nor_begins_its_time_again(machine: Machine) -> None:
    bank = Bank(*[Unknown()] * 9, probe_for=10.0)
    await bank.start(machine)
    await machine.rest()
    await machine.advance(1)
    await machine.advance(2)
    assert NOTES == ["pay", "ask", "ask", "ask"]
    await machine.kill(machine._apps[0])
    machine.clock.advance(20)
    _, run = await machine.start(bank.flow, id="r")
    await assert_held(machine, run, "after 10 s")
    assert NOTES == ["pay", "ask", "ask", "ask", "ask"], "asked once more, for the downtime may have helped"
    assert len(machine.bodies("r", "step_doubted")) == 1
    assert len(bank.keys) == 1


async def test_a_run_whose_probe_waits_leaves_memory_and_comes_back(machine: Machine) -> None:
    bank = Bank(Unknown(), Done("receipt"))
    run = await bank.start(machine)
    await machine.rest()
    await machine.stop(machine._apps[0])
    assert machine.row("r").wake_at is not None
    app = await machine.worker()
    machine.clock.advance(2)
    app.pump.nudge()
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == "receipt"
    assert NOTES == ["pay", "ask", "ask"]
    del run


# -- who may still act -------------------------------------------------------------------------------------------------
def cut_off(gate: Gate, answer: Any) -> Any:
    def probe(key: str) -> Any:
        NOTES.append("ask")
        return answer

    @step(effect="once", probe=probe)
    async def pay() -> str:
        NOTES.append("pay")
        await gate.wait()
        return "paid"

    @workflow
    async def flow() -> str:
        return await pay()

    return flow


async def test_not_done_by_a_process_that_is_gone_is_done_again(machine: Machine) -> None:
    gate = Gate()
    flow = cut_off(gate, NotDone())
    app, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    gate.opened.set()
    app = await machine.boot()
    assert await (await app.start(flow, id="r")).result(timeout=60) == "paid"
    assert NOTES == ["pay", "ask", "pay"]
    assert [body.because for body in machine.bodies("r", "step_doubted")] == ["crash"]


async def test_not_done_by_a_process_that_still_exists_is_held_until_it_is_gone(machine: Machine) -> None:
    gate = Gate()
    flow = cut_off(gate, NotDone())
    app = await machine.boot(lease=30.0)
    await app.start(flow, id="r")
    await gate.reached.wait()
    freeze(app)  # its lease lapses, and its body may go on later
    other = await machine.worker(lease=30.0)
    await machine.watch(other, 31)
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    assert machine.status("r") != "held", "its body is in this process, so its end would be seen"
    while machine.status("r") != "held":  # until its probe is not asked any more
        machine.clock.advance(60)
        await asyncio.sleep(0.01)
    assert app.worker in machine.hold("r").summary
    await other.resolve("r", "not-done")
    await machine.until(lambda: len(machine.bodies("r", "run_held")) == 2)
    assert NOTES.count("pay") == 1, "a person's word is treated with the same care"
    await machine.kill(app)
    gate.opened.set()
    await machine.until_status("r", "held")
    await other.resolve("r", "not-done")
    assert await other.get("r").result(timeout=60) == "paid"
    assert NOTES.count("pay") == 2


# -- cancels -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", [Done("receipt"), NotDone()], ids=["done", "not-done"])
async def test_what_timed_out_while_in_doubt_is_settled_and_not_begun_again(machine: Machine, answer: Any) -> None:
    bank = Bank(Unknown(), Unknown(), answer)

    @workflow
    async def flow() -> str:
        try:
            async with asyncio.timeout(2):
                return await bank.pay(3, to="ann")
        except TimeoutError:
            return "too late"

    run = await bank.start(machine, flow)
    await machine.rest()
    await machine.advance(1)
    await machine.advance(1.5)
    assert machine.status("r") == "waiting", "the code is not told yet"
    await machine.advance(1)
    assert await run.result(timeout=60) == "too late"
    assert NOTES == ["pay", "ask", "ask", "ask"], "it has not happened and nobody wants it any more"
    assert not machine.replay("r").differences


@pytest.mark.parametrize("answer", [Done("receipt"), NotDone()], ids=["done", "not-done"])
@pytest.mark.parametrize("crash", [False, True])
async def test_a_run_cancelled_now_asks_the_outside_first(machine: Machine, answer: Any, crash: bool) -> None:
    bank = Bank(Unknown(), answer)

    @workflow
    async def flow() -> str:
        try:
            return await bank.pay(3, to="ann")
        except asyncio.CancelledError:
            NOTES.append("told")
            return await bank.pay(3, to="ann")

    run = await bank.start(machine, flow)
    await machine.rest()
    await run.cancel(now=True)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    if crash:
        await machine.kill(machine._apps[0])
        _, run = await machine.start(flow, id="r")
    else:
        await machine.advance(1)
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    told = [note for note in NOTES if note != "told"] if crash else NOTES
    assert told == ["pay", "ask", "ask"], "it ends without its code, and without another payment"
    assert not machine.replay("r").differences


@pytest.mark.parametrize("answer", [Done("receipt"), NotDone(), Unknown()], ids=["done", "not-done", "unknown"])
async def test_cancelled_now_while_nobody_drives_it_a_run_settles_what_it_began_before_it_ends(
    machine: Machine, answer: Any
) -> None:
    bank = Bank(Unknown(), answer)

    @workflow
    async def flow() -> str:
        return await bank.pay(3, to="ann")

    await bank.start(machine, flow)
    await machine.rest()
    await machine.kill(machine._apps[0])
    before = machine.kinds("r")
    stranger = await machine.boot(recover=False)
    await stranger.cancel("r", now=True)
    assert machine.kinds("r") == before, "nobody knows yet whether it was paid, so the run has not ended"
    _, run = await machine.start(flow, id="r")
    if isinstance(answer, Unknown):
        await machine.until(lambda: machine.kinds("r").count("probe_answered") == 2)
        assert machine.status("r") == "running", "the outside is asked again, and then a person is"
        return
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES.count("pay") == 1
    assert not machine.replay("r").differences


async def test_what_is_cancelled_between_two_attempts_gets_no_other(machine: Machine) -> None:
    @step(effect="once", retry=Retry(attempts=5, first=10.0, jitter=0.0))
    async def pay() -> str:
        NOTES.append("pay")
        raise NotDone("try later")

    @workflow
    async def flow() -> str:
        try:
            async with asyncio.timeout(5):
                return await pay()
        except TimeoutError:
            return "too late"

    _, run = await machine.start(flow, id="r")
    await machine.rest()
    await machine.advance(6)
    await machine.advance(5)
    assert await run.result(timeout=60) == "too late"
    assert NOTES == ["pay"]
    assert not machine.replay("r").differences


@pytest.mark.parametrize("own", [False, True], ids=["timeout=", "wait_for"])
async def test_what_an_async_body_gave_to_a_thread_may_still_act_after_its_timeout(machine: Machine, own: bool) -> None:
    """`asyncio.to_thread` in a body: its timeout ends the body, and nothing ends the thread."""
    go_on = threading.Event()
    sent: list[str] = []

    def send(key: str) -> str:
        NOTES.append("send")
        go_on.wait(20)
        sent.append(key)
        return "paid"

    def probe(key: str) -> Any:
        NOTES.append("ask")
        return Done("paid, says the bank") if sent else NotDone()

    @step(effect="once", timeout=None if own else 0.1, probe=probe)
    async def pay() -> str:
        return await asyncio.wait_for(asyncio.to_thread(send, everstep.key()), 0.1 if own else None)

    @workflow
    async def flow() -> str:
        return await pay()

    _, run = await machine.start(flow, id="r")
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    await machine.rest()
    assert NOTES == ["send", "ask"], "it says that nothing has happened, which is true, and not for long"
    go_on.set()
    await machine.until(lambda: bool(sent))
    await machine.advance(1)
    assert await run.result(timeout=60) == "paid, says the bank"
    assert len(sent) == 1


async def test_what_the_engine_itself_does_on_a_thread_is_not_taken_for_work_of_a_body(machine: Machine) -> None:
    """A lease is prolonged on a thread, which may take its time: the step does not wait for that."""
    reached, go_on = threading.Event(), threading.Event()

    @step(effect="once", probe=lambda key: NotDone())
    async def pay() -> str:
        NOTES.append("pay")
        if len(NOTES) == 1:
            raise OSError("reset")
        return "paid"

    @workflow
    async def flow() -> str:
        return await pay()

    app, first = await machine.start(flow, id="first")  # from now on it has a lease
    assert await first.result(timeout=60) == "paid"
    renew = app.store.renew

    def renew_slowly(*arguments: Any) -> bool:
        reached.set()
        go_on.wait(120)
        return renew(*arguments)

    app.store.renew = renew_slowly  # type: ignore[method-assign]
    NOTES.clear()
    machine.clock.advance(app.lease / 2)
    app.pump.nudge()
    try:
        await machine.until(reached.is_set)
        run = await app.start(flow, id="r")
        assert await run.result(timeout=60) == "paid"
    finally:
        go_on.set()


async def test_what_never_happens_is_not_repeated_in_a_tight_circle(machine: Machine) -> None:
    @step(effect="once", probe=lambda key: NotDone())
    async def pay() -> str:
        NOTES.append("pay")
        raise OSError("reset")

    @workflow
    async def flow() -> str:
        return await pay()

    app, run = await machine.start(flow, id="r")
    await machine.rest()
    assert len(NOTES) == 2
    for seconds, count in [(0.9, 2), (0.2, 3), (1.8, 3), (0.3, 4)]:
        await machine.advance(seconds)
        assert len(NOTES) == count
    await machine.kill(app)
    app, run = await machine.start(flow, id="r")
    await machine.rest()
    assert len(NOTES) == 4, "nor by a restart"
    await run.cancel(now=True)
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert not machine.replay("r").differences


async def test_the_pause_before_another_attempt_is_over_in_its_time_whoever_drives_the_run(machine: Machine) -> None:
    @step(effect="once", probe=lambda key: NotDone())
    async def pay() -> str:
        NOTES.append("pay")
        raise OSError("reset")

    @workflow
    async def flow() -> str:
        return await pay()

    app, _ = await machine.start(flow, id="r")
    await machine.rest()
    for seconds in (1.1, 2.1):
        await machine.advance(seconds)
    assert len(NOTES) == 4, "now there is a pause of four seconds"
    for _ in range(3):
        await machine.kill(app)
        app, run = await machine.start(flow, id="r")
        await machine.advance(1.5)
    assert len(NOTES) == 5
    await run.cancel(now=True)
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)


async def test_attempts_that_failed_do_not_make_the_pause_longer(machine: Machine) -> None:
    answers = [NotDone(), Done("paid at last")]

    @step(effect="once", probe=lambda key: answers.pop(0), retry=Retry(attempts=20, first=0.01, factor=1.0))
    async def pay() -> str:
        NOTES.append("pay")
        if len(NOTES) < 10:
            raise NotDone("refused")
        raise OSError("reset")

    @workflow
    async def flow() -> str:
        return await pay()

    _, run = await machine.start(flow, id="r")
    for _ in range(10):
        await machine.advance(0.02)
    assert await run.result(timeout=60) == "paid at last"
    assert len(NOTES) == 11
