"""What `everstep show` suggests to paste, and its counts: an example of the value that is waited for."""

import json

import pytest

from everstep.cli.drawing import given_to
from everstep.view.run import example_value
from everstep.view.timeline import Row
from everstep.view.words import counted

EXAMPLES = [
    ("bool", True),
    ("Any", None),
    ("list", []),
    ("list[str]", ["text"]),
    ("dict[str, list[int]]", {"text": [1]}),
    ("tuple[int, ...]", [1]),
    ("tuple[int, str]", [1, "text"]),
    ("Literal['yes', 'no']", "yes"),
    ("None | int", 1),
    ("str | None", "text"),
    ("datetime.date", "2030-01-31"),
    ("Answer", {}),
    ("list[Answer]", [{}]),
    ("not a type at all", {}),
    ("", {}),
]


@pytest.mark.parametrize(("type_text", "value"), EXAMPLES)
def test_a_line_to_paste_has_an_example_of_the_value(type_text: str, value: object) -> None:
    assert json.loads(example_value(type_text)) == value


def test_counts_agree_in_number() -> None:
    assert counted(1, "crash", "crashes") == "1 crash"
    assert counted(2, "crash", "crashes") == "2 crashes"
    assert counted(0, "step") == "0 steps"
    assert counted(5000, "event") == "5,000 events"


def test_a_step_is_shown_with_its_arguments_and_anything_else_without() -> None:
    step = Row(kind="step", name="ask", seq=2, started_at=0, arguments='[["tides",3]]')
    assert given_to(step) == '("tides", 3) ' or given_to(step) == '("tides",3) '
    long = Row(kind="step", name="ask", seq=2, started_at=0, arguments=json.dumps([["x" * 100]]))
    assert len(given_to(long)) <= 36
    assert given_to(Row(kind="timer", name="timer", seq=2, started_at=0)) == ""
