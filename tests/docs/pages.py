"""The pages of the documentation, and what the tests need to find in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line on which its text begins, and its text."""

    language: str
    line: int
    text: str


def pages() -> list[Path]:
    """Return the README and every page below docs; the records of decisions are not for users."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "decisions" not in page.parts]


def name_of(page: Path) -> str:
    """Return a page's path inside the project."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    found: list[Block] = []
    language: str | None = None
    begun, collected = 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence is None:
            collected.append(line)
        elif language is None:
            language, begun, collected = fence.group(1), number + 1, []
        else:
            found.append(Block(language, begun, "\n".join(collected) + "\n"))
            language = None
    assert language is None, f"a block that begins at line {begun} has no end"
    return found


def script(text: str) -> str:
    """Return a page's Python blocks as one script, each on the lines that it has on the page."""
    lines: list[str] = []
    for block in blocks(text):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
