"""`everstep replay`: which unfinished runs the code, as it is now, would continue. A dry run: nothing is written."""

import asyncio

import click

from everstep.cli.holds import draw_differences
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import existing_run, reading, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.verbs.replay import Comparison, PatchUse, compare_runs, patches_in
from everstep.engine.verbs.verify import every_run
from everstep.model.status import UNFINISHED
from everstep.view.store import place_of
from everstep.worker.loading import load_all


@click.command("replay")
@click.argument("files", nargs=-1, required=True, metavar="FILE [ID]...")
@store_options
def replay_command(files: tuple[str, ...], url: str | None, in_json: bool) -> int:
    """Compare unfinished runs with the code of FILE as it is now, before it is deployed.

    Says which of them would continue and which would be held as diverged, with the differences, and which patches are
    no longer needed. With an ID, only that run, also if it has ended. Writes nothing; exits with 1 if any run diverges.
    """
    file, *ids = files
    load_all((file,))
    with reading(url) as store:
        rows = [existing_run(store, run) for run in ids] or every_run(store, tuple(UNFINISHED))
        found = asyncio.run(compare_runs(store, rows))
        place = place_of(store)
    diverged = [one for one in found if one.verdict in ("diverged", "damaged")]
    patches = patches_in(found)
    if in_json:
        say_json({"store": place, "runs": found, "patches": patches})
    else:
        _print(found, patches, place)
    return EXIT_FAILED if diverged else EXIT_DONE


def _print(found: list[Comparison], patches: list[PatchUse], place: str) -> None:
    out = console()
    if not found:
        out.print(styled(f"There are no unfinished runs in {place}.", "dim"))
    for one in found:
        good = one.verdict in ("goes on", "matches")
        foreign = one.verdict in ("not declared here", "made by a newer release")
        mark, style = ("✓", "green") if good else ("·", "dim") if foreign else ("✗", "bold red")
        line = styled(f"{mark} ", style).append(f"{one.run}  ", style="bold").append(one.verdict, style=style)
        line.append(f"  {clean(one.workflow)}, {one.status}  {clean(one.problem)}", style="dim")
        out.print(line)
        if one.differences:
            out.print(draw_differences(one.differences))
    for patch in patches:
        if patch.can_go:
            text = f"patched({patch.name!r}) can go: no unfinished run went its old way"
            out.print(styled("✓ ", "green").append(clean(text)))
        else:
            runs = ", ".join(patch.old_way[:5]) + ("…" if len(patch.old_way) > 5 else "")
            out.print(styled("◷ ", "yellow").append(clean(f"patched({patch.name!r}) must stay for {runs}")))
