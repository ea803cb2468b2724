"""Everstep inside programs: scripts, blocking code, an application's own loop, uvloop, interrupts, two apps at once."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp, BlockingRun, BlockingSchedule
from everstep.engine.app.client import BlockingClient, Client
from everstep.engine.app.handles import Run
from everstep.engine.verbs.schedules import Schedule
from everstep.errors import Misuse, RunHeld
from everstep.stores.opening import open_store
from tests.engine.lives import add, echo, settle
from tests.engine.processes import notes, run, start
from tests.waiting import wait_until


@workflow
async def sums(numbers: list[int]) -> int:
    return sum(await asyncio.gather(*(echo(number) for number in numbers)))


@workflow
def plain_sums(a: int, b: int) -> int:
    return add(a, b)


@step(name="slow_look", effect="read")
def slow_look(text: str) -> str:
    return text


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'store.db'}"


# -- ways to open ----------------------------------------------------------------------------------------------------
def test_run_gives_the_result_and_again_the_recorded_one(tmp_path: Path) -> None:
    calls: list[int] = []

    @step
    async def counted() -> int:
        calls.append(1)
        return len(calls)

    @workflow
    async def flow() -> int:
        return await counted()

    assert everstep.run(flow, id="x", url=url(tmp_path)) == 1
    assert everstep.run(flow, id="x", url=url(tmp_path)) == 1
    assert everstep.run(flow, url=url(tmp_path)) == 2
    assert len(calls) == 2


def test_run_takes_the_store_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_URL", url(tmp_path))
    assert everstep.run(plain_sums, 1, 2, id="from-environment") == 3
    assert (tmp_path / "store.db").exists()


def test_run_inside_a_running_loop_says_what_to_write_instead(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(Misuse, match="async with"):
            everstep.run(sums, [1], url=url(tmp_path))
        with pytest.raises(Misuse, match="async with"), everstep.open(url(tmp_path)):
            pass

    asyncio.run(main())
    assert not (tmp_path / "store.db").exists()


def test_run_while_a_command_imports_the_file_shows_the_guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVERSTEP_IMPORTING", "1")
    with pytest.raises(Misuse, match="__main__"):
        everstep.run(sums, [1], url=url(tmp_path))


def test_run_raises_the_run_s_own_error_each_time(tmp_path: Path) -> None:
    @workflow
    async def flow() -> None:
        raise ZeroDivisionError("mine")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            everstep.run(flow, id="x", url=url(tmp_path))


def test_blocking_code_gets_the_same_methods(tmp_path: Path) -> None:
    @workflow
    async def flow() -> str:
        everstep.publish("ready", True)
        return await everstep.receive("word", str)

    with everstep.open(url(tmp_path)) as app:
        handle = app.start(flow, id="x")
        assert handle.status() in ("running", "waiting")
        handle.signal("word", "hello")
        assert handle.result(timeout=60) == "hello"
        assert handle.published() == {"ready": True}
        assert handle.history()[-1].kind == "run_completed"
        assert handle.verify().sound
        assert app.run(plain_sums, 2, 3) == 5
        assert [row.id for row in app.list(status="completed")][-1:] == ["x"]
        with pytest.raises(everstep.errors.RunEnded):
            app.signal("x", "word", "late")
        with pytest.raises(TimeoutError):
            app.start(flow, id="y").result(timeout=0.01)
    assert not any(thread.name == "everstep-loop" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [
        (BlockingApp, App),
        (BlockingRun, Run),
        (BlockingSchedule, Schedule),
        (BlockingClient, Client),
    ],
)
def test_a_blocking_face_has_every_call_of_the_async_one_with_its_parameters_and_its_text(
    blocking: Any, awaited: Any
) -> None:
    own = {"open", "close", "result_types"}  # an app's own business
    for name, of in vars(awaited).items():
        if name.startswith("_") or name in own or not inspect.isfunction(of):
            continue
        made = getattr(blocking, name)
        assert not inspect.iscoroutinefunction(made), name
        if hasattr(made, "__wrapped__"):
            assert inspect.unwrap(made) is inspect.unwrap(of), name
            continue
        assert made.__doc__ == f"See `{awaited.__name__}.{name}`.", name
        if name not in ("start", "run"):  # whose options mypy and pyright check: see typed_wrong.py
            assert parameters_of(made) == parameters_of(of), name


def parameters_of(function: Any) -> list[str]:
    """Return what a function takes, and how."""
    return list(map(str, inspect.signature(function).parameters.values()))


@pytest.mark.parametrize("name", ["append", "delete", "make_folder", "move", "write"])
def test_changes_of_files_are_the_same_plain_or_awaited(name: str) -> None:
    assert inspect.unwrap(getattr(everstep.blocking.files, name)) is getattr(everstep.files, name)


@pytest.mark.parametrize("name", ["approval", "checkpoint", "expect", "receive", "requests", "sleep"])
def test_a_plain_call_in_workflow_code_takes_what_the_async_one_takes(name: str) -> None:
    assert parameters_of(getattr(everstep.blocking, name)) == parameters_of(getattr(everstep, name))


def test_a_blocking_run_has_every_method_of_a_run(tmp_path: Path) -> None:
    @workflow
    async def child() -> int:
        return 1

    @workflow
    async def parent() -> int:
        return await child()

    with everstep.open(url(tmp_path)) as app:
        handle = app.start(parent, id="x")
        assert handle.result(timeout=60) == 1
        assert handle.row().status == "completed"
        assert handle.holds() == []
        (own,) = handle.children()
        assert own.result(timeout=60) == 1


async def test_an_application_s_own_loop_stays_its_own() -> None:
    """Between the turns of the app, the application's tasks, loop and context are what they were."""

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    ticks: list[int] = []

    async def tick() -> None:
        while True:
            assert asyncio.get_running_loop() is loop
            ticks.append(1)
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    async with everstep.open("memory:") as app:
        results = await asyncio.gather(*(app.run(sums, [n, n]) for n in range(20)))
        assert asyncio.get_running_loop() is loop
        assert asyncio.current_task() is task
    assert results == [2 * n for n in range(20)]
    assert ticks
    ticking.cancel()
    assert asyncio.all_tasks() == {task, ticking}


