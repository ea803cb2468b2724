"""`everstep export` and `everstep import`: moving runs between stores."""

import asyncio
from typing import Any, Literal

import click

from everstep.cli.mistakes import EXIT_DONE
from everstep.cli.opening import acting, line_to_paste, store_options, user_name
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.app.app import App
from everstep.engine.app.opening import default_on_hold
from everstep.engine.verbs.export_file import read_header
from everstep.engine.verbs.transfer import Exported, Imported
from everstep.stores.opening import default_url, open_store
from everstep.view.store import place_of


@click.command("export")
@click.argument("words", nargs=-1, required=True, metavar="[RUN]... FILE")
@click.option("--all", "all_runs", is_flag=True, help="Everything: runs, threads, items and schedules.")
@click.option("--thread", "threads", multiple=True, metavar="ID", help="A thread of LangGraph. May be repeated.")
@click.option("--items", is_flag=True, help="The items of LangGraph's store.")
@click.option("--schedule", "schedules", multiple=True, metavar="NAME", help="A schedule. May be repeated.")
@click.option("--hold", is_flag=True, help="Hold unfinished ones here: they go on where the file is imported.")
@click.option("--leave", is_flag=True, help="Let unfinished ones go on here: the file is only a copy.")
@click.option("--with-secrets", "secrets", is_flag=True, help="Also what is secret: guard the file as the store.")
@store_options
def export_command(
    words: tuple[str, ...],
    all_runs: bool,
    threads: tuple[str, ...],
    items: bool,
    schedules: tuple[str, ...],
    hold: bool,
    leave: bool,
    secrets: bool,
    url: str | None,
    in_json: bool,
) -> int:
    """Write runs into a new file, with their parents, children and whatever they wait for.

    Unfinished runs must not be driven in two stores, so for them --hold or --leave has to be said. What is secret is
    left out, and a run without it can be looked at, and not go on; --with-secrets puts it in.
    """
    *runs, path = words
    if bool(runs or threads or items or schedules) == all_runs:
        raise click.UsageError("Name the runs (or --thread, --items, --schedule) and then the FILE, or say --all.")
    if hold and leave:
        raise click.UsageError("--hold and --leave exclude each other.")
    unfinished: Literal["hold", "leave"] | None = "hold" if hold else "leave" if leave else None

    async def do() -> tuple[Exported, str]:
        async with acting(url) as app:
            wanted = None if all_runs else runs
            more: Any = {"threads": threads, "items": items, "schedules": schedules}
            options: Any = {"unfinished": unfinished, "secrets": secrets, "by": user_name()}
            done = await app.export(wanted, path, **options, **more)
            return done, place_of(app.store)

    done, place = asyncio.run(do())
    if in_json:
        facts = {"store": place, "file": path, "mode": done.mode, "runs": done.runs, "unfinished": done.unfinished}
        say_json({**facts, "left_out": done.left_out, **_others(done)})
        return EXIT_DONE
    out = console()
    out.print(styled("✓ ", "green").append(f"{len(done.runs)} runs of {place} are in {clean(path)}{_told(done)}"))
    if done.mode == "hold":
        text = f"{len(done.unfinished)} had not ended. They are HELD here, and go on where the file is imported."
        out.print(styled(f"  {text} Do not resolve those holds unless the file is thrown away.", "yellow"))
    elif done.mode == "leave":
        text = f"{len(done.unfinished)} have not ended and GO ON HERE. Whoever drives the copies does everything twice."
        out.print(styled(f"  {text}", "yellow"))
    if done.left_out:
        text = (
            f"The secrets of {len(done.left_out)} were left out: they can be looked at elsewhere, and not go on there."
        )
        out.print(styled(f"  {text} --with-secrets puts them in.", "yellow"))
    return EXIT_DONE


def _others(done: Exported | Imported) -> dict[str, Any]:
    return {"threads": done.threads, "items": done.items, "schedules": done.schedules}


def _told(done: Exported | Imported) -> str:
    """Return what there was beside runs, if there was anything."""
    if not (done.threads or done.items or done.schedules):
        return ""
    return f", with {len(done.threads)} threads, {done.items} items and {len(done.schedules)} schedules"


@click.command("import")
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@click.option("--skip-existing", is_flag=True, help="Leave runs alone whose ids are here already.")
@click.option("--copies", is_flag=True, help="Also unfinished runs that go on elsewhere: all they do is done twice.")
@store_options
def import_command(path: str, skip_existing: bool, copies: bool, url: str | None, in_json: bool) -> int:
    """Put the runs of an exported file into this store, which is created if need be. Unfinished ones go on here.

    All of the file is verified before anything is written. Each family of runs is imported in one transaction; after a
    crash say the same with --skip-existing.
    """
    with open(path, "rb") as file:
        read_header(file)  # before a store is created for it

    async def do() -> tuple[Imported, str]:
        app = App(open_store(url or default_url()), workflows=(), on_hold=default_on_hold())
        await app.open()
        try:
            return await app.import_(path, skip_existing=skip_existing, copies=copies), place_of(app.store)
        finally:
            await app.close()

    done, place = asyncio.run(do())
    if in_json:
        facts = {"store": place, "runs": done.runs, "skipped": done.skipped, "unfinished": done.unfinished}
        say_json({**facts, "asking": done.asking, **_others(done)})
        return EXIT_DONE
    out = console()
    out.print(
        styled("✓ ", "green").append(
            f"{len(done.runs)} runs imported into {place}{_told(done)}; {len(done.skipped)} were there"
        )
    )
    if done.unfinished:
        line = line_to_paste("worker", "app.py", url=url)
        out.print(
            f"  {len(done.unfinished)} of them have not ended. A worker with their code goes on with them: {line}"
        )
    if done.asking:
        line = line_to_paste("resolve", "--reason", "restored", "--accept", url=url)
        out.print(
            f"  {len(done.asking)} of these ask before they do what must not happen twice, for a backup was restored, "
            f"here or where they come from. When you have checked that nothing is missing: {line}"
        )
    return EXIT_DONE
