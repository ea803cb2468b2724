"""Plain English: the worst words are in no page, and no change adds them to the sources.

Say who or what acts (the caller, a worker, no process), what something depends on, and what a number is. The words
below have one letter in brackets, so that this file does not contain what it looks for.
"""

import re
from pathlib import Path

import pytest

from tests.house.sources import ROOT, Source, modules, report, statements

SAY: dict[str, str] = {
    r"[w]hoever": "say who acts: the caller, a worker, the process that …",
    r"[n]obody": "say what does not happen: no worker …, is never …",
    r"[s]omebody": "say who acts: a person, a user, another process",
    r"[h]angs?\s+on": "depends on",
    r"[s]o\s+many": "say what the number is: the maximum of …, the number of …",
    r"[o]f\s+which\s+nothing\s+was\s+said": "that was never configured",
}
WORST = {re.compile(rf"\b{word}\b", re.IGNORECASE): instead for word, instead in SAY.items()}

SOURCES_MOST = 544
"""How often the sources contain these words. Lower it when there are fewer; it is never raised."""

CODE = re.compile(r"^[ ]*```.*?^[ ]*```|`(?:(?!\n\n)[^`])*`", re.MULTILINE | re.DOTALL)
"""Blocks and spans of code. They may quote what people say."""


def pages() -> list[Path]:
    """Return the pages that people read. The changelog stays as it was written."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """Return a page without its code; each line keeps its number."""
    return CODE.sub(lambda code: "\n" * code.group().count("\n"), text)


def word_violations(source: Source) -> list[str]:
    """Return where a text has one of the words, each with what to write in its place."""
    return [
        source.at(source.text.count("\n", 0, found.start()) + 1, f"{found.group()!r}: {instead}")
        for word, instead in WORST.items()
        for found in word.finditer(source.text)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_none_of_the_worst_words(page: Path) -> None:
    violations = word_violations(Source(page.relative_to(ROOT).as_posix(), prose(page.read_text("utf-8"))))
    assert not violations, report(violations)


def test_the_sources_have_no_more_of_them_than_before() -> None:
    violations = [violation for source in (*modules(), *statements()) for violation in word_violations(source)]
    assert len(violations) <= SOURCES_MOST, f"{len(violations)} of {SOURCES_MOST}:{report(violations)}"


@pytest.mark.parametrize(
    "text",
    [
        "{}hoever asks gets an answer.",
        "{}obody is there.",
        "It waits for {}omebody.",
        "That {}angs on the run.",
        "After {}o\nmany attempts",
        "One {}f which nothing\nwas said has room.",
    ],
)
def test_one_of_them_is_found(text: str) -> None:
    letters = "wnshso"
    whole = [text.format(letter) for letter in letters]
    assert any(word_violations(Source("README.md", one)) for one in whole)


@pytest.mark.parametrize("text", ["`{}obody`", "```python\n# {}obody\n```\n", "test_{}obody_waits", "somebodys_else"])
def test_code_and_names_are_left_alone(text: str) -> None:
    assert not word_violations(Source("README.md", prose(text.format("n"))))


def test_a_line_keeps_its_number() -> None:
    (found,) = word_violations(Source("README.md", prose("a\n```text\nb\n```\n{}obody\n".format("n"))))
    assert found.startswith("README.md:5: ")
