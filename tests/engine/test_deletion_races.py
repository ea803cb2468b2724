"""Deletion beside other processes: one that is stopped after it has judged deletes nothing that is new by then."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import everstep
from everstep.engine.app.app import App
from tests.engine.deletion_helpers import BROKEN, PAID, asking, ended, having, job
from tests.forked import Program
from tests.waiting import is_locked, wait_on_loop_until


def collector(url: str, at: str = "") -> Program:
    """Start `everstep gc` in a process of its own, which is stopped or killed at a crash point."""
    command = [sys.executable, "-m", "everstep", "gc", "--older-than", "0s", "--url", url]
    environment = {**os.environ, "EVERSTEP_CRASH_AT": at} if at else dict(os.environ)
    return Program(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def is_stopped(process: Program) -> bool:
    assert process.poll() is None, process.communicate()[0]
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def stopped_collector(url: str) -> Program:
    """Return one that was stopped after it had judged, at a moment at which no other thread of it was writing."""
    while True:
        process = collector(url, at="gc.judged:1:stop")
        await wait_on_loop_until(lambda process=process: is_stopped(process))  # type: ignore[misc]
        if url.startswith("postgres") or not is_locked(url):
            return process
        process.kill()
        process.communicate()


async def ids(app: App) -> list[str]:
    return sorted(row.id for row in await app.list(limit=1000))


@pytest.mark.parametrize("meanwhile", ["retried", "restarted", "shared"])
async def test_a_run_that_another_process_goes_on_with_after_it_was_judged_is_not_deleted(
    url: str, meanwhile: str
) -> None:
    async with everstep.open(url, durability="process") as app:
        BROKEN.add("lamp")
        await app.start(having, "lamp", id="r")
        assert await ended(app, "r") == "failed"
        (child,) = [run for run in await ids(app) if run != "r"]
        process = await stopped_collector(url)
        if meanwhile == "shared":
            await app.start(asking, "lamp", child, id="user")
            assert await ended(app, "user") == "failed"
        else:
            BROKEN.clear()
            await app.start(having, "lamp", id="r", on_existing="retry" if meanwhile == "retried" else "restart")
            assert await ended(app, "r") == "completed"
        process.send_signal(signal.SIGCONT)
        output, _ = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0, output
        assert "0 runs deleted" in output
        assert {"r", child} <= set(await ids(app))
        for run in await ids(app):
            assert (await app.get(run).verify()).sound
        if meanwhile == "shared":
            BROKEN.clear()
            await app.retry("user")
            assert await app.get("user").result(timeout=60) == "receipt 1"
        assert (["lamp", "lamp"] if meanwhile == "restarted" else ["lamp"]) == PAID


@pytest.mark.parametrize(
    "point", ["gc.judged:1", "store.commit.written:1", "store.commit.after:1", "store.commit.after:2"]
)
async def test_a_deletion_that_is_killed_is_ended_by_the_next_one_or_has_not_begun(url: str, point: str) -> None:
    async with everstep.open(url, durability="process") as app:
        assert await app.run(having, "lamp", id="r") == "receipt 1"
        runs = await ids(app)
        process = collector(url, at=point)
        await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == -signal.SIGKILL
        begun = {run for run, _ in app.store.deletions()}
        left = await ids(app)
        assert begun in (set(), set(left)), "a family goes as a whole"
        for run in left:
            if not begun:
                assert (await app.get(run).verify()).sound
        last = collector(url)
        output, _ = await asyncio.to_thread(last.communicate, timeout=60)
        assert f"{len(left)} runs deleted" in output
        assert await ids(app) == []
        assert app.store.deletions() == []
        assert await app.run(job, "lamp", id=runs[0]) == "receipt 2"
