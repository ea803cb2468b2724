"""Strands Agents that survive anything: each model call and each tool call of an agent, graph or swarm is a step.

In a workflow, `await durable(agent).invoke_async(prompt)`; in a plain script, `durable(agent, id="…")(prompt)`.
"""

from everstep.integrations.strands.copies import Options
from everstep.integrations.strands.running import Durable, durable
from everstep.integrations.strands.scripted import ScriptedModel
from everstep.integrations.strands.sessions import EverstepRepository, EverstepSessionManager

__all__ = ["Durable", "EverstepRepository", "EverstepSessionManager", "Options", "ScriptedModel", "durable"]
