"""The reference is made from the code, so it is never older than the code."""

import importlib.util
import inspect
from types import ModuleType

import everstep
from everstep import errors
from everstep.model.events import BODIES
from tests.docs.pages import ROOT


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
    pages = {path.name for path in (ROOT / "docs" / "reference").iterdir()}
    assert pages == set(make_reference().made_pages())


def test_every_name_event_and_error_is_there() -> None:
    pages = make_reference().made_pages()
    for name in everstep.__all__:
        assert f"### `{name}`" in pages["python.md"]
    for kind in BODIES:
        assert f"## `{kind}`" in pages["events.md"]
    for name, thing in vars(errors).items():
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            assert f"| `{name}` | `{thing.code}` |" in pages["errors.md"]
