"""Holds that come of damage, of a backup and of undoing are told like all others."""

import asyncio
import shutil
from typing import Any

import pytest

import everstep
from everstep import Budget, Fatal, Retry, step, workflow
from everstep.errors import RunHeld
from everstep.stores.protocol import Accepted, MarkRestored
from tests.engine.resume_helpers import Machine
from tests.notify.conftest import Receiver
from tests.worlds.ledger import PAID


async def unbook(number: str) -> None:
    raise ConnectionError("closed")


@step(compensate=step(unbook, name="meets.unbook", retry=Retry(attempts=1, then="hold")))
async def meets_book() -> str:
    return "17"


@step
async def meets_refuse() -> None:
    raise Fatal("no")


@step(effect="once")
async def meets_pay() -> str:
    PAID.append("paid")
    return "paid"


@workflow
async def meets_travelling() -> None:
    await meets_book()
    await meets_refuse()


@workflow
async def meets_paying() -> str:
    await everstep.receive("go", bool)
    return await meets_pay()


def states(machine: Machine) -> list[str]:
    return [note.state for note in machine.store.notifications(undelivered_only=False)]


async def test_a_compensation_that_fails_for_good_is_told_with_what_each_answer_leads_to(
    machine: Machine, receiver: Receiver
) -> None:
    app = await machine.boot(on_hold=receiver.url())
    run = await app.start(meets_travelling, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    await machine.until(lambda: states(machine) == ["sent"])
    (message,) = receiver.messages()
    assert (message["reason"], set(message["resolutions"])) == ("exhausted", {"retry", "skip", "cancel"})
    assert "leave meets_book as it is" in message["resolutions"]["skip"]["consequence"]
    assert message["report"]["not_compensated_yet"] == ["meets_book"]


@step(effect="read", cost={"usd": 0.5})
async def meets_ask(number: int) -> int:
    everstep.charge(usd=0.4)
    return number


@workflow(budget=Budget(usd=0.8))
async def meets_spending() -> int:
    return await meets_ask(1) + await meets_ask(2)


async def test_a_budget_at_its_limit_is_told_with_what_was_used_and_how_to_grant_more(
    machine: Machine, receiver: Receiver
) -> None:
    app = await machine.boot(on_hold=receiver.url())
    run = await app.start(meets_spending, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    await machine.until(lambda: states(machine) == ["sent"])
    (message,) = receiver.messages()
    assert (message["reason"], message["step"]) == ("budget", "meets_ask#2")
    assert list(message["resolutions"]) == ["accept", "skip", "cancel"]
    hold = machine.hold("r").id
    wanted = {
        "accept": f"everstep resolve r --hold {hold} --accept",
        "skip": f"everstep resolve r --hold {hold} --skip 1",
    }
    for answer, command in wanted.items():
        assert message["resolutions"][answer]["command"].startswith(command)
    assert message["report"]["used"] == {"usd": 0.4, "steps": 1}
    assert message["report"]["limits"] == {"usd": 0.8}
    assert message["report"]["by_step"] == {"meets_ask": {"usd": 0.4, "steps": 1}}
    assert not {"grant", "part", "example"} & set(message["report"]), "that is for the engine"
    await app.resolve("r", "accept")
    assert await run.result(timeout=60) == 3


async def test_damage_is_told_and_a_repair_takes_back_what_nobody_has_heard_yet(
    machine: Machine, receiver: Receiver
) -> None:
    receiver.plan("500")
    app, _ = await machine.start(meets_paying, id="r")
    await machine.until_status("r", "waiting")
    await machine.stop(app)
    machine.sql("UPDATE events SET body = CAST('{}' AS BLOB) WHERE seq = 2")
    app = await machine.worker(on_hold=receiver.url())
    await app.signal("r", "go", True)
    await machine.until(lambda: receiver.messages())
    (message, *_) = receiver.messages()
    assert (message["reason"], set(message["resolutions"])) == ("damaged", {"retry", "repair"})
    assert message["resolutions"]["repair"]["command"].split()[-3] == "--repair"
    assert states(machine) == ["pending"]
    await machine.until(lambda: machine.store.notifications()[0].claimed_by is None)
    receiver.plan("200")
    await app.resolve("r", "repair")
    assert "dropped" in states(machine)
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "in-doubt", "what may have been begun in the lost part is asked about"
    await machine.until(lambda: sorted(states(machine)) == ["dropped", "sent"])
    assert PAID == []


async def test_after_a_restore_a_notification_may_arrive_again_with_the_same_delivery(
    machine: Machine, receiver: Receiver
) -> None:
    """The backup was made between the hold and its acknowledgement, so it knows of no acknowledgement."""
    receiver.plan("500")
    app = await machine.boot(on_hold=receiver.url())
    run = await app.start(meets_travelling, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    await machine.until(lambda: [note.last_error != "" for note in machine.store.notifications()] == [True])
    backup = machine.path.with_name("backup.db")
    machine.sql(f"VACUUM INTO '{backup}'")
    receiver.plan("200")
    machine.clock.advance(2)
    await machine.until(lambda: states(machine) == ["sent"])
    await machine.stop(app)
    (machine.folder / "later").mkdir()
    later = Machine(machine.folder / "later")
    later.clock = machine.clock
    shutil.move(backup, later.path)
    store = later.open_store()
    store.bury_dead(later.clock.now() + 60_000_000)  # its lock was beside the other file
    assert store.commit([MarkRestored(0)]) == [Accepted()]
    store.close()
    try:
        assert states(later) == ["pending"]
        await later.worker(on_hold=receiver.url())
        await later.until(lambda: states(later) == ["sent"])
    finally:
        await later.shut()
    deliveries = receiver.deliveries()
    assert len(deliveries) == 3
    assert len(set(deliveries)) == 1, "whoever receives can tell that it is the same"


DAMAGES = {
    "id": "UPDATE notifications SET id = CAST(x'ff41' AS TEXT) WHERE run = 'a'",
    "run": "UPDATE notifications SET run = CAST(x'ff41' AS TEXT) WHERE run = 'a'",
    "hold": "UPDATE notifications SET hold = CAST(x'ff41' AS TEXT) WHERE run = 'a'",
    "last_error": "UPDATE notifications SET last_error = CAST(x'ff41' AS TEXT) WHERE run = 'a'",
    "state": "UPDATE notifications SET state = CAST(x'ff41' AS TEXT) WHERE run = 'a'",
    "claimed_by": "UPDATE notifications SET claimed_by = CAST(x'ff41' AS TEXT) WHERE run = 'a'",
    "attempts": "UPDATE notifications SET attempts = -7 WHERE run = 'a'",
    "targets": "UPDATE workers SET targets = CAST(x'ff' AS TEXT)",
}


@pytest.mark.parametrize("column", DAMAGES)
async def test_a_damaged_notification_keeps_nobody_from_anything(
    machine: Machine, receiver: Receiver, column: str
) -> None:
    receiver.plan("500")
    app = await machine.boot(on_hold=receiver.url())
    for run in ("a", "b"):
        await app.start(meets_travelling, id=run)
        await machine.until_status(run, "held")
    await machine.until(lambda: [note.last_error != "" for note in machine.store.notifications()] == [True, True])
    machine.sql(DAMAGES[column])
    receiver.plan("200")
    machine.clock.advance(2)
    app.pump.nudge()

    def is_told() -> Any:
        return "sent" in [note.state for note in machine.store.notifications(run="b", undelivered_only=False)]

    await machine.until(is_told)
    await asyncio.sleep(0.05)
    assert machine.store.workers()
    assert await app.run(meets_small, id="c") == "done"


@workflow
async def meets_small() -> str:
    return "done"
