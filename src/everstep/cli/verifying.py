"""`everstep verify`: whether histories match their digests, and everything that they refer to exists."""

import sqlite3
from collections.abc import Callable
from typing import Any

import click
import msgspec

from everstep.cli.holds import draw_drift
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import existing_run, place_of, reading, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.codec import Codec
from everstep.effects.witnesses import from_subject, made_again, with_changes
from everstep.engine.code.checkpoints import KeptFact
from everstep.engine.code.recovery_point import verify_checkpoints, verify_whole
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.saved import dump_thread, every_item, every_thread, verify_item, verify_thread
from everstep.engine.history.verify import Recorded, load_now, verified, verify_payloads
from everstep.engine.run.drift import readable_difference
from everstep.engine.verbs.transfer import verify_schedule
from everstep.errors import Damaged, Misuse, NotReadable
from everstep.model.events import decode_body
from everstep.model.status import ENDED
from everstep.stores.protocol import RunFilter, RunRow, Store

PAGE = 200


@click.command("verify")
@click.argument("run", required=False)
@click.option("--all", "all_runs", is_flag=True, help="Every run of the store.")
@click.option(
    "--outside",
    is_flag=True,
    help="Compare files, folders, variables, SQLite files and addresses with what the runs remember.",
)
@store_options
def verify_command(run: str | None, all_runs: bool, outside: bool, url: str | None, in_json: bool) -> int:
    """Check histories against their digests. Exits with 0 if all is sound, with 1 if not; changes nothing.

    With --outside, every difference between the outside and what a run remembers of it is listed as well. Relative
    paths are those of this folder. Facts that only the run's code can observe are named; `run.verify(outside=True)`
    compares them too.
    """
    if (run is None) == (not all_runs):
        raise click.UsageError("Name a RUN, or say --all.")
    with reading(url) as store:
        rows = [existing_run(store, run)] if run is not None else every_run(store)
        deleting = dict(store.deletions())
        rows = [
            row for row in rows if deleting.get(row.id, 0) < row.generation
        ]  # `everstep gc` finishes these deletions
        found = [verification(store, row, outside=outside) for row in rows]
        found += strays(store) if all_runs else []
        others = others_of(store) if all_runs else []
        place = place_of(store)
    bad = [one for one in [*found, *others] if not one["sound"]]
    drifted = [one for one in found if one.get("drift")]
    if in_json:
        say_json({"sound": not bad, "store": place, "runs": found, **({"others": others} if all_runs else {})})
    else:
        out = console()
        for one in found:
            if not all_runs or not one["sound"] or one.get("left_out") or one.get("drift") or one.get("unobserved"):
                _say_run(out, one)
        if all_runs:
            count = sum(one["events"] for one in found)
            verdict = f"{len(bad)} damaged" if bad else "sound"
            verdict += f", {len(drifted)} with another outside than they remember" if drifted else ""
            out.print(f"{len(found)} runs with {count} events in {place}: {verdict}")
            _say_others(out, others)
    return EXIT_FAILED if bad or drifted else EXIT_DONE


def _say_run(out: Any, one: dict[str, Any]) -> None:
    from rich.padding import Padding

    is_right = one["sound"] and not one.get("drift")
    mark = styled("✓ ", "green") if is_right else styled("✗ ", "bold red")
    text = f"{one['events']} events, sound" if one["sound"] else clean(one["problem"])
    if one["sound"] and one.get("left_out"):
        text += f"; the secrets of {one['left_out']} were left out when it was exported, so they cannot be verified"
    out.print(mark.append(f"{one['run']}: {text}"))
    if one.get("drift"):
        out.print(Padding(draw_drift(one["drift"]), (0, 0, 0, 4)))
    for subject in one.get("unobserved", ()):
        out.print(Padding(styled(f"{subject}: not compared, needs its code", "dim"), (0, 0, 0, 4)))


def others_of(store: Store) -> list[dict[str, Any]]:
    """Return whether the threads, items and schedules of a store are undamaged."""
    at, found = store.now(), list[dict[str, Any]]()

    def look(kind: str, name: str, verify: Callable[[], None]) -> None:
        facts: dict[str, Any] = {"kind": kind, "name": name, "sound": True, "problem": ""}
        try:
            verify()
        except Damaged as damage:
            facts |= {"sound": False, "problem": str(damage)}
        found.append(facts)

    for thread in every_thread(store.saved):
        look("thread", thread, lambda thread=thread: verify_thread(dump_thread(store.saved, thread)))  # type: ignore[misc]
    for item in every_item(store.saved, at):
        look("item", item.key, lambda item=item: verify_item(item))  # type: ignore[misc]
    for row in store.schedules():
        look("schedule", row.name, lambda row=row: verify_schedule(row))  # type: ignore[misc]
    return found


def _say_others(out: Any, others: list[dict[str, Any]]) -> None:
    for one in others:
        if not one["sound"]:
            out.print(styled("✗ ", "bold red").append(f"{one['kind']} {clean(one['name'])}: {clean(one['problem'])}"))
    if others:
        kinds = [f"{sum(one['kind'] == kind for one in others)} {kind}s" for kind in ("thread", "item", "schedule")]
        bad = sum(not one["sound"] for one in others)
        out.print(f"{', '.join(kinds)}: {f'{bad} damaged' if bad else 'sound'}")


