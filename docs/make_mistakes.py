"""Write docs/mistakes.md: make each mistake of tests/docs/mistakes.txt, and note the message.

    python docs/make_mistakes.py

A mistake has a title (`# …`), words of the remedy that its message must contain (`> …`), and a program. The line that
the message, or its traceback, must name ends with `# <-`. A test makes each mistake, and fails when the page is stale.
"""

import gc
import io
import linecache
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "mistakes.md"
MISTAKES: Final = ROOT / "tests" / "docs" / "mistakes.txt"
MARK: Final = "  # <-"
PLACE: Final = "/mistakes/app.py"
"""The file that the programs seem to be in."""
IMPORTS: Final = (
    "import asyncio, concurrent.futures, os, pathlib, socket, sqlite3, subprocess, threading, time, urllib.request\n"
    "import everstep, httpx, requests\n"
    "from everstep import step, workflow\n"
)
REPLACED: Final = (
    (r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "since …"),
    (r"id='[0-9a-f]{32}'", "id='…'"),
)
INTRODUCTION: Final = """\
<!-- Made by docs/make_mistakes.py from tests/docs/mistakes.txt. Change the programs, then `make docs`. -->

# Mistakes and their messages

Look for the message that you got, or for what you did. Each row is a small program of
[mistakes.txt](../tests/docs/mistakes.txt) that a test runs: this is what it raises today. [Lint](howto/lint.md) finds
many of these before the program runs.
"""


@dataclass
class Mistake:
    """A program with a mistake in it."""

    section: str
    title: str
    remedy: str
    program: str

    @property
    def line(self) -> int:
        """The number of the marked line; 0 if there is none."""
        marked = (number for number, line in enumerate(self.program.splitlines(), 1) if line.endswith(MARK))
        return next(marked, 0)

    @property
    def text(self) -> str:
        """The marked line."""
        return self.program.splitlines()[self.line - 1].removesuffix(MARK).strip() if self.line else ""


@dataclass
class Message:
    """What a program raised: its type, its text, and the lines of the program that the traceback names."""

    kind: str
    text: str
    lines: list[int]

    def names(self, line: int) -> bool:
        """Return True if the text or the traceback names a line."""
        return line in self.lines or f"app.py:{line}:" in self.text


def mistakes() -> Iterator[Mistake]:
    """Return the mistakes of the file, in its order."""
    section = ""
    for block in re.split(r"^(?=#{1,2} )", MISTAKES.read_text("utf-8"), flags=re.MULTILINE):
        head, _, rest = block.partition("\n")
        if head.startswith("## "):
            section = head[3:]
        elif head:
            remedy, _, program = rest.partition("\n")
            yield Mistake(section, head[2:], remedy.removeprefix("> "), program.strip("\n") + "\n")


def make(mistake: Mistake) -> Message | None:
    """Make a mistake in a folder of its own; return what was raised."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = mistake.program.replace(MARK, "")
        linecache.cache[PLACE] = (len(source), None, source.splitlines(keepends=True), PLACE)
        module = ModuleType("app")
        sys.modules["app"] = module
        with mock.patch("sys.stderr", io.StringIO()), mock.patch("sys.stdin", io.StringIO()):
            exec(IMPORTS, module.__dict__)  # noqa: S102  # a program of mistakes.txt
            try:
                exec(compile(source, PLACE, "exec"), module.__dict__)  # noqa: S102
            except Exception as error:  # noqa: BLE001  # that is what the program is for
                return _message(error, os.path.realpath(folder))
            finally:
                gc.collect()
                linecache.cache.pop(PLACE, None)
                sys.modules.pop("app", None)
    return None


def _message(error: Any, folder: str) -> Message:
    found = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == PLACE]
    earlier = getattr(error, "__everstep_traceback__", "")
    found = [*found[-1:], *(int(line) for line in re.findall(r'app\.py", line (\d+)', earlier))]
    text = str(error).replace(f"{folder}/", "")
    for pattern, instead in REPLACED:
        text = re.sub(pattern, instead, text)
    return Message(type(error).__name__, text, found)


def page() -> str:
    """Return the page."""
    parts, section = [INTRODUCTION], ""
    for mistake in mistakes():
        message = make(mistake)
        if mistake.section != section:
            section = mistake.section
            parts.append(f"\n## {section}\n\n| mistake | message |\n| --- | --- |\n")
        said = "nothing" if message is None else f"{message.kind}: {message.text}"
        line = f"<br>`{_cell(mistake.text)}`" if mistake.text else ""
        parts.append(f"| {mistake.title}{line} | {_cell(_prose(said))} |\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def _prose(text: str) -> str:
    """Return a message as Markdown shows it: nothing in it is markup, except what stands in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<>*_\[\]])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
