"""`everstep top`: what happens in a store, at intervals."""

import time
from typing import Any

import click

from everstep.cli.drawing import status_text
from everstep.cli.durations import Time
from everstep.cli.opening import reading, store_options
from everstep.cli.terminal import clean, console, say_json, shortened, styled
from everstep.model.status import STATUSES
from everstep.stores.protocol import Store
from everstep.view.store import StoreView, store_view
from everstep.view.words import between


@click.command("top")
@click.option("--once", is_flag=True, help="Print one snapshot and end.")
@click.option(
    "--every",
    type=Time(bare=True, least=0.2, most=60),
    default="1s",
    show_default=True,
    metavar="TIME",
    help="Time between looks.",
)  # fmt: skip
@store_options
def top_command(once: bool, every: float, url: str | None, in_json: bool) -> None:
    """Show workers, runs by status, steps under way, holds and rates, until it is interrupted.

    Without a terminal, or with --once or --json, it prints one snapshot.
    """
    with reading(url) as store:
        out = console()
        before = store_view(store)
        if in_json:
            say_json(before)
        elif once or not out.is_terminal:
            out.print(_drawn(before))
        else:
            _watch(store, before, every)


def _watch(store: Store, before: StoreView, every: float) -> None:
    from rich.live import Live

    with Live(_drawn(before), console=console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                before = store_view(store, before)
                live.update(_drawn(before), refresh=True)
        except KeyboardInterrupt:
            return


def _drawn(view: StoreView) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now, line, rates = view.at, Text(), view.rates
    for status in STATUSES:
        if view.runs.get(status):
            line.append(f"{view.runs[status]} ").append(status_text(status)).append("   ")
    if damaged := sum(count for status, count in view.runs.items() if status not in STATUSES):
        line.append(f"{damaged} damaged", style="bold red")
    parts: list[Any] = [styled(view.store, "dim"), line if line else styled("There are no runs yet.", "dim")]
    if rates is not None:
        text = f"{rates.started:.1f} started, {rates.ended:.1f} ended, {rates.events:.0f} events in a second"
        parts.append(styled(text, "dim"))
    shown, there = len(view.running), view.runs.get("running", 0)
    running = f"running (the newest {shown} of {there})" if there > shown else "running"
    tables: list[tuple[str, tuple[str, ...], list[tuple[object, ...]]]] = [
        (
            "workers",
            ("worker", "pid", "host", "since", ""),
            [
                (one.id, one.pid, one.host, between(one.started_at, now), "late" if one.is_late else "")
                for one in view.workers
            ],
        ),
        (
            running,
            ("run", "workflow", "step", "events", "last"),
            [
                (one.id, shortened(one.workflow, 24), shortened(one.step, 32), one.events, between(one.updated_at, now))
                for one in view.running
            ],
        ),
        (
            "queues and limits",
            ("name", "begun", "waiting", ""),
            [
                (
                    one.name,
                    one.begun,
                    "" if one.waiting is None else one.waiting,
                    "paused" if one.paused else one.limits,
                )
                for one in view.queues
            ],
        ),
        (
            f"holds ({view.open_holds})",
            ("hold", "run", "reason", "step", "age"),
            [(one.id, one.run, one.reason, one.step, between(one.created_at, now)) for one in view.holds],
        ),
    ]
    for title, columns, rows in tables:
        if not rows:
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
        for column in columns:
            table.add_column(column, no_wrap=True)
        for row in rows:
            table.add_row(*(styled(clean(cell)) for cell in row))
        parts += [Text(), table]
    return Group(*parts)
