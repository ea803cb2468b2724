"""`everstep worker`: serve the workflows of some files."""

import asyncio

import click

from everstep.cli.collecting import Age
from everstep.cli.logs import log_lines
from everstep.cli.opening import place_of, store_options
from everstep.cli.terminal import clean, clock_time, console, say_json_line, styled
from everstep.engine.opening import default_on_hold, default_url
from everstep.model.retention import Retention
from everstep.stores.opening import open_store
from everstep.stores.protocol import Store
from everstep.worker.loading import load_all, split
from everstep.worker.serving import News, Tell, WorkerApp, serve

STYLES = {
    "completed": "green",
    "failed": "red",
    "held": "yellow",
    "cancelled": "yellow",
    "took up": "cyan",
    "warning": "yellow",
    "error": "red",
}


@click.command("worker")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=100, show_default=True, help="Runs at the same time."
)
@click.option(
    "--drain", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="SECONDS",
    help="How long steps under way may take to end when the worker is stopped.",
)  # fmt: skip
@click.option(
    "--lease", type=click.FloatRange(min=1), default=30.0, show_default=True, metavar="SECONDS",
    help="How long a worker that does not answer keeps its runs. A dead one on this machine loses them at once.",
)  # fmt: skip
@click.option("--retention", type=Age(), metavar="AGE", help="Delete runs that ended so long ago: 30d, 12h, 90m.")
@click.option("--key-retention", type=Age(), metavar="AGE", help="Forget keys that did not change for so long.")
@store_options
def worker_command(
    files: tuple[str, ...],
    concurrency: int,
    drain: float,
    lease: float,
    retention: float | None,
    key_retention: float | None,
    url: str | None,
    in_json: bool,
) -> int:
    """Serve workflows: take up their unfinished runs, now and all the time.

    Runs that a killed process left behind go on here. SIGTERM and Ctrl-C stop it in good order: steps under way may
    end, then the runs are given back. A second signal stops at once; nothing is lost by that either.
    """
    workflows = load_all(files)
    narrowed = all(split(file)[1] for file in files)
    store = open_store(url or default_url())
    tell = _teller(store, in_json=in_json)
    names = sorted(workflow.name for workflow in workflows)
    detail = f"serving {', '.join(names)} from {place_of(store)}" + (" (new)" if store.is_new else "")
    on_hold = default_on_hold()
    options = {"concurrency": concurrency, "lease": lease, "workflows": names if narrowed else None}
    kept = Retention(runs=retention, keys=key_retention)

    async def work() -> int:
        app = WorkerApp(store, tell, on_hold=on_hold, retention=kept, **options)
        tell(News(what="started", detail=detail))
        return await serve(app, tell, drain=drain)

    with log_lines(lambda level, text: tell(News(what=level, detail=text))):
        return asyncio.run(work())


def _teller(store: Store, *, in_json: bool) -> Tell:
    """Return what prints a worker's news: lines for people, or JSON lines."""

    def tell(news: News) -> None:
        if in_json:
            facts = {"run": news.run, "workflow": news.workflow, "detail": news.detail}
            say_json_line({"at": store.now(), "what": news.what, **{k: v for k, v in facts.items() if v}})
            return
        named = f"{news.run} ({news.workflow})" if news.run else ""
        _print_line(store, news.what, "  ".join(filter(None, [named, news.detail])), STYLES.get(news.what, "dim"))

    return tell


def _print_line(store: Store, what: str, text: str, style: str) -> None:
    line = styled(f"{clock_time(store.now())}  ", "dim").append(f"{what:<10}", style=style).append(clean(text))
    console().print(line, soft_wrap=True)
