"""One recorded run, and the code changed under it in more than twenty ways. Each way is judged before anything is done.

The run has made four steps, a timer, a signal, a child and a published value, and its process was killed in its last
step. Then the changed code comes: a difference holds the run, no body runs, and nothing is written but the hold.
"""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from tests.engine.resume_helpers import Machine

RUN = "order-1"
NOTES: list[str] = []
"""Which bodies ran, by their own account."""
REACHED: list[asyncio.Event] = []


@step(effect="read")
async def look(what: str, *, deep: bool = False, lang: str = "en") -> str:
    NOTES.append(f"look {what}")
    return f"<{what}>"


@step
async def pay(amount: int) -> int:
    NOTES.append(f"pay {amount}")
    return amount


@step(name="pay", effect="read")
async def pay_as_read(amount: int) -> int:
    NOTES.append(f"pay {amount}")
    return amount


@step
async def repay(amount: int) -> int:
    NOTES.append(f"repay {amount}")
    return amount


@step
async def last(text: str) -> str:
    NOTES.append("last")
    if REACHED:
        REACHED[0].set()
        await asyncio.Event().wait()
    return text


@workflow(name="packing")
async def packing(number: int) -> int:
    return number


@workflow(name="sending")
async def sending(number: int) -> int:
    return number


def original() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("a"), look("b"))
        token = everstep.random().randrange(1_000_000_000)
        await pay(token)
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


