"""What `import everstep` shows: its public names, and the signatures of what its decorators return."""

import inspect
from typing import Any

import pytest

import everstep
from everstep import step, tool, workflow
from everstep.errors import Misuse
from everstep.testing.skipping import skipping_app


def function(city: str, days: int = 3) -> list[str]:
    """Return the forecast."""
    return [city] * days


@pytest.mark.parametrize(
    "decorated", [step(function), tool(function), tool(approval=True)(function), workflow(function)]
)
def test_what_is_decorated_keeps_its_signature_name_and_text(decorated: Any) -> None:
    assert inspect.signature(decorated) == inspect.signature(function)
    assert (decorated.__name__, decorated.__doc__, decorated.__wrapped__) == ("function", function.__doc__, function)


def test_dir_lists_the_public_names_only() -> None:
    assert dir(everstep) == sorted([*everstep.__all__, "__version__"])
    assert all(getattr(everstep, name) is not None for name in dir(everstep))


@step
def tell() -> tuple[Any, ...]:
    return tuple(everstep.current())


@workflow
def tells() -> list[Any]:
    return [list(everstep.current()), list(tell()), list(tell())]


def test_current_says_where_the_code_is() -> None:
    with skipping_app() as app:
        assert app.run(tells, id="r") == [
            ["r", "tells", "", 0, None],
            ["r", "tells", "tell", 1, None],
            ["r", "tells", "tell#2", 1, None],
        ]
    with pytest.raises(Misuse, match="inside a run"):
        everstep.current()
