"""Notifications of holds: written with them, sent until acknowledged, by one worker at a time, dropped in time."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import everstep
from everstep import Webhook, step, workflow
from everstep.engine.process import notify
from everstep.engine.run import holds
from everstep.errors import RunHeld, StoreError, StoreFull
from everstep.stores.protocol import Append, HoldRow
from everstep.testing.faulty_store import FaultyStore
from tests.engine.resume_helpers import Machine
from tests.notify.conftest import SECRET, Receiver

NOW = 2_000_000_000
"""Where the machine's clock begins, in seconds."""


@step(effect="once")
async def pay(amount: int) -> str:
    raise OSError("the answer was lost")


@workflow
async def notified_paying(amount: int) -> str:
    return await pay(amount)


@workflow
async def notified_waiting() -> str:
    return await everstep.receive("word", str)


def notes(machine: Machine) -> list[Any]:
    return machine.store.notifications(undelivered_only=False)


def states(machine: Machine) -> list[str]:
    return [note.state for note in notes(machine)]


async def until_states(machine: Machine, *wanted: str) -> None:
    await machine.until(lambda: states(machine) == list(wanted))


async def until_tried(machine: Machine, attempts: int) -> None:
    """Wait until an attempt has failed and the next one is set."""
    await machine.until(lambda: [(note.attempts, note.claimed_by) for note in notes(machine)] == [(attempts, None)])


async def next_attempt(machine: Machine) -> None:
    """Let the pause before the next attempt pass."""
    (note,) = notes(machine)
    machine.clock.advance((note.next_at - machine.clock.now()) / 1e6)


# -- telling -----------------------------------------------------------------------------------------------------------
async def test_a_hold_reaches_its_webhook_signed_and_says_all_that_a_person_needs(
    machine: Machine, receiver: Receiver
) -> None:
    app = await machine.boot(on_hold=Webhook(receiver.url(), secret=SECRET))
    await app.start(notified_paying, 5, id="r")
    await until_states(machine, "sent")
    (message,) = receiver.verified(now=NOW)
    hold = machine.hold("r")
    assert receiver.deliveries() == [hold.id] == [message["id"]]
    assert (message["type"], message["run"], message["workflow"]) == ("hold", "r", "notified_paying")
    assert (message["reason"], message["step"], message["summary"]) == ("in-doubt", "pay", hold.summary)
    assert message["created_at"] == hold.created_at
    assert message["report"]["key"]
    assert set(message["resolutions"]) == {"done", "not-done", "cancel"}
    answer = message["resolutions"]["not-done"]
    assert answer["command"] == f"everstep resolve r --hold {hold.id} --not-done --url sqlite:///{machine.path}"
    assert answer["consequence"] == "it did not happen: do it again, in a new attempt with the same key"
    assert not set(message["report"]) & {"facts", "accepted", "consequences"}


async def test_on_hold_takes_several_and_each_is_told(machine: Machine, receiver: Receiver) -> None:
    told: list[str] = []

    async def later(hold: HoldRow) -> None:
        await asyncio.sleep(0)
        told.append(f"later {hold.run}")

    several = [lambda hold: told.append(hold.run), later, receiver.url("a"), Webhook(receiver.url("b"), secret=SECRET)]
    app = await machine.boot(on_hold=several)
    await app.start(notified_paying, 5, id="r")
    await until_states(machine, "sent", "sent")
    await machine.until(lambda: len(told) == 2)
    assert told == ["r", "later r"]
    assert receiver.deliveries("a") == receiver.deliveries("b") == [machine.hold("r").id]
    assert len(receiver.verified("b", now=NOW)) == 1


