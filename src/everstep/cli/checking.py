"""`everstep check`: all runs of a store against the rules of "nothing lost, nothing doubled"."""

import json
from pathlib import Path
from typing import Any

import click

from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import reading, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.errors import Misuse
from everstep.testing.checker import RULES, check, export_histories
from everstep.view.store import place_of


@click.command("check")
@click.option("--ledger", metavar="FILE", help="A ledger's folder or its ledger.jsonl: what the outside saw.")
@store_options
def check_command(ledger: str | None, url: str | None, in_json: bool) -> int:
    """Judge all runs of a store by the rules, and name each that is broken. Exits with 1 then; changes nothing.

    The rules are about histories: one end for a run, one outcome for a step, no signal taken twice, timers not early,
    budgets kept, compensations in order. With --ledger also about effects: each as often as its contract says, and not
    before its intent was durable. Digests are not compared; `everstep verify --all` does that. Judge a store at rest:
    what is being written meanwhile may look broken.
    """
    entries = _entries(ledger) if ledger is not None else []
    with reading(url) as store:
        histories = export_histories(store)
        now, place = store.now(), place_of(store)
        running = any(history.row.status == "running" for history in histories)
        found = check(histories, ledger=entries, now=None if running else now)
    runs = len({history.row.id for history in histories})
    events = sum(len(history.events) for history in histories)
    if in_json:
        facts = {"store": place, "runs": runs, "events": events, "effects": len(entries)}
        say_json(facts | {"kept": not found, "broken": [one._asdict() | {"means": RULES[one.rule]} for one in found]})
    else:
        _print(found, f"{runs} runs with {events} events in {place}")
        if running and found:
            console().print(styled("Runs are under way: what was just being written may look broken.", "yellow"))
    return EXIT_FAILED if found else EXIT_DONE


def _print(found: Any, what: str) -> None:
    out = console()
    for one in found:
        place = f" event {one.seq}" if one.seq else ""
        line = (
            styled("✗ ", "bold red").append(f"{clean(one.run or '—')}{place}: ", style="bold").append(clean(one.what))
        )
        out.print(line, soft_wrap=True)
        out.print(styled(f"    {one.rule}: {RULES[one.rule]}", "dim"), soft_wrap=True)
    verdict = f"{len(found)} broken" if found else f"all {len(RULES)} rules are kept"
    out.print(f"{what}: {verdict}")


def _entries(place: str) -> list[dict[str, Any]]:
    path = Path(place)
    path = path / "ledger.jsonl" if path.is_dir() else path
    if not path.exists():
        raise Misuse(f"There is no ledger in {path}.")
    try:
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except ValueError as error:
        raise Misuse(f"{path} is not a ledger: {error}.") from None
