"""Renew what docs/desync.md shows: excerpts of the programs in examples/desync, and what they really print.

    python docs/make_desync.py

Two kinds of comments stand before the blocks that are made. `<!-- code: FILE NAME… -->` takes functions and constants
out of a program. `<!-- session: FOLDER NAME -->` runs the block's own commands, the lines that begin with `$`, one
after the other in a copy of the folder, and puts down what they print. A name that comes again goes on where it was;
`after OTHER` begins where another session of the folder ended. Commands are what a reader types: the processes are
real, and so is the SIGKILL. What is another one each time (ids, keys, times, paths) is replaced, see `settled`.

The picture is drawn here as well. A test runs all of this and compares it with the page.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import everstep

DOCS: Final = Path(__file__).resolve().parent
PAGE: Final = DOCS / "desync.md"
PICTURE: Final = DOCS / "pictures" / "desync.svg"
PROGRAMS: Final = DOCS.parent / "examples" / "desync"
PACKAGE: Final = Path(everstep.__file__).resolve().parents[1]
SECONDS_MAX: Final = 60
IN_PARALLEL: Final = 2

BLOCK: Final = re.compile(r"^<!-- (code|session): (.+?) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# -- what is replaced, because it is another one each time ------------------------------------------------------------
REPLACED: Final[tuple[tuple[str, str], ...]] = (
    (r"\bh[0-9a-f]{10}\b", "h…"),  # the id of a hold
    (r"\d+(\.\d+)? (ms|s) ago", "a moment ago"),
    (r"\d\d:\d\d:\d\d\.\d{3} +\d+(\.\d+)? (ms|s)\b", "…"),  # an event's time, and the time since the one before
    (r" +[━┄╳]+[━┄╳ ]*\d+(\.\d+)? (ms|s)\b", "  ━━━"),  # a bar over time
    (r"\b\d+ events, sound", "… events, sound"),  # how many were written when a commit was cut off
    (r"^(\S*sh: )?(line \d+: )?( *\d+ )?Killed\b.*$", "Killed"),  # each shell has its own words for it
    (r" +$", ""),
)
KEY: Final = re.compile(r"\[([0-9a-f]{8})\]")


def settled(text: str, folder: Path, keys: dict[str, int]) -> str:
    """Return what a command printed without what is another one each time."""
    text = text.replace(f"{folder}/", "./").replace(str(folder), ".")
    for pattern, instead in REPLACED:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return KEY.sub(lambda found: f"[key {keys.setdefault(found.group(1), len(keys) + 1)}]", text).strip("\n")


# -- sessions ---------------------------------------------------------------------------------------------------------
@dataclass
class Session:
    """Commands in a copy of a folder of examples/desync: a list for each block of the page."""

    name: str
    after: str
    blocks: list[list[str]] = field(default_factory=list)
    printed: list[list[tuple[str, str]]] = field(default_factory=list)
    folder: Path = Path()

    @property
    def way(self) -> str:
        """The folder of examples/desync that it begins with a copy of."""
        return self.name.split()[0]

    def output(self) -> str:
        """Return all that was printed."""
        return "\n".join(text for block in self.printed for _, text in block)

    def text(self, block: int) -> str:
        """Return one block as it stands on the page."""
        lines = [line for command, text in self.printed[block] for line in (f"$ {command}", text) if line]
        return "\n".join(lines) + "\n"


def sessions_of(page: str) -> dict[str, Session]:
    """Return the sessions that a page asks for, by name, in its order."""
    found: dict[str, Session] = {}
    for block in BLOCK.finditer(page):
        if block.group(1) == "session":
            name, _, after = block.group(2).partition(" after ")
            session = found.setdefault(name, Session(name, f"{name.split()[0]} {after}" if after else ""))
            session.blocks.append([line[2:] for line in block.group(4).splitlines() if line.startswith("$ ")])
    return found


def play(page: str, place: Path) -> dict[str, Session]:
    """Run all sessions of a page in folders below a place; those of different ways at the same time."""
    sessions = sessions_of(page)
    ways: dict[str, list[Session]] = {}
    for session in sessions.values():
        ways.setdefault(session.way, []).append(session)
    tools = made_tools(place / "bin")

    def play_way(way: list[Session]) -> None:
        for session in way:
            origin = sessions[session.after].folder if session.after else PROGRAMS / session.way
            session.folder = (place / session.name.replace(" ", "-")).resolve()
            shutil.copytree(origin, session.folder, ignore=shutil.ignore_patterns("__pycache__"))
            play_one(session, tools)

    with ThreadPoolExecutor(IN_PARALLEL) as pool:
        list(pool.map(play_way, sorted(ways.values(), key=len, reverse=True)))
    return sessions


def made_tools(folder: Path) -> Path:
    """Make a folder with the `python` and the `everstep` that are meant, whatever else is installed."""
    folder.mkdir(parents=True)
    for name, words in (("python", ""), ("everstep", " -m everstep")):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n', "utf-8")
        tool.chmod(0o755)
    return folder


def environment(tools: Path) -> dict[str, str]:
    """Return the environment of a session: that of a person named ann who has set nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "CRASH_AT"))}
    path = f"{tools}{os.pathsep}{kept.get('PATH', os.defpath)}"
    person = {"LOGNAME": "ann", "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**kept, **person, "PATH": path, "PYTHONPATH": str(PACKAGE)}


def play_one(session: Session, tools: Path) -> None:
    """Run the commands of one session."""
    keys: dict[str, int] = {}
    for block in session.blocks:
        printed = []
        for command in block:
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=session.folder,
                env=environment(tools),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                timeout=SECONDS_MAX,
                check=False,
            )
            text = settled(done.stdout, session.folder, keys)
            if done.returncode in (-9, 137) and not text.endswith("Killed"):
                text = f"{text}\nKilled".strip("\n")
            printed.append((command, text))
        session.printed.append(printed)


