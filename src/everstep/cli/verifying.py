"""`everstep verify`: whether histories match their digests, and everything that they refer to exists."""

from typing import Any

import click

from everstep.cli.holds import draw_drift
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import existing_run, reading, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.verbs.verify import Verification
from everstep.engine.verbs.verify_store import OtherVerification, verify_every_run, verify_others, verify_with_outside
from everstep.view.store import place_of


@click.command("verify")
@click.argument("run", required=False)
@click.option("--all", "all_runs", is_flag=True, help="Every run of the store.")
@click.option(
    "--outside",
    is_flag=True,
    help="Compare files, folders, variables, SQLite files and addresses with what the runs remember.",
)
@store_options
def verify_command(run: str | None, all_runs: bool, outside: bool, url: str | None, in_json: bool) -> int:
    """Check histories against their digests. Exits with 0 if all is sound, with 1 if not; changes nothing.

    With --outside, every difference between the outside and what a run remembers of it is listed as well. Relative
    paths are those of this folder. Facts that only the run's code can observe are named; `run.verify(outside=True)`
    compares them too.
    """
    if (run is None) == (not all_runs):
        raise click.UsageError("Name a RUN, or say --all.")
    with reading(url) as store:
        if run is not None:
            found = [verify_with_outside(store, existing_run(store, run), outside=outside)]
        else:
            found = verify_every_run(store, outside=outside)
        others = verify_others(store) if all_runs else []
        place = place_of(store)
    is_sound = all(one.sound for one in found) and all(one.sound for one in others)
    drifted = [one for one in found if one.drift]
    if in_json:
        say_json({"sound": is_sound, "store": place, "runs": found, **({"others": others} if all_runs else {})})
    else:
        out = console()
        for one in found:
            if not all_runs or not one.sound or one.left_out or one.drift or one.unobserved:
                _say_run(out, one)
        if all_runs:
            count = sum(one.events for one in found)
            bad = sum(not one.sound for one in found) + sum(not one.sound for one in others)
            verdict = f"{bad} damaged" if bad else "sound"
            verdict += f", {len(drifted)} with another outside than they remember" if drifted else ""
            out.print(f"{len(found)} runs with {count} events in {place}: {verdict}")
            _say_others(out, others)
    return EXIT_DONE if is_sound and not drifted else EXIT_FAILED


def _say_run(out: Any, one: Verification) -> None:
    from rich.padding import Padding

    is_right = one.sound and not one.drift
    mark = styled("✓ ", "green") if is_right else styled("✗ ", "bold red")
    text = f"{one.events} events, sound" if one.sound else clean(one.problem)
    if one.sound and one.left_out:
        text += f"; the secrets of {one.left_out} were left out when it was exported, so they cannot be verified"
    out.print(mark.append(f"{one.run}: {text}"))
    if one.drift:
        out.print(Padding(draw_drift(one.drift), (0, 0, 0, 4)))
    for subject in one.unobserved:
        out.print(Padding(styled(f"{subject}: not compared, needs its code", "dim"), (0, 0, 0, 4)))


def _say_others(out: Any, others: list[OtherVerification]) -> None:
    for one in others:
        if not one.sound:
            out.print(styled("✗ ", "bold red").append(f"{one.kind} {clean(one.name)}: {clean(one.problem)}"))
    if others:
        kinds = [f"{sum(one.kind == kind for one in others)} {kind}s" for kind in ("thread", "item", "schedule")]
        bad = sum(not one.sound for one in others)
        out.print(f"{', '.join(kinds)}: {f'{bad} damaged' if bad else 'sound'}")
