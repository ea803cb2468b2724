"""Chain keys: who has the database and not the key can forge no history; who has no key, or another, does nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import everstep
from everstep import step, workflow
from everstep.cli import main
from everstep.engine.history.verify import load_verified
from everstep.errors import ChainKeyMissing, Damaged, Misuse, RunHeld
from everstep.model.chains import chain_keys
from everstep.model.digests import chain_next, chain_start
from everstep.model.events import decode_body, encode_body
from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from tests.damage.chained import KEY, OTHER, booted
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw
from tests.worlds.ledger import NOTES


@step
async def pay(amount: int) -> int:
    NOTES.append(f"pay {amount}")
    return amount


@workflow
async def keyed_child(amount: int) -> int:
    return await pay(amount)


@workflow
async def keyed(amount: int) -> list[int]:
    first = await pay(amount)
    second = await keyed_child(amount + 1)
    word = await everstep.receive("go", int)
    return [first, second, word]


async def left(machine: Machine, *keys: bytes | None) -> None:
    """Leave a run behind that waits for a signal, made with the first key."""
    app = await booted(machine, *keys)
    await app.start(keyed, 5, id="r")
    await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
    await machine.rest(app)
    await machine.stop(app)
    NOTES.clear()


def forge(machine: Machine, run: str = "r", *, amount: int = 1_000_000, strip: bool = False) -> None:
    """Change an outcome as somebody does who can write the database and knows how digests are made: all of them fit."""
    digest = chain_start(run, 1)
    for event in machine.events(run):
        body: Any = decode_body(event.kind, event.body)
        if event.kind == "step_completed":
            body.value = type(body.value)(f"[{amount}]".encode())
        if event.kind == "run_started" and strip:
            body.chain = ""
        encoded = encode_body(body)
        digest = chain_next(digest, event.seq, event.kind, event.step, event.at, encoded)
        machine.sql("UPDATE events SET body = ?, digest = ? WHERE run = ? AND seq = ?", encoded, digest, run, event.seq)
    machine.sql("UPDATE runs SET head_digest = ? WHERE id = ?", digest, run)


# -- with the key -----------------------------------------------------------------------------------------------
async def test_with_its_key_a_run_lives_as_any_other(machine: Machine) -> None:
    await left(machine, KEY)
    worker = await booted(machine, KEY, recover=True)
    await worker.hold("r", "look")
    await worker.resolve("r", "retry")
    await worker.signal("r", "go", 7)
    assert await worker.get("r").result(timeout=60) == [5, 6, 7]
    assert (await worker.get("r").verify()).sound
    assert {body.chain for run in ("r", "r.2") for body in machine.bodies(run, "run_started")} == {
        chain_keys(KEY).writing.id
    }
    await worker.start(keyed, 5, id="r", on_existing="restart")
    await machine.until(lambda: machine.row("r").generation == 2)
    assert machine.bodies("r", "run_started")[0].chain == chain_keys(KEY).writing.id
    await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
    await machine.rest(worker)
    assert check(export_histories(worker.store)) == []
    assert NOTES == ["pay 5", "pay 6"], "those of the restart"


async def test_what_was_made_with_the_key_is_not_what_would_be_made_without(machine: Machine) -> None:
    await left(machine, KEY)
    with pytest.raises(ChainKeyMissing):
        load_verified(machine.store, machine.row("r"))
    machine.store.chain = chain_keys(KEY)
    assert load_verified(machine.store, machine.row("r"))
    assert KEY.decode() not in machine.path.read_bytes().decode("latin-1")


# -- without the key, or with another -----------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [(), (OTHER,), (OTHER, None)], ids=["no key", "another", "another or none"])
async def test_without_its_key_nothing_is_done_to_a_run(machine: Machine, keys: Sequence[bytes | None]) -> None:
    await left(machine, KEY)
    app = await booted(machine, *keys)
    before = machine.dump()
    for attempt in (
        lambda: app.get("r").result(timeout=60),
        lambda: app.hold("r"),
        lambda: app.cancel("r", now=True),
        lambda: app.repair("r"),
    ):
        with pytest.raises(ChainKeyMissing, match="chain key"):
            await attempt()
    verification = await app.get("r").verify()
    assert not verification.sound
    assert "chain key" in verification.problem
    assert machine.dump() == before, "nothing was changed"
    run = await app.start(keyed, 5, id="r")
    with pytest.raises(ChainKeyMissing):
        await run.result(timeout=60)
    assert machine.dump()["events"] == before["events"]
    assert machine.status("r") == "waiting"
    assert NOTES == []


async def test_a_worker_without_the_key_leaves_the_run_for_one_that_has_it(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    await left(machine, KEY)
    without = await booted(machine, recover=True)
    await without.signal("r", "go", 7)
    await machine.until(lambda: "r" in without.untakeable)
    for _ in range(3):
        await machine.advance(1)
    said = [record for record in caplog.records if "chain key" in record.getMessage()]
    assert len(said) == 1, "it is said once"
    assert not any(record.exc_info for record in caplog.records)
    assert machine.store.holds() == []
    with_it = await booted(machine, KEY, recover=True)
    assert await with_it.get("r").result(timeout=60) == [5, 6, 7]


async def test_a_run_that_was_made_without_a_key_is_believed_only_if_that_is_said(machine: Machine) -> None:
    await left(machine)
    app = await booted(machine, KEY)
    with pytest.raises(ChainKeyMissing, match="None"):
        await app.get("r").result(timeout=60)
    await machine.stop(app)
    app = await booted(machine, KEY, None, recover=True)
    await app.signal("r", "go", 7)
    assert await app.get("r").result(timeout=60) == [5, 6, 7]
    assert machine.bodies("r", "run_started")[0].chain == "", "it stays what it was"
    assert await app.run(keyed_child, 8, id="new") == 8
    assert machine.bodies("new", "run_started")[0].chain


# -- other keys over time ---------------------------------------------------------------------------------------
async def test_keys_are_changed_by_putting_a_new_one_first(machine: Machine) -> None:
    await left(machine, OTHER)
    app = await booted(machine, KEY, OTHER, recover=True)
    await app.start(keyed, 1, id="new")
    await app.signal("r", "go", 7)
    assert await app.get("r").result(timeout=60) == [5, 6, 7]
    new, old = machine.bodies("new", "run_started")[0].chain, machine.bodies("r", "run_started")[0].chain
    assert (new, old) == (chain_keys(KEY).writing.id, chain_keys(OTHER).writing.id)
    await machine.stop(app)
    app = await booted(machine, KEY)
    with pytest.raises(ChainKeyMissing, match=old):
        await app.get("r").result()


# -- forging ------------------------------------------------------------------------------------------------------
async def test_without_a_key_a_forged_history_with_fitting_digests_is_believed(machine: Machine) -> None:
    """What the key is for. No code of the forger's is executed either way."""
    await left(machine)
    forge(machine)
    worker = await booted(machine, recover=True)
    await worker.signal("r", "go", 7)
    assert await worker.get("r").result(timeout=60) == [1_000_000, 6, 7]


