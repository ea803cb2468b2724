"""What the house rules read: the package's modules, and the texts of the whole project."""

import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "everstep"
BINARY = frozenset({".db", ".gif", ".gz", ".ico", ".jpg", ".png", ".pyc", ".whl", ".woff2", ".zip"})


@dataclass(frozen=True)
class Source:
    """A text and its place: inside the package for `modules`, inside the project for `texts`."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def docstrings(self) -> frozenset[int]:
        """The identities of the constants that are docstrings, also those that stand below an attribute."""
        found = set()
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else []:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    found.add(id(statement.value))
        return frozenset(found)

    def strings(self) -> Iterator[tuple[int, str, bool]]:
        """Give each string constant: its line, its text, and whether it is a docstring."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value, id(node) in self.docstrings

    def comments(self) -> Iterator[tuple[int, str]]:
        """Give each comment with its line."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string

    def lines(self) -> Iterator[tuple[int, str]]:
        """Give each line with its number."""
        yield from enumerate(self.text.splitlines(), start=1)

    def at(self, line: int, what: str) -> str:
        """Return a violation in the form that editors make clickable."""
        return f"{self.path}:{line}: {what}"


@cache
def modules() -> tuple[Source, ...]:
    """Return every Python module of the package; paths are relative to it, such as `engine/driver.py`."""
    return _package_files("*.py")


@cache
def statements() -> tuple[Source, ...]:
    """Return every SQL file of the package."""
    return _package_files("*.sql")


@cache
def texts() -> tuple[Source, ...]:
    """Return every text file of the project that is tracked, or would be if it were added now."""
    files = (path for path in _project_files() if path.suffix not in BINARY and path.is_file())
    return tuple(Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8", errors="replace")) for file in files)


def _package_files(pattern: str) -> tuple[Source, ...]:
    files = sorted(PACKAGE.rglob(pattern))
    return tuple(Source(file.relative_to(PACKAGE).as_posix(), file.read_text("utf-8")) for file in files)


def _project_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):  # an unpacked source archive is not a repository
        return [path for path in sorted(ROOT.rglob("*")) if not _is_by_product(path)]
    return [ROOT / name for name in listed.split("\0") if name]


def _is_by_product(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return any(
        part == "__pycache__" or part.startswith((".venv", ".git", ".mypy", ".pytest", ".ruff")) for part in parts
    )


def report(violations: list[str]) -> str:
    """Return the violations as the text of a failed assertion."""
    return "\n" + "\n".join(violations)
