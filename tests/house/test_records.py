"""Decisions are numbered, complete and short; the changelog knows the version."""

import re
import tomllib

import pytest

from tests.house.sources import ROOT, Source, report

DECISIONS = ROOT / "docs" / "decisions"
SECTIONS = ("## Context", "## Decision", "## Consequences")
LINES_MAX = 80


def decision_violations(source: Source) -> list[str]:
    """Return what a decision's record lacks."""
    found = []
    number = re.match(r"(\d{4})-[a-z0-9-]+\.md$", source.path)
    if number is None:
        found.append(source.at(1, "a decision is named NNNN-words.md"))
    elif not source.text.startswith(f"# {number.group(1)} "):
        found.append(source.at(1, f"it begins with its number: # {number.group(1)} …"))
    found += [
        source.at(1, f"it has no section {section!r}") for section in SECTIONS if f"\n{section}\n" not in source.text
    ]
    if len(source.text.splitlines()) > LINES_MAX:
        found.append(source.at(1, f"it is longer than {LINES_MAX} lines"))
    return found


def numbering_violations(names: list[str]) -> list[str]:
    """Return the first number that is missing or used twice."""
    expected = [f"{n:04}" for n in range(1, len(names) + 1)]
    return [
        f"{name}: expected {number}" for name, number in zip(sorted(names), expected, strict=True) if name[:4] != number
    ]


def records() -> list[Source]:
    return [Source(path.name, path.read_text("utf-8")) for path in sorted(DECISIONS.glob("[0-9]*.md"))]


def test_each_decision_is_complete() -> None:
    violations = [violation for source in records() for violation in decision_violations(source)]
    assert not violations, report(violations)


def test_decisions_are_numbered_without_gaps() -> None:
    violations = numbering_violations([source.path for source in records()])
    assert not violations, report(violations)


def test_the_changelog_has_the_package_s_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("one.md", "# 0001 X\n\n## Context\n\n## Decision\n\n## Consequences\n"),
        ("0001-x.md", "# X\n\n## Context\n\n## Decision\n\n## Consequences\n"),
        ("0001-x.md", "# 0001 X\n\n## Context\n\n## Decision\n"),
        ("0001-x.md", "# 0001 X\n\n## Context\n\n## Decision\n\n## Consequences\n" + "\n" * LINES_MAX),
    ],
)
def test_an_incomplete_decision_is_found(path: str, text: str) -> None:
    assert decision_violations(Source(path, text))


@pytest.mark.parametrize("names", [["0001-a.md", "0003-b.md"], ["0001-a.md", "0001-b.md"], ["0002-a.md"]])
def test_a_gap_in_the_numbers_is_found(names: list[str]) -> None:
    assert numbering_violations(names)
