"""`everstep lint`: the most common mistakes in workflows and steps, found by reading the source."""

from collections import Counter

import click

from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.lint.finding import Finding
from everstep.lint.linting import Linted, lint_paths


@click.command("lint")
@click.argument("paths", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "in_json", is_flag=True, help="Print JSON.")
def lint_command(paths: tuple[str, ...], in_json: bool) -> int:
    """Find the most common mistakes in workflows and steps by reading their source.

    FILE may be a folder. Nothing is imported or run; helpers in the same file are followed. `# everstep: ok, because …`
    on a line silences what is found there. Exits with 1 if anything is found.
    """
    linted = lint_paths(paths)
    if in_json:
        say_json({"files": linted.files, "findings": [one.facts() for one in linted.findings]})
    else:
        _print(linted)
    return EXIT_FAILED if linted.findings else EXIT_DONE


def _print(linted: Linted) -> None:
    out = console()
    for one in linted.findings:
        out.print(_line(one), soft_wrap=True)
        if one.source:
            out.print(styled(f"    {clean(one.source)}"), soft_wrap=True)
        if one.via:
            out.print(styled(f"    by way of {' → '.join(one.via)}", "dim"), soft_wrap=True)
    files = f"{linted.files} file{'s' if linted.files != 1 else ''}"
    if not linted.findings:
        unused = "" if linted.using else f"; {'it does not use' if linted.files == 1 else 'none of them uses'} Everstep"
        out.print(styled(f"Nothing found in {files}{unused}.", "yellow" if unused else "green"))
        return
    counts = Counter(one.rule for one in linted.findings)
    listed = ", ".join(f"{count} {rule}" for rule, count in sorted(counts.items()))
    out.print(styled(f"{len(linted.findings)} found in {files}: {listed}", "bold"))


def _line(one: Finding) -> object:
    place, rule = f"{one.file}:{one.line}:{one.column}: ", f"{one.rule}: "
    rest = str(one).removeprefix(place + rule)
    return styled(place, "bold").append(rule, style="red").append(clean(rest))
