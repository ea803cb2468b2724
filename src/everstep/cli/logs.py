"""The engine's log in a command's output: harmless lines, and nothing that the command says itself."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

SAID_ANYWAY = ("Run %s is held",)
"""How messages begin that a command tells in its own way."""


class LogLines(logging.Handler):
    """Hands the engine's warnings to whatever prints for the command."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Say a warning: its level and its text."""
        if not str(record.msg).startswith(SAID_ANYWAY):
            self._say(record.levelname.lower(), record.getMessage())


@contextmanager
def log_lines(say: Callable[[str, str], None]) -> Generator[None]:
    """While this lasts, the engine's warnings go to `say` and nowhere else."""
    logger = logging.getLogger("everstep")
    handler, before = LogLines(say), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
