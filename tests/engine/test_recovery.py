"""Recovery: what was left behind is taken up, whatever failed on the way. Nothing is lost, nothing is doubled."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.process import host, pump
from everstep.engine.run import driver
from everstep.errors import StoreError, StoreFailed, StoreFull
from everstep.stores.protocol import Append, Claim, Post, Release, StartRun, Store
from everstep.testing.faulty_store import METHODS, FaultyStore
from tests.engine.resume_helpers import Gate, Machine, Program

APPLIED: dict[str, str] = {}
"""What a receiver that honours keys has applied."""
NOTES: list[str] = []


@pytest.fixture(autouse=True)
def nothing_yet() -> None:
    APPLIED.clear()
    NOTES.clear()


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that failed is asked again sooner than users would."""
    for module in (driver, host):
        monkeypatch.setattr(module, "LOOK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(pump, "SWEEP_SECONDS", 0.05)


@step
async def apply(what: str) -> str:
    NOTES.append(what)
    APPLIED.setdefault(everstep.key(), what)
    return what


@workflow
async def small(number: int) -> int:
    await apply(f"child {number}")
    return number


@workflow
async def whole(number: int) -> list[Any]:
    first, second = await asyncio.gather(apply("a"), apply("b"))
    word = await everstep.receive("word", str)
    child = await small(number)
    await asyncio.sleep(0.01)
    return [first, second, word, child, await apply("z")]


EXPECTED = ["a", "b", "tides", 7, "z"]


def judge(machine: Machine) -> None:
    """The run has ended once, with each effect applied once, and its history is sound."""
    assert machine.status("r") == "completed"
    assert sorted(APPLIED.values()) == ["a", "b", "child 7", "z"]
    kinds = machine.kinds("r")
    assert kinds.count("run_completed") == 1
    assert kinds.count("step_completed") == 3
    assert [body.name for body in machine.bodies("r", "signal_received")].count("word") == 1
    assert kinds.count("child_started") == kinds.count("child_ended") == 1
    assert machine.replay("r").differences == []
    assert len(machine.store.children("r")) == 1


# -- taking up ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["a worker", "start", "run"])
async def test_what_a_killed_process_left_is_taken_up(machine: Machine, how: str) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        NOTES.append("slow")
        await gate.wait()
        return "done"

    @workflow
    async def flow() -> str:
        return await apply("first") + await slow()

    app, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.kill(app)
    gate.opened.set()
    if how == "a worker":
        await machine.worker()
        await machine.until_status("r", "completed")
    else:
        other = await machine.boot()
        assert await other.run(flow, id="r") == "firstdone"
    assert NOTES == ["first", "slow", "slow"]
    (again,) = [body for body in machine.bodies("r", "step_started") if body.attempt == 2]
    assert again.because == "crash"


async def test_a_dead_owners_runs_go_on_at_once(machine: Machine) -> None:
    worker = await machine.worker(clock=None, lease=3600.0)
    app = await machine.boot(clock=None, lease=3600.0)
    gate = Gate()

    @step
    async def slow() -> str:
        await gate.wait()
        return "done"

    @workflow
    async def flow() -> str:
        return await slow()

    await app.start(flow, id="r")
    await gate.reached.wait()
    gate.opened.set()
    await machine.kill(app)
    await machine.until_status("r", "completed")  # and not when its lease lapses
    assert worker.worker


async def test_a_run_of_an_unknown_workflow_is_left_alone(machine: Machine) -> None:
    app, _ = await machine.start(whole, 7, id="r")
    await machine.rest(app)
    await machine.kill(app)
    machine.sql("UPDATE runs SET workflow = 'of another program', status = 'queued' WHERE id = 'r'")
    before = machine.dump()["runs"]
    worker = await machine.worker()
    for _ in range(3):
        await machine.advance(1)
    assert machine.dump()["runs"] == before
    assert await worker.run(small, 1) == 1


async def test_a_run_of_a_newer_release_is_left_alone(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    app, _ = await machine.start(whole, 7, id="r")
    await machine.rest(app)
    await machine.kill(app)
    machine.sql("UPDATE runs SET semantics = 99, status = 'queued' WHERE id = 'r'")
    before = machine.dump()["runs"]
    worker = await machine.worker()
    for _ in range(3):
        await machine.advance(1)
    assert machine.dump()["runs"] == before
    assert caplog.text.count("newer release") == 1
    assert await worker.run(small, 1) == 1


async def test_an_app_that_does_not_recover_leaves_others_runs_alone(machine: Machine) -> None:
    app, _ = await machine.start(whole, 7, id="r")
    await machine.rest(app)
    await machine.kill(app)
    other = await machine.boot()
    assert await other.run(small, 1) == 1
    await other.signal("r", "word", "tides")
    await machine.advance(2)
    assert machine.status("r") == "waiting"


async def test_somebody_who_only_waits_sees_the_end_of_a_run_that_another_process_drives(machine: Machine) -> None:
    app, _ = await machine.start(whole, 7, id="r")
    await machine.rest(app)
    watcher = await machine.boot()
    waiting = asyncio.ensure_future(watcher.get("r").result(timeout=60))
    await asyncio.sleep(0)
    await app.signal("r", "word", "tides")
    await machine.advance(1)
    await machine.advance(1)
    assert await waiting == EXPECTED
    assert watcher.store.workers() == app.store.workers()
    assert len(app.store.workers()) == 1, "waiting makes nobody a worker"


async def test_runs_are_given_back_when_a_process_stops(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> None:
        await gate.wait()

    @workflow
    async def flow() -> None:
        await slow()

    app, _ = await machine.start(flow, id="busy")
    await app.start(whole, 7, id="waiting")
    await gate.reached.wait()
    await machine.until_status("waiting", "waiting")
    await machine.stop(app)
    assert (machine.row("busy").status, machine.row("busy").owner) == ("queued", None)
    assert (machine.row("waiting").status, machine.row("waiting").owner) == ("waiting", None)
    assert machine.store.workers() == []
    assert machine.row("busy").deaths == 0


def test_a_script_that_was_killed_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    code = """
    @step
    async def note(text: str) -> str:
        with open(URL + ".notes", "a") as file:
            file.write(text + "\\n")
        if text == "b" and sys.argv[2] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return text

    @workflow
    async def child() -> str:
        return await note("b")

    @workflow
    async def script() -> str:
        return await note("a") + await child() + await note("c")

    if __name__ == "__main__":
        print(everstep.run(script, id="s", url=URL))
    """
    assert Program(tmp_path, code, "die").end()[0] == -signal.SIGKILL
    status, out, err = Program(tmp_path, code, "live").end()
    assert (status, out.strip()) == (0, "abc"), err
    assert (tmp_path / "runs.db.notes").read_text().split() == ["a", "b", "b", "c"]


# -- a store that fails ------------------------------------------------------------------------------------------------
async def do_it_all(app: App) -> Any:
    """Start the run and send it its signal, as a client that tries again until it is acknowledged."""
    for attempt in range(5):
        try:
            run = await app.start(whole, 7, id="r")
            break
        except StoreFailed:
            raise
        except StoreError:
            assert attempt < 4
    for attempt in range(5):
        try:
            await run.signal("word", "tides", id="once")
            break
        except StoreFailed:
            raise
        except StoreError:
            assert attempt < 4
    for attempt in range(5):
        try:
            return await run.result(timeout=8)
        except StoreFailed:
            raise
        except StoreError:
            assert attempt < 4
    raise AssertionError


KEYS = ("effect", "effects", "waiters")
NOT_NEEDED = (
    *(
        "answer",
        "archived",
        "arrival",
        "asking",
        "checkpoint",
        "children",
        "connect",
        "stream",
        "stream_head",
        "streams",
        "counts",
        "generations",
        "holds",
        "is_in_use",
        "lapse",
        "leave",
        "payload",
        "restores",
    ),
    *("rows", "run", "runs", "signals", "strays", *KEYS, "due_notifications", "next_notification", "notifications"),
    *("schedules", "write_in", "queue_counts", "queued", "queues", "slots"),
)
"""What nobody asks for in this scenario."""


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "commit"])
async def test_a_failing_read_or_lease_is_tried_again_and_the_run_goes_on_by_itself(
    machine: Machine, method: str, after: bool, first: int
) -> None:
    store = FaultyStore(machine.open_store())
    fault = store.fail(method, after=after, first=first)
    try:
        app = await machine.boot(store=store.as_store(), clock=None, recover=True)
    except StoreError:
        assert method in ("register_worker", "now", "life", "workers")
        store.mend()
        app = await machine.boot(store=store.as_store(), clock=None, recover=True)
    assert await do_it_all(app) == EXPECTED
    judge(machine)
    store.mend()
    assert fault.fired or first > 1 or method in NOT_NEEDED


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(
    "method",
    [
        "bury_dead",
        "changed",
        "checkpoint",
        "due",
        "events",
        "inbox",
        "next_wake",
        "payload",
        "rows",
        "workers",
    ],
)
async def test_a_worker_whose_store_fails_while_it_recovers_tries_again(
    machine: Machine, method: str, first: int
) -> None:
    @workflow
    async def big() -> int:
        first = await apply("x" * 20_000)
        word = await everstep.receive("word", str)
        return len(first) + len(await apply(word))

    app = await machine.boot(clock=None)
    await app.start(big, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(app)
    machine.store.commit([Post("r", "signal", "word", value=b'["tides"]', at=1)])
    store = FaultyStore(machine.open_store())
    fault = store.fail(method, after=False, first=first)
    worker = await machine.worker(store=store.as_store(), clock=None)
    await machine.until_status("r", "completed", "held")
    await machine.until(
        lambda: fault.fired or first > 1
    )  # on a busy machine the run may end before the look at it does
    store.mend()
    assert await worker.get("r").result() == 20_005
    assert len(APPLIED) == 2


async def test_a_signal_is_found_although_the_store_fails_when_it_is_looked_for(machine: Machine) -> None:
    @workflow
    async def patient() -> str:
        return await apply(await everstep.receive("word", str))

    store = FaultyStore(machine.open_store())
    worker = await machine.worker(store=store.as_store(), clock=None)
    await worker.start(patient, id="r")
    await machine.until_status("r", "waiting")
    fault = store.fail("pending", after=False, first=1)
    machine.store.commit([Post("r", "signal", "word", value=b'["tides"]', at=1)])
    await machine.until(lambda: fault.fired)
    store.mend()
    assert await worker.get("r").result() == "tides"
    assert list(APPLIED.values()) == ["tides"]


async def test_a_process_that_cannot_give_its_runs_back_closes_all_the_same(machine: Machine) -> None:
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store())
    await app.start(whole, 7, id="r")
    await machine.rest(app)
    store.fail("leave", after=False)
    with pytest.raises(StoreError):
        await machine.stop(app)
    await machine.worker()
    machine.store.commit([Post("r", "signal", "word", value=b'["tides"]', at=1)])
    await machine.until(lambda: "child_started" in machine.kinds("r"))  # its liveness lock was freed


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [StartRun, Append, Claim, Post, Release])
@pytest.mark.parametrize("first", [1, 2, 3, 5, 8])
async def test_after_an_unknown_commit_the_process_stops_and_another_one_goes_on(
    machine: Machine, kind: Any, after: bool, first: int
) -> None:
    store = FaultyStore(machine.open_store())

    def concerns(operations: Any) -> bool:
        return any(isinstance(one, kind) for one in operations)

    fault = store.fail("commit", after=after, first=first, when=concerns, error=StoreFailed("the reply was lost"))
    app = await machine.boot(store=store.as_store(), clock=None)
    try:
        assert await do_it_all(app) == EXPECTED
        assert not fault.fired or kind is not Append
    except StoreFailed:
        assert fault.fired
        if kind is Append:
            with pytest.raises(StoreFailed):
                await app.start(small, 1)
    assert fault.fired or first > 1 or kind is Release
    store.mend()
    await machine.kill(app)
    again = await machine.worker(clock=None)
    assert await do_it_all(again) == EXPECTED
    judge(machine)


