"""Plain English: the worst words are in no page, and no change adds them to the sources.

Say who or what acts (the caller, a worker, no process), what something depends on, and what a number is. `WORST` are
words that never read well. `IDIOMS` are common words in a sense that English does not have: *stands* for *is*, *for*
for *because*. Both have one letter in brackets, so that this file does not contain what it looks for.
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
IDIOMATIC: dict[str, str] = {
    r"[s]tands?(?!-)(?!\s+(?:still|by|in\s+for))": "is, are; is stored in",
    r"[s]o\s+long(?!\s+as)": "say what the number is: the maximum time, the delay in seconds",
    r",\s+[f]or\s+(?:it|they|he|she|we|there|nothing|otherwise)": "because",
    r"(?:[t]akes?|[t]ook|[t]aken|[t]aking)\s+(?:(?:it|them|a\s+run|the\s+run|runs)\s+)?up(?!\s+to)": "claims, resumes",
    r"(?:[g]oes|[w]ent|[g]one|[g]oing)\s+on": "continues",
    r"[i]t\s+is\s+(?:looked|said|waited)": "say who does it: the pump checks, the run waits",
}
WORST = {re.compile(rf"\b{word}\b", re.IGNORECASE): instead for word, instead in SAY.items()}
IDIOMS = {re.compile(rf"\b{word}\b", re.IGNORECASE): instead for word, instead in IDIOMATIC.items()}

SOURCES_MOST = 37
"""How often the sources contain the worst words. Lower it when there are fewer; it is never raised."""
SOURCES_IDIOMS_MOST = 14
"""The same for the idioms."""

CODE = re.compile(r"^[ ]*```.*?^[ ]*```|`(?:(?!\n\n)[^`])*`", re.MULTILINE | re.DOTALL)
"""Blocks and spans of code. They may quote what people say."""


def pages() -> list[Path]:
    """Return the pages that people read. The changelog stays as it was written."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """Return a page without its code; each line keeps its number."""
    return CODE.sub(lambda code: "\n" * code.group().count("\n"), text)


def word_violations(source: Source, words: dict[re.Pattern[str], str]) -> list[str]:
    """Return where a text has one of the words, each with what to write in its place."""
    return [
        source.at(source.text.count("\n", 0, found.start()) + 1, f"{found.group()!r}: {instead}")
        for word, instead in words.items()
        for found in word.finditer(source.text)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_none_of_the_worst_words(page: Path) -> None:
    text = Source(page.relative_to(ROOT).as_posix(), prose(page.read_text("utf-8")))
    violations = word_violations(text, WORST | IDIOMS)
    assert not violations, report(violations)


@pytest.mark.parametrize(
    ("words", "most"), [(WORST, SOURCES_MOST), (IDIOMS, SOURCES_IDIOMS_MOST)], ids=["words", "idioms"]
)
def test_the_sources_have_no_more_of_them_than_before(words: dict[re.Pattern[str], str], most: int) -> None:
    sources = (*modules(), *statements())
    violations = [violation for source in sources for violation in word_violations(source, words)]
    assert len(violations) <= most, f"{len(violations)} of {most}:{report(violations)}"


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
    assert any(word_violations(Source("README.md", one), WORST) for one in whole)


@pytest.mark.parametrize(
    "text",
    [
        "The row {}tands in the table.",
        "It waits {}o long.",
        "It is refused, {}or it is damaged.",
        "A worker {}akes the run up.",
        "The run {}oes on.",
        "{}t is looked for.",
    ],
)
def test_one_of_the_idioms_is_found(text: str) -> None:
    assert any(word_violations(Source("README.md", text.format(letter)), IDIOMS) for letter in "sftgI")


@pytest.mark.parametrize("text", ["a {}tand-in", "a process that {}tands still", "as {}o long as", "steps, {}or a run"])
def test_the_same_words_in_another_sense_are_left_alone(text: str) -> None:
    assert not any(word_violations(Source("README.md", text.format(letter)), IDIOMS) for letter in "sf")


@pytest.mark.parametrize("text", ["`{}obody`", "```python\n# {}obody\n```\n", "test_{}obody_waits", "somebodys_else"])
def test_code_and_names_are_left_alone(text: str) -> None:
    assert not word_violations(Source("README.md", prose(text.format("n"))), WORST)


def test_a_line_keeps_its_number() -> None:
    (found,) = word_violations(Source("README.md", prose("a\n```text\nb\n```\n{}obody\n".format("n"))), WORST)
    assert found.startswith("README.md:5: ")