def strays(store: Store) -> list[dict[str, Any]]:
    """Return histories without a row, as damaged runs."""
    known = {run for run, _ in store.strays() if store.run(run) is not None}  # those are reported with their rows
    return [
        {
            "run": run,
            "sound": False,
            "events": len(store.events(run, generation)),
            "generations": generation,
            "problem": f"There are events of run {run}, generation {generation}, but no row of such a run.",
        }
        for run, generation in store.strays()
        if run not in known
    ]


def every_run(store: Store, status: Any = ()) -> list[RunRow]:
    """Return all runs of a store."""
    rows: list[RunRow] = []
    while page := store.runs(RunFilter(status=status, limit=PAGE, offset=len(rows))):
        rows += page
    return rows


def verification(store: Store, row: RunRow, *, outside: bool = False) -> dict[str, Any]:
    """Return whether a run's histories, of all its generations, are undamaged."""
    facts: dict[str, Any] = {"run": row.id, "sound": True, "events": 0, "generations": row.generation, "problem": ""}
    facts["left_out"] = 0
    try:
        there = store.generations(row.id)
        for generation in (row.generation, *there[:-1]):
            history = _verify_generation(store, row, generation)
            facts["events"] += len(history)
            facts["left_out"] += getattr(history, "left_out", 0)
        if there != list(range(1, row.generation + 1)):
            listed = ", ".join(map(str, there))
            raise Damaged(f"The row of run {row.id} says {row.generation} generations; there are: {listed}.")
    except Damaged as damage:
        facts |= {"sound": False, "problem": str(damage), "last_good": damage.last_good}
    except NotReadable as missing:
        facts |= {"sound": False, "problem": str(missing), "last_good": 0}
    if outside:
        facts |= {"drift": [], "unobserved": []}
        if facts["sound"] and row.status not in ENDED:
            _compare_outside(store, row, facts)
    return facts


def _compare_outside(store: Store, row: RunRow, facts: dict[str, Any]) -> None:
    """Compare the parts of the outside that can be observed without the run's code with what its history remembers."""
    codec = Codec()
    for subject, taken in remembered_facts(store, row).items():
        witness = made_again(taken.recipe) if taken.recipe else from_subject(subject)
        if witness is None:
            facts["unobserved"].append(subject)
            continue
        try:
            now = codec.decode(codec.encode(witness.observe(), where=subject))
        except (OSError, Misuse, sqlite3.Error) as error:
            difference = f"cannot be observed: {type(error).__name__}: {error}"
        else:
            remembered = codec.decode(taken.payload)
            if witness.covered is not None:
                remembered = with_changes(remembered, witness.covered, taken.changes)
            if now == remembered:
                continue
            difference = readable_difference(remembered, now)
        facts["drift"].append({"subject": subject, "difference": difference})


class Remembered(msgspec.Struct):
    """A fact that a run remembers; for a folder, also the run's own changes of files since."""

    payload: bytes
    changes: dict[str, str | None] = {}
    recipe: list[Any] = []


def remembered_facts(store: Store, row: RunRow) -> dict[str, Remembered]:
    """Return what a run remembers of the outside, by subject."""
    remembered: dict[str, Remembered] = {}
    for event in load_now(store, row)[1]:
        body: Any = event.body
        if event.kind == "run_started" and body.carried is not None:
            for subject, fact in body.carried.facts.items():
                kept = msgspec.json.decode(bytes(fact), type=KeptFact)
                remembered[subject] = Remembered(bytes(kept.fact), dict(kept.changes), list(kept.recipe or ()))
        elif event.kind == "witness_taken" or (event.kind == "drift_judged" and body.decision == "accept"):
            ref = body.ref
            payload = restore_payload(store.payload(row.id, ref), ref) if ref else bytes(body.fact)
            recipe = body.recipe if event.kind == "witness_taken" else remembered[body.subject].recipe
            remembered[body.subject] = Remembered(payload, recipe=recipe)
        elif event.kind == "witness_changed":
            for one in remembered.values():
                one.changes[body.path] = body.digest or None
        elif event.kind == "witness_released":
            remembered.pop(body.subject, None)
        elif event.kind == "run_resolved":
            accepted = {one: bytes(fact) for one, fact in body.facts.items() if one in remembered}
            remembered |= {one: Remembered(fact, recipe=remembered[one].recipe) for one, fact in accepted.items()}
    return remembered


def _verify_generation(store: Store, row: RunRow, generation: int) -> list[Recorded]:
    if generation == row.generation:
        return verify_whole(store, row.id)
    events = store.events(row.id, generation)
    # The row has only the newest head; the chain of an older history proves itself.
    head = {"head_seq": events[-1].seq, "head_digest": events[-1].digest, "generation": generation}
    older = msgspec.structs.replace(row, **head)
    recorded = verified(events, older, store.chain, looking=True)
    if recorded[-1].kind == "run_continued":
        _expect_successor(store, older, events[-1].digest)
    verify_payloads(store, row, recorded, is_newest=False)
    if not getattr(recorded, "left_out", 0):
        verify_checkpoints(store, older, recorded)
    return recorded


def _expect_successor(store: Store, older: RunRow, digest: bytes) -> None:
    """Check that the next generation names this one. A missing or foreign generation is found that way."""
    first = store.events(older.id, older.generation + 1, only=[1])
    carried = decode_body("run_started", first[0].body).carried if first and first[0].kind == "run_started" else None
    if carried is None or carried.head != digest.hex():
        raise Damaged(
            f"Generation {older.generation} of run {older.id} was continued, and the next one does not follow it.",
            older.head_seq,
        )
