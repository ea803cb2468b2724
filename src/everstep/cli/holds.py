"""`everstep holds`: the questions that runs have for a person, with the facts and the answers to paste."""

from typing import TYPE_CHECKING, Any, Final

import click

from everstep.cli.opening import existing_run, reading, store_options
from everstep.cli.terminal import arguments_text, clean, console, moment, say_json, styled, to_paste
from everstep.view.holds import HoldView, hold_views
from everstep.view.store import place_of
from everstep.view.words import between

if TYPE_CHECKING:
    from rich.console import RenderableType


DOUBT: Final = frozenset(
    {"attempts", "because", "began_at", "doubted_at", "error", "host", "last_sign_at", "pid", "worker"}
)
"""Facts about a step in doubt that are printed as sentences."""


@click.command("holds")
@click.option("--run", metavar="ID", help="Only those of one run.")
@click.option("--all", "all_holds", is_flag=True, help="Resolved ones as well.")
@store_options
def holds_command(run: str | None, all_holds: bool, url: str | None, in_json: bool) -> None:
    """List what waits for a person, with the answers to choose from.

    A hold loses nothing: the run waits. Each is listed with its facts, and for each possible answer its meaning and
    the command to paste; and with the notifications that have not arrived, if there is a webhook.
    """
    with reading(url) as store:
        if run is not None:
            existing_run(store, run)
        holds = hold_views(store, url, run=run, open_only=not all_holds)
        now, place = store.now(), place_of(store)
    if in_json:
        say_json(holds)
        return
    out = console()
    if not holds:
        out.print(styled(f"Nothing is held in {place}.", "dim"))
    for hold in holds:
        out.print(draw_hold(hold, now), crop=False)


def draw_hold(hold: HoldView, now: int | None = None) -> "RenderableType":
    """Return a hold as a person reads it. Print it with `crop=False`, so that its commands stay whole."""
    from rich.console import Group
    from rich.padding import Padding

    report, resolved = hold.report, hold.resolved
    age = f"  {between(hold.created_at, now)} ago" if now is not None else ""
    heading = styled(f"◼ {hold.run}", "bold yellow")
    heading.append(f"  {clean(hold.reason)}", style="yellow")
    heading.append(f"  {clean(hold.workflow)}{age}  {hold.id}", style="dim")
    parts: list[Any] = [heading]
    if differences := report.get("differences"):
        parts.append(draw_differences(differences))
    elif drift := report.get("drift"):
        parts.append(Padding(draw_drift(drift), (0, 0, 0, 2)))
    else:
        parts.append(Padding(styled(hold.summary + (f"  (step {hold.step})" if hold.step else "")), (0, 0, 0, 2)))
    facts = _other_facts(report, now if now is not None else hold.created_at)
    if facts:
        parts.append(Padding(styled("\n".join(facts), "dim"), (0, 0, 0, 2)))
    for one in hold.notifications or ():
        line = f"✉ {clean(one.target)}: {clean(one.sentence(now or hold.created_at))}"
        parts.append(Padding(styled(line, "yellow"), (0, 0, 0, 2)))
    if resolved is not None:
        said = f"resolved: {resolved.resolution}" + (f" by {resolved.by}" if resolved.by else "")
        parts.append(Padding(styled(said + (f": {resolved.note}" if resolved.note else ""), "green"), (0, 0, 0, 2)))
    else:
        parts += [*_answers(hold), ""]
    return Group(*parts)


def _answers(hold: HoldView) -> list[Any]:
    """Each command on a line of its own, whatever the width: one that was broken in two could not be pasted."""
    lines: list[Any] = []
    for one in hold.resolutions.values():
        lines += [to_paste(one.command), styled(f"      {one.consequence}", "dim")]
    return lines


def _other_facts(report: dict[str, Any], now: int) -> list[str]:
    shown = {"differences", "accepted", "unfinished", "consequences", "call", "drift", "facts", "example"}
    shown |= {"by_verb", "grant", "part"}
    lines: list[str] = []
    if report.get("began_at"):
        lines, shown = _about_doubt(report, now), shown | DOUBT
    for name, value in report.items():
        if name not in shown and value not in ("", [], {}, None):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            text = arguments_text(text) if name == "arguments" else text
            if isinstance(value, dict):
                text = "; ".join(f"{one} {_amounts(amount)}" for one, amount in value.items())
            lines.append(f"{name.replace('_', ' ')}: {text}")
    return lines


def _about_doubt(report: dict[str, Any], now: int) -> list[str]:
    """Report which process began a step in doubt, when, and why it is certain that its outcome will not arrive."""
    who = f"worker {report.get('worker', '')}"
    if report.get("pid"):
        who = f"process {report['pid']} on {report.get('host', '')} ({who})"
    lines = [f"begun: {moment(report['began_at'], now)} by {who}, attempt {report.get('attempts', 1)}"]
    if report.get("because") == "crash":
        first, last = moment(report["last_sign_at"], now), moment(report["doubted_at"], now)
        lines.append(f"died: after {first}, its last sign of life here, and before {last}, when that was found")
    elif report.get("error"):
        lines.append(f"raised: {report['error']} at {moment(report['doubted_at'], now)}")
    return lines


def _amounts(amount: Any) -> str:
    """Return an amount, or the amounts that one step has used."""
    if isinstance(amount, dict):
        return ", ".join(f"{one} {_amounts(of_it)}" for one, of_it in amount.items())
    return f"{amount:,g}" if isinstance(amount, int | float) else str(amount)


def draw_drift(drift: Any) -> "RenderableType":
    """Return the drift: each subject that differs from what the run remembers, and below it the difference."""
    from rich.text import Text

    text = Text(overflow="fold")
    for one in drift if isinstance(drift, list) else []:
        judged = f"  ({clean(one['judged'])})" if one.get("judged") else ""
        text.append(f"{clean(one.get('subject', ''))}{judged}\n")
        for line in str(one.get("difference", "")).split("\n"):
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
            text.append(f"    {clean(line)}\n", style=style)
    text.rstrip()
    return text


def draw_differences(differences: Any) -> "RenderableType":
    """Return where code and history disagree: recorded on the left, now on the right, with their source lines."""
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("event", justify="right")
    table.add_column("differs")
    table.add_column("recorded", ratio=1, overflow="fold")
    table.add_column("now", ratio=1, overflow="fold")
    for one in differences if isinstance(differences, list) else []:
        recorded = styled(one.get("recorded", ""), "red")
        now = styled(one.get("now", ""), "green")
        if one.get("recorded_source"):
            recorded.append(f"\n{clean(one['recorded_source'])}", style="dim")
        if one.get("now_source"):
            now.append(f"\n{clean(one['now_source'])}", style="dim")
        table.add_row(styled(one.get("seq", "")), styled(one.get("what", "")), recorded, now)
    return Padding(table, (0, 0, 0, 2))
