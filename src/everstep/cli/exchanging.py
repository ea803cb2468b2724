"""What a person exchanges with a run: `ask` and wait for the answer, `stream` and read along."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import click

from everstep.cli.arguments import decoded_json
from everstep.cli.durations import Time
from everstep.cli.opening import acting, existing_run, line_to_paste, store_options
from everstep.cli.resolving import is_served_here
from everstep.cli.terminal import clean, json_text, say_json, say_json_line
from everstep.codec import Codec
from everstep.engine.app.app import App
from everstep.engine.verbs.streams import Entry, entries_now
from everstep.errors import NoAnswer
from everstep.model.secrets import HIDDEN
from everstep.model.status import ENDED
from everstep.view.plain import payload_json


@click.command("ask")
@click.argument("run")
@click.argument("name")
@click.argument("value", metavar="[JSON]", default="null")
@click.option("--ask-id", metavar="TEXT", help="Asking again with the same one gives the same answer.")
@click.option(
    "--timeout",
    type=Time(bare=True),
    metavar="TIME",
    help="How long to wait, such as 90s. Default: as long as it takes.",
)
@store_options
def ask_command(
    run: str, name: str, value: str, ask_id: str | None, timeout: float | None, url: str | None, in_json: bool
) -> None:
    """Ask a run something, and print its answer.

    \b
        everstep ask report-17 rename '"tides"'

    The run answers when it takes requests of this name. A refusal is an error.
    """  # noqa: D301  # click wants the character itself
    decoded = decoded_json(value, "The value")

    async def do() -> Any:
        async with acting(url) as app:
            row = existing_run(app.store, run)
            app.store.bury_dead(app.clock.now())
            if not (in_json or row.status in ENDED or is_served_here(app)):
                click.echo("No process drives the run: it answers when one resumes it.", err=True)
            try:
                return await app.ask(run, name, decoded, id=ask_id, timeout=timeout)
            except NoAnswer as late:
                line = line_to_paste("ask", run, name, value, "--ask-id", late.id, url=url)
                told = (
                    f"The run {run} has not answered within {timeout:g} s. It keeps the request. To continue waiting:"
                )
                raise NoAnswer(f"{told}\n{line}", late.id) from None

    answer = _plain(asyncio.run(do()))
    if in_json:
        say_json({"run": run, "request": name, "answer": answer})
    else:
        click.echo(json_text(answer))


@click.command("stream")
@click.argument("run")
@click.argument("name")
@click.option("--follow", is_flag=True, help="Continue until the run has ended.")
@click.option("--after", type=click.IntRange(min=0), default=0, metavar="POSITION", help="Begin behind this entry.")
@click.option("--text", "as_text", is_flag=True, help="Print only the texts, one after the other without line breaks.")
@store_options
def stream_command(
    run: str, name: str, follow: bool, after: int, as_text: bool, url: str | None, in_json: bool
) -> None:
    """Print what a run has appended to a stream.

    \b
        everstep stream report-17 tokens --follow

    An entry that begins another attempt at a step is marked: what the step wrote before came from an attempt that was
    cut off or failed.
    """  # noqa: D301  # click wants the character itself

    async def do() -> None:
        async with acting(url) as app:
            row = existing_run(app.store, run)
            there = {one: None for history in app.store.generations(run) for one, _ in app.store.streams(run, history)}
            if name not in there and not in_json and (row.status in ENDED or not follow):
                others = f" It has {', '.join(map(clean, there))}." if there else ""
                click.echo(f"The run {run} has appended nothing to a stream {clean(name)}.{others}", err=True)
            async for entry in _entries(app, run, name, after, follow=follow):
                _say(entry, in_json=in_json, as_text=as_text)

    asyncio.run(do())
    if as_text and not in_json:
        click.echo()


async def _entries(app: App, run: str, name: str, after: int, *, follow: bool) -> AsyncIterator[Entry]:
    if follow:
        async for entry in app.get(run).stream(name, after=after):
            yield entry
    else:
        for entry in entries_now(app, run, name, after):
            yield entry


def _say(entry: Entry, *, in_json: bool, as_text: bool) -> None:
    value = HIDDEN if entry.secret else _plain(entry.value)
    if in_json:
        say_json_line({**entry._asdict(), "value": value})
    elif as_text:
        click.echo(clean(value) if isinstance(value, str) else json_text(value, indent=-1), nl=False)
    else:
        by = f"{clean(entry.step)}, attempt {entry.attempt}" if entry.step else "workflow"
        again = "  (begins again)" if entry.first and entry.attempt > 1 else ""
        click.echo(f"{entry.position:>6}  {by}  {json_text(value, indent=-1)}{again}")


def _plain(value: Any) -> Any:
    """Return a value as JSON data."""
    return payload_json(Codec().encode(value))
