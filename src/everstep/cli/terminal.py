"""Output for the terminal: harmless text, JSON, durations and times.

Payloads are written by agents and other strangers. Their text never reaches the terminal as it is: control characters
and escape codes become visible escapes, and nothing is interpreted as markup.
"""

import functools
import json
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from everstep.codec.preview import harmless, without_internals

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPE_WIDTH: Final = 160
"""The width of lines that no terminal limits."""
LAST_COLUMN_LEAST: Final = 10
"""The minimum width of a table's last column, also if the terminal is too narrow for the whole table."""
ROWS_AT_ONCE: Final = 200
LATEST: Final = 250_000_000_000
"""Seconds since 1970. A damaged time beyond this (the year 9892) is shown as this one."""
_UNPRINTABLE: Final = re.compile(r"[^\n\x20-\x7e]")


def console(*, err: bool = False) -> "Console":
    """Return a console that interprets no text as markup."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return _console_class()(file=stream, markup=False, emoji=False, highlight=False, width=width, soft_wrap=False)


@functools.cache
def _console_class() -> "type[Console]":
    from rich.console import Console
    from rich.text import Text

    class WholeLines(Console):
        """Leaves the breaking of lines to the terminal, because a broken command could not be pasted."""

        def print(self, *objects: Any, **options: Any) -> None:
            if len(objects) == 1 and isinstance(objects[0], str | Text):
                options.setdefault("soft_wrap", True)
            super().print(*objects, **options)

        def on_broken_pipe(self) -> None:
            """Handle a closed pipe: the reader of our output has gone, and the command line decides the exit status."""
            raise BrokenPipeError

    return WholeLines


def to_paste(line: str) -> "Text":
    """Return a command on a line of its own that is never broken, for output with `crop=False`."""
    from rich.text import Text

    return Text(f"  {clean(line)}", style="bold", no_wrap=True, overflow="ignore")


def clean(text: object) -> str:
    """Return text as one harmless line."""
    return harmless(str(text))


def clean_lines(text: object) -> str:
    """Return text as harmless lines."""
    return "\n".join(harmless(line) for line in str(text).split("\n"))


def styled(text: object, style: str = "") -> "Text":
    """Return harmless text in a style."""
    from rich.text import Text

    return Text(clean_lines(text), style=style)


def shortened(text: str, most: int) -> str:
    """Return text of at most `most` characters."""
    return text if len(text) <= most else f"{text[: max(most - 1, 0)]}…"


def json_text(value: Any, *, indent: int = 2) -> str:
    """Return a value as JSON that is safe to print: control characters are escaped.

    An `indent` below zero gives one line.
    """
    try:
        encoded = msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    except OverflowError:  # a number of more than 64 bits
        plain = msgspec.to_builtins(value)
        compact = (",", ":") if indent < 0 else None
        encoded = json.dumps(plain, indent=None if indent < 0 else indent, ensure_ascii=False, separators=compact)
    return _UNPRINTABLE.sub(_visible, encoded)


def _visible(match: "re.Match[str]") -> str:
    character = match.group()
    return character if character.isprintable() else json.dumps(character)[1:-1]


def say_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json_text(value))


def say_json_line(value: Any) -> None:
    """Print a value as one line of JSON, at once."""
    click.echo(json_text(value, indent=-1))
    sys.stdout.flush()


def local_time(at: int) -> datetime:
    """Return a time in microseconds since 1970 in this machine's time zone."""
    return datetime.fromtimestamp(min(max(at / 1e6, 0), LATEST), UTC).astimezone()


def clock_time(at: int) -> str:
    """Return the time of day of an event."""
    return f"{local_time(at):%H:%M:%S}"


def moment(at: int, now: int) -> str:
    """Return a time: the time of day if it is near, with the date if not."""
    near = abs(at - now) < 12 * 3600 * 1_000_000
    return f"{local_time(at):%H:%M:%S}" if near else f"{local_time(at):%Y-%m-%d %H:%M}"


def arguments_text(preview: str) -> str:
    """Return the arguments of a call, as between its brackets, from the preview of their payload."""
    preview = without_internals(preview)
    try:
        stored = msgspec.json.decode(preview)[0]
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError):
        text = preview.removeprefix("[[")  # the preview was cut off
        return f"{text}…" if len(preview) > 100 else text
    named = stored.get("kwargs", {}) if isinstance(stored, dict) else {}
    placed = stored.get("args", []) if isinstance(stored, dict) else stored
    if not isinstance(placed, list) or not isinstance(named, dict):
        return preview
    texts = [json_text(value, indent=-1) for value in placed]
    return ", ".join(texts + [f"{name}={json_text(value, indent=-1)}" for name, value in named.items()])


def add_fitted(table: "Table", rows: "list[list[Text]]", width: int) -> None:
    """Add rows to a table so that its last column takes the rest of the line, and the other columns are not cut."""
    if not rows:
        return
    widths = [max([cell.cell_len for cell in cells]) for cells in zip(*rows, strict=True)]
    heads = [column.width or len(str(column.header)) for column in table.columns]
    used = sum(max(pair) + 2 for pair in zip(widths[:-1], heads[:-1], strict=True))
    if used + LAST_COLUMN_LEAST > width:
        table.width = used + LAST_COLUMN_LEAST  # the terminal breaks the lines instead of cutting them
    for row in rows:
        row[-1].truncate(max(width - used, LAST_COLUMN_LEAST), overflow="ellipsis")
        table.add_row(*row)


def print_rows(out: "Console", heads: "tuple[str, ...]", rows: "list[list[Text]]", *, right: frozenset[str]) -> None:
    """Print rows under their heads, fitted as by `add_fitted`. Twenty thousand rows take a second; a table would
    take many.
    """
    from rich.text import Text

    columns = [*zip([Text(head, style="dim") for head in heads], *rows, strict=True)]
    widths = [max(cell.cell_len for cell in cells) for cells in columns]
    room = max(out.width - sum(widths[:-1]) - 2 * (len(widths) - 1), LAST_COLUMN_LEAST)
    for start in range(0, len(rows) + 1, ROWS_AT_ONCE):
        chunk = Text()
        for cells in zip(*(cells[start : start + ROWS_AT_ONCE] for cells in columns), strict=True):
            for head, width, cell in zip(heads[:-1], widths[:-1], cells[:-1], strict=True):
                padding = " " * (width - cell.cell_len)
                chunk.append(padding if head in right else "").append_text(cell)
                chunk.append("  " if head in right else f"{padding}  ")
            cells[-1].truncate(room, overflow="ellipsis")
            chunk.append_text(cells[-1]).append("\n")
        out.print(chunk, soft_wrap=True, end="")
