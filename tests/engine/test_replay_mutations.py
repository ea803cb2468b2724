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


ORIGINAL = """
async def order(number: int) -> str:
    found, also = await asyncio.gather(look("a"), look("b"))
    await pay(everstep.random().randrange(1_000_000_000))
    everstep.publish("paid", number)
    await asyncio.sleep(60)
    word = await everstep.receive("word", str)
    packed = await packing(number)
    return await last(f"{found}{also}{word}{packed}")
"""
LOOKS, PAY, PUBLISH, SLEEP, WORD, PACKED = (f"    {line.strip()}\n" for line in ORIGINAL.splitlines()[2:8])
OF_ONE_NUMBER = "order(number: int)"
DEF_WORKFLOW = "def order(number: int) -> str:\n    everstep.blocking.sleep(60)\n    return ''\n"
HELPERS = """
async def both() -> str:
    return "".join(await asyncio.gather(look("a"), look("b")))

async def pay_and_wait(number: int) -> None:
    await pay(everstep.random().randrange(1_000_000_000))
    everstep.publish("paid", number)
    await everstep.sleep(60)

async def order(number: int) -> str:
    # A comment that was not there before.
    found = await both()
    await pay_and_wait(number)
    word = await everstep.receive("word", str)
    return await last(f"{found}{word}{await packing(number)}")
"""
RENAMED_VARIABLES = ("number", "count"), ("found, also", "one, two"), ("{found}{also}{word}", "{one}{two}{text}")

CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    # what is changed in the original, by which text
    "original": (),
    "argument": (('look("b")', 'look("B")'),),
    "third_argument": (('look("b")', 'look("another b")'),),
    "two_arguments": (('look("a")', 'look("A")'), ('look("b")', 'look("B")')),
    "argument_of_the_unfinished_step": (('look("b")', 'look("B")'), ('f"{found}{also}{word}{packed}"', '""')),
    "order_of_steps": (('look("a"), look("b")', 'look("b"), look("a")'),),
    "callee": (("pay(", "repay("),),
    # so much that `randrange`, which draws again at times, cannot come to the same
    "extra_draw": ((PAY, f"    everstep.random().randbytes(40)\n{PAY}"),),
    "added_step": ((PAY, f'    await look("c")\n{PAY}'),),
    "added_concurrent_step": (("found, also = ", ""), ('look("b")', 'look("b"), look("c")'), ("{found}{also}", "")),
    "removed_step": ((PAY, ""),),
    "renamed_step": (("look(", 'step(look.function, name="look_up", effect="read")('),),
    "contract": (("pay(", "pay_as_read("),),
    "duration": (("sleep(60)", "sleep(61)"),),
    "timer_removed": ((SLEEP, ""),),
    "timer_added": ((LOOKS, f"    await asyncio.sleep(1)\n{LOOKS}"),),
    "published_name": (('"paid"', '"charged"'),),
    "publish_removed": ((PUBLISH, ""),),
    "signal_name": (('"word"', '"text"'),),
    "signal_type": (("str)\n", "int | str)\n"),),
    "child_workflow": (("packing(", "sending("),),
    "child_arguments": (("packing(number)", "packing(number + 1)"),),
    "child_id": (("packing(number)", '(await everstep.start(packing, number, id="packing-of-order-1")).result()'),),
    "step_for_child": (("packing(", "pay("),),
    "concurrency_less": ((LOOKS, '    found = await look("a")\n    also = await look("b")\n'),),
    "concurrency_more": (
        (PAY, "    await asyncio.gather(pay(everstep.random().randrange(1_000_000_000)), asyncio.sleep(60))\n"),
    ),
    "returns_early": ((PAY, "    return 'early'\n"),),
    "raises_early": ((PAY, "    raise ValueError('early')\n"),),
    "new_parameter": ((OF_ONE_NUMBER, "order(number: int, speed: int)"),),
    "other_parameter_type": (("number: int", "number: dict[str, str]"), ('look("a")', 'look(number["x"])')),
    "def_workflow": ((ORIGINAL, DEF_WORKFLOW),),
    "renamed_variable": (*RENAMED_VARIABLES, ("word =", "text ="), ("packed", "box")),
    "helpers": ((ORIGINAL, HELPERS),),
    "keywords_in_another_order": (('look("', 'look(what="'), ("pay(", "pay(amount="), ("packing(", "packing(number=")),
    "another_published_value": ((", number)\n", ', f"{number} coins")\n'),),
    "optional_parameter": ((OF_ONE_NUMBER, "order(number: int, speed: int = 1)"),),
    "another_result": (("return await", 'return "!" + await'),),
}
OPTIONS: dict[str, dict[str, Any]] = {"optional_parameter": {"version": "2", "timeout": 1e6}}


