"""The agent: a conversation that goes on after a crash, and a tool whose effect happens once."""

from pathlib import Path

import pytest

from tests.examples import kit

ANSWER = "I wrote a note about tides.\n"
BODIES = 7


def test_an_undisturbed_agent_asks_its_model_four_times(tmp_path: Path) -> None:
    assert kit.run("tool_loop", tmp_path).endswith(ANSWER)
    assert kit.lines(tmp_path / "model.log") == ["1 messages", "3 messages", "5 messages", "7 messages"]


@pytest.mark.parametrize("count", [1, 2, BODIES - 1, BODIES])
def test_an_agent_that_is_killed_goes_on_in_its_conversation(tmp_path: Path, count: int) -> None:
    kit.run_into_crash("tool_loop", tmp_path, at=f"body.after:{count}")
    asked = len(kit.lines(tmp_path / "model.log"))
    assert kit.run("tool_loop", tmp_path).endswith(ANSWER)
    assert len(list(tmp_path.glob("tides-*.txt"))) == 1
    # The answer that was not recorded is asked for again, the recorded ones are not.
    was_model = count % 2
    assert len(kit.lines(tmp_path / "model.log")) == 4 + was_model
    assert asked == (count + 1) // 2
