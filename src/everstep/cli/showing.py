"""`everstep show`: what a run did, when, how often, what it waits for, and what to do about it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.cli.drawing import draw_timeline, status_text
from everstep.cli.graphs import draw_graph
from everstep.cli.holds import draw_hold
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED, EXIT_HELD
from everstep.cli.opening import existing_run, line_to_paste, reading, store_options
from everstep.cli.terminal import (
    arguments_text,
    clean,
    console,
    json_text,
    local_time,
    moment,
    say_json,
    shortened,
    styled,
    to_paste,
)
from everstep.errors import Misuse
from everstep.model.own_files import replace
from everstep.model.status import ENDED
from everstep.stores.protocol import Store
from everstep.view.run import RunView, Wait, run_view
from everstep.view.timeline import timeline_of
from everstep.view.words import between, counted, duration, error_line

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_SECONDS = 0.25
OURS = str(Path(__file__).parents[1])


@click.command("show")
@click.argument("run")
@click.option("--watch", is_flag=True, help="Keep showing until it has ended or is held; the exit status says how.")
@click.option("--svg", metavar="FILE", help="For a run of a graph: write a picture of the graph, with what happened.")
@store_options
def show_command(run: str, watch: bool, svg: str | None, url: str | None, in_json: bool) -> int:
    """Show a run: its steps over time, attempts, crashes, what it waits for, holds and errors."""
    with reading(url) as store:
        existing_run(store, run)
        if watch:
            return _watch(store, run, url, in_json=in_json)
        row = existing_run(store, run)
        view = run_view(store, row, url)
        if svg is not None:
            _write_picture(view, svg)
        elif in_json:
            say_json(view)
        else:
            out = console()
            out.print(draw_run(view, url, out.width), crop=False)
    return EXIT_DONE


def _watch(store: Store, run: str, url: str | None, *, in_json: bool) -> int:
    """Redraw until the run has ended or is held."""
    from rich.live import Live

    out = console()
    live = None if in_json or not out.is_terminal else Live(console=out, auto_refresh=False, screen=False)
    row = existing_run(store, run)
    timeline = timeline_of(store, run, row.generation)
    try:
        if live is not None:
            live.start()
        while row.status not in ENDED and row.status != "held":
            if live is not None:
                rows = max(4, out.height - 14)
                view = run_view(store, row, url, timeline)
                live.update(draw_run(view, url, out.width, most=rows), refresh=True)
            time.sleep(REFRESH_SECONDS)
            seen = (row.head_seq, row.generation)
            row = existing_run(store, run)
            if (row.head_seq, row.generation) != seen:
                timeline = timeline_of(store, run, row.generation)
    finally:
        if live is not None:
            live.update("", refresh=True)
            live.stop()
    view = run_view(store, row, url, timeline)
    if in_json:
        say_json(view)
    else:
        out.print(draw_run(view, url, out.width), crop=False)
    return {"completed": EXIT_DONE, "held": EXIT_HELD}.get(row.status, EXIT_FAILED)


def draw_run(view: RunView, url: str | None, width: int, *, most: int = 0) -> "RenderableType":
    """Return a run as a page for the terminal."""
    from rich.console import Group

    end = view.ended_at or (view.last_at if view.status == "held" else view.now)
    parts: list[Any] = [_heading(view), ""]
    if view.graph is not None:
        parts += [draw_graph(view.graph, view.status, width), ""]
    if rows := view.rows:
        parts += [draw_timeline(rows, view.started_at, now=end, width=width, most=most), ""]
    parts += _crashes(view)
    parts += _undone(view, url)
    if view.published:
        parts.append(styled("published", "dim"))
        parts += [styled(f"  {name} = {shortened(_one_line(value), 200)}") for name, value in view.published.items()]
        parts.append("")
    for name, count in view.streams.items():
        line = line_to_paste("stream", view.id, name, url=url)
        parts += [styled(f"stream {name}: {counted(count, 'entry', 'entries')}", "dim"), to_paste(line), ""]
    parts += _problems(view, url)
    parts += _draw_undelivered(view)
    parts += _draw_rejected(view)
    if view.is_unserved:
        text = f"no worker serves {clean(view.workflow)} in queue {clean(view.queue)}: start `everstep worker FILE`"
        parts.append(styled("◷ ", "blue").append(text))
    for wait in view.waits_for:
        parts += _draw_wait(wait, view.now)
    if view.status == "completed":
        parts += [styled("result", "dim"), styled(shortened(_one_line(view.result), 2000))]
    if not parts[-1]:
        parts.pop()
    return Group(*parts)


def _one_line(value: Any) -> str:
    return json_text(value, indent=-1)


def _draw_undelivered(view: RunView) -> list[Any]:
    """Say what was sent to a run that has ended, and what becomes of it."""
    lost = view.undelivered
    if not lost:
        return []
    names = ", ".join(clean(f"{one.kind} {one.name}" + (f" ({one.id})" if one.id else "")) for one in lost[:5])
    more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    then = f"; if it is retried (`everstep retry {clean(view.id)}`), it gets them" if view.status == "failed" else ""
    return [styled("✉ ", "yellow").append(f"not delivered before the run ended: {names}{more}{then}"), ""]


def _draw_rejected(view: RunView) -> list[Any]:
    """Say what was sent in the wrong type to a wait that is still open."""
    open_waits = {one.signal or one.approval for one in view.waits_for}
    lines: list[Any] = []
    for name in dict.fromkeys(one.name for one in view.rejected if one.name in open_waits):
        last = [one for one in view.rejected if one.name == name][-1]
        what = "the signal" if last.kind == "signal" else "the answer to"
        line = styled("✗ ", "red").append(f"rejected {what} {clean(name)}: {clean(last.why)}")
        lines += [line, styled("  The code did not get it, and the run still waits. Send another value:", "dim")]
    return lines


def _write_picture(view: RunView, file: str) -> None:
    """Write a picture of a run's graph, with what happened."""
    if view.graph is None:
        raise Misuse(f"{view.id} is not a run of a graph, so there is none to draw.")
    from everstep.graph.drawing import svg  # start-up: only a picture needs it

    picture = svg(f"The graph {view.graph.name} in run {view.id}", view.graph.nodes, view.graph.edges)
    replace(file, picture.encode())


