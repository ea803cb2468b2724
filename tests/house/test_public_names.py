"""Every public name says what it is, where `help()` looks."""

import inspect
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import everstep
from tests.house.sources import report


def undocumented(name: str, thing: Any) -> list[str]:
    """Return the names without a docstring: of the thing, and of the public methods that its class defines itself."""
    if inspect.isclass(thing):
        missing = [] if _has_own_docstring(thing) else [name]
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and _is_method(value) and not inspect.getdoc(_function(value)):
                missing.append(f"{name}.{attribute}")
        return missing
    if callable(thing) or isinstance(thing, ModuleType):
        return [] if (getattr(thing, "__doc__", None) or "").strip() else [name]
    return []  # a constant cannot carry one


def _has_own_docstring(cls: type) -> bool:
    text = (vars(cls).get("__doc__") or "").strip()
    return bool(text) and not text.startswith(f"{cls.__name__}(")  # what dataclass and NamedTuple write by themselves


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def surface_violations(names: Mapping[str, Any]) -> list[str]:
    """Return everything undocumented among the exported names."""
    return [missing for name, thing in names.items() for missing in undocumented(name, thing)]


def test_every_exported_name_exists_and_is_documented() -> None:
    exported = getattr(everstep, "__all__", [])
    missing = [name for name in exported if not hasattr(everstep, name)]
    assert not missing, report(missing)
    violations = surface_violations({name: getattr(everstep, name) for name in exported})
    assert not violations, report(violations)


def test_a_name_without_a_docstring_is_found() -> None:
    class Documented:
        """It has one."""

        def silent(self) -> None: ...

        @property
        def quiet(self) -> int:
            return 1

        def _private(self) -> None: ...

    class Inherits(Documented):
        pass

    def function() -> None: ...

    module = ModuleType("empty")
    names = {"Documented": Documented, "Inherits": Inherits, "function": function, "module": module, "VERSION": "1"}
    assert surface_violations(names) == [
        "Documented.silent",
        "Documented.quiet",
        "Inherits",
        "function",
        "module",
    ]
    assert not surface_violations(vars(SimpleNamespace(VERSION="1")))
