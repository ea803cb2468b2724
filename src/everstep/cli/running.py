"""`everstep run`: start a run or continue it, with its progress, to its end."""

import asyncio
import contextlib
import sys
from typing import Any

import click

from everstep.cli.arguments import Call, decoded_arguments
from everstep.cli.holds import draw_hold
from everstep.cli.logs import log_lines
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED, EXIT_HELD
from everstep.cli.opening import line_to_paste, store_options
from everstep.cli.progress import LiveProgress, PlainProgress, Progress, SilentProgress, Watcher
from everstep.cli.tags import parsed_tags
from everstep.cli.terminal import clean, console, json_text, say_json, styled
from everstep.engine.app.app import App
from everstep.engine.app.opening import default_on_hold
from everstep.engine.code.workflow import ON_EXISTING, Workflow
from everstep.model.ids import checked_run_id
from everstep.model.status import ENDED
from everstep.stores.opening import default_url, open_store
from everstep.stores.protocol import HoldRow, RunRow, Store
from everstep.view.holds import hold_view
from everstep.view.plain import payload_json
from everstep.view.store import place_of
from everstep.view.timeline import Timeline
from everstep.view.words import duration, error_line
from everstep.worker.loading import load_workflow
from everstep.worker.stopping import stopping_on_signals


@click.command("run")
@click.argument("target", metavar="FILE[:WORKFLOW]")
@click.argument("arguments", nargs=-1, metavar="[[NAME=]JSON]...")
@click.option("--id", "run", metavar="ID", help="The run's id; that of an existing run resumes it.")
@click.option(
    "--on-existing",
    type=click.Choice(ON_EXISTING),
    help="If the id exists: attach to it (default), retry it if it failed, restart it if it has ended, or fail.",
)
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="A tag for a new run; can be given again.")
@store_options
def run_command(
    target: str,
    arguments: tuple[str, ...],
    run: str | None,
    on_existing: str | None,
    tags: tuple[str, ...],
    url: str | None,
    in_json: bool,
) -> int:
    """Start a run, or continue one, and show its progress.

    FILE is a Python file or a module; WORKFLOW can be left out if it declares only one. Each argument is JSON, by its
    place or by its name:

    \b
        everstep run app.py:report '"tides"' '"ann@example.org"' --id report-17
        everstep run app.py:report topic='"tides"' reader='"ann@example.org"' --id report-17

    Kill it at any time and run the same command again: it resumes where it was.
    """  # noqa: D301  # click wants the character itself
    workflow = load_workflow(target)
    call = decoded_arguments(workflow, arguments)
    if run is not None:
        checked_run_id(run)
    options = {"id": run, "on_existing": on_existing, "tags": parsed_tags(tags)}
    again = [target, *arguments]
    return asyncio.run(_run(workflow, call, options, url, again, in_json=in_json))


async def _run(
    workflow: Workflow,
    call: Call,
    options: dict[str, Any],
    url: str | None,
    again: list[str],
    *,
    in_json: bool,
) -> int:
    store = open_store(url or default_url())
    app = App(store, on_hold=default_on_hold())
    await app.open()
    with stopping_on_signals() as stop, contextlib.ExitStack() as stack:
        if in_json:  # the workflow's own output must not mix with the JSON
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        progress = _progress_for(store, in_json=in_json)
        stack.callback(progress.close)
        stack.enter_context(log_lines(lambda level, text: progress.say("!", f"{level}: {text}", "yellow")))
        try:
            existed = store.run(options["id"]) if options["id"] else None
            handle = await app.start(workflow, *call[0], kwargs=call[1], **options)
            app.pump.nudge()  # so that it polls for this run from now on, and notices signals of other processes
            watcher = Watcher(store, handle.id, progress, url)
            _announce(progress, store, handle.id, existed, watcher)
            ended = await _wait(app, handle.id, watcher, stop.asked)
            progress.close()
            if not ended:
                line = line_to_paste("run", *again, "--id", handle.id, url=url)
                click.echo(f"Stopped. The run is given back; continue it with:\n  {line}", err=True)
                return stop.exit_status
            row, holds = await handle.row(), await handle.holds()
        finally:
            await app.close()
    facts = {"store": place_of(store), "new_store": store.is_new, "new_run": existed is None}
    return report_end(row, holds, facts, url, watcher.timeline, in_json=in_json)


