"""A workflow body that touches the outside is told so at once, with its line and the remedy; harmless things work."""

import asyncio
import builtins
import contextlib
import importlib
import inspect
import io
import linecache
import logging
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zoneinfo
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.code.guard import Silence
from everstep.errors import OutsideInWorkflow
from tests.engine.lives import add, echo, prove, prove_life

HERE = Path(__file__)


def opens_a_file() -> None:
    open(HERE).close()


def reads_a_path() -> None:
    HERE.read_text()


def opens_by_descriptor() -> None:
    os.close(os.open(HERE, os.O_RDONLY))


def lists_a_folder() -> None:
    os.listdir(HERE.parent)


def makes_a_folder() -> None:
    os.mkdir("/tmp/never")


def removes_a_file() -> None:
    os.remove("/tmp/never")


def renames_a_file() -> None:
    os.rename("/tmp/never", "/tmp/ever")


def links_a_file() -> None:
    os.symlink("/tmp/never", "/tmp/ever")


def cuts_a_file() -> None:
    os.truncate("/tmp/never", 0)


def makes_a_temporary_file() -> None:
    tempfile.TemporaryFile()  # noqa: SIM115


def changes_the_environment() -> None:
    os.environ["EVERSTEP_NEVER"] = "1"


def opens_a_socket() -> None:
    socket.socket()


def asks_for_an_address() -> None:
    socket.getaddrinfo("localhost", 1)


def starts_a_process() -> None:
    subprocess.run(["true"], check=False)


def starts_a_shell() -> None:
    os.system("true")


def forks() -> None:
    if os.fork() == 0:
        os._exit(0)


def starts_a_thread() -> None:
    threading.Thread(target=lambda: None).start()


def asks_at_the_keyboard() -> None:
    builtins.input()


def sleeps() -> None:
    time.sleep(0)


OFFENCES: list[Callable[[], None]] = [
    opens_a_file,
    reads_a_path,
    opens_by_descriptor,
    lists_a_folder,
    makes_a_folder,
    removes_a_file,
    renames_a_file,
    links_a_file,
    cuts_a_file,
    makes_a_temporary_file,
    changes_the_environment,
    opens_a_socket,
    asks_for_an_address,
    starts_a_process,
    starts_a_shell,
    forks,
    starts_a_thread,
    asks_at_the_keyboard,
    sleeps,
]


@workflow
async def offend(name: str) -> None:
    await echo(1)
    globals()[name]()


@workflow
def offend_plainly(name: str) -> None:
    everstep.blocking.gather(lambda: globals()[name]())


def line_of(function: Callable[..., Any], text: str = "") -> str:
    """Return `file.py:12: the line` of a function's first line, or of the one that contains a text."""
    lines, first = inspect.getsourcelines(function)
    number, line = next((n, line) for n, line in enumerate(lines) if (text in line if text else n == 1))
    return f"{HERE.name}:{first + number}: {line.strip()}"


@pytest.mark.parametrize("offence", OFFENCES)
@pytest.mark.parametrize("flow", [offend, offend_plainly])
def test_touching_the_outside_names_the_line_and_the_remedy(flow: Any, offence: Callable[[], None]) -> None:
    error = prove_life(flow, offence.__name__, every_prefix=False).error
    assert isinstance(error, OutsideInWorkflow)
    assert line_of(offence) in str(error)
    assert ("blocking.sleep" if offence is sleeps else "@everstep.step") in str(error)


async def loop_connects() -> None:
    await asyncio.get_running_loop().create_connection(asyncio.Protocol, "localhost", 1)


async def stream_connects() -> None:
    await asyncio.open_connection("localhost", 1)


async def starts_an_async_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def runs_a_function_in_a_thread() -> None:
    await asyncio.to_thread(len, "abc")


async def runs_a_function_in_an_executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, len, "abc")


async def calls_a_def_step_directly() -> None:
    add(1, 2)


ASYNC_OFFENCES: list[Callable[[], Coroutine[Any, Any, None]]] = [
    loop_connects,
    stream_connects,
    starts_an_async_process,
    runs_a_function_in_a_thread,
    runs_a_function_in_an_executor,
    calls_a_def_step_directly,
]


@workflow
async def offend_by_asyncio(name: str) -> None:
    await globals()[name]()


@pytest.mark.parametrize("offence", ASYNC_OFFENCES)
def test_asyncio_s_ways_to_the_outside_name_the_line_and_the_remedy(offence: Callable[..., Any]) -> None:
    error = prove_life(offend_by_asyncio, offence.__name__, every_prefix=False).error
    assert isinstance(error, OutsideInWorkflow)
    assert line_of(offence) in str(error)
    assert "step" in str(error)


