"""What lint has found: where, what is wrong, and what to do."""

import ast
from dataclasses import asdict, dataclass
from typing import Any

from everstep.model.mistakes import Mistake


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake at a place of a file."""

    file: str
    line: int
    column: int
    rule: str
    what: str
    remedy: str
    source: str = ""
    """The line's text in the file."""
    function: str = ""
    """The function that contains it."""
    via: tuple[str, ...] = ()
    """The calls that lead to it from the workflow or step, if it is not in that one's own body."""
    lines: tuple[int, int] = (0, 0)
    """The first and the last line where `# everstep: ok` silences it."""

    def __str__(self) -> str:
        what = f"T{self.what[1:]}" if self.what.startswith("the ") else self.what
        return f"{self.file}:{self.line}:{self.column}: {self.rule}: {what} — {self.remedy}."

    def facts(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = asdict(self)
        del found["lines"]
        return found | {"via": list(self.via)}


def span(node: ast.AST) -> tuple[int, int]:
    """Return the lines of a node; for a compound statement, those before its body."""
    first = getattr(node, "lineno", 1)
    last = getattr(node, "end_lineno", None) or first
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        last = max(first, min(last, body[0].lineno - 1))
    return first, last


def finding(
    file: str, node: ast.AST, mistake: Mistake, *, lines: list[str], function: str = "", via: tuple[str, ...] = ()
) -> Finding:
    """Return a finding at a node."""
    first, last = span(node)
    source = lines[first - 1].strip() if first <= len(lines) else ""
    column = getattr(node, "col_offset", 0) + 1
    return Finding(file, first, column, *mistake, source, function, via, (first, last))
