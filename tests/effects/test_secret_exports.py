"""Exports leave out what is secret, and what is left out is never computed again: such a run is only looked at."""

import asyncio
import base64
import binascii
import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import everstep
from everstep import Retry, step, workflow
from everstep.cli import main
from everstep.errors import Misuse, SecretsLeftOut
from tests.effects.secretive import FAILING, losing_token, parent_of_losing_token, secretive
from tests.effects.shown import MARK, everything_shown, shown_to_programs
from tests.effects.test_secret_exchange import exchange
from tests.effects.test_secret_meets import failing_in_a_group, making, saga_of, take_back_step
from tests.engine.resume_helpers import Gate, Machine, declared

LARGE = 1_000


@pytest.fixture(autouse=True)
def nothing_fails() -> None:
    FAILING.clear()


def all_texts(path: Path) -> str:
    """Return everything that is in a file, also what is encoded or compressed in it."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for name, one in value.items():
                walk(name)
                walk(one)
        elif isinstance(value, list):
            for one in value:
                walk(one)
        elif isinstance(value, str):
            found.append(value)
            try:
                data = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                return
            found.append(data.decode("latin-1"))
            with contextlib.suppress(zlib.error):
                found.append(zlib.decompress(data[17:]).decode("latin-1"))

    for line in path.read_bytes().splitlines():
        walk(msgspec.json.decode(line))
    return "\n".join(found)


@step(effect="read", secret=True)
async def read_much(hint: str) -> str:
    return f"{MARK} " * LARGE


@step(effect="read", secret=True)
async def read_little_that_is_compressed(hint: str) -> str:
    return ("a" * 1000 + MARK) * 50


@workflow(name="secret_rounds")
async def rounds(left: int) -> int:
    token = await read_much(MARK) + await read_little_that_is_compressed(MARK)
    await everstep.checkpoint({"left": left})
    everstep.stream("tokens").append("open")
    if left:
        everstep.continue_as(left - 1)
    return len(token)


@everstep.transaction(everstep.STORE, name="keep_in_store", secret=True)
def keep(connection: Any, token: str) -> str:
    connection.execute("CREATE TABLE IF NOT EXISTS kept (length INTEGER)")
    connection.execute("INSERT INTO kept VALUES (?)", (len(token),))
    return f"kept {token}"


@workflow(name="secret_keeping_in_store")
async def keeping() -> int:
    """Its outcome is in a marker as well."""
    return len(await asyncio.to_thread(keep, MARK))


CALLS: list[str] = []


@step(effect="once", secret=True, compensate=take_back_step)
async def lend_again(hint: str) -> str:
    CALLS.append("lend")
    return f"token {MARK}"


@workflow(name="secret_then_failing")
async def then_failing() -> int:
    token = await lend_again(MARK)
    await read_openly(1)
    return len(token)


@step(effect="read")
async def read_openly(number: int) -> int:
    if FAILING:
        raise LookupError("this may be seen")
    return number


async def elsewhere(machine: Machine, path: Path) -> tuple[Machine, Any]:
    folder = machine.folder / "elsewhere"
    folder.mkdir()
    other = Machine(folder)
    app = await other.boot(clock=None)
    await app.import_(str(path))
    return other, app


FLOWS: list[tuple[Any, tuple[Any, ...], bool]] = [
    (losing_token, (), True),
    (parent_of_losing_token, (), True),
    (failing_in_a_group, (True,), True),
    (making, (7,), False),
    (rounds, (1,), False),
    (keeping, (), False),
]


@pytest.mark.parametrize(("flow", "args", "fails"), FLOWS)
async def test_an_export_has_no_secrets_unless_told_so_and_is_still_sound(
    machine: Machine, flow: Any, args: tuple[Any, ...], fails: bool
) -> None:
    if flow in (losing_token, parent_of_losing_token):
        FAILING.add("always")
    app = await machine.boot(clock=None)
    run = await app.start(flow, *args, id="r")
    if fails:
        with pytest.raises(Exception):  # of several kinds
            await run.result()
    else:
        await run.result()
    whole, path = machine.folder / "whole.jsonl", machine.folder / "runs.jsonl"
    assert (await app.export(["r"], str(whole), secrets=True)).left_out == []
    assert MARK in all_texts(whole), "that is how it would be seen"
    done = await app.export(["r"], str(path))
    assert done.left_out == done.runs
    assert MARK not in all_texts(path)
    assert json.loads(path.read_text().partition("\n")[0])[1]["format"] == 1, "runs alone are read by older releases"
    other, there = await elsewhere(machine, path)
    try:
        for id in done.runs:
            assert (await there.get(id).verify()).sound
            assert (await there.get(id).verify()).left_out
            shown = everything_shown(other.path, id) + await shown_to_programs(there, id)
            assert "(secret)" in shown
            assert MARK not in shown
            assert "cannot be verified" in shown
        if not fails:
            assert await there.get("r").result() == await run.result(), "the result itself is not secret"
    finally:
        await other.shut()


async def test_what_was_left_out_is_never_computed_again(machine: Machine) -> None:
    CALLS.clear()
    FAILING.add("yes")
    app = await machine.boot(clock=None)
    with pytest.raises(LookupError):
        await app.run(then_failing, id="r")
    FAILING.clear()
    path = machine.folder / "runs.jsonl"
    await app.export(["r"], str(path))
    assert CALLS == ["lend"]
    other, there = await elsewhere(machine, path)
    try:
        before = other.dump()
        for verb in (
            lambda: there.retry("r"),
            lambda: there.start(then_failing, id="r", on_existing="retry"),
            lambda: there.fork("r", at=3, id="f", allow_effects=True),
            lambda: there.rollback("r"),
            lambda: there.repair("r"),
        ):
            with pytest.raises(SecretsLeftOut, match="--with-secrets"):
                await verb()
        assert other.dump()["events"] == before["events"]
        assert CALLS == ["lend"]
    finally:
        await other.shut()


async def test_a_key_whose_secret_outcome_was_left_out_is_not_free(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    await app.run(making, 7, id="owner")
    path = machine.folder / "runs.jsonl"
    await app.export(["owner"], str(path))
    other, there = await elsewhere(machine, path)
    try:
        await there.start(making, 7, id="second")
        await other.until_status("second", "held")
        assert "left out when run owner was exported" in other.hold("second").summary
    finally:
        await other.shut()


async def test_a_run_that_is_to_go_on_elsewhere_needs_its_secrets(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    run = await app.start(secretive, id="r")
    await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
    await machine.stop(app)
    app = await machine.boot(clock=None)
    path, copy, whole = (str(machine.folder / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    with pytest.raises(Misuse, match="--with-secrets"):
        await app.export(["r"], path, unfinished="hold")
    assert machine.status("r") == "waiting", "it was not held, and goes on here"
    assert not Path(path).exists()
    assert not list(machine.folder.glob("*.part"))
    await app.export(["r"], copy, unfinished="leave")
    assert MARK not in all_texts(Path(copy))
    await app.export(["r"], whole, unfinished="hold", secrets=True)
    other = Machine(machine.folder / "elsewhere")
    other.folder.mkdir()
    try:
        there = await other.boot(clock=None)
        for copies in (False, True):
            with pytest.raises(Misuse, match="--with-secrets"):
                await there.import_(copy, copies=copies)
        assert await there.list() == []
        await there.import_(whole)
        await there.signal("r", "go", True)
        assert await there.get("r").result() == len(f"token {MARK}")
    finally:
        await other.shut()
    del run


async def test_streams_and_refusals_of_secret_steps_are_left_out(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    run = await app.start(exchange, id="r")
    with pytest.raises(ValueError, match=MARK):
        await run.ask("do", 0, id="one")
    await run.result()
    path = machine.folder / "runs.jsonl"
    await app.export(["r"], str(path))
    assert MARK not in all_texts(path)
    other, there = await elsewhere(machine, path)
    try:
        assert (await there.get("r").verify()).sound
        with pytest.raises(SecretsLeftOut):
            [entry async for entry in there.get("r").stream("tokens")]
        assert [entry.value async for entry in there.get("r").stream("tokens", after=1)] == ["open"]
        command = ["stream", "r", "tokens", "--url", str(other.path)]
        done = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert "everstep.run.secrets_left_out" in done.output
        done = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--after", "1"])
        assert "open" in done.stdout
    finally:
        await other.shut()


async def test_a_compensation_is_exported_without_what_it_was_given(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    with pytest.raises(KeyError):
        await app.run(declared(saga_of(take_back_step)), id="r")
    path = machine.folder / "runs.jsonl"
    await app.export(["r"], str(path))
    assert MARK not in all_texts(path)
    other, there = await elsewhere(machine, path)
    try:
        assert (await there.get("r").verify()).sound
        with pytest.raises(SecretsLeftOut):
            await there.get("r").result()
    finally:
        await other.shut()


async def test_an_event_whose_secret_is_gone_from_a_run_that_goes_on_is_damage(machine: Machine) -> None:
    """The mark of what was left out is no way to keep a run from being noticed as damaged."""
    from everstep.model.secrets import without_secrets

    app = await machine.boot(clock=None)
    await app.start(secretive, id="r")
    await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
    await machine.stop(app)
    (event,) = [one for one in machine.events("r") if one.kind == "step_completed"]
    machine.sql("UPDATE events SET body = ? WHERE run = 'r' AND seq = ?", without_secrets(event.body), event.seq)
    app = await machine.worker(clock=None)
    await app.signal("r", "go", True)
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "damaged"


GATES: list[Gate] = []


@step(effect="read", secret=True)
async def read_at_a_gate(hint: str) -> str:
    await GATES[-1].wait()
    return f"token {MARK}"


@step(effect="read", secret=True, retry=Retry(attempts=3, first=600.0, most=600.0))
async def read_again_later(hint: str) -> str:
    raise ValueError(f"{MARK} was refused")


@workflow(name="secret_approving")
async def approving() -> None:
    await everstep.approval("pay", {"card": MARK}, secret=True)


@workflow(name="secret_working")
async def working() -> str:
    return await read_at_a_gate(MARK)


@workflow(name="secret_waiting_to_retry")
async def waiting_to_retry() -> str:
    return await read_again_later(MARK)


@step(effect="read", secret=True)
async def losing_what_it_reads(hint: str) -> None:
    if FAILING:
        raise ValueError(f"{MARK} was refused")


@pytest.mark.parametrize(
    ("flow", "last"),
    [(approving, "approval_asked"), (working, "step_started"), (waiting_to_retry, "attempt_failed")],
)
async def test_a_run_that_has_not_ended_is_exported_whatever_secret_its_newest_event_has(
    machine: Machine, flow: Any, last: str
) -> None:
    GATES.append(Gate())
    app = await machine.boot(clock=None)
    await app.start(flow, id="r")
    await machine.until(lambda: machine.kinds("r")[-1:] == [last])
    path = machine.folder / "runs.jsonl"
    done = await app.export(None, str(path), unfinished="leave")
    assert (done.runs, done.left_out) == (["r"], ["r"])
    assert MARK not in all_texts(path)
    (row,) = [json.loads(line)[1] for line in path.read_text().splitlines() if line.startswith('["run"')]
    assert row.get("outcome") is None, "it has not ended"
    GATES.pop().opened.set()


@workflow(name="secret_shared_child")
async def shared_child() -> None:
    await losing_what_it_reads(MARK)


@workflow(name="secret_sharing_parent")
async def sharing_parent(waits: bool) -> str:
    child = await everstep.start(shared_child, id="child")
    if waits:
        await everstep.receive("go")
    try:
        await child.result()
    except ValueError:
        return "it failed"
    return "it went well"


@pytest.mark.parametrize("how", ["noted by the parent", "told and not yet taken", "before a retry"])
async def test_the_secret_error_of_a_child_that_is_not_in_the_file_is_not_in_it(machine: Machine, how: str) -> None:
    FAILING.add("always")
    app = await machine.boot(clock=None)
    assert await app.run(sharing_parent, False, id="first") == "it failed"
    other = await app.start(sharing_parent, how != "noted by the parent", id="other")
    if how == "noted by the parent":
        await other.result()
    else:
        await machine.until_status("other", "waiting")
    await machine.until(lambda: any(one.kind == "child" for one in machine.store.signals("other")))
    if how == "before a retry":
        FAILING.clear()
        await app.retry("child")
        await machine.until_status("child", "completed")
    whole, path = machine.folder / "whole.jsonl", machine.folder / "runs.jsonl"
    done = await app.export(["other"], str(whole), secrets=True, unfinished="leave")
    assert done.runs == ["other"], "the child is another run's"
    assert MARK in all_texts(whole)
    assert (await app.export(["other"], str(path), unfinished="leave")).left_out == ["other"]
    assert MARK not in all_texts(path)
