"""`everstep show`: what a run did, when, how often, what it waits for, and what to do about it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.cli.drawing import draw_timeline, status_text
from everstep.cli.effects import is_in_doubt
from everstep.cli.holds import draw_hold
from everstep.cli.listing import published_of, row_facts
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED, EXIT_HELD
from everstep.cli.money import amounts_text, budget_text, standing_of
from everstep.cli.opening import (
    approve_words,
    example_value,
    existing_run,
    line_to_paste,
    place_of,
    reading,
    store_options,
)
from everstep.cli.terminal import (
    arguments_text,
    between,
    clean,
    console,
    duration,
    json_text,
    local_time,
    moment,
    payload_json,
    say_json,
    shortened,
    styled,
    to_paste,
)
from everstep.cli.timeline import Timeline, error_line, timeline_of
from everstep.cli.timeline_rows import Row
from everstep.cli.workers import unserved_among
from everstep.engine.history.verify import verify_now
from everstep.engine.run.holds import hold_facts
from everstep.errors import Damaged, Misuse, NotReadable
from everstep.model.accounts import ROOT, as_facts
from everstep.model.own_files import replace
from everstep.model.status import ENDED
from everstep.stores.protocol import Delivery, RunRow, Store
from everstep.stores.rows.keys import UNSETTLED

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
        timeline = timeline_of(store, run, row.generation)
        if svg is not None:
            _write_picture(timeline, run, svg)
        elif in_json:
            say_json(run_facts(store, row, timeline, url))
        else:
            out = console()
            out.print(draw_run(store, row, timeline, url, out.width), crop=False)
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
                live.update(draw_run(store, row, timeline, url, out.width, most=rows), refresh=True)
            time.sleep(REFRESH_SECONDS)
            seen = (row.head_seq, row.generation)
            row = existing_run(store, run)
            if (row.head_seq, row.generation) != seen:
                timeline = timeline_of(store, run, row.generation)
    finally:
        if live is not None:
            live.update("", refresh=True)
            live.stop()
    if in_json:
        say_json(run_facts(store, row, timeline, url))
    else:
        out.print(draw_run(store, row, timeline, url, out.width), crop=False)
    return {"completed": EXIT_DONE, "held": EXIT_HELD}.get(row.status, EXIT_FAILED)


def run_facts(store: Store, row: RunRow, timeline: Timeline, url: str | None) -> dict[str, Any]:
    """Return everything about a run for `--json`."""
    facts = row_facts(row)
    facts["store"] = place_of(store)
    facts["completed_steps"] = timeline.completed_steps()
    facts["attempts"] = {step.name: len(step.attempts) for step in timeline.steps}
    facts["steps"] = [_step_facts(step) for step in timeline.steps]
    facts["crashes"] = timeline.crashes
    facts["waits_for"] = _waits(store, row, timeline, url)
    facts["holds"] = [hold_facts(hold, url) for hold in store.holds(run=row.id)]
    facts["children"] = [{"id": child.id, "status": child.status} for child in store.children(row.id)]
    facts["undelivered"] = [{"kind": one.kind, "name": one.name, "id": one.id} for one in undelivered(store, row)]
    facts["patches"] = timeline.patches
    facts["graph"] = _graph_facts(row, timeline)
    facts["streams"] = dict(store.streams(row.id, row.generation))
    facts["checkpoints"] = timeline.checkpoints
    facts["rolled_back"] = timeline.rolled_back
    facts["forked"] = _forked_facts(timeline)
    facts["compensations"] = {step.name: step.undone for step in timeline.compensations()}
    facts["used"] = as_facts(timeline.accounts.parts[ROOT].used) if timeline.accounts is not None else {}
    facts["used_by_step"] = _used_by_step(timeline)
    facts["result"] = payload_json(row.outcome or b"[null]") if row.status == "completed" else None
    facts["error"] = timeline.error
    return facts


def undelivered(store: Store, row: RunRow) -> list[Delivery]:
    """Return the signals and requests that an ended run did not take. A retry delivers them."""
    if row.status not in ENDED:
        return []
    return [one for one in store.signals(row.id) if one.state == "undelivered" and one.kind in ("signal", "request")]


def _draw_undelivered(store: Store, row: RunRow) -> list[Any]:
    """Print what was sent to a run that has ended, and whether it will be delivered."""
    lost = undelivered(store, row)
    if not lost:
        return []
    names = ", ".join(clean(f"{one.kind} {one.name}" + (f" ({one.id})" if one.id else "")) for one in lost[:5])
    more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    then = f"; if it is retried (`everstep retry {clean(row.id)}`), it gets them" if row.status == "failed" else ""
    return [styled("✉ ", "yellow").append(f"not delivered before the run ended: {names}{more}{then}"), ""]


def _graph_facts(row: RunRow, timeline: Timeline) -> dict[str, Any] | None:
    """Return what happened in the run's graph, if it is one of a graph."""
    if timeline.graph is None:
        return None
    from everstep.cli.graphs import graph_facts

    return graph_facts(timeline.graph, row.status)


