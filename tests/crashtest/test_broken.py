"""Each planted mistake is found, and named with its line and its remedy."""

from pathlib import Path

import pytest

from tests.crashtest import kit

MISTAKES = {
    "effect_in_body.py": (['"ann"', "--files", "diary.txt"], 0, "move this into a step"),
    "file_in_body.py": (['"ann"'], 0, "move this into a step"),
    "marked_first.py": (['"ann"'], 1, "do the effect first"),
    "two_effects.py": (['"ann"', "5"], 0, "give each a step of its own"),
    "keys_ignored.py": (['"ann"', "--files", "outbox.txt"], -1, 'effect="once" with a probe'),
    "set_order.py": ([], 0, "sorted(…)"),
    "time_in_arguments.py": (['"tides"'], 0, "everstep.now()"),
    "module_variable.py": (["[3, 4, 5]"], 0, "return it from a step"),
    "state_in_memory.py": (['"ann"'], 0, "return it from a step"),
}
"""The file, its arguments, how far from the marked line it is named (marked first: the effect that is lost; keys
ignored: the step), and words of the remedy."""


def test_each_planted_mistake_has_a_test() -> None:
    assert {path.name for path in kit.BROKEN.glob("*.py")} == set(MISTAKES)


@pytest.mark.parametrize("file", sorted(MISTAKES))
def test_a_planted_mistake_is_named_with_its_line_and_remedy(tmp_path: Path, file: str) -> None:
    arguments, offset, words = MISTAKES[file]
    facts = kit.crashtest(tmp_path, str(kit.BROKEN / file), *arguments, "--most", "1", "--orders", "0", expect=1)
    assert not facts["holds"]
    line = kit.line_of_mistake(file) + offset
    named = {one["place"] for one in facts["broken"]}
    assert f"{file}:{line}" in named, facts["broken"]
    first = next(one for one in facts["broken"] if one["place"] == f"{file}:{line}")
    assert words in first["remedy"]
    assert first["why"]
