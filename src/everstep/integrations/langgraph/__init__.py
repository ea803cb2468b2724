"""Recovery under LangGraph: a checkpointer and a store, and nodes that do not redo their work."""

from everstep.integrations.langgraph.items import EverstepStore
from everstep.integrations.langgraph.saver import EverstepSaver

__all__ = ["EverstepSaver", "EverstepStore"]