def declare(change: str) -> None:
    """Declare the original with a change, in a file of its own, in which each of them has lines of its own."""
    code = ORIGINAL
    for old, new in CHANGES[change]:
        assert old in code, f"{change} changes nothing"
        code = code.replace(old, new)
    names = dict(globals())
    exec(compile("\n" * 100 * list(CHANGES).index(change) + code, "order.py", "exec"), names)
    workflow(name="order", **OPTIONS.get(change, {}))(names["order"])


DIVERGE: dict[str, tuple[int, str, str, str]] = {
    # the changed code: the event at which it shows, what differs, a word of the recorded call, a word of the new one
    "argument": (3, "arguments", 'look#2([["b"]]', 'look#2([["B"]]'),
    "order_of_steps": (2, "arguments", 'look([["a"]]', 'look([["b"]]'),
    "callee": (6, "callee", "step pay(", "step repay("),
    "extra_draw": (6, "arguments", "step pay(", "step pay("),
    "added_step": (6, "callee", "step pay(", "step look#3("),
    "added_concurrent_step": (4, "extra call", "step_completed look", "step look#3("),
    "removed_step": (6, "kind", "step pay(", "publish 'paid'"),
    "renamed_step": (2, "callee", "step look(", "step look_up("),
    "contract": (6, "contract", "[repeat]", "[read]"),
    "duration": (9, "duration", "timer of 60 s", "timer of 61 s"),
    "timer_removed": (9, "kind", "timer of 60 s", "receive 'word'"),
    "timer_added": (2, "kind", "step look(", "timer of 1 s"),
    "published_name": (8, "name", "publish 'paid'", "publish 'charged'"),
    "publish_removed": (8, "kind", "publish 'paid'", "timer of 60 s"),
    "signal_name": (11, "signal name", "receive 'word'", "receive 'text'"),
    "signal_type": (11, "signal type", "as str", "as int"),
    "child_workflow": (13, "callee", "of packing(", "of sending("),
    "child_arguments": (13, "arguments", "packing([[7]]", "packing([[8]]"),
    "child_id": (13, "child id", "child run order-1.", "child run packing-of-order-1"),
    "step_for_child": (13, "kind", "child run", "step pay#2("),
    "concurrency_less": (3, "missing call", "step look#2(", "wait"),
    "concurrency_more": (7, "extra call", "step_completed pay", "timer of 60 s"),
    "returns_early": (6, "kind", "step pay(", "return"),
    "raises_early": (6, "kind", "step pay(", "raise an error"),
    "new_parameter": (1, "arguments", "start of order", "order() is missing the required argument 'speed'"),
    "other_parameter_type": (2, "kind", "step look(", "raise an error"),
    "def_workflow": (2, "kind", "step look(", "timer of 60 s"),
}
ONLY_ARGUMENTS = ("argument", "order_of_steps", "extra_draw", "child_arguments")
HARMLESS = (
    *("original", "renamed_variable", "helpers", "keywords_in_another_order"),
    *("another_published_value", "optional_parameter"),
)


async def killed_in_its_last_step(machine: Machine) -> None:
    """Leave a run behind whose process was killed while `last` ran."""
    declare("original")
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


async def look_at(machine: Machine, change: str) -> App:
    """Let a worker with some code take the run up, and wait until it ends or is held."""
    declare(change)
    app = await machine.worker()
    await machine.until_status(RUN, "held", "completed", "failed")
    return app


def test_there_are_more_than_twenty_mutations() -> None:
    assert len(DIVERGE) >= 20


@pytest.mark.parametrize("mutation", DIVERGE)
async def test_changed_code_is_held_before_anything_is_done(machine: Machine, mutation: str) -> None:
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


@pytest.mark.parametrize(
    "mutation", ["argument", "callee", "duration", "signal_name", "child_workflow", "step_for_child"]
)
async def test_recorded_and_new_call_stand_side_by_side_with_their_source_lines(
    machine: Machine, mutation: str
) -> None:
    await killed_in_its_last_step(machine)
    await look_at(machine, mutation)
    first = machine.report(RUN)["differences"][0]
    assert first["recorded_source"].startswith("order.py:")
    assert first["now_source"].startswith("order.py:")
    assert first["recorded_source"] != first["now_source"]


