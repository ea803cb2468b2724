"""Every link between pages leads somewhere, and every test that a page names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, name_of, pages

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
ALSO = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading in it."""
    broken = []
    for target in LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8") if path else text)):
            broken.append(target)
    return broken


def missing_tests(text: str) -> list[str]:
    """Return the tests that a text names and that do not exist."""
    return [f"{file}::{name}" for file, name in NAMED_TEST.findall(text) if name not in names_in(ROOT / file)]


@cache
def names_in(file: Path) -> set[str]:
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("page", [*pages(), *(ROOT / name for name in ALSO)], ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    assert missing_tests(page.read_text("utf-8")) == []


def test_every_guarantee_names_a_test() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    promises = re.split(r"^## ", text.partition("## What is not promised")[0], flags=re.MULTILINE)[1:]
    assert len(promises) >= 10
    unproved = [promise.splitlines()[0] for promise in promises if not NAMED_TEST.search(promise)]
    assert unproved == []


def test_every_test_of_a_guarantee_says_how_many_trials_it_makes() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    named = [line for line in text.splitlines() if line.startswith("- `tests/")]
    assert [line for line in named if not re.search(r"` · [\d,]+ trials?$", line)] == []


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, todo = set(), [ROOT / "docs" / "index.md", ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        links = (target.partition("#")[0] for target in LINK.findall(page.read_text("utf-8")))
        todo += [(page.parent / path).resolve() for path in links if path and "://" not in path]
    assert [name_of(page) for page in pages() if page not in reached] == []


def test_a_broken_link_and_a_missing_test_are_found() -> None:
    page = ROOT / "docs" / "index.md"
    assert broken_links(page, "[a](nowhere.md) [b](index.md#nowhere) [c](#here)\n\n# Here\n") == [
        "nowhere.md",
        "index.md#nowhere",
    ]
    assert missing_tests("`tests/docs/test_links.py::test_nothing`") == ["tests/docs/test_links.py::test_nothing"]
