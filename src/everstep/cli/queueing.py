"""`everstep queue`: queues of runs and named limits of steps, the runs that wait in them, and their settings."""

import asyncio
from typing import Any, Final

import click
import msgspec

from everstep.cli.opening import acting, line_to_paste, place_of, reading, store_options
from everstep.cli.terminal import add_fitted, between, clean, console, say_json, shortened, styled
from everstep.engine.verbs.queues import change, changes_of, existing
from everstep.errors import Misuse
from everstep.stores.protocol import RunFilter, Store
from everstep.stores.rows.queues import QueueCount, QueueKind, QueueRow, tokens

ACTIONS: Final = ("ls", "show", "pause", "resume", "set")
SHOWN_MAX: Final = 20


def _count(option: str, text: str) -> int | None:
    """Return a number, or None for `none`."""
    if text != "none" and not text.isdigit():
        raise click.UsageError(f"--{option} {text}: it is a whole number, or 'none' for no limit.")
    return None if text == "none" else int(text)


def _rate(text: str) -> tuple[int, float] | None:
    """Return a count and seconds, or None for `none`."""
    count, slash, seconds = text.partition("/")
    try:
        return None if text == "none" else (int(count), float(seconds.removesuffix("s") if slash else 1.0))
    except ValueError:
        raise click.UsageError(f"--rate {text}: it is such as 10/60 (10 runs in 60 seconds), or 'none'.") from None


@click.command("queue")
@click.argument("action", type=click.Choice(ACTIONS), default="ls")
@click.argument("name", required=False)
@click.option("--limit", "is_limit", is_flag=True, help="With set: NAME is a limit of steps, `@step(limit=NAME)`.")
@click.option("--concurrency", metavar="N", help="At once, over all workers.")
@click.option("--per-worker", metavar="N", help="At once in each worker.")
@click.option("--per-key", metavar="N", help="At once with the same tag `key`.")
@click.option("--rate", metavar="N/SECONDS", help="Number of runs that may begin, and in how many seconds.")
@store_options
def queue_command(
    action: str, name: str | None, is_limit: bool, url: str | None, in_json: bool, **options: Any
) -> None:
    """List queues and limits, show one, pause or resume one, or set what limits it; `none` takes a limit away.

    Workers apply a change within a moment, without a restart. Pausing starts no more runs; runs that have begun
    continue. A run has a slot from its beginning until it ends, is held or is given back.
    """
    given = {
        option: _rate(text) if option == "rate" else _count(option.replace("_", "-"), text)
        for option, text in options.items()
        if text is not None
    }
    if given and action != "set":
        raise click.UsageError(f"{action} takes no settings; `everstep queue set {name or 'NAME'}` does.")
    if action == "ls":
        _list(url, in_json=in_json)
        return
    if name is None:
        raise click.UsageError(f"Which one? `everstep queue {action} NAME`; `everstep queue ls` lists them.")
    if action != "show":
        changes = changes_of(**given) if action == "set" else {"paused": action == "pause"}
        kind: QueueKind = "limit" if is_limit else "queue"
        if action == "set" and not changes:
            raise click.UsageError("Name a setting: --concurrency, --per-worker, --per-key or --rate.")
        if kind == "limit" and {"per_worker", "per_key"} & changes.keys():
            raise click.UsageError("A limit of steps has --concurrency and --rate.")
        asyncio.run(_change(kind, name, changes, url))
    _show(name, url, in_json=in_json)


async def _change(kind: QueueKind, name: str, changes: dict[str, Any], url: str | None) -> None:
    async with acting(url) as app:
        if "paused" in changes:
            known = [row for row in app.store.queues() if row.name == name]
            existing(known, app.store.queue_counts(), name)
            if known and all(row.kind == "limit" for row in known):
                raise Misuse(f"{name} is a limit of steps: it cannot be paused. Give it `--concurrency 0`.")
        await change(app, kind, name, changes)