async def test_asyncio_outside_workflows_is_untouched_while_an_app_is_open() -> None:
    async with everstep.open("memory:") as app:
        await app.run(sums, [1])
        assert await asyncio.wait_for(asyncio.sleep(0, "a"), 1) == "a"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)
        assert sorted([await one for one in asyncio.as_completed([asyncio.sleep(0, n) for n in (1, 2)])]) == [1, 2]
        assert await asyncio.to_thread(len, "abc") == 3
        await asyncio.to_thread(time.sleep, 0)


def test_uvloop_drives_runs_as_well(tmp_path: Path) -> None:
    @workflow
    async def flow() -> list[Any]:
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            first = await asyncio.to_thread(slow_look, "x")
        return [first, await sums([1, 2, 3])]

    async def main() -> list[Any]:
        assert "uvloop" in type(asyncio.get_running_loop()).__module__
        async with everstep.open(url(tmp_path)) as app:
            return await app.run(flow)

    assert uvloop.run(main()) == ["x", 6]


async def test_two_apps_in_one_process_share_a_store_and_leave_each_other_s_runs_alone(tmp_path: Path) -> None:
    @workflow
    async def flow() -> str:
        return await everstep.receive("word", str)

    async with everstep.open(url(tmp_path)) as one, everstep.open(url(tmp_path)) as other:
        mine = await one.start(flow, id="mine")
        theirs = await other.start(flow, id="theirs")
        await settle(one)
        await settle(other)
        assert (list(one.drivers), list(other.drivers)) == (["mine"], ["theirs"])
        await other.signal("mine", "word", "from the other")
        await one.signal("theirs", "word", "from the one")
        assert await mine.result(timeout=60) == "from the other"
        assert await theirs.result(timeout=60) == "from the one"
        assert await other.get("mine").result(timeout=60) == "from the other"


