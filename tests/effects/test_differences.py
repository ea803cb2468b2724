"""A difference with the outside is shown so that a person sees what has changed."""

from typing import Any

import pytest

from everstep.effects.witnesses import file_fact
from everstep.engine.run.drift import readable_difference


def folder(**files: str) -> dict[str, Any]:
    return {"exists": True, "files": {name: content * 20 for name, content in files.items()}}


CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "one row": ([[4, "euro"]], [[5, "cent"]], ["remembered [[4, 'euro']], now [[5, 'cent']]"]),
    "several rows": ([["a", 1], ["b", 2]], [["a", 1], ["b", 3]], [" 'a', 1", "-'b', 2", "+'b', 3"]),
    "rows that came": ([], [["a"], ["b"]], ["+'a'", "+'b'"]),
    "a folder": (folder(a="1", b="2", c="3"), folder(a="1", b="9", d="4"), ["-b  22222", "+b  99999", "-c", "+d"]),
    "a folder that came": ({"exists": False}, folder(a="1"), ["+a  1111"]),
    "a text": (file_fact(b"x\ny\n"), file_fact(b"x\nz\n"), [" x", "-y", "+z"]),
    "the end of a line": (file_fact(b"x\n"), file_fact(b"x"), ["'bytes': 2", "'bytes': 1"]),
    "a value": ("old", None, ["remembered 'old', now None"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_has_changed_is_in_sight(name: str) -> None:
    before, after, parts = CASES[name]
    shown = readable_difference(before, after)
    for part in parts:
        assert part in shown, shown


def test_a_folder_of_many_files_shows_the_one_that_has_changed() -> None:
    many = {f"f{number:04}": f"{number:064}" for number in range(2000)}
    shown = readable_difference({"exists": True, "files": many}, {"exists": True, "files": {**many, "f1234": "x" * 64}})
    assert "-f1234" in shown
    assert "+f1234  xxxx" in shown
    assert len(shown.splitlines()) < 10
