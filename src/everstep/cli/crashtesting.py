"""`everstep crashtest`: kill a workflow at every boundary there is, and compare it with an undisturbed run."""

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import click
import msgspec

from everstep.cli.arguments import decoded_arguments, decoded_json
from everstep.cli.crash_page import page_of
from everstep.cli.durations import Time
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.terminal import clean, console, say_json, shortened, styled
from everstep.model.own_files import refuse_unwritable, replace
from everstep.testing.crash_boundaries import COLUMNS
from everstep.testing.crash_verdict import Broken
from everstep.testing.crashtest import ORDERS, Report, crash_everywhere
from everstep.view.words import duration
from everstep.worker.loading import load_workflow

if TYPE_CHECKING:
    from rich.table import Table

SORTS = ("second kill", "order")
"""Columns of the matrix for trials that are not one kill."""
PROMISES_SHOWN_MAX = 5


@click.command("crashtest")
@click.argument("target", metavar="FILE[:WORKFLOW]")
@click.argument("arguments", nargs=-1, metavar="[[NAME=]JSON]...")
@click.option("--files", multiple=True, metavar="PATTERN", help="Files that must be the same, such as 'out/*.txt'.")
@click.option(
    "--signal", "signals", multiple=True, metavar="NAME=JSON", help="Delivered whenever the run waits for it."
)
@click.option("--approve", "approvals", multiple=True, metavar="WHAT=JSON", help="The answer to an approval.")
@click.option(
    "--ask", "asked", multiple=True, metavar="NAME=JSON", help="A request; those of a name are asked in their order."
)
@click.option("--given", metavar="FOLDER", help="A folder whose content each trial begins with.")
@click.option("--env", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the processes.")
@click.option("--most", type=click.IntRange(1), metavar="N", help="Maximum number of boundaries of each kind.")
@click.option("--orders", type=click.IntRange(0), default=ORDERS, help="Other orders of concurrent steps.")
@click.option("--pace", type=click.FloatRange(1), default=10.0, help="Step bodies sleep for this part of the time.")
@click.option(
    "--seconds", type=Time(bare=True, least=1), default="60s", metavar="TIME", help="How long one process may take."
)
@click.option("--processes", type=click.IntRange(1), default=2, help="How many live at the same time.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write the report as a page.")
@click.option("--json", "in_json", is_flag=True, help="Print JSON.")
def crashtest_command(
    target: str,
    arguments: tuple[str, ...],
    signals: tuple[str, ...],
    approvals: tuple[str, ...],
    asked: tuple[str, ...],
    settings: tuple[str, ...],
    html: str | None,
    in_json: bool,
    **options: Any,
) -> int:
    """Kill a workflow at every boundary there is, and compare it with an undisturbed run.

    A boundary is before and after each durable write, before each line of a step's body, in each wait. For each of
    them a run lives in a process and a folder of its own, is killed there with SIGKILL and resumed in a new process;
    then also that one is killed. The end, published values, declared files, effects in the ledger and the history must
    be those of an undisturbed run. Time is skipped. Exits with 0 when all promises hold, with 1 when one is broken:

    \b
        everstep crashtest app.py:report '"tides"' --files 'out/*.txt' --signal approved=true
    """  # noqa: D301  # click wants the character itself
    workflow = load_workflow(target)
    values, named = decoded_arguments(workflow, arguments)
    options["signals"] = {name: decoded_json(text, f"--signal {name}") for name, text in _pairs(signals, "--signal")}
    options["approvals"] = {
        what: decoded_json(text, f"--approve {what}") for what, text in _pairs(approvals, "--approve")
    }
    options["requests"] = {}
    for name, text in _pairs(asked, "--ask"):
        options["requests"].setdefault(name, []).append(decoded_json(text, f"--ask {name}"))
    options["environment"] = dict(_pairs(settings, "--env"))
    if html is not None:
        refuse_unwritable(html)  # check now, not after minutes of testing
    with ProgressLine(silent=in_json) as progress:
        report = crash_everywhere(workflow, *values, kwargs=named, progress=progress, **options)
    if html is not None:
        replace(html, page_of(report).encode())
    if in_json:
        say_json(report_facts(report))
    else:
        print_report(report, html)
    return EXIT_DONE if report.holds else EXIT_FAILED


def _pairs(texts: tuple[str, ...], option: str) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint=option)
        found.append((name, value))
    return found