def facts_of(store: Store) -> list[dict[str, Any]]:
    """Return all queues and limits, as plain data."""
    said = {(row.kind, row.name): row for row in store.queues()}
    counts = {count.name: count for count in store.queue_counts()}
    slots = store.slots()
    for name in counts:
        said.setdefault(("queue", name), QueueRow(kind="queue", name=name))
    found: list[dict[str, Any]] = []
    for (kind, name), row in sorted(said.items(), reverse=True):
        facts: dict[str, Any] = {"name": name, "kind": kind, "paused": row.paused, "concurrency": row.concurrency}
        facts |= {"per_worker": row.per_worker, "per_key": row.per_key, "rate": row.rate}
        facts["seconds"] = row.seconds if row.rate is not None else None
        facts["tokens"] = tokens(row, store.now()) if row.rate is not None else None
        if kind == "queue":
            facts |= msgspec.structs.asdict(counts.get(name, QueueCount(name)))
        else:
            facts["begun"] = sum(slot.name == name for slot in slots)
        found.append(facts)
    return found


def limits_text(facts: dict[str, Any]) -> str:
    """Return what limits a queue, in words."""
    parts = [
        f"{facts[name]} {words}"
        for name, words in (("concurrency", "at once"), ("per_worker", "per worker"), ("per_key", "per key"))
        if facts[name] is not None
    ]
    if facts["rate"] is not None:
        parts.append(f"{facts['rate']} in {facts['seconds']:g} s")
    return ", ".join(parts) or "no limit"


def _state(facts: dict[str, Any]) -> tuple[str, str]:
    if facts["paused"]:
        return "paused", "yellow"
    if facts["concurrency"] is not None and facts["begun"] >= facts["concurrency"]:
        return "full", "yellow"
    if facts["tokens"] == 0:
        return "rate", "yellow"
    return "open", "green"


def _list(url: str | None, *, in_json: bool) -> None:
    with reading(url) as store:
        found, now, place = facts_of(store), store.now(), place_of(store)
    if in_json:
        say_json(found)
        return
    from rich.table import Table

    out = console()
    if not found:
        out.print(styled(f"No run waits in a queue of {place}, and no queue is configured.", "dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("name", "kind", "state", "begun", "waiting", "delayed", "oldest", "limits"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("begun", "waiting", "delayed") else "left")
    rows: list[list[Any]] = []
    for facts in found:
        oldest = facts.get("oldest_at")
        cells = [styled(facts["name"], "bold"), styled(facts["kind"], "dim"), styled(*_state(facts))]
        cells += [styled(facts["begun"]), styled(facts.get("waiting", "")), styled(facts.get("delayed", ""))]
        rows.append([*cells, styled(between(oldest, now) if oldest else ""), styled(limits_text(facts))])
    add_fitted(table, rows, out.width)
    out.print(table, crop=False)


def _show(name: str, url: str | None, *, in_json: bool) -> None:
    with reading(url) as store:
        existing(store.queues(), store.queue_counts(), name)
        found = [facts for facts in facts_of(store) if facts["name"] == name]
        for facts in found:
            if facts["kind"] == "limit":
                facts["slots"] = [msgspec.structs.asdict(slot) for slot in store.slots() if slot.name == name]
            else:
                facts["next"] = _next(store, name)
        now = store.now()
    if in_json:
        say_json(found[0] if len(found) == 1 else found)
        return
    out = console()
    for facts in found:
        state, style = _state(facts)
        line = styled(facts["name"], "bold").append(f"  {facts['kind']}  ", style="dim").append(state, style=style)
        out.print(line.append(f"  {limits_text(facts)}"))
        if facts["kind"] == "limit":
            for slot in facts["slots"][:SHOWN_MAX]:
                out.print(
                    styled(clean(f"  {slot['run']} has a slot since {between(slot['since'], now)}")), soft_wrap=True
                )
            continue
        counts = f"  {facts['begun']} begun, {facts['waiting']} waiting, {facts['delayed']} delayed"
        out.print(styled(counts + (f"; next: {', '.join(facts['next'])}" if facts["next"] else "")), soft_wrap=True)
        if facts["paused"]:
            out.print(styled("  Nothing begins: " + line_to_paste("queue", "resume", name, url=url), "yellow"))


def _next(store: Store, queue: str) -> list[str]:
    """Return the runs that begin next, as far as the store knows their workflows."""
    rows = store.runs(RunFilter(status=("queued",), limit=1000))
    workflows = sorted({row.workflow for row in rows if row.queue == queue})
    return [shortened(run, 60) for run in store.queued(queue, at=store.now(), workflows=workflows, limit=5)]