async def test_waiting_for_a_run_that_somebody_else_drives_does_not_spin(tmp_path: Path) -> None:
    @workflow
    async def flow() -> str:
        return await everstep.receive("word", str)

    async with everstep.open(url(tmp_path)) as one, everstep.open(url(tmp_path)) as other:
        await one.start(flow, id="x")
        await settle(one)
        waiter = asyncio.create_task(other.get("x").result())
        turns, turn = 0, other.pump._turn

        async def counted() -> None:
            nonlocal turns
            turns += 1
            await turn()

        other.pump._turn = counted  # type: ignore[method-assign]
        for _ in range(500):
            await asyncio.sleep(0)
        assert turns < 10
        await one.signal("x", "word", "there")
        assert await asyncio.wait_for(waiter, 10) == "there"


def test_an_app_that_all_tasks_of_the_loop_were_cancelled_under_gives_its_runs_back(tmp_path: Path) -> None:
    """What `asyncio.run` does when something like `SystemExit` comes out of a callback."""

    @workflow
    async def flow() -> str:
        return await everstep.receive("word", str)

    async def main() -> None:
        async with everstep.open(url(tmp_path)) as app:
            await app.start(flow, id="x")
            await settle(app)
            asyncio.get_running_loop().call_soon(sys.exit, 3)
            await asyncio.Event().wait()

    with pytest.raises(SystemExit):
        asyncio.run(main())
    store = open_store(url(tmp_path))
    row = store.run("x")
    store.close()
    assert row is not None
    assert row.owner is None


async def test_two_apps_with_stores_of_their_own_know_nothing_of_each_other() -> None:
    async with everstep.open("memory:") as one, everstep.open("memory:") as other:
        assert await one.run(sums, [1], id="x") == 1
        assert await other.run(sums, [2], id="x") == 2


def test_apps_on_two_threads_run_at_the_same_time(tmp_path: Path) -> None:
    results: dict[str, int] = {}

    def work(name: str) -> None:
        results[name] = everstep.run(sums, list(range(50)), id=name, url=url(tmp_path))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": 1225, "b": 1225, "c": 1225}


def test_a_wrong_stream_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    with everstep.open(url(tmp_path)) as app:
        run = app.start(sums, [1])
        with pytest.raises(Misuse, match="is not a name for a stream"):
            run.stream("two words")
        with pytest.raises(Misuse, match="after=-1"):
            run.stream("words", after=-1)


def test_a_blocking_app_is_not_waited_for_on_its_own_loop(tmp_path: Path) -> None:
    @step(effect="read")
    async def ask_in_a_body() -> int:
        return len(app.list())

    @workflow
    async def wait_for_itself(by: str) -> int:
        if by == "workflow":
            return app.run(sums, [1, 2])
        if by == "close":
            app.close()
        return await ask_in_a_body()

    with everstep.open(url(tmp_path)) as app:
        for by in ("workflow", "body", "close"):
            with pytest.raises(Misuse, match="on the loop of the blocking app"):
                app.run(wait_for_itself, by)
        assert app.run(sums, [1, 2]) == 3


def test_an_app_that_two_threads_close_is_closed_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        for trial in range(10):
            with everstep.open(url(tmp_path)) as app:
                assert app.run(sums, [trial]) == trial
                closings = [pool.submit(app.close) for _ in range(3)]
            for closing in closings:
                closing.result()


def test_an_app_gives_its_runs_back_so_that_the_next_one_goes_on_at_once(tmp_path: Path) -> None:
    @workflow
    async def flow() -> str:
        return await everstep.receive("word", str)

    async def main() -> str:
        async with everstep.open(url(tmp_path)) as app:
            await app.start(flow, id="x")
            await settle(app)
        store = open_store(url(tmp_path))
        row = store.run("x")
        assert row is not None
        assert row.owner is None
        assert row.status == "waiting"
        store.close()
        async with everstep.open(url(tmp_path), recover=True) as app:
            await app.signal("x", "word", "again")
            return await app.get("x").result(timeout=60)  # type: ignore[no-any-return]

    assert asyncio.run(main()) == "again"


