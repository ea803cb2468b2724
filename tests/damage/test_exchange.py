"""Damaged streams and answers: what is read is right or an error, and `verify` finds every flipped bit.

What is not covered: an entry behind the last one that the history tells of, when it is cut off whole (its attempt was
still under way), and the id of a request, by which it is found again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.code.recovery_point import verify_whole
from everstep.engine.verbs.streams import entries_now
from everstep.errors import ChainKeyMissing, Damaged
from everstep.model.digests import entry_digest, stream_start
from everstep.stores.rows.answers_and_streams import ENTRY_COLUMNS
from tests.damage.chained import KEY, OTHER, booted
from tests.damage.subject import bits_of, flip
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw

ANSWER_COLUMNS = ("run", "number", "generation", "seq")
INTEGER_BITS = (0, 1, 2, 7, 8, 31, 32, 62, 63)


@step(effect="read")
async def say(*words: str) -> None:
    for word in words:
        everstep.stream("tokens").append(word)


@workflow(name="damaged_talk")
async def talk() -> None:
    everstep.stream("tokens").append("begin")
    await say("a", "b" * 2000, "c")
    everstep.stream("tokens").append({"end": 1})
    async for request in everstep.requests("ask", int):
        request.answer(request.value * 2)


async def talked(machine: Machine, *keys: bytes) -> App:
    """Leave a run behind that has a stream and two answers, and waits."""
    app = await booted(machine, *keys)
    run = await app.start(talk, id="r")
    assert [await run.ask("ask", number, id=str(number)) for number in (1, 2)] == [2, 4]
    await machine.rest(app)
    return app


@contextmanager
def changed(raw: apsw.Connection, table: str, column: str, where: str, value: Any) -> Iterator[bool]:
    """Give a cell another value, and put it right afterwards. Tells whether the table allows it."""
    ((before,),) = raw.execute(f"SELECT {column} FROM {table} WHERE {where}")
    target = "CAST(? AS TEXT)" if isinstance(before, str) else "?"
    rows = raw.execute(f"SELECT * FROM {table}").fetchall()
    try:
        raw.execute(f"UPDATE {table} SET {column} = {target} WHERE {where}", (value,))
    except apsw.ConstraintError:
        yield False
        return
    try:
        yield True
    finally:
        raw.execute(f"DELETE FROM {table}")
        marks = ", ".join("?" * len(rows[0]))
        raw.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def bits(value: Any) -> list[int]:
    if isinstance(value, int):
        return list(INTEGER_BITS)
    count = bits_of(value)
    places = {0, count // 16, count // 8 - 1}
    return [8 * place + bit for place in sorted(places) for bit in range(8)]


def read_now(app: App) -> list[Any]:
    return [tuple(entry) for entry in entries_now(app, "r", "tokens")]


def is_sound(app: App) -> bool:
    try:
        verify_whole(app.store, "r")
    except Damaged:
        return False
    return True


async def test_a_flipped_bit_in_a_stream_is_found_and_never_read(machine: Machine) -> None:
    app = await talked(machine)
    right = read_now(app)
    assert len(right) == 5
    assert is_sound(app)
    raw, count = open_raw(machine.path), 0
    for position in range(1, 6):
        for column in ENTRY_COLUMNS:
            where = f"run = 'r' AND position = {position}"
            ((value,),) = raw.execute(f"SELECT {column} FROM streams WHERE {where}")
            for bit in bits(value) if value not in ("", b"") else ():
                with changed(raw, "streams", column, where, flip(value, bit)) as is_possible:
                    if not is_possible:
                        continue
                    count += 1
                    assert not is_sound(app), f"{column} of entry {position}, bit {bit}"
                    try:
                        found = read_now(app)
                    except Damaged:
                        continue
                    assert found == right[: len(found)], f"{column} of entry {position}, bit {bit}"
    assert read_now(app) == right
    assert is_sound(app)
    assert count > 700
    raw.close()


async def test_missing_swapped_and_foreign_entries_are_found(machine: Machine) -> None:
    app = await talked(machine)
    await app.start(talk, id="other")
    await machine.rest(app)
    right = read_now(app)
    raw = open_raw(machine.path)
    columns = ", ".join(name for name in ENTRY_COLUMNS if name not in ("run", "position"))
    damages = [f"DELETE FROM streams WHERE run = 'r' AND position = {n}" for n in range(1, 6)]
    damages += [f"DELETE FROM streams WHERE run = 'r' AND position >= {n}" for n in range(1, 6)]
    damages += [
        f"INSERT OR REPLACE INTO streams (run, position, {columns}) SELECT 'r', {n}, {columns} FROM streams "
        f"WHERE run = 'other' AND position = {n}"
        for n in range(1, 6)
    ]
    damages += [
        f"INSERT OR REPLACE INTO streams (run, position, {columns}) SELECT 'r', {n + 1}, {columns} FROM streams "
        f"WHERE run = 'r' AND position = {n}"
        for n in range(1, 5)
    ]
    for damage in damages:
        rows = raw.execute("SELECT * FROM streams").fetchall()
        raw.execute(damage)
        assert not is_sound(app), damage
        try:
            found = read_now(app)
        except Damaged:
            found = []
        assert found == right[: len(found)], damage
        raw.execute("DELETE FROM streams")
        raw.executemany(f"INSERT INTO streams VALUES ({', '.join('?' * 12)})", rows)
    assert is_sound(app)
    raw.close()


async def test_a_damaged_table_of_answers_gives_no_wrong_answer(machine: Machine) -> None:
    app = await talked(machine)
    raw, count = open_raw(machine.path), 0
    for number in (1, 2):
        for column in ANSWER_COLUMNS:
            where = f"run = 'r' AND number = {number}"
            ((value,),) = raw.execute(f"SELECT {column} FROM answers WHERE {where}")
            for bit in bits(value) if not isinstance(value, str) else range(8):
                with changed(raw, "answers", column, where, flip(value, bit)) as is_possible:
                    if is_possible:
                        count += 1
                        asked = app.ask("r", "ask", number, id=str(number), timeout=5)
                        assert await asked == number * 2, f"{column} of {number}, bit {bit}"
    assert count > 50
    assert await app.ask("r", "ask", 1, id="1") == 2
    raw.close()


# -- chain keys --------------------------------------------------------------------------------------------------------
async def test_with_a_chain_key_nobody_can_forge_an_entry_or_an_answer(machine: Machine) -> None:
    app = await talked(machine, KEY)
    right = read_now(app)
    raw = open_raw(machine.path)
    digest = stream_start("r", 1, "tokens")
    for row in app.store.stream("r", 1, "tokens"):
        value = b'r["forged"]' if row.position == 2 else row.value
        digest = entry_digest(digest, *row[3:10], value)
        raw.execute("UPDATE streams SET value = ?, digest = ? WHERE position = ?", (value, digest, row.position))
    with pytest.raises(Damaged):
        read_now(app)
    assert not is_sound(app)
    raw.execute("UPDATE events SET body = CAST(replace(body, '[2]', '[3]') AS BLOB) WHERE kind = 'request_answered'")
    with pytest.raises(Damaged):
        await app.ask("r", "ask", 1, id="1")
    raw.close()
    assert len(right) == 5


@pytest.mark.parametrize("keys", [(), (OTHER,)])
async def test_without_the_chain_key_a_stream_and_an_answer_are_not_read(
    machine: Machine, keys: tuple[bytes, ...]
) -> None:
    app = await talked(machine, KEY)
    other = await booted(machine, *keys)
    with pytest.raises(ChainKeyMissing):
        read_now(other)
    with pytest.raises(ChainKeyMissing):
        await other.ask("r", "ask", 1, id="1", timeout=5)
    assert await app.ask("r", "ask", 1, id="1") == 2


async def test_a_keyed_run_that_goes_on_elsewhere_goes_on_with_its_stream(machine: Machine) -> None:
    app = await talked(machine, KEY)
    await machine.stop(app)
    again = await booted(machine, KEY, recover=True)
    assert await again.ask("r", "ask", 3, id="3") == 6
    await again.cancel("r")
    await machine.until_status("r", "cancelled")
    assert [entry.position async for entry in again.get("r").stream("tokens")] == [1, 2, 3, 4, 5]
    assert (await again.get("r").verify()).sound