async def test_with_a_key_a_forged_history_is_held(machine: Machine) -> None:
    await left(machine, KEY)
    forge(machine)
    worker = await booted(machine, KEY, recover=True)
    await worker.signal("r", "go", 7)
    await machine.until_status("r", "held")
    with pytest.raises(RunHeld, match="damaged"):
        await worker.get("r").result()
    assert NOTES == []


async def test_taking_the_key_s_mark_away_does_not_help_the_forger(machine: Machine) -> None:
    await left(machine, KEY)
    forge(machine, strip=True)
    worker = await booted(machine, KEY, recover=True)
    await worker.signal("r", "go", 7)
    await machine.until(lambda: "r" in worker.untakeable)
    with pytest.raises(ChainKeyMissing, match="without a chain key"):
        await worker.get("r").result(timeout=60)
    assert not (await worker.get("r").verify()).sound
    assert NOTES == []


async def test_an_ended_run_cannot_be_given_another_result(machine: Machine) -> None:
    await left(machine, KEY)
    app = await booted(machine, KEY, recover=True)
    await app.signal("r", "go", 7)
    await app.get("r").result(timeout=60)
    last = machine.events("r")[-1]
    forged = last.body.replace(b"[5,6,7]", b"[9,9,9]")
    digest = chain_next(machine.events("r")[-2].digest, last.seq, last.kind, last.step, last.at, forged)
    machine.sql("UPDATE events SET body = ?, digest = ? WHERE run = 'r' AND seq = ?", forged, digest, last.seq)
    machine.sql("UPDATE runs SET outcome = ?, head_digest = ? WHERE id = 'r'", b"[[9,9,9]]", digest)
    with pytest.raises(Damaged):
        await app.get("r").result(timeout=60)


