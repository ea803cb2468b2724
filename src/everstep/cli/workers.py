"""`everstep worker ls`: the workers of a store, and the runs that no worker serves."""

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from everstep.cli.opening import acting, place_of, reading, user_name
from everstep.cli.terminal import add_fitted, between, clean, console, say_json, shortened, styled
from everstep.engine.process.worker_row import is_served, living, read_about
from everstep.stores.protocol import RunFilter, RunRow, Store, WorkerRow


def worker_facts(store: Store) -> list[dict[str, Any]]:
    """Return the workers of a store, as plain data."""
    found: list[dict[str, Any]] = []
    for row in store.workers():
        about = read_about(row)
        facts: dict[str, Any] = {"id": row.id, "pid": row.pid, "host": row.host, "started_at": row.started_at}
        facts |= {"lease_until": abs(row.lease_until), "is_late": not row.has_lease, "draining": about.draining}
        facts |= {"runs": about.runs, "running": about.running, "concurrency": about.concurrency}
        facts["saturation"] = round(about.running / about.concurrency, 3) if about.concurrency else None
        facts |= {"recovers": about.recovers, "queues": about.queues, "left": about.left}
        facts |= {"not_claiming": about.not_claiming, "troubles": msgspec.to_builtins(about.troubles)}
        facts["workflows"] = {name: version for name, (version, *_) in about.workflows.items()}
        found.append(facts)
    return found


def troubles_in(row: WorkerRow, now: int) -> list[str]:
    """Return which background work of a worker has failed, and whether it still does."""
    about = read_about(row)
    lines = []
    for name, trouble in sorted(about.troubles.items()):
        how = f"for {between(trouble.since, now)}, and is tried again" if trouble.since else "and works again"
        lines.append(f"{name} failed {trouble.failures} times ({trouble.error}), {how}; its log says why")
    if about.not_claiming:
        lines.append(f"it claims no more runs of others until that succeeds: {about.not_claiming}")
    return lines


def unserved_among(store: Store, rows: Sequence[RunRow]) -> set[str]:
    """Return ids of the runs that need a driver and have none, and that no living worker would claim."""
    abouts = living(store.workers())
    waiting = [row for row in rows if row.owner is None and row.status in ("queued", "running")]
    return {row.id for row in waiting if not is_served(row.workflow, row.queue, abouts)}


def unserved(store: Store, limit: int = 1000) -> list[RunRow]:
    """Return the runs that no worker serves, among the newest that wait."""
    rows = store.runs(RunFilter(status=("queued", "running"), limit=limit))
    lonely = unserved_among(store, rows)
    return [row for row in rows if row.id in lonely]


def list_workers(url: str | None, *, in_json: bool) -> None:
    """Print the workers of a store."""
    with reading(url) as store:
        found, now, place = worker_facts(store), store.now(), place_of(store)
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
    add_fitted(table, [_cells(facts, now) for facts in found], out.width)
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


def _cells(facts: dict[str, Any], now: int) -> list[Any]:
    state, style = ("late", "red") if facts["is_late"] else ("draining", "yellow") if facts["draining"] else ("", "")
    failing = [name for name, trouble in facts["troubles"].items() if trouble.get("since")]
    if not state and facts["not_claiming"]:
        state, style = "not claiming: " + ", ".join(failing), "red"
    elif not state and failing:
        state, style = "failing: " + ", ".join(failing), "yellow"
    if not state:
        full = facts["concurrency"] and facts["running"] >= facts["concurrency"]
        state, style = ("saturated", "yellow") if full else ("serving" if facts["recovers"] else "own runs", "green")
    lease = "lapsed" if facts["is_late"] else f"{max(0, facts['lease_until'] - now) / 1e6:.0f} s"
    queues = "all" if facts["queues"] is None else ", ".join(facts["queues"])
    return [
        styled(facts["id"], "bold"),
        styled(facts["pid"]),
        styled(shortened(facts["host"], 24)),
        styled(between(facts["started_at"], now)),
        styled(state, style),
        styled(f"{facts['running']}/{facts['concurrency']}"),
        styled(facts["runs"]),
        styled(lease),
        styled(shortened(queues, 40)),
        styled(shortened(", ".join(sorted(facts["workflows"])), 80), "dim"),
    ]
