"""`signal`, `cancel`, `retry`, `hold`, `rollback`: each is durable when the command ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import click

from everstep.cli.arguments import decoded_json
from everstep.cli.mistakes import EXIT_FAILED
from everstep.cli.opening import acting, existing_run, store_options, user_name
from everstep.cli.rejections import rejection_of, say_rejected
from everstep.cli.resolving import is_served_here, say_who_goes_on
from everstep.cli.terminal import console, say_json, styled
from everstep.engine.app.app import App
from everstep.model.status import ENDED
from everstep.stores.protocol import RunRow


def _act(
    run: str,
    url: str | None,
    act: Callable[[App], Awaitable[Any]],
    said: dict[str, Any],
    text: str = "",
    *,
    in_json: bool,
) -> tuple[RunRow, bool]:
    """Act on a run, print the result, and return the run's row and whether a worker is there.

    text: what to print; by default, what `act` returns.
    """

    async def do() -> tuple[RunRow, bool, Any]:
        async with acting(url) as app:
            existing_run(app.store, run)
            done = await act(app)
            return existing_run(app.store, run), is_served_here(app), done

    row, is_served, done = asyncio.run(do())
    if in_json:
        say_json({"run": run, **said, "status": row.status})
    else:
        console().print(styled("✓ ", "green").append(f"{run}: {text or done}"))
    return row, is_served


@click.command("signal")
@click.argument("run")
@click.argument("name")
@click.argument("value", metavar="[JSON]", default="null")
@click.option("--signal-id", metavar="TEXT", help="Sending again with the same one delivers the signal once.")
@click.option("--no-wait", is_flag=True, help="Do not wait until a worker has taken it, or rejected it.")
@store_options
def signal_command(
    run: str, name: str, value: str, signal_id: str | None, no_wait: bool, url: str | None, in_json: bool
) -> int | None:
    """Send a signal to a run.

    \b
        everstep signal report-17 approved true

    It is kept until the run asks for it, also while no process drives the run. If a worker is there, the command waits
    up to two seconds until the run has taken the signal. It ends with status 1 if the run rejects it, because it is not
    of the type that the code waits for; the run keeps waiting then.
    """  # noqa: D301  # click wants the character itself
    decoded = decoded_json(value, "The value")
    said: dict[str, Any] = {"signal": name, "signal_id": signal_id or ""}
    texts = {True: f"the signal {name} is in its inbox", False: f"it has the signal {name} with this id already"}

    async def send(app: App) -> str:
        said["new"] = await app.signal(run, name, decoded, id=signal_id)
        if not no_wait and (why := await rejection_of(app, run, name)):
            said["rejected"] = why
        return texts[said["new"]]

    row, is_served = _act(run, url, send, said, in_json=in_json)
    if why := said.get("rejected"):
        if not in_json:
            say_rejected(run, f"the signal {name}", why)
        return EXIT_FAILED
    if not in_json and row.status in ENDED:
        console().print(styled(f"  The run has ended ({row.status}); it took that signal before.", "dim"))
    elif not in_json and row.status == "held":
        console().print(styled("  The run is held; it takes the signal when that is resolved.", "dim"))
    elif not in_json and not is_served:
        say_who_goes_on(run, url, is_served=False)
    return None


@click.command("cancel")
@click.argument("run")
@click.option("--reason", default="", help="Why; it is kept in the history.")
@click.option("--grace", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="SECONDS")
@click.option("--now", is_flag=True, help="End it without its code: no `finally` block runs.")
@store_options
def cancel_command(run: str, reason: str, grace: float, now: bool, url: str | None, in_json: bool) -> None:
    """Ask a run to stop.

    Its code gets a CancelledError and may clean up for --grace seconds. The request is never lost: it takes effect, or
    this command says that the run had ended.
    """
    row, is_served = _act(
        run,
        url,
        lambda app: app.cancel(run, reason, grace=grace, now=now, by=user_name()),
        {"cancel": "requested"},
        "cancel requested",
        in_json=in_json,
    )
    if not in_json and row.status == "cancelled":
        console().print(styled("  It is cancelled now.", "dim"))
    elif not in_json and not is_served:
        console().print(styled("  No process drives it: it stops when one resumes it, or at once with --now.", "dim"))


@click.command("retry")
@click.argument("run")
@click.option(
    "--across-once", is_flag=True, help="Also if `once` steps have happened after the failure; they are not done again."
)
@store_options
def retry_command(run: str, across_once: bool, url: str | None, in_json: bool) -> None:
    """Continue a failed run from what failed, as a new attempt. What was done stays done.

    Signals and requests that the run had not taken when it failed are in its inbox again.
    """
    text = "continues from what failed"
    said = {"retried": True}
    _, is_served = _act(
        run, url, lambda app: app.retry(run, by=user_name(), across_once=across_once), said, text, in_json=in_json
    )
    if not in_json:
        say_who_goes_on(run, url, is_served=is_served)


@click.command("hold")
@click.argument("run")
@click.option("--note", default="", help="Why; it is kept in the history.")
@store_options
def hold_command(run: str, note: str, url: str | None, in_json: bool) -> None:
    """Put a run on hold until a person or a program resolves it."""
    _act(run, url, lambda app: app.hold(run, note, by=user_name()), {"hold": "asked"}, "put on hold", in_json=in_json)


@click.command("rollback")
@click.argument("run")
@click.option("--note", default="", help="Why; it is kept in the history.")
@click.option(
    "--allow-uncompensated",
    is_flag=True,
    help="Also if effects stay that must not happen twice and have no compensation.",
)
@store_options
def rollback_command(run: str, note: str, allow_uncompensated: bool, url: str | None, in_json: bool) -> None:
    """Undo what a run did, the last step first; then it is cancelled.

    The compensations of its completed steps (`compensate=`) run, each with its own contract, in a process that knows
    the workflow. An unfinished run stops for that, whatever its code does; an ended one is resumed.
    """
    text = "rollback requested"
    row, is_served = _act(
        run,
        url,
        lambda app: app.rollback(run, note, allow_uncompensated=allow_uncompensated, by=user_name()),
        {"rollback": "requested"},
        text,
        in_json=in_json,
    )
    if not in_json and row.status != "cancelled":
        say_who_goes_on(run, url, is_served=is_served)
