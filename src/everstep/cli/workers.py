"""`everstep worker ls`: the workers of a store, and the runs that no worker serves."""

from collections.abc import Sequence
from typing import Any

import click

from everstep.cli.opening import acting, reading, user_name
from everstep.cli.terminal import add_fitted, clean, console, say_json, shortened, styled
from everstep.view.store import WorkerView, place_of, worker_view
from everstep.view.words import between


def list_workers(url: str | None, *, in_json: bool) -> None:
    """Print the workers of a store."""
    with reading(url) as store:
        found, now, place = [worker_view(row) for row in store.workers()], store.now(), place_of(store)
    if in_json:
        say_json(found)
        return
    from rich.table import Table

    out = console()
    if not found:
        out.print(styled(f"No worker works on {place}.", "dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("worker", "process", "host", "since", "state", "at work", "in memory", "lease", "queues", "workflows"):
        table.add_column(name, no_wrap=True)
    add_fitted(table, [_cells(one, now) for one in found], out.width)
    out.print(table, crop=False)


async def declare_gone(
    workers: Sequence[str], host: str | None, note: str, url: str | None, *, never_seen: bool, in_json: bool
) -> int:
    """Say that workers, or all that was begun on a host, cannot act any more, and print what that concerned."""
    if bool(workers) == (host is not None):
        raise click.UsageError("Name the workers that are gone, or a host with --host.")
    if never_seen and host is None:
        raise click.UsageError("--never-seen goes with --host.")
    if not note:
        raise click.UsageError("Say with --note how you know that it is gone: that is kept.")
    async with acting(url) as app:
        if host is not None:
            found = [await app.host_gone(host, note=note, by=user_name(), never_seen=never_seen)]
        else:
            found = [await app.worker_gone(worker, note=note, by=user_name()) for worker in workers]
    if in_json:
        say_json([one._asdict() for one in found])
        return 0
    for one in found:
        fenced = f"{len(one.workers)} workers that had a row or runs" if one.kind == "host" else "its runs are free"
        line = f"{one.kind} {one.name} is gone ({fenced}). The probes of {len(one.asked)} held runs are asked again."
        console().print(styled(clean(line), "green"))
    return 0


def _cells(one: WorkerView, now: int) -> list[Any]:
    state, style = ("late", "red") if one.is_late else ("draining", "yellow") if one.draining else ("", "")
    if not state and one.not_claiming:
        state, style = "not claiming: " + ", ".join(one.failing), "red"
    elif not state and one.failing:
        state, style = "failing: " + ", ".join(one.failing), "yellow"
    if not state:
        full = one.concurrency and one.running >= one.concurrency
        state, style = ("saturated", "yellow") if full else ("serving" if one.recovers else "own runs", "green")
    lease = "lapsed" if one.is_late else f"{max(0, one.lease_until - now) / 1e6:.0f} s"
    queues = "all" if one.queues is None else ", ".join(one.queues)
    return [
        styled(one.id, "bold"),
        styled(one.pid),
        styled(shortened(one.host, 24)),
        styled(between(one.started_at, now)),
        styled(state, style),
        styled(f"{one.running}/{one.concurrency}"),
        styled(one.runs),
        styled(lease),
        styled(shortened(queues, 40)),
        styled(shortened(", ".join(sorted(one.workflows)), 80), "dim"),
    ]
