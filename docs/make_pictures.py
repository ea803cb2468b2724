"""Take the pictures of the terminal that the documentation shows: python docs/make_pictures.py

Each is made from what commands really print: workflows of `examples` run in processes, one of which is killed. Times
and keys are other ones each time, so the pictures change when they are taken again.
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

DOCS: Final = Path(__file__).resolve().parent
EXAMPLES: Final = DOCS.parent / "examples"
COLUMNS: Final = 116
ORDER: Final = [str(EXAMPLES / "order.py"), '"lamp"', '"ann"', "120"]

# Colours that can be read on light and on dark, as in the picture of the benchmarks.
THEME: Final = TerminalTheme(
    (28, 32, 38),
    (222, 226, 232),
    [
        *((28, 32, 38), (232, 93, 86), (64, 186, 140), (222, 174, 84)),
        *((104, 152, 232), (190, 130, 220), (74, 184, 196), (222, 226, 232)),
    ],
)
FRAME: Final = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
<rect fill="#1c2026" x="0" y="0" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def main() -> None:
    """Take all pictures."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        everstep(folder, "run", *ORDER, "--id", "order-1", EVERSTEP_CRASH_AT="body.after:2")
        everstep(folder, "run", *ORDER, "--id", "order-1")
        take("show", "$ everstep show order-1", everstep(folder, "show", "order-1"))
    with TemporaryDirectory() as name:
        said = everstep(Path(name), "crashtest", *ORDER, "--most", "4")
        take("crashtest", """$ everstep crashtest order.py '"lamp"' '"ann"' 120""", said)
    with TemporaryDirectory() as name:
        draw_graph(Path(name), DOCS / "pictures" / "graph.svg")


def draw_graph(folder: Path, picture: Path) -> None:
    """Let the example of a graph run, say yes when it asks, and draw what happened."""
    words = [sys.executable, "-m", "everstep", "run", str(EXAMPLES / "graph_review.py"), '{"topic": "tides"}']
    with subprocess.Popen([*words, "--id", "review-1"], cwd=folder, stdout=DEVNULL, stderr=DEVNULL) as process:
        while '"what"' not in everstep(folder, "approvals", "--json"):
            time.sleep(0.1)
        everstep(folder, "approve", "review-1", "true")
        process.wait()
    everstep(folder, "show", "review-1", "--svg", str(picture))


def everstep(folder: Path, *words: str, **settings: str) -> str:
    """Return what a command prints for a person."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "everstep", *words]
    environment = {**os.environ, "TERM": "xterm-256color", **settings}
    said = b""
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL):
        os.close(theirs)
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:
            pass  # the last process has closed its end
    os.close(ours)
    return said.decode().replace("\r\n", "\n").replace(str(folder), "~")


def take(name: str, command: str, said: str) -> None:
    """Draw what was printed."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text(command, style="bold"))
        console.print(Text.from_ansi(said.strip("\n")), soft_wrap=True)
        picture = console.export_svg(title="", theme=THEME, code_format=FRAME, unique_id=f"terminal-{name}")
    (DOCS / "pictures" / f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
