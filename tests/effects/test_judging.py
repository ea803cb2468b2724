"""Functions that decide about drift: asked once for each new fact, and what they say is an event for every replay."""

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import blocking, step, witness, workflow
from everstep.errors import Drift, Misuse, RunHeld
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine, Program
from tests.worlds.ledger import ASKED, NOTES

SAID: list[Any] = []
"""What the function says, each in turn; the last for ever. An exception is raised."""


@pytest.fixture(autouse=True)
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.clear()
    monkeypatch.chdir(tmp_path)


def decide(remembered: Any, now: Any) -> Any:
    ASKED.append((remembered, now))
    said = SAID.pop(0) if len(SAID) > 1 else SAID[0]
    if isinstance(said, Exception):
        raise said
    return said


async def decide_later(remembered: Any, now: Any) -> Any:
    await asyncio.sleep(0)
    return decide(remembered, now)


JUDGES = {"def": decide, "async": decide_later}
JUDGE: dict[str, Any] = {"it": decide}


@step
async def act(what: str) -> None:
    NOTES.append(what)


@workflow
async def watchful() -> str:
    await everstep.expect(witness.value("it", Path("a.txt").read_text), on_drift=JUDGE["it"])
    await act("before")
    words = [await everstep.receive("word", str)]
    await act("after")
    words.append(await everstep.receive("word", str))
    return "".join(words)


async def stopped_run(machine: Machine, flow: Any = watchful) -> None:
    Path("a.txt").write_text("old")
    app, _ = await machine.start(flow, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    await machine.kill(app)


async def resumed(machine: Machine, now: str, word: str = "a") -> Any:
    """Let the outside change, and a worker take the run up."""
    Path("a.txt").write_text(now)
    app = await machine.worker()
    await app.get("r").signal("word", word)
    return app


async def sound(machine: Machine) -> bool:
    await machine.rest()
    assert not machine.replay("r").differences
    return not list(check(export_histories(machine.store), settled=False))


@pytest.mark.parametrize("kind", JUDGES)
async def test_accept_remembers_the_new_fact_and_goes_on(machine: Machine, kind: str) -> None:
    JUDGE["it"], SAID[:] = JUDGES[kind], ["accept"]
    await stopped_run(machine)
    app = await resumed(machine, "new")
    await machine.until(lambda: NOTES == ["before", "after"])
    assert ASKED == [("old", "new")]
    (judged,) = machine.bodies("r", "drift_judged")
    assert (judged.subject, judged.decision, judged.by) == ("value:it", "accept", JUDGES[kind].__name__)
    await machine.rest(app)
    await machine.kill(app)
    assert await sound(machine)
    app = await resumed(machine, "old", "b")  # now this is drift
    assert await app.get("r").result(timeout=60) == "ab"
    assert ASKED == [("old", "new"), ("new", "old")]
    assert len(machine.bodies("r", "run_held")) == 0


@pytest.mark.parametrize("kind", JUDGES)
async def test_a_function_that_the_machine_refuses_something_is_asked_again(machine: Machine, kind: str) -> None:
    refused = [MemoryError(), OSError(errno.EMFILE, "too many open files")]
    JUDGE["it"], SAID[:] = JUDGES[kind], [*refused, "accept"]
    await stopped_run(machine)
    await resumed(machine, "new")
    await machine.until(lambda: NOTES == ["before", "after"])
    assert len(ASKED) == 3
    (judged,) = machine.bodies("r", "drift_judged")
    assert judged.decision == "accept"


@pytest.mark.parametrize("kind", JUDGES)
async def test_ignore_goes_on_and_is_not_asked_again_about_the_same_fact(machine: Machine, kind: str) -> None:
    JUDGE["it"], SAID[:] = JUDGES[kind], ["ignore"]
    await stopped_run(machine)
    app = await resumed(machine, "new")
    await machine.until(lambda: NOTES == ["before", "after"])
    await machine.rest(app)
    await machine.kill(app)
    app = await resumed(machine, "new", "b")
    assert await app.get("r").result(timeout=60) == "ab"
    assert ASKED == [("old", "new")], "what it said is in the history"
    assert len(machine.bodies("r", "drift_judged")) == 1
    assert await sound(machine)


async def test_another_fact_is_another_question_and_the_old_one_is_still_remembered(machine: Machine) -> None:
    JUDGE["it"], SAID[:] = decide, ["ignore"]
    await stopped_run(machine)
    app = await resumed(machine, "new")
    await machine.until(lambda: NOTES == ["before", "after"])
    await machine.rest(app)
    drift = (await app.get("r").verify(outside=True)).drift
    assert [one["subject"] for one in drift] == ["value:it"], "whoever looks is told, and nobody is asked"
    await machine.kill(app)
    app = await resumed(machine, "newer", "b")
    assert await app.get("r").result(timeout=60) == "ab"
    assert ASKED == [("old", "new"), ("old", "newer")]


async def test_fail_fails_the_run(machine: Machine) -> None:
    JUDGE["it"], SAID[:] = decide, ["fail"]
    await stopped_run(machine)
    app = await resumed(machine, "new")
    with pytest.raises(Drift, match="value:it"):
        await app.get("r").result(timeout=60)
    assert NOTES == ["before"]
    assert machine.kinds("r")[-2:] == ["drift_judged", "run_failed"]
    assert await sound(machine)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("hold", "decide() said hold"),
        (ValueError("no idea"), "decide(): it raised ValueError: no idea"),
        (None, "decide(): it returned NoneType, not one of hold, fail, ignore, accept"),
        ("yes", "decide(): it returned str, not one of hold, fail, ignore, accept"),
        (["hold"], "decide(): it returned list, not one of hold, fail, ignore, accept"),
    ],
)
async def test_hold_and_whatever_is_no_decision_hold_the_run(machine: Machine, said: Any, told: str) -> None:
    JUDGE["it"], SAID[:] = decide, [said, "accept"]
    await stopped_run(machine)
    app = await resumed(machine, "new")
    await machine.until_status("r", "held")
    assert NOTES == ["before"]
    (one,) = machine.report("r")["drift"]
    assert (one["subject"], one["judged"]) == ("value:it", told)
    assert machine.kinds("r")[-2:] == ["drift_judged", "run_held"]
    await app.resolve("r", "retry")  # it is asked again, and has learnt meanwhile
    await machine.until(lambda: NOTES == ["before", "after"])
    assert len(ASKED) == 2
    assert await sound(machine)


