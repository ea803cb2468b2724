"""Context variables and log records: what a workflow sets reaches the bodies of its steps, live and after a crash."""

import asyncio
import decimal
import logging
from contextvars import ContextVar
from typing import Any

import pytest

from everstep import logs, step, workflow
from everstep.engine.code.commands import LEFT_OUT
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import GATES, NOTES, pass_gate

TENANT: ContextVar[str] = ContextVar("tenant", default="none")
OTHER: ContextVar[str] = ContextVar("other", default="none")


@step
async def look(name: str) -> str:
    NOTES.append(f"{name} {TENANT.get()}")
    await pass_gate(name)
    seen = TENANT.get()
    TENANT.set("changed by a body")
    return seen


@step
def look_plainly() -> str:
    return TENANT.get()


@step(effect="read", timeout=60)
async def look_in_time() -> str:
    return TENANT.get()


@step(fallback=lambda: TENANT.get())
def look_in_vain() -> str:
    raise ValueError


@workflow
async def tenants() -> list[str]:
    found = [await look("before")]
    TENANT.set("acme")
    found += [await look("a"), await asyncio.to_thread(look_plainly), await look_in_time()]
    found.append(await asyncio.to_thread(look_in_vain))

    async def inner() -> str:
        TENANT.set("nord")
        return await look("inner")

    found += [await asyncio.create_task(inner()), TENANT.get(), await look("after")]
    return found


@workflow
def tenants_plainly() -> list[str]:
    TENANT.set("acme")
    first = look_plainly()
    TENANT.set("nord")
    return [first, look_plainly()]


SEEN = ["none", "acme", "acme", "acme", "acme", "nord", "acme", "acme"]


async def test_what_a_workflow_sets_reaches_its_steps_and_nothing_comes_back(machine: Machine) -> None:
    app = await machine.boot()
    TENANT.set("of the caller")
    assert await app.run(tenants) == SEEN
    assert await app.run(tenants_plainly) == ["acme", "nord"]
    assert TENANT.get() == "of the caller"


async def test_after_a_crash_a_step_sees_what_it_would_have_seen(machine: Machine) -> None:
    GATES["inner"] = gate = Gate()
    app = await machine.boot()
    run = await app.start(tenants, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    gate.opened.set()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == SEEN
    assert NOTES.count("inner nord") == 2, run
    assert (await app.get("r").verify()).sound


async def test_variables_of_a_framework_that_belong_to_the_workflow_stay_there(machine: Machine) -> None:
    @step
    async def both() -> list[str]:
        return [TENANT.get(), OTHER.get()]

    @workflow
    async def sets_both() -> list[str]:
        TENANT.set("acme")
        OTHER.set("acme")
        with decimal.localcontext(prec=5):
            return await both()

    app = await machine.boot()
    assert await app.run(sets_both) == ["acme", "acme"]
    LEFT_OUT.add("other")
    try:
        assert await app.run(sets_both) == ["acme", "none"]
    finally:
        LEFT_OUT.discard("other")


log = logging.getLogger("shop")


@step
def log_plainly() -> None:
    log.info("def step", extra={"workflow": "mine"})


@step
async def log_in_step() -> None:
    log.info("step")


@workflow
async def logs_all() -> dict[str, Any]:
    log.info("workflow")
    await log_in_step()
    await asyncio.to_thread(log_plainly)
    return dict(logs.fields())


async def test_records_say_which_run_step_and_attempt_they_come_from(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shop")
    caplog.handler.addFilter(only := logs.RunFields())
    try:
        app = await machine.boot()
        assert await app.run(logs_all, id="r") == {"run": "r", "workflow": "logs_all"}
        log.info("outside")
    finally:
        caplog.handler.removeFilter(only)
    found = [
        (one.msg, one.run, one.workflow, one.step, one.attempt)  # type: ignore[attr-defined]
        for one in caplog.records
        if one.name == "shop"
    ]
    assert found == [
        ("workflow", "r", "logs_all", "", 0),
        ("step", "r", "logs_all", "log_in_step", 1),
        ("def step", "r", "mine", "log_plainly", 1),
        ("outside", "", "", "", 0),
    ]
    assert logs.fields() == {}
