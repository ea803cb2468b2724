"""The command `everstep`: its subcommands in sections, loaded when they are called, and the handling of errors."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import click

from everstep import __version__
from everstep.cli.mistakes import EXIT_FAILED, exit_status_of, say_error, say_unexpected, usage_error
from everstep.errors import Error

SECTIONS: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    (
        "Commands",
        {
            "demo": "demo",
            "run": "running",
            "worker": "working",
            "ls": "listing",
            "show": "showing",
            "holds": "holds",
            "resolve": "resolving",
            "approvals": "approving",
            "approve": "approving",
        },
    ),
    ("Looking closer", {"history": "listing", "top": "watching", "effects": "effects", "stream": "exchanging"}),
    ("Many runs", {"queue": "queueing"}),
    (
        "Acting on runs",
        {
            "signal": "acting",
            "ask": "exchanging",
            "cancel": "acting",
            "retry": "acting",
            "hold": "acting",
            "fork": "forking",
            "rollback": "acting",
        },
    ),
    ("Starting runs", {"schedule": "schedules"}),
    (
        "Checking",
        {
            "lint": "linting",
            "check": "checking",
            "verify": "verifying",
            "repair": "repairing",
            "restored": "repairing",
            "replay": "replaying",
            "crashtest": "crashtesting",
        },
    ),
    (
        "The store",
        {"export": "moving", "import": "moving", "gc": "collecting", "doctor": "doctor", "migrate": "migrating"},
    ),
)
"""By section: each command, and the module that has it as the function `<command>_command`."""

MODULES: Final = {command: module for _, commands in SECTIONS for command, module in commands.items()}


class Everstep(click.Group):
    """A group that loads a subcommand's module when it is needed, and turns errors into messages and exit statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which help shows them."""
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand."""
        if cmd_name not in MODULES:
            return None
        command: click.Command = getattr(import_module(f"everstep.cli.{MODULES[cmd_name]}"), f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand. For a misspelt one, the error names the nearest."""
        if args and args[0] not in MODULES and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], MODULES, 1, 0.5)
            hint = f" Did you mean {near[0]!r}?" if near else " `everstep --help` lists the commands."
            raise click.UsageError(f"There is no command {args[0][:40]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their sections."""
        width = max(map(len, MODULES))
        for title, commands in SECTIONS:
            rows = []
            for name in commands:
                command = self.get_command(ctx, name)
                assert command is not None
                rows.append((name.ljust(width), command.get_short_help_str(80)))
            with formatter.section(title):
                formatter.write_dl(rows)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run a command and end the process with its exit status: 0 done, 1 the run failed, 2 misuse, 3 held."""
        words = list(args) if args is not None else sys.argv[1:]
        options["standalone_mode"] = False
        in_json = "--json" in words
        output = sys.stdout
        try:
            status = super().main(words, *rest, **options)
        except click.ClickException as error:
            status = usage_error(error, in_json=in_json)
        except click.exceptions.Abort:
            status = 130
        except BrokenPipeError:
            # The reader of our output has gone. Python would complain about it once more at its end. No run has failed
            # because of that, so the status is that of a process which SIGPIPE ended.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 141
        except SystemExit:
            if sys.stdout is output:
                raise
            # click has replaced standard output, because it found that the reader has gone.
            status = 141
        except Error as error:
            _raise_for_debugging(error)
            say_error(error, in_json=in_json)
            status = exit_status_of(error)
        except Exception as error:  # noqa: BLE001 - a command never ends with a traceback, whatever went wrong
            _raise_for_debugging(error)
            say_unexpected(error, in_json=in_json)
            status = EXIT_FAILED
        sys.exit(status if isinstance(status, int) else 0)


def _raise_for_debugging(error: Exception) -> None:
    if os.environ.get("EVERSTEP_DEBUG") == "1":
        raise error


@click.group(
    cls=Everstep,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="The store is a SQLite file or a PostgreSQL database: --url, else EVERSTEP_URL, else sqlite:///everstep.db. "
    "Exit status: 0 done, 1 the run failed, 2 misuse, 3 held.",
)
@click.version_option(__version__, message="everstep %(version)s")
def main() -> None:
    """Run programs of many steps that survive anything that kills them.

    New here? `everstep demo` shows a program that is killed three times and finishes.
    """
