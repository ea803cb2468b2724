"""`everstep approvals` and `everstep approve`: the open approvals, and a person's answer to one."""

import asyncio
from typing import Any

import click
import msgspec

from everstep.cli.arguments import decoded_json
from everstep.cli.mistakes import EXIT_FAILED
from everstep.cli.opening import acting, existing_run, line_to_paste, reading, store_options, user_name
from everstep.cli.rejections import rejection_of, say_rejected
from everstep.cli.resolving import is_served_here, say_who_goes_on
from everstep.cli.terminal import clean, clean_lines, console, json_text, say_json, styled
from everstep.engine.verbs.approve import Approval, open_approvals
from everstep.model.exchange_events import APPROVAL
from everstep.view.run import approve_words
from everstep.view.store import place_of
from everstep.view.words import between, duration


@click.command("approvals")
@click.option("--run", metavar="ID", help="Only those of one run.")
@store_options
def approvals_command(run: str | None, url: str | None, in_json: bool) -> None:
    """List what waits for a person's answer, with the arguments and the line to paste.

    An answer is bound to the arguments that are shown here. If the run asks about other ones by then, it is refused.
    """
    with reading(url) as store:
        if run is not None:
            existing_run(store, run)
        waiting = open_approvals(store, run)
        now, place = store.now(), place_of(store)
    if in_json:
        say_json([_facts(one, url) for one in waiting])
        return
    out = console()
    if not waiting:
        out.print(styled(f"Nothing waits for an approval in {place}.", "dim"))
    for one in waiting:
        out.print(_drawn(one, url, now), crop=False)


def _facts(one: Approval, url: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(one)
    return facts | {"command": line_to_paste(*approve_words(one.run, one.id, one.type), url=url)}


def _drawn(one: Approval, url: str | None, now: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    heading = styled(f"☐ {clean(one.run)}", "bold magenta")
    heading.append(f"  {clean(one.what)}", style="magenta")
    left = "" if one.expires_at is None else f", expires in {duration(max(0, one.expires_at - now) / 1e6)}"
    heading.append(f"  {clean(one.workflow)}  {between(one.asked_at, now)} ago{left}", style="dim")
    shown = one.arguments if one.secret else json_text(one.arguments, indent=2)
    arguments = "\n".join(f"  {line}" for line in clean_lines(shown).splitlines())
    command = line_to_paste(*approve_words(one.run, one.id, one.type), url=url)
    wants = [] if one.type in ("Any", "bool") else [styled(f"  wants a {clean(one.type)}", "dim")]
    return Group(heading, Text(arguments), *wants, Text(f"  {command}", "bold", no_wrap=True, overflow="ignore"), "")


@click.command("approve")
@click.argument("run")
@click.argument("answer", metavar="[JSON]", default="true")
@click.option("--id", metavar="TEXT", help="Which one, as `everstep approvals` shows it: bound to what it shows.")
@click.option("--what", metavar="TEXT", help="Which one, if the run waits for more than one.")
@click.option("--note", default="", help="Why; it is kept in the history.")
@click.option("--no-wait", is_flag=True, help="Do not wait until a worker has taken it, or rejected it.")
@store_options
def approve_command(
    run: str,
    answer: str,
    id: str | None,
    what: str | None,
    note: str,
    no_wait: bool,
    url: str | None,
    in_json: bool,
) -> int | None:
    """Answer what a run waits for.

    \b
        everstep approve pay-17 true --id 3-9f2c11ab5e07
        everstep approve pay-17 false --note "too much"

    Any JSON value is an answer; without one it is `true`. The first answer counts. It is kept until the run takes it,
    also while no process drives the run. If a worker is there, the command waits up to two seconds until the run has
    taken the answer. It ends with status 1 if the run rejects it, because it is not of the type that the code asks for;
    the run keeps waiting then.
    """  # noqa: D301  # click wants the character itself
    decoded = decoded_json(answer, "The answer")

    async def do() -> tuple[Approval, bool, str]:
        async with acting(url) as app:
            existing_run(app.store, run)
            asked = await app.approve(run, decoded, what=what, id=id, by=user_name(), note=note)
            why = "" if no_wait else await rejection_of(app, run, APPROVAL + asked.id)
            return asked, is_served_here(app), why

    asked, is_served, why = asyncio.run(do())
    if in_json:
        facts = {"run": run, "id": asked.id, "what": asked.what, "arguments": asked.arguments, "answer": decoded}
        say_json(facts | ({"rejected": why} if why else {}))
        return EXIT_FAILED if why else None
    text = f"{clean(run)}: {clean(asked.what)} is answered with {json_text(decoded, indent=-1)}"
    console().print(styled("✓ ", "green").append(text))
    if why:
        say_rejected(run, f"the answer to {asked.what}", why)
        return EXIT_FAILED
    if not is_served:
        say_who_goes_on(run, url, is_served=False)
    return None