async def test_a_unit_that_cannot_be_stored_holds_its_run_and_no_other(machine: Machine) -> None:
    real = machine.open_store()
    store = FaultyStore(real)

    class Picky:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def commit(self, operations: Any, **how: bool) -> Any:
            from everstep.stores.protocol import Failed

            bad = [
                isinstance(one, Append)
                and b'"a"' in b"".join(event.body for event in one.events if event.kind == "step_completed")
                for one in operations
            ]
            good = iter(real.commit([one for one, is_bad in zip(operations, bad, strict=True) if not is_bad], **how))
            return [Failed(ValueError("too big")) if is_bad else next(good) for is_bad in bad]

    app = await machine.boot(store=Picky())  # type: ignore[arg-type]
    run = await app.start(whole, 7, id="r")
    with pytest.raises(everstep.errors.RunHeld, match=r"stuck.*stored"):
        await run.result(timeout=60)
    assert await app.run(small, 1) == 1
    await machine.stop(app)
    other = await machine.boot()
    await other.resolve("r", "retry")
    await other.signal("r", "word", "tides")
    await machine.until(lambda: "timer_started" in machine.kinds("r"))
    await machine.advance(1)
    assert await other.get("r").result() == EXPECTED


# -- no room -----------------------------------------------------------------------------------------------------------
async def until_refused(app: App) -> None:
    """Send large signals until one is refused."""
    for number in range(200):
        await app.signal("r", "more", "x" * 8000, id=str(number))


