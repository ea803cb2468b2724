"""The page with the figures, the same in the terminal and in the folder `results`."""

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version

from judging import Findings, Verdict
from plan import IMPORTS, Plan

Table = list[list[str]]

W2_NOTE = "In W2 no run begins after 12 seconds; the rate is that of the runs done until then."


def page(findings: Findings, verdicts: list[Verdict], minutes: float, plan: Plan) -> str:
    """Return the whole report in Markdown."""
    parts = [
        f"# {plan.title}",
        "\n".join([origin(minutes, plan.command), W2_NOTE, *plan.notes]),
        versions(plan.packages),
        table([["", "asked of its own connection"], *([name, text] for name, text in findings.settings.items())]),
        *(
            f"## {name}\n\n{text}\n\n{throughput(findings, name, plan)}"
            for name, text in measured_workloads(findings, plan)
        ),
    ]
    if any(key.startswith("W5") for key in findings.figures):
        parts.append(f"## Going on after a kill\n\n{resumes(findings, plan)}")
        parts.append(f"## W4\n\n{halves(findings, plan)}")
        parts.append(f"## What it takes\n\n{stored(findings, plan)}")
    if "full cpu" in findings.figures:
        parts.append(f"## Standing still\n\n{idle(findings)}")
    if any(key.startswith("claim ") for key in findings.figures):
        parts.append(f"## Workers\n\n{claims(findings)}")
    parts.append(f"## Latency of one sequential step\n\n{latencies(findings, plan)}")
    parts.append(f"## Bars\n\nAgainst the best of the ways in which the other can be called.\n\n{bars(verdicts)}")
    parts += [f"Note: {note}" for note in findings.notes]
    return "\n\n".join(parts) + "\n"


def origin(minutes: float, command: str) -> str:
    """Return when, where and how the figures were made."""
    return (
        f"Made by `{command}` on {datetime.now(UTC):%Y-%m-%d}, in {minutes:.1f} minutes, on {machine()}.\n"
        "Each figure is a median; each measurement is a process of its own, and the systems take turns.\n"
        "Absolute figures hold only for that machine and hour: compare within this page."
    )


def versions(packages: Iterable[str]) -> str:
    """Return what was measured, to the release."""
    return "Versions: " + ", ".join(f"{name} {version(name)}" for name in packages) + "."


def machine() -> str:
    """Return what kind of machine this is, and nothing that names it."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def measured_workloads(findings: Findings, plan: Plan) -> list[tuple[str, str]]:
    keys = {row.workload for row in plan.rows if row.key in findings.rates}
    return [(name, text) for name, text in plan.workloads.items() if name in keys]


def throughput(findings: Findings, workload: str, plan: Plan) -> str:
    """Return one workload's table, the fastest first."""
    rows = [row for row in plan.rows if row.workload == workload and row.key in findings.rates]
    rows.sort(key=lambda row: -(findings.rate(row.key) or 0))
    lines: Table = [["system", "how", "median", "from", "to", "measured"]]
    for row in rows:
        rates = findings.rates[row.key]
        figures = [f"{findings.rate(row.key):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", how_often(len(rates))]
        lines.append([row.system, row.variant, *figures])
    return table(lines)


def resumes(findings: Findings, plan: Plan) -> str:
    """Return the table of resumes and imports."""
    lines: Table = [["system", "W5: after 10,000 steps", "after 5 steps", "its import alone"]]
    for system in plan.resumes:
        long, short, load = (findings.figure(f"{what} {system}") for what in ("W5", "resume", "import"))
        lines.append([system, *(f"{1000 * one:,.0f} ms" if one is not None else "" for one in (long, short, load))])
    said = "From the start of the process until the next step's body runs."
    if "import Everstep" in findings.figures:
        said += f" Imports: {', '.join(f'`{modules}`' for modules in IMPORTS.values())}."
    else:
        lines = [line[:-1] for line in lines]
    return f"{said}\n\n{table(lines)}"


def halves(findings: Findings, plan: Plan) -> str:
    """Return the table of W4."""
    lines: Table = [["system", "until all are done", "measured"]]
    for system in plan.halves:
        seconds = findings.figure(f"W4 {system}")
        if seconds is not None:
            count = len(findings.figures[f"W4 {system}"])
            lines.append([system, f"{seconds:.2f} s", how_often(count)])
    said = "1,000 runs of ten steps, killed when each has done five; from process start until all are completed."
    return f"{said}\n\n{table(lines)}"


