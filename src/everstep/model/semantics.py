"""The version of the engine's semantics, written into each run.

A later release that changes how workflow code is driven raises this number and keeps the old way for runs that have the
old one, so that an upgrade never breaks an unfinished run.
"""

from typing import Final

SEMANTICS: Final = 1
SUPPORTED: Final = frozenset({1})
