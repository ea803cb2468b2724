"""`everstep ls` and `everstep history`: the runs of a store, and every event of one run."""

from typing import Any

import click
import msgspec

from everstep.cli.drawing import counts_text, status_text
from everstep.cli.opening import existing_run, line_to_paste, reading, store_options
from everstep.cli.tags import parsed_tags
from everstep.cli.terminal import (
    arguments_text,
    clean,
    console,
    local_time,
    moment,
    print_rows,
    say_json,
    shortened,
    styled,
)
from everstep.codec.preview import without_internals
from everstep.model.forked import TAG
from everstep.model.status import STATUSES
from everstep.stores.protocol import RunFilter, RunRow, Store
from everstep.view.history import Archived, archived_of, events_of
from everstep.view.money import amounts_text, budget_text, standing_of
from everstep.view.store import place_of, unserved_among
from everstep.view.summary import summary_of
from everstep.view.words import between, duration

AMOUNTS = ("cost", "charged", "used", "granted", "allotted", "budget", "limits")
"""Fields of events with amounts."""


@click.command("ls")
@click.option("--status", multiple=True, type=click.Choice(STATUSES), help="Only these; can be given again.")
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="Only runs with this tag; can be given again.")
@click.option(
    "--search", "text", default="", metavar="TEXT", help="Only runs with this in id, workflow, arguments or tags."
)
@click.option("--after", metavar="RUN", help="The page that begins after this run of the list.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@store_options
def ls_command(
    status: tuple[Any, ...],
    workflow: str | None,
    tags: tuple[str, ...],
    text: str,
    after: str | None,
    limit: int,
    url: str | None,
    in_json: bool,
) -> None:
    """List the runs of a store, the newest first."""
    with reading(url) as store:
        last = existing_run(store, after) if after is not None else None
        chosen = RunFilter(status=status, workflow=workflow, tags=parsed_tags(tags), text=text, limit=limit)
        chosen.before = (last.created_at, last.id) if last is not None else None
        rows = store.runs(chosen)
        now, counts = store.now(), store.counts()
        lonely = unserved_among(store, rows)
        if in_json:
            say_json([_facts(row, is_unserved=row.id in lonely) for row in rows])
        else:
            _print_rows(rows, now, counts, place_of(store), url)
            if lonely:
                _say_unserved(rows, lonely)
            if not {row.id for row in rows if row.status == "waiting"}.isdisjoint(store.asking()):
                line = line_to_paste("approvals", url=url)
                console().print(styled(f"Some wait for an approval: {line}", "yellow"), soft_wrap=True)


def _facts(row: RunRow, *, is_unserved: bool) -> dict[str, Any]:
    return msgspec.structs.asdict(summary_of(row)) | ({"unserved": True} if is_unserved else {})


def _say_unserved(rows: list[RunRow], lonely: set[str]) -> None:
    kinds = sorted({f"{row.workflow} in queue {row.queue}" for row in rows if row.id in lonely})
    text = f"{len(lonely)} of these wait, and no worker serves {clean(', '.join(kinds))}: `everstep worker ls`."
    console().print(styled(text, "yellow"), soft_wrap=True)


def _print_rows(rows: list[RunRow], now: int, counts: dict[str, int], place: str, url: str | None) -> None:
    out = console()
    if not rows:
        out.print(styled(f"No run matches in {place}." if counts else f"There are no runs in {place} yet.", "dim"))
        return
    has_budgets = any(row.budget is not None for row in rows)
    heads = ("run", "workflow", "status", "age", "step", *(["budget"] if has_budgets else []), "arguments")
    print_rows(out, heads, [_cells(row, now, has_budgets=has_budgets) for row in rows], right=frozenset({"age"}))
    total = sum(counts.values())
    out.print(styled(f"{len(rows)} of {total} runs ({counts_text(counts)}) in {place}", "dim"))
    if counts.get("held"):
        out.print(styled("Held runs wait for a person: " + line_to_paste("holds", url=url), "yellow"))


def _cells(row: RunRow, now: int, *, has_budgets: bool) -> list[Any]:
    step = row.current_step
    if row.status == "waiting" and row.wake_at is not None:
        step = step or f"until {moment(row.wake_at, now)}"
    standing = standing_of(row)
    budget = styled(shortened(budget_text(standing, row, now) if standing is not None else "", 40))
    return [
        styled(row.id, "bold"),
        styled(shortened(row.workflow, 24)),
        status_text(row.status),
        styled(between(row.created_at, now)),
        styled(shortened(step, 28)),
        *([budget] if has_budgets else []),
        styled(shortened(_origin(row) + arguments_text(row.preview), 200), "dim"),
    ]


def _origin(row: RunRow) -> str:
    return f"forked from {row.tags[TAG]}: " if TAG in row.tags else ""


@click.command("history")
@click.argument("run")
@click.option("--generation", type=click.IntRange(min=1), help="An earlier one: the history from before a restart.")
@click.option("--archived", is_flag=True, help="What a repair took out of it instead: damaged, or after the damage.")
@store_options
def history_command(run: str, generation: int | None, archived: bool, url: str | None, in_json: bool) -> None:
    """List every event of a run, a line each; with --json their whole bodies."""
    with reading(url) as store:
        row = existing_run(store, run)
        if archived:
            _say_archived(archived_of(store, run), run, in_json=in_json)
            return
        if in_json:
            say_json([event._asdict() for event in events_of(store, row, generation)])
        else:
            _print_events(store, row, generation)


def _say_archived(found: list[Archived], run: str, *, in_json: bool) -> None:
    if in_json:
        say_json(found)
        return
    out = console()
    for one in found:
        text = styled(f"{one.what} {one.seq}  ", "dim").append(f"{clean(one.kind or '')}  ")
        text.append(clean(one.step or ""), style="bold")
        out.print(text.append(f"  {_gist(one.body or {})}", style="dim"), soft_wrap=True)
    if not found:
        out.print(styled(f"Nothing of {run} was archived.", "dim"))


def _print_events(store: Store, row: RunRow, generation: int | None) -> None:
    rows: list[list[Any]] = []
    before = 0
    for event in events_of(store, row, generation):
        after = duration((event.at - before) / 1e6) if before else ""
        before = event.at
        time = f"{local_time(event.at):%H:%M:%S.%f}"[:-3]
        style = "red" if "failed" in event.kind or event.kind == "run_held" else ""
        style = "magenta" if event.kind.startswith("checkpoint_") else style
        cells = [styled(event.seq), styled(time, "dim"), styled(after, "dim"), styled(event.kind, style)]
        rows.append([*cells, styled(shortened(event.step, 32), "bold"), styled(_gist(event.body), "dim")])
    print_rows(console(), ("seq", "time", "after", "event", "step", ""), rows, right=frozenset({"seq", "after"}))
    if row.generation > 1:
        console().print(styled(f"generation {generation or row.generation} of {row.generation}", "dim"))


_NOT_WORTH_A_LINE = frozenset(
    {"carried", "entropy", "arguments", "whole", "semantics", "python", "call", "number", "early", "edges", "items"}
)


def _gist(body: dict[str, Any]) -> str:
    """Return the notable facts of an event's body in one line."""
    parts: list[str] = []
    for name, value in body.items():
        if name in _NOT_WORTH_A_LINE or value in ("", None):
            continue
        if name == "preview":
            parts.insert(0, arguments_text(str(value)))
        elif name == "error":
            facts = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}
            parts.append(f"{facts.get('type', '')}: {facts.get('message', '')}")
        elif name in ("value", "details") and isinstance(value, list) and value:
            parts.append(f"{name}={without_internals(msgspec.json.encode(value[0]).decode())}")
        elif name == "source":
            parts.append(str(value).partition(": ")[0])
        elif name in AMOUNTS and isinstance(value, dict):
            parts.append(f"{name}={amounts_text(value)}")
        elif name == "forked" and isinstance(value, dict):
            parts.insert(0, f"forked from {value.get('run')}@{value.get('seq')}")
        elif name == "seconds":
            parts.append(duration(float(value)))
        elif name in ("took", "begins", "queued", "awaits", "nodes"):
            listed = ", ".join(one if isinstance(one, str) else _way(one) for one in value)
            parts.append(f"{name} {listed}" if name != "nodes" else listed)
        else:
            parts.append(f"{name}={value}")
    return clean(shortened("  ".join(parts), 240))


def _way(edge: list[str]) -> str:
    """Return an edge that a graph took: its ends, and the number of items."""
    source, target, *items = (one.strip("<>") for one in edge)
    return f"{source} → {target}" + (f" ×{items[0]}" if items else "")
