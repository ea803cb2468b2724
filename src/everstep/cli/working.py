"""`everstep worker`: serve the workflows of some files."""

import asyncio
import logging

import click

from everstep.cli.opening import place_of, store_options
from everstep.cli.terminal import clean, clock_time, console, say_json_line, styled
from everstep.engine.opening import default_url
from everstep.stores.opening import open_store
from everstep.stores.protocol import Store
from everstep.worker.loading import load_all, split
from everstep.worker.serving import News, Tell, WorkerApp, serve

STYLES = {"completed": "green", "failed": "red", "held": "yellow", "cancelled": "yellow", "took up": "cyan"}


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
@store_options
def worker_command(
    files: tuple[str, ...], concurrency: int, drain: float, lease: float, url: str | None, in_json: bool
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
    options = {"concurrency": concurrency, "lease": lease, "workflows": names if narrowed else None}

    async def work() -> int:
        app = WorkerApp(store, tell, **options)
        tell(News(what="started", detail=detail))
        return await serve(app, tell, drain=drain)

    return asyncio.run(work())


class _LogLines(logging.Handler):
    """Puts the engine's warnings between the worker's own lines, with nothing in them that a terminal obeys."""

    def __init__(self, store: Store, *, in_json: bool) -> None:
        super().__init__(logging.WARNING)
        self._store = store
        self._in_json = in_json

    def emit(self, record: logging.LogRecord) -> None:
        if self._in_json:
            say_json_line({"at": self._store.now(), "what": "log", "detail": record.getMessage()})
        else:
            _print_line(self._store, record.levelname.lower(), record.getMessage(), "yellow")


def _teller(store: Store, *, in_json: bool) -> Tell:
    """Return what prints a worker's news: lines for people, or JSON lines."""
    logger = logging.getLogger("everstep")
    logger.addHandler(_LogLines(store, in_json=in_json))
    logger.propagate = False

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
