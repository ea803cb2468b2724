"""Each planted mistake is named with its line and its remedy, by lint in the same words where it can see it."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from everstep.lint.linting import lint_file
from tests.crashtest import kit

SEEN_BY_LINT = {
    "effect_in_body.py": (['"ann"', "--files", "diary.txt"], "outside"),
    "file_in_body.py": (['"ann"'], "outside"),
    "module_variable.py": (["[3, 4, 5]"], "globals"),
    "set_order.py": ([], "order"),
    "state_in_memory.py": (['"ann"'], "globals"),
    "time_in_arguments.py": (['"tides"'], "clock"),
    "two_effects.py": (['"ann"', "5"], "effects"),
}
"""The file, its arguments, and the rule of lint."""
ONLY_A_CRASH_SHOWS = {
    # The receiver is given the key, and only what it does with it is wrong. Named is the step, a line above its body.
    "keys_ignored.py": (['"ann"', "--files", "outbox.txt"], -1, 'effect="once" with a probe'),
    # The mark and the effect are both right, and only their order is wrong. Named is the effect that is lost.
    "marked_first.py": (['"ann"'], 1, "do the effect first"),
}
"""The file, its arguments, how far from the marked line it is named, and words of the remedy."""
FEW = ("--most", "1", "--orders", "0")
IN_A_SOAK = {
    "file_in_body.py": "what is printed about it is tested in every push",
    "marked_first.py": "two_effects.py loses an effect as well",
    "module_variable.py": "state_in_memory.py ends in another way as well",
    "set_order.py": "the workflow that the marker of the pytest plugin is tested with diverges as well",
    "time_in_arguments.py": "that one makes the same mistake",
}
"""A push kills one program for each way in which a promise can be broken."""


def killed(files: Iterable[str]) -> list[Any]:
    return [pytest.param(one, marks=[pytest.mark.soak] if one in IN_A_SOAK else []) for one in sorted(files)]


def test_each_planted_mistake_has_a_test() -> None:
    assert {path.name for path in kit.BROKEN.glob("*.py")} == {*SEEN_BY_LINT, *ONLY_A_CRASH_SHOWS}


@pytest.mark.parametrize("file", sorted(SEEN_BY_LINT))
def test_lint_names_the_line_of_a_planted_mistake_and_nothing_else(file: str) -> None:
    (found,) = lint_file(str(kit.BROKEN / file))
    assert (found.rule, found.line) == (SEEN_BY_LINT[file][1], kit.line_of_mistake(file))


@pytest.mark.parametrize("file", sorted(ONLY_A_CRASH_SHOWS))
def test_lint_does_not_speak_of_what_only_a_crash_shows(file: str) -> None:
    assert lint_file(str(kit.BROKEN / file)) == []


@pytest.mark.parametrize("file", killed(SEEN_BY_LINT))
def test_a_planted_mistake_is_named_by_crashtest_and_lint_with_the_same_line_and_remedy(
    tmp_path: Path, file: str
) -> None:
    arguments, _ = SEEN_BY_LINT[file]
    (found,) = lint_file(str(kit.BROKEN / file))
    facts = kit.crashtest(tmp_path, str(kit.BROKEN / file), *arguments, *FEW, expect=1)
    assert not facts["holds"]
    named = {(one["place"], one["why"], one["remedy"]) for one in facts["broken"]}
    assert named == {(f"{file}:{found.line}", found.what, found.remedy)}


@pytest.mark.parametrize("file", killed(ONLY_A_CRASH_SHOWS))
def test_a_planted_mistake_that_only_a_crash_shows_is_named_with_its_line_and_remedy(tmp_path: Path, file: str) -> None:
    arguments, offset, words = ONLY_A_CRASH_SHOWS[file]
    facts = kit.crashtest(tmp_path, str(kit.BROKEN / file), *arguments, *FEW, expect=1)
    assert not facts["holds"]
    remedies = {one["place"]: one["remedy"] for one in facts["broken"]}
    assert words in remedies[f"{file}:{kit.line_of_mistake(file) + offset}"]
    assert all(one["why"] for one in facts["broken"])


def test_what_both_print_for_a_person_has_the_same_words(tmp_path: Path) -> None:
    file = kit.BROKEN / "file_in_body.py"
    (found,) = lint_file(str(file))
    words = [f"{file.name}:{found.line}", found.what, found.remedy]
    for command in (["crashtest", str(file), '"ann"'], ["lint", str(file)]):
        done = subprocess.run(
            [sys.executable, "-m", "everstep", *command],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "400"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1, done.stderr
        assert [one for one in words if one not in done.stdout] == [], done.stdout
