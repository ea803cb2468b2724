"""How a command reports an error: one clear message, and an exit status that a script can rely on."""

import sys
from typing import Final

import click

from everstep.cli.terminal import clean_lines, json_text
from everstep.errors import (
    CrossesOnce,
    Error,
    Misuse,
    RunActive,
    RunEnded,
    RunHeld,
    StoreReadOnly,
    StoreUnusable,
    describe,
)

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_MISUSE: Final = 2
EXIT_HELD: Final = 3

_MISUSE: Final = (Misuse, RunEnded, RunActive, CrossesOnce, StoreUnusable, StoreReadOnly)
"""The caller's request cannot be done, and repeating it unchanged will not help."""


def exit_status_of(error: BaseException) -> int:
    """Return the exit status for an error: 3 for a held run, 2 for misuse, 1 for anything else."""
    if isinstance(error, RunHeld):
        return EXIT_HELD
    return EXIT_MISUSE if isinstance(error, _MISUSE) else EXIT_FAILED


def say_error(error: Error, *, in_json: bool) -> None:
    """Print an error of Everstep: what is wrong, what to do, and its code."""
    facts = describe(error)
    _say(facts["code"], facts["type"], str(error), in_json=in_json)


def say_unexpected(error: Exception, *, in_json: bool) -> None:
    """Print an unexpected error: a mistake in Everstep itself, or of the machine."""
    text = f"{type(error).__name__}: {error}\nThis was not expected. With EVERSTEP_DEBUG=1 the traceback is shown."
    _say("everstep.unexpected", type(error).__name__, text, in_json=in_json)


def usage_error(error: click.ClickException, *, in_json: bool) -> int:
    """Print a mistake in how a command was called, and return its exit status."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = ""
    if context is not None:
        hint = f"\n{context.get_usage()}\n`{context.command_path} --help` explains it."
    _say("everstep.usage", "UsageError", error.format_message() + ("" if in_json else hint), in_json=in_json)
    return EXIT_MISUSE


def _say(code: str, kind: str, message: str, *, in_json: bool) -> None:
    if in_json:
        click.echo(json_text({"error": {"code": code, "type": kind, "message": message}}))
        return
    first, *others = clean_lines(message).split("\n")
    colour = sys.stderr.isatty()
    click.echo(f"{click.style('error:', fg='red', bold=True) if colour else 'error:'} {first}", err=True)
    for line in others:
        click.echo(f"       {line}", err=True)
    if code != "everstep.usage":
        click.echo(f"       {click.style(code, dim=True) if colour else code}", err=True)