def test_a_failing_on_hold_callback_hurts_nobody() -> None:
    heard: list[str] = []

    @workflow
    async def stuck() -> None:
        await asyncio.Event().wait()

    def on_hold(hold: Any) -> None:
        heard.append(hold.reason)
        raise OSError("the pager is down")

    async def main() -> None:
        async with everstep.open("memory:", on_hold=on_hold) as app:
            with pytest.raises(everstep.errors.RunHeld):
                await app.run(stuck)
            assert await app.run(sums, [1, 2]) == 3

    asyncio.run(main())
    assert heard == ["stuck"]


def test_cancelling_whoever_waits_for_a_result_leaves_the_run_alone() -> None:
    @workflow
    async def flow() -> str:
        return await everstep.receive("word", str)

    async def main() -> str:
        async with everstep.open("memory:") as app:
            handle = await app.start(flow, id="x")
            waiter = asyncio.create_task(handle.result())
            await settle(app)
            waiter.cancel()
            await asyncio.wait([waiter])
            with pytest.raises(TimeoutError):
                await handle.result(timeout=0.001)
            await handle.signal("word", "still here")
            return await handle.result(timeout=10)

    assert asyncio.run(main()) == "still here"


def test_a_run_that_exits_does_not_end_the_script_s_process_and_is_held(tmp_path: Path) -> None:
    @workflow
    async def flow() -> None:
        sys.exit(7)

    with pytest.raises(RunHeld, match="SystemExit: 7") as held:
        everstep.run(flow, url=url(tmp_path))
    assert held.value.reason == "poisoned"


# -- interrupts ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("program", ["interrupt", "interrupt_blocking"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_script_gives_its_run_back_and_a_rerun_goes_on(
    tmp_path: Path, number: signal.Signals, program: str
) -> None:
    process = start(program, tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode not in (0, None)
    assert "the code begins" in output
    assert notes(tmp_path) == ["first", "begun middle"]  # no `finally`: stopping is not execution
    store = open_store(url(tmp_path))
    row = store.run("interrupted")
    assert row is not None
    if not (program == "interrupt_blocking" and number is signal.SIGTERM):
        assert row.owner is None  # given back; a plain SIGTERM in blocking code kills, as everywhere
    store.close()
    (tmp_path / "second-life").touch()
    status, output = run(program, tmp_path)
    assert status == 0, output
    assert "the code begins" not in output
    assert notes(tmp_path) == ["first", "begun middle", "begun middle", "finally", "middle"]


def test_sigterm_ends_run_with_the_usual_status_and_quietly(tmp_path: Path) -> None:
    process = start("interrupt", tmp_path)
    wait_until(lambda: (tmp_path / "ready").exists())
    process.terminate()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in output


# -- weight ----------------------------------------------------------------------------------------------------------
def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_everstep_is_light() -> None:
    loaded = python("import sys, everstep; print(' '.join(sorted(sys.modules)))").split()
    for heavy in (
        "click",
        "rich",
        "apsw",
        "pydantic",
        "sqlite3",
        "http",
        "multiprocessing",
        "concurrent.futures.process",
    ):
        assert heavy not in loaded, heavy


def test_declaring_starts_nothing() -> None:
    told = python(
        """
        import threading, sys, everstep, asyncio

        original = asyncio.wait_for.__code__

        @everstep.step
        def one() -> None: ...

        @everstep.workflow
        def flow() -> None: ...

        print(threading.active_count(), asyncio.wait_for.__code__ is original)
        """
    )
    assert told == "1 True\n"


def test_a_script_of_two_decorators_works_in_an_empty_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import everstep

            @everstep.step
            def hello(name: str) -> str:
                print("hello runs")
                return f"hello {name}"

            @everstep.workflow
            def greet(name: str) -> str:
                return hello(name)

            if __name__ == "__main__":
                print(everstep.run(greet, "ann", id="greet-ann"))
            """
        )
    )
    environment = {name: value for name, value in os.environ.items() if name != "EVERSTEP_URL"}
    outputs = [
        subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert outputs == ["hello runs\nhello ann\n", "hello ann\n"]
    assert (tmp_path / "everstep.db").exists()
