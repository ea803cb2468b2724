"""`everstep fork`: a new run from an event of another one."""

import asyncio

import click
import msgspec

from everstep.cli.arguments import Call, decoded_arguments, decoded_json
from everstep.cli.opening import acting, existing_run, line_to_paste, store_options, user_name
from everstep.cli.resolving import is_served_here, say_who_goes_on
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.code.workflow import DECLARED
from everstep.engine.verbs.fork import Wanted, fork
from everstep.errors import Misuse
from everstep.model.events import decode_body
from everstep.stores.protocol import RunRow
from everstep.worker.loading import load_all


def _arguments(source: RunRow, given: str, file: str | None) -> Call:
    """Return the arguments with which the new run begins, as the workflow takes them."""
    values = decoded_json(given, "--input")
    if not isinstance(values, list | dict):
        raise Misuse("At event 1, --input is all arguments of the workflow: a JSON list, or a JSON object by name.")
    if file is None:
        raise Misuse(f"What {source.workflow} takes is known to your code only: name its file with --app.")
    if isinstance(values, dict):
        texts = tuple(f"{name}={msgspec.json.encode(one).decode()}" for name, one in values.items())
    else:
        texts = tuple(msgspec.json.encode(one).decode() for one in values)
    return decoded_arguments(DECLARED.named(source.workflow), texts)


@click.command("fork")
@click.argument("run")
@click.option("--at", type=click.IntRange(min=1), required=True, metavar="SEQ", help="The last event to keep.")
@click.option(
    "--input",
    "given",
    metavar="JSON",
    help="At event 1: the arguments to begin with, a list or an object by name. At an outcome: what takes its place.",
)
@click.option("--app", "file", metavar="FILE", help="Your code: it says what arguments are, and is replayed first.")
@click.option("--id", "id", metavar="ID", help="The new run's id.")
@click.option("--generation", type=click.IntRange(min=1), help="An earlier history of the run.")
@click.option("--allow", multiple=True, metavar="STEP", help="A step that may be done once more; can be given again.")
@click.option("--allow-effects", is_flag=True, help="All of them may.")
@click.option("--note", default="", help="Why; it is kept in the history.")
@store_options
def fork_command(
    run: str,
    at: int,
    given: str | None,
    file: str | None,
    id: str | None,
    generation: int | None,
    allow: tuple[str, ...],
    allow_effects: bool,
    note: str,
    url: str | None,
    in_json: bool,
) -> None:
    """Start a new run that begins with what another one did up to an event, and continues from there by itself.

    \b
        everstep history report-17                               # which event
        everstep fork report-17 --at 12
        everstep fork report-17 --at 12 --input '"another answer"'
        everstep fork report-17 --at 1 --input '["moons"]' --app app.py

    The other run is not touched. What it did after that event would be done once more, with other keys: steps that are
    not `read` are named and refused, unless they are allowed.
    """  # noqa: D301  # click wants the character itself
    if file is not None:
        load_all((file,))
    wanted = Wanted(run, at, generation, id=id, allowed=allow_effects or allow, note=note, by=user_name())

    async def do() -> tuple[RunRow, bool]:
        async with acting(url) as app:
            source = existing_run(app.store, run)
            if given is not None and at == 1:
                wanted.args, wanted.kwargs = _arguments(source, given, file)
            elif given is not None:
                wanted.outcome = decoded_json(given, "--input")
            row = existing_run(app.store, await fork(app, wanted))
            origin = decode_body("run_started", app.store.events(row.id, 1, only=[1])[0].body).forked
            if in_json:
                facts = {"run": row.id, "forked_from": origin.run, "generation": origin.generation, "at": origin.seq}
                say_json({**facts, "edited": origin.edited, "status": row.status})
            return row, is_served_here(app)

    row, is_served = asyncio.run(do())
    if in_json:
        return
    out = console()
    text = f"{clean(row.id)}: forked from {clean(row.tags.get('forked-from', run))}"
    out.print(styled("✓ ", "green").append(text))
    out.print(styled("  " + line_to_paste("show", row.id, url=url), "dim"))
    say_who_goes_on(row.id, url, is_served=is_served)