def argument() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("a"), look("B"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


def third_argument() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("a"), look("another b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


def two_arguments() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("A"), look("B"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


def argument_of_the_unfinished_step() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("B"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        await everstep.receive("word", str)
        await packing(number)
        return await last("")


def order_of_steps() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("b"), look("a"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


def callee() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await repay(everstep.random().randrange(1_000_000_000))
        return ""


def extra_draw() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("a"), look("b"))
        everstep.random().randbytes(40)  # so much that `randrange`, which draws again at times, cannot come to the same
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


def added_step() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await look("c")
        await pay(everstep.random().randrange(1_000_000_000))
        return ""


def added_concurrent_step() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"), look("c"))
        await pay(everstep.random().randrange(1_000_000_000))
        return ""


def removed_step() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        return ""


def renamed_step() -> None:
    renamed = step(look.function, name="look_up", effect="read")  # type: ignore[attr-defined]

    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(renamed("a"), renamed("b"))
        return ""


def contract() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await pay_as_read(everstep.random().randrange(1_000_000_000))
        return ""


def duration() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(61)
        return ""


def timer_removed() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await everstep.receive("word", str)
        return ""


def timer_added() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.sleep(1)
        await asyncio.gather(look("a"), look("b"))
        return ""


def published_name() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("charged", number)
        await asyncio.sleep(60)
        return ""


def publish_removed() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        await asyncio.sleep(60)
        return ""


def _until_word(name: str, kind: Any, packer: Any = packing, more: int = 0, id: str | None = None) -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive(name, kind)
        if id is not None:
            packed = await (await everstep.start(packer, number, id=id)).result()
        else:
            packed = await packer(number + more)
        return await last(f"{found}{also}{word}{packed}")


def signal_name() -> None:
    _until_word("text", str)


def signal_type() -> None:
    _until_word("word", int | str)


def child_workflow() -> None:
    _until_word("word", str, sending)


def child_arguments() -> None:
    _until_word("word", str, packing, 1)


def child_id() -> None:
    _until_word("word", str, packing, 0, "packing-of-order-1")


def step_for_child() -> None:
    _until_word("word", str, pay)


def concurrency_less() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await look("a")
        await look("b")
        await pay(everstep.random().randrange(1_000_000_000))
        return ""


def concurrency_more() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        await asyncio.gather(pay(everstep.random().randrange(1_000_000_000)), asyncio.sleep(60))
        return ""


def returns_early() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        return "early"


def raises_early() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        raise ValueError("early")


def new_parameter() -> None:
    @workflow(name="order")
    async def order(number: int, speed: int) -> str:
        await asyncio.gather(look("a"), look("b"))
        return ""


def other_parameter_type() -> None:
    @workflow(name="order")
    async def order(number: dict[str, str]) -> str:
        word = str(number["x"])
        await asyncio.gather(look("a"), look(word))
        return ""


def def_workflow() -> None:
    @workflow(name="order")
    def order(number: int) -> str:
        everstep.blocking.sleep(60)
        return ""


DIVERGE: dict[Any, tuple[int, str, str, str]] = {
    # the changed code: the event at which it shows, what differs, a word of the recorded call, a word of the new one
    argument: (3, "arguments", 'look#2([["b"]]', 'look#2([["B"]]'),
    order_of_steps: (2, "arguments", 'look([["a"]]', 'look([["b"]]'),
    callee: (6, "callee", "step pay(", "step repay("),
    extra_draw: (6, "arguments", "step pay(", "step pay("),
    added_step: (6, "callee", "step pay(", "step look#3("),
    added_concurrent_step: (4, "extra call", "step_completed look", "step look#3("),
    removed_step: (6, "kind", "step pay(", "publish 'paid'"),
    renamed_step: (2, "callee", "step look(", "step look_up("),
    contract: (6, "contract", "[repeat]", "[read]"),
    duration: (9, "duration", "timer of 60 s", "timer of 61 s"),
    timer_removed: (9, "kind", "timer of 60 s", "receive 'word'"),
    timer_added: (2, "kind", "step look(", "timer of 1 s"),
    published_name: (8, "name", "publish 'paid'", "publish 'charged'"),
    publish_removed: (8, "kind", "publish 'paid'", "timer of 60 s"),
    signal_name: (11, "signal name", "receive 'word'", "receive 'text'"),
    signal_type: (11, "signal type", "as str", "as int"),
    child_workflow: (13, "callee", "of packing(", "of sending("),
    child_arguments: (13, "arguments", "packing([[7]]", "packing([[8]]"),
    child_id: (13, "child id", "child run order-1.", "child run packing-of-order-1"),
    step_for_child: (13, "kind", "child run", "step pay#2("),
    concurrency_less: (3, "missing call", "step look#2(", "wait"),
    concurrency_more: (7, "extra call", "step_completed pay", "timer of 60 s"),
    returns_early: (6, "kind", "step pay(", "return"),
    raises_early: (6, "kind", "step pay(", "raise an error"),
    new_parameter: (1, "arguments", "start of order", "order() is missing the required argument 'speed'"),
    other_parameter_type: (2, "kind", "step look(", "raise an error"),
    def_workflow: (2, "kind", "step look(", "timer of 60 s"),
}
ONLY_ARGUMENTS = (argument, order_of_steps, extra_draw, child_arguments)


def renamed_variable() -> None:
    @workflow(name="order")
    async def order(count: int) -> str:
        one, two = await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", count)
        await asyncio.sleep(60)
        text = await everstep.receive("word", str)
        box = await packing(count)
        return await last(f"{one}{two}{text}{box}")


def helpers() -> None:
    async def both() -> str:
        return "".join(await asyncio.gather(look("a"), look("b")))

    async def pay_and_wait(number: int) -> None:
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await everstep.sleep(60)

    @workflow(name="order")
    async def order(number: int) -> str:
        # A comment that was not there before.
        found = await both()
        await pay_and_wait(number)
        word = await everstep.receive("word", str)
        return await last(f"{found}{word}{await packing(number)}")


def keywords_in_another_order() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look(what="a"), look(what="b"))
        await pay(amount=everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60.0)
        word = await everstep.receive("word", str)
        packed = await packing(number=number)
        return await last(text=f"{found}{also}{word}{packed}")


def another_published_value() -> None:
    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", f"{number} coins")
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


def optional_parameter() -> None:
    @workflow(name="order", version="2", timeout=1e6)
    async def order(number: int, speed: int = 1) -> str:
        found, also = await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return await last(f"{found}{also}{word}{packed}")


HARMLESS = (
    original,
    renamed_variable,
    helpers,
    keywords_in_another_order,
    another_published_value,
    optional_parameter,
)


async def killed_in_its_last_step(machine: Machine) -> None:
    """Leave a run behind whose process was killed while `last` ran."""
    original()
    REACHED[:] = [asyncio.Event()]
    app, run = await machine.start("order", 7, id=RUN)
    await machine.rest(app)
    await machine.advance(60)
    await run.signal("word", "tides")
    await REACHED[0].wait()
    await machine.kill(app)
    REACHED.clear()
    NOTES.clear()
    assert machine.status(RUN) == "running"
    assert machine.kinds(RUN) == [
        "run_started", "step_started", "step_started", "step_completed", "step_completed", "step_started",
        "step_completed", "value_published", "timer_started", "timer_fired", "signal_awaited", "signal_received",
        "child_started", "child_ended", "step_started",
    ]  # fmt: skip


async def look_at(machine: Machine, code: Any) -> App:
    """Let a worker with some code take the run up, and wait until it ends or is held."""
    code()
    app = await machine.worker()
    await machine.until_status(RUN, "held", "completed", "failed")
    return app


def test_there_are_more_than_twenty_mutations() -> None:
    assert len(DIVERGE) >= 20


@pytest.mark.parametrize("mutation", DIVERGE, ids=lambda mutation: mutation.__name__)
async def test_changed_code_is_held_before_anything_is_done(machine: Machine, mutation: Any) -> None:
    await killed_in_its_last_step(machine)
    before = machine.dump()
    await machine.stop(await look_at(machine, mutation))
    seq, what, recorded, now = DIVERGE[mutation]

    assert NOTES == [], "a body ran"
    assert machine.kinds(RUN) == [event[3] for event in before["events"] if event[0] == RUN] + ["run_held"]
    after = machine.dump()
    for table in ("payloads", "signals", "followers"):
        assert after[table] == before[table]
    assert [event for event in after["events"] if event[:3] in {old[:3] for old in before["events"]}] == before[
        "events"
    ]
    assert [row for row in after["runs"] if row[0] != RUN] == [row for row in before["runs"] if row[0] != RUN]

    hold = machine.hold(RUN)
    assert hold.reason == "diverged"
    first = machine.report(RUN)["differences"][0]
    assert (first["seq"], first["what"]) == (seq, what)
    assert recorded in first["recorded"]
    assert now in first["now"]
    assert f"event {seq}" in hold.summary
    assert ("accept" in hold.resolutions) == (mutation in ONLY_ARGUMENTS)


@pytest.mark.parametrize("mutation", [argument, callee, duration, signal_name, child_workflow, step_for_child])
async def test_recorded_and_new_call_stand_side_by_side_with_their_source_lines(
    machine: Machine, mutation: Any
) -> None:
    await killed_in_its_last_step(machine)
    await look_at(machine, mutation)
    first = machine.report(RUN)["differences"][0]
    assert first["recorded_source"].startswith("test_replay_mutations.py:")
    assert first["now_source"].startswith("test_replay_mutations.py:")
    assert first["recorded_source"] != first["now_source"]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
async def test_a_harmless_change_goes_on(machine: Machine, change: Any) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, change)
    assert await app.get(RUN).result() == "<a><b>tides7"
    assert NOTES == ["last"]


@pytest.mark.parametrize("mutation", [argument, added_step, contract, new_parameter])
async def test_when_the_right_code_is_back_a_worker_goes_on_by_itself(machine: Machine, mutation: Any) -> None:
    await killed_in_its_last_step(machine)
    await machine.stop(await look_at(machine, mutation))
    assert machine.status(RUN) == "held"
    original()
    app = await machine.worker()
    await machine.until_status(RUN, "completed")
    assert await app.get(RUN).result() == "<a><b>tides7"
    (resolved,) = machine.bodies(RUN, "run_resolved")
    assert (resolved.resolution, resolved.by) == ("retry", "everstep")
    assert NOTES == ["last"]


async def test_when_the_right_code_is_back_start_goes_on_by_itself(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    await machine.stop(await look_at(machine, callee))
    original()
    _, run = await machine.start("order", 7, id=RUN)
    assert await run.result(timeout=60) == "<a><b>tides7"


async def test_the_same_wrong_code_again_changes_nothing(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    await machine.stop(await look_at(machine, callee))
    hold, events = machine.hold(RUN), machine.events(RUN)
    app = await machine.worker()
    await machine.rest(app)
    await machine.stop(app)
    other = await machine.boot()
    with pytest.raises(everstep.errors.RunHeld, match="diverged"):
        await (await other.start("order", 7, id=RUN)).result()
    assert machine.events(RUN) == events
    assert machine.hold(RUN) == hold
    assert machine.row(RUN).owner is None
    assert NOTES == []


async def test_an_accepted_argument_stays_accepted_and_a_third_version_diverges_again(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, argument)
    REACHED[:] = [asyncio.Event()]
    await app.resolve(RUN, "accept", by="ann", note="a new prompt")
    await REACHED[0].wait()
    assert NOTES == ["last"], "the recorded outcomes are kept"
    await machine.kill(app)
    (resolved,) = machine.bodies(RUN, "run_resolved")
    assert (resolved.by, resolved.note, list(resolved.accepted)) == ("ann", "a new prompt", [3])

    REACHED.clear()
    third = await look_at(machine, third_argument)
    assert machine.status(RUN) == "held"
    assert [one["seq"] for one in machine.report(RUN)["differences"]] == [3]
    await machine.stop(third)

    argument()
    again = await machine.worker()
    await machine.until_status(RUN, "completed")
    assert await again.get(RUN).result() == "<a><b>tides7"
    assert machine.kinds(RUN).count("run_held") == 2


async def test_accepting_keeps_every_later_difference_visible(machine: Machine) -> None:
    """All differing arguments are listed, and accepted together."""
    await killed_in_its_last_step(machine)
    await look_at(machine, two_arguments)
    assert [one["seq"] for one in machine.report(RUN)["differences"]] == [2, 3]
    assert "and 1 more" in machine.hold(RUN).summary
    assert "accept" in machine.hold(RUN).resolutions


async def test_beside_an_unfinished_step_a_finished_one_is_not_accepted_either(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, argument_of_the_unfinished_step)
    assert [one["seq"] for one in machine.report(RUN)["differences"]] == [3, 15]
    assert machine.hold(RUN).resolutions == ["retry", "cancel"]
    with pytest.raises(everstep.errors.HoldConflict, match=r"last \(event 15\) has none.*as recorded"):
        await app.resolve(RUN, "accept")
    assert NOTES == []
    await machine.stop(app)
    original()
    app = await machine.worker()
    await machine.until_status(RUN, "completed")
    assert await app.get(RUN).result() == "<a><b>tides7"


async def test_a_difference_in_a_call_cannot_be_accepted(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, callee)
    with pytest.raises(everstep.errors.HoldConflict, match=r"retry .*cancel"):
        await app.resolve(RUN, "accept")
    assert machine.status(RUN) == "held"


async def test_another_result_of_an_ended_run_is_found_by_a_replay(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, original)
    await app.get(RUN).result()
    assert machine.replay(RUN).differences == []

    @workflow(name="order")
    async def order(number: int) -> str:
        found, also = await asyncio.gather(look("a"), look("b"))
        await pay(everstep.random().randrange(1_000_000_000))
        everstep.publish("paid", number)
        await asyncio.sleep(60)
        word = await everstep.receive("word", str)
        packed = await packing(number)
        return "!" + await last(f"{found}{also}{word}{packed}")

    (difference,) = machine.replay(RUN).differences
    assert difference.what == "result"


async def test_another_large_result_is_found_as_well(machine: Machine) -> None:
    letter = "x"

    @workflow
    async def large() -> str:
        return letter * 100_000

    app = await machine.boot()
    await app.run(large, id="large")
    assert machine.replay("large").differences == []
    letter = "y"
    assert [one.what for one in machine.replay("large").differences] == ["result"]


async def test_a_replay_writes_nothing_and_does_nothing(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    before = machine.dump()
    for code in (*DIVERGE, *HARMLESS):
        code()
        assert bool(machine.replay(RUN).differences) == (code in DIVERGE), code.__name__
    assert machine.dump() == before
    assert NOTES == []