def stored(findings: Findings, plan: Plan) -> str:
    """Return the table of what lies on the disk, and of memory."""
    lines: Table = [["system", "bytes for a step of W1", "bytes for a step of W3", "memory in W2, at most"]]
    for system, (small, large, memory) in plan.stored.items():
        figures = [findings.figure(f"{key} step_bytes") for key in (small, large)]
        peak = findings.figure(f"{memory} peak_megabytes")
        lines.append(
            [
                system,
                *("" if one is None else f"{one:,.0f}" for one in figures),
                "" if peak is None else f"{peak:.0f} MB",
            ]
        )
    said = table(lines)
    conversation = findings.figure("conversation")
    if conversation is not None:
        said += f"\n\nA conversation of 500 turns of 2 KB, all of it the argument of every step: {conversation:.1f} MB."
    if any(key.endswith(" wal_bytes") for key in findings.figures):
        said += "\n\n" + logged(findings, plan)
    return said


def logged(findings: Findings, plan: Plan) -> str:
    """Return the table of what the server does for a step."""
    lines: Table = [["system", "bytes of log for a step of W1", "for a step of W3", "commits for a step of W1"]]
    for system, (small, large, _) in plan.stored.items():
        figures = [findings.figure(f"{key} wal_bytes") for key in (small, large)]
        commits = findings.figure(f"{small} step_commits")
        texts = ["" if one is None else f"{one:,.0f}" for one in figures]
        lines.append([system, *texts, "" if commits is None else f"{commits:.1f}"])
    said = "The server's log (WAL) is written before the tables, and is what replicas and archives get."
    return f"{said}\n\n{table(lines)}\n\n{processor_time(findings)}"


def processor_time(findings: Findings) -> str:
    """Return the table of CPU times of Everstep, which are what one core carries, turned over."""
    lines: Table = [["Everstep", "CPU of the worker for a step", "CPU of the server for a step"]]
    for label, key in (("W1, a commit for each step", "w1-repeat"), ("W2, many runs at once", "w2-async")):
        both = [findings.figure(f"everstep {key} {name}_microseconds") for name in ("cpu", "server")]
        lines.append([label, *("" if one is None else f"{one:.0f} µs" for one in both)])
    return table(lines)


def claims(findings: Findings) -> str:
    """Return the table of claims beside finished runs, and what is said of workers."""
    lines: Table = [["finished runs in the store", "found and claimed in", "from the start of a run to its first body"]]
    for key in findings.figures:
        if key.startswith("claim "):
            count = int(key.removeprefix("claim "))
            claim, body = findings.figure(key), findings.figure(f"body {count}")
            lines.append([f"{count:,}", f"{1000 * (claim or 0):.2f} ms", f"{1000 * (body or 0):.1f} ms"])
    parts = ["Medians. The run is started by one process and driven by another.\n\n" + table(lines)]
    if (statements := findings.figure("idle statements")) is not None:
        connections = findings.figure("idle connections") or 0
        parts.append(
            f"An idle worker has {connections:.0f} connections and sends {statements:.2f} statements a second."
        )
    if failovers := findings.figures.get("failover"):
        middle, most = findings.figure("failover"), max(failovers)
        parts.append(
            f"From `kill -9` of a worker until another one does the next step of its run: {middle:.2f} s "
            f"(median of {len(failovers)}; the longest took {most:.2f} s)."
        )
    return "\n\n".join(parts)


def how_often(count: int) -> str:
    """Return how many times something was measured."""
    return f"{count} times" if count > 1 else "once"


def idle(findings: Findings) -> str:
    """Return the table of workers that have nothing to do."""
    lines: Table = [["an idle worker of Everstep", "memory", "CPU in 10 s"]]
    for label, key in (("in an empty store", "empty"), ("in a store with 100,000 waiting runs", "full")):
        megabytes, cpu = findings.figure(f"{key} megabytes"), findings.figure(f"{key} cpu")
        if megabytes is not None and cpu is not None:
            lines.append([label, f"{megabytes:.1f} MB", f"{cpu:.3f} s"])
    return table(lines)


def latencies(findings: Findings, plan: Plan) -> str:
    """Return how long a commit takes, bare and as a step."""
    lines: Table = [["", "median", "99 of 100 are below"]]
    for label, key in (("a bare commit", plan.floors[0]), ("a step of Everstep, body to body", "everstep w1-repeat")):
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