async def test_a_person_may_accept_what_a_function_held(machine: Machine) -> None:
    JUDGE["it"], SAID[:] = decide, ["hold"]
    await stopped_run(machine)
    app = await resumed(machine, "new")
    await machine.until_status("r", "held")
    await app.resolve("r", "accept", by="ann")
    await app.get("r").signal("word", "b")
    assert await app.get("r").result(timeout=60) == "ab"
    assert len(ASKED) == 1
    assert await sound(machine)


async def test_what_cannot_be_observed_is_held_without_asking(machine: Machine) -> None:
    JUDGE["it"], SAID[:] = decide, ["accept"]
    await stopped_run(machine)
    Path("a.txt").unlink()
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    await machine.until_status("r", "held")
    assert ASKED == []
    assert machine.hold("r").resolutions == ["retry", "cancel"]


async def test_it_may_touch_the_outside_and_knows_its_run(machine: Machine) -> None:
    seen: list[Any] = []

    def look(remembered: Any, now: Any) -> str:
        current = everstep.current()
        seen.append((current.run, current.workflow, Path("a.txt").read_text(), threading.current_thread().name))
        return "accept"

    JUDGE["it"] = look
    await stopped_run(machine)
    await resumed(machine, "new")
    await machine.until(lambda: NOTES == ["before", "after"])
    ((run, flow, text, thread),) = seen
    assert (run, flow, text) == ("r", "watchful", "new")
    assert thread.startswith("everstep-step"), "not on the loop"


async def test_a_def_workflow_may_have_one_too(machine: Machine) -> None:
    @workflow
    def waiting() -> str:
        blocking.expect(witness.value("it", Path("a.txt").read_text), on_drift=decide)
        return blocking.receive("word", str)

    SAID[:] = ["accept"]
    await stopped_run(machine, waiting)
    app = await resumed(machine, "new")
    assert await app.get("r").result(timeout=60) == "a"
    assert ASKED == [("old", "new")]


async def test_while_it_thinks_the_lease_is_prolonged_and_others_go_on(machine: Machine) -> None:
    gate = Gate()

    async def think(remembered: Any, now: Any) -> str:
        await gate.wait()
        return "accept"

    JUDGE["it"] = think
    await stopped_run(machine)
    app = await resumed(machine, "new")
    await gate.reached.wait()
    until = machine.store.workers()[0].lease_until
    machine.clock.advance(15)
    app.pump.nudge()
    await machine.until(lambda: machine.store.workers()[0].lease_until > until)
    other = await app.start(watchful, id="s")
    await other.signal("word", "x")
    await machine.until(lambda: NOTES == ["before", "before", "after"])
    gate.opened.set()
    await machine.until(lambda: NOTES == ["before", "before", "after", "after"])


