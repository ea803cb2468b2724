"""The reference is made from the code, so it is never older than the code."""

import importlib.util
import inspect
import re
from types import ModuleType

import everstep
from everstep import errors
from everstep.cli.group import MODULES
from everstep.model.events import BODIES
from tests.docs.pages import ROOT, name_of, pages

COMMAND = re.compile(r"(?:`|^)everstep ([a-z]+)", re.MULTILINE)


def make_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says() -> None:
    stale = [
        name
        for name, text in make_reference().made_pages().items()
        if (ROOT / "docs" / "reference" / name).read_text("utf-8") != text
    ]
    assert not stale, f"run: make docs (stale: {', '.join(stale)})"


def test_there_is_no_other_page_in_the_reference() -> None:
    found = {path.name for path in (ROOT / "docs" / "reference").iterdir()}
    assert found == set(make_reference().made_pages())


def test_every_name_event_error_and_command_is_there() -> None:
    made = make_reference().made_pages()
    for name in everstep.__all__:
        assert f"### `{name}`" in made["python.md"]
    for kind in BODIES:
        assert f"## `{kind}`" in made["events.md"]
    for name, thing in vars(errors).items():
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            assert f"| `{name}` | `{thing.code}` |" in made["errors.md"]
    for command in MODULES:
        assert f"### `everstep {command}`" in made["command-line.md"]


def test_no_page_names_a_command_that_does_not_exist() -> None:
    named = {
        (name_of(page), command)
        for page in pages()
        for command in COMMAND.findall(page.read_text("utf-8"))
        if command not in MODULES
    }
    assert not named