def _draw_graph(row: RunRow, timeline: Timeline, width: int) -> list[Any]:
    if timeline.graph is None:
        return []
    from everstep.cli.graphs import draw_graph

    return [draw_graph(timeline.graph, row.status, width), ""]


def _write_picture(timeline: Timeline, run: str, file: str) -> None:
    """Write a picture of a run's graph, with its events."""
    if timeline.graph is None:
        raise Misuse(f"{run} is not a run of a graph, so there is none to draw.")
    from everstep.graph.drawing import svg

    picture = svg(f"The graph {timeline.graph.name} in run {run}", timeline.graph.nodes(), timeline.graph.edges())
    replace(file, picture.encode())


def _forked_facts(timeline: Timeline) -> dict[str, Any] | None:
    """Return the origin of a fork."""
    one = timeline.forked
    if one is None:
        return None
    facts: dict[str, Any] = {"run": one.run, "generation": one.generation, "seq": one.seq, "at": one.at}
    return facts | {"edited": one.edited, "by": one.by, "note": one.note}


def _used_by_step(timeline: Timeline) -> dict[str, dict[str, float]]:
    accounts = timeline.accounts
    return {name: as_facts(used) for name, used in accounts.by_step.items()} if accounts is not None else {}


def _step_facts(step: Row) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": step.name, "effect": step.effect, "state": step.state, "seq": step.seq}
    facts |= {"started_at": step.started_at, "ended_at": step.ended_at, "attempts": step.attempts}
    facts |= {"undoes": step.undoes, "undone": step.undone}
    facts |= {"arguments": step.arguments, "value": step.value, "error": step.error, "source": step.source}
    return facts | {"charged": step.charged, "note": step.note}


def _waits(store: Store, row: RunRow, timeline: Timeline, url: str | None) -> list[dict[str, Any]]:
    if row.status != "waiting":
        return []
    waits: list[dict[str, Any]] = [
        {
            "signal": one.name,
            "type": one.type,
            "command": line_to_paste("signal", row.id, one.name, example_value(one.type), url=url),
        }
        | ({"certain": False} if timeline.went_on_after(one) else {})
        for one in timeline.awaited_signals()
    ]
    waits += [
        {
            "approval": one.name,
            "id": one.id,
            "type": one.type,
            "arguments": one.arguments,
            "expires_at": one.deadline,
            "command": line_to_paste(*approve_words(row.id, one.id, one.type), url=url),
        }
        for one in timeline.awaited_approvals()
    ]
    waits += [
        {
            "request": one.name,
            "type": one.type,
            "command": line_to_paste("ask", row.id, one.name, example_value(one.type), url=url),
        }
        | ({"certain": False} if timeline.went_on_after(one) else {})
        for one in timeline.awaited_requests()
    ]
    if row.wake_at is not None:
        waits.append({"timer": row.wake_at})
    waits += [{"child": one.name} for one in timeline.rows if one.kind == "child" and one.state == "open"]
    for one in timeline.steps:
        if one.awaited_key and one.state == "open":
            waits.append({"key": one.awaited_key, "step": one.name} | _key_wait(store, one, url))
    return waits