async def test_a_process_may_stop_while_it_thinks(machine: Machine) -> None:
    gate = Gate()

    async def think(remembered: Any, now: Any) -> str:
        await gate.wait()
        return "accept"

    JUDGE["it"] = think
    await stopped_run(machine)
    app = await resumed(machine, "new")
    await gate.reached.wait()
    await machine.stop(app)
    assert machine.kinds("r", "drift_judged") == []
    assert machine.status("r") in ("waiting", "queued")
    gate.opened.set()
    app = await machine.worker()
    await app.get("r").signal("word", "b")
    assert await app.get("r").result(timeout=60) == "ab"


async def test_of_several_facts_each_is_judged_and_the_strictest_decision_counts(machine: Machine) -> None:
    def by_name(remembered: Any, now: Any) -> str:
        return str(now)

    @workflow
    async def several() -> str:
        for name in ("one", "two", "three"):
            await everstep.expect(witness.file(f"{name}.txt"), on_drift=lambda was, now: by_name(was, now["text"]))
        return await everstep.receive("word", str)

    for name in ("one", "two", "three"):
        Path(f"{name}.txt").write_text("old")
    await stopped_run(machine, several)
    for name, said in (("one", "accept"), ("two", "hold"), ("three", "ignore")):
        Path(f"{name}.txt").write_text(said)
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    await machine.until_status("r", "held")
    assert [one["subject"] for one in machine.report("r")["drift"]] == ["file:two.txt"]
    decisions = {body.subject: body.decision for body in machine.bodies("r", "drift_judged")}
    assert decisions == {"file:one.txt": "accept", "file:two.txt": "hold", "file:three.txt": "ignore"}
    Path("two.txt").write_text("fail")
    await app.resolve("r", "retry")
    with pytest.raises(Drift):
        await app.get("r").result(timeout=60)
    assert len(machine.bodies("r", "drift_judged")) == 4, "only the one that has changed was judged again"


async def test_a_run_that_must_fail_settles_first_what_is_in_doubt(machine: Machine) -> None:
    """A failed run would be forgotten, and with it that somebody may have been paid."""
    gate = Gate()

    @step(effect="once")
    async def pay() -> str:
        NOTES.append("pay")
        await gate.wait()
        return "paid"

    @workflow
    async def paying() -> str:
        await everstep.expect(witness.value("it", Path("a.txt").read_text), on_drift="fail")
        return await pay()

    Path("a.txt").write_text("old")
    app, _ = await machine.start(paying, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    Path("a.txt").write_text("new")
    app, run = await machine.start(paying, id="r")
    with pytest.raises(RunHeld, match="in-doubt"):
        await run.result(timeout=60)
    await app.resolve("r", "done", value="paid")
    with pytest.raises(Drift):
        await run.result(timeout=60)
    assert NOTES == ["pay"]


def test_a_policy_that_is_neither_a_word_nor_a_function_is_refused() -> None:
    @workflow
    async def wrong() -> None:
        await everstep.expect(witness.env("HOME"), on_drift="perhaps")  # type: ignore[arg-type]

    with pytest.raises(Misuse, match="on_drift"):
        everstep.run(wrong, url="memory:")


KILLED = """
    def decide(remembered, now):
        with open("asked.txt", "a") as file:
            file.write(f"{remembered} {now}\\n")
        return "accept"

    @step
    def act():
        with open("acted.txt", "a") as file:
            file.write("x")

    @workflow
    def flow():
        everstep.blocking.expect(everstep.witness.env("OUTSIDE"), on_drift=decide)
        act()
        return "done"

    print(everstep.run(flow, id="r", url=URL))
"""


@pytest.mark.parametrize(("point", "asked"), [("drift.judged:1", 2), ("store.commit.after:2", 1)])
def test_killed_around_its_decision_it_is_asked_again_only_if_that_was_not_recorded(
    tmp_path: Path, point: str, asked: int
) -> None:
    def life(outside: str, at: str = "") -> tuple[int, str]:
        environment = {"OUTSIDE": outside, **({"EVERSTEP_CRASH_AT": at} if at else {})}
        status, out, err = Program(tmp_path, KILLED, environment=environment).end()
        assert status in (0, -9), err
        return status, out

    assert life("old", "body.before:2")[0] == -9
    assert life("new", point)[0] == -9
    assert life("new") == (0, "done\n")
    assert Path("asked.txt").read_text() == "old new\n" * asked
    assert Path("acted.txt").read_text() == "x"
