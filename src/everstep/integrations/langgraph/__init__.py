"""Recovery under LangGraph: a checkpointer and a store, and nodes that do not redo their work."""

from everstep.integrations.langgraph.items import EverstepStore
from everstep.integrations.langgraph.models import aask_model, ask_model
from everstep.integrations.langgraph.saver import EverstepSaver
from everstep.integrations.langgraph.tools import tools

__all__ = ["EverstepSaver", "EverstepStore", "aask_model", "ask_model", "tools"]
