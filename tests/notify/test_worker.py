"""Real workers, killed between a hold and its delivery, and what `everstep holds` and `doctor` say meanwhile."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Folder
from tests.notify.conftest import SECRET, Receiver
from tests.waiting import wait_until

APP = """
import asyncio
from everstep import step, workflow

@step(effect="once")
async def send_mail(to: str) -> str:
    raise ConnectionResetError("the answer was lost")

@workflow
async def mailing(to: str) -> str:
    return await send_mail(to)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    place = tmp_path / "folder"
    place.mkdir()
    one = Folder(place)
    (place / "app.py").write_text(APP)
    yield one
    for process in one.processes:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def settings(receiver: Receiver, **more: str) -> dict[str, str]:
    return {"EVERSTEP_ON_HOLD": receiver.url(), "EVERSTEP_ON_HOLD_SECRET": SECRET, **more}


def left_to_a_worker(folder: Folder) -> None:
    """Start a run whose process dies before its first step: a worker takes it up."""
    words = ("run", "app.py:mailing", '"ann@example.org"', "--id", "m-1")
    assert folder.everstep(*words, env={"EVERSTEP_CRASH_AT": "body.before:1"}).status == -signal.SIGKILL


def test_a_worker_killed_while_it_sends_is_followed_by_another_that_tells(folder: Folder, receiver: Receiver) -> None:
    """The receiver hangs, and the worker is killed; the next one meets a failure, a lost answer, and then 200."""
    receiver.plan("hang", "500", "lose", "200")
    left_to_a_worker(folder)
    first = folder.begin("worker", "app.py", env=settings(receiver))
    wait_until(receiver.requests)
    assert folder.run_row("m-1")[0] == "held"
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    (hold,) = folder.json("holds")
    assert [(one["state"], one["is_served"]) for one in hold["notifications"]] == [("pending", False)]
    page = folder.everstep("holds").out
    assert f"✉ {receiver.url()}: not delivered yet (1 attempt); no worker has this target" in page
    found = {one["name"]: one for one in folder.json("doctor")["findings"]}
    assert found["notifications"]["verdict"] == "warning"
    assert "1 undelivered, 1 of them without a worker that has their target" in found["notifications"]["text"]
    folder.begin("worker", "app.py", env=settings(receiver))
    wait_until(lambda: len(receiver.requests()) == 4)
    wait_until(lambda: folder.json("holds")[0]["notifications"] == [])
    messages = receiver.verified()
    assert {message["id"] for message in messages} == {hold["id"]} == set(receiver.deliveries())
    assert [one["headers"]["everstep-attempt"] for one in receiver.requests()] == ["1", "2", "3", "4"]
    assert not any(one["name"] == "notifications" for one in folder.json("doctor")["findings"])


POINTS = [
    "store.commit.after:2",  # the hold is durable, and nobody knows
    "unit.durable:1",
    "notification.taken:1",
    "notification.answered:1",
]


@pytest.mark.parametrize("point", POINTS)
def test_killed_between_the_hold_and_its_delivery_another_worker_tells(
    folder: Folder, receiver: Receiver, point: str
) -> None:
    left_to_a_worker(folder)
    first = folder.begin("worker", "app.py", env=settings(receiver, EVERSTEP_CRASH_AT=point))
    assert folder.finish(first).status == -signal.SIGKILL
    assert folder.run_row("m-1")[0] == "held", "it was killed after the hold"
    (hold,) = folder.json("holds")
    assert len(hold["notifications"]) == 1, "written with the hold"
    before = len(receiver.requests())
    assert before == (point == "notification.answered:1")
    folder.begin("worker", "app.py", env=settings(receiver))
    wait_until(lambda: folder.json("holds")[0]["notifications"] == [])
    assert set(receiver.deliveries()) == {hold["id"]}
    assert len(receiver.verified()) == before + 1


def test_a_hold_by_the_command_line_is_told_before_the_command_ends(folder: Folder, receiver: Receiver) -> None:
    words = ("run", "app.py:mailing", '"ann@example.org"', "--id", "m-1")
    assert folder.everstep(*words, env=settings(receiver)).status == 3
    assert [message["run"] for message in receiver.verified()] == ["m-1"]
    folder.everstep("resolve", "m-1", "--not-done", env=settings(receiver))
    assert folder.everstep("hold", "m-1", "--note", "look first", env=settings(receiver)).status == 0
    second = receiver.verified()[1]
    assert (second["reason"], second["summary"]) == ("asked", "look first")
    assert set(second["resolutions"]) == {"retry", "cancel"}
