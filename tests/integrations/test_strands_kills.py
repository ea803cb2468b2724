"""Strands killed at boundaries by `everstep crashtest`: what it proves is in its last line."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.testing import crash_everywhere
from everstep.testing.crashtest import Report
from everstep.testing.ledger import MODEL, Ledger
from everstep.worker.loading import load_workflow
from tests.crash.figures import FIGURES
from tests.integrations.nursery import Nursery
from tests.waiting import wait_until

OFFICE = "tests.integrations.strands_office"

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def killed(example: str, **options: object) -> Report:
    workflow = load_workflow(str(EXAMPLES / example))
    return crash_everywhere(workflow, "tides", **options)  # type: ignore[arg-type]


def test_a_graph_with_a_join_calls_its_models_again_only_if_they_were_under_way() -> None:
    report = killed("strands_graph.py", most=1, orders=0)
    assert report.holds, report.text()
    assert report.model_calls == 4
    tried = [one for one in report.outcomes if one.sort == "kill"]
    killed_at = [one for one in tried if one.verdict != "missed"]  # commits of both branches may be shared, or not
    assert 4 * len(killed_at) >= 3 * len(tried)
    line = f"boundaries {len(tried)} killed {len(killed_at)} · model calls = undisturbed 4 +"
    assert report.text().splitlines()[-1].startswith(line)


SCRIPT = """
import sys
from strands import Agent, tool
import everstep
from everstep.integrations.strands import ScriptedModel, durable
from everstep.testing import ledger

@tool
@everstep.step
def post(text: str) -> str:
    ledger.apply(ledger.offered(), "post", everstep.key(), text)
    return "posted"

seconds = float(sys.argv[1])
answers = [("post", {"text": "tides"})], "first", "second"
agent = Agent(model=ScriptedModel(*answers, seconds=seconds), tools=[post], callback_handler=None)
mine = durable(agent, id="chat")
print("first", str(mine("one")).strip(), flush=True)
print("second", str(mine("two")).strip(), flush=True)
"""


def test_a_script_that_is_killed_in_its_second_turn_goes_on_and_calls_only_what_was_under_way(tmp_path: Path) -> None:
    def started(seconds: float) -> "subprocess.Popen[str]":
        environment = {**os.environ, "EVERSTEP_LEDGER": ledger.url}
        command = [sys.executable, "-c", SCRIPT, str(seconds)]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    def calls() -> int:
        return sum(1 for one in ledger.entries() if (one["kind"], one["effect"]) == ("request", MODEL))

    with Ledger.start(tmp_path / "ledger") as ledger:
        life = started(0.3)
        assert life.stdout is not None
        assert life.stdout.readline() == "first first\n"
        wait_until(lambda: calls() >= 3)
        life.send_signal(signal.SIGKILL)
        assert life.wait() == -signal.SIGKILL
        assert calls() == 3, "its third call was under way"
        life = started(0.0)
        assert life.communicate(timeout=60)[0] == "first first\nsecond second\n"
        assert life.returncode == 0
        assert calls() == 4
        assert sum(1 for one in ledger.entries() if one["kind"] == "applied") == 1


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "calls"), [("strands_agent.py", 3), ("strands_graph.py", 4), ("strands_swarm.py", 4)]
)
def test_an_agent_a_graph_and_a_swarm_keep_their_promises_at_every_boundary(example: str, calls: int) -> None:
    report = killed(example, files=("*.txt",))
    assert report.holds, report.text()
    assert report.model_calls == calls
    assert not report.notes


class Life:
    """A store, its book of the ledger, and the processes that work on it."""

    def __init__(self, folder: Path, ledger: Ledger, nursery: Nursery, *action: str) -> None:
        folder.mkdir(parents=True)
        self.book, self._nursery = ledger.book(folder.name), nursery
        self._arguments = (f"sqlite:///{folder}/everstep.db", self.book.url, *action)

    def run(self, **environment: str) -> tuple[int, str]:
        return self._nursery.run(OFFICE, *self._arguments, **environment)

    def applied(self) -> Counter[str]:
        return Counter(one["effect"] for one in self.book.entries() if one["kind"] == "applied")


def lives(folder: Path, ledger: Ledger, nursery: Nursery, each: int, *action: str) -> Iterator[tuple[str, Life, str]]:
    """Kill the program at one boundary after the other. Give where, what is left, and what is said undisturbed."""
    undisturbed, passed = Life(folder / action[0], ledger, nursery, *action), Counter[str]()
    status, said = undisturbed.run(EVERSTEP_CRASH_COUNT=str(folder / "points"))
    assert status == 0, said
    points = [(name, passed.update([name]) or passed[name]) for name in (folder / "points").read_text().split()]  # type: ignore[func-returns-value]
    points = [one for one in points if not one[0].startswith(("store.create", "store.switch", "store.migrate"))]
    killed = 0
    for number, (name, count) in enumerate(points[::each]):
        life = Life(folder / f"{action[0]}-{number}", ledger, nursery, *action)
        status, output = life.run(EVERSTEP_CRASH_AT=f"{name}:{count}")
        assert status in (0, -signal.SIGKILL), f"{name}: {output}"
        killed += status != 0  # this process may write more at once than the one that was counted
        yield f"{name}:{count}", life, said
    assert 4 * killed >= 3 * len(points[::each])
    FIGURES.trials += killed
    FIGURES.lines.append(f"strands, {action[0]}: boundaries {len(points[::each])} killed {killed} · as undisturbed")


def kill_an_office(folder: Path, ledger: Ledger, nursery: Nursery, each: int) -> None:
    for where, life, undisturbed in lives(folder, ledger, nursery, each, "work"):
        for _ in range(2):
            status, said = life.run()
            assert (status, said) == (0, undisturbed), where
        assert life.applied() == {"pay": 3}, where


def kill_a_session(folder: Path, ledger: Ledger, nursery: Nursery, each: int) -> None:
    for where, life, _ in lives(folder, ledger, nursery, each, "talk", "ann", "4"):
        acknowledged = life.applied()["said"]
        status, said = life.run()
        assert status == 0, f"{where}: {said}"
        messages = json.loads(said)
        assert [number for number, _, _ in messages] == [*range(len(messages))], where
        spoken = [content["text"] for _, role, content in messages if role == "user"]
        assert spoken == [f"ann {turn}" for turn in range(4)], where
        heard = [messages[at + 1][1] for at, one in enumerate(messages[:-1]) if one[1] == "user"][:acknowledged]
        assert heard == ["assistant"] * acknowledged, f"{where}: an answer is lost"


def test_what_a_person_allowed_an_inner_agent_is_done_once_wherever_the_process_is_killed(
    tmp_path: Path, ledger: Ledger, strands_nursery: Nursery
) -> None:
    kill_an_office(tmp_path, ledger, strands_nursery, each=23)


def test_a_session_has_each_message_once_wherever_the_process_is_killed(
    tmp_path: Path, ledger: Ledger, strands_nursery: Nursery
) -> None:
    kill_a_session(tmp_path, ledger, strands_nursery, each=13)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kill", [kill_an_office, kill_a_session])
def test_so_it_is_at_every_single_boundary(
    kill: Callable[..., None], tmp_path: Path, ledger: Ledger, strands_nursery: Nursery
) -> None:
    kill(tmp_path, ledger, strands_nursery, each=1)
