"""Adapters for agent frameworks: each an optional dependency."""
