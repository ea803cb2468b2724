"""The store in memory, for tests."""

from everstep.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