async def test_a_history_of_one_run_does_not_fit_another_although_the_key_is_the_same(machine: Machine) -> None:
    await left(machine, KEY)
    machine.sql(
        "INSERT INTO events SELECT 'copy', generation, seq, kind, step, at, body, digest FROM events WHERE run = 'r'"
    )
    machine.sql("UPDATE runs SET id = 'copy' WHERE id = 'r'")
    app = await booted(machine, KEY)
    with pytest.raises(Damaged):
        await app.get("copy").result(timeout=60)


async def test_a_repaired_history_goes_on_with_its_key(machine: Machine) -> None:
    await left(machine, KEY)
    machine.sql("UPDATE events SET body = x'7b7d' WHERE run = 'r' AND seq = 4")
    app = await booted(machine, KEY, recover=True)
    await app.repair("r", note="a bad disk")
    await app.signal("r", "go", 7)
    assert await app.get("r").result(timeout=60) == [5, 6, 7]
    assert (await app.get("r").verify()).sound


# -- giving keys --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [KEY, [KEY], (KEY, None), lambda: KEY, lambda: [KEY, OTHER]])
def test_a_key_may_be_given_in_several_ways(tmp_path: Path, given: Any) -> None:
    with everstep.open(str(tmp_path / "runs.db"), chain_key=given) as app:
        assert app.run(keyed_child, 3, id="a") == 3
    store = SqliteStore(tmp_path / "runs.db")
    store.chain = chain_keys(KEY)
    row = store.run("a")
    assert row is not None
    assert load_verified(store, row)[0].body.chain == chain_keys(KEY).writing.id
    store.close()


@pytest.mark.parametrize("given", ["text" * 8, b"short", [None, KEY], [KEY, b"short"], [], 5, [KEY, "text" * 8]])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, given: Any) -> None:
    with pytest.raises(Misuse) as refused, everstep.open(str(tmp_path / "runs.db"), chain_key=given):
        pass
    assert "texttext" not in str(refused.value)


def test_keys_are_not_shown(tmp_path: Path) -> None:
    assert KEY.decode() not in repr(chain_keys([KEY, None]))


def test_the_environment_gives_keys_to_every_command(tmp_path: Path) -> None:
    path = str(tmp_path / "runs.db")
    with everstep.open(path, chain_key=KEY) as app:
        app.run(keyed_child, 3, id="a")

    def verdict(key: str) -> Any:
        environment = {"EVERSTEP_URL": path, "EVERSTEP_CHAIN_KEY": key}
        done = CliRunner(env=environment).invoke(main, ["verify", "--all", "--json"])
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout)

    assert verdict(KEY.decode())["sound"]
    assert verdict(f"{OTHER.decode()},{KEY.decode()}")["sound"]
    assert not verdict(f"{OTHER.decode()},none")["sound"]
    assert not verdict("")["sound"]
    assert verdict("short")["error"]["code"] == "everstep.misuse"


async def test_every_bit_of_the_ends_of_a_keyed_history_counts(machine: Machine) -> None:
    """The first and the last event and the head: none of their bits can be flipped unnoticed."""
    await left(machine, KEY)
    connection = open_raw(machine.path)
    store = machine.open_store()
    store.chain = chain_keys(KEY)
    last = len(machine.events("r"))
    missed = []
    for seq in (1, last):
        ((body, digest),) = connection.execute("SELECT body, digest FROM events WHERE run = 'r' AND seq = ?", (seq,))
        for column, value in (("body", body), ("digest", digest)):
            for bit in range(8 * len(value)):
                flipped = bytearray(value)
                flipped[bit // 8] ^= 1 << (bit % 8)
                connection.execute(f"UPDATE events SET {column} = ? WHERE run = 'r' AND seq = ?", (bytes(flipped), seq))
                try:
                    load_verified(store, machine.row("r"))
                    missed.append((seq, column, bit))
                except (Damaged, ChainKeyMissing):
                    pass
            connection.execute(f"UPDATE events SET {column} = ? WHERE run = 'r' AND seq = ?", (value, seq))
    connection.close()
    store.close()
    assert missed == []
