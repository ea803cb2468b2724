"""The versions of frameworks that the package takes are those that its pages name and its tests use."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.oldest import EXTRAS, oldest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_page_names_the_versions_that_are_declared(extra: str) -> None:
    page = (ROOT / "docs" / "integrations" / f"{extra}.md").read_text()
    (supported,) = re.findall(r"^Supported: (.*)$", page, re.MULTILINE)
    for one in oldest(extra):
        name, _, version = one.partition("==")
        major = version.split(".")[0]
        assert re.search(rf"`?{name}`? {re.escape(version)} .*?{major}\.x", supported), f"{one}: {supported}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_tests_use_versions_that_are_declared(extra: str) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for one in oldest(extra):
        name, _, version = one.partition("==")
        used = [int(part) for part in re.findall(r"\d+", pinned[name])]
        least = [int(part) for part in version.split(".")]
        assert least <= used < [least[0] + 1], f"{name}: {pinned[name]}"


def test_whoever_works_on_it_has_the_same_ranges() -> None:
    declared = {one for extra in EXTRAS for one in REQUIREMENTS[extra]}
    names = {re.split("[><=]", one)[0] for one in declared}
    for one in REQUIREMENTS["dev"]:
        assert re.split("[><=]", one)[0] not in names or one in declared, one
