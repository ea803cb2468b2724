"""`everstep resolve`: what a person decides about a hold, or about many alike."""

import asyncio
from typing import Any

import click

from everstep.cli.arguments import decoded_json
from everstep.cli.holds import draw_hold
from everstep.cli.mistakes import EXIT_FAILED
from everstep.cli.opening import acting, existing_run, line_to_paste, store_options, user_name
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.app.app import App
from everstep.engine.verbs.runs import refuse_going_on_twice
from everstep.errors import Error, HoldConflict, describe
from everstep.stores.protocol import HoldRow
from everstep.view.holds import hold_view


@click.command("resolve")
@click.argument("run", required=False)
@click.option("--hold", metavar="ID", help="Which hold, if the run has more than one.")
@click.option("--done", metavar="JSON", help="A step in doubt did happen, and this is its outcome.")
@click.option("--not-done", is_flag=True, help="A step in doubt did not happen: do it again.")
@click.option("--probe", is_flag=True, help="Ask the outside again about a step in doubt.")
@click.option(
    "--accept",
    is_flag=True,
    help="Take it as it is (other arguments, another outside, a lost part), keep all outcomes; or grant more budget.",
)
@click.option("--retry", is_flag=True, help="Try again what the run was held for.")
@click.option("--skip", metavar="JSON", help="Take this value as the step's outcome.")
@click.option("--repair", is_flag=True, help="Continue from the last good event of a damaged history.")
@click.option("--cancel", is_flag=True, help="End the run as cancelled.")
@click.option("--rollback", is_flag=True, help="Undo what the run did, the last step first; then it is cancelled.")
@click.option("--note", default="", help="Why; it is kept in the history.")
@click.option("--reason", help="Without RUN: resolve all holds for this reason.")
@click.option("--step", help="Without RUN: resolve all holds at this step.")
@click.option("--workflow", help="Without RUN: resolve all holds of this workflow.")
@click.option("--yes", is_flag=True, help="Resolve all that match; without it they are only listed.")
@store_options
def resolve_command(
    run: str | None,
    hold: str | None,
    note: str,
    reason: str | None,
    step: str | None,
    workflow: str | None,
    yes: bool,
    url: str | None,
    in_json: bool,
    **answers: Any,
) -> int:
    """Decide about a held run: it then resumes, or ends.

    `everstep holds` shows which answers a hold allows and what each of them means. Many alike are resolved at once
    without RUN, by --reason, --step and --workflow: first they are listed, with --yes they are resolved.
    """
    resolution, value = _chosen(answers)
    filters = {name: one for name, one in (("reason", reason), ("step", step), ("workflow", workflow)) if one}
    if run is not None and filters:
        raise click.UsageError("--reason, --step and --workflow choose among many; they do not go with RUN.")
    if run is None and not filters:
        raise click.UsageError("Name a RUN, or choose many by --reason, --step or --workflow.")
    answer = {"resolution": resolution, "value": value, "note": note, "by": user_name()}
    if run is not None:
        return asyncio.run(_resolve_one(run, hold, answer, url, in_json=in_json))
    return asyncio.run(_resolve_many(filters, answer, url, yes=yes, in_json=in_json))


def _chosen(answers: dict[str, Any]) -> tuple[str, Any]:
    """Return the one answer that was given, and its value."""
    given = [name for name, one in answers.items() if one is not None and one is not False]
    if len(given) != 1:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in answers)
        raise click.UsageError(f"Say one of {options}. `everstep holds` explains which of them apply.")
    name = given[0]
    value = decoded_json(answers[name], f"--{name}") if isinstance(answers[name], str) else None
    return name.replace("_", "-"), value


async def _resolve(app: App, run: str, hold: str | None, answer: dict[str, Any]) -> None:
    options = {name: answer[name] for name in ("value", "note", "by")}
    await app.resolve(run, answer["resolution"], hold=hold, **options)


async def _resolve_one(run: str, hold: str | None, answer: dict[str, Any], url: str | None, *, in_json: bool) -> int:
    async with acting(url) as app:
        row = existing_run(app.store, run)
        if row.status != "held" and hold is None:
            raise HoldConflict(f"The run {run} is {row.status}, not held. `everstep holds` lists what is.")
        await _resolve(app, run, hold, answer)
        row = existing_run(app.store, run)
        is_served = is_served_here(app)
    if in_json:
        say_json({"run": run, "resolution": answer["resolution"], "status": row.status})
    else:
        console().print(styled("✓ ", "green").append(f"{run}: {answer['resolution']}; it is {row.status} now"))
        if row.status != "cancelled":
            say_who_goes_on(run, url, is_served=is_served)
    return 0


def is_served_here(app: App) -> bool:
    """Return True if a worker, other than this command itself, could resume a run."""
    return any(worker.id != app.worker for worker in app.store.workers())


def say_who_goes_on(run: str, url: str | None, *, is_served: bool) -> None:
    """Print which worker resumes a free run."""
    if is_served:
        text = "A worker that knows its workflow resumes it at once."
    else:
        text = f"No worker is there: start `{line_to_paste('worker', 'FILE', url=url)}`, or start your program again."
    console().print(styled(f"  {text}", "dim"))


async def _resolve_many(
    filters: dict[str, str], answer: dict[str, Any], url: str | None, *, yes: bool, in_json: bool
) -> int:
    done: list[str] = []
    refused: list[dict[str, Any]] = []
    async with acting(url) as app:
        holds = [hold for hold in app.store.holds() if _matches(hold, filters)]
        if yes:
            for hold in holds:
                try:
                    refuse_going_on_twice(hold, answer["resolution"], is_named=False)
                    await _resolve(app, hold.run, hold.id, answer)
                    done.append(hold.run)
                except Error as error:
                    refused.append({"run": hold.run, "hold": hold.id, "error": describe(error)})
    if in_json:
        say_json({"matching": [hold_view(one, url) for one in holds], "resolved": done, "refused": refused})
    else:
        _print_many(holds, done, refused, answer["resolution"], url, yes=yes)
    return EXIT_FAILED if refused else 0


def _matches(hold: HoldRow, filters: dict[str, str]) -> bool:
    return all(getattr(hold, name) == wanted for name, wanted in filters.items())


def _print_many(
    holds: list[HoldRow], done: list[str], refused: list[dict[str, Any]], resolution: str, url: str | None, *, yes: bool
) -> None:
    out = console()
    if not holds:
        out.print(styled("Nothing that is held matches.", "dim"))
    elif not yes:
        for hold in holds:
            out.print(draw_hold(hold_view(hold, url)), crop=False)
        out.print(f"{len(holds)} would be resolved with {resolution}. Say it again with --yes to do so.")
    for run in done:
        out.print(styled("✓ ", "green").append(f"{run}: {resolution}"))
    for one in refused:
        out.print(styled("✗ ", "red").append(f"{one['run']}: {clean(one['error']['message'])}"))
