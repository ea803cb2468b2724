"""Stored bytes never become code, and SQL is static: it lives in `.sql` files, where it can be read as a whole."""

import ast
import re

import pytest

from tests.house.sources import Source, modules, report

CODE_LOADERS = frozenset({"cloudpickle", "dill", "jsonpickle", "marshal", "pickle", "shelve"})
CODE_RUNNERS = frozenset({"__import__", "eval", "exec"})

# These rooms handle what is stored, so nothing there may be imported by a name that is computed.
ROOMS_WITHOUT_IMPORT_BY_NAME = ("model/", "codec/", "stores/", "effects/", "engine/", "web/")

HARMLESS: dict[tuple[str, str], str] = {
    ("codec/exceptions.py", "import_module"): "the module comes from a closed table of the standard library's errors",
}
"""File and name to the reason why it turns no data into code."""

SQL = re.compile(
    r"\s*(?:"
    r"(?:SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER|REPLACE|WITH)\s"
    r"|(?i:select\s.*\sfrom\s|insert\s+(?:or\s+\w+\s+)?into\s|update\s+\w+\s+set\s|delete\s+from\s|replace\s+into\s"
    r"|create\s+(?:unique\s+|temp\s+)?(?:table|index|view|trigger)\s|drop\s+(?:table|index)\s|alter\s+table\s"
    r"|with\s+(?:recursive\s+)?\w+(?:\s*\([^)]*\))?\s+as\s*\()"
    r")",
    re.DOTALL,
)


def code_violations(source: Source) -> list[str]:
    """Return what could turn data into code."""
    found = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                bad = [alias.name for alias in names if alias.name.split(".")[0] in CODE_LOADERS]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in CODE_LOADERS:
                bad = [module]
            case ast.Name(id=name) if name in CODE_RUNNERS:
                bad = [name]
            case ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in CODE_RUNNERS:
                bad = [name]
            case ast.Name(id="import_module") | ast.Attribute(attr="import_module"):
                bad = ["import_module"] if source.path.startswith(ROOMS_WITHOUT_IMPORT_BY_NAME) else []
            case _:
                bad = []
        bad = [name for name in bad if (source.path, name) not in HARMLESS]
        found += [source.at(getattr(node, "lineno", 1), f"{name} can turn data into code") for name in bad]
    return found


def sql_violations(source: Source) -> list[str]:
    """Return strings that are SQL, docstrings aside."""
    return [
        source.at(line, f"SQL lives in .sql files: {text.strip()[:40]!r}")
        for line, text, is_docstring in source.strings()
        if not is_docstring and SQL.match(text)
    ]


def test_nothing_turns_data_into_code() -> None:
    violations = [violation for source in modules() for violation in code_violations(source)]
    assert not violations, report(violations)


def test_sql_lives_in_sql_files() -> None:
    violations = [violation for source in modules() for violation in sql_violations(source)]
    assert not violations, report(violations)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import json, marshal as m",
        "def f():\n    from pickle import loads",
        "import shelve",
        "value = eval(text)",
        "run = exec",
        "builtins.eval(text)",
        "__import__(name)",
        "importlib.import_module(name)",
    ],
)
def test_what_turns_data_into_code_is_found(code: str) -> None:
    assert code_violations(Source("codec/x.py", code))


def test_what_is_harmless_in_one_file_is_found_in_another() -> None:
    for path, name in HARMLESS:
        assert not code_violations(Source(path, f"importlib.{name}(x)"))
        assert code_violations(Source("codec/other.py", f"importlib.{name}(x)"))


def test_the_command_line_may_import_a_user_s_module_by_name() -> None:
    assert not code_violations(Source("cli/x.py", "importlib.import_module(name)"))


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "select id from runs where id = ?",
        "\n    INSERT INTO runs VALUES (?)",
        "insert or ignore into runs values (?)",
        "update runs set status = ?",
        "DELETE FROM runs",
        "create table runs (id text)",
        "with recursive tree(id) as (select 1) values (1)",
    ],
)
def test_sql_in_a_module_is_found(text: str) -> None:
    assert sql_violations(Source("stores/sqlite/x.py", f"QUERY = {text!r}"))


def test_sql_put_together_from_parts_is_found() -> None:
    assert sql_violations(Source("stores/sqlite/x.py", "query = f'UPDATE {table} SET x = 1'"))


@pytest.mark.parametrize("text", ["Update the run", "select a run", "with a note", "create a run", "BEGIN IMMEDIATE"])
def test_a_sentence_is_not_sql(text: str) -> None:
    assert not sql_violations(Source("cli/x.py", f"HELP = {text!r}"))


def test_a_docstring_may_show_sql() -> None:
    assert not sql_violations(Source("cli/x.py", '"""SELECT is what a witness runs."""'))


