"""`everstep effects`: the keys of effects, their owners and outcomes, and a person's decision about one."""

import asyncio
from typing import Any, Final

import click

from everstep.cli.arguments import decoded_json
from everstep.cli.opening import acting, line_to_paste, reading, store_options, user_name
from everstep.cli.terminal import add_fitted, clean, console, say_json, shortened, styled
from everstep.errors import Misuse
from everstep.view.keys import KEY_STATES, KeyView, key_view, key_views
from everstep.view.store import place_of
from everstep.view.words import between

STATE_STYLES: Final = {"done": "green", "in-doubt": "yellow", "under-way": "cyan", "undoing": "magenta"}


@click.command("effects")
@click.option("--key", metavar="PATTERN", help="Only keys that begin with this, or match it if it has * or ?.")
@click.option("--run", metavar="ID", help="Only those that steps of this run have, or had last.")
@click.option("--step", metavar="NAME", help="Only those of this step.")
@click.option("--state", type=click.Choice(KEY_STATES), help="in-doubt: under way or undoing, and the run has ended.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--free", metavar="KEY", help="Let the action be done again, by the next step that asks for the key.")
@click.option("--done", nargs=2, metavar="KEY JSON", help="An action left in doubt did happen; this is its outcome.")
@click.option("--note", default="", help="With --free and --done: why; it is kept with the key.")
@click.option("--yes", is_flag=True, help="With --free and --done: do it; without it the consequences are only shown.")
@store_options
def effects_command(
    free: str | None, done: tuple[str, str] | None, note: str, yes: bool, url: str | None, in_json: bool, **wanted: Any
) -> None:
    """List the keys of effects (`@step(key=…)`), the most recently changed first.

    A key belongs to the step that was begun under it. While that is under way, others with the key wait for it; when it
    is done, they share its outcome; while it is undoing (its run compensates it), they wait again. Keys outlive their
    runs, until they are freed or forgotten.

    When a run has ended and left a step or its compensation in doubt, its key waits for a person: --free if it did not
    happen, or is undone; --done if it did, and is not.
    """
    if free is not None and done is not None:
        raise click.UsageError("Say either --free or --done.")
    if free is not None or done is not None:
        key = free if free is not None else done[0] if done is not None else ""
        value = decoded_json(done[1], "--done") if done is not None else None
        asyncio.run(_decide(key, "free" if done is None else "done", value, note, url, yes=yes, in_json=in_json))
        return
    with reading(url) as store:
        found = key_views(store, **wanted)
        now, place = store.now(), place_of(store)
    if in_json:
        say_json(found)
    else:
        _print_rows(found, now, place, url)


def _print_rows(found: list[KeyView], now: int, place: str, url: str | None) -> None:
    from rich.table import Table

    out = console()
    if not found:
        out.print(styled(f"No key matches in {place}.", "dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("key", "state", "step", "run", "age", "waiting", "outcome"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("age", "waiting") else "left")
    cells: list[list[Any]] = []
    for one in found:
        line = [styled(shortened(one.key, 60), "bold"), styled(one.state, STATE_STYLES.get(one.state, "dim"))]
        line += [styled(shortened(one.step, 28)), styled(one.run), styled(between(one.changed_at, now))]
        cells.append([*line, styled(len(one.waiting) or ""), styled(one.preview, "dim")])
    add_fitted(table, cells, out.width)
    out.print(table, crop=False)
    for one in found:
        if one.state == "in-doubt":
            what, no, yes = (
                ("was undone", "it was", "it was not") if one.is_undoing else ("happened", "it did not", "it did")
            )
            free, done = (
                line_to_paste("effects", *words, url=url)
                for words in (("--free", one.key), ("--done", one.key, "JSON"))
            )
            out.print(styled(f"{one.key}: run {one.run} has ended, and it is not known whether it {what}.", "yellow"))
            out.print(styled(f"  {no + ':':<13}{free}", "bold"))
            out.print(styled(f"  {yes + ':':<13}{done}", "bold"))


async def _decide(key: str, what: str, value: Any, note: str, url: str | None, *, yes: bool, in_json: bool) -> None:
    async with acting(url) as app:
        row = app.store.effect(key)
        if row is None or row.state == "free":
            raise Misuse(f"No step has the key {clean(key)!r} in {place_of(app.store)}. `everstep effects` lists them.")
        one = key_view(app.store, row)
        means, waiting = one.consequence(what), one.waiting
        if yes and what == "free":
            await app.free_key(key, note=note, by=user_name())
        elif yes:
            await app.settle_key(key, value, note=note, by=user_name())
    said = {"key": key, "decision": what, "decided": yes, "consequence": means, "run": one.run, "waiting": waiting}
    if in_json:
        say_json(said)
        return
    out = console()
    if yes:
        out.print(styled("✓ ", "green").append(f"{clean(key)}: {means}"))
        return
    out.print(styled(key, "bold").append(f"  {row.state}  {clean(row.step)} of run {row.run}"))
    out.print(f"With --{what}: {means}." + (f" {len(waiting)} runs wait for it." if waiting else ""))
    out.print("Nothing was changed. Repeat it with --yes to do so.")
