"""The usual kinds of programs, each killed at random instants until it ends: the outside looks as if nothing happened.

The shop behind FastAPI, the tenth, is in tests/examples/test_fastapi.py.
"""

import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.examples.kit import ROOT, environment
from tests.postgres.server import server
from tests.waiting import DEADLINE_SECONDS, open_sqlite

EXAMPLES = ROOT / "examples"
PROGRAMS = EXAMPLES / "programs"
PLUGIN = ["-p", "everstep.testing.plugin", "-p", "no:cacheprovider"]
CRASHTEST = ["-m", "everstep", "crashtest", str(EXAMPLES / "approval.py"), '"chair"', "--signal", "approved=true"]


class Kind(NamedTuple):
    """A program, and how to see what it did to the outside: a database and a query, or files."""

    command: list[str]
    database: str = "outside.db"
    query: str = ""
    files: str = ""


KINDS = {
    "research agent": Kind([str(EXAMPLES / "tool_loop.py")], files="*.txt"),
    "payments": Kind([str(EXAMPLES / "order.py")], "services.db", "select service, what from done order by rowid"),
    "etl": Kind(
        [str(PROGRAMS / "etl.py")], "warehouse.db", "select name, amount, count(*) from sales group by 1, 2 order by 1"
    ),
    "scheduled jobs": Kind(
        [str(PROGRAMS / "scheduled.py")], query="select max(n) from (select count(*) as n from sent group by tick)"
    ),
    "saga": Kind([str(EXAMPLES / "trip.py"), "Venice"], "services.db", "select service, what from done order by rowid"),
    "def code": Kind([str(PROGRAMS / "sync.py")], "books.db", 'select "order", number from bookings order by number'),
    "loop": Kind([str(PROGRAMS / "long_loop.py"), "1000"], query="select turn, thought from notes order by turn"),
    "pytest": Kind(
        ["-m", "pytest", "-q", "-c", "pytest.ini", f"--confcutdir={PROGRAMS}", *PLUGIN, str(PROGRAMS / "suite.py")],
        query="select cents from paid order by cents",
    ),
}
LONG = {
    "loop of 20,000 turns": KINDS["loop"]._replace(command=[str(PROGRAMS / "long_loop.py"), "20000"]),
    "crash test": Kind([*CRASHTEST, "--files", "*.txt", "--most", "1", "--orders", "0"]),
}


class Service:
    """Where orders are fetched and booked. It books whatever it is told, so that a second booking is seen."""

    def __init__(self) -> None:
        self.booked: list[dict[str, str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                wanted = parse_qs(url.query).get("key")
                found = [n for n, one in enumerate(service.booked, 1) if wanted == [one["key"]]]
                self.answer([f"o-{n}" for n in range(8)] if url.path == "/orders" else found)

            def do_POST(self) -> None:
                service.booked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.answer(len(service.booked))

            def answer(self, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


class Trial:
    """One kind of program in a folder and with a store of its own."""

    def __init__(self, kind: Kind, folder: Path, url: str, service: Service) -> None:
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        self.kind, self.folder, self.service = kind, folder, service
        self.settings = environment(EVERSTEP_URL=url, SERVICE=service.url, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    def run(self, seconds: float | None = None) -> str | None:
        """Run the program to its end and return what it printed last; None if it was killed before."""
        log = (self.folder / "log").open("a")
        process = subprocess.Popen(
            [sys.executable, *self.kind.command],
            cwd=self.folder,
            env=self.settings,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            printed, _ = process.communicate(timeout=seconds or DEADLINE_SECONDS * 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            assert seconds is not None, "it does not end"
            return None
        assert process.returncode == 0, (self.folder / "log").read_text() + printed
        return printed.splitlines()[-1]

    def outside(self) -> object:
        """Return what the program did to the outside."""
        booked = [one["order"] for one in self.service.booked]
        files = sorted(path.read_text() for path in self.folder.glob(self.kind.files)) if self.kind.files else []
        if not self.kind.query:
            return booked, files
        with closing(open_sqlite(self.folder / self.kind.database)) as database:
            return booked, files, database.execute(self.kind.query).fetchall()


def without_keys(printed: str | None) -> str:
    """Return what was printed without parts of keys, which differ from store to store."""
    return re.sub(r"-[0-9a-f]{6,8}\b", "", printed or "")


@contextmanager
def store_of(backend: str, folder: Path) -> Iterator[str]:
    if backend == "sqlite":
        yield f"sqlite:///{folder / 'everstep.db'}"
        return
    schema = server().fresh_schema()
    yield server().url(schema)
    server().drop(schema)


def survives(kind: Kind, backend: str, folder: Path, chance: random.Random, kills: int) -> None:
    """Run a program undisturbed, and one that is killed at random instants. Both leave the same behind."""
    with store_of(backend, folder / "calm") as url:
        calm = Trial(kind, folder / "calm", url, Service())
        begun = time.monotonic()
        wanted = calm.run()
        seconds = time.monotonic() - begun
    survived = 0
    with store_of(backend, folder / "killed") as url:
        killed = Trial(kind, folder / "killed", url, Service())
        for _ in range(kills):
            if killed.run(seconds * chance.uniform(0.1, 0.9)) is None:
                survived += 1
        printed = killed.run()
    assert survived >= 1, "a run that is never killed proves nothing"
    if kind.command[0].endswith(".py"):
        assert without_keys(printed) == without_keys(wanted)
    assert killed.outside() == calm.outside()


BACKENDS = ["sqlite", "postgresql"]
FEW = [
    ("etl", "sqlite"),
    ("def code", "postgresql"),
    ("scheduled jobs", "sqlite"),
    ("loop", "postgresql"),
    ("pytest", "sqlite"),
]


@pytest.mark.parametrize(("name", "backend"), FEW)
def test_a_program_of_the_usual_kind_survives_kills_at_random_instants(name: str, backend: str, tmp_path: Path) -> None:
    survives(KINDS[name], backend, tmp_path, random.Random(1), kills=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*KINDS, *LONG])
def test_each_kind_of_program_survives_many_kills_at_random_instants(name: str, backend: str, tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    chance = random.Random(seed)
    for trial in range(3 if name in LONG else 20):
        (tmp_path / str(trial)).mkdir()
        survives((KINDS | LONG)[name], backend, tmp_path / str(trial), chance, kills=4)
