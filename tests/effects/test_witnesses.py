"""Witnesses: what a run remembers of the outside is compared before it goes on, and nothing is done when it differs."""

import asyncio
import errno
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import everstep
from everstep import step, witness, workflow
from everstep.cli import main as cli
from everstep.effects.witnesses import Witness
from everstep.errors import Drift, Misuse, RunHeld
from tests.engine.resume_helpers import Machine
from tests.stores.kit import python
from tests.waiting import open_sqlite
from tests.worlds.ledger import NOTES

MADE: dict[str, Callable[[], Witness]] = {}
"""How the workflow below makes its witness: set by each test, the same in each replay."""
POLICY = {"on_drift": "hold"}


@pytest.fixture(autouse=True)
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    POLICY["on_drift"] = "hold"
    monkeypatch.chdir(tmp_path)


@step
async def act(what: str) -> None:
    NOTES.append(what)


@workflow
async def careful() -> str:
    await everstep.expect(MADE["it"](), on_drift=POLICY["on_drift"])  # type: ignore[arg-type]
    await act("before")
    word = await everstep.receive("word", str)
    await act("after")
    second = await everstep.receive("word", str)
    return word + second


# -- each kind ---------------------------------------------------------------------------------------------------------
class Outside:
    """Something outside that a test can change and put right again."""

    def __init__(self, make: Callable[[], Witness], put: Callable[[str], None], difference: list[str]) -> None:
        self.make, self.put, self.difference = make, put, difference


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text)


@contextmanager
def a_file() -> Iterator[Outside]:
    lines = ["--- as remembered", "+++ as it is now", " one", "-old", "+new"]
    yield Outside(lambda: witness.file("a.txt"), lambda now: write("a.txt", f"one\n{now}\n"), lines)


@contextmanager
def a_large_file() -> Iterator[Outside]:
    def put(now: str) -> None:
        Path("a.bin").write_bytes(b"\0" * 100_000 + now.encode())

    yield Outside(lambda: witness.file("a.bin"), put, ["remembered", "now", "'bytes': 100003", "'digest'"])


@contextmanager
def an_absent_file() -> Iterator[Outside]:
    def put(now: str) -> None:
        Path("b.txt").unlink(missing_ok=True) if now == "old" else write("b.txt", "here")

    yield Outside(lambda: witness.file("b.txt"), put, ["+here"])


@contextmanager
def a_directory() -> Iterator[Outside]:
    def put(now: str) -> None:
        write("d/x.txt", now)
        write("d/ignored.bin", f"{now} again")

    yield Outside(lambda: witness.directory("d", "**/*.txt"), put, ["x.txt"])


@contextmanager
def a_sqlite_file() -> Iterator[Outside]:
    yield Outside(lambda: witness.sql("x.db", "SELECT name FROM things WHERE id = ?", 1), put_row, ["'old'", "'new'"])


@contextmanager
def a_connection() -> Iterator[Outside]:
    def make() -> Witness:
        return witness.sql(lambda: sqlite3.connect("x.db"), "SELECT name FROM things", name="things")

    yield Outside(make, put_row, ["'old'", "'new'"])


def put_row(now: str) -> None:
    connection = open_sqlite("x.db")
    connection.execute("CREATE TABLE IF NOT EXISTS things (id INTEGER PRIMARY KEY, name TEXT)")
    connection.execute("INSERT INTO things VALUES (1, ?) ON CONFLICT DO UPDATE SET name = excluded.name", (now,))
    connection.commit()
    connection.close()


