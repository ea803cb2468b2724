"""`everstep queue`: queues of runs and named limits of steps, the runs that wait in them, and their settings."""

import asyncio
from typing import Any, Final, Literal

import click

from everstep.cli.durations import Time
from everstep.cli.opening import acting, line_to_paste, reading, store_options
from everstep.cli.terminal import add_fitted, clean, console, say_json, shortened, styled
from everstep.engine.verbs.queues import change, changes_of, existing
from everstep.errors import Misuse
from everstep.view.store import SHOWN_MAX, place_of, queue_views
from everstep.view.words import between

ACTIONS: Final = ("ls", "show", "pause", "resume", "set")


def _count(option: str, text: str) -> int | None:
    """Return a number, or None for `none`."""
    if text != "none" and not text.isdigit():
        raise click.UsageError(f"--{option} {text}: it is a whole number, or 'none' for no limit.")
    return None if text == "none" else int(text)


def _rate(text: str) -> tuple[int, float] | None:
    """Return a count and seconds, or None for `none`."""
    count, slash, seconds = text.partition("/")
    try:
        return None if text == "none" else (int(count), Time(bare=True).convert(seconds if slash else "1s", None, None))
    except (ValueError, click.BadParameter):
        raise click.UsageError(f"--rate {text}: it is such as 10/60s (10 runs in 60 seconds), or 'none'.") from None


@click.command("queue")
@click.argument("action", type=click.Choice(ACTIONS), default="ls")
@click.argument("name", required=False)
@click.option("--limit", "is_limit", is_flag=True, help="With set: NAME is a limit of steps, `@step(limit=NAME)`.")
@click.option("--concurrency", metavar="N", help="At once, over all workers.")
@click.option("--per-worker", metavar="N", help="At once in each worker.")
@click.option("--per-key", metavar="N", help="At once with the same tag `key`.")
@click.option("--rate", metavar="N/TIME", help="Number of runs that may begin, and in what time, such as 10/60s.")
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
        kind: Literal["queue", "limit"] = "limit" if is_limit else "queue"
        if action == "set" and not changes:
            raise click.UsageError("Name a setting: --concurrency, --per-worker, --per-key or --rate.")
        if kind == "limit" and {"per_worker", "per_key"} & changes.keys():
            raise click.UsageError("A limit of steps has --concurrency and --rate.")
        asyncio.run(_change(kind, name, changes, url))
    _show(name, url, in_json=in_json)


async def _change(kind: Literal["queue", "limit"], name: str, changes: dict[str, Any], url: str | None) -> None:
    async with acting(url) as app:
        if "paused" in changes:
            known = [row for row in app.store.queues() if row.name == name]
            existing(known, app.store.queue_counts(), name)
            if known and all(row.kind == "limit" for row in known):
                raise Misuse(f"{name} is a limit of steps: it cannot be paused. Give it `--concurrency 0`.")
        await change(app, kind, name, changes)


STATE_STYLES: Final = {"open": "green", "paused": "yellow", "full": "yellow", "rate": "yellow"}


def _list(url: str | None, *, in_json: bool) -> None:
    with reading(url) as store:
        found, now, place = queue_views(store), store.now(), place_of(store)
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
    for one in found:
        counts = ["" if count is None else count for count in (one.begun, one.waiting, one.delayed)]
        cells = [styled(one.name, "bold"), styled(one.kind, "dim"), styled(one.state, STATE_STYLES[one.state])]
        oldest = between(one.oldest_at, now) if one.oldest_at else ""
        rows.append([*cells, *map(styled, counts), styled(oldest), styled(one.limits)])
    add_fitted(table, rows, out.width)
    out.print(table, crop=False)


def _show(name: str, url: str | None, *, in_json: bool) -> None:
    with reading(url) as store:
        existing(store.queues(), store.queue_counts(), name)
        found = queue_views(store, name)
        now = store.now()
    if in_json:
        say_json(found[0] if len(found) == 1 else found)
        return
    out = console()
    for one in found:
        line = styled(one.name, "bold").append(f"  {one.kind}  ", style="dim")
        out.print(line.append(one.state, style=STATE_STYLES[one.state]).append(f"  {one.limits}"))
        for slot in (one.slots or ())[:SHOWN_MAX]:
            out.print(styled(clean(f"  {slot.run} has a slot since {between(slot.since, now)}")), soft_wrap=True)
        if one.kind == "limit":
            continue
        following = ", ".join(shortened(run, 60) for run in one.next or ())
        counts = f"  {one.begun} begun, {one.waiting} waiting, {one.delayed} delayed"
        out.print(styled(counts + (f"; next: {following}" if following else "")), soft_wrap=True)
        if one.paused:
            out.print(styled("  Nothing begins: " + line_to_paste("queue", "resume", name, url=url), "yellow"))
