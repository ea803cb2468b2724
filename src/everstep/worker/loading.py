"""Loading a user's code: `app.py`, `app.py:report`, `package.module` or `package.module:report`.

The module is imported as `import` would do it, under its own name and with its folder on the path, so that it finds the
modules next to it. Its guard `if __name__ == "__main__":` keeps it from running anything.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from everstep.engine.app.opening import IMPORTING
from everstep.engine.code.workflow import DECLARED, Workflow
from everstep.errors import Misuse, UnknownWorkflow
from everstep.model.untrusted import described, text_of

OURS: Final = str(Path(__file__).resolve().parents[1])


def load_workflow(target: str) -> Workflow:
    """Return the workflow that `app.py:report` names; `app.py` alone will do if it declares only one."""
    place, name = split(target)
    module = load_module(place)
    declared = workflows_of(module)
    if not name:
        if len(declared) == 1:
            return _checked(declared[0])
        listed = ", ".join(f"{place}:{one.name}" for one in declared)
        if not declared:
            raise UnknownWorkflow(f"{place} declares no workflow: put @everstep.workflow on a function in it.")
        raise Misuse(f"{place} declares {len(declared)} workflows. Say which one is meant: {listed}.")
    found = _attribute(module, name)
    if isinstance(found, Workflow):
        return _checked(found)
    for one in declared:
        if one.name == name:
            return _checked(one)
    if found is not None:
        raise Misuse(f"{name} in {place} is not a workflow: put @everstep.workflow on it.")
    listed = ", ".join(one.name for one in declared) or "none"
    raise UnknownWorkflow(f"{place} declares no workflow named {name!r}. Declared there: {listed}.")


def load_all(targets: tuple[str, ...]) -> list[Workflow]:
    """Return every workflow that the given files declare; what follows a colon narrows a file to one of them."""
    found: dict[str, Workflow] = {}
    for target in targets:
        place, name = split(target)
        chosen = [load_workflow(target)] if name else workflows_of(load_module(place))
        if not chosen:
            raise UnknownWorkflow(f"{place} declares no workflow: put @everstep.workflow on a function in it.")
        found |= {one.name: one for one in chosen}
    return [_checked(one) for one in found.values()]


def _checked(workflow: Workflow) -> Workflow:
    DECLARED.named(workflow.name)  # raises if two files declare this name
    return workflow


def split(target: str) -> tuple[str, str]:
    """Return the file or module of a target, and the workflow in it, if it names one."""
    place, colon, name = target.rpartition(":")
    if colon and place and all(part.isidentifier() for part in name.split(".")):
        return place, name
    return target, ""


def load_module(place: str) -> ModuleType:
    """Import a file or a module by its name, and return it."""
    with importing():
        if place.endswith(".py") or os.sep in place or os.path.exists(place):
            return _load_file(Path(place))
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return _imported(place, place)


@contextmanager
def importing() -> Generator[None]:
    """While a user's file is imported, `everstep.run` in it raises an error that shows the guard."""
    before = os.environ.get(IMPORTING)
    os.environ[IMPORTING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[IMPORTING]
        else:
            os.environ[IMPORTING] = before


def _load_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise Misuse(f"{path} is a folder. Name a file in it, such as {path / 'app.py'}.")
    if not path.is_file():
        raise Misuse(f"There is no file {path}.")
    path = path.resolve()
    name, folder = path.stem, path.parent
    while (folder / "__init__.py").is_file():  # a file of a package keeps its full name, for its relative imports
        name, folder = f"{folder.name}.{name}", folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) and Path(str(known.__file__)).resolve() == path:
            return known
        raise Misuse(f"{path.name} has the name of a module that is in use already ({name}). Rename the file.")
    if "." in name:
        return _imported(name, path.name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Misuse(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _explained(error, path.name) from error
    return module


def _imported(name: str, shown: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            raise Misuse(f"There is no module {name!r} here. For a file, write its name with .py.") from None
        raise _explained(error, shown) from error


def _explained(error: BaseException, shown: str) -> BaseException:
    """Return what to raise when a user's file cannot be imported: one message that names the line."""
    if isinstance(error, KeyboardInterrupt):
        return error
    if isinstance(error, Misuse):  # from Everstep, such as a run outside the guard: it says what to do
        place = _their_place(error)
        return Misuse(f"{error}{place}") if place and type(error) is Misuse and ".py:" not in text_of(error) else error
    if isinstance(error, SyntaxError):
        place = f"{os.path.basename(error.filename or shown)}:{error.lineno}"
        return Misuse(f"{shown} cannot be imported: {type(error).__name__}: {error.msg} ({place}).")
    text = described(error)
    return Misuse(f"{shown} cannot be imported: {text}{_their_place(error)}")


def _their_place(error: BaseException) -> str:
    """Return the line of the user's code that an error came from, as a line of its own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    if not frames:
        return ""
    return f"\nin {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line or ''}".rstrip(": ")


def _is_theirs(filename: str) -> bool:
    return not filename.startswith((OURS, "<frozen"))


def workflows_of(module: ModuleType) -> list[Workflow]:
    """Return the workflows that a module declares itself or has imported, in their order, each once."""
    found: dict[int, Workflow] = {}
    for value in vars(module).values():
        if isinstance(value, Workflow):
            found.setdefault(id(value), value)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for member in vars(value).values():
                inner = getattr(member, "__func__", member)
                if isinstance(inner, Workflow):
                    found.setdefault(id(inner), inner)
    own = [one for one in found.values() if one.function.__module__ == module.__name__]
    return own or list(found.values())


def _attribute(module: ModuleType, name: str) -> object:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
