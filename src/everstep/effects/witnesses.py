"""Witnesses: facts about the outside that a run remembers, and observes again before it continues.

A witness has a subject (what it is about, as text) and can observe it: the fact is plain data, compared by content and
never by timestamps. Two witnesses with one subject are the same; the newer fact replaces the older.
"""

import fnmatch
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from everstep.errors import Misuse
from everstep.model.durations import Duration
from everstep.model.options import checked_seconds

TEXT_BYTES_MAX: Final = 16 * 1024
"""A text file up to this size is remembered whole, so that a difference can be shown as a diff."""


DESCRIPTORS_OF_SQLITE: Final = 4
"""How many SQLite needs to read a file: those of the file, its journal or log, the log's index, and the folder."""
FOLDER: Final = "folder"
"""Replaces a file's digest where a folder was made."""
Judge = Callable[[Any, Any], Any]
"""Decides what drift means, from the remembered and the new fact."""


class Covered(NamedTuple):
    """What a witness of a folder covers: the files below it that match."""

    folder: str
    pattern: str


class Witness:
    """A fact outside that can be observed.

    `recipe` is how it was made, as plain data, if that is enough to make it again: see `made_again`.
    """

    def __init__(self, subject: str, observe: Callable[[], Any], recipe: Sequence[Any] | None = None) -> None:
        self.subject = subject
        self.observe = observe
        self.recipe = recipe

    @property
    def covered(self) -> Covered | None:
        """For a folder: which files it covers."""
        return Covered(*self.recipe[1:]) if self.recipe is not None and self.recipe[0] == "directory" else None

    def __repr__(self) -> str:
        return f"<witness {self.subject}>"


class Taken:
    """A witness and the fact that the run remembers."""

    __slots__ = ("changes", "ignored", "judge", "on_drift", "payload", "witness")

    def __init__(self, witness: Witness, payload: bytes, on_drift: str, judge: Judge | None = None) -> None:
        self.witness = witness
        self.payload = payload
        self.on_drift = on_drift
        self.judge = judge
        self.changes: dict[str, str | None] = {}
        """For a folder: the run's own changes of files since, by path: the new digest, None if the file is gone."""
        self.ignored = b""
        """The last fact that the judge has called unimportant."""

    def remember(self, payload: bytes) -> None:
        """Replace the remembered fact."""
        self.payload, self.ignored = payload, b""
        self.changes.clear()


def file_fact(data: bytes | None) -> dict[str, Any]:
    """Return the fact about a file: that it does not exist, or its size and digest, and a short text."""
    if data is None:
        return {"exists": False}
    fact: dict[str, Any] = {"exists": True, "bytes": len(data), "digest": hashlib.sha256(data).hexdigest()}
    if len(data) <= TEXT_BYTES_MAX and b"\0" not in data:
        try:
            fact["text"] = data.decode()
        except UnicodeDecodeError:
            pass
    return fact


def read_file(path: str) -> bytes | None:
    """Return a file's content, or None if it does not exist."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def file_subject(path: str) -> str:
    """Return the subject of a file: the same for `a.txt` and `./a.txt`."""
    return f"file:{os.path.normpath(path)}"


def file(path: str | os.PathLike[str]) -> Witness:
    """The content of a file, or that it does not exist."""
    name = os.fspath(path)
    return Witness(file_subject(name), lambda: file_fact(read_file(name)), ("file", name))


def directory(path: str | os.PathLike[str], pattern: str = "**/*") -> Witness:
    """The names and contents of the files below a folder that match a pattern."""
    root = Path(path)

    def observe() -> dict[str, Any]:
        if not root.is_dir():
            return {"exists": False}
        found = sorted(one for one in root.glob(pattern) if one.is_file())
        files = {str(one.relative_to(root)): one for one in found if not one.name.endswith(".everstep")}
        return {"exists": True, "files": {name: _digest_of(one) for name, one in files.items()}}

    return Witness(f"directory:{os.fspath(path)}:{pattern}", observe, ("directory", os.fspath(path), pattern))


def with_changes(fact: dict[str, Any], covered: Covered, changes: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the fact about a folder after the run's own changes of files in it."""
    files, exists = dict(fact.get("files", {})), bool(fact["exists"])
    for path, digest in changes.items():
        name = name_within(path, covered)
        if name is None:
            continue
        exists = exists or digest is not None
        if digest == FOLDER or not _matches(name, covered.pattern):
            continue
        if digest is None:
            files.pop(name, None)
        else:
            files[name] = digest
    return {"exists": True, "files": files} if exists else {"exists": False}


