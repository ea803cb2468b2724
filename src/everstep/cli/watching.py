"""`everstep top`: what happens in a store, at intervals."""

import time
from typing import Any, Final

import click

from everstep.cli.drawing import status_text
from everstep.cli.opening import place_of, reading, store_options
from everstep.cli.queueing import facts_of, limits_text
from everstep.cli.terminal import between, clean, console, say_json, shortened, styled
from everstep.model.status import ENDED, STATUSES
from everstep.stores.protocol import RunFilter, Store

ROWS: Final = 20


@click.command("top")
@click.option("--once", is_flag=True, help="Print one snapshot and end.")
@click.option(
    "--every", type=click.FloatRange(0.2, 60.0), default=1.0, show_default=True, help="Seconds between looks."
)
@store_options
def top_command(once: bool, every: float, url: str | None, in_json: bool) -> None:
    """Show workers, runs by status, steps under way, holds and rates, until it is interrupted.

    Without a terminal, or with --once or --json, it prints one snapshot.
    """
    with reading(url) as store:
        out = console()
        before = snapshot(store)
        if in_json:
            say_json(before)
        elif once or not out.is_terminal:
            out.print(_drawn(before))
        else:
            _watch(store, before, every)


def snapshot(store: Store, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what happens now as plain data; with an earlier snapshot, also the rates since."""
    now, counts = store.now(), store.counts()
    rows = store.runs(RunFilter(status=("running",), limit=ROWS))
    holds = store.holds()
    facts: dict[str, Any] = {"store": place_of(store), "at": now, "runs": counts}
    facts["workers"] = [
        {
            "id": one.id,
            "pid": one.pid,
            "host": one.host,
            "started_at": one.started_at,
            "lease_until": abs(one.lease_until),
            "is_late": not one.has_lease,
        }
        for one in store.workers()
    ]
    facts["running"] = [
        {
            "id": row.id,
            "workflow": row.workflow,
            "step": row.current_step,
            "worker": row.owner,
            "events": row.head_seq,
            "updated_at": row.updated_at,
        }
        for row in rows
    ]
    facts["queues"] = facts_of(store)
    facts["holds"] = [
        {"id": one.id, "run": one.run, "reason": one.reason, "step": one.step, "created_at": one.created_at}
        for one in holds[:ROWS]
    ]
    facts["open_holds"] = len(holds)
    facts["rates"] = _rates(facts, before) if before is not None else None
    return facts


def _rates(facts: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """Return the events per second since the previous snapshot: starts and ends of runs, events of running ones."""
    seconds = max((facts["at"] - before["at"]) / 1e6, 0.001)
    old = {one["id"]: one["events"] for one in before["running"]}
    events = sum(max(0, one["events"] - old[one["id"]]) for one in facts["running"] if one["id"] in old)

    def ended(counts: dict[str, int]) -> int:
        return sum(number for status, number in counts.items() if status in ENDED)

    started = sum(facts["runs"].values()) - sum(before["runs"].values())
    return {
        "started": max(0, started) / seconds,
        "ended": max(0, ended(facts["runs"]) - ended(before["runs"])) / seconds,
        "events": events / seconds,
    }


def _watch(store: Store, before: dict[str, Any], every: float) -> None:
    from rich.live import Live

    with Live(_drawn(before), console=console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                before = snapshot(store, before)
                live.update(_drawn(before), refresh=True)
        except KeyboardInterrupt:
            return


def _queue_rows(facts: dict[str, Any]) -> list[list[str]]:
    return [
        [one["name"], str(one["begun"]), str(one.get("waiting", "")), "paused" if one["paused"] else limits_text(one)]
        for one in facts["queues"]
    ]


def _of_how_many(status: str, facts: dict[str, Any]) -> str:
    """Return the title of a table of runs, which says if there are more."""
    shown, there = len(facts[status]), facts["runs"].get(status, 0)
    return f"{status} (the newest {shown} of {there})" if there > shown else status


def _drawn(facts: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now: int = facts["at"]
    line = Text()
    for status in STATUSES:
        if facts["runs"].get(status):
            line.append(f"{facts['runs'][status]} ").append(status_text(status)).append("   ")
    if damaged := sum(count for status, count in facts["runs"].items() if status not in STATUSES):
        line.append(f"{damaged} damaged", style="bold red")
    parts: list[Any] = [styled(facts["store"], "dim"), line if line else styled("There are no runs yet.", "dim")]
    if facts["rates"] is not None:
        rates = facts["rates"]
        text = f"{rates['started']:.1f} started, {rates['ended']:.1f} ended, {rates['events']:.0f} events in a second"
        parts.append(styled(text, "dim"))
    tables: list[tuple[str, tuple[str, ...], list[list[str]]]] = [
        (
            "workers",
            ("worker", "pid", "host", "since", ""),
            [
                [
                    one["id"],
                    str(one["pid"]),
                    one["host"],
                    between(one["started_at"], now),
                    "late" if one["is_late"] else "",
                ]
                for one in facts["workers"]
            ],
        ),
        (
            _of_how_many("running", facts),
            ("run", "workflow", "step", "events", "last"),
            [
                [
                    one["id"],
                    shortened(one["workflow"], 24),
                    shortened(one["step"], 32),
                    str(one["events"]),
                    between(one["updated_at"], now),
                ]
                for one in facts["running"]
            ],
        ),
        ("queues and limits", ("name", "begun", "waiting", ""), _queue_rows(facts)),
        (
            f"holds ({facts['open_holds']})",
            ("hold", "run", "reason", "step", "age"),
            [
                [one["id"], one["run"], one["reason"], one["step"], between(one["created_at"], now)]
                for one in facts["holds"]
            ],
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
