"""The engine's log in a command's output: harmless lines, without what the command itself prints."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

SAID_ANYWAY = ("Run %s is held",)
"""The beginnings of messages that a command reports in another form."""


class LogLines(logging.Handler):
    """Passes the engine's warnings to the command's own output."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a warning: its level and its text."""
        if not str(record.msg).startswith(SAID_ANYWAY):
            self._say(record.levelname.lower(), record.getMessage())


@contextmanager
def log_lines(say: Callable[[str, str], None]) -> Generator[None]:
    """Send the engine's warnings to `say` and nowhere else, for the duration of the block."""
    logger = logging.getLogger("everstep")
    handler, before = LogLines(say), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
