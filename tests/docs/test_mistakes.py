"""Each mistake of mistakes.txt has a message that names the line and says what to do, and docs/mistakes.md shows it."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT


def make_mistakes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_mistakes", ROOT / "docs" / "make_mistakes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_mistakes"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


MAKING = make_mistakes()
ALL = list(MAKING.mistakes())


@pytest.mark.parametrize("mistake", ALL, ids=lambda mistake: mistake.title)
def test_the_message_names_the_line_and_the_remedy(mistake: Any) -> None:
    message = MAKING.make(mistake)
    assert message is not None, "nothing was raised"
    assert message.kind not in ("AttributeError", "RuntimeError", "ExceptionGroup"), message
    assert mistake.remedy in message.text
    assert not mistake.line or message.names(mistake.line), message


def test_there_are_at_least_sixty() -> None:
    assert len(ALL) >= 60
    assert len({mistake.title for mistake in ALL}) == len(ALL)


def test_the_page_is_what_the_programs_raise() -> None:
    assert (ROOT / "docs" / "mistakes.md").read_text("utf-8") == MAKING.page(), "run `make docs`"