# -- excerpts ---------------------------------------------------------------------------------------------------------
def excerpt(path: Path, names: list[str]) -> str:
    """Return functions, classes and constants of a program as they stand there, in the order of their names here."""
    source = path.read_text("utf-8")
    lines = source.splitlines()
    places = {name: place for node in ast.parse(source).body for name, place in named(node)}
    missing = [name for name in names if name not in places]
    if missing:
        raise LookupError(f"{path.name} has no {', '.join(missing)}")
    return "\n\n\n".join("\n".join(lines[slice(*places[name])]) for name in names) + "\n"


def named(node: ast.stmt) -> Iterator[tuple[str, tuple[int, int]]]:
    """Give the names that a statement defines, with its first line (counted from 0) and the one behind its last."""
    assert node.end_lineno is not None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        yield node.name, (first - 1, node.end_lineno)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, (node.lineno - 1, node.end_lineno)


# -- the page ---------------------------------------------------------------------------------------------------------
def made_page(page: str, sessions: dict[str, Session]) -> str:
    """Return the page with all its blocks renewed."""
    seen: dict[str, int] = {}

    def renewed(block: "re.Match[str]") -> str:
        kind, what, language = block.group(1), block.group(2), block.group(3)
        if kind == "code":
            path, *names = what.split()
            text = excerpt(PROGRAMS / path, names)
        else:
            name = what.partition(" after ")[0]
            text = sessions[name].text(seen.setdefault(name, 0))
            seen[name] += 1
        return f"<!-- {kind}: {what} -->\n```{language}\n{text}```"

    return BLOCK.sub(renewed, page)


# -- the picture ------------------------------------------------------------------------------------------------------
WIDTH, HEIGHT = 880, 306
GREY, GREEN, RED, AMBER = "#7a8494", "#0f9d8a", "#d0483e", "#c08a2d"
LEFT, COLUMN = 118, 96
DOT = 15


@dataclass(frozen=True)
class Mark:
    """A dot in a lane: where, what it stands for, in which colour; hollow if it is begun and not done."""

    column: float
    text: str
    colour: str = GREEN
    begun: bool = False


@dataclass(frozen=True)
class Panel:
    """One version of the story: what its record says and what the world has, over time, and how it ends."""

    title: str
    record: tuple[Mark, ...]
    world: tuple[Mark, ...]
    end: str
    colour: str


