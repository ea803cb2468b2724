"""`everstep repair` and `everstep restored`: continuing after damage, and after a backup was restored."""

import asyncio
from collections.abc import Sequence
from typing import Any

import click

from everstep.cli.mistakes import EXIT_DONE
from everstep.cli.opening import acting, existing_run, line_to_paste, reading, store_options, user_name
from everstep.cli.resolving import is_served_here, say_who_goes_on
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.history.damage import UnseenStep
from everstep.engine.history.restored import mark_restored
from everstep.engine.verbs.repair import Repair
from everstep.view.store import place_of

LISTED_MAX = 50


@click.command("repair")
@click.argument("run")
@click.option("--note", default="", help="Why; it is kept in the history.")
@click.option("--dry-run", is_flag=True, help="Only say what would be archived, and which steps would become unknown.")
@store_options
def repair_command(run: str, note: str, dry_run: bool, url: str | None, in_json: bool) -> int:
    """Repair a damaged run: archive what is damaged, and continue from the last good event.

    Nothing is overwritten or merged. From then on a step that must not happen twice is confirmed before it runs, by its
    probe or by a person, because it may have happened in the archived part. A sound run is left alone.
    """

    async def do() -> tuple[Repair, bool]:
        async with acting(url) as app:
            existing_run(app.store, run)
            report = await app.repair(run, note=note, by=user_name(), dry_run=dry_run)
            return report, is_served_here(app)

    report, is_served = asyncio.run(do())
    if in_json:
        say_json({"run": run, "repaired": bool(report.problem) and not dry_run, "report": report})
        return EXIT_DONE
    _print(report, dry_run=dry_run)
    if report.status == "queued" and not dry_run:
        say_who_goes_on(run, url, is_served=is_served)
    elif report.status == "held":
        console().print(styled("  It is still held: " + line_to_paste("holds", "--run", run, url=url), "dim"))
    return EXIT_DONE


def _print(report: Repair, *, dry_run: bool) -> None:
    out = console()
    if not report.problem:
        out.print(styled("✓ ", "green").append(f"{report.run}: sound, nothing to repair"))
        return
    verb = "would continue" if dry_run else "continues"
    mark = styled("· " if dry_run else "✓ ", "green")
    out.print(mark.append(f"{report.run}: {verb} from event {report.last_good}; {report.archived} events archived"))
    out.print(styled(f"  {clean(report.problem)}", "dim"))
    _print_steps("begun in the archived part, so their outcomes are unknown", report.unseen)
    _print_steps("begun before and not settled; their contracts decide what is done", report.open)
    if report.unreadable:
        out.print(f"  {report.unreadable} archived events cannot be read: what was begun there is unknown")


def _print_steps(what: str, steps: Sequence[UnseenStep]) -> None:
    if not steps:
        return
    out = console()
    out.print(f"  {what}:")
    for step in steps[:LISTED_MAX]:
        out.print(styled(f"    {step.step} ({step.effect}), event {step.seq}, key {step.key}"))
    if len(steps) > LISTED_MAX:
        out.print(styled(f"    … and {len(steps) - LISTED_MAX} more", "dim"))


@click.command("restored")
@store_options
def restored_command(url: str | None, in_json: bool) -> int:
    """Say that this store was restored from a backup, before anything uses it again.

    A backup is out of date: what runs did after it is missing here. From now on every unfinished run asks before it
    does a step that must not happen twice: the step's probe, else a person. Stop every process that uses the store
    first.
    """
    with reading(url) as store:
        number, rows = mark_restored(store)
        place = place_of(store)
    facts: dict[str, Any] = {"store": place, "restores": number, "unfinished": [row.id for row in rows]}
    if in_json:
        say_json(facts)
        return EXIT_DONE
    out = console()
    out.print(styled("✓ ", "green").append(f"{place} is marked as restored ({number} so far)"))
    out.print(f"  {len(rows)} unfinished runs ask before they do what must not happen twice")
    for row in rows[:LISTED_MAX]:
        out.print(styled(f"    {row.id}  {clean(row.workflow)}  {row.status}", "dim"))
    if len(rows) > LISTED_MAX:
        out.print(styled(f"    … and {len(rows) - LISTED_MAX} more", "dim"))
    line = line_to_paste("resolve", "--reason", "restored", "--accept", url=url)
    out.print(styled(f"  Those without a probe are held. When you have checked them: {line}", "dim"))
    return EXIT_DONE
