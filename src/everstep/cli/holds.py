"""`everstep holds`: the questions that runs have for a person, with what is known and the answers to paste."""

from typing import TYPE_CHECKING, Any

import click
import msgspec

from everstep.cli.opening import existing_run, line_to_paste, place_of, reading, store_options
from everstep.cli.terminal import between, clean, console, say_json, styled
from everstep.stores.protocol import HoldRow

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("holds")
@click.option("--run", metavar="ID", help="Only those of one run.")
@click.option("--all", "all_holds", is_flag=True, help="Resolved ones as well.")
@store_options
def holds_command(run: str | None, all_holds: bool, url: str | None, in_json: bool) -> None:
    """List what waits for a person, with the answers to choose from.

    A hold loses nothing: the run waits. Each comes with what is known, and for each possible answer what it means and
    the command to paste.
    """
    with reading(url) as store:
        if run is not None:
            existing_run(store, run)
        holds = store.holds(run=run, open_only=not all_holds)
        now, place = store.now(), place_of(store)
    if in_json:
        say_json([hold_facts(hold, url) for hold in holds])
        return
    out = console()
    if not holds:
        out.print(styled(f"Nothing is held in {place}.", "dim"))
    for hold in holds:
        out.print(draw_hold(hold, url, now))


def report_of(hold: HoldRow) -> dict[str, Any]:
    """Return the facts that a hold carries."""
    try:
        report = msgspec.json.decode(hold.report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return report if isinstance(report, dict) else {}


def hold_facts(hold: HoldRow, url: str | None) -> dict[str, Any]:
    """Return a hold for `--json`."""
    report = report_of(hold)
    facts: dict[str, Any] = {"id": hold.id, "run": hold.run, "workflow": hold.workflow, "reason": hold.reason}
    facts |= {"step": hold.step, "summary": hold.summary, "created_at": hold.created_at, "report": report}
    facts["resolutions"] = {
        one: {"consequence": _consequence(report, one), "command": resolve_line(hold, one, url)}
        for one in hold.resolutions
    }
    if hold.resolved_at is not None:
        facts["resolved"] = {"at": hold.resolved_at, "resolution": hold.resolution, "by": hold.by, "note": hold.note}
    return facts


def _consequence(report: dict[str, Any], resolution: str) -> str:
    consequences = report.get("consequences")
    return str(consequences.get(resolution, "")) if isinstance(consequences, dict) else ""


def resolve_line(hold: HoldRow, resolution: str, url: str | None) -> str:
    """Return the command that resolves a hold in one way."""
    words = ["resolve", hold.run, "--hold", hold.id, f"--{resolution}"]
    return line_to_paste(*words, *(["JSON"] if resolution in ("skip", "done") else []), url=url)


def draw_hold(hold: HoldRow, url: str | None, now: int | None = None) -> "RenderableType":
    """Return a hold as a person reads it."""
    from rich.console import Group
    from rich.padding import Padding

    report = report_of(hold)
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
    facts = _other_facts(report)
    if facts:
        parts.append(Padding(styled("\n".join(facts), "dim"), (0, 0, 0, 2)))
    if hold.resolved_at is not None:
        said = f"resolved: {hold.resolution}" + (f" by {hold.by}" if hold.by else "")
        parts.append(Padding(styled(said + (f": {hold.note}" if hold.note else ""), "green"), (0, 0, 0, 2)))
    else:
        parts.append(Padding(_answers(hold, report, url), (0, 0, 1, 2)))
    return Group(*parts)


def _answers(hold: HoldRow, report: dict[str, Any], url: str | None) -> "RenderableType":
    from rich.text import Text

    text = Text(overflow="fold")
    for one in hold.resolutions:
        text.append(f"{resolve_line(hold, one, url)}\n", style="bold")
        text.append(f"    {clean(_consequence(report, one))}\n", style="dim")
    text.rstrip()
    return text


def _other_facts(report: dict[str, Any]) -> list[str]:
    shown = {"differences", "accepted", "consequences", "call", "drift", "facts", "grant", "part"}
    lines = []
    for name, value in report.items():
        if name not in shown and value not in ("", [], {}, None):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            if isinstance(value, dict):
                text = "; ".join(f"{one} {_amounts(amount)}" for one, amount in value.items())
            lines.append(f"{name.replace('_', ' ')}: {text}")
    return lines


def _amounts(amount: Any) -> str:
    """Return an amount, or the amounts that one step has used."""
    if isinstance(amount, dict):
        return ", ".join(f"{one} {_amounts(of_it)}" for one, of_it in amount.items())
    return f"{amount:,g}" if isinstance(amount, int | float) else str(amount)


def draw_drift(drift: Any) -> "RenderableType":
    """Return what of the outside is not as a run remembers it: each subject, and below it the difference."""
    from rich.text import Text

    text = Text(overflow="fold")
    for one in drift if isinstance(drift, list) else []:
        text.append(f"{clean(one.get('subject', ''))}\n")
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
