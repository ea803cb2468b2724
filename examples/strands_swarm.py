"""A Strands swarm that survives being killed: the hand-off happens once, and who has the turn is never guessed.

python strands_swarm.py
everstep crashtest strands_swarm.py '"tides"' --files '*.txt'
"""

from pathlib import Path

from strands import Agent, tool
from strands.multiagent import Swarm

import everstep
from everstep.integrations.strands import ScriptedModel, durable


@tool
@everstep.step
def publish(text: str) -> str:
    """Publish a text.

    Args:
        text: What to publish.
    """
    Path("published.txt").write_text(text)
    return "published"


researcher = Agent(
    name="researcher",
    model=ScriptedModel(
        [("handoff_to_agent", {"agent_name": "writer", "message": "Write it up.", "context": {"fact": "tides turn"}})],
        "The writer has it.",
        seconds=0.1,
    ),
    callback_handler=None,
)
writer = Agent(
    name="writer",
    model=ScriptedModel([("publish", {"text": "Tides turn."})], "It is published.", seconds=0.1),
    tools=[publish],
    callback_handler=None,
)
swarm = Swarm([researcher, writer], entry_point=researcher)


@everstep.workflow
async def hand_over(topic: str) -> list[str]:
    result = await durable(swarm).invoke_async(f"Write about {topic}.")
    return [*(node.node_id for node in result.node_history), str(result.results["writer"].result).strip()]


if __name__ == "__main__":
    print(everstep.run(hand_over, "tides", id="over-1"))
