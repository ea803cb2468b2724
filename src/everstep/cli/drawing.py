"""Timelines in the terminal: one row for each step, timer, signal and child, with a bar over time."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from everstep.cli.terminal import add_fitted, arguments_text, clean, shortened, styled
from everstep.model.secrets import HIDDEN
from everstep.model.status import STATUSES
from everstep.view.timeline import Row
from everstep.view.words import between, error_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MARKS: Final = {
    "completed": ("✓", "green"),
    "failed": ("✗", "red"),
    "cancelled": ("⊘", "yellow"),
    "dropped": ("·", "dim"),
    "open": ("▸", "cyan"),
}
UNDONE: Final = {"wanted": "to be undone", "compensated": "undone", "skipped": "not undone, a person decided"}
COMPRESSED_FROM: Final = 10_000_000
"""Shorter runs (microseconds) are drawn to scale, however long they wait."""
ROWS_FIRST: Final = 100
ROWS_BETWEEN: Final = 200
ROWS_LAST: Final = 200
"""The number of last rows that are always drawn of a run with many rows."""
NAME_CHARACTERS_MAX: Final = 28
ARGUMENTS_CHARACTERS_MAX: Final = 32
_FIRST_TEXT: Final = re.compile(r'\[\["((?:[^"\\]|\\.)*)"')
WAITING: Final = {
    "timer": ("◷", "blue"),
    "signal": ("✉", "magenta"),
    "approval": ("☐", "magenta"),
    "request": ("?", "magenta"),
    "child": ("▸", "cyan"),
}
STYLES: Final = {"completed": "green", "failed": "red", "crashed": "green", "cancelled": "yellow", "open": "cyan"}
STATUS_STYLES: Final = {
    "queued": "blue",
    "running": "cyan",
    "waiting": "magenta",
    "held": "bold yellow",
    "completed": "green",
    "failed": "bold red",
    "cancelled": "yellow",
}


class Scale:
    """Maps time to columns. When most of a run is one long wait, longer times are drawn shorter and the axis says
    so.
    """

    def __init__(self, times: list[int], width: int) -> None:
        self.width = width
        points = sorted(set(times)) or [0]
        steps = [after - before for before, after in pairwise(points)]
        total = sum(steps) or 1
        self.is_compressed = len(steps) > 2 and max(steps) > 0.6 * total > 0.6 * COMPRESSED_FROM
        weights = [step**0.5 for step in steps] if self.is_compressed else [float(step) for step in steps]
        whole = sum(weights) or 1.0
        self._points, self._columns = points, [0.0]
        for weight in weights:
            self._columns.append(self._columns[-1] + weight / whole * (width - 1))

    def column(self, at: int) -> int:
        """Return the column of a time."""
        import bisect

        index = bisect.bisect_right(self._points, at) - 1
        if index < 0:
            return 0
        if index >= len(self._points) - 1:
            return self.width - 1
        before, after = self._points[index], self._points[index + 1]
        share = (at - before) / (after - before)
        low, high = self._columns[index], self._columns[index + 1]
        return min(self.width - 1, round(low + share * (high - low)))


def times_of(rows: Sequence[Row], started_at: int, now: int) -> list[int]:
    """Return every time at which something in a timeline begins or ends."""
    times = [started_at, now]
    for row in rows:
        times += [row.started_at, row.ended_at or now]
        times += [at for attempt in row.attempts for at in (attempt.started_at, attempt.ended_at) if at]
    return times


def draw_timeline(every: list[Row], started_at: int, *, now: int, width: int, most: int = 0) -> "RenderableType":
    """Return the timeline as a table as wide as the terminal. With `most`, only so many of the newest rows."""
    from rich.console import Group
    from rich.table import Table

    rows = every[-most:] if most else abridged(every)
    names = min(max([len(row.name) for row in rows] + [12]), NAME_CHARACTERS_MAX)
    bar = max(20, min(56, width - names - 56))
    scale = Scale(times_of(every, started_at, now), bar)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim", pad_edge=False)
    table.add_column("", width=1, no_wrap=True)
    table.add_column("step", width=names, no_wrap=True)
    table.add_column("contract", no_wrap=True)
    table.add_column(axis(bar, between(started_at, now), compressed=scale.is_compressed), width=bar, no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    cells = [cells_of(row, scale, now) for row in rows]
    add_fitted(table, cells, width)
    hidden = len(every) - len(rows)
    if hidden and most:
        return Group(styled(f"  … {hidden} earlier rows", "dim"), table)
    if hidden:
        return Group(
            table, styled(f"  … and {hidden} more that just completed; `everstep history` has them all", "dim")
        )
    return table


def abridged(rows: list[Row]) -> list[Row]:
    """Return the rows that a person needs of very many: the first and last, and those that did not simply complete."""
    if len(rows) <= ROWS_FIRST + ROWS_LAST:
        return rows
    middle = [row for row in rows[ROWS_FIRST:-ROWS_LAST] if not _just_completed(row)]
    return [*rows[:ROWS_FIRST], *middle[-ROWS_BETWEEN:], *rows[-ROWS_LAST:]]


def _just_completed(row: Row) -> bool:
    is_plain = row.kind != "note" and len(row.attempts) <= 1
    return is_plain and row.state == "completed" and not (row.crashes or row.error or row.undone or row.undoes)


def axis(width: int, length: str, *, compressed: bool) -> "Text":
    """Return the heading of the bars: the beginning and the end of the time."""
    end = f"{length} (compressed)" if compressed else length
    return styled("0" + end.rjust(width - 1), "dim")


def cells_of(row: Row, scale: Scale, now: int) -> list["Text"]:
    """Return the cells of one row."""
    mark, style = ("↩", "yellow") if row.undone == "compensated" else MARKS[row.state]
    if row.state == "open" and row.kind in WAITING:
        mark, style = WAITING[row.kind]
    kind = {
        "timer": "timer",
        "signal": "signal",
        "request": "request",
        "approval": "approval",
        "child": "child",
        "note": "",
    }.get(row.kind, row.effect)
    name_style = "" if row.kind == "step" else "bold" if row.kind == "note" else "dim"
    took = "" if row.kind == "note" else between(row.started_at, row.ended_at or now)
    name = styled(shortened(row.name, NAME_CHARACTERS_MAX), name_style)
    time = styled(took, "dim" if row.state != "open" else "cyan")
    return [styled(mark, style), name, styled(kind, "dim"), bar_of(row, scale, now), time, remark_of(row)]


def bar_of(row: Row, scale: Scale, now: int) -> "Text":
    """Return a row's bar: solid while it worked, dotted while it waited, a cross where it was cut off."""
    cells: list[tuple[str, str]] = [(" ", "")] * scale.width

    def fill(start: int, end: int, character: str, style: str) -> None:
        for column in range(scale.column(start), scale.column(end) + 1):
            cells[column] = (character, style)

    if row.kind == "note":
        cells[scale.column(row.started_at)] = ("◆", MARKS[row.state][1])
    elif row.kind != "step":
        style = WAITING[row.kind][1] if row.state == "open" else "dim"
        fill(row.started_at, row.ended_at or now, "┄" if row.kind != "child" else "━", style)
    else:
        _fill_attempts(row, fill, now)
    return _joined(cells)


