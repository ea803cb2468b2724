"""The page about the architecture: every folder has its sentence, and every file and symbol that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT, blocks

PACKAGE = ROOT / "src" / "everstep"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")

ROOM = re.compile(r"^\| `([\w/]+)/` \| (.+) \|$", re.MULTILINE)
ANSWER = re.compile(r"^\| (.+) \| `([\w/]+\.(?:py|sql))` \| `([\w.]+)` \|$", re.MULTILINE)
PLACE = re.compile(r"([A-Za-z_][\w.]*) \(([\w/]+\.py)\)")
"""How a walk names a symbol and its file, such as `Driver.ring (engine/run/driver.py)`."""
METHOD = re.compile(r"`([A-Z]\w+\.\w+)`")
"""A method that a sentence names without its file."""
STATEMENT = re.compile(r"^-- name: (\w+)", re.MULTILINE)


@cache
def symbols(file: Path) -> frozenset[str]:
    """Return what a module or an SQL file defines, methods with their classes in front."""
    text = file.read_text("utf-8")
    if file.suffix == ".sql":
        return frozenset(STATEMENT.findall(text))
    return frozenset(defined(ast.parse(text).body))


def defined(body: list[ast.stmt]) -> set[str]:
    """Return the names that statements define."""
    found: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found |= {name, *(f"{name}.{inner}" for inner in defined(node.body))}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def missing(places: list[tuple[str, str]]) -> list[str]:
    """Return the symbols that are not where they are said to be."""
    return [
        f"{file}: {symbol}"
        for symbol, file in places
        if not (PACKAGE / file).is_file() or symbol not in symbols(PACKAGE / file)
    ]


def folders() -> set[str]:
    """Return the folders of the package that hold sources."""
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.sql")]
    return {file.parent.relative_to(PACKAGE).as_posix() for file in files} - {"."}


def test_every_folder_has_its_sentence() -> None:
    rooms = dict(ROOM.findall(PAGE))
    assert set(rooms) == folders()
    assert [room for room, sentence in rooms.items() if not sentence.endswith(".")] == []


def test_every_file_at_the_top_is_named() -> None:
    assert [file.name for file in sorted(PACKAGE.glob("*.py")) if f"`{file.name}`" not in PAGE] == []


def test_every_answer_names_a_file_and_a_symbol_that_exist() -> None:
    answers = ANSWER.findall(PAGE.partition("## Where do I change …?")[2])
    assert len(answers) >= 30
    assert len({question for question, _, _ in answers}) == len(answers)
    assert missing([(symbol, file) for _, file, symbol in answers]) == []


def test_every_row_of_the_questions_is_read() -> None:
    rows = [line for line in PAGE.partition("## Where do I change …?")[2].splitlines() if line.startswith("| ")]
    assert [row for row in rows[2:] if not ANSWER.fullmatch(row)] == []


def test_every_step_of_a_walk_is_where_it_is_said_to_be() -> None:
    walks = [places for block in blocks(PAGE) if (places := PLACE.findall(block.text))]
    assert len(walks) == 4
    assert missing([place for walk in walks for place in walk]) == []


def test_every_method_in_a_sentence_exists() -> None:
    known = {name for file in PACKAGE.rglob("*.py") for name in symbols(file)}
    assert [name for name in METHOD.findall(PAGE) if name not in known] == []


def test_what_does_not_exist_is_found() -> None:
    assert (
        missing([("Driver.come_to_rest", "engine/run/driver.py"), ("append_events", "stores/sqlite/queries.sql")]) == []
    )
    assert missing([("Driver.sing", "engine/run/driver.py")]) == ["engine/run/driver.py: Driver.sing"]
    assert missing([("Driver", "engine/nowhere.py")]) == ["engine/nowhere.py: Driver"]
