"""Sagas with checkpoints, keys of actions, atomic steps and restored backups: each keeps its promise."""

from typing import Any

import pytest

import everstep
from everstep import STORE, NotDone, step, transaction, workflow
from everstep.engine.history.restored import mark_restored
from everstep.errors import Misuse, RunCancelled, RunHeld, Uncompensated
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import killed_at, sound
from tests.worlds.ledger import GATES, NOTES, pass_gate


# -- checkpoints -------------------------------------------------------------------------------------------------------
async def unbook(booking: str, day: int) -> None:
    NOTES.append(f"unbook {booking}")


@step(compensate=unbook)
async def book(day: int) -> str:
    await pass_gate(f"book {day}")
    NOTES.append(f"book {day}")
    return f"b{day}"


@step(effect="once")
async def post_card(day: int) -> None:
    await pass_gate(f"card {day}")
    NOTES.append(f"card {day}")


@workflow(name="saga_tour")
async def tour(days: int, fails: bool) -> list[str]:
    done: list[str] = []
    while len(done) < days:
        done = await everstep.checkpoint(done)
        done = [*done, await book(len(done))]
    if fails:
        raise LookupError("no way back")
    return done


@workflow(name="saga_cards")
async def cards(days: int) -> int:
    sent = 0
    while sent < days:
        sent = await everstep.checkpoint(sent)
        await post_card(sent)
        sent += 1
    await everstep.receive("go", bool)
    return sent


UNDONE = [f"unbook b{day}" for day in reversed(range(6))]


async def test_a_loop_that_fails_after_a_crash_undoes_all_its_turns_in_reverse(machine: Machine) -> None:
    await killed_at(machine, "book 5", tour, 6, True)
    assert machine.kinds("r").count("checkpoint_taken") > 3
    app = await machine.worker()
    with pytest.raises(LookupError, match="no way back"):
        await app.get("r").result(timeout=60)
    assert ["book 5", *UNDONE] == NOTES, "no turn is done again, and none is left out"
    sound(machine)


async def test_a_loop_that_is_killed_while_it_is_undone_undoes_the_rest(machine: Machine) -> None:
    await killed_at(machine, "book 5", tour, 6, True)
    app = await machine.worker()
    await machine.until(lambda: len(NOTES) >= 3)
    await machine.kill(app)
    again = await machine.worker()
    with pytest.raises(LookupError):
        await again.get("r").result(timeout=60)
    assert list(dict.fromkeys(NOTES)) == ["book 5", *UNDONE]
    sound(machine)


async def test_a_loop_that_crashed_is_rolled_back_whole(machine: Machine) -> None:
    await killed_at(machine, "book 5", tour, 6, False)
    GATES["book 5"] = Gate()
    app = await machine.worker()
    await GATES["book 5"].reached.wait()
    await app.rollback("r")
    GATES["book 5"].opened.set()
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)
    assert NOTES in (["book 5", *UNDONE], UNDONE[1:]), "the one under way is settled first"
    sound(machine)


async def test_a_loop_that_has_ended_is_rolled_back_whole_by_another_process(machine: Machine) -> None:
    app, run = await machine.start(tour, 6, False, id="r")
    assert len(await run.result(timeout=60)) == 6
    await machine.stop(app)
    NOTES.clear()
    other = await machine.worker()
    await other.rollback("r")
    with pytest.raises(RunCancelled):
        await other.get("r").result(timeout=60)
    assert NOTES == UNDONE
    sound(machine)


async def test_after_a_checkpoint_it_is_still_known_what_nothing_undoes(machine: Machine) -> None:
    await killed_at(machine, "card 30", cards, 31)
    app = await machine.worker()
    await machine.until_status("r", "held")
    await app.resolve("r", "not-done")
    await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
    with pytest.raises(Uncompensated, match="post_card"):
        await app.rollback("r")
    await app.rollback("r", allow_uncompensated=True)
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)


# -- keys --------------------------------------------------------------------------------------------------------------
async def refund(receipt: str, invoice: str) -> None:
    NOTES.append(f"refund {receipt}")


@step(effect="once", key="pay:{invoice}", compensate=refund)
async def pay(invoice: str) -> str:
    NOTES.append(f"pay {invoice} {everstep.key()}")
    return f"paid {invoice}"


@workflow(name="saga_paying")
async def paying(invoice: str, fails: bool) -> str:
    receipt = await pay(invoice)
    if fails:
        raise LookupError("out of stock")
    return receipt


async def test_a_completed_compensation_frees_the_key_of_its_step(machine: Machine) -> None:
    app, failed = await machine.start(paying, "i1", True, id="a")
    with pytest.raises(LookupError):
        await failed.result(timeout=60)
    row = machine.store.effect("pay:i1")
    assert row is not None
    assert (row.state, row.round) == ("free", 1)
    second = await app.start(paying, "i1", False, id="b")
    assert await second.result(timeout=60) == "paid i1"
    first, undone, again = NOTES
    assert undone == "refund paid i1"
    assert first != again, "it is another action to its receiver"
    sound(machine)


async def test_a_person_who_says_that_a_compensation_is_done_frees_the_key_too(machine: Machine) -> None:
    @step(effect="once")
    async def give_back(receipt: str, invoice: str) -> None:
        raise ConnectionError("nobody answers")

    @step(key="buy:{invoice}", compensate=give_back)
    async def buy(invoice: str) -> str:
        return invoice

    @workflow(name="saga_buying")
    async def buying(invoice: str) -> None:
        await buy(invoice)
        raise LookupError("out of stock")

    app, run = await machine.start(buying, "i1", id="a")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.store.effect("buy:i1").state == "undoing"  # type: ignore[union-attr]
    await app.resolve("a", "done", value=None)
    with pytest.raises(LookupError):
        await app.get("a").result(timeout=60)
    assert machine.store.effect("buy:i1").state == "free"  # type: ignore[union-attr]
    sound(machine)


