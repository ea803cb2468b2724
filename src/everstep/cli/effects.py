"""`everstep effects`: the keys of effects, their owners and outcomes, and a person's decision about one."""

import asyncio
from fnmatch import fnmatchcase
from typing import Any, Final

import click

from everstep.cli.arguments import decoded_json
from everstep.cli.opening import acting, line_to_paste, place_of, reading, store_options, user_name
from everstep.cli.terminal import add_fitted, between, clean, console, payload_json, say_json, shortened, styled
from everstep.codec import Codec
from everstep.engine.run.keys import shared_outcome
from everstep.errors import ChainKeyMissing, Damaged, Misuse
from everstep.model.chains import ChainKeys
from everstep.model.secrets import HIDDEN
from everstep.model.status import ENDED
from everstep.stores.protocol import Store
from everstep.stores.rows.keys import STATES, UNSETTLED, EffectFilter, EffectRow

PAGE: Final = 500
WILDCARDS: Final = "*?["
OUTCOME_CHARACTERS_MAX: Final = 120

CONSEQUENCES: Final[dict[str, str]] = {
    "free done": "the outcome no longer counts: the next step with this key does the action again, and its receiver "
    "sees another idempotency key",
    "free in doubt": "the next step with this key does the action, with the same idempotency key: a receiver that "
    "honours keys does it once, another one may do it twice",
    "free undoing": "the action counts as undone: the next step with this key does it again, and its receiver sees "
    "another idempotency key",
    "done undoing": "the action counts as done, and not undone: the value is the outcome of every step with this key "
    "and the same arguments; none of them runs",
    "done in doubt": "the value is the outcome of every step with this key and the same arguments; none of them runs",
}


