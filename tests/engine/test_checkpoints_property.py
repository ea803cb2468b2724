"""A resume from a checkpoint leads to the very place that a replay from the beginning leads to, after every event."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import everstep
from everstep import Budget, BudgetExceeded, Retry, step, witness, workflow
from everstep.engine.app.app import App
from everstep.model.events import decode_body
from everstep.testing.clock import FakeClock
from tests.engine.checkpoint_helpers import KeepingStore, compare_replays, cut_with_checkpoints, recovered
from tests.engine.lives import RUN, Life, cut, live, text_of

DEEDS = (
    "read",
    "effect",
    "fail",
    "retry",
    "gather",
    "sleep",
    "receive",
    "time out",
    "child",
    "publish",
    "random",
    "gauss",
    "patch",
    "expect",
    "release",
    "cancel",
    "wait",
    "spend",
    "charge",
    "part",
    "left",
)


@dataclass
class State:
    """All that the loop below needs."""

    todo: list[list[str]]
    done: list[Any] = field(default_factory=list)


@step(effect="read")
async def look(what: int) -> int:
    return what


@step
async def act(what: int) -> str:
    return f"{what} {everstep.key()}"


@step(effect="read")
async def break_down(what: int) -> int:
    raise ValueError(what)


@step(effect="read", retry=Retry(attempts=2, first=1.0, jitter=0.0))
async def stumble(what: int) -> int:
    if everstep.current().attempt == 1:
        raise RuntimeError
    return what


@step(effect="read", cost={"usd": 0.50, "tokens": 10})
async def spend(what: int) -> int:
    everstep.charge(usd=0.30)
    return what


async def spend_all(turn: int) -> int:
    """Open a part of the budget, with one inside of it, and use it up."""
    count = 0
    with everstep.budget(usd=2, then="fail"), everstep.budget(usd=1.2) as part:
        try:
            while True:
                count += await look_at_what_is_left(part.left) + await spend(turn) * 0 + 1
        except BudgetExceeded:
            return count


async def look_at_what_is_left(left: Any) -> int:
    """What is left is an argument of a step: a replay that sees anything else is found out."""
    return await look(round(1e6 * left.usd) + left.tokens + left.steps) * 0


@workflow(budget=Budget(usd=1, tokens=50, steps=5))
async def small_child(what: int) -> int:
    return await look(what) + 1


async def do(deed: str, turn: int) -> Any:
    match deed:
        case "read":
            return await look(turn)
        case "effect":
            return await act(turn)
        case "fail":
            try:
                return await break_down(turn)
            except ValueError as error:
                return str(error)
        case "retry":
            return await stumble(turn)
        case "gather":
            return await asyncio.gather(look(turn), act(turn + 1))
        case "sleep":
            await asyncio.sleep(turn + 1)
            return "slept"
        case "receive":
            return await everstep.receive("word", str)
        case "time out":
            try:
                return await everstep.receive("never", str, timeout=2)
            except TimeoutError:
                return "timed out"
        case "child":
            return await small_child(turn)
        case "publish":
            everstep.publish(f"turn-{turn % 2}", turn)
            return None
        case "random":
            return [everstep.random().getrandbits(30), str(everstep.uuid())]
        case "gauss":
            return everstep.random().gauss()
        case "patch":
            everstep.patched(f"patch-{turn % 3}")
            return None
        case "expect":
            return await everstep.expect(witness.env("EVERSTEP_TEST_WITNESS"))
        case "release":
            everstep.release(witness.env("EVERSTEP_TEST_WITNESS"))
            return None
        case "spend":
            return await spend(turn)
        case "charge":
            everstep.charge(usd=0.01 * turn, tokens=turn)
            return await look_at_what_is_left(everstep.budget().left)
        case "part":
            return await spend_all(turn)
        case "left":
            return await look_at_what_is_left(everstep.budget().left)
        case "cancel":
            task = asyncio.ensure_future(look(turn))
            await asyncio.sleep(0)  # it has asked for its step
            task.cancel()
            return await asyncio.gather(task, return_exceptions=True) and "cancelled"
        case _:
            done, _ = await asyncio.wait([asyncio.ensure_future(look(turn + n)) for n in range(3)])
            return [task.get_name() for task in done]  # in the order of a set


@workflow(budget=Budget(usd=1_000, tokens=100_000, steps=5_000))
async def eventful(before: list[str], turns: list[list[str]], every: int | None) -> list[Any]:
    early = [await do(deed, 100 + number) for number, deed in enumerate(before)]
    everstep.charge(usd=0.01)  # it is recorded after the jump, and is not to be counted twice
    state = await everstep.checkpoint(State(turns), every=every)
    while state.todo:
        deeds = state.todo.pop(0)
        turn = len(state.done)
        state.done += [[deed, await do(deed, turn + number)] for number, deed in enumerate(deeds)]
        state = await everstep.checkpoint(state, every=every)
    return early + state.done


def signals_for(before: Sequence[str], turns: Sequence[Sequence[str]]) -> list[tuple[str, Any]]:
    """One for each receive, and two that nobody asks for."""
    wanted = list(before) + [deed for turn in turns for deed in turn]
    return [("word", f"w{number}") for number in range(wanted.count("receive") + 1)] + [("other", 1)]


async def first_life(before: list[str], turns: list[list[str]], every: int | None) -> tuple[KeepingStore, Life]:
    store = KeepingStore()
    return store, await live(store, FakeClock(), eventful, (before, turns, every), signals_for(before, turns))


async def compare_lives(store: KeepingStore, first: Life, arguments: tuple[Any, ...], count: int) -> None:
    """Go on from a prefix, with its checkpoints and without: the result is that of the first life both times."""
    kinds = first.kinds()[:count]
    if kinds.count("child_started") > kinds.count("child_ended"):
        return  # the other store does not have the child
    kept = [e for e in first.events[:count] if e.kind == "signal_received"]
    received = {decode_body(e.kind, e.body).id for e in kept}
    signals = signals_for(*arguments[:2])
    missing = [pair for number, pair in enumerate(signals) if f"signal-{number}" not in received]
    at = first.events[count - 1].at
    for there in (cut_with_checkpoints(store, count), cut(store, count)):
        again = await live(there, FakeClock(at), eventful, arguments, missing)
        assert again.events[:count] == first.events[:count], count
        assert (again.value, text_of(again.error)) == (first.value, text_of(first.error)), count
        # Whether a checkpoint is recorded is decided live, so the numbers of the calls after one may differ.
        assert [one[:2] for one in again.commands()] == [one[:2] for one in first.commands()], count


@pytest.fixture(autouse=True, scope="module")
def surroundings() -> Any:
    os.environ["EVERSTEP_TEST_WITNESS"] = "a fact"
    yield
    del os.environ["EVERSTEP_TEST_WITNESS"]


@pytest.mark.parametrize("every", [None, 1, 3])
async def test_after_every_event_a_resume_from_a_checkpoint_leads_where_a_whole_replay_leads(every: int | None) -> None:
    """Every deed once in the loop, and each of them again before it and after."""
    turns = [[deed] for deed in DEEDS] + [
        ["read", "effect", "random", "wait", "expect", "publish", "read"],
        ["charge", "left"],
        ["read"],
    ]
    before = ["read", "random", "receive", "patch", "expect", "publish", "wait", "cancel", "spend", "charge"]

    store, first = await first_life(before, turns, every)
    assert first.error is None
    assert len(first.value) == len(before) + sum(map(len, turns))
    left_out = [compare_replays(store, count, eventful) for count in range(1, len(first.events))]
    assert max(left_out) > len(first.events) // 2, "most of the history was never looked at"


async def test_after_every_event_a_run_that_goes_on_ends_as_it_would_have() -> None:
    arguments = (
        ["receive", "random"],
        [["effect", "random"], ["sleep"], ["receive"], ["gather", "publish"], ["child"], ["retry"], ["fail", "wait"]],
        None,
    )

    store, first = await first_life(*arguments)
    for count in range(1, len(first.events)):
        await compare_lives(store, first, arguments, count)


deeds = st.sampled_from(DEEDS)
programs = st.tuples(
    st.lists(deeds, max_size=3),
    st.lists(st.lists(deeds, max_size=4), min_size=1, max_size=8),
    st.sampled_from([None, None, 1, 2, 5]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs, st.data())
@example(([], [["cancel"], ["effect"], ["cancel"], ["read"]], None), None)
@example((["expect"], [["release"], ["effect"], ["expect"], ["effect"]], 1), None)
def test_for_any_loop_both_ways_lead_to_the_same_place(
    program: tuple[list[str], list[list[str]], int | None], data: Any
) -> None:
    async def main() -> None:
        store, first = await first_life(*program)
        for count in range(1, len(first.events)):
            compare_replays(store, count, eventful)
        if data is not None:
            for count in data.draw(st.lists(st.integers(1, len(first.events) - 1), max_size=3, unique=True)):
                await compare_lives(store, first, program, count)

    asyncio.run(main())


BROKEN: set[int] = set()


@step
async def fragile(what: int) -> str:
    if what in BROKEN:
        raise ValueError(what)
    return f"{what} {everstep.key()}"


@workflow(budget=Budget(usd=1_000, tokens=100_000, steps=5_000))
async def retried_loop(turns: int, extras: int) -> list[Any]:
    """After a failure it goes on for a few turns, with checkpoints, and then raises it."""
    error: BaseException | None = None
    state = State([["go on"]] * turns)
    while state.todo:
        state = await everstep.checkpoint(state)
        (deed,) = state.todo.pop()
        try:
            turn = len(state.done)
            state.done.append(await (fragile(turn) if deed == "go on" else act(turn)))
        except ValueError as caught:
            error, state.todo = caught, [["act"]] * extras
            state.done.append("failed")
        await look_at_what_is_left(everstep.budget().left)
        await spend(1)
        state.done.append([everstep.random().random(), everstep.now().year])
    if "failed" in state.done:
        raise error or ValueError("lost, with a variable that is not in the state")
    return state.done


@pytest.mark.parametrize("extras", [0, 1, 2, 4])
async def test_after_every_event_of_a_run_that_was_retried_again_and_again_both_ways_lead_to_the_same_place(
    extras: int,
) -> None:
    store = KeepingStore()
    app = App(store, clock=FakeClock())
    await app.open()
    BROKEN.update((2, 8, 12))
    run = await app.start(retried_loop, 8, extras, id=RUN)
    for broken in (2, 8, 12):
        with pytest.raises(ValueError, match=str(broken)):
            await run.result(timeout=60)
        BROKEN.discard(broken)
        await app.retry(RUN)
    await run.result(timeout=60)
    await app.close()
    events = store.events(RUN, 1)
    ends = ("run_failed", "run_completed")
    counts = [event.seq for event in events if event.kind not in ends]
    left_out = [compare_replays(store, count, retried_loop) for count in counts]
    assert len([event for event in events if event.kind == "run_retried"]) == 3
    assert max(left_out) > len(events) // 2


async def test_a_run_that_has_no_checkpoint_yet_or_none_that_is_kept_is_replayed_whole() -> None:
    store, first = await first_life(["read"], [["effect"], ["effect"]], None)
    taken = [event.seq for event in first.events if event.kind == "checkpoint_taken"]
    before = cut_with_checkpoints(store, taken[0] - 1)
    past, replayed = recovered(before, eventful)
    replayed.execution.evict()
    assert (past.checkpoint, len(past.events)) == (None, taken[0] - 1)
    assert store.run(RUN) is not None
