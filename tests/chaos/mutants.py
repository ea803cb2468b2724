"""Bugs that are planted into a host on purpose: whoever judges must find them."""

from typing import Any


def plant(name: str) -> None:
    """Plant one into this process."""
    MUTANTS[name]()


MUTANTS: dict[str, Any] = {}