async def test_whoever_shares_an_outcome_does_not_undo_it(machine: Machine) -> None:
    app, owner = await machine.start(paying, "i1", False, id="a")
    assert await owner.result(timeout=60) == "paid i1"
    sharer = await app.start(paying, "i1", True, id="b")
    with pytest.raises(LookupError):
        await sharer.result(timeout=60)
    assert machine.kinds("b", "step_shared") == ["step_shared"]
    assert not any(one.startswith("refund") for one in NOTES), "it is the owner's to undo"
    assert machine.store.effect("pay:i1").state == "done"  # type: ignore[union-attr]
    sound(machine)


# -- atomic steps ------------------------------------------------------------------------------------------------------
def give(connection: Any, taken: str, item: str) -> None:
    connection.execute("DELETE FROM stock WHERE item = ?", (item,))
    NOTES.append(f"give {taken}")


def take(connection: Any, item: str) -> str:
    connection.execute("CREATE TABLE IF NOT EXISTS stock (item TEXT)")
    connection.execute("INSERT INTO stock VALUES (?)", (item,))
    return f"taken {item}"


@pytest.mark.parametrize("place", ["store", "file"])
async def test_an_atomic_step_is_undone_by_an_atomic_step(machine: Machine, place: str) -> None:
    database: Any = STORE if place == "store" else machine.path.parent / "shop.db"
    taking: Any = transaction(database, name="take", compensate=transaction(database, name="give")(give))(take)

    @workflow(name=f"stocking-{place}")
    def stocking(item: str) -> None:
        taking(item)
        raise LookupError("no lorry")

    _, run = await machine.start(stocking, "nails", id="r")
    with pytest.raises(LookupError, match="no lorry"):
        await run.result(timeout=60)
    assert NOTES == ["give taken nails"]
    assert machine.kinds("r")[-4:] == ["compensation_started", "step_started", "step_completed", "run_failed"]
    sound(machine)


def test_a_compensation_of_an_atomic_step_that_does_not_take_its_arguments_is_refused_when_declared() -> None:
    with pytest.raises(Misuse, match="cannot undo take"):
        transaction(STORE, name="take", compensate=lambda: None)(take)
    with pytest.raises(Misuse, match="cannot undo take"):
        transaction(STORE, name="take", compensate=transaction(STORE, name="few")(lambda connection: None))(take)


# -- after a restore ---------------------------------------------------------------------------------------------------
async def ask(key: str, *args: Any) -> Any:
    NOTES.append("asked")
    return NotDone()


@step(effect="once")
async def recall(parcel: str, number: int) -> None:
    NOTES.append(f"recall {parcel}")


@step(effect="once", probe=ask)
async def call_back(parcel: str, number: int) -> None:
    NOTES.append(f"call back {parcel}")


@step(compensate=recall)
async def send(number: int) -> str:
    return f"p{number}"


@step(compensate=call_back)
async def send_probed(number: int) -> str:
    return f"q{number}"


@workflow(name="saga_sending")
async def sending(probed: bool) -> None:
    await (send_probed(1) if probed else send(1))
    await everstep.receive("go", bool)
    raise LookupError("refused")


@pytest.mark.parametrize("probed", [False, True])
async def test_after_a_restore_a_compensation_that_must_not_happen_twice_is_asked_about(
    machine: Machine, probed: bool
) -> None:
    app, _ = await machine.start(sending, probed, id="r")
    await machine.rest(app)
    await machine.stop(app)
    mark_restored(machine.store)
    worker = await machine.worker()
    await worker.signal("r", "go", True)
    if probed:
        with pytest.raises(LookupError):
            await worker.get("r").result(timeout=60)
        assert NOTES == ["asked", "call back q1"]
        return
    await machine.until_status("r", "held")
    hold = machine.hold("r")
    assert (hold.reason, NOTES) == ("restored", [])
    assert hold.summary.startswith("the compensation of send is in doubt")
    await worker.resolve("r", "not-done")
    with pytest.raises(LookupError):
        await worker.get("r").result(timeout=60)
    assert NOTES == ["recall p1"]
    sound(machine)


@pytest.mark.parametrize("how", ["restored", "repaired"])
async def test_a_rollback_does_not_pass_over_what_is_lost_without_a_word(machine: Machine, how: str) -> None:
    """What the run did in the lost part is not in its history, so nothing would undo it."""
    app, _ = await machine.start(sending, False, id="r")
    await machine.rest(app)
    if how == "repaired":
        await machine.stop(app)
        (awaited,) = [event for event in machine.events("r") if event.kind == "signal_awaited"]
        machine.sql("UPDATE events SET body = x'7b7d' WHERE run = 'r' AND seq = ?", awaited.seq)
        app = await machine.boot()
        await app.repair("r")
        with pytest.raises(Uncompensated, match="the part of its history that is lost"):
            await app.rollback("r")
    else:
        await machine.stop(app)
        mark_restored(machine.store)
        worker = await machine.worker()
        with pytest.raises(Uncompensated, match="the part of its history that is lost"):
            await worker.rollback("r")
        app = worker
    assert NOTES == []
    await app.rollback("r", allow_uncompensated=True)
    await (machine.until_status("r", "held") if how == "restored" else machine.worker())
    await machine.until_status("r", "held")
    assert machine.hold("r").summary.startswith("the compensation of send is in doubt")
    await app.resolve("r", "not-done")
    await machine.until_status("r", "cancelled")
    assert NOTES == ["recall p1"]
    sound(machine)