@click.command("effects")
@click.option("--key", metavar="PATTERN", help="Only keys that begin with this, or match it if it has * or ?.")
@click.option("--run", metavar="ID", help="Only those that steps of this run have, or had last.")
@click.option("--step", metavar="NAME", help="Only those of this step.")
@click.option(
    "--state", type=click.Choice([*STATES, "in-doubt"]), help="in-doubt: under way or undoing, and the run has ended."
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--free", metavar="KEY", help="Let the action be done again, by the next step that asks for the key.")
@click.option("--done", nargs=2, metavar="KEY JSON", help="An action left in doubt did happen; this is its outcome.")
@click.option("--note", default="", help="With --free and --done: why; it is kept with the key.")
@click.option("--yes", is_flag=True, help="With --free and --done: do it; without it the consequences are only shown.")
@store_options
def effects_command(
    free: str | None, done: tuple[str, str] | None, note: str, yes: bool, url: str | None, in_json: bool, **wanted: Any
) -> None:
    """List the keys of effects (`@step(key=…)`), the most recently changed first.

    A key belongs to the step that was begun under it. While that is under way, others with the key wait for it; when it
    is done, they share its outcome; while it is undoing (its run compensates it), they wait again. Keys outlive their
    runs, until they are freed or forgotten.

    When a run has ended and left a step or its compensation in doubt, its key waits for a person: --free if it did not
    happen, or is undone; --done if it did, and is not.
    """
    if free is not None and done is not None:
        raise click.UsageError("Say either --free or --done.")
    if free is not None or done is not None:
        key = free if free is not None else done[0] if done is not None else ""
        value = decoded_json(done[1], "--done") if done is not None else None
        asyncio.run(_decide(key, "free" if done is None else "done", value, note, url, yes=yes, in_json=in_json))
        return
    with reading(url) as store:
        rows = _matching(store, **wanted)
        facts = [effect_facts(store, row) for row in rows]
        previews = [_preview(store.chain, row) for row in rows]
        now, place = store.now(), place_of(store)
    if in_json:
        say_json(facts)
    else:
        _print_rows(rows, facts, previews, now, place, url)


def _matching(
    store: Store, key: str | None, run: str | None, step: str | None, state: str | None, limit: int
) -> list[EffectRow]:
    """Return the keys that match. A pattern is compared here, key by key, after its fixed prefix."""
    pattern = key or ""
    places = [pattern.index(one) for one in WILDCARDS if one in pattern]
    prefix = pattern[: min(places)] if places else pattern
    stored: Any = None if state == "in-doubt" else state
    found: list[EffectRow] = []
    offset = 0
    while len(found) < limit:
        page = store.effects(EffectFilter(prefix=prefix, run=run, step=step, state=stored, limit=PAGE, offset=offset))
        for row in page:
            is_meant = not places or fnmatchcase(row.key, pattern)
            if is_meant and (state != "in-doubt" or is_in_doubt(store, row)):
                found.append(row)
        offset += len(page)
        if len(page) < PAGE:
            break
    return found[:limit]


def is_in_doubt(store: Store, row: EffectRow) -> bool:
    """Return True if only a person can say whether an action happened: its run has ended without knowing."""
    if row.state not in UNSETTLED:
        return False
    owner = store.run(row.run)
    return owner is None or owner.generation != row.generation or owner.status in ENDED


def effect_facts(store: Store, row: EffectRow) -> dict[str, Any]:
    """Return a key for `--json`."""
    owner = store.run(row.run)
    facts: dict[str, Any] = {"key": row.key, "state": "in-doubt" if is_in_doubt(store, row) else row.state}
    facts |= {"step": row.step, "effect": row.effect, "run": row.run, "generation": row.generation, "seq": row.seq}
    facts |= {"run_status": owner.status if owner is not None else None, "round": row.round}
    facts |= {"begun_at": row.begun_at, "changed_at": row.changed_at, "by": row.by, "note": row.note}
    shown = HIDDEN if row.secret else payload_json(outcome_of(store.chain, row) or b"[null]")
    facts["outcome"] = shown if row.state == "done" else None
    return facts | {"waiting": [run for run, _ in store.waiters(row.key)]}


def outcome_of(chain: ChainKeys, row: EffectRow) -> bytes | None:
    """Return the payload of a key's outcome; None if it has none, or one that cannot be verified."""
    try:
        return shared_outcome(chain, row) if row.outcome is not None else None
    except (ChainKeyMissing, Damaged):
        return None


def _preview(chain: ChainKeys, row: EffectRow) -> str:
    if row.outcome is None or row.state == "undoing":
        return row.note
    try:
        payload = shared_outcome(chain, row)
    except Damaged:
        return "damaged"
    except ChainKeyMissing:
        return "not verified: the chain key is missing"
    return HIDDEN if row.secret else Codec().preview(payload, OUTCOME_CHARACTERS_MAX)


def _print_rows(
    rows: list[EffectRow], facts: list[dict[str, Any]], previews: list[str], now: int, place: str, url: str | None
) -> None:
    from rich.table import Table

    out = console()
    if not rows:
        out.print(styled(f"No key matches in {place}.", "dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("key", "state", "step", "run", "age", "waiting", "outcome"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("age", "waiting") else "left")
    cells: list[list[Any]] = []
    for row, one, preview in zip(rows, facts, previews, strict=True):
        style = {"done": "green", "in-doubt": "yellow", "under-way": "cyan", "undoing": "magenta"}.get(
            one["state"], "dim"
        )
        line = [styled(shortened(row.key, 60), "bold"), styled(one["state"], style), styled(shortened(row.step, 28))]
        waiting = str(len(one["waiting"])) if one["waiting"] else ""
        line += [styled(row.run), styled(between(row.changed_at, now)), styled(waiting), styled(preview, "dim")]
        cells.append(line)
    add_fitted(table, cells, out.width)
    out.print(table, crop=False)
    for row, one in zip(rows, facts, strict=True):
        if one["state"] == "in-doubt":
            is_undoing = row.state == "undoing"
            what, no, yes = (
                ("was undone", "it was", "it was not") if is_undoing else ("happened", "it did not", "it did")
            )
            out.print(styled(f"{row.key}: run {row.run} has ended, and it is unknown whether it {what}.", "yellow"))
            out.print(styled(f"  {no + ':':<13}{line_to_paste('effects', '--free', row.key, url=url)}", "bold"))
            out.print(
                styled(f"  {yes + ':':<13}{line_to_paste('effects', '--done', row.key, 'JSON', url=url)}", "bold")
            )


async def _decide(key: str, what: str, value: Any, note: str, url: str | None, *, yes: bool, in_json: bool) -> None:
    async with acting(url) as app:
        row = app.store.effect(key)
        if row is None or row.state == "free":
            raise Misuse(
                f"No step has the key {clean(key)!r} in {place_of(app.store)}. `everstep effects` lists the keys."
            )
        kind = "undoing" if row.state == "undoing" else "done" if row.state == "done" and what == "free" else "in doubt"
        means = CONSEQUENCES[f"{what} {kind}"]
        waiting = [run for run, _ in app.store.waiters(key)]
        if yes and what == "free":
            await app.free_key(key, note=note, by=user_name())
        elif yes:
            await app.settle_key(key, value, note=note, by=user_name())
    said = {"key": key, "decision": what, "decided": yes, "consequence": means, "run": row.run, "waiting": waiting}
    if in_json:
        say_json(said)
        return
    out = console()
    if yes:
        out.print(styled("✓ ", "green").append(f"{clean(key)}: {means}"))
        return
    out.print(styled(key, "bold").append(f"  {row.state}  {clean(row.step)} of run {row.run}"))
    out.print(f"With --{what}: {means}." + (f" {len(waiting)} runs wait for it." if waiting else ""))
    out.print("Nothing was changed. Repeat it with --yes to do so.")
