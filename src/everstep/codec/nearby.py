"""Classes of exceptions that code has near it: in its own modules, and in the packages that these have imported.

A stored exception of such a class comes back as itself. Nothing is imported and no attribute is asked for by a stored
name: the name is looked up in the namespaces of modules that are loaded already and that the code can reach.
"""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any, Final

from everstep.model.untrusted import attempted, bases_of, is_a

DEPTH: Final = 3
"""How many imports may be between the code and a module whose package counts as near."""
MODULES_MAX: Final = 1_000
"""The maximum number of modules that are searched for what they have imported."""
_NAMESPACE: Final = type.__dict__["__dict__"].__get__
_CLOSED: Final = frozenset({"everstep", *sys.stdlib_module_names}) - {"__main__"}
"""Packages that are not searched for what they have imported."""


class Nearby:
    """The modules of some functions, and the packages that they can reach."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules: Final = tuple(dict.fromkeys(modules))
        self._packages: frozenset[str] = frozenset()
        self._looked_at: tuple[int, ...] = ()

    def name_of(self, cls: type) -> tuple[str, str] | None:
        """Return the module and the name under which a class is found here, or None.

        The module is empty for a class of the code's own modules: a script's is `__main__` in one process and has its
        file's name in another.
        """
        module, name = _own_module(cls), type.__dict__["__qualname__"].__get__(cls)
        given = ("" if module in self.modules else module, name)
        return given if self.find(*given) is cls else None

    def find(self, module: str, name: str) -> type[Exception] | None:
        """Return the class of this name, if it is near and may be rebuilt from stored data."""
        if module and not self._is_near(module.partition(".")[0]):
            return None
        for place in (module,) if module else self.modules:
            found = _class_in(place, name)
            if found is not None:
                return found
        return None

    def _is_near(self, package: str) -> bool:
        if package in self._packages:
            return True
        sizes = len(sys.modules), *(len(_members(sys.modules.get(one))) for one in self.modules)
        if sizes != self._looked_at:  # something was imported, or defined, since the last search
            self._looked_at = sizes
            self._packages = frozenset(_packages_around(self.modules))
        return package in self._packages


NOTHING: Final = Nearby(())
_CURRENT: ContextVar[Nearby] = ContextVar("everstep_nearby", default=NOTHING)
current: Final = _CURRENT.get
_KNOWN: Final[dict[tuple[str, ...], Nearby]] = {}


@contextmanager
def near(*functions: Callable[..., Any] | None) -> Generator[None]:
    """Let exceptions in this block be stored as, and restored to, classes that are near these functions."""
    modules = tuple(dict.fromkeys(module for one in functions if one is not None and (module := _own_module(one))))
    if modules not in _KNOWN:
        if len(_KNOWN) > 4096:
            _KNOWN.clear()
        _KNOWN[modules] = Nearby(modules)
    token = _CURRENT.set(_KNOWN[modules])
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _class_in(module: str, name: str) -> type[Exception] | None:
    """Return an exception's class by its qualified name in a loaded module, by namespaces only: no code runs."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = _members(found).get(part)
    if not is_a(found, type) or module.partition(".")[0] == "everstep":
        return None
    bases = bases_of(found)
    if Exception not in bases:
        return None
    if any("__del__" in _NAMESPACE(base) for base in bases):
        return None  # its code would run with what was stored
    checked: type[Exception] = found
    return checked


def _members(holder: Any) -> dict[str, Any]:
    """Return the namespace of a module or a class, without asking it for anything."""
    if is_a(holder, ModuleType):
        return dict(object.__getattribute__(holder, "__dict__"))
    return dict(_NAMESPACE(holder)) if is_a(holder, type) else {}


def _own_module(value: Any) -> str:
    """Return the name of the module in which a class, a function or an object's class was defined."""
    if is_a(value, ModuleType):
        found = _members(value).get("__name__")
    elif is_a(value, type):
        found = _NAMESPACE(value).get("__module__")
    elif is_a(value, FunctionType):
        found = value.__module__
    else:  # a step, a partial, a client: a decorated function says where it comes from
        attributes = attempted(object.__getattribute__, value, "__dict__")
        found = attributes.get("__module__") if type(attributes) is dict else None
        found = found or _NAMESPACE(type(value)).get("__module__")
    return found if type(found) is str else ""


def _packages_around(modules: Iterable[str]) -> set[str]:
    """Return the packages that can be reached from some modules by what their names refer to."""
    seen: dict[str, None] = dict.fromkeys(modules)
    level = list(seen)
    for _ in range(DEPTH):
        found: dict[str, None] = {}
        for name in level:
            if name.partition(".")[0] in _CLOSED:
                continue
            for value in list(_members(sys.modules.get(name)).values()):
                other = _own_module(value)
                if other and other not in seen and other in sys.modules:
                    found[other] = None
        level = list(found)[: max(0, MODULES_MAX - len(seen))]
        seen |= dict.fromkeys(level)
    return {name.partition(".")[0] for name in seen} - {"builtins", "everstep"}