async def test_a_callback_that_fails_hurts_nobody(
    machine: Machine, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(hold: HoldRow) -> None:
        raise ValueError("no")

    async def fail_later(hold: HoldRow) -> None:
        raise ValueError("nor later")

    app = await machine.boot(on_hold=[fail, fail_later, receiver.url()])
    await app.start(notified_paying, 5, id="r")
    await until_states(machine, "sent")
    await machine.rest(app)
    assert [record.message for record in caplog.records].count("on_hold raised") == 2


async def test_every_way_of_being_held_notifies(machine: Machine, receiver: Receiver) -> None:
    """By the run's own driver, at its taking up, by a person here, and by a person through another process."""
    hook = Webhook(receiver.url())
    app = await machine.boot(on_hold=hook)
    await app.start(notified_paying, 5, id="doubted")
    for run in ("asked here", "asked of its driver", "asked of nobody", "damaged"):
        await app.start(notified_waiting, id=run.replace(" ", "-"))
    await machine.rest(app)
    await app.hold("asked-here")
    other = await machine.boot(on_hold=hook)
    await other.hold("asked-of-its-driver")
    await machine.until_status("asked-of-its-driver", "held")
    await machine.kill(app)
    await other.hold("asked-of-nobody")
    machine.sql("UPDATE events SET digest = zeroblob(16) WHERE run = 'damaged' AND seq = 2")
    machine.sql("UPDATE runs SET status = 'queued' WHERE id = 'damaged'")
    await machine.worker(on_hold=hook)
    await machine.until_status("damaged", "held")
    await machine.until(lambda: set(states(machine)) == {"sent"})
    arrived = {message["run"] for message in receiver.messages()}
    assert arrived == {"doubted", "asked-here", "asked-of-its-driver", "asked-of-nobody", "damaged"}


async def test_a_hold_that_was_fenced_off_tells_nobody(machine: Machine, receiver: Receiver) -> None:
    told: list[HoldRow] = []
    app = await machine.boot(on_hold=[told.append, receiver.url()])
    await app.start(notified_waiting, id="r")
    await machine.rest(app)
    machine.sql("UPDATE runs SET epoch = epoch + 1 WHERE id = 'r'")  # somebody else has taken it over
    app.drivers["r"].put_on_hold(holds.asked_report("x", "ann"))
    await machine.until(lambda: "r" not in app.drivers)
    await machine.rest(app)
    assert told == []
    assert notes(machine) == []


# -- until it is acknowledged ------------------------------------------------------------------------------------------
async def test_it_is_sent_again_with_growing_pauses_until_it_is_acknowledged(
    machine: Machine, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["500", "lose", "hang", "redirect", "drip", "404", "204"]
    receiver.plan(*words)
    app = await machine.boot(on_hold=Webhook(receiver.url(), secret=SECRET, timeout=0.3))
    await app.start(notified_paying, 5, id="r")
    pauses = []
    for attempt in range(1, 7):
        await until_tried(machine, attempt)
        (note,) = notes(machine)
        assert note.state == "pending"
        pauses.append((note.next_at - machine.clock.now()) / 1e6)
        await next_attempt(machine)
    await until_states(machine, "sent")
    assert [one["answered"] for one in receiver.requests()] == words
    assert [one["headers"]["everstep-attempt"] for one in receiver.requests()] == list("1234567")
    assert set(receiver.deliveries()) == {machine.hold("r").id}, "the same key in every attempt"
    for pause, whole in zip(pauses, (1, 2, 4, 8, 16, 32), strict=True):
        assert 0.75 * whole <= pause <= whole
    assert len({one["body"] for one in receiver.requests()}) == 1
    warned = [one.message for one in caplog.records if one.name == "everstep.holds"]
    assert warned == [
        f"Hold {machine.hold('r').id} of run r did not reach {receiver.url()}, and is sent again: HTTP 500."
    ]


async def test_a_pause_is_as_long_as_the_receiver_asks(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("later", "200")
    app = await machine.boot(on_hold=receiver.url())
    await app.start(notified_paying, 5, id="r")
    await until_tried(machine, 1)
    assert notes(machine)[0].next_at - machine.clock.now() == 30_000_000
    await next_attempt(machine)
    await until_states(machine, "sent")


async def test_pauses_grow_to_minutes_and_after_days_it_is_given_up(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("500")
    app = await machine.boot(on_hold=receiver.url())
    await app.start(notified_paying, 5, id="r")
    pauses = []
    for attempt in range(1, 13):
        await until_tried(machine, attempt)
        (note,) = notes(machine)
        pauses.append((note.next_at - machine.clock.now()) / 1e6)
        await next_attempt(machine)
    assert 225 <= pauses[-1] <= 300
    await until_tried(machine, 13)
    machine.clock.advance(3 * 86400)
    await until_states(machine, "given up")
    assert notes(machine)[0].last_error == "HTTP 500"
    assert machine.status("r") == "held", "the hold itself stays"
    machine.clock.advance(86400)
    await machine.rest(app)
    assert len(receiver.requests()) == 14


async def test_a_receiver_that_is_gone_for_good_is_left_alone(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("410")
    app = await machine.boot(on_hold=receiver.url())
    await app.start(notified_paying, 5, id="r")
    await until_states(machine, "given up")
    assert len(receiver.requests()) == 1


async def test_a_restart_neither_forgets_attempts_nor_shortens_the_pause(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("500", "500", "200")
    app = await machine.boot(on_hold=receiver.url())
    await app.start(notified_paying, 5, id="r")
    await until_tried(machine, 1)
    await next_attempt(machine)
    await until_tried(machine, 2)
    before = notes(machine)
    await machine.stop(app)
    app = await machine.worker(on_hold=receiver.url())
    await asyncio.sleep(0.1)
    assert notes(machine) == before
    assert len(receiver.requests()) == 2
    await next_attempt(machine)
    await until_states(machine, "sent")
    assert [one["headers"]["everstep-attempt"] for one in receiver.requests()] == list("123")


# -- resolved first ----------------------------------------------------------------------------------------------------
async def test_when_the_hold_is_resolved_first_nobody_is_told_any_more(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("500")
    app = await machine.boot(on_hold=receiver.url())
    await app.start(notified_waiting, id="r")
    await machine.rest(app)
    await app.hold("r")
    await until_tried(machine, 1)
    await app.resolve("r", "retry")
    assert states(machine) == ["dropped"]
    machine.clock.advance(10)
    await machine.rest(app)
    await asyncio.sleep(0.05)
    assert len(receiver.requests()) == 1
    assert machine.store.notifications() == []


async def test_what_arrives_while_the_hold_is_being_resolved_counts_as_sent(
    machine: Machine, receiver: Receiver
) -> None:
    receiver.plan("wait:go")
    app = await machine.boot(on_hold=receiver.url())
    await app.start(notified_waiting, id="r")
    await machine.rest(app)
    await app.hold("r")
    await machine.until(lambda: bool(receiver.requests()))
    await app.resolve("r", "retry")
    assert states(machine) == ["dropped"]
    (receiver.folder / "go").touch()
    await until_states(machine, "sent")


# -- who delivers ------------------------------------------------------------------------------------------------------
async def test_a_notification_waits_for_a_worker_that_has_its_target(machine: Machine, receiver: Receiver) -> None:
    app = await machine.boot(on_hold=Webhook(receiver.url(), secret=SECRET))
    receiver.plan("500", "200")
    await app.start(notified_paying, 5, id="r")
    await until_tried(machine, 1)
    await machine.kill(app)
    machine.clock.advance(60)
    await machine.worker()
    await machine.worker(on_hold=receiver.url("other"))
    await asyncio.sleep(0.2)
    assert (states(machine), len(receiver.requests())) == (["pending"], 1)
    assert receiver.requests("other") == [], "it is not for them"
    await machine.worker(on_hold=Webhook(receiver.url(), secret="another secret"))
    await until_states(machine, "sent")
    assert len(receiver.requests()) == 2
    request = receiver.requests()[1]
    assert everstep.verify_webhook(request["body"].encode(), request["headers"], "another secret", now=NOW + 60)


async def test_two_workers_do_not_send_one_notification_at_once(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("slow")
    workers = [await machine.worker(on_hold=receiver.url()) for _ in range(3)]
    for number in range(9):
        await workers[number % 3].start(notified_paying, number, id=f"r{number}")
    await machine.until(lambda: len(notes(machine)) == 9 and set(states(machine)) == {"sent"})
    assert sorted(Counter(receiver.deliveries()).values()) == [1] * 9
    assert all(note.attempts == 1 for note in notes(machine))


async def test_what_a_dead_worker_had_taken_is_free_as_soon_as_it_is_buried(
    machine: Machine, receiver: Receiver
) -> None:
    receiver.plan("hang", "200")
    app = await machine.boot(on_hold=Webhook(receiver.url(), timeout=500))
    await app.start(notified_paying, 5, id="r")
    await machine.until(lambda: bool(receiver.requests()))
    (note,) = notes(machine)
    assert (note.attempts, note.claimed_by) == (1, app.worker)
    assert note.next_at - machine.clock.now() == 505_000_000
    await machine.kill(app)
    await machine.worker(on_hold=receiver.url())
    machine.clock.advance(1)  # a sweep
    await until_states(machine, "sent")
    assert [one["headers"]["everstep-attempt"] for one in receiver.requests()] == ["1", "2"]


async def test_a_claim_of_a_worker_that_stands_still_lapses(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("wait:go", "200")
    app = await machine.boot(on_hold=Webhook(receiver.url(), timeout=20), lease=1000.0)
    await app.start(notified_paying, 5, id="r")
    await machine.until(lambda: bool(receiver.requests()))
    other = await machine.worker(on_hold=Webhook(receiver.url(), timeout=20))
    machine.clock.advance(24)
    other.pump.nudge()
    await asyncio.sleep(0.1)
    assert len(receiver.requests()) == 1, "it is still the other's"
    app.notifier._is_closed = True  # it stands still
    machine.clock.advance(2)
    other.pump.nudge()
    await until_states(machine, "sent")
    assert len(receiver.requests()) == 2
    (receiver.folder / "go").touch()


# -- many --------------------------------------------------------------------------------------------------------------
async def test_many_holds_at_once_reach_a_slow_receiver_a_few_at_a_time(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("slow")
    app = await machine.boot(on_hold=receiver.url(), concurrency=1000)
    for number in range(40):
        await app.start(notified_paying, number, id=f"r{number}")
    await machine.until(lambda: len(notes(machine)) == 40 and set(states(machine)) == {"sent"})
    at_once = max(one["at_once"] for one in receiver.requests())
    assert 1 < at_once <= notify.AT_ONCE_MAX, "neither one by one nor all at once"
    assert len(set(receiver.deliveries())) == len(receiver.deliveries()) == 40


async def test_a_receiver_that_hangs_does_not_keep_another_waiting(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("hang", path="bad")
    app = await machine.boot(on_hold=[Webhook(receiver.url("bad"), timeout=30), receiver.url("good")])
    for number in range(12):
        await app.start(notified_paying, number, id=f"r{number}")
    await machine.until(lambda: len(receiver.requests("good")) == 12)
    assert len(receiver.requests("bad")) == notify.AT_ONCE_MAX


async def test_the_loop_is_never_blocked_by_a_receiver(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("wait:go")
    app = await machine.boot(on_hold=Webhook(receiver.url(), timeout=60))
    await app.start(notified_paying, 5, id="r")
    await machine.until(lambda: bool(receiver.requests()))
    assert states(machine) == ["pending"]
    (receiver.folder / "go").touch()  # only this loop lets the receiver answer
    await until_states(machine, "sent")


async def test_a_receiver_that_drips_is_given_up_in_its_time(machine: Machine, receiver: Receiver) -> None:
    receiver.plan("drip")
    app = await machine.boot(on_hold=Webhook(receiver.url(), timeout=0.5))
    await app.start(notified_paying, 5, id="r")
    await machine.until(lambda: any(one.attempts and not one.claimed_by for one in notes(machine)))
    assert notes(machine)[0].last_error == "no answer within 0.5 s", "a slow drip does not keep it for ever"
    await machine.until(lambda: app.notifier._stuck.total() == 0)


# -- closing -----------------------------------------------------------------------------------------------------------
def test_a_script_that_ends_with_its_run_held_has_told_so(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`everstep.run` raises and the process ends: nobody else may be there to tell."""
    monkeypatch.setenv("EVERSTEP_ON_HOLD", receiver.url())
    monkeypatch.setenv("EVERSTEP_ON_HOLD_SECRET", SECRET)
    receiver.plan("slow")
    with pytest.raises(RunHeld):
        everstep.run(notified_paying, 5, id="r", url=str(tmp_path / "runs.db"))
    (message,) = receiver.verified()
    assert message["run"] == "r"


async def test_closing_does_not_wait_for_ever_and_leaves_the_rest_to_others(
    machine: Machine, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "CLOSING_SECONDS", 0.2)
    receiver.plan("hang", "200")
    app = await machine.boot(on_hold=Webhook(receiver.url(), timeout=30))
    await app.start(notified_paying, 5, id="r")
    await machine.until(lambda: bool(receiver.requests()))
    await machine.stop(app)
    assert states(machine) == ["pending"]
    assert notes(machine)[0].last_error == "", "it was closed before the receiver's time was over"
    await machine.worker(on_hold=receiver.url())
    await until_states(machine, "sent")


# -- a store that fails ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["due_notifications", "next_notification", "holds", "commit"])
async def test_a_store_that_fails_for_a_moment_delays_a_notification_at_most(
    machine: Machine, receiver: Receiver, method: str, after: bool
) -> None:
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store(), on_hold=receiver.url(), recover=True)
    await app.start(notified_waiting, id="r")
    await machine.rest(app)
    if method == "commit":  # the one that takes the notification
        store.fail(method, after=after, when=lambda operations: type(operations[0]).__name__ == "TakeNotification")
    else:
        store.fail(method, after=after)
    await app.hold("r")
    for _ in range(40):
        machine.clock.advance(1)
        app.pump.nudge()
        await asyncio.sleep(0.02)
    await until_states(machine, "sent")
    store.mend()


async def test_a_full_disk_is_not_asked_again_and_again(machine: Machine, receiver: Receiver) -> None:
    store = FaultyStore(machine.open_store())
    fault = store.fail(
        "commit",
        after=False,
        error=StoreFull("no room"),
        count=1000,
        when=lambda operations: type(operations[0]).__name__ == "TakeNotification",
    )
    app = await machine.boot(store=store.as_store(), on_hold=receiver.url())
    await app.start(notified_paying, 5, id="r")
    await machine.until(lambda: fault.fired >= 2)
    began = time.monotonic()
    await machine.until(lambda: fault.fired >= 4)
    assert time.monotonic() - began > 0.5
    store.mend()
    await until_states(machine, "sent")


async def test_the_hold_and_its_notification_are_one_unit(machine: Machine, receiver: Receiver) -> None:
    """Whatever is written with the hold is in the same operation: a store does it wholly or not at all."""
    store = FaultyStore(machine.open_store())
    units: list[Append] = []

    def is_held(operations: Any) -> bool:
        units.extend(one for one in operations if isinstance(one, Append) and one.hold is not None)
        return False

    store.fail("commit", after=False, when=is_held)
    app = await machine.boot(store=store.as_store(), on_hold=receiver.url())
    await app.start(notified_paying, 5, id="r")
    await until_states(machine, "sent")
    (unit,) = units
    assert unit.hold is not None
    assert [note.hold for note in unit.notifications] == [unit.hold.id]
    assert msgspec.json.decode(unit.events[-1].body)["hold"] == unit.hold.id
    store.mend()


def test_no_secret_is_in_the_file(tmp_path: Path, receiver: Receiver) -> None:
    address = receiver.url("hook?token=hidden-token").replace("http://", "http://ann:hidden-pass@")
    hook = Webhook(address, secret="hidden-secret", headers={"X-Key": "hidden-key"})

    async def main() -> None:
        async with everstep.open(str(tmp_path / "runs.db"), on_hold=hook) as app:
            run = await app.start(notified_paying, 5, id="r")
            with pytest.raises(RunHeld):
                await run.result(timeout=60)

    asyncio.run(main())
    assert len(receiver.verified(secret="hidden-secret")) == 1
    for file in tmp_path.glob("runs.db*"):
        assert b"hidden" not in file.read_bytes(), file


async def test_an_app_without_webhooks_asks_the_store_for_nothing(machine: Machine) -> None:
    store = FaultyStore(machine.open_store())
    for method in ("due_notifications", "next_notification", "notifications"):
        store.fail(method, after=False, error=StoreError("nobody may ask"), count=1000)
    app = await machine.boot(store=store.as_store(), on_hold=lambda hold: None, recover=True)
    run = await app.start(notified_paying, 5, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    await machine.advance(5)
    assert all(fault.fired == 0 for fault in store._faults.values())
