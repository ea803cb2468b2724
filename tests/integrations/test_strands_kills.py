"""Strands killed at boundaries by `everstep crashtest`: what it proves is in its last line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.testing import crash_everywhere
from everstep.testing.crashtest import Report
from everstep.testing.ledger import MODEL, Ledger
from everstep.worker.loading import load_workflow

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
        late = time.monotonic() + 60
        while calls() < 3 and time.monotonic() < late:
            time.sleep(0.005)
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