def _heading(view: RunView) -> "RenderableType":
    from rich.console import Group

    first = styled(view.id, "bold").append("  ").append_text(status_text(view.status))
    if view.rolled_back:
        first.append(" (rolled back)", style="yellow")
    first.append(f"  {clean(view.workflow)}({shortened(clean(arguments_text(view.arguments)), 80)})")
    if view.generation > 1:
        first.append(f"  generation {view.generation}", style="dim")
    if view.forked is not None:
        edited = f", with another {view.forked.edited}" if view.forked.edited else ""
        first.append(f"  forked from {clean(view.forked.origin)}{edited}", style="cyan")
    attempts = sum(len(step.attempts) for step in view.steps)
    took = between(view.created_at, view.ended_at or view.now)
    facts = [f"began {local_time(view.created_at):%Y-%m-%d %H:%M:%S}"]
    facts += [f"took {took}" if view.ended_at else f"{took} ago"]
    facts += [f"{counted(len(view.completed_steps), 'step')} done, {counted(attempts, 'attempt')}"]
    if view.crashes:
        facts.append(f"{counted(len(view.crashes), 'crash', 'crashes')} survived")
    facts.append(counted(view.events, "event"))
    if view.checkpoints:
        facts.append(f"{counted(len(view.checkpoints), 'checkpoint')}, the newest at event {view.checkpoints[-1]}")
    lines = [first, styled(" · ".join(facts), "dim")]
    if view.budget_text:
        lines.append(styled(view.budget_text, "yellow" if view.status == "held" else "dim"))
    return Group(*lines, styled(view.store, "dim"))


def _crashes(view: RunView) -> list[Any]:
    lines: list[Any] = []
    for crash in view.crashes:
        gap = between(crash.last_sign_at, crash.went_on_at)
        steps = ", ".join(crash.steps[:4]) + (f" and {len(crash.steps) - 4} more" if len(crash.steps) > 4 else "")
        when = f"{local_time(crash.last_sign_at):%H:%M:%S}"
        line = styled("╳ ", "bold red")
        lines.append(line.append(f"cut off after {when} in {clean(steps)}; continued after {gap}"))
    return [*lines, ""] if lines else []