def _key_wait(store: Store, step: Row, url: str | None) -> dict[str, Any]:
    """Return which run has the key that a step waits for, and why that run does not continue if it is held."""
    line, effect = line_to_paste("effects", "--key", step.awaited_key, url=url), store.effect(step.awaited_key)
    if effect is None or effect.state not in UNSETTLED:
        return {"run": step.awaited_run, "command": line}
    state = "in-doubt" if is_in_doubt(store, effect) else effect.state
    facts = {"run": effect.run, "state": state, "command": line}
    if hold := next(iter(store.holds(run=effect.run)), None):
        facts |= {"held": hold.summary, "command": line_to_paste("show", effect.run, url=url)}
    return facts


def draw_run(
    store: Store, row: RunRow, timeline: Timeline, url: str | None, width: int, *, most: int = 0
) -> "RenderableType":
    """Return a run as a page for the terminal."""
    from rich.console import Group

    now = store.now()
    end = row.ended_at or (timeline.last_at if row.status == "held" else now)
    parts: list[Any] = [_heading(row, timeline, now, place_of(store)), ""]
    parts += _draw_graph(row, timeline, width)
    if timeline.rows:
        parts += [draw_timeline(timeline, now=end, width=width, most=most), ""]
    parts += _crashes(timeline)
    parts += _undone(row, timeline, url)
    if published := published_of(row):
        parts.append(styled("published", "dim"))
        parts += [styled(f"  {name} = {shortened(_one_line(value), 200)}") for name, value in published.items()]
        parts.append("")
    for name, count in store.streams(row.id, row.generation):
        line = line_to_paste("stream", row.id, name, url=url)
        parts += [styled(f"stream {name}: {count} entries", "dim"), to_paste(line), ""]
    parts += _problems(store, row, timeline, url)
    parts += _draw_undelivered(store, row)
    if unserved_among(store, [row]):
        text = f"no worker serves {clean(row.workflow)} in queue {clean(row.queue)}: start `everstep worker FILE`"
        parts.append(styled("◷ ", "blue").append(text))
    for wait in _waits(store, row, timeline, url):
        parts += _draw_wait(wait, now)
    if row.status == "completed":
        parts += [styled("result", "dim"), styled(shortened(_one_line(payload_json(row.outcome or b"[null]")), 2000))]
    if not parts[-1]:
        parts.pop()
    return Group(*parts)


def _one_line(value: Any) -> str:
    return json_text(value, indent=-1)


def _heading(row: RunRow, timeline: Timeline, now: int, place: str) -> "RenderableType":
    from rich.console import Group

    first = styled(row.id, "bold").append("  ").append_text(status_text(row.status))
    if timeline.rolled_back:
        first.append(" (rolled back)", style="yellow")
    first.append(f"  {clean(row.workflow)}({shortened(clean(arguments_text(row.preview)), 80)})")
    if row.generation > 1:
        first.append(f"  generation {row.generation}", style="dim")
    if timeline.forked is not None:
        edited = f", with another {timeline.forked.edited}" if timeline.forked.edited else ""
        first.append(f"  forked from {clean(timeline.forked.origin)}{edited}", style="cyan")
    attempts = sum(len(step.attempts) for step in timeline.steps)
    took = between(row.created_at, row.ended_at or now)
    facts = [f"began {local_time(row.created_at):%Y-%m-%d %H:%M:%S}", f"took {took}" if row.ended_at else f"{took} ago"]
    facts.append(f"{len(timeline.completed_steps())} steps done, {attempts} attempts")
    if timeline.crashes:
        facts.append(f"{len(timeline.crashes)} crashes survived")
    facts.append(f"{row.head_seq} events")
    if timeline.checkpoints:
        facts.append(f"{len(timeline.checkpoints)} checkpoints, the newest at event {timeline.checkpoints[-1]}")
    lines = [first, styled(" · ".join(facts), "dim")]
    if text := _budget_line(row, timeline, now):
        lines.append(styled(text, "yellow" if row.status == "held" else "dim"))
    return Group(*lines, styled(place, "dim"))


def _budget_line(row: RunRow, timeline: Timeline, now: int) -> str:
    """Return what the run has used; for a run without a budget only if it was charged anything."""
    standing = standing_of(row)
    if standing is not None:
        return f"budget {budget_text(standing, row, now)}"
    used = timeline.accounts.parts[ROOT].used if timeline.accounts is not None else None
    return f"used {amounts_text(used)}" if used is not None and (used.microdollars or used.tokens) else ""