def _progress_for(store: Store, *, in_json: bool) -> Progress:
    if in_json:
        return SilentProgress()
    return LiveProgress(store) if sys.stderr.isatty() else PlainProgress(store)


def _announce(progress: Progress, store: Store, run: str, existed: RunRow | None, watcher: Watcher) -> None:
    """Print where the run is stored and whether it is new, before anything else."""
    progress.say("▪", f"store {place_of(store)}" + (" (new)" if store.is_new else ""), "dim")
    if existed is None:
        progress.say("▪", f"run {run} (new)", "bold")
        return
    row = watcher.catch_up()
    done = len(watcher.timeline.completed_steps())
    if existed.status in ENDED and row is not None and row.status in ENDED:
        progress.say("▪", f"run {run} had ended already: {row.status}", "bold")
    else:
        progress.say("▪", f"run {run} continues; {done} steps were done before and are not done again", "bold")


async def _wait(app: App, run: str, watcher: Watcher, stop: asyncio.Event) -> bool:
    """Watch until the run has ended or is held (True), or until a stop was requested (False)."""
    end = asyncio.ensure_future(app.watchers.wait_for_end(run))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while not (end.done() or stopped.done()):
            pause = watcher.look()
            await asyncio.wait({end, stopped}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            end.result()
            watcher.look()
            return True
        return False
    finally:
        end.cancel()
        stopped.cancel()


def report_end(
    row: RunRow, holds: list[HoldRow], facts: dict[str, Any], url: str | None, timeline: Timeline, *, in_json: bool
) -> int:
    """Print how a run has ended, and return the matching exit status."""
    if in_json:
        facts = {"run": row.id, "workflow": row.workflow, "status": row.status, **facts}
        facts |= {"generation": row.generation, "attempts": {one.name: len(one.attempts) for one in timeline.steps}}
        if row.status == "completed":
            facts["result"] = payload_json(row.outcome or b"[null]")
        elif row.status == "failed":
            facts["error"] = timeline.error or {}
        facts["holds"] = [hold_view(hold, url) for hold in holds]
        say_json(facts)
    else:
        _print_end(row, holds, url, timeline)
    return {"completed": EXIT_DONE, "held": EXIT_HELD}.get(row.status, EXIT_FAILED)


def _print_end(row: RunRow, holds: list[HoldRow], url: str | None, timeline: Timeline) -> None:
    err = console(err=True)
    took = duration(((row.ended_at or row.updated_at) - row.created_at) / 1e6)
    if row.status == "completed":
        err.print(styled("✓ ", "bold green").append(f"run {row.id} completed in {took}", style=""))
        click.echo(json_text(payload_json(row.outcome or b"[null]")))
    elif row.status == "failed":
        why = clean(error_line(timeline.error or {}))
        err.print(styled("✗ ", "bold red").append(f"run {row.id} failed: {why}"))
        err.print(styled("  see  " + line_to_paste("show", row.id, url=url), "dim"))
        if timeline.is_undone:
            undone = ", ".join(step.name for step in timeline.compensations() if step.undone == "compensated")
            err.print(styled("↩ ", "yellow").append(f"undone: {clean(undone)}"))
        else:
            line = line_to_paste("retry", row.id, url=url)
            err.print(styled(f"  then {line}  to continue from what failed", "dim"))
    elif row.status == "held":
        err.print(styled("◼ ", "bold yellow").append(f"run {row.id} is held: it waits for a person"))
        for hold in holds:
            err.print(draw_hold(hold_view(hold, url)), crop=False)
    else:
        how = "rolled back" if timeline.rolled_back else "cancelled"
        err.print(styled("⊘ ", "bold yellow").append(f"run {row.id} was {how}"))