def report_facts(report: Report) -> dict[str, Any]:
    """Return a report as plain data."""
    matrix = {
        step or "(run)": {column: cell for column in (*COLUMNS, *SORTS) if (cell := report.cell(step, column))}
        for step in report.steps()
    }
    return {
        "workflow": report.workflow,
        "holds": report.holds,
        "boundaries": report.counted,
        "writes": report.writes,
        "trials": {verdict: report.count(verdict) for verdict in ("kept", "held", "broken", "missed")},
        "seconds": round(report.seconds, 1),
        "model_calls": {"undisturbed": report.model_calls, "again": report.models_again},
        "matrix": matrix,
        "broken": [msgspec.to_builtins(one) for one in report.broken],
        "notes": report.notes,
    }


# -- progress --------------------------------------------------------------------------------------------------------
class ProgressLine:
    """A line with the progress of the test, if there is a terminal."""

    def __init__(self, *, silent: bool) -> None:
        self._status: Any = None
        self._lock = threading.Lock()
        self._silent = silent or not sys.stderr.isatty()

    def __enter__(self) -> Any:
        if not self._silent:
            self._status = console(err=True).status("")
            self._status.start()
        return self.tell

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, what: str, over: int, planned: int) -> None:
        """Print what is being done."""
        if self._status is not None:
            done = f"{over} of {planned} trials, " if planned else ""
            with self._lock:
                self._status.update(styled(f"{done}{shortened(clean(what), 70)}"))


# -- the report ------------------------------------------------------------------------------------------------------
def print_report(report: Report, html: str | None) -> None:
    """Print the matrix, and the broken promises."""
    out = console()
    if report.outcomes:
        out.print(draw_matrix(report))
        out.print()
    for one in report.broken[:PROMISES_SHOWN_MAX]:
        _print_broken(one)
    if len(report.broken) > PROMISES_SHOWN_MAX:
        out.print(styled(f"… and {len(report.broken) - PROMISES_SHOWN_MAX} more", "dim"))
    for note in report.notes:
        out.print(styled(f"· {note}", "yellow"))
    about = f"{report.summary()}, {duration(report.seconds)}"
    if report.holds:
        out.print(styled("✓ ", "bold green").append(f"{clean(report.workflow)}: all promises hold ({about})"))
        if report.model_calls:
            out.print(styled(f"  {report.proof()}"), soft_wrap=True)
    else:
        what = f"{len(report.broken)} promises broken" if len(report.broken) > 1 else "a promise is broken"
        out.print(styled("✗ ", "bold red").append(f"{clean(report.workflow)}: {what} ({about})"))
    if html is not None:
        out.print(styled(f"  written to {os.path.abspath(html)}", "dim"))


def draw_matrix(report: Report) -> "Table":
    """Return step × boundary as a table: how many trials kept all promises, and where one was broken."""
    from rich.table import Table

    columns = [one for one in (*COLUMNS, *SORTS) if any(report.cell(step, one) for step in report.steps())]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("killed in …")
    for column in columns:
        table.add_column(column, justify="center")
    for step in report.steps():
        cells = [_cell(report.cell(step, column)) for column in columns]
        table.add_row(styled(step or "(the run)", "" if step else "dim"), *cells)
    return table


def _cell(counts: dict[str, int]) -> Any:
    if counts.get("broken"):
        return styled(f"✗ {counts['broken']}", "bold red")
    if counts.get("held"):
        return styled(f"◼ {counts['held']}", "yellow").append(f" ✓ {counts.get('kept', 0)}", style="green")
    return styled(f"✓ {counts['kept']}", "green") if counts.get("kept") else styled("·", "dim")


def _print_broken(one: Broken) -> None:
    out = console()
    out.print(styled("✗ broken: ", "bold red").append(clean(one.promise), style="bold"))
    if one.place or one.why:
        told = ": ".join(part for part in (one.place, clean(one.why)) if part)
        line = styled(f"  {told}")
        line.stylize("bold", 2, 2 + len(one.place))
        out.print(line)
    if one.remedy:
        out.print(styled("  remedy: ", "green").append(clean(one.remedy)))
    for boundary in one.boundaries:
        out.print(styled(f"  killed {clean(boundary)}", "dim"))
    for found in one.found[:6]:
        out.print(styled("  found: ", "yellow").append(clean(found)))
    if one.history:
        out.print(styled("  history:", "dim"))
        for event in one.history[-40:]:
            out.print(styled(f"  {clean(event)}", "dim"))
    out.print()
