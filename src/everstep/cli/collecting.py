"""`everstep gc`: deleting runs that have ended."""

import asyncio
import re
from typing import Any, Final

import click

from everstep.cli.mistakes import EXIT_DONE
from everstep.cli.opening import acting, place_of, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.collecting import Collected

LISTED_MAX: Final = 20
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class Age(click.ParamType[float]):
    """A time such as 30d, 12h or 90m."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time such as 30d, 12h or 90m.", param, ctx)
        return float(match[1]) * UNITS[match[2]]


@click.command("gc")
@click.option(
    "--older-than", type=Age(), required=True, metavar="AGE", help="Runs that ended so long ago: 30d, 12h, 90m."
)
@click.option("--keep", type=click.IntRange(min=0), default=0, help="The newest so many of each workflow stay.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@store_options
def gc_command(older_than: float, keep: int, dry_run: bool, url: str | None, in_json: bool) -> int:
    """Delete runs that have ended, with all that belongs to them, while others go on working.

    A run goes with its children, when all of them have ended so long ago. What has not ended, or is held, stays. So do
    the keys of actions: `everstep effects` lists them, and `app.forget_keys` deletes them. The file does not become
    smaller; its room is used again.
    """

    async def do() -> tuple[Collected, str]:
        async with acting(url) as app:
            return await app.gc(older_than=older_than, keep=keep, dry_run=dry_run), place_of(app.store)

    done, place = asyncio.run(do())
    if in_json:
        say_json({"store": place, "dry_run": dry_run, "deleted": done.runs, "rows": done.rows, "left": done.left})
        return EXIT_DONE
    out = console()
    verb = "would be deleted" if dry_run else "deleted"
    out.print(styled("· " if dry_run else "✓ ", "green").append(f"{len(done.runs)} runs {verb} in {place}"))
    for run in done.runs[:LISTED_MAX] if dry_run else ():
        out.print(styled(f"    {clean(run)}", "dim"))
    if dry_run and len(done.runs) > LISTED_MAX:
        out.print(styled(f"    … and {len(done.runs) - LISTED_MAX} more", "dim"))
    if done.left:
        out.print(
            styled(f"  {done.left} are old enough and stay: kept, held, or one of their family has not ended", "dim")
        )
    return EXIT_DONE
