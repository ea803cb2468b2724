"""`everstep worker --processes`, its health port, and `everstep worker ls`: real processes, some of them killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Folder
from tests.cli.queues import start_charges


@pytest.fixture
def queued(folder: Folder) -> Folder:
    shutil.copy(Path(__file__).with_name("queued_app.py"), folder.path / "queued_app.py")
    return folder


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def asked(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, None


def pids(folder: Folder) -> set[int]:
    listed = folder.json("worker", "ls")
    return {worker["pid"] for worker in listed} if isinstance(listed, list) else set()  # there is no store yet


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_that_die_are_started_again_and_all_stop_with_their_supervisor(queued: Folder) -> None:
    port = free_port()
    words = ("worker", "queued_app.py", "--processes", "2", "--drain", "20", "--health", str(port))
    supervisor = queued.begin(*words, "--queue", "money", env={"BODY_SECONDS": "0.3"})
    queued.wait_for(lambda: len(pids(queued)) == 2)
    assert supervisor.pid not in pids(queued)
    queued.wait_for(lambda: asked(port, "/readyz")[0] == 200)
    victim = min(pids(queued))
    os.kill(victim, signal.SIGKILL)
    queued.wait_for(lambda: len(pids(queued) - {victim}) == 2)
    queued.wait_for(lambda: asked(port, "/healthz")[1]["processes"])
    assert sum(one["restarts"] for one in asked(port, "/healthz")[1]["processes"]) == 1
    start_charges(queued, {f"c-{number}": 2 for number in range(4)})
    queued.wait_for(lambda: len(queued.effects()) >= 2)
    working = pids(queued)
    supervisor.send_signal(signal.SIGTERM)
    done = queued.finish(supervisor)
    assert done.status == 0, done.err
    assert "ended by signal 9; another begins in" in done.out
    assert done.out.count("stopped") == 2
    assert "[1]" in done.out
    assert "[2]" in done.out
    assert not any(map(is_alive, working))
    lines = [line.split()[:2] for line in queued.effects()]
    begun, over = ([name for sign, name in lines if sign == wanted] for wanted in "+-")
    assert sorted(begun) == sorted(over), "bodies under way have ended"
    assert queued.json("holds") == []
    assert queued.json("worker", "ls") == []


def test_a_second_signal_stops_all_processes_at_once(queued: Folder) -> None:
    supervisor = queued.begin(
        *("worker", "queued_app.py", "--processes", "2", "--drain", "1000"), env={"BODY_SECONDS": "100"}
    )
    start_charges(queued, {f"c-{number}": 1 for number in range(2)})
    queued.wait_for(lambda: len(queued.effects()) == 2)
    working = pids(queued)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.stdout is not None
    for line in supervisor.stdout:
        if "stopping" in line:
            break
    supervisor.send_signal(signal.SIGINT)
    assert queued.finish(supervisor).status == 128 + signal.SIGINT
    assert not any(map(is_alive, working))


def test_children_of_a_killed_supervisor_stop_in_good_order(queued: Folder) -> None:
    supervisor = queued.begin("worker", "queued_app.py", "--processes", "2", env={"BODY_SECONDS": "0.2"})
    queued.wait_for(lambda: len(pids(queued)) == 2)
    working = pids(queued)
    queued.kill(supervisor)
    queued.wait_for(lambda: not any(map(is_alive, working)))
    assert queued.json("worker", "ls") == []


def test_processes_that_cannot_work_at_all_are_not_started_again(queued: Folder) -> None:
    queued.file("broken.py", "import nothing_of_that_name\n")
    done = queued.everstep("worker", "broken.py", "--processes", "2")
    assert done.status == 2
    assert "nothing_of_that_name" in done.err


def test_a_health_port_says_how_a_worker_is_and_answers_this_machine_only(queued: Folder) -> None:
    port = free_port()
    words = ("worker", "queued_app.py", "--health", str(port), "--concurrency", "2", "--drain", "20")
    worker = queued.begin(*words, env={"BODY_SECONDS": "5"})
    queued.wait_for(lambda: asked(port, "/readyz")[0] == 200)
    start_charges(queued, {f"c-{number}": 1 for number in range(3)})
    queued.wait_for(lambda: asked(port, "/healthz")[1]["saturation"] == 1.0)
    status, facts = asked(port, "/healthz")
    assert status == 200
    assert (facts["ok"], facts["running"], facts["concurrency"], facts["draining"]) == (True, 2, 2, False)
    assert facts["last_commit_at"] > 0
    assert asked(port, "/secrets")[0] == 404
    queued.wait_for(lambda: queued.json("worker", "ls")[0]["saturation"] == 1.0)
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    local = [line.split()[1] for line in listening.splitlines() if line.split()[3] == "0A" and f":{port:04X}" in line]
    assert local == [f"0100007F:{port:04X}"]
    worker.send_signal(signal.SIGTERM)
    queued.wait_for(lambda: asked(port, "/readyz")[0] in (503, 0))
    assert "saturated" in queued.finish(worker).out


def test_a_wrong_or_taken_health_port_is_said(queued: Folder) -> None:
    assert queued.everstep("worker", "queued_app.py", "--health", "here").status == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = queued.everstep("worker", "queued_app.py", "--health", str(taken.getsockname()[1]))
    assert done.status == 2
    assert "cannot listen" in done.err


def test_a_draining_worker_keeps_its_lease_however_long_a_body_takes(queued: Folder) -> None:
    start_charges(queued, {f"c-{number}": 1 for number in range(1)})
    words = ("worker", "queued_app.py", "--lease", "1", "--drain", "30")
    first = queued.begin(*words, env={"BODY_SECONDS": "4"})
    queued.wait_for(lambda: len(queued.effects()) == 1)
    first.send_signal(signal.SIGTERM)
    second = queued.begin(*words, env={"BODY_SECONDS": "4"})
    assert queued.finish(first).status == 0
    queued.wait_for(lambda: queued.run_row("c-0")[0] == "completed")
    assert [line.split()[0] for line in queued.effects()] == ["+", "-"], "nobody took it over in between"
    assert queued.json("holds") == []
    queued.kill(second)


def test_worker_ls_says_who_works_where_and_on_what(queued: Folder) -> None:
    assert queued.begin("worker", "queued_app.py", "--queue", "money", "--queue", "mail").pid
    queued.wait_for(lambda: pids(queued))
    (facts,) = queued.json("worker", "ls")
    assert facts["queues"] == ["money", "mail"]
    assert facts["workflows"] == {"charges": "", "letter": "", "questions": ""}
    assert (facts["host"], facts["recovers"], facts["concurrency"]) == (socket.gethostname(), True, 100)
    out = queued.everstep("worker", "ls").out
    assert "money, mail" in out
    assert "0/100" in out
