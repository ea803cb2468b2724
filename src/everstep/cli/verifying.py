"""`everstep verify`: whether histories match their digests, and everything they refer to is there."""

from typing import Any

import click
import msgspec

from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import existing_run, place_of, reading, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.engine.history import Recorded, verified
from everstep.engine.journal import restore_payload
from everstep.errors import Damaged
from everstep.stores.protocol import RunFilter, RunRow, Store

PAGE = 200


@click.command("verify")
@click.argument("run", required=False)
@click.option("--all", "all_runs", is_flag=True, help="Every run of the store.")
@store_options
def verify_command(run: str | None, all_runs: bool, url: str | None, in_json: bool) -> int:
    """Check histories against their digests. Exits with 0 if all is sound, with 1 if not; changes nothing."""
    if (run is None) == (not all_runs):
        raise click.UsageError("Name a RUN, or say --all.")
    with reading(url) as store:
        rows = [existing_run(store, run)] if run is not None else every_run(store)
        found = [verification(store, row) for row in rows]
        place = place_of(store)
    bad = [one for one in found if not one["sound"]]
    if in_json:
        say_json({"sound": not bad, "store": place, "runs": found})
    else:
        out = console()
        for one in bad if all_runs else found:
            mark = styled("✓ ", "green") if one["sound"] else styled("✗ ", "bold red")
            text = f"{one['events']} events, sound" if one["sound"] else clean(one["problem"])
            out.print(mark.append(f"{one['run']}: {text}"))
        if all_runs:
            count = sum(one["events"] for one in found)
            verdict = f"{len(bad)} damaged" if bad else "sound"
            out.print(f"{len(found)} runs with {count} events in {place}: {verdict}")
    return EXIT_FAILED if bad else EXIT_DONE


def every_run(store: Store, status: Any = ()) -> list[RunRow]:
    """Return all runs of a store."""
    rows: list[RunRow] = []
    while page := store.runs(RunFilter(status=status, limit=PAGE, offset=len(rows))):
        rows += page
    return rows


def verification(store: Store, row: RunRow) -> dict[str, Any]:
    """Return whether a run's histories, of all its generations, are sound."""
    facts: dict[str, Any] = {"run": row.id, "sound": True, "events": 0, "generations": row.generation, "problem": ""}
    try:
        for generation in range(1, row.generation + 1):
            facts["events"] += _verify_generation(store, row, generation)
    except Damaged as damage:
        facts |= {"sound": False, "problem": str(damage), "last_good": damage.last_good}
    return facts


def _verify_generation(store: Store, row: RunRow, generation: int) -> int:
    events = store.events(row.id, generation)
    if generation < row.generation and events:
        # The row knows only the newest head; an older history vouches for itself by its chain.
        head = {"head_seq": events[-1].seq, "head_digest": events[-1].digest, "generation": generation}
        row = msgspec.structs.replace(row, **head)
    recorded = verified(events, row)
    for event in recorded:
        _verify_payload(store, row, event)
    return len(recorded)


def _verify_payload(store: Store, row: RunRow, event: Recorded) -> None:
    ref = getattr(event.body, "ref", "") or getattr(event.body, "arguments_ref", "")
    if ref:
        try:
            restore_payload(store.payload(row.id, ref), ref)
        except Damaged as damage:
            raise Damaged(f"Event {event.seq} of run {row.id}: {damage}", event.seq - 1) from None
