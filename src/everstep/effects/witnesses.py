"""Witnesses: facts about the outside that a run remembers, and observes again before it goes on.

A witness has a subject (what it is about, as text) and can observe it: the fact is plain data, compared by content and
never by timestamps. Two witnesses with one subject are the same; the newer fact replaces the older.
"""

import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from everstep.errors import Misuse

TEXT_BYTES_MAX: Final = 16 * 1024
"""A text file up to this size is remembered whole, so that a difference can be shown as a diff."""


class Witness:
    """Something outside that can be observed.

    `recipe` is how it was made, in plain data, if it can be made again from that: see `made_again`.
    """

    def __init__(self, subject: str, observe: Callable[[], Any], recipe: Sequence[Any] | None = None) -> None:
        self.subject = subject
        self.observe = observe
        self.recipe = recipe

    def __repr__(self) -> str:
        return f"<witness {self.subject}>"


class Taken:
    """A witness and the fact that the run remembers of it."""

    __slots__ = ("on_drift", "payload", "witness")

    def __init__(self, witness: Witness, payload: bytes, on_drift: str) -> None:
        self.witness = witness
        self.payload = payload
        self.on_drift = on_drift


def file_fact(data: bytes | None) -> dict[str, Any]:
    """Return what is remembered of a file: nothing but that it is absent, or its size and digest, and a short text."""
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
    """Return a file's content, or None if it is not there."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def file_subject(path: str) -> str:
    """Return under which subject a file is remembered: the same for `a.txt` and `./a.txt`."""
    return f"file:{os.path.normpath(path)}"


def file(path: str | os.PathLike[str]) -> Witness:
    """The content of a file, or that it is not there."""
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

        return _rows(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True), query, parameters)

    given = f" {parameters!r}" if parameters else ""
    return Witness(f"sql:{name or f'{path}:{query}{given}'}", observe, ("sql", name, path, query, *parameters))


def _rows(connection: Any, query: str, parameters: tuple[Any, ...]) -> list[list[Any]]:
    try:
        cursor = connection.cursor()
        cursor.execute(query, parameters)
        return [list(row) for row in cursor.fetchall()]
    finally:
        connection.close()


def http(url: str, *, header: str = "ETag", json: str = "", timeout: float = 30.0) -> Witness:
    """A header of a resource (default its ETag), or with `json="a.b"` a field of its JSON body."""

    def observe() -> Any:
        import urllib.request
        from json import loads

        with urllib.request.urlopen(url, timeout=timeout) as response:
            if not json:
                if header not in response.headers:  # an absent one would be the same for ever
                    raise Misuse(f"The answer of {url} has no header {header}.")
                return response.headers[header]
            value = loads(response.read())
        for part in json.split("."):
            value = value[int(part)] if isinstance(value, list) else value.get(part)
        return value

    return Witness(f"http:{url}:{json or header}", observe, ("http", url, header, json, timeout))


def env(name: str) -> Witness:
    """The value of an environment variable, or that it is not set."""
    return Witness(f"env:{name}", lambda: os.environ.get(name), ("env", name))


def from_subject(subject: str) -> Witness | None:
    """Return the witness that a subject stands for, as far as it can be made without the code that took it."""
    kind, _, rest = subject.partition(":")
    if kind == "file":
        return file(rest)
    if kind == "directory":
        path, _, pattern = rest.rpartition(":")
        return directory(path, pattern)
    return env(rest) if kind == "env" else None


def made_again(recipe: Sequence[Any]) -> Witness:
    """Return the witness that was made by this recipe: for a run that goes on without the code that made it."""
    kind, *given = recipe
    if kind == "http":
        url, header, field, timeout = given
        return http(url, header=header, json=field, timeout=timeout)
    if kind == "sql":
        name, *rest = given
        return sql(*rest, name=name)
    return {"file": file, "directory": directory, "env": env}[kind](*given)


def value(name: str, function: Callable[[], Any]) -> Witness:
    """Whatever a function returns, remembered under a name."""
    if inspect.iscoroutinefunction(function):
        raise Misuse(f"witness.value({name!r}, …) is for a `def` function; it is called on a thread.")
    return Witness(f"value:{name}", function)