def _crashes(timeline: Timeline) -> list[Any]:
    lines: list[Any] = []
    for crash in timeline.crashes:
        gap = between(crash.last_sign_at, crash.went_on_at)
        steps = ", ".join(crash.steps[:4]) + (f" and {len(crash.steps) - 4} more" if len(crash.steps) > 4 else "")
        when = f"{local_time(crash.last_sign_at):%H:%M:%S}"
        line = styled("╳ ", "bold red")
        lines.append(line.append(f"cut off after {when} in {clean(steps)}; continued after {gap}"))
    return [*lines, ""] if lines else []


def _undone(row: RunRow, timeline: Timeline, url: str | None) -> list[Any]:
    """Return how far a run is undone, and what remains."""
    if not timeline.is_undone:
        return []
    ended = row.status in ENDED
    titles = {"compensated": "undone", "wanted": "not undone" if ended else "to be undone", "skipped": "left as it is"}
    lines: list[str] = []
    for state, title in titles.items():
        if names := [step.name for step in timeline.compensations() if step.undone == state]:
            lines.append(f"{title}: {', '.join(names)}")
            if state == "wanted" and ended:
                lines.append(f"continue undoing:  {line_to_paste('rollback', row.id, url=url)}")
    if not lines:
        lines.append("nothing had to be undone" if ended else "is about to be undone")
    return [*(styled("↩ ", "yellow").append(clean(line)) for line in lines), ""]


def _problems(store: Store, row: RunRow, timeline: Timeline, url: str | None) -> list[Any]:
    """Return what is wrong: damage, errors with where they were raised, holds with their answers."""
    parts: list[Any] = []
    try:
        verify_now(store, row.id)
    except Damaged as damage:
        parts += [styled(f"damaged: {damage}", "bold red"), ""]
    except NotReadable as missing:
        parts += [styled(f"not verified: {missing}", "bold red"), ""]
    for step in timeline.steps:
        if step.state == "failed" and step.error and step.error != timeline.error:
            parts += _draw_error(f"step {step.name}", step.error)
    if timeline.error is not None:
        parts += _draw_error("the run", timeline.error)
        if row.status == "failed" and not timeline.is_undone:
            line = line_to_paste("retry", row.id, url=url)
            parts += [styled("continue from what failed:", "dim"), to_paste(line), ""]
    for hold in store.holds(run=row.id):
        parts.append(draw_hold(hold, url))
    return parts


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


def _draw_wait(wait: dict[str, Any], now: int) -> list[Any]:
    if "signal" in wait:
        unless = "has asked for, and waits for unless its code has given up,"
        waits = "waits for" if wait.get("certain", True) else unless
        text = styled("✉ ", "magenta").append(f"{waits} the signal {clean(wait['signal'])} ({clean(wait['type'])}):")
        return [text, to_paste(wait["command"])]
    if "approval" in wait:
        text = styled("☐ ", "magenta").append(f"waits for the approval {clean(wait['approval'])}:")
        arguments = styled(f"  {clean(wait['arguments'])}")
        return [text, arguments, to_paste(wait["command"])]
    if "request" in wait:
        takes = "takes" if wait.get("certain", True) else "takes, unless its code has given up,"
        text = styled("? ", "magenta").append(f"{takes} requests {clean(wait['request'])} ({clean(wait['type'])}):")
        return [text, to_paste(wait["command"])]
    if "timer" in wait:
        left = duration(max(0, wait["timer"] - now) / 1e6)
        return [styled("◷ ", "blue").append(f"waits until {moment(wait['timer'], now)} ({left} left)")]
    if "key" in wait:
        does = {"undoing": "is undoing", "in-doubt": "has left in doubt"}.get(wait.get("state", ""), "has")
        whose = f", which run {clean(wait['run'])} {does}" if wait["run"] else ""
        text = styled("⚿ ", "cyan").append(f"{clean(wait['step'])} waits for the key {clean(wait['key'])}{whose}:")
        held = [styled(f"  that run is held: {clean(wait['held'])}", "yellow")] if "held" in wait else []
        return [text, *held, to_paste(wait["command"])]
    return [styled("▸ ", "cyan").append(f"waits for the child run {clean(wait['child'])}")]
