"""`everstep worker`: serve the workflows of some files."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from everstep.cli.durations import AGE, Time
from everstep.cli.logs import log_lines
from everstep.cli.opening import store_options
from everstep.cli.terminal import clean, clock_time, console, say_json_line, styled
from everstep.cli.workers import declare_gone, list_workers
from everstep.engine.app.opening import default_on_hold
from everstep.engine.history.clock import microseconds, wall_seconds
from everstep.engine.process.elsewhere import on_a_thread
from everstep.model.ids import checked_name
from everstep.model.retention import Retention
from everstep.stores.opening import default_url, open_store
from everstep.stores.protocol import Store
from everstep.view.store import place_of
from everstep.worker.health import Health, address_of, answer_on
from everstep.worker.loading import load_all, split
from everstep.worker.serving import News, WorkerApp, serve
from everstep.worker.stopping import stopping_on_signals
from everstep.worker.supervising import Supervisor, supervised
from everstep.worker.waiting import open_when_there, waiting_health

STYLES = {
    "completed": "green",
    "failed": "red",
    "held": "yellow",
    "cancelled": "yellow",
    "took up": "cyan",
    "saturated": "yellow",
    "restart": "yellow",
    "waiting": "yellow",
    "warning": "yellow",
    "error": "red",
}


@click.command("worker")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=100, show_default=True, help="Runs at the same time."
)
@click.option(
    "--drain", type=Time(bare=True), default="30s", show_default=True, metavar="TIME",
    help="How long steps under way may take to end when the worker is stopped.",
)  # fmt: skip
@click.option(
    "--lease", type=Time(bare=True, least=1), default="30s", show_default=True, metavar="TIME",
    help="How long a worker that does not answer keeps its runs. A dead one on this machine loses them at once.",
)  # fmt: skip
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="Serve only this queue; can be given again.")
@click.option(
    "--processes", type=click.IntRange(1, 256), default=1, show_default=True,
    help="Number of processes under this one, which starts them again when they die. Each has its own --concurrency.",
)  # fmt: skip
@click.option("--health", metavar="PORT", help="Answer /healthz and /readyz, to this machine only; or HOST:PORT.")
@click.option("--retention", type=AGE, metavar="AGE", help="Delete runs that ended this long ago: 30d, 12h, 90m.")
@click.option("--key-retention", type=AGE, metavar="AGE", help="Forget keys that did not change for this time.")
@click.option(
    "--gone-after", type=Time(bare=True, least=1), metavar="TIME",
    help="Workers elsewhere without a sign of life for this time count as gone. Risky: see the documentation.",
)  # fmt: skip
@click.option("--host", metavar="HOST", help="With `worker gone`: everything that was begun on this host.")
@click.option("--never-seen", is_flag=True, help="With --host: also if this store has never seen that host.")
@click.option("--note", default="", help="With `worker gone`: how you know. It is kept.")
@store_options
def worker_command(
    files: tuple[str, ...],
    concurrency: int,
    drain: float,
    lease: float,
    queues: tuple[str, ...],
    processes: int,
    health: str | None,
    retention: float | None,
    key_retention: float | None,
    gone_after: float | None,
    host: str | None,
    never_seen: bool,
    note: str,
    url: str | None,
    in_json: bool,
) -> int:
    """Serve workflows: resume their unfinished runs, now and from now on.

    Runs that a killed process left behind continue here. SIGTERM and Ctrl-C stop it in good order: no new body begins,
    steps under way may end, then the runs are given back. A second signal stops at once; nothing is lost by that
    either.

    `everstep worker ls` lists the workers of a store. `everstep worker gone WORKER --note …` (or `--host HOST`) says
    that it cannot act any more: probes settle its steps in doubt.
    """
    if files == ("ls",):
        list_workers(url, in_json=in_json)
        return 0
    if files[0] == "gone":
        return asyncio.run(declare_gone(files[1:], host, note, url, never_seen=never_seen, in_json=in_json))
    if host is not None or note or never_seen:
        raise click.UsageError("--host, --never-seen and --note go with `everstep worker gone`.")
    address = address_of(health) if health is not None else None
    if processes > 1:
        words = [*files, f"--concurrency={concurrency}", f"--drain={drain}", f"--lease={lease}"]
        words += [f"--queue={queue}" for queue in queues]
        words += [f"--retention={retention}s"] if retention is not None else []
        words += [f"--key-retention={key_retention}s"] if key_retention is not None else []
        words += [f"--gone-after={gone_after}"] if gone_after is not None else []
        words += [f"--url={url}"] if url is not None else []
        return _supervise([*words, *(["--json"] if in_json else [])], processes, address, url, in_json=in_json)
    workflows = load_all(files)
    narrowed = all(split(file)[1] for file in files)
    names = sorted(workflow.name for workflow in workflows)
    tell = _Teller(in_json=in_json)
    on_hold = default_on_hold()
    options: dict[str, Any] = {"concurrency": concurrency, "lease": lease, "workflows": names if narrowed else None}
    options["gone_after"] = gone_after
    options["queues"] = [checked_name(queue, "queue") for queue in queues] or None
    child = supervised()
    kept = Retention(runs=retention, keys=key_retention)

    def make(store: Store) -> WorkerApp:
        tell.now = store.now
        detail = f"serving {', '.join(names)} from {place_of(store)}" + (" (new)" if store.is_new else "")
        app = WorkerApp(store, tell, on_hold=on_hold, retention=kept, **options)
        tell(News(what="started", detail=detail))
        return app

    pipe = child[1] if child is not None else None
    opening = partial(open_store, url or default_url())
    with log_lines(lambda level, text: tell(News(what=level, detail=text))):
        return asyncio.run(serve(make, opening, tell, drain=drain, health=address, pipe=pipe))


def _supervise(words: list[str], count: int, address: tuple[str, int] | None, url: str | None, *, in_json: bool) -> int:
    """Keep a number of worker processes running until a signal stops them."""
    tell = _Teller(in_json=in_json)

    def say(what: str, detail: str) -> None:
        tell(News(what=what, detail=detail))

    async def work() -> int:
        store: Store | None = None
        supervisor = Supervisor(words, count, say)

        async def how() -> Health:
            if store is None:
                return waiting_health()
            return supervisor.health(await on_a_thread(store.workers))

        server = await answer_on(address, how) if address is not None else None
        try:
            with stopping_on_signals() as stop:
                store = await open_when_there(partial(open_store, url or default_url()), say, stop.asked)
            if store is None:
                return 0
            tell.now = store.now
            tell(News(what="started", detail=f"{count} processes under process {os.getpid()}"))
            return await supervisor.run()
        finally:
            if server is not None:
                server.close()

    return asyncio.run(work())


class _Teller:
    """Prints a worker's events: lines for people, or JSON lines. A supervisor's child adds its number."""

    def __init__(self, *, in_json: bool) -> None:
        child = supervised()
        self._number = child[0] if child is not None else None
        self._in_json = in_json
        self.now: Callable[[], int] = lambda: microseconds(wall_seconds())
        """The store's clock, once there is a store."""

    def __call__(self, news: News) -> None:
        if self._in_json:
            facts = {"process": self._number, "run": news.run, "workflow": news.workflow, "detail": news.detail}
            say_json_line({"at": self.now(), "what": news.what, **{k: v for k, v in facts.items() if v}})
            return
        named = f"{news.run} ({news.workflow})" if news.run else ""
        process = f"[{self._number}]" if self._number is not None else ""
        text = "  ".join(filter(None, [process, named, news.detail]))
        style = STYLES.get(news.what, "dim")
        line = styled(f"{clock_time(self.now())}  ", "dim").append(f"{news.what:<10}", style=style).append(clean(text))
        console().print(line, soft_wrap=True)
