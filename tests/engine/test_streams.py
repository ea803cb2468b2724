"""Streams: entries reach readers once they are durable, in order, each once, and say which attempt wrote them."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Retry, step, workflow
from everstep.engine.code.streams import ENTRY_BYTES_MAX
from everstep.engine.history.streams import HISTORY_POSITIONS
from everstep.engine.run import streams
from everstep.engine.verbs.streams import Entry, entries_now
from everstep.errors import Misuse, NotEncodable, StreamLimit, UnknownRun
from everstep.stores.protocol import Append, Operation, Verdict
from everstep.testing.checker import check, export_histories
from everstep.testing.faulty_store import FaultyStore
from tests.engine.resume_helpers import Gate, Machine, Program


async def read(run: Any, name: str = "tokens", **options: Any) -> list[Entry]:
    return [entry async for entry in run.stream(name, **options)]


def values(entries: Sequence[Entry]) -> list[Any]:
    return [entry.value for entry in entries]


def kept(entries: Sequence[Entry]) -> list[Any]:
    """What the page in docs/howto tells a reader to do."""
    found: list[Entry] = []
    for entry in entries:
        if entry.first:
            found = [one for one in found if (one.generation, one.step) != (entry.generation, entry.step)]
        found.append(entry)
    return values(found)


@step(effect="read")
async def say(*words: str) -> int:
    stream = everstep.stream("tokens")
    for word in words:
        stream.append(word)
        await asyncio.sleep(0)
    return len(words)


@step
def say_on_a_thread(*words: str) -> int:
    for word in words:
        everstep.stream("tokens").append(word)
    return len(words)


@workflow
async def talk() -> str:
    stream = everstep.stream("tokens")
    stream.append("begin")
    await say("a", "b", "c")
    stream.append({"middle": [1, 2]})
    await asyncio.to_thread(say_on_a_thread, "d", "e")
    stream.append("end")
    return "done"


async def test_a_reader_gets_every_entry_once_and_in_order(machine: Machine) -> None:
    _, run = await machine.start(talk, id="r")
    entries = await read(run)
    assert values(entries) == ["begin", "a", "b", "c", {"middle": [1, 2]}, "d", "e", "end"]
    assert [entry.position for entry in entries] == list(range(1, 9))
    assert [entry.step for entry in entries] == ["", *["say"] * 3, "", *["say_on_a_thread"] * 2, ""]
    assert [entry.attempt for entry in entries] == [0, 1, 1, 1, 0, 1, 1, 0]
    assert [entry.first for entry in entries] == [False, True, False, False, False, True, False, False]
    assert machine.replay("r").differences == []
    assert check(export_histories(machine.store)) == []
    assert (await run.verify()).sound


async def test_a_reader_may_begin_anywhere_and_in_another_process(machine: Machine) -> None:
    app, run = await machine.start(talk, id="r")
    whole = await read(run)
    other = await machine.boot()
    for position in range(len(whole) + 1):
        assert await read(other.get("r"), after=position) == whole[position:]
    for wrong in (-1, len(whole) + 1):
        with pytest.raises(Misuse):
            await read(run, after=wrong)
    assert await read(run, "nothing") == []
    with pytest.raises(UnknownRun):
        await read(app.get("nobody"))


async def test_a_reader_gets_entries_while_the_body_still_runs(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> None:
        everstep.stream("tokens").append("first")
        await gate.wait()
        everstep.stream("tokens").append("second")

    @workflow
    async def flow() -> None:
        await slow()

    _, run = await machine.start(flow, id="r")
    for reader in (run, (await machine.boot()).get("r")):
        entries = reader.stream("tokens")
        assert (await asyncio.wait_for(anext(entries), 5)).value == "first"
        await entries.aclose()  # type: ignore[attr-defined]
    assert machine.kinds("r") == ["run_started", "step_started"]
    gate.opened.set()
    assert values(await read(run)) == ["first", "second"]


async def test_an_attempt_that_failed_is_told_from_the_one_that_took_its_place(machine: Machine) -> None:
    @step(retry=Retry(attempts=3, first=0.0, jitter=0.0))
    async def shaky() -> str:
        attempt = everstep.current().attempt
        for number in range(3):
            everstep.stream("tokens").append(f"{attempt}.{number}")
            if attempt < 3 and number == attempt:
                raise ConnectionError("down")
        return "done"

    @workflow
    async def flow() -> str:
        everstep.stream("tokens").append("begin")
        return await shaky()

    app, run = await machine.start(flow, id="r")
    for _ in range(2):
        await machine.until(lambda: app.is_at_rest())
        await machine.advance(1)
    entries = await read(run)
    assert values(entries) == ["begin", "1.0", "1.1", "2.0", "2.1", "2.2", "3.0", "3.1", "3.2"]
    assert [(e.value, e.attempt) for e in entries if e.first] == [("1.0", 1), ("2.0", 2), ("3.0", 3)]
    assert kept(entries) == ["begin", "3.0", "3.1", "3.2"]


async def test_a_process_that_dies_loses_at_most_what_was_not_written_and_the_next_attempt_says_so(
    machine: Machine,
) -> None:
    gate = Gate()

    @step(effect="read")
    async def model() -> str:
        attempt = everstep.current().attempt
        everstep.stream("tokens").append(f"{attempt}.a")
        if attempt == 1:
            await gate.wait()
        everstep.stream("tokens").append(f"{attempt}.b")
        return "done"

    @workflow
    async def flow() -> str:
        everstep.stream("tokens").append("begin")
        await model()
        everstep.stream("tokens").append("end")
        return "done"

    app, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    other = await machine.boot()
    entries = other.get("r").stream("tokens")
    seen = [await anext(entries), await anext(entries)]
    assert values(seen) == ["begin", "1.a"]
    await machine.kill(app)
    await machine.worker()
    seen += [entry async for entry in entries]
    assert values(seen) == ["begin", "1.a", "2.a", "2.b", "end"]
    assert kept(seen) == ["begin", "2.a", "2.b", "end"]
    assert [entry.position for entry in seen] == [1, 2, 3, 4, 5]
    assert (await other.get("r").verify()).sound


async def test_an_entry_reaches_nobody_before_it_is_on_disk(machine: Machine) -> None:
    app = await machine.boot()
    held, real = threading.Event(), app.store.commit

    def slow(operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        if any(isinstance(one, Append) and one.beside is not None for one in operations):
            held.wait(5)
        return real(operations, **how)

    app.store.commit = slow  # type: ignore[method-assign]
    app.committer._seconds = 1.0  # slow commits are made on a thread
    run = await app.start(talk, id="r")
    first = asyncio.ensure_future(anext(run.stream("tokens")))  # type: ignore[arg-type]
    done, _ = await asyncio.wait([first], timeout=0.2)
    assert not done
    held.set()
    assert (await first).value == "begin"


async def test_a_body_never_waits_for_a_commit_and_writes_few(machine: Machine) -> None:
    @step
    async def quick() -> None:
        for number in range(1000):
            everstep.stream("tokens").append(number)  # no `await`: there is nothing to wait for

    @workflow
    async def flow() -> None:
        await quick()

    app, run = await machine.start(flow, id="r")
    assert values(await read(run)) == list(range(1000))
    assert app.committer.commits < 20
    assert [body.position for body in machine.bodies("r", "stream_noted")] == [1000]


async def test_several_bodies_write_to_one_stream_at_once(machine: Machine) -> None:
    @workflow
    async def flow() -> None:
        await asyncio.gather(
            say(*"abcdefgh"), say(*"ijklmnop"), asyncio.to_thread(say_on_a_thread, *(str(n) for n in range(50)))
        )

    _, run = await machine.start(flow, id="r")
    entries = await read(run)
    assert [entry.position for entry in entries] == list(range(1, 67))
    by_step: dict[str, list[Any]] = {}
    for entry in entries:
        by_step.setdefault(entry.step, []).append(entry.value)
    assert by_step == {
        "say": list("abcdefgh"), "say#2": list("ijklmnop"), "say_on_a_thread": [str(n) for n in range(50)]
    }  # fmt: skip
    assert [entry.step for entry in entries if entry.first].count("say") == 1
    assert (await run.verify()).sound


async def test_a_def_workflow_writes_too_and_a_blocking_reader_reads(machine: Machine) -> None:
    @workflow
    def plain() -> str:
        everstep.stream("tokens").append("begin")
        say_on_a_thread("a")
        return "done"

    def blocking() -> list[Any]:
        with everstep.open(f"sqlite:///{machine.path}") as app:
            run = app.start(plain, id="plain")
            found = values(list(run.stream("tokens")))
            assert values(list(run.stream("tokens", after=1))) == found[1:]
            return found

    await machine.stop(await machine.boot())
    assert await asyncio.to_thread(blocking) == ["begin", "a"]


async def test_a_step_in_a_step_writes_as_the_outer_one(machine: Machine) -> None:
    @step(name="outer")
    async def outer() -> int:
        return await say("x")

    @workflow
    async def flow() -> int:
        return await outer()

    _, run = await machine.start(flow, id="r")
    assert [(entry.value, entry.step) for entry in await read(run)] == [("x", "outer")]


async def test_a_cancelled_body_writes_what_it_had_and_no_more(machine: Machine) -> None:
    gate = Gate()

    @step
    async def endless() -> None:
        everstep.stream("tokens").append("a")
        try:
            await gate.wait()
        finally:
            everstep.stream("tokens").append("after")

    @workflow
    async def flow() -> None:
        await endless()

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.cancel()
    assert values(await read(run)) == ["a"]


async def test_limits_are_errors_that_say_what_to_do(machine: Machine) -> None:
    told: list[str] = []

    def wrong(value: Any, name: str = "tokens") -> None:
        try:
            everstep.stream(name).append(value)
        except (StreamLimit, NotEncodable, Misuse) as error:
            told.append(f"{type(error).__name__}: {error}")

    @step
    async def body() -> None:
        wrong("x" * ENTRY_BYTES_MAX)
        wrong(object())
        everstep.stream("tokens").append("fine")
        wrong("one more")
        for number in range(3):
            wrong(number, f"stream-{number}")

    @workflow
    async def flow() -> list[str]:
        wrong("x" * ENTRY_BYTES_MAX)
        wrong("a", "no name")
        await body()
        return told

    app = await machine.boot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "ENTRIES_MAX", 1)
        patch.setattr(streams, "STREAMS_MAX", 3)
        run = await app.start(flow, id="r")
        await run.result()
    assert [line.split(":")[0] for line in told] == [
        "StreamLimit", "Misuse", "StreamLimit", "NotEncodable", "StreamLimit", "StreamLimit"
    ]  # fmt: skip
    assert "at most 1000000 are allowed. Split it" in told[0]
    assert "'tokens' has 1 entries" in told[4]
    assert "has 3 streams" in told[5]
    assert values(await read(run)) == ["fine"]
    with pytest.raises(Misuse, match="outside of one"):
        everstep.stream("tokens").append("x")


async def test_a_body_that_is_quicker_than_the_disk_gets_an_error(machine: Machine) -> None:
    @step
    def flood() -> str:
        try:
            for _ in range(200):
                everstep.stream("tokens").append("x" * 100_000)
        except StreamLimit as error:
            return str(error)
        return ""

    @workflow
    async def flow() -> str:
        return await asyncio.to_thread(flood)

    app = await machine.boot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "GATHERED_BYTES_MAX", 1_000_000)
        patch.setattr(streams, "FLUSH_ENTRIES", 10_000)
        run = await app.start(flow, id="r")
        assert "quicker than the disk" in await run.result()
    assert len(await read(run)) == 9


async def test_a_worker_that_lost_the_run_writes_nothing_to_its_streams(machine: Machine) -> None:
    gate = Gate()

    @step(effect="read")
    async def body() -> int:
        attempt = everstep.current().attempt
        if attempt == 1:
            await gate.wait()
        everstep.stream("tokens").append(attempt)
        await asyncio.sleep(0.1)
        return attempt

    @workflow
    async def flow() -> int:
        return await body()

    app = await machine.boot(lease=5)
    await app.start(flow, id="r")
    await gate.reached.wait()
    await app.committer.drained()  # a read begins before its beginning is durable
    await app.pump.stop()  # it hangs: it prolongs nothing, and looks at nothing
    worker = await machine.worker(lease=60)
    await machine.watch(worker, 10)
    assert await worker.get("r").result(timeout=60) == 2
    gate.opened.set()  # it wakes up
    await asyncio.sleep(0.2)
    assert values(await read(worker.get("r"))) == [2]


@workflow(name="streams_in_rounds")
async def rounds(number: int) -> str:
    """Three histories, each with entries of the code and of a step of the same name."""
    everstep.stream("tokens").append(f"{number}: begin")
    await say(*(f"{number}: {word}" for word in "abc"))
    await everstep.receive("go", str)
    everstep.stream("tokens").append(f"{number}: end")
    if number < 3:
        everstep.continue_as(number + 1)
    return "done"


ROUNDS = [f"{number}: {word}" for number in (1, 2, 3) for word in ("begin", "a", "b", "c", "end")]


async def test_a_reader_that_keeps_its_position_loses_nothing_and_gets_nothing_twice_over_fresh_histories(
    machine: Machine,
) -> None:
    """One reader is there all the time, one comes back after each entry, one comes at the end."""
    app, run = await machine.start(rounds, 1, id="r")
    there = asyncio.ensure_future(read(run))
    got: list[Entry] = []
    for history in (1, 2, 3):
        while len(got) < history * 5 - 1:
            stream = run.stream("tokens", after=got[-1].position if got else 0)
            got.append(await anext(stream))
            await stream.aclose()
        await run.signal("go", "x")
    assert await run.result(timeout=60) == "done"
    got += await read(run, after=got[-1].position)
    assert values(got) == values(await there) == values(await read(run)) == ROUNDS
    assert kept(got) == ROUNDS, "a step of a fresh history does not take the place of one before"
    assert [entry.generation for entry in got] == [1] * 5 + [2] * 5 + [3] * 5
    assert [entry.position for entry in got] == sorted({entry.position for entry in got})
    for place, entry in enumerate(got):
        assert values(await read(run, after=entry.position)) == ROUNDS[place + 1 :]
        assert [one.value for one in entries_now(app, "r", "tokens", entry.position)] == ROUNDS[place + 1 :]
    with pytest.raises(Misuse, match="has no entry"):
        await read(run, after=got[-1].position + 1)
    with pytest.raises(Misuse, match="has no entry"):
        await read(run, after=got[-1].position + HISTORY_POSITIONS)


async def test_a_reader_s_position_survives_a_restart_a_fork_and_a_move(machine: Machine) -> None:
    app, run = await machine.start(rounds, 2, id="r")
    for _ in range(2):
        await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
        await run.signal("go", "x")
        await machine.rest(app)
    before = await read(run)
    assert values(before) == ROUNDS[5:]
    await app.start(rounds, 3, id="r", on_existing="restart")
    await run.signal("go", "x")
    again = await read(run)
    assert values(again) == ROUNDS[10:], "from the beginning: what came since the restart"
    assert values(await read(run, after=before[3].position)) == ROUNDS[9:] + ROUNDS[10:]
    assert values(await read(run, after=before[-1].position)) == ROUNDS[10:]

    said = next(event.seq for event in machine.events("r", 1) if event.kind == "step_completed")
    fork = await app.fork("r", at=said, generation=1, id="f", allow_effects=True)
    assert values(list(entries_now(app, "f", "tokens"))) == ROUNDS[5:9]
    for _ in range(2):
        await machine.until(lambda: machine.row("f").status == "waiting")
        await fork.signal("go", "x")
        await machine.rest(app)
    assert values(await read(fork)) == ROUNDS[5:], "a fork begins with what was copied, and goes on by itself"
    await app.export(["r"], str(machine.folder / "moved.jsonl"))
    other = Machine(machine.folder / "other")
    other.folder.mkdir()
    there = await other.boot()
    await there.import_(str(machine.folder / "moved.jsonl"))
    moved = there.get("r")
    assert await read(moved) == again
    assert values(await read(moved, after=before[3].position)) == ROUNDS[9:] + ROUNDS[10:]
    await other.shut()


async def test_streams_begin_anew_when_a_run_is_restarted(machine: Machine) -> None:
    app, run = await machine.start(talk, id="r")
    first = await read(run)
    await app.start(talk, id="r", on_existing="restart")
    again = await read(run)
    assert values(again) == values(first)
    assert (again[0].position, again[0].generation) == (HISTORY_POSITIONS + 1, 2)


async def test_a_repaired_run_writes_again_only_what_is_lost(machine: Machine) -> None:
    gate = Gate()

    @step
    async def wait() -> None:
        await gate.wait()

    @workflow
    async def flow() -> str:
        for number in range(4):
            everstep.stream("tokens").append(number)
            await say()
        await wait()
        return "done"

    app, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    third = [event.seq for event in machine.events("r") if event.kind == "stream_appended"][2]
    machine.sql("UPDATE events SET body = x'00' WHERE run = 'r' AND seq = ?", third)
    gate.opened.set()
    worker = await machine.worker()
    await machine.until_status("r", "held")
    await worker.repair("r")
    assert await worker.get("r").result(timeout=60) == "done"
    assert values(await read(worker.get("r"))) == [0, 1, 2, 3]
    assert (await worker.get("r").verify()).sound


READER = """
seen = 0
path = sys.argv[2]
if os.path.exists(path):
    seen = len(open(path).read().splitlines())