@contextmanager
def served(make: Callable[[str], Witness]) -> Iterator[Outside]:
    state = {"now": "old"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"a": [{"b": state["now"]}]}).encode()
            self.send_response(200)
            self.send_header("ETag", f'"{state["now"]}"')
            self.send_header("X-Version", state["now"])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        yield Outside(lambda: make(url), lambda now: state.update(now=now), ["old", "new"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def a_variable() -> Iterator[Outside]:
    def put(now: str) -> None:
        os.environ["EVERSTEP_TEST_OUTSIDE"] = now

    yield Outside(lambda: witness.env("EVERSTEP_TEST_OUTSIDE"), put, ["remembered 'old', now 'new'"])
    del os.environ["EVERSTEP_TEST_OUTSIDE"]


@contextmanager
def a_value() -> Iterator[Outside]:
    state: dict[str, Any] = {}

    def put(now: str) -> None:
        state["it"] = (now, float("nan"), {"x": b"\xff"})

    yield Outside(lambda: witness.value("it", lambda: state["it"]), put, ["'old'", "'new'"])


KINDS: dict[str, Callable[[], Any]] = {
    "file": a_file,
    "large file": a_large_file,
    "absent file": an_absent_file,
    "directory": a_directory,
    "sql": a_sqlite_file,
    "sql connection": a_connection,
    "http etag": lambda: served(witness.http),
    "http header": lambda: served(lambda url: witness.http(url, header="X-Version")),
    "http json": lambda: served(lambda url: witness.http(url, json="a.0.b")),
    "env": a_variable,
    "value": a_value,
}


async def stopped_run(machine: Machine, flow: Any = careful) -> None:
    """Start the run and let its process vanish while it waits."""
    app, _ = await machine.start(flow, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    await machine.kill(app)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_drifts_holds_and_what_is_put_right_goes_on(machine: Machine, kind: str) -> None:
    with KINDS[kind]() as outside:
        outside.put("old")
        MADE["it"] = outside.make
        await stopped_run(machine)
        outside.put("new")
        app = await machine.worker()
        run = app.get("r")
        await run.signal("word", "a")
        with pytest.raises(RunHeld):
            await run.result(timeout=60)
        assert NOTES == ["before"]
        assert machine.hold("r").reason == "drift"
        assert machine.kinds("r")[-1] == "run_held"
        (one,) = machine.report("r")["drift"]
        assert one["subject"] == outside.make().subject
        for part in outside.difference:
            assert part in one["difference"]
        await app.resolve("r", "retry")  # nothing was put right: held again
        await machine.until(lambda: machine.kinds("r", "run_held") == ["run_held"] * 2)
        assert NOTES == ["before"]
        outside.put("old")
        await app.resolve("r", "retry")
        await run.signal("word", "b")
        assert await run.result(timeout=60) == "ab"
        assert NOTES == ["before", "after"]
        assert not machine.replay("r").differences


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_accepted_is_what_later_resumes_compare_with(machine: Machine, kind: str) -> None:
    with KINDS[kind]() as outside:
        outside.put("old")
        MADE["it"] = outside.make
        await stopped_run(machine)
        outside.put("new")
        app = await machine.worker()
        run = app.get("r")
        await run.signal("word", "a")
        await machine.until_status("r", "held")
        await app.resolve("r", "accept", by="ann")
        await machine.until(lambda: NOTES == ["before", "after"])
        await machine.until_status("r", "waiting")
        await machine.rest()
        await machine.kill(app)
        assert not machine.replay("r").differences
        outside.put("old")  # now this is drift
        app = await machine.worker()
        run = app.get("r")
        await run.signal("word", "b")
        await machine.until_status("r", "held")
        outside.put("new")
        await app.resolve("r", "retry")
        assert await run.result(timeout=60) == "ab"


async def test_on_drift_fail_fails_the_run(machine: Machine) -> None:
    write("a.txt", "old")
    MADE["it"], POLICY["on_drift"] = lambda: witness.file("a.txt"), "fail"
    await stopped_run(machine)
    write("a.txt", "new")
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    with pytest.raises(Drift, match=r"file:a\.txt") as caught:
        await app.get("r").result(timeout=60)
    assert caught.value.subject == "file:a.txt"
    assert NOTES == ["before"]
    assert not machine.replay("r").differences


async def test_on_drift_ignore_goes_on(machine: Machine) -> None:
    write("a.txt", "old")
    MADE["it"], POLICY["on_drift"] = lambda: witness.file("a.txt"), "ignore"
    await stopped_run(machine)
    write("a.txt", "new")
    app = await machine.worker()
    run = app.get("r")
    await run.signal("word", "a")
    assert [one["subject"] for one in (await run.verify(outside=True)).drift] == ["file:a.txt"]
    await run.signal("word", "b")
    assert await run.result(timeout=60) == "ab"


async def test_a_run_that_waits_in_a_living_process_is_compared_as_well(machine: Machine) -> None:
    write("a.txt", "old")
    MADE["it"] = lambda: witness.file("a.txt")
    app, run = await machine.start(careful, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest()
    write("a.txt", "new")
    await run.signal("word", "a")
    await machine.until_status("r", "held")
    assert NOTES == ["before"]
    write("a.txt", "old")
    await app.resolve("r", "retry")
    await run.signal("word", "b")
    assert await run.result(timeout=60) == "ab"


async def test_a_process_may_stop_while_it_observes(machine: Machine) -> None:
    observing, go_on = threading.Event(), threading.Event()
    go_on.set()

    def slow() -> str:
        observing.set()
        go_on.wait(10)
        return "the same"

    MADE["it"] = lambda: witness.value("slow", slow)
    await stopped_run(machine)
    observing.clear()
    go_on.clear()
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    await machine.until(observing.is_set)
    closing = asyncio.create_task(machine.stop(app))
    await asyncio.sleep(0.05)
    go_on.set()
    await closing
    assert machine.status("r") in ("waiting", "queued")
    assert NOTES == ["before"]
    app = await machine.worker()
    await app.get("r").signal("word", "b")
    assert await app.get("r").result(timeout=60) == "ab"


async def test_what_cannot_be_observed_holds_and_cannot_be_accepted(machine: Machine) -> None:
    put_row("old")
    MADE["it"] = lambda: witness.sql("x.db", "SELECT name FROM things")
    await stopped_run(machine)
    os.rename("x.db", "y.db")
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    await machine.until_status("r", "held")
    assert machine.hold("r").resolutions == ["retry", "cancel"]
    assert "cannot be observed: OperationalError" in machine.report("r")["drift"][0]["difference"]
    assert NOTES == ["before"]
    os.rename("y.db", "x.db")
    await app.resolve("r", "retry")
    await machine.until(lambda: NOTES == ["before", "after"])


REFUSALS = {
    "EMFILE": OSError(errno.EMFILE, "too many open files"),
    "ENFILE": OSError(errno.ENFILE, "too many open files in the system"),
    "ENOMEM": OSError(errno.ENOMEM, "no memory"),
    "no memory": MemoryError(),
    "no thread": RuntimeError("can't start new thread"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_what_the_machine_refuses_while_a_witness_is_compared_is_no_drift(machine: Machine, refusal: str) -> None:
    observed: list[str] = []
    refused: list[BaseException] = []

    def fact() -> int:
        observed.append("asked")
        if refused:
            raise refused[0]
        return 1

    MADE["it"] = lambda: witness.value("fact", fact)
    await stopped_run(machine)
    observed.clear()
    refused.append(REFUSALS[refusal])
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    await machine.until(lambda: len(observed) >= 3)
    assert NOTES == ["before"]
    refused.clear()
    await machine.until(lambda: NOTES == ["before", "after"])
    assert not machine.bodies("r", "run_held")


WITHOUT_DESCRIPTORS = """
import errno, os, resource, sqlite3, sys
from everstep import witness
one = witness.sql(sys.argv[1], "SELECT a FROM t")
print(one.observe())
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for free in range(4):
    try:
        print(free, one.observe())
    except OSError as refused:
        print(free, errno.errorcode[refused.errno])
    except sqlite3.OperationalError as error:
        print(free, "drift:", error)
    os.close(taken.pop())
print(one.observe())
"""


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_database_for_which_no_descriptor_is_free_is_refused_by_the_machine_and_no_drift(
    tmp_path: Path, mode: str
) -> None:
    connection = open_sqlite(tmp_path / "x.db")
    connection.executescript(f"PRAGMA journal_mode = {mode}; CREATE TABLE t (a); INSERT INTO t VALUES (7)")
    said = python(WITHOUT_DESCRIPTORS, str(tmp_path / "x.db")).splitlines()
    connection.close()
    assert said[0] == said[-1] == "[[7]]"
    assert said[1] == "0 EMFILE"
    assert all(line.split(" ", 1)[1] in ("EMFILE", "[[7]]") for line in said[1:-1]), said


# -- the run's own changes ---------------------------------------------------------------------------------------------
@workflow
async def own_change() -> str:
    await everstep.expect(witness.file("./a.txt"))
    await everstep.files.write("a.txt", "mine")
    await everstep.receive("word", str)
    return "done"


async def test_the_run_s_own_change_replaces_the_witness(machine: Machine) -> None:
    write("a.txt", "old")
    await stopped_run(machine, own_change)
    app = await machine.worker()
    run = app.get("r")
    assert (await run.verify(outside=True)).drift == []
    write("a.txt", "old")  # what it was before is drift now
    assert len((await run.verify(outside=True)).drift) == 1
    write("a.txt", "mine")
    await run.signal("word", "a")
    assert await run.result(timeout=60) == "done"
    assert not machine.replay("r").differences


@workflow
async def releasing() -> str:
    await everstep.expect(witness.file("a.txt"))
    await everstep.files.write("b.txt", "b")
    everstep.release(witness.file("a.txt"))
    everstep.release(witness.file("never.txt"))
    await everstep.files.write("b.txt", "again", witness=False)
    await everstep.receive("word", str)
    return "done"


async def test_what_is_released_may_change(machine: Machine) -> None:
    write("a.txt", "old")
    await stopped_run(machine, releasing)
    assert machine.kinds("r", "witness_released") == ["witness_released"] * 2
    write("a.txt", "new")
    write("b.txt", "new")
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    assert await app.get("r").result(timeout=60) == "done"
    assert not machine.replay("r").differences


CUT_OFF = """
    @workflow
    async def flow():
        await everstep.expect(everstep.witness.file("a.txt"))
        {effect}
        return open_text("a.txt")

    @step(effect="read")
    def read(path):
        return open(path).read() if os.path.exists(path) else None

    def open_text(path):
        return "done"

    print(everstep.run(flow, id="r", url=URL))
"""
EFFECTS = {
    "write": ('await everstep.files.write("a.txt", "mine")', "mine"),
    "append": ('await everstep.files.append("a.txt", "+")', "old+"),
    "delete": ('await everstep.files.delete("a.txt")', None),
    "move": ('await everstep.files.move("a.txt", "b.txt")', None),
}


@pytest.mark.parametrize("point", ["body.before", "body.after"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_the_subject_of_a_begun_step_may_show_its_old_or_its_new_content(
    tmp_path: Path, effect: str, point: str
) -> None:
    from tests.engine.resume_helpers import run_program

    write("a.txt", "old")
    code, after = EFFECTS[effect]
    program = CUT_OFF.format(effect=code)
    number = 3 if effect == "move" else 2  # after that of `expect`, and of what `move` looks at first
    status, _ = run_program(tmp_path, program, environment={"EVERSTEP_CRASH_AT": f"{point}:{number}"})
    assert status == -9
    text = Path("a.txt").read_text() if Path("a.txt").exists() else None
    assert text == (after if point == "body.after" else "old")
    status, out = run_program(tmp_path, program)
    assert (status, out) == (0, "done\n")
    text = Path("a.txt").read_text() if Path("a.txt").exists() else None
    assert text == after
    assert not list(tmp_path.glob(".*.everstep"))


@pytest.mark.parametrize("effect", EFFECTS)
def test_the_subject_of_a_begun_step_with_a_stranger_s_content_holds(tmp_path: Path, effect: str) -> None:
    from tests.engine.resume_helpers import Program, run_program

    write("a.txt", "old")
    program = CUT_OFF.format(effect=EFFECTS[effect][0])
    number = 3 if effect == "move" else 2
    run_program(tmp_path, program, environment={"EVERSTEP_CRASH_AT": f"body.before:{number}"})
    write("a.txt", "a stranger's")
    status, _, err = Program(tmp_path, program).end()
    assert status == 1
    assert "held (drift)" in err
    assert Path("a.txt").read_text() == "a stranger's"


# -- verify ------------------------------------------------------------------------------------------------------------
@workflow
async def many() -> str:
    await everstep.expect(witness.file("a.txt"))
    await everstep.expect(witness.directory("d"))
    await everstep.expect(witness.env("EVERSTEP_TEST_OUTSIDE"))
    await everstep.expect(witness.value("it", lambda: Path("a.txt").read_text()))
    await everstep.receive("word", str)
    return "done"


async def test_verify_lists_every_difference_and_changes_nothing(machine: Machine) -> None:
    write("a.txt", "one\n")
    write("d/x", "x")
    await stopped_run(machine, many)
    app = await machine.boot()
    run = app.get("r")
    assert (await run.verify(outside=True)).drift == []
    write("a.txt", "two\n")
    write("d/y", "y")
    before = machine.dump()
    found = await run.verify(outside=True)
    assert found.sound
    assert [one["subject"] for one in found.drift] == ["file:a.txt", "directory:d:**/*", "value:it"]
    assert "-one\n+two" in found.drift[0]["difference"]
    assert (await run.verify()).drift == []
    assert machine.dump() == before

    def everstep_verify(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["verify", *words, "--url", str(machine.path)])
        return done.exit_code, done.output

    status, out = await asyncio.to_thread(everstep_verify, "r", "--outside")
    assert status == 1
    for part in ("file:a.txt", "-one", "+two", "directory:d", "value:it: not compared, needs its code"):
        assert part in out
    assert "env:" not in out
    status, out = await asyncio.to_thread(everstep_verify, "--all", "--outside")
    assert status == 1
    assert "1 with another outside than they remember" in out
    status, out = await asyncio.to_thread(everstep_verify, "r", "--outside", "--json")
    assert [one["subject"] for one in json.loads(out)["runs"][0]["drift"]] == ["file:a.txt", "directory:d:**/*"]
    assert (await asyncio.to_thread(everstep_verify, "r"))[0] == 0
    assert machine.dump() == before
    write("a.txt", "one\n")
    os.unlink("d/y")
    assert (await asyncio.to_thread(everstep_verify, "r", "--outside"))[0] == 0
    run = (await machine.worker()).get("r")
    await run.signal("word", "a")
    assert await run.result(timeout=60) == "done"
    write("a.txt", "two\n")  # a witness ends with its run
    assert (await run.verify(outside=True)).drift == []
    assert (await asyncio.to_thread(everstep_verify, "r", "--outside"))[0] == 0


async def test_a_drift_hold_is_drawn_as_a_person_reads_it(machine: Machine) -> None:
    write("a.txt", "one\n")
    MADE["it"] = lambda: witness.file("a.txt")
    await stopped_run(machine)
    write("a.txt", "two\x1b[2J\n")
    app = await machine.worker()
    await app.get("r").signal("word", "a")
    await machine.until_status("r", "held")
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["holds", "--url", str(machine.path)])
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert lines[1:3] == ["  file:a.txt", "      --- as remembered"]
    assert lines[5] == "      -one"
    assert lines[6].startswith("      +two")
    assert "digest" not in done.output
    assert "\x1b[2J" not in done.output
    assert "--accept" in done.output


# -- misuse ------------------------------------------------------------------------------------------------------------
def test_outside_of_a_workflow_it_says_so() -> None:
    with pytest.raises(Misuse, match=r"everstep\.expect\(\) is for workflow code"):
        asyncio.run(everstep.expect(witness.env("X")))
    with pytest.raises(Misuse, match=r"everstep\.release\(\) is for workflow code"):
        everstep.release(witness.env("X"))


def test_a_witness_that_could_not_work_is_refused() -> None:
    async def observe() -> int:
        return 1

    with pytest.raises(Misuse, match="name="):
        witness.sql(lambda: None, "SELECT 1")
    with pytest.raises(Misuse, match="`def` function"):
        witness.value("x", observe)
    with served(lambda url: witness.http(url, header="X-None")) as outside, pytest.raises(Misuse, match="X-None"):
        outside.make().observe()


def test_other_parameters_are_another_subject() -> None:
    first, second = (witness.sql("x.db", "SELECT ?", one) for one in (1, 2))
    assert first.subject != second.subject


@pytest.mark.parametrize("kind", ["a database", "http json"])
async def test_the_command_asks_databases_and_addresses_again_without_the_code(machine: Machine, kind: str) -> None:
    def verify() -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["verify", "r", "--outside", "--url", str(machine.path)])
        return done.exit_code, done.output

    with asked(kind) as outside:
        outside.put("old")
        MADE["it"] = outside.make
        await stopped_run(machine)
        assert (await asyncio.to_thread(verify))[0] == 0
        outside.put("new")
        status, out = await asyncio.to_thread(verify)
        assert status == 1
        assert all(part in out for part in outside.difference)
    Path("x.db").unlink(missing_ok=True)
    assert "cannot be observed" in (await asyncio.to_thread(verify))[1]


@contextmanager
def asked(kind: str) -> Iterator[Outside]:
    if kind == "a database":
        yield Outside(lambda: witness.sql("x.db", "SELECT name FROM things WHERE id < ?", 9), put_row, ["old", "new"])
        return
    with KINDS[kind]() as outside:
        yield outside
