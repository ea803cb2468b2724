"""Checkpointers of LangGraph side by side, ours and the stock ones, on SQLite and on PostgreSQL, in one go.

    .venv-bench/bin/python benchmarks/savers.py            all of it, in about five minutes: part of `make bench`
    .venv-bench/bin/python benchmarks/savers.py --quick    a tenth of it, once; nothing is kept

It ends with status 1 if a bar is not cleared; the quick figures only show.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from chart import Bar, Panel, picture
from judging import Findings, Verdict, judge
from measuring import HERE, ROOT, Figures, bytes_in, empty_folder, measure
from place import OWN_BYTES
from plan import Limit, Ratio
from report import Table, bars, origin, table, versions
from server import Server, started

DATABASES = {"SQLite": "langgraph-checkpoint-sqlite", "PostgreSQL": "langgraph-checkpoint-postgres"}
"""With the stock saver of each."""
SAVERS = ("everstep", "stock")
STEPS, LONG, APPENDED = 1_000, 10_000, 800
ROUNDS = 3
SECONDS_MAX = 180.0

TITLE = "Checkpointers of LangGraph"
PACKAGES = ("everstep", "langgraph", *DATABASES.values())
RATIOS = tuple(
    Ratio(f"steps a second on {database}: the stock one", f"everstep {database}", (f"stock {database}",), 1)
    for database in DATABASES
)
LIMITS = (
    Limit(f"{APPENDED} steps that append 1 KB, on SQLite", "everstep SQLite bytes", 5, "MB", 1e-6),
    *(
        Limit(f"these beside their first half, on {database}", f"everstep {database} growth", 2.2, "×")
        for database in DATABASES
    ),
)


class Place:
    """Where one saver keeps its threads: a folder and, on PostgreSQL, a database."""

    def __init__(self, folder: Path, server: Server | None, database: str) -> None:
        self._folder, self._server, self._database = folder, server, database

    def measure(self, name: str, steps: int) -> Figures:
        """Make a measurement of so many steps here."""
        variables = {"BENCH_STEPS": str(steps)}
        if self._server is not None:
            variables["BENCH_POSTGRES"] = self._server.uri(self._database)
        return measure("with_savers.py", name, self._folder, seconds_max=SECONDS_MAX, **variables)

    def bytes(self) -> int:
        """Return what is kept here."""
        if self._server is None:
            return bytes_in(self._folder)
        return int(self._server.ask(OWN_BYTES, database=self._database)[0][0])


@contextmanager
def empty_place(server: Server | None) -> Iterator[Place]:
    with empty_folder() as folder:
        if server is None:
            yield Place(folder, None, "")
        else:
            with server.database() as database:
                yield Place(folder, server, database)


class Savers:
    """All measurements on one database; the savers take turns."""

    def __init__(self, findings: Findings, database: str, server: Server | None, part: int, rounds: int) -> None:
        self._findings, self._database, self._server = findings, database, server
        self._part, self._rounds = part, rounds

    def run(self) -> None:
        for _ in range(self._rounds):
            for saver in SAVERS:
                self.steps(saver)
        self.resumes()
        for saver in SAVERS:
            self.appended(saver)

    def steps(self, saver: str) -> None:
        with empty_place(self._server) as place:
            found = place.measure(f"{saver}-steps", STEPS // self._part)
        self._findings.add_rate(f"{saver} {self._database}", saver, found)
        self.say(saver, f"{found['rate']:,.0f} steps/s")

    def resumes(self) -> None:
        """Make a long thread with each, then let new processes go on with it, in turn."""
        steps = LONG // self._part
        with empty_place(self._server) as ours, empty_place(self._server) as theirs:
            places = dict(zip(SAVERS, (ours, theirs), strict=True))
            for saver, place in places.items():
                found = place.measure(f"{saver}-steps", steps)
                self.say(saver, f"a thread of {steps:,} steps, {found['rate']:,.0f} steps/s")
            for number in range(self._rounds):
                for saver, place in places.items():
                    began = time.time()
                    seconds = place.measure(f"{saver}-more", steps + number)["ended"] - began
                    self._findings.add(f"{saver} {self._database} resume", seconds)
                    self.say(saver, f"one more step after {seconds:.2f} s")

    def appended(self, saver: str) -> None:
        """Half of the steps and all of them, each in an empty place."""
        sizes = []
        for steps in (APPENDED // self._part // 2, APPENDED // self._part):
            with empty_place(self._server) as place:
                rate = place.measure(f"{saver}-append", steps)["rate"]
                sizes.append(place.bytes())
            self.say(saver, f"{steps} steps that append 1 KB: {sizes[-1] / 1e6:.1f} MB, {rate:,.0f} steps/s")
        self._findings.add(f"{saver} {self._database} bytes", sizes[1])
        self._findings.add(f"{saver} {self._database} growth", sizes[1] / sizes[0])
        self._findings.add(f"{saver} {self._database} appending", rate)

    def say(self, saver: str, text: str) -> None:
        print(f"{self._database}, {saver}: {text}", file=sys.stderr, flush=True)


LINES = (
    (f"steps a second, {STEPS:,} steps of a small state", "", "{:,.0f}", 1.0),
    ("median of such a step", " p50_milliseconds", "{:.2f} ms", 1.0),
    (f"a new process has done step {LONG + 1:,} of a thread, from its start", " resume", "{:.2f} s", 1.0),
    (f"on the disk after {APPENDED} steps that append 1 KB to a list", " bytes", "{:,.1f} MB", 1e-6),
    ("as many times what half of these steps take", " growth", "{:.1f}", 1.0),
    ("steps a second of these", " appending", "{:,.0f}", 1.0),
)


def figures_table(findings: Findings, database: str) -> str:
    """Return what was measured on one database."""
    lines: Table = [["", "`EverstepSaver`", f"`{DATABASES[database]}`"]]
    for text, name, form, scale in LINES:
        keys = [f"{saver} {database}{name}" for saver in SAVERS]
        found = [findings.figure(key) if name else findings.rate(key) for key in keys]
        lines.append([text, *("" if one is None else form.format(one * scale) for one in found)])
    return f"## {database}\n\n{table(lines)}"


def page(findings: Findings, verdicts: list[Verdict], minutes: float) -> str:
    """Return the whole report in Markdown."""
    said = 'Each step is saved before the next one begins (`durability="sync"`), and each commit waits for the disk.'
    return "\n\n".join(
        [
            f"# {TITLE}",
            f"{origin(minutes, 'make bench')}\n{said}",
            versions(PACKAGES),
            *(figures_table(findings, database) for database in DATABASES),
            f"## Bars\n\n{bars(verdicts)}\n",
        ]
    )


def panels(findings: Findings) -> list[Panel]:
    """Return the questions that a reader has first, for each database."""
    questions = (
        ("Steps a second", f"{STEPS:,} steps, each saved before the next; more is better", "", "{:,.0f}", 1.0),
        ("On the disk", f"{APPENDED} steps that append 1 KB; less is better", " bytes", "{:,.1f} MB", 1e-6),
    )
    found = []
    for title, subtitle, name, form, scale in questions:
        for database in DATABASES:
            keys = {
                label: f"{saver} {database}{name}" for saver, label in zip(SAVERS, ("Everstep", "stock"), strict=True)
            }
            values = {
                label: ((findings.figure(key) if name else findings.rate(key)) or 0) * scale
                for label, key in keys.items()
            }
            bars = [Bar(label, value, form.format(value)) for label, value in values.items()]
            found.append(Panel(f"{title}, {database}", subtitle, bars))
    return found


def main() -> int:
    """Measure, print the page, and keep it and its picture if everything was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of it, once; nothing is kept")
    quick = parser.parse_args().quick
    part, rounds = (10, 1) if quick else (1, ROUNDS)
    findings, began = Findings(), time.monotonic()
    Savers(findings, "SQLite", None, part, rounds).run()
    with started() as server:
        Savers(findings, "PostgreSQL", server, part, rounds).run()
    verdicts = judge(findings, RATIOS, LIMITS)
    text = page(findings, verdicts, (time.monotonic() - began) / 60)
    print(text)
    if quick:
        return 0
    (HERE / "results" / "savers.md").write_text(text, "utf-8")
    (HERE / "results" / "savers.json").write_text(json.dumps(asdict(findings), indent=1) + "\n", "utf-8")
    (ROOT / "docs" / "pictures" / "savers.svg").write_text(picture(TITLE, panels(findings)), "utf-8")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