@pytest.mark.parametrize("change", HARMLESS)
async def test_a_harmless_change_goes_on(machine: Machine, change: str) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, change)
    assert await app.get(RUN).result() == "<a><b>tides7"
    assert NOTES == ["last"]


@pytest.mark.parametrize("mutation", ["argument", "added_step", "contract", "new_parameter"])
async def test_when_the_right_code_is_back_a_worker_goes_on_by_itself(machine: Machine, mutation: str) -> None:
    await killed_in_its_last_step(machine)
    await machine.stop(await look_at(machine, mutation))
    assert machine.status(RUN) == "held"
    declare("original")
    app = await machine.worker()
    await machine.until_status(RUN, "completed")
    assert await app.get(RUN).result() == "<a><b>tides7"
    (resolved,) = machine.bodies(RUN, "run_resolved")
    assert (resolved.resolution, resolved.by) == ("retry", "everstep")
    assert NOTES == ["last"]


async def test_when_the_right_code_is_back_start_goes_on_by_itself(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    await machine.stop(await look_at(machine, "callee"))
    declare("original")
    _, run = await machine.start("order", 7, id=RUN)
    assert await run.result(timeout=60) == "<a><b>tides7"


async def test_the_same_wrong_code_again_changes_nothing(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    await machine.stop(await look_at(machine, "callee"))
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
    app = await look_at(machine, "argument")
    REACHED[:] = [asyncio.Event()]
    await app.resolve(RUN, "accept", by="ann", note="a new prompt")
    await REACHED[0].wait()
    assert NOTES == ["last"], "the recorded outcomes are kept"
    await machine.kill(app)
    (resolved,) = machine.bodies(RUN, "run_resolved")
    assert (resolved.by, resolved.note, list(resolved.accepted)) == ("ann", "a new prompt", [3])

    REACHED.clear()
    third = await look_at(machine, "third_argument")
    assert machine.status(RUN) == "held"
    assert [one["seq"] for one in machine.report(RUN)["differences"]] == [3]
    await machine.stop(third)

    declare("argument")
    again = await machine.worker()
    await machine.until_status(RUN, "completed")
    assert await again.get(RUN).result() == "<a><b>tides7"
    assert machine.kinds(RUN).count("run_held") == 2


async def test_accepting_keeps_every_later_difference_visible(machine: Machine) -> None:
    """All differing arguments are listed, and accepted together."""
    await killed_in_its_last_step(machine)
    await look_at(machine, "two_arguments")
    assert [one["seq"] for one in machine.report(RUN)["differences"]] == [2, 3]
    assert "and 1 more" in machine.hold(RUN).summary
    assert "accept" in machine.hold(RUN).resolutions


async def test_beside_an_unfinished_step_a_finished_one_is_not_accepted_either(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, "argument_of_the_unfinished_step")
    assert [one["seq"] for one in machine.report(RUN)["differences"]] == [3, 15]
    assert machine.hold(RUN).resolutions == ["retry", "cancel"]
    with pytest.raises(everstep.errors.HoldConflict, match=r"last \(event 15\) has none.*as recorded"):
        await app.resolve(RUN, "accept")
    assert NOTES == []
    await machine.stop(app)
    declare("original")
    app = await machine.worker()
    await machine.until_status(RUN, "completed")
    assert await app.get(RUN).result() == "<a><b>tides7"


async def test_a_difference_in_a_call_cannot_be_accepted(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, "callee")
    with pytest.raises(everstep.errors.HoldConflict, match=r"retry .*cancel"):
        await app.resolve(RUN, "accept")
    assert machine.status(RUN) == "held"


async def test_another_result_of_an_ended_run_is_found_by_a_replay(machine: Machine) -> None:
    await killed_in_its_last_step(machine)
    app = await look_at(machine, "original")
    await app.get(RUN).result()
    assert machine.replay(RUN).differences == []

    declare("another_result")
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
    for change in (*DIVERGE, *HARMLESS):
        declare(change)
        assert bool(machine.replay(RUN).differences) == (change in DIVERGE), change
    assert machine.dump() == before
    assert NOTES == []
