"""A Strands agent that survives being killed: each model call and each tool call is a step of a run.

Try it in an empty folder. It needs no network, for its model is a script:

    python strands_agent.py             # kill it as often as you like, and start it again
    everstep crashtest strands_agent.py '"tides"' --files '*.txt'

What makes the agent durable is the workflow around it, and `@everstep.step` under Strands' `@tool` where a call has an
effect.
"""

from pathlib import Path

from strands import Agent, tool

import everstep
from everstep.integrations.strands import ScriptedModel, durable


@tool
def look_up(topic: str) -> str:
    """Look up a topic.

    Args:
        topic: What to look up.
    """
    return f"{topic} come and go"


@tool
@everstep.step
def post(text: str) -> str:
    """Post a text for everybody to read.

    Args:
        text: What to post.
    """
    # The key is the same in every attempt at this call. The file stands for a service that knows it, and posts once.
    Path("post.txt").write_text(text)
    return "posted"


agent = Agent(
    model=ScriptedModel(
        [("look_up", {"topic": "tides"}), ("look_up", {"topic": "ships"})],
        [("post", {"text": "Tides come and go."})],
        "It is posted.",
        seconds=0.1,
    ),
    tools=[look_up, post],
    callback_handler=None,
)


@everstep.workflow
async def research(topic: str) -> str:
    result = await durable(agent).invoke_async(f"Write about {topic}, and post it.")
    return str(result).strip()


if __name__ == "__main__":
    print(everstep.run(research, "tides", id="research-1"))
