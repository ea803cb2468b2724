"""Chain keys with checkpoints, repairs, keys of actions and markers: nothing that a history takes in can be forged."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import STORE, step, workflow
from everstep.engine.code.recovery_point import load_past
from everstep.engine.history.journal import packed, unpacked
from everstep.errors import ChainKeyMissing, Damaged
from everstep.model.chains import ChainKeys, chain_keys
from everstep.model.digests import checkpoint_digest
from everstep.model.markers import open_outcome, seal_outcome
from everstep.testing.checker import check, export_histories
from tests.damage.chained import KEY, OTHER, booted
from tests.engine.resume_helpers import Gate, Machine
from tests.waiting import open_raw
from tests.worlds.ledger import GATES, NOTES, act


# -- checkpoints -------------------------------------------------------------------------------------------------------
@step
async def add(number: int) -> int:
    NOTES.append(f"add {number}")
    return number


@workflow(name="keyed_adding")
async def adding(count: int) -> int:
    state = [0, 0]
    while state[0] < count:
        number, total = await everstep.checkpoint(state)
        total += await add(number)
        await everstep.receive("go", int)
        state = [number + 1, total]
    return state[1]


async def added(machine: Machine, *keys: bytes | None, rounds: int = 4) -> None:
    """Leave a run behind that waits in its fifth round, after a checkpoint."""
    app = await booted(machine, *keys)
    await app.start(adding, rounds + 1, id="r")
    for number in range(rounds):
        await app.signal("r", "go", number)
    await machine.until(lambda: len(NOTES) == rounds + 1)
    await machine.rest(app)
    await machine.stop(app)
    NOTES.clear()


async def test_a_run_with_a_key_goes_on_from_its_checkpoint(machine: Machine) -> None:
    await added(machine, KEY)
    worker = await booted(machine, KEY, recover=True)
    past = load_past(worker.store, machine.row("r"))
    assert past.checkpoint is not None
    assert past.damaged == []
    await worker.signal("r", "go", 9)
    assert await worker.get("r").result(timeout=60) == 10
    assert NOTES == []
    assert (await worker.get("r").verify()).sound
    assert check(export_histories(worker.store)) == []


async def test_a_forged_checkpoint_is_passed_over(machine: Machine) -> None:
    """Its own digest fits, and its event, which has that digest, cannot be made to."""
    await added(machine, KEY)
    row = machine.store.checkpoint("r", 1)
    assert row is not None
    state = packed(b"[[4,1000000]]")
    assert unpacked(row.state, "state") != b"[[4,1000000]]"
    forged = checkpoint_digest("r", 1, row.seq, row.previous, row.engine, state)
    machine.sql("UPDATE checkpoints SET state = ?, digest = ? WHERE run = 'r' AND seq = ?", state, forged, row.seq)
    worker = await booted(machine, KEY, recover=True)
    await worker.signal("r", "go", 9)
    assert await worker.get("r").result(timeout=60) == 10
    assert "checkpoint_damaged" in machine.kinds("r")


async def test_a_forged_checkpoint_with_a_forged_event_holds_the_run(machine: Machine) -> None:
    """The forger makes everything fit that can be made to fit without the key."""
    await added(machine, KEY)
    row = machine.store.checkpoint("r", 1)
    assert row is not None
    state = packed(b"[[4,1000000]]")
    forged = checkpoint_digest("r", 1, row.seq, row.previous, row.engine, state)
    machine.sql("UPDATE checkpoints SET state = ?, digest = ? WHERE run = 'r' AND seq = ?", state, forged, row.seq)
    (event,) = [event for event in machine.events("r") if event.seq == row.seq]
    body = event.body.replace(row.digest.hex().encode(), forged.hex().encode())
    machine.sql("UPDATE events SET body = ? WHERE run = 'r' AND seq = ?", body, row.seq)
    worker = await booted(machine, KEY, recover=True)
    await worker.signal("r", "go", 9)
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "damaged"
    assert NOTES == []
    await worker.repair("r", note="forged")
    assert await worker.get("r").result(timeout=60) == 10, "what is after the last good event is done again"


async def test_without_the_key_a_run_with_checkpoints_is_left_alone(machine: Machine) -> None:
    await added(machine, KEY)
    before = machine.events("r")
    app = await booted(machine, OTHER, recover=True)
    await app.signal("r", "go", 9)
    for _ in range(5):
        app.pump.nudge()
        await asyncio.sleep(0.02)
    assert machine.events("r") == before
    with pytest.raises(ChainKeyMissing):
        load_past(app.store, machine.row("r"))


# -- keys of actions ---------------------------------------------------------------------------------------------------
@step(name="keyed_charge", effect="once", key="invoice:{invoice}")
async def charge(invoice: int) -> str:
    run = everstep.current().run
    await act(run)
    return f"paid by {run}"


@workflow(name="keyed_charging")
async def charging(invoice: int) -> str:
    return await charge(invoice)


async def test_an_outcome_under_a_key_is_shared_by_whoever_has_the_chain_key(machine: Machine) -> None:
    """Also where the claim was lost: what was recorded in vain is chained anew, with the key."""
    app, other = await booted(machine, KEY), await booted(machine, KEY)
    GATES["a"] = Gate()
    first = await app.start(charging, 7, id="a")
    await GATES["a"].reached.wait()
    really, other.store.effect = other.store.effect, lambda key: None  # type: ignore[method-assign]
    second = await other.start(charging, 7, id="b")
    await machine.until(lambda: "key_taken" in machine.kinds("b"))
    other.store.effect = really  # type: ignore[method-assign]
    GATES["a"].opened.set()
    assert [await run.result(timeout=60) for run in (first, second)] == ["paid by a", "paid by a"]
    assert NOTES == ["a"]
    assert check(export_histories(app.store)) == []
    row = machine.store.effect("invoice:7")
    assert row is not None
    assert row.digest.startswith(chain_keys(KEY).writing.id + ":")


@pytest.mark.parametrize("leaves_key_away", [False, True])
async def test_a_forged_outcome_under_a_key_is_shared_with_nobody(machine: Machine, leaves_key_away: bool) -> None:
    app = await booted(machine, KEY)
    assert await app.run(charging, 7, id="a") == "paid by a"
    row = machine.store.effect("invoice:7")
    assert row is not None
    payload = b'["paid by nobody"]'
    seal = ChainKeys().seal(payload, row.key, row.step, row.arguments) if leaves_key_away else row.digest
    machine.sql("UPDATE effects SET outcome = ?, digest = ?", packed(payload), seal)
    await app.start(charging, 7, id="b")
    await machine.until_status("b", "held")
    assert "cannot be believed" in machine.hold("b").summary
    assert NOTES == ["a"], "and nobody does it once more"


async def test_an_outcome_of_another_key_does_not_fit(machine: Machine) -> None:
    app = await booted(machine, KEY)
    for invoice in (7, 8):
        await app.run(charging, invoice, id=f"r{invoice}")
    machine.sql(
        "UPDATE effects SET outcome = other.outcome, digest = other.digest"
        " FROM (SELECT * FROM effects WHERE key = 'invoice:8') AS other WHERE effects.key = 'invoice:7'"
    )
    await app.start(charging, 7, id="b")
    await machine.until_status("b", "held")


async def test_an_outcome_that_a_person_gives_is_sealed_as_well(machine: Machine) -> None:
    GATES["a"] = Gate()
    app = await booted(machine, KEY)
    await app.start(charging, 7, id="a")
    await GATES["a"].reached.wait()
    await machine.kill(app)
    worker = await booted(machine, KEY, recover=True)
    await machine.until_status("a", "held")
    await worker.cancel("a", now=True)
    await machine.until_status("a", "cancelled")
    await worker.settle_key("invoice:7", "paid by hand", note="seen in the bank", by="ann")
    assert await worker.run(charging, 7, id="b") == "paid by hand"


# -- markers -----------------------------------------------------------------------------------------------------------
def selling_flow(database: Any) -> Any:
    @everstep.transaction(database, name="keyed_sell")
    def sell(connection: Any, item: str) -> str:
        NOTES.append(item)
        connection.execute("CREATE TABLE IF NOT EXISTS sales (item TEXT)")
        connection.execute("INSERT INTO sales VALUES (?)", (item,))
        return f"sold {item}"

    @workflow(name="keyed_selling")
    async def selling() -> str:
        return await asyncio.to_thread(sell, "lamp")

    return selling


async def forgotten(machine: Machine, flow: Any, *keys: bytes | None) -> None:
    """Let an atomic step commit, and let the history forget its outcome, as if its process had died just then."""
    app = await booted(machine, *keys)
    assert await app.run(flow, id="r") == "sold lamp"
    await machine.stop(app)
    (started,) = [event for event in machine.events("r") if event.kind == "step_started"]
    machine.sql("DELETE FROM events WHERE run = 'r' AND seq > ?", started.seq)
    machine.sql(
        "UPDATE runs SET head_seq = ?, head_digest = ?, status = 'running', outcome = NULL, ended_at = NULL,"
        " updated_at = ?, current_step = 'keyed_sell' WHERE id = 'r'",
        started.seq,
        started.digest,
        started.at,
    )


@pytest.mark.parametrize("where", ["file", "store"])
async def test_a_marker_is_adopted_with_the_key_and_a_forged_one_is_not(machine: Machine, where: str) -> None:
    path = machine.folder / "shop.db" if where == "file" else machine.path
    flow = selling_flow(path if where == "file" else STORE)
    await forgotten(machine, flow, KEY)
    connection = open_raw(path)
    (kept,) = connection.execute("SELECT outcome FROM everstep_markers").fetchone()
    (key,) = connection.execute("SELECT key FROM everstep_markers").fetchone()
    for forged in (
        seal_outcome(ChainKeys(), key, b'["sold nothing"]'),
        kept.replace(b"lamp", b"lame"),
        b'["sold nothing"]',
    ):
        with pytest.raises((ChainKeyMissing, Damaged)):
            open_outcome(chain_keys(KEY), key, forged)
    with connection:
        connection.execute("UPDATE everstep_markers SET outcome = ?", (kept.replace(b"lamp", b"lame"),))
    worker = await booted(machine, KEY, recover=True)
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "in-doubt"
    with connection:
        connection.execute("UPDATE everstep_markers SET outcome = ?", (kept,))
    connection.close()
    await worker.resolve("r", "probe")
    assert await worker.get("r").result(timeout=60) == "sold lamp"
    assert NOTES == ["lamp"]
    assert check(export_histories(worker.store)) == []


def test_every_bit_of_a_marker_s_outcome_counts() -> None:
    for chain in (ChainKeys(), chain_keys(KEY)):
        kept = seal_outcome(chain, "k", b'["sold lamp"]')
        assert open_outcome(chain, "k", kept) == b'["sold lamp"]'
        for bit in range(len(kept) * 8):
            changed = bytearray(kept)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises((ChainKeyMissing, Damaged)):
                open_outcome(chain, "k", bytes(changed))
        with pytest.raises(Damaged):
            open_outcome(chain, "another", kept)


def test_what_is_sealed_with_one_key_is_believed_by_whoever_has_it() -> None:
    old, both = chain_keys(KEY), chain_keys([OTHER, KEY])
    both.check(b"x", old.seal(b"x", "p"), "It", "p")
    with pytest.raises(ChainKeyMissing):
        old.check(b"x", both.seal(b"x", "p"), "It", "p")
    with pytest.raises(Damaged):
        both.check(b"x", old.seal(b"x", "p", "q"), "It", "pq", "")