# -- files -------------------------------------------------------------------------------------------------------------
MAKES_FILES: dict[str, str] = {
    "model/own_files.py": "the one place where files are made",
    "effects/files.py": "what a user wants to be written, with the same flags",
    "stores/sqlite/opening.py": "a new store is created with O_EXCL",
    "stores/sqlite/liveness.py": "the file of locks is looked at through its descriptor",
    "testing/ledger_process.py": "a program that stands alone, with the same flags",
    "cli/demo/agent.py": "a program for users to look at",
    "testing/crash_trial.py": "a given folder is copied into a new one: `copytree` fails if that is there",
}
"""Where files are made, and why not by `everstep.model.own_files`."""


OPENS_TO_WRITE = frozenset({"O_CREAT", "O_WRONLY", "O_RDWR", "O_APPEND", "O_TRUNC"})
COPIES = frozenset({"copy", "copy2", "copyfile", "copytree", "move"})
"""The functions of `shutil` that write files. (`copyfileobj` takes open ones.)"""


def _writes(mode: object) -> bool:
    """Tell whether a mode of `open` writes. A text of other letters is a name, as an app or an archive opens one."""
    return isinstance(mode, str) and set(mode) <= set("rwaxbtU+") and bool(set(mode) & set("wax+"))


def _modes(call: ast.Call, place: int) -> list[object]:
    """Return the mode that a call of `open` says, at its place or by its name."""
    said = [*call.args[place : place + 1], *(one.value for one in call.keywords if one.arg == "mode")]
    return [one.value for one in said if isinstance(one, ast.Constant)]


def file_violations(source: Source) -> list[str]:
    """Return what would follow a stranger's link, or write into a stranger's file."""
    if source.path in MAKES_FILES:
        return []
    found = []
    harmless: set[ast.AST] = set()
    for node in ast.walk(source.tree):  # a call comes before its arguments
        match node:
            case ast.Call(func=ast.Attribute(attr="write_text" | "write_bytes" | "touch")):
                bad = True
            case ast.Call(func=ast.Name(id="open"), args=[ast.Call(func=ast.Name(id="append_to")), *_]):
                bad = False  # of a descriptor
            case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Attribute(attr="devnull"), *flags]):
                bad = False  # it is the machine's
                harmless |= {part for flag in flags for part in ast.walk(flag)}
            case ast.Call(func=ast.Name(id="open") | ast.Attribute(value=ast.Name(id="io"), attr="open")):
                bad = any(map(_writes, _modes(node, 1)))
            case ast.Call(func=ast.Attribute(attr="open")):
                bad = any(map(_writes, _modes(node, 0)))
            case ast.Attribute(value=ast.Name(id="shutil"), attr=name) if name in COPIES:
                bad = True
            case ast.ImportFrom(module="shutil", names=names):
                bad = any(one.name in COPIES for one in names)
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in OPENS_TO_WRITE:
                bad = node not in harmless
            case _:
                bad = False
        if bad:
            hint = "files are made by everstep.model.own_files: others may write in the folder"
            found.append(source.at(getattr(node, "lineno", 1), hint))
    return found


def test_files_are_made_in_one_place() -> None:
    violations = [violation for source in modules() for violation in file_violations(source)]
    assert not violations, report(violations)
    assert all(MAKES_FILES.values())


@pytest.mark.parametrize(
    "code",
    [
        "path.write_text('x')",
        "path.write_bytes(b'')",
        "open(path, 'a')",
        "open(path, 'wb')",
        "open(path, mode='r+')",
        "open(str(path), 'w')",
        "io.open(path, 'w')",
        "path.open('w')",
        "Path(folder, name).open(mode='ab', buffering=0)",
        "shutil.copy(here, there)",
        "shutil.copyfile(here, there)",
        "copies = shutil.copytree",
        "from shutil import copy2",
        "shutil.move(here, there)",
        "os.open(p, os.O_CREAT)",
        "os.open(path, os.O_WRONLY)",
        "os.open(path, os.O_RDWR | os.O_CLOEXEC)",
        "flags = os.O_WRONLY | os.O_TRUNC",
    ],
)
def test_making_a_file_is_found(code: str) -> None:
    assert file_violations(Source("engine/x.py", code))
    assert not file_violations(Source("model/own_files.py", code))


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "open(path, 'rb')",
        "open(append_to(path), 'ab')",
        "path.open('rb')",
        "path.open()",
        "tarfile.open('runs.tar')",
        "app.open(where)",
        "os.open(path, os.O_RDONLY)",
        "os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)",
        "shutil.copyfileobj(stream, other)",
        "shutil.rmtree(folder)",
        "from shutil import which",
    ],
)
def test_reading_a_file_is_fine(code: str) -> None:
    assert not file_violations(Source("engine/x.py", code))
