"""`everstep schedule`: runs that start at certain times."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from everstep.cli.arguments import decoded_arguments, decoded_unchecked
from everstep.cli.durations import AGE
from everstep.cli.opening import acting, line_to_paste, store_options, user_name
from everstep.cli.resolving import is_served_here
from everstep.cli.tags import parsed_tags
from everstep.cli.terminal import add_fitted, arguments_text, clean, console, say_json, shortened, styled
from everstep.engine.app.app import App
from everstep.engine.verbs.schedules import Scheduled
from everstep.errors import Misuse
from everstep.model.schedules import CATCH_UPS, OVERLAPS, tick_text
from everstep.stores.opening import default_url, open_store
from everstep.view.store import place_of
from everstep.view.words import duration
from everstep.worker.loading import load_workflow

T = TypeVar("T")


@click.group("schedule")
def schedule_command() -> None:
    """Start runs at certain times: create, ls, show, pause, resume, trigger, backfill, delete.

    Workers that know the workflow start the runs. Each of these commands takes --url and --json.
    """


def _acted(url: str | None, act: Callable[[App], Awaitable[T]]) -> tuple[T, bool]:
    """Act on schedules, and return the result and whether a worker is there."""

    async def do() -> tuple[T, bool]:
        async with acting(url) as app:
            return await act(app), is_served_here(app)

    return asyncio.run(do())


def _say(name: str, text: str, facts: dict[str, Any], *, in_json: bool) -> None:
    if in_json:
        say_json({"schedule": name, **facts})
    else:
        console().print(styled("✓ ", "green").append(f"{name}: {clean(text)}"))


def _say_who_starts(url: str | None, *, is_served: bool) -> None:
    if not is_served:
        line = line_to_paste("worker", "FILE", url=url)
        console().print(styled(f"  No worker is there. Runs are started by one that knows the workflow: {line}", "dim"))


@schedule_command.command("create")
@click.argument("name")
@click.argument("workflow")
@click.argument("arguments", nargs=-1, metavar="[[NAME=]JSON]...")
@click.option(
    "--cron", default="", metavar="TEXT", help='Five fields as in "0 9 * * MON-FRI", or six: the second first.'
)
@click.option("--zone", default="UTC", show_default=True, help="The time zone of --cron, such as Europe/Berlin.")
@click.option("--every", type=AGE, default="0s", metavar="TIME", help="Instead of --cron: 30s, 15m, 6h, 1d.")
@click.option("--offset", type=AGE, default="0s", metavar="TIME", help="By how much to shift the ticks of --every.")
@click.option("--jitter", type=AGE, default="0s", metavar="TIME", help="Start each run up to this much later.")
@click.option(
    "--overlap", type=click.Choice(OVERLAPS), default="skip", show_default=True,
    help="What to do at a tick when the previous run has not ended.",
)  # fmt: skip
@click.option(
    "--catch-up", type=click.Choice(CATCH_UPS), default="newest", show_default=True,
    help="Which ticks to start that were missed while no worker was there.",
)  # fmt: skip
@click.option("--catch-up-max", type=click.IntRange(min=1), default=100, show_default=True, help="How many, with all.")
@click.option("--queue", help="Which queue the runs belong to, if not the workflow's own.")
@click.option("--priority", type=int, default=0, show_default=True)
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="A tag of the runs; can be given again.")
@store_options
def create_command(
    name: str, workflow: str, arguments: tuple[str, ...], url: str | None, in_json: bool, **options: Any
) -> None:
    """Create a schedule, or change it from its next tick on.

    \b
        everstep schedule create nightly app.py:report '"tides"' --cron "0 9 * * *" --zone Europe/Berlin

    WORKFLOW is app.py:report, whose arguments are then checked, or only the name of a workflow.
    """  # noqa: D301  # click wants the character itself
    target: Any = workflow
    if workflow.endswith(".py") or ":" in workflow:
        target = load_workflow(workflow)
        values, named = decoded_arguments(target, arguments)
    else:
        values, named = decoded_unchecked(arguments)
    options["tags"] = parsed_tags(options["tags"])

    async def create() -> tuple[Scheduled, bool]:
        app = await App(open_store(url or default_url()), workflows=()).open()
        try:
            schedule = await app.schedule(target, *values, kwargs=named, name=name, **options)
            return await schedule.show(), is_served_here(app)
        finally:
            await app.close()

    facts, is_served = asyncio.run(create())
    if in_json:
        say_json(facts)
        return
    _say(name, f"starts {facts.workflow} {_when(facts)}; {_next(facts)}", {}, in_json=False)
    _say_who_starts(url, is_served=is_served)


@schedule_command.command("ls")
@store_options
def ls_command(url: str | None, in_json: bool) -> None:
    """List the schedules of a store."""

    async def listed(app: App) -> tuple[Sequence[Scheduled], str]:
        return await app.schedules(), place_of(app.store)

    (rows, place), _ = _acted(url, listed)
    if in_json:
        say_json(rows)
        return
    if not rows:
        console().print(styled(f"There are no schedules in {place}.", "dim"))
        return
    from rich.table import Table

    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in ("schedule", "workflow", "when", "next", "last run"):
        table.add_column(column, no_wrap=True)
    add_fitted(table, [_cells(row) for row in rows], out.width)
    out.print(table, crop=False)


def _cells(facts: Scheduled) -> list[Any]:
    last = styled(facts.last_run or "none yet", "" if facts.last_run else "dim")
    following = styled(_next(facts), "yellow" if facts.is_paused else "")
    return [
        styled(facts.name, "bold"),
        styled(shortened(facts.workflow, 24)),
        styled(shortened(_when(facts), 40)),
        following,
        last,
    ]


@schedule_command.command("show")
@click.argument("name")
@store_options
def show_command(name: str, url: str | None, in_json: bool) -> None:
    """Show a schedule: what it starts when, what comes next, and what it did."""
    facts, _ = _acted(url, lambda app: app.get_schedule(name).show())
    if in_json:
        say_json(facts)
        return
    out = console()
    out.print(styled(facts.name, "bold").append(f"  {clean(_next(facts))}", style="yellow" if facts.is_paused else ""))
    for label, text in _lines(facts):
        out.print(styled(f"  {label:<10}", "dim").append(clean(text)), soft_wrap=True)


def _lines(facts: Scheduled) -> list[tuple[str, str]]:
    lines = [("starts", f"{facts.workflow}({arguments_text(facts.arguments)})"), ("when", _when(facts))]
    lines.append(("overlap", facts.overlap))
    bound = f", {facts.catch_up_max} at most" if facts.catch_up == "all" else ""
    lines.append(("catch-up", facts.catch_up + bound))
    if facts.last_run:
        lines.append(("last run", facts.last_run))
    if facts.active:
        lines.append(("under way", ", ".join(facts.active)))
    if facts.buffered is not None:
        lines.append(("waiting", f"the tick {tick_text(facts.buffered)}, for those to end"))
    if facts.asked:
        lines.append(("asked for", ", ".join(tick_text(tick) for tick in facts.asked[:10])))
    lines.append(("so far", f"{facts.fired} started, {facts.skipped} skipped, {facts.missed} missed"))
    return lines


@schedule_command.command("pause")
@click.argument("name")
@click.option("--note", default="", help="Why; it is shown with the schedule.")
@store_options
def pause_command(name: str, note: str, url: str | None, in_json: bool) -> None:
    """Start no more runs by time. Runs that have begun continue."""
    _acted(url, lambda app: app.get_schedule(name).pause(note, by=user_name()))
    _say(name, "starts nothing until it is resumed", {"is_paused": True, "note": note}, in_json=in_json)


@schedule_command.command("resume")
@click.argument("name")
@store_options
def resume_command(name: str, url: str | None, in_json: bool) -> None:
    """Continue with the next tick from now. Ticks that were missed meanwhile are not started."""

    async def resume(app: App) -> Scheduled:
        await app.get_schedule(name).resume()
        return await app.get_schedule(name).show()

    facts, is_served = _acted(url, resume)
    _say(name, f"continues; {_next(facts)}", {"is_paused": False, "next_at": facts.next_at}, in_json=in_json)
    if not in_json:
        _say_who_starts(url, is_served=is_served)


@schedule_command.command("trigger")
@click.argument("name")
@store_options
def trigger_command(name: str, url: str | None, in_json: bool) -> None:
    """Start a run now, even if one is running or the schedule is paused."""
    run, is_served = _acted(url, lambda app: app.get_schedule(name).trigger())
    _say(name, f"a worker starts {run}", {"run": run}, in_json=in_json)
    if not in_json:
        _say_who_starts(url, is_served=is_served)


@schedule_command.command("backfill")
@click.argument("name")
@click.option("--from", "start", required=True, metavar="TIME", help="Such as 2026-11-01T00:00:00Z or +01:00.")
@click.option("--to", "end", metavar="TIME", help="Not included. Default: now.")
@store_options
def backfill_command(name: str, start: str, end: str | None, url: str | None, in_json: bool) -> None:
    """Start the runs of all ticks of a past period, except those that exist already."""

    async def backfill(app: App) -> list[str]:
        until = end if end is not None else datetime.fromtimestamp(app.clock.now() / 1e6, UTC)
        return await app.get_schedule(name).backfill(start, until)

    runs, is_served = _acted(url, backfill)
    if not runs and not in_json:
        raise Misuse(f"The schedule {name} has no tick in that time.")
    text = f"{len(runs)} runs, from {runs[0]} to {runs[-1]}" if runs else ""
    _say(name, text, {"runs": runs}, in_json=in_json)
    if not in_json:
        _say_who_starts(url, is_served=is_served)


@schedule_command.command("delete")
@click.argument("name")
@store_options
def delete_command(name: str, url: str | None, in_json: bool) -> None:
    """Delete a schedule. Its runs stay."""
    _acted(url, lambda app: app.get_schedule(name).delete())
    _say(name, "deleted; its runs stay", {"deleted": True}, in_json=in_json)


def _when(facts: Scheduled) -> str:
    if facts.cron:
        text = f"at {facts.cron} ({facts.zone})"
    else:
        text = f"every {duration(facts.every)}" + (f", moved by {duration(facts.offset)}" if facts.offset else "")
    return text + (f", up to {duration(facts.jitter)} later" if facts.jitter else "")


def _next(facts: Scheduled) -> str:
    if facts.is_paused:
        by = f" by {facts.by}" if facts.by else ""
        return f"it is paused{by}" + (f": {facts.note}" if facts.note else "")
    return f"next {tick_text(facts.next_tick)}" if facts.next_tick is not None else "no more ticks"