def name_within(path: str, covered: Covered) -> str | None:
    """Return a file's name below a folder, as the folder's witness has it; None if it is elsewhere."""
    beside, last = os.path.split(os.path.abspath(path))
    for place in (os.path.abspath, os.path.realpath):  # its folder may be a link, but a link as the file itself is kept
        name = os.path.relpath(os.path.join(place(beside), last), place(covered.folder))
        if name.split(os.sep)[0] != os.pardir:
            return name
    return None


def _matches(name: str, pattern: str) -> bool:
    """Return True if a name below a folder matches as in `Path.glob`. Files of our own never do."""
    wanted = [part for part in pattern.split("/") if part not in ("", ".")]
    return not name.endswith(".everstep") and _parts_match(name.split(os.sep), wanted)


def _parts_match(parts: list[str], wanted: list[str]) -> bool:
    if not wanted:
        return not parts
    if wanted == ["**"]:
        return sys.version_info >= (3, 13)  # before 3.13 it meant folders only
    if wanted[0] == "**":
        return any(_parts_match(parts[skipped:], wanted[1:]) for skipped in range(len(parts)))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], wanted[0]) and _parts_match(parts[1:], wanted[1:])


def _digest_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sql(database: str | os.PathLike[str] | Callable[[], Any], query: str, *parameters: Any, name: str = "") -> Witness:
    """The rows of a query: of a SQLite file, or with `name=` through a function that returns a DB-API connection."""
    if callable(database):
        if not name:
            raise Misuse("witness.sql with a connection needs name=, under which the run remembers it.")
        return Witness(f"sql:{name}", lambda: _rows(database(), query, parameters))
    path = os.fspath(database)

    def observe() -> Any:
        import sqlite3

        try:
            return _rows(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True), query, parameters)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN:
                _raise_if_refused()
            raise

    given = f" {parameters!r}" if parameters else ""
    return Witness(f"sql:{name or f'{path}:{query}{given}'}", observe, ("sql", name, path, query, *parameters))


def _raise_if_refused() -> None:
    """Raise what the machine says if it refuses descriptors just now: SQLite does not say why it cannot open a file.

    Not by opening that file: to close it would free the locks which this process has on it.
    """
    with ExitStack() as opened:
        for _ in range(DESCRIPTORS_OF_SQLITE):
            opened.enter_context(open(os.devnull, "rb"))


def _rows(connection: Any, query: str, parameters: tuple[Any, ...]) -> list[list[Any]]:
    try:
        cursor = connection.cursor()
        cursor.execute(query, parameters)
        return [list(row) for row in cursor.fetchall()]
    finally:
        connection.close()


def http(url: str, *, header: str = "ETag", json: str = "", timeout: Duration = 30.0) -> Witness:
    """A header of a resource (default its ETag), or with `json="a.b"` a field of its JSON body."""
    seconds = checked_seconds("timeout", timeout, above=True)

    def observe() -> Any:
        import urllib.request
        from json import loads

        with urllib.request.urlopen(url, timeout=seconds) as response:
            if not json:
                if header not in response.headers:  # a missing header would always compare as equal
                    raise Misuse(f"The answer of {url} has no header {header}.")
                return response.headers[header]
            value = loads(response.read())
        for part in json.split("."):
            value = value[int(part)] if isinstance(value, list) else value.get(part)
        return value

    return Witness(f"http:{url}:{json or header}", observe, ("http", url, header, json, seconds))


def env(name: str) -> Witness:
    """The value of an environment variable, or that it is not set."""
    return Witness(f"env:{name}", lambda: os.environ.get(name), ("env", name))


def from_subject(subject: str) -> Witness | None:
    """Return the witness of a subject, if it can be made without the code that took it."""
    kind, _, rest = subject.partition(":")
    if kind == "file":
        return file(rest)
    if kind == "directory":
        path, _, pattern = rest.rpartition(":")
        return directory(path, pattern)
    return env(rest) if kind == "env" else None


def recipe_of(witness: Witness) -> list[Any] | None:
    """Return the recipe of a witness, if it can be stored and made again."""
    recipe = witness.recipe
    if recipe is None or not all(one is None or isinstance(one, str | int | float) for one in recipe):
        return None
    return list(recipe)


def made_again(recipe: Sequence[Any]) -> Witness:
    """Return the witness of a recipe, for a run that continues without the code that made it."""
    kind, *given = recipe
    if kind == "http":
        url, header, field, timeout = given
        return http(url, header=header, json=field, timeout=timeout)
    if kind == "sql":
        name, *rest = given
        return sql(*rest, name=name)
    return {"file": file, "directory": directory, "env": env}[kind](*given)


def value(name: str, function: Callable[[], Any]) -> Witness:
    """The return value of a function, remembered under a name."""
    if inspect.iscoroutinefunction(function):
        raise Misuse(f"witness.value({name!r}, …) is for a `def` function; it is called on a thread.")
    return Witness(f"value:{name}", function)
