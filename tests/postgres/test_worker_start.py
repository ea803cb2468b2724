"""A worker that is started before its server waits for it; one whose server refuses it says so at once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from everstep.errors import StoreError, StoreUnreachable
from everstep.stores.postgres import PostgresStore
from tests.cli.test_worker_processes import asked, free_port
from tests.postgres.server import Server
from tests.waiting import wait_until

FLOW = "import everstep\n@everstep.workflow\nasync def nothing() -> None: ...\n"


def begin(folder: Path, url: str, *words: str) -> "subprocess.Popen[str]":
    (folder / "flow.py").write_text(FLOW)
    command = [sys.executable, "-m", "everstep", "worker", "flow.py", "--json", "--url", url, *words]
    return subprocess.Popen(command, cwd=folder, env=dict(os.environ), stdout=subprocess.PIPE, text=True)


def line_of(worker: "subprocess.Popen[str]") -> dict[str, Any]:
    assert worker.stdout is not None
    told: dict[str, Any] = json.loads(worker.stdout.readline())
    return told


@pytest.mark.parametrize("words", [(), ("--processes", "2")], ids=["one", "supervised"])
def test_a_worker_waits_for_its_server(server: Server, url: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    port = free_port()
    server.stop("fast")
    worker = begin(tmp_path, url, "--health", str(port), *words)
    try:
        told = line_of(worker)
        assert told["what"] == "waiting"
        assert "cannot be reached" in told["detail"]
        assert asked(port, "/healthz")[0] == 200
        assert asked(port, "/readyz")[0] == 503
    finally:
        server.start()
    try:
        wait_until(lambda: asked(port, "/readyz")[0] == 200)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=60)
    assert worker.returncode == 0


def test_a_worker_that_waits_is_stopped_by_a_signal(tmp_path: Path) -> None:
    worker = begin(tmp_path, f"postgresql://nobody@127.0.0.1:{free_port()}/none")
    assert line_of(worker)["what"] == "waiting"
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)
    assert worker.returncode == 0


def test_what_waiting_does_not_mend_is_said_at_once(server: Server, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    parts = urlsplit(server.uri)
    missing = parts._replace(path="/no_such_database").geturl()
    with pytest.raises(StoreError, match="no_such_database") as raised:
        PostgresStore(missing)
    assert not isinstance(raised.value, StoreUnreachable)
    done = subprocess.run(
        [sys.executable, "-m", "everstep", "worker", "flow.py", "--url", missing],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "no_such_database" in done.stderr