def _fill_attempts(row: Row, fill: Callable[[int, int, str, str], None], now: int) -> None:
    began = row.attempts[0].started_at if row.attempts else row.ended_at or now
    if began > row.started_at:  # until then another step had its key, or its budget had no room
        fill(row.started_at, began, "┄", "dim")
    if not row.attempts:
        return
    for attempt, following in zip(row.attempts, [*row.attempts[1:], None], strict=True):
        end = attempt.ended_at or now
        if following is not None or attempt.due:
            fill(end, following.started_at if following else now, "┄", "dim")
        fill(attempt.started_at, end, "━", STYLES[attempt.outcome])
        if attempt.outcome in ("crashed", "failed"):
            fill(end, end, "╳", "bold red")


def _joined(cells: list[tuple[str, str]]) -> "Text":
    from rich.text import Text

    text = Text()
    for character, style in cells:
        text.append(character, style=style)
    return text


def remark_of(row: Row) -> "Text":
    """Return the notable facts about a row: crashes, attempts, errors, values."""
    parts: list[tuple[str, str]] = []
    if row.crashes:
        parts.append((f"killed {times(row.crashes)}", "bold red"))
    failed = sum(1 for attempt in row.attempts if attempt.outcome == "failed")
    if len(row.attempts) > 1:
        parts.append((f"{len(row.attempts)} attempts", "yellow" if failed else "dim"))
    if row.error:
        parts.append((error_line(row.error), "red"))
    elif row.state == "open" and row.attempts and row.attempts[-1].error:
        parts.append((error_line(row.attempts[-1].error), "red"))
    if row.undoes:
        parts.append((f"undoes {row.undoes}", "yellow"))
    if row.undone:
        parts.append((UNDONE[row.undone], "yellow"))
    if row.charged:
        parts.append((row.charged, "dim"))
    if row.note:
        parts.append((row.note, "dim" if row.kind != "note" else ""))
    if file := file_of(row):
        parts.append((file, ""))
    elif row.state == "completed" and row.value and row.kind != "note":
        parts.append((f"{given_to(row)}→ {row.value}", "dim"))
    from rich.text import Text

    text = Text()
    for part, style in parts:
        text.append(" · " if text else "", style="dim").append(shortened(clean(part), 120), style=style)
    return text


def given_to(row: Row) -> str:
    """Return the arguments of a step in brackets, shortened, and "" for anything else."""
    if row.kind != "step" or row.arguments in ("", HIDDEN):
        return ""
    return f"({shortened(arguments_text(row.arguments), ARGUMENTS_CHARACTERS_MAX)}) "


def file_of(row: Row) -> str:
    """Return the file of a file effect, and "" for any other row. The preview of its arguments may be cut off after
    it.
    """
    found = _FIRST_TEXT.match(row.arguments) if row.name.startswith("files.") else None
    return found.group(1) if found else ""


def times(count: int) -> str:
    """Return how often, in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the number of runs in each status, and of damaged ones without a valid status."""
    known = [f"{counts[status]} {status}" for status in STATUSES if counts.get(status)]
    damaged = sum(count for status, count in counts.items() if status not in STATUSES)
    return ", ".join([*known, *([f"{damaged} damaged, without a status"] if damaged else [])])


def status_text(status: str) -> "Text":
    """Return a status in its colour."""
    return styled(status, STATUS_STYLES.get(status, ""))