def _undone(view: RunView, url: str | None) -> list[Any]:
    """Return how far a run is undone, and what stays as it is."""
    if not view.is_undone:
        return []
    ended = view.status in ENDED
    titles = {"compensated": "undone", "wanted": "not undone" if ended else "to be undone", "skipped": "left as it is"}
    lines: list[str] = []
    for state, title in titles.items():
        if names := [name for name, undone in view.compensations.items() if undone == state]:
            lines.append(f"{title}: {', '.join(names)}")
            if state == "wanted" and ended:
                lines.append(f"continue undoing:  {line_to_paste('rollback', view.id, url=url)}")
    if not lines:
        lines.append("nothing had to be undone" if ended else "is about to be undone")
    return [*(styled("↩ ", "yellow").append(clean(line)) for line in lines), ""]


def _problems(view: RunView, url: str | None) -> list[Any]:
    """Return what is wrong: damage, errors with where they were raised, holds with their answers."""
    parts: list[Any] = [styled(view.problem, "bold red"), ""] if view.problem else []
    for step in view.steps:
        if step.state == "failed" and step.error and step.error != view.error:
            parts += _draw_error(f"step {step.name}", step.error)
    if view.error is not None:
        parts += _draw_error("the run", view.error)
        if view.status == "failed" and not view.is_undone:
            line = line_to_paste("retry", view.id, url=url)
            parts += [styled("go on from what failed:", "dim"), to_paste(line), ""]
    return parts + [draw_hold(hold) for hold in view.holds]


def _draw_error(what: str, error: dict[str, Any]) -> list[Any]:
    parts: list[Any] = [styled(f"✗ {what} failed with {error_line(error)}", "red")]
    parts += [styled(f"  {line}", "dim") for line in theirs(str(error.get("traceback", "")))[-8:]]
    cause = error.get("cause") or error.get("context")
    if isinstance(cause, dict):
        parts.append(styled(f"  because of {error_line(cause)}", "red"))
    return [*parts, ""]


def theirs(traceback: str) -> list[str]:
    """Return the lines of a traceback without the frames of this package, so that a person sees their own code."""
    frames: list[list[str]] = []
    for line in traceback.rstrip().split("\n"):
        if line.startswith("  File ") or not frames:
            frames.append([])
        if line.strip() and line.strip(" ^~"):
            frames[-1].append(line.rstrip())
    own = [frame for frame in frames if frame and OURS not in frame[0]]
    return [line for frame in own or frames for line in frame]


def _draw_wait(wait: Wait, now: int) -> list[Any]:
    if wait.signal:
        waits = "waits for" if wait.certain else "has asked for, and waits for unless its code has given up,"
        text = styled("✉ ", "magenta").append(f"{waits} the signal {clean(wait.signal)} ({clean(wait.type)}):")
        return [text, to_paste(wait.command)]
    if wait.approval:
        text = styled("☐ ", "magenta").append(f"waits for the approval {clean(wait.approval)}:")
        return [text, styled(f"  {clean(wait.arguments)}"), to_paste(wait.command)]
    if wait.request:
        takes = "takes" if wait.certain else "takes, unless its code has given up,"
        text = styled("? ", "magenta").append(f"{takes} requests {clean(wait.request)} ({clean(wait.type)}):")
        return [text, to_paste(wait.command)]
    if wait.key:
        does = {"undoing": "is undoing", "in-doubt": "has left in doubt"}.get(wait.state, "has")
        whose = f", which run {clean(wait.run)} {does}" if wait.run else ""
        text = styled("⚿ ", "cyan").append(f"{clean(wait.step)} waits for the key {clean(wait.key)}{whose}:")
        held = [styled(f"  that run is held: {clean(wait.held)}", "yellow")] if wait.held else []
        return [text, *held, to_paste(wait.command)]
    if wait.child:
        return [styled("▸ ", "cyan").append(f"waits for the child run {clean(wait.child)}")]
    left = duration(max(0, wait.timer - now) / 1e6)
    return [styled("◷ ", "blue").append(f"waits until {moment(wait.timer, now)} ({left} left)")]