with everstep.open(URL) as app:
    with open(path, "a") as file:
        for entry in app.get("r").stream("tokens", after=seen):
            file.write(f"{entry.position} {entry.value} {entry.attempt}\\n")
            file.flush()
            print(entry.position, flush=True)
"""

WRITER = """
@step(effect="read")
async def model() -> int:
    for number in range(40):
        if number == 20 and everstep.current().attempt == 1:
            await asyncio.sleep(600)  # until it is killed
        everstep.stream("tokens").append(number)
        await asyncio.sleep(0.01)
    return 40

@workflow
async def flow() -> int:
    return await model()

if __name__ == "__main__":
    print("up", flush=True)
    print(everstep.run(flow, id="r", url=URL), flush=True)
"""


async def test_a_reader_and_a_writer_that_are_killed_go_on(machine: Machine) -> None:
    """Real processes: the reader is killed twice, the writer once. The file of the reader has each entry once."""
    folder = machine.folder / "reader"
    folder.mkdir()
    (folder / "runs.db").symlink_to(machine.path)
    read_path = str(folder / "read.txt")

    def start(code: str, folder: Path, *arguments: str) -> Program:
        return Program(folder, code, *arguments)

    writer = await asyncio.to_thread(start, WRITER, machine.folder)
    assert await asyncio.to_thread(writer.line) == "up"
    await machine.until(lambda: machine.path.exists() and machine.store.run("r"))
    reader = await asyncio.to_thread(start, READER, folder, read_path)
    await machine.until(lambda: len(machine.store.stream("r", 1, "tokens")) > 2)
    assert await asyncio.to_thread(reader.line) == "1"
    await asyncio.to_thread(reader.kill)
    await asyncio.to_thread(writer.kill)
    cut_off = len(machine.store.stream("r", 1, "tokens"))
    assert 2 < cut_off <= 20
    reader = await asyncio.to_thread(start, READER, folder, read_path)
    await machine.until(lambda: len(Path(read_path).read_text().splitlines()) == cut_off)
    await asyncio.to_thread(reader.kill)
    writer = await asyncio.to_thread(start, WRITER, machine.folder)
    reader = await asyncio.to_thread(start, READER, folder, read_path)
    assert (await asyncio.to_thread(writer.end))[1] == "up\n40\n"
    assert (await asyncio.to_thread(reader.end))[0] == 0
    lines = [line.split() for line in Path(read_path).read_text().splitlines()]
    assert [int(position) for position, _, _ in lines] == list(range(1, cut_off + 41))
    assert [int(value) for _, value, attempt in lines if attempt == "2"] == list(range(40))
    assert [int(value) for _, value, attempt in lines if attempt == "1"] == list(range(cut_off))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("method", ["stream_head", "streams"])
async def test_a_store_that_cannot_be_read_for_a_moment_loses_no_entry(
    machine: Machine, method: str, count: int
) -> None:
    @workflow
    async def flow() -> str:
        everstep.stream("other").append("begin")
        await everstep.receive("go")
        await say("a", "b", "c")
        everstep.stream("tokens").append("end")
        return "done"

    first = await machine.boot(clock=None)  # only of a run that was begun elsewhere has the store to be asked
    await first.start(flow, id="r")
    await machine.stop(first)
    store = FaultyStore(machine.open_store())
    fault = store.fail(method, after=False, first=1, count=count)
    app = await machine.boot(store=store.as_store(), clock=None, recover=True)
    run = app.get("r")
    await run.signal("go")
    assert await run.result(timeout=60) == "done"
    assert fault.fired
    store.mend()
    assert kept(await read(run)) == ["a", "b", "c", "end"]
    assert values(await read(run, "other")) == ["begin"]
    assert (await run.verify()).sound
    assert machine.replay("r").differences == []