def limit_pages(store: Store, pages: int) -> None:
    store._writer.connection.pragma("max_page_count", pages)  # type: ignore[attr-defined]


async def test_when_the_disk_is_full_callers_are_told_and_runs_pause_and_go_on_by_themselves(machine: Machine) -> None:
    @step
    async def large(number: int) -> bytes:
        NOTES.append(str(number))
        return bytes((number + position * position) % 251 for position in range(6000))

    @workflow
    async def filling() -> int:
        return sum([len(await large(number)) for number in range(40)])

    app = await machine.boot(clock=None)
    pages = int(app.store._writer.connection.pragma("page_count"))  # type: ignore[attr-defined]
    limit_pages(app.store, pages + 30)
    run = await app.start(filling, id="r")
    await machine.until(lambda: app.committer.full)
    done = len(NOTES)
    with pytest.raises(StoreFull, match="room"):
        await until_refused(app)
    await asyncio.sleep(0)
    assert len(NOTES) <= done + 1, "nothing new is begun that could not be recorded"
    assert machine.status("r") == "running"
    limit_pages(app.store, 1_000_000)
    assert await run.result(timeout=60) == 40 * 6000
    assert [str(number) for number in range(40)] == NOTES
    assert machine.replay("r").differences == []


async def test_a_process_that_ends_on_a_full_disk_has_lost_nothing_that_was_acknowledged(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    await app.start(whole, 7, id="r")
    await app.signal("r", "word", "tides", id="once")
    pages = int(app.store._writer.connection.pragma("page_count"))  # type: ignore[attr-defined]
    limit_pages(app.store, pages)
    with pytest.raises(StoreFull, match="room"):
        await until_refused(app)
    await machine.kill(app)
    again = await machine.worker(clock=None)
    assert await again.get("r").result(timeout=60) == EXPECTED
    judge(machine)


def test_a_file_size_limit_is_a_full_disk_as_well(tmp_path: Path) -> None:
    code = """
    import resource

    @step(effect="read")
    async def large(number: int) -> str:
        return os.urandom(30_000).hex()

    @workflow
    async def filling() -> int:
        return sum([len(await large(number)) for number in range(60)])

    async def main():
        async with everstep.open(URL) as app:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
            run = await app.start(filling, id="r")
            while not app.committer.full:
                await asyncio.sleep(0.01)
            try:
                await app.start(filling, id="other")
            except everstep.errors.StoreFull as error:
                print(type(error).__name__)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            print(await run.result(timeout=60))
            print((await run.verify()).sound)

    asyncio.run(main())
    """
    status, out, err = Program(tmp_path, code).end()
    assert status == 0, err
    assert out.split() == ["StoreFull", str(60 * 60_000), "True"]


async def test_a_closed_app_says_so(machine: Machine) -> None:
    app, run = await machine.start(whole, 7, id="r")
    await machine.rest(app)
    waiting = asyncio.ensure_future(run.result())
    await asyncio.sleep(0)
    await machine.stop(app)
    with pytest.raises(everstep.errors.Misuse, match="closed"):
        await waiting
    with pytest.raises(everstep.errors.Misuse, match="closed"):
        await asyncio.wait_for(app.start(small, 1), 5)
    with pytest.raises(everstep.errors.Misuse, match="closed"):
        await asyncio.wait_for(app.signal("r", "word", "x"), 5)


async def test_a_hold_that_does_not_fit_on_the_disk_is_refused(machine: Machine) -> None:
    app = await machine.boot(clock=None)
    await app.start(whole, 7, id="r")
    await machine.until_status("r", "waiting")
    pages = int(app.store._writer.connection.pragma("page_count"))  # type: ignore[attr-defined]
    limit_pages(app.store, pages)
    with pytest.raises(StoreFull, match="room"):
        await until_refused(app)
    with pytest.raises(StoreFull, match="room"):
        await app.hold("r", note="n" * 10_000)
    limit_pages(app.store, 1_000_000)
    await app.hold("r", note="n" * 10_000)
    await machine.kill(app)
    assert machine.status("r") == "held"