STORY: Final = (
    Panel(
        "By hand: marked as done",
        (Mark(0, "A"), Mark(1.15, "B"), Mark(2.3, "C", RED)),
        (Mark(0.35, "A"), Mark(1.5, "B"), Mark(4.3, "C", RED, begun=True)),
        "“A, B, C are done”: C is never written",
        RED,
    ),
    Panel(
        "With Everstep: begun, then done",
        (
            *(Mark(0, "A", AMBER, begun=True), Mark(0.7, "A")),
            *(Mark(1.15, "B", AMBER, begun=True), Mark(1.85, "B")),
            *(Mark(2.3, "C", AMBER, begun=True), Mark(4.65, "C")),
        ),
        (Mark(0.35, "A"), Mark(1.5, "B"), Mark(4.3, "C")),
        "C is written, A and B are not touched",
        GREEN,
    ),
)


def picture() -> str:
    """Return the picture of the first way: what the record says and what the world has, over time."""
    parts = [draw(panel, 8 + number * 150) for number, panel in enumerate(STORY)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="Record and world over time, by hand and with Everstep" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw(panel: Panel, top: int) -> str:
    """Return one panel."""
    record, world = top + 52, top + 98
    kill, resume = x_of(2.62), x_of(3.7)
    right = x_of(5)
    parts = [
        label(0, top + 18, panel.title, weight=True),
        label(LEFT - 30, record + 5, "record", anchor="end"),
        label(LEFT - 30, world + 5, "world", anchor="end"),
    ]
    for lane in (record, world):
        parts.append(line(x_of(0) - 26, kill, lane, GREY))
        parts.append(line(resume, right, lane, GREY))
    parts.append(f'<path d="M{kill} {record - 20}V{world + 20}" stroke="{RED}" stroke-width="2"/>')
    parts.append(label(kill, record - 26, "SIGKILL", anchor="middle", colour=RED, weight=True))
    parts.append(f'<path d="M{resume} {record - 20}V{world + 20}" stroke="{GREY}" stroke-dasharray="4 4"/>')
    parts.append(label(resume, record - 26, "resume", anchor="middle"))
    parts += [dot(mark, record) for mark in panel.record] + [dot(mark, world) for mark in panel.world]
    parts.append(label(right + 14, (record + world) // 2 + 5, panel.end, colour=panel.colour, weight=True, wrap=True))
    return "\n".join(parts)


def x_of(column: float) -> int:
    """Return where a column is."""
    return LEFT + round(column * COLUMN)


def line(left: int, right: int, y: int, colour: str) -> str:
    """Return a lane."""
    return f'<path d="M{left} {y}H{right}" stroke="{colour}" stroke-opacity="0.5"/>'


def dot(mark: Mark, y: int) -> str:
    """Return a mark."""
    x = x_of(mark.column)
    fill, text = ("none", mark.colour) if mark.begun else (mark.colour, "#ffffff")
    dashes = ' stroke-dasharray="4 3"' if mark.begun else ""
    circle = f'<circle cx="{x}" cy="{y}" r="{DOT}" fill="{fill}" stroke="{mark.colour}" stroke-width="2"{dashes}/>'
    return circle + label(x, y + 5, mark.text, anchor="middle", colour=text, weight=True)


def label(
    x: int, y: int, text: str, *, anchor: str = "", colour: str = GREY, weight: bool = False, wrap: bool = False
) -> str:
    """Return a text; one that wraps is broken after its colon or comma."""
    shape = (f' text-anchor="{anchor}"' if anchor else "") + (' font-weight="600"' if weight else "")
    if not wrap:
        return f'<text x="{x}" y="{y}" fill="{colour}"{shape}>{text}</text>'
    halves = re.split(r"(?<=[:”]) |(?<=written,) ", text, maxsplit=1)
    rows = [f'<tspan x="{x}" y="{y + 9 * (2 * n + 1 - len(halves))}">{half}</tspan>' for n, half in enumerate(halves)]
    return f'<text fill="{colour}"{shape}>{"".join(rows)}</text>'


def main() -> None:
    """Write what is new or changed."""
    page = PAGE.read_text("utf-8")
    with TemporaryDirectory() as place:
        sessions = play(page, Path(place))
    for path, text in ((PAGE, made_page(page, sessions)), (PICTURE, picture())):
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