def test_the_error_is_an_ordinary_one_that_code_may_handle() -> None:
    @workflow
    async def flow() -> str:
        try:
            open(HERE)  # noqa: SIM115
        except OutsideInWorkflow as error:
            return error.code
        return "?"

    assert prove(flow) == "everstep.workflow.outside"


def test_step_bodies_may_touch_the_outside(tmp_path: Path) -> None:
    @step
    async def write(path: str) -> int:
        return Path(path).write_text("hello")

    @step
    def read(path: str) -> str:
        time.sleep(0)
        return Path(path).read_text()

    @workflow
    async def flow(path: str) -> list[Any]:
        return [await write(path), await asyncio.to_thread(read, path)]

    assert prove(flow, str(tmp_path / "x")) == [5, "hello"]


def test_the_outside_is_free_again_when_the_code_has_come_to_rest(tmp_path: Path) -> None:
    @workflow
    async def flow() -> None:
        await asyncio.sleep(1)

    prove(flow)
    (tmp_path / "x").write_text("fine")


def test_imports_in_a_workflow_work_also_of_modules_that_read_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads_on_import.py").write_text("TEXT = open(__file__).read()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    @workflow
    async def flow() -> list[str]:
        import wave  # a module that nothing else imports

        module = importlib.import_module("reads_on_import")
        return [wave.__name__, module.TEXT[:4]]

    sys.modules.pop("wave", None)
    sys.modules.pop("reads_on_import", None)
    assert prove(flow, every_prefix=False) == ["wave", "TEXT"]


class OwnHandler(logging.Handler):
    """A user's handler that opens a file for each record."""

    path = ""

    def emit(self, record: logging.LogRecord) -> None:
        with open(self.path, "a") as file:
            file.write(record.getMessage() + "\n")


def test_logging_to_a_file_works_also_with_a_handler_of_one_s_own(tmp_path: Path) -> None:
    logger = logging.getLogger("a.user's")
    logger.propagate = False
    own = OwnHandler()
    own.path = str(tmp_path / "own.log")
    late = logging.FileHandler(tmp_path / "late.log", delay=True)
    logger.addHandler(own)
    logger.addHandler(late)

    @workflow
    async def flow() -> None:
        logger.warning("one")
        await echo(1)
        try:
            raise KeyError("two")
        except KeyError:
            logger.exception("two")

    prove(flow, every_prefix=False)
    late.close()
    assert (tmp_path / "own.log").read_text() == "one\ntwo\n"
    assert "KeyError" in (tmp_path / "late.log").read_text()


def test_print_linecache_warnings_and_time_zones_work(capsys: pytest.CaptureFixture[str]) -> None:
    @workflow
    async def flow() -> list[Any]:
        print("printed")
        linecache.checkcache()
        linecache.cache.pop(pathlib.__file__, None)
        line = linecache.getline(pathlib.__file__, 1)
        with contextlib.redirect_stderr(io.StringIO()) as caught:
            warnings.warn("warned", stacklevel=1)
        there = datetime(2030, 6, 1, 12, tzinfo=UTC).astimezone(zoneinfo.ZoneInfo.no_cache("Europe/Berlin"))
        return [bool(line), there.hour, caught.getvalue() is not None]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert prove(flow, every_prefix=False) == [True, 14, True]
    assert capsys.readouterr().out == "printed\n"


def test_two_threads_with_apps_of_their_own_are_both_guarded() -> None:
    """One thread's workflow code comes to rest while the other's is still running."""
    inside, leave = threading.Event(), threading.Event()

    @workflow
    async def slow() -> str:
        inside.set()
        leave.wait(10)  # the other app's code runs and comes to rest meanwhile
        try:
            open(HERE)  # noqa: SIM115
        except OutsideInWorkflow:
            return "guarded"
        return "not guarded"

    @workflow
    async def quick() -> str:
        return "quick"

    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(prove(slow, every_prefix=False)))
    thread.start()
    assert inside.wait(10)
    assert prove(quick, every_prefix=False) == "quick"
    leave.set()
    thread.join()
    assert found == ["guarded"]


def test_silences_of_two_threads_that_overlap_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr, logging.Logger.callHandlers
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with Silence():
            print("silent in the other thread")
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with Silence():
        print("silent here")
        thread.start()
        entered.wait(10)
    print("heard, while the other is silent")
    leave.set()
    thread.join()
    print("heard")
    assert capsys.readouterr().out == "heard, while the other is silent\nheard\n"
    assert (sys.stdout, sys.stderr, logging.Logger.callHandlers) == before


def test_a_replay_is_silent_for_its_own_thread_only(capsys: pytest.CaptureFixture[str]) -> None:
    with Silence():
        thread = threading.Thread(target=lambda: print("another thread", flush=True))
        thread.start()
        thread.join()
        print("this thread")
        logging.getLogger("a.workflow's").warning("not heard")
    assert capsys.readouterr().out == "another thread\n"
