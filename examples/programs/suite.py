"""Tests of a team that uses Everstep: one on the plugin's store in memory, one whose run outlives a killed pytest."""

import sqlite3
from typing import Any

import everstep
from everstep import step, workflow


@step
def pay(cents: int) -> int:
    with sqlite3.connect("outside.db", timeout=30) as outside:
        outside.execute("create table if not exists paid (cents, key primary key)")
        outside.execute("insert or ignore into paid values (?, ?)", (cents, everstep.key()))
    return cents


@workflow
def shop(cents: int) -> int:
    paid = pay(cents)
    everstep.blocking.sleep(0.3)
    return paid + pay(cents + 1)


@workflow
async def patient() -> bool:
    return await everstep.receive("go", bool, timeout=86400)


def test_a_day_is_skipped(everstep_app: Any) -> None:
    run = everstep_app.start(patient)
    run.signal("go", True)
    assert run.result() is True


def test_a_run_that_outlives_pytest() -> None:
    assert everstep.run(shop, 500, id="shop-1") == 1001
