"""`everstep gc`: deleting runs that have ended."""

import asyncio
from typing import Final

import click

from everstep.cli.durations import AGE
from everstep.cli.mistakes import EXIT_DONE
from everstep.cli.opening import acting, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.process.retention import Collected
from everstep.view.store import place_of

LISTED_MAX: Final = 20


@click.command("gc")
@click.option("--older-than", type=AGE, metavar="AGE", help="Runs that ended this long ago: 30d, 12h, 90m.")
@click.option("--keep", type=click.IntRange(min=0), default=0, help="Number of newest runs of each workflow that stay.")
@click.option("--keys-older-than", type=AGE, metavar="AGE", help="Keys of actions that did not change for this time.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@store_options
def gc_command(
    older_than: float | None, keep: int, keys_older_than: float | None, dry_run: bool, url: str | None, in_json: bool
) -> int:
    """Delete runs that have ended, with all that belongs to them, while other processes keep working.

    A run is deleted with its children, when all of them have ended that long ago. A run stays that has not ended, is
    held, or has a key in doubt, or that another run may need which has not ended, or has failed. The keys of actions,
    which `everstep effects` lists, stay unless you give --keys-older-than: after that an action may be done again. The
    file does not become smaller; its space is reused. A worker with --retention does the same by itself.
    """
    if older_than is None and keys_older_than is None:
        raise click.UsageError("Say --older-than AGE, --keys-older-than AGE, or both.")

    async def do() -> tuple[Collected, str]:
        async with acting(url) as app:
            done = await app.gc(older_than=older_than, keep=keep, keys_older_than=keys_older_than, dry_run=dry_run)
            return done, place_of(app.store)

    done, place = asyncio.run(do())
    if in_json:
        facts = {"deleted": done.runs, "rows": done.rows, "left": done.left, "keys": done.keys}
        say_json({"store": place, "dry_run": dry_run, **facts})
        return EXIT_DONE
    _print(done, place, dry_run=dry_run)
    return EXIT_DONE


def _print(done: Collected, place: str, *, dry_run: bool) -> None:
    """Print what was deleted."""
    out = console()
    verb = "would be deleted" if dry_run else "deleted"
    out.print(styled("· " if dry_run else "✓ ", "green").append(f"{len(done.runs)} runs {verb} in {place}"))
    for run in done.runs[:LISTED_MAX] if dry_run else ():
        out.print(styled(f"    {clean(run)}", "dim"))
    if dry_run and len(done.runs) > LISTED_MAX:
        out.print(styled(f"    … and {len(done.runs) - LISTED_MAX} more", "dim"))
    if done.keys:
        out.print(styled("· " if dry_run else "✓ ", "green").append(f"{done.keys} keys of actions {verb}"))
    if done.left:
        why = "kept, held, in doubt, needed by a run that may continue, or one of their family is too young"
        out.print(styled(f"  {done.left} are old enough and stay: {why}", "dim"))
