"""`everstep replay`: which unfinished runs the code, as it is now, would continue. A dry run: nothing is written."""

import asyncio
from typing import Any

import click

from everstep.cli.holds import draw_differences
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import existing_run, place_of, reading, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.cli.verifying import every_run
from everstep.codec import Codec
from everstep.engine.code import asyncio_parts
from everstep.engine.code.recovery_point import load_past
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.verify import read_now
from everstep.engine.run.resume import is_supported, replay
from everstep.errors import Damaged, NotDecodable, NotReadable
from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.protocol import RunRow, Store
from everstep.worker.loading import load_all


@click.command("replay")
@click.argument("files", nargs=-1, required=True, metavar="FILE [ID]...")
@store_options
def replay_command(files: tuple[str, ...], url: str | None, in_json: bool) -> int:
    """Compare unfinished runs with the code of FILE as it is now, before it is deployed.

    Says which of them would continue and which would be held as diverged, with the differences, and which patches are
    no longer needed. With an ID, only that run, also if it has ended. Writes nothing; exits with 1 if any run diverges.
    """
    file, *ids = files
    load_all((file,))
    with reading(url) as store:
        rows = [existing_run(store, run) for run in ids] or every_run(store, tuple(UNFINISHED))
        found = asyncio.run(_replay_all(store, rows))
        place = place_of(store)
    diverged = [one for one in found if one["verdict"] in ("diverged", "damaged")]
    patches = judged_patches(found)
    if in_json:
        say_json({"store": place, "runs": found, "patches": patches})
    else:
        _print(found, patches, place)
    return EXIT_FAILED if diverged else EXIT_DONE


async def _replay_all(store: Store, rows: list[RunRow]) -> list[dict[str, Any]]:
    asyncio_parts.install()
    return [_replay_one(store, row) for row in rows]


def _replay_one(store: Store, row: RunRow) -> dict[str, Any]:
    facts: dict[str, Any] = {"run": row.id, "workflow": row.workflow, "status": row.status, "verdict": "goes on"}
    facts |= {"differences": [], "patches": {}, "problem": ""}
    if row.workflow not in DECLARED.names():
        return facts | {"verdict": "not declared here"}
    if not is_supported(row):
        return facts | {"verdict": "made by a newer release"}
    try:
        row, past = read_now(store, row, lambda now: load_past(store, now))
        workflow = DECLARED.named(row.workflow)
        replayed = replay(store, Codec(), row, workflow, past.events, past.checkpoint, quiet=True)
    except Damaged as damage:
        return facts | {"verdict": "damaged", "problem": str(damage)}
    except NotReadable as missing:
        return facts | {"verdict": "not verified", "problem": str(missing)}
    except NotDecodable as error:
        return facts | {"verdict": "diverged", "problem": f"the arguments do not fit the code: {error}"}
    facts["patches"] = dict(replayed.execution.patches)
    replayed.execution.evict()
    if replayed.differences:
        return facts | {"verdict": "diverged", "differences": [one._asdict() for one in replayed.differences]}
    return facts | {"verdict": "matches"} if row.status in ENDED else facts


def judged_patches(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each patch that any of the runs has met, and whether its old way is still needed.

    It is needed as long as an unfinished run took the old way. A run that has not reached the patch yet takes the new
    way.
    """
    names = sorted({name for one in found for name in one["patches"]})
    judged = []
    for name in names:
        old = [one["run"] for one in found if one["patches"].get(name) is False and one["status"] not in ENDED]
        new = sum(1 for one in found if one["patches"].get(name))
        judged.append({"name": name, "can_go": not old, "old_way": old, "new_way": new})
    return judged


def _print(found: list[dict[str, Any]], patches: list[dict[str, Any]], place: str) -> None:
    out = console()
    if not found:
        out.print(styled(f"There are no unfinished runs in {place}.", "dim"))
    for one in found:
        good = one["verdict"] in ("goes on", "matches")
        foreign = one["verdict"] in ("not declared here", "made by a newer release")
        mark, style = ("✓", "green") if good else ("·", "dim") if foreign else ("✗", "bold red")
        line = styled(f"{mark} ", style).append(f"{one['run']}  ", style="bold").append(one["verdict"], style=style)
        line.append(f"  {clean(one['workflow'])}, {one['status']}  {clean(one['problem'])}", style="dim")
        out.print(line)
        if one["differences"]:
            out.print(draw_differences(one["differences"]))
    for patch in patches:
        if patch["can_go"]:
            text = f"patched({patch['name']!r}) can go: no unfinished run went its old way"
            out.print(styled("✓ ", "green").append(clean(text)))
        else:
            runs = ", ".join(patch["old_way"][:5]) + ("…" if len(patch["old_way"]) > 5 else "")
            out.print(styled("◷ ", "yellow").append(clean(f"patched({patch['name']!r}) must stay for {runs}")))
