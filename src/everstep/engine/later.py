"""Modules that are imported when they are first used: most programs never fork, move or repair a run."""

from importlib import import_module
from typing import Any


class Later:
    """Stands for a module of this package until somebody asks for anything in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
