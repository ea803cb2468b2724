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
@click.option("--hold", is_flag=True, help="Hold unfinished ones here: they continue where the file is imported.")
@click.option("--leave", is_flag=True, help="Let unfinished ones continue here: the file is only a copy.")
@click.option("--with-secrets", "secrets", is_flag=True, help="Include secrets: protect the file like the store.")
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
    """Write runs into a new file, with their parents, children and the runs that they wait for.

    Unfinished runs must not be driven in two stores, so they need --hold or --leave. Secrets are
    left out, and a run without its secrets can be inspected, but not continue; --with-secrets includes them.
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
        text = f"{len(done.unfinished)} had not ended. They are HELD here, and continue where the file is imported."
        out.print(styled(f"  {text} Do not resolve those holds unless the file is thrown away.", "yellow"))
    elif done.mode == "leave":
        text = f"{len(done.unfinished)} have not ended and CONTINUE HERE. If the copies run too, all is done twice."
        out.print(styled(f"  {text}", "yellow"))
    if done.left_out:
        text = f"The secrets of {len(done.left_out)} were left out: they can be inspected elsewhere, but not continue."
        out.print(styled(f"  {text} --with-secrets puts them in.", "yellow"))
    return EXIT_DONE


def _others(done: Exported | Imported) -> dict[str, Any]:
    return {"threads": done.threads, "items": done.items, "schedules": done.schedules}


def _told(done: Exported | Imported) -> str:
    """Return what was exported or imported in addition to runs."""
    if not (done.threads or done.items or done.schedules):
        return ""
    return f", with {len(done.threads)} threads, {done.items} items and {len(done.schedules)} schedules"


@click.command("import")
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@click.option("--skip-existing", is_flag=True, help="Skip runs whose ids exist here.")
@click.option("--copies", is_flag=True, help="Also unfinished runs that continue elsewhere: they do all twice.")
@store_options
def import_command(path: str, skip_existing: bool, copies: bool, url: str | None, in_json: bool) -> int:
    """Put the runs of an exported file into this store, which is created if necessary. Unfinished ones continue here.

    All of the file is verified before anything is written. Each family of runs is imported in one transaction; after a
    crash repeat the command with --skip-existing.
    """
    with open(path, "rb") as file:
        read_header(file)  # check the file before a store is created for it

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
        out.print(f"  {len(done.unfinished)} of them have not ended. A worker with their code continues them: {line}")
    if done.asking:
        line = line_to_paste("resolve", "--reason", "restored", "--accept", url=url)
        out.print(
            f"  {len(done.asking)} of these ask before they do what must not happen twice, because a backup was "
            f"restored, here or where they come from. When you have checked that nothing is missing: {line}"
        )
    return EXIT_DONE
