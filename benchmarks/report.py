"""The page with the figures, the same in the terminal and in `results/latest.md`."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version

from judging import Findings, Verdict
from plan import HALVES, IMPORTS, RESUMES, ROWS, STORED, WORKLOADS

Table = list[list[str]]


def page(findings: Findings, verdicts: list[Verdict], minutes: float) -> str:
    """Return the whole report in Markdown."""
    parts = [
        "# Benchmarks",
        origin(minutes),
        "Versions: " + ", ".join(f"{name} {version(name)}" for name in ("everstep", "dbos", "langgraph")) + ".",
        table([["", "asked of its own connection"], *([name, text] for name, text in findings.settings.items())]),
        *(f"## {name}\n\n{text}\n\n{throughput(findings, name)}" for name, text in measured_workloads(findings)),
    ]
    if any(key.startswith("W5") for key in findings.figures):
        parts.append(f"## Going on after a kill\n\n{resumes(findings)}")
        parts.append(f"## W4\n\n{halves(findings)}")
        parts.append(f"## What it takes\n\n{stored(findings)}")
        parts.append(f"## Standing still\n\n{idle(findings)}")
    parts.append(f"## Latency of one sequential step\n\n{latencies(findings)}")
    parts.append(f"## Bars\n\nAgainst the best of the ways in which the other can be called.\n\n{bars(verdicts)}")
    parts += [f"Note: {note}" for note in findings.notes]
    return "\n\n".join(parts) + "\n"


def origin(minutes: float) -> str:
    """Return when, where and how the figures were made."""
    return (
        f"Made by `make bench` on {datetime.now(UTC):%Y-%m-%d}, in {minutes:.1f} minutes, on {machine()}.\n"
        "Each figure is a median; each measurement is a process of its own, and the systems take turns.\n"
        "In W2 no run begins after 12 seconds; the rate is that of the runs done until then.\n"
        "Absolute figures hold only for that machine and hour: compare within this page."
    )


def machine() -> str:
    """Return what kind of machine this is, and nothing that names it."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def measured_workloads(findings: Findings) -> list[tuple[str, str]]:
    keys = {row.workload for row in ROWS if row.key in findings.rates}
    return [(name, text) for name, text in WORKLOADS.items() if name in keys]


def throughput(findings: Findings, workload: str) -> str:
    """Return one workload's table, the fastest first."""
    rows = [row for row in ROWS if row.workload == workload and row.key in findings.rates]
    rows.sort(key=lambda row: -(findings.rate(row.key) or 0))
    lines: Table = [["system", "how", "median", "from", "to", "measured"]]
    for row in rows:
        rates = findings.rates[row.key]
        figures = [f"{findings.rate(row.key):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", f"{len(rates)} times"]
        lines.append([row.system, row.variant, *figures])
    return table(lines)


def resumes(findings: Findings) -> str:
    """Return the table of resumes and imports."""
    lines: Table = [["system", "W5: after 10,000 steps", "after 5 steps", "its import alone"]]
    for system in RESUMES:
        long, short, load = (findings.figure(f"{what} {system}") for what in ("W5", "resume", "import"))
        lines.append([system, *(f"{1000 * one:,.0f} ms" if one is not None else "" for one in (long, short, load))])
    said = f"Imports: {', '.join(f'`{modules}`' for modules in IMPORTS.values())}."
    return "From the start of the process until the next step's body runs. " + said + "\n\n" + table(lines)


def halves(findings: Findings) -> str:
    """Return the table of W4."""
    lines: Table = [["system", "until all are done", "measured"]]
    for system in HALVES:
        seconds = findings.figure(f"W4 {system}")
        if seconds is not None:
            count = len(findings.figures[f"W4 {system}"])
            lines.append([system, f"{seconds:.2f} s", f"{count} times" if count > 1 else "once"])
    said = "1,000 runs of ten steps, killed when each has done five; from process start until all are completed."
    return f"{said}\n\n{table(lines)}"


def stored(findings: Findings) -> str:
    """Return the table of what lies on the disk, and of memory."""
    lines: Table = [["system", "bytes for a step of W1", "bytes for a step of W3", "memory in W2, at most"]]
    for system, (small, large, memory) in STORED.items():
        figures = [findings.figure(f"{key} step_bytes") for key in (small, large)]
        peak = findings.figure(f"{memory} peak_megabytes")
        lines.append(
            [
                system,
                *("" if one is None else f"{one:,.0f}" for one in figures),
                "" if peak is None else f"{peak:.0f} MB",
            ]
        )
    conversation = findings.figure("conversation")
    said = f"\n\nA conversation of 500 turns of 2 KB, all of it the argument of every step: {conversation:.1f} MB."
    return table(lines) + (said if conversation is not None else "")


def idle(findings: Findings) -> str:
    """Return the table of workers that have nothing to do."""
    lines: Table = [["an idle worker of Everstep", "memory", "CPU in 10 s"]]
    for label, key in (("in an empty store", "empty"), ("in a store with 100,000 waiting runs", "full")):
        megabytes, cpu = findings.figure(f"{key} megabytes"), findings.figure(f"{key} cpu")
        if megabytes is not None and cpu is not None:
            lines.append([label, f"{megabytes:.1f} MB", f"{cpu:.3f} s"])
    return table(lines)


def latencies(findings: Findings) -> str:
    """Return how long a commit takes, bare and as a step."""
    lines: Table = [["", "median", "99 of 100 are below"]]
    for label, key in (("a bare commit", "sqlite w1"), ("a step of Everstep, body to body", "everstep w1-repeat")):
        middle, tail = (findings.figure(f"{key} {name}_milliseconds") for name in ("p50", "p99"))
        if middle is not None and tail is not None:
            lines.append([label, f"{middle:.2f} ms", f"{tail:.2f} ms"])
    return table(lines)


def bars(verdicts: list[Verdict]) -> str:
    """Return the bars and how they were met."""
    lines: Table = [["", "bar", "measured", ""]]
    lines += [[one.text, one.bar, one.found, "pass" if one.passed else "FAIL"] for one in verdicts]
    return table(lines)


def table(lines: Table) -> str:
    """Return a Markdown table whose columns also line up as plain text."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    head, *body = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "| " + " | ".join("-" * max(3, width) for width in widths) + " |"
    return "\n".join([head, rule, *body])
