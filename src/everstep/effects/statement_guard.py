"""What the body of an atomic step may say to PostgreSQL: anything but to end the transaction, or to write to markers.

SQLite asks before it does a statement; PostgreSQL asks nobody. So each statement is read before it is sent. What is
refused raises in the body and is remembered: also a body that swallows the error is refused, and everything it wrote is
rolled back. What is sent in a way that cannot be read here meets the guard of the marker, in the server: no COMMIT
succeeds before the marker is complete, and after a ROLLBACK there is no marker to complete.
"""

import re
from collections.abc import Iterator
from typing import Final, NoReturn

from everstep.errors import Misuse

MARKERS: Final = "everstep_markers"

WENT_ON: Final = "an error rolled its transaction back, and its body went on: let that error pass"
ENDED: Final = "its body ended the transaction, but the step itself begins and commits it, with its marker in it"

_SUSPECT: Final = re.compile(r"\b(?:commit|end|abort|rollback|begin|start|prepare|everstep_markers)\b", re.IGNORECASE)
_TOKEN: Final = re.compile(
    r"--[^\n]*"
    r"|/\*.*?\*/"
    r"|\b[eE]'(?:[^'\\]|\\.|'')*'"
    r"|'(?:[^']|'')*'"
    r"|\$(?P<tag>(?:[A-Za-z_]\w*)?)\$.*?\$(?P=tag)\$"
    r'|"(?P<quoted>(?:[^"]|"")*)"'
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<end>;)"
    r"|(?P<other>[^\s;])",
    re.DOTALL,
)
_READING: Final = frozenset({"SELECT", "EXPLAIN", "TABLE", "VALUES", "WITH", "COPY"})


class Guard:
    """Watches over one connection while a body has it."""

    def __init__(self) -> None:
        self.is_on = False
        self.broke = ""
        """What the body did that it must not, first of all."""

    def check(self, statement: str) -> None:
        """Raise `Misuse` if a body may not say this."""
        if self.is_on and (why := objection(statement)):
            self.refuse(why)

    def refuse_end(self, said: str) -> None:
        """Raise `Misuse` if a body has the connection: it said what would end the transaction."""
        if self.is_on:
            self.refuse(_ends(said))

    def refuse(self, why: str) -> NoReturn:
        """Remember what the body did, and raise."""
        self.broke = self.broke or why
        raise Misuse(why)


def objection(statement: str) -> str:
    """Return why a body may not say this, or an empty text."""
    if not _SUSPECT.search(statement):
        return ""
    for words in _statements(statement):
        first, second = words[0], words[1] if len(words) > 1 else ""
        if _ends_transaction(words):
            return _ends(f"{first} {second}" if first in ("START", "PREPARE") else first)
        if MARKERS.upper() in words and first not in _READING:
            return "its body wrote to everstep_markers, which belongs to Everstep"
        if first == "CREATE" and "ATOMIC" in words:
            break  # the body of a function in standard SQL has semicolons of its own
    return ""


def _ends(said: str) -> str:
    return f"its body said {said}, but the step itself begins and commits the transaction, with its marker in it"


def _ends_transaction(words: list[str]) -> bool:
    first, rest = words[0], words[1:]
    if first == "ROLLBACK":
        return "TO" not in rest[:2]  # ROLLBACK [WORK | TRANSACTION] TO a savepoint is the body's own affair
    if first in ("START", "PREPARE"):
        return rest[:1] == ["TRANSACTION"]
    return first in ("COMMIT", "END", "ABORT", "BEGIN")


def _statements(text: str) -> Iterator[list[str]]:
    """Give the words of each statement, in capitals; without what stands in literals and comments."""
    words: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["word"] is not None:
            words.append(token["word"].upper())
        elif token["quoted"] is not None:
            words.append(MARKERS.upper() if token["quoted"] == MARKERS else '"')
        elif token["other"] is not None:
            words.append(token["other"])
        elif token["end"] is not None and words:
            yield words
            words = []
    if words:
        yield words
