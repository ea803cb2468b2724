"""A Strands graph with a join that survives being killed: what a node has done is not done again.

Two researchers work at the same time, one quick and one slow; the writer joins what they found.

    python strands_graph.py
    everstep crashtest strands_graph.py '"tides"'
"""

from strands import Agent
from strands.multiagent import GraphBuilder
from strands.multiagent.graph import Graph

import everstep
from everstep.integrations.strands import ScriptedModel, durable


def both_are_done(state: object) -> bool:
    done = {node.node_id for node in state.completed_nodes}  # type: ignore[attr-defined]
    return {"sea", "land"} <= done


def built() -> Graph:
    builder = GraphBuilder()
    for name, answer, seconds in (
        ("plan", "Ask about the sea and the land.", 0.02),
        ("sea", "The sea comes and goes.", 0.02),
        ("land", "The land stays.", 0.2),
        ("write", "The sea comes and goes; the land stays.", 0.02),
    ):
        agent = Agent(name=name, model=ScriptedModel(answer, seconds=seconds), callback_handler=None)
        builder.add_node(agent, name)
    for one in ("sea", "land"):
        builder.add_edge("plan", one)
        builder.add_edge(one, "write", condition=both_are_done)
    builder.set_entry_point("plan")
    builder.set_max_node_executions(10)
    return builder.build()


graph = built()


@everstep.workflow
async def write_together(topic: str) -> list[str]:
    result = await durable(graph).invoke_async(f"Write about {topic}.")
    done = {node.node_id for node in result.execution_order}
    order = [name for name in graph.nodes if name in done]  # as declared: which researcher is quicker may change
    return [*order, str(result.results["write"].result).strip()]


if __name__ == "__main__":
    print(everstep.run(write_together, "tides", id="together-1"))
