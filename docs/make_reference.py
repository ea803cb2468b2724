"""Write docs/reference from the code: public names, events, errors, commands, settings.

    python docs/make_reference.py

What stands there is what the code says: signatures are taken from its source and texts are its docstrings. A test fails
when a page is stale. Signatures come from the syntax tree and not from `inspect`, which words them differently in each
version of Python.
"""

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import click

import everstep
from everstep import errors
from everstep.cli.group import SECTIONS
from everstep.cli.group import main as main_command
from everstep.effects.step import Step
from everstep.effects.transaction import TransactionStep
from everstep.engine.app.blocking import BlockingApp, BlockingRun, BlockingSchedule
from everstep.engine.app.client import BlockingClient, Connecting
from everstep.engine.app.opening import Opening
from everstep.engine.code.api import Child, Current
from everstep.engine.code.budget_block import Part
from everstep.engine.code.requests import Request
from everstep.engine.code.streams import Stream
from everstep.engine.code.workflow import Workflow
from everstep.engine.history.verify import Event
from everstep.engine.verbs.repair import Repair
from everstep.engine.verbs.schedules import Scheduled
from everstep.engine.verbs.streams import Entry
from everstep.engine.verbs.verify import Verification
from everstep.model import events, status
from everstep.model.budgets import Left
from everstep.stores.protocol import HoldRow, RunRow
from everstep.stores.rows.keys import EffectRow
from everstep.stores.rows.queues import QueueRow

FOLDER: Final = Path(__file__).resolve().parent / "reference"
PACKAGE: Final = Path(everstep.__file__).resolve().parent
MADE: Final = "<!-- Made by docs/make_reference.py from the code. Change the code, then `make docs`. -->\n\n"

DECORATORS: Final[dict[str, type]] = {"step": Step, "transaction": TransactionStep, "workflow": Workflow}
"""Their own signature says only `**options`; the class behind each has the options one by one."""

GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "Declaring": ("workflow", "step", "tool", "transaction", "STORE", "Retry", "Budget", "register", "Live"),
    "Graphs": ("Graph", "pipeline"),
    "Running": ("run", "open", "App", "Run", "Retention"),
    "Starting from elsewhere": ("connect", "Client", "Schedule"),
    "Notifying of holds": ("Webhook", "verify_webhook"),
    "Inside a workflow": (
        "receive",
        "approval",
        "requests",
        "sleep",
        "publish",
        "stream",
        "start",
        "checkpoint",
        "continue_as",
        "patched",
        "now",
        "random",
        "uuid",
        "current",
    ),
    "Remembering facts about the outside": ("expect", "release"),
    "Charging a budget": ("charge", "budget"),
    "Inside a step": ("key", "heartbeat"),
    "Answering a probe": ("Done", "Unknown"),
    "Raising and handling errors": ("NotDone", "Fatal", "BudgetExceeded", "Error", "Evicted"),
    "Modules": ("files", "witness", "blocking", "logs", "errors"),
}
HANDED_OUT: Final = (
    *(Opening, BlockingApp, BlockingRun, Child, Current, Part, Left, Event, Verification, Repair),
    *(Request, Stream, Entry),
    *(Scheduled, BlockingSchedule, Connecting, BlockingClient),
    *(RunRow, HoldRow, EffectRow, QueueRow),
)
"""Classes that users meet without typing their names."""

ENVIRONMENT: Final[dict[str, str]] = {
    "EVERSTEP_URL": "The store that is opened when none is named. Without it: `sqlite:///everstep.db`, in the current "
    "folder.",
    "EVERSTEP_CHAIN_KEY": "The chain key, at least 16 characters; or several, separated by commas: the first makes new "
    "runs, the others are still believed, and `none` accepts runs that were made without a key.",
    "EVERSTEP_ON_HOLD": "The address of a webhook that is notified of each hold, unless `on_hold=` names another.",
    "EVERSTEP_ON_HOLD_SECRET": "The secret with which requests to that webhook are signed.",
    "EVERSTEP_DEBUG": "The command line shows tracebacks instead of messages.",
    "EVERSTEP_CRASH_AT": "For tests: kill this process at a crash point, `name:count` or `name:count:stop`.",
    "EVERSTEP_CRASH_COUNT": "For tests: a file to which the name of every passed crash point is appended.",
    "EVERSTEP_LEDGER": "Set by `everstep crashtest` for a workflow: the address of its ledger (`ledger.offered()`).",
    "EVERSTEP_SUPERVISED": "Set by `everstep worker --processes` for its processes: which one it is, and a pipe.",
    "EVERSTEP_IMPORTING": "Set by commands while they import a file of yours; `everstep.run` is then refused.",
}
VARIABLE: Final = re.compile(r"\bEVERSTEP_(?!DEMO_)[A-Z_]+\b")
"""What the demo tells its own processes is no setting."""

FIGURES: Final[tuple[tuple[str, str], ...]] = (
    ("effects.atomic", "PATIENCE_SECONDS"),
    ("model.contracts", "EXPENSIVE_SECONDS"),
    ("engine.code.checkpoints", "OUTCOMES_MAX"),
    ("engine.code.checkpoints", "KEPT_MIN"),
    ("engine.process.resting", "RESTING_MAX"),
    ("engine.process.host", "THREADS_MAX"),
    ("engine.history.journal", "INLINE_BYTES_MAX"),
    ("engine.run.drive", "DEATHS_MAX"),
    ("engine.run.streams", "FLUSH_SECONDS"),
    ("engine.run.streams", "FLUSH_ENTRIES"),
    ("engine.code.streams", "ENTRY_BYTES_MAX"),
    ("engine.run.streams", "GATHERED_BYTES_MAX"),
    ("engine.run.streams", "ENTRIES_MAX"),
    ("engine.run.streams", "STREAMS_MAX"),
    ("engine.process.notify", "AT_ONCE_MAX"),
    ("engine.process.notify", "MOST_SECONDS"),
    ("engine.process.notify", "GIVE_UP_SECONDS"),
    ("model.schedules", "LATE_SECONDS"),
    ("model.schedules", "BACKFILL_MAX"),
)


EVENTS_INTRODUCTION: Final = """# Events

A history is a list of events. Each has `seq` (its number in the run, from 1), `kind`, `step` (the step's name, or
empty), `at` (microseconds since 1970) and `body`, whose fields are below. A field that has its default is left out of
the stored body. `call` numbers the commands of a run in the order in which its code gave them; an outcome names the
call that it is for. A large payload is stored separately, under the digest in `ref`.
"""
ERRORS_INTRODUCTION: Final = """# Errors

All errors are in `everstep.errors`. Each has a stable `code`. Messages say what happened and what to do, and never
contain a payload.
"""
OPTIONS: Final = """## Options of workflows and steps

See [`workflow`](python.md#workflow), [`step`](python.md#step),
[`transaction`](python.md#transaction) and [`Retry`](python.md#retry).
"""


# -- reading the code -----------------------------------------------------------------------------------------------
def tree_of(thing: Any) -> Any:
    """Return the definition of a function or class from its source."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def signature(name: str, function: Any, *, without: int = 0) -> str:
    """Return how a function is called, without its first arguments if they are not the caller's."""
    definition = unquoted(tree_of(function))
    arguments = definition.args
    if arguments.kwarg is not None and arguments.kwarg.arg == "unknown":
        arguments.kwarg = None  # they are refused
    for _ in range(without):
        (arguments.posonlyargs or arguments.args).pop(0)
    word = "async " if isinstance(definition, ast.AsyncFunctionDef) and not is_blocking(function) else ""
    returns = f" -> {ast.unparse(definition.returns)}" if definition.returns is not None else ""
    if is_blocking(function):
        returns = re.sub(r"\b(Run|Schedule)\b", r"Blocking\1", returns)
    listed = split_arguments(ast.unparse(arguments))
    one_line = f"{word}{name}({', '.join(listed)}){returns}"
    if len(one_line) <= 100:
        return one_line
    arguments_lines = "".join(f"    {one},\n" for one in listed)
    return f"{word}{name}(\n{arguments_lines}){returns}"


def unquoted(definition: Any) -> Any:
    """Return a definition whose annotations stand there as they are read, also those that are quoted in the source."""
    arguments = definition.args
    listed = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    for one in listed:
        if one is not None and isinstance(one.annotation, ast.Constant) and isinstance(one.annotation.value, str):
            one.annotation = ast.parse(one.annotation.value, mode="eval").body
    if isinstance(definition.returns, ast.Constant) and isinstance(definition.returns.value, str):
        definition.returns = ast.parse(definition.returns.value, mode="eval").body
    return definition


def split_arguments(text: str) -> list[str]:
    """Split `a: dict[str, int], b=(1, 2)` at the commas that are not inside brackets."""
    found, depth, begun = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append(text[begun:place].strip())
            begun = place + 1
    return [spaced(one) for one in [*found, text[begun:].strip()]]


def spaced(argument: str) -> str:
    """Return `a: int=1` as people write it: `a: int = 1`."""
    return re.sub(r"^(\w+: .+?)=(?=[^=]*$)", r"\1 = ", argument)


def docstring(thing: Any) -> str:
    """Return a docstring as Markdown: `name: meaning` lines become a list, indented code a block."""
    paragraphs = inspect.cleandoc(thing.__doc__ or "").split("\n\n")
    return "\n\n".join(paragraph_of(paragraph) for paragraph in paragraphs)


def paragraph_of(paragraph: str) -> str:
    """Return one paragraph of a docstring as Markdown."""
    lines = paragraph.splitlines()
    if all(line.startswith("    ") for line in lines) or "├" in paragraph or lines[0].startswith(("import ", "@")):
        return "```text\n" + textwrap.dedent(paragraph) + "\n```"
    if not re.match(r"[a-z_]+(, [a-z_]+)*: ", lines[0]):
        return paragraph
    listed: list[str] = []
    for line in lines:
        option = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.*)", line)
        if option is not None:
            names = ", ".join(f"`{name}`" for name in option.group(1).split(", "))
            listed.append(f"- {names}: {option.group(2)}")
        else:
            listed.append("  " + line.strip())
    return "\n".join(listed)


def fields_of(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Give the fields that a class declares: name, type, default, and the text below it."""
    body = tree_of(cls).body
    for place, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        below = body[place + 1] if place + 1 < len(body) else None
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        default = ast.unparse(node.value) if node.value is not None else ""
        yield node.target.id, ast.unparse(node.annotation), default, " ".join(str(text).split())


def methods_of(cls: type) -> list[tuple[str, Any]]:
    """Return the public methods that a class defines itself, in the order of its source."""
    names = dict.fromkeys(name for node in tree_of(cls).body for name in names_of(node))
    found = [(name, vars(cls)[name]) for name in names if not name.startswith("_") and name in vars(cls)]
    plain = [(name, one.__func__ if isinstance(one, staticmethod) else one) for name, one in found]
    return [(name, one if is_blocking(one) else inspect.unwrap(one)) for name, one in plain if inspect.isfunction(one)]


def names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement in a class's body defines."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [node.name] if hasattr(node, "name") else [one.id for one in targets if isinstance(one, ast.Name)]


def is_blocking(function: Any) -> bool:
    """Tell whether a function is the blocking form that was made of an async one."""
    made_of = inspect.unwrap(function) if hasattr(function, "__wrapped__") else None
    is_awaited = inspect.iscoroutinefunction(function) or function.__code__.co_qualname.startswith("awaited.")
    return inspect.iscoroutinefunction(made_of) and not is_awaited


def cell(text: str) -> str:
    """Return a text for a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


# -- the pages ------------------------------------------------------------------------------------------------------
def python_page() -> str:
    """Every public name, with signature and docstring."""
    listed = {name for names in GROUPS.values() for name in names}
    assert listed == set(everstep.__all__), f"GROUPS and __all__ differ: {listed ^ set(everstep.__all__)}"
    parts = [MADE + "# Python\n\nWhat `import everstep` gives.\n"]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [entry(name, getattr(everstep, name)) for name in names]
    parts.append("## What calls return\n\nYou use these classes without importing them.\n")
    parts += [entry(cls.__name__, cls) for cls in HANDED_OUT]
    return "\n".join(parts)


def entry(name: str, thing: Any) -> str:
    """Return what the page says about one name."""
    if name in DECORATORS:
        return heading(name, signature(f"@{name}", DECORATORS[name].__init__, without=2).replace(" -> None", ""), thing)
    if isinstance(thing, ModuleType):
        return module_entry(name, thing)
    if inspect.isclass(thing):
        return class_entry(name, thing)
    if inspect.isfunction(thing):
        return heading(name, signature(f"everstep.{name}", thing), thing)
    return f"### `{name}`\n\n{constant_text(name)}\n"


def heading(name: str, call: str, thing: Any, level: str = "###") -> str:
    """Return a heading, how the thing is called, and its text; of a blocking form, where that is."""
    text = f"See `{async_name(thing.__wrapped__)}`." if is_blocking(thing) else docstring(thing)
    return f"{level} `{name}`\n\n```text\n{call}\n```\n\n{text}\n"


def async_name(function: Any) -> str:
    """Return the name by which users call an async function or method."""
    room = function.__module__.rpartition(".")[2]
    return (
        function.__qualname__
        if "." in function.__qualname__
        else f"everstep.{'files.' * (room == 'files')}{function.__name__}"
    )


def constant_text(name: str) -> str:
    """Return the text below an assignment somewhere in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if (text := text_below(path, name)) is not None:
            return text
    raise LookupError(f"{name} has no text below it")


def text_below(path: Path, name: str) -> str | None:
    """Return the text that stands below an assignment in a module."""
    body = ast.parse(path.read_text("utf-8")).body
    for node, below in itertools.pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_it = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if is_it and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return " ".join(str(below.value.value).split())
    return None


def module_entry(name: str, module: ModuleType) -> str:
    """Return what the page says about a module."""
    if module is errors:
        return f"### `{name}`\n\nAll errors: see [errors](errors.md).\n"
    parts = [f"### `{name}`\n\n{docstring(module)}\n"]
    parts += [entry_in(f"{name}.{one}", getattr(module, one)) for one in module.__all__]
    return "\n".join(parts)


def entry_in(name: str, thing: Any) -> str:
    """Return what the page says about a name in a module."""
    if inspect.isclass(thing):
        return class_entry(name, thing, "####")
    return heading(name, signature(f"everstep.{name}", thing), thing, "####")


def class_entry(name: str, cls: type, level: str = "###") -> str:
    """Return what the page says about a class: its fields and its methods."""
    parts = [f"{level} `{name}`\n\n{docstring(cls)}\n"]
    fields = [one for one in fields_of(cls) if not one[0].startswith("_") and "ClassVar" not in one[1]]
    if fields:
        parts.append(table_of(fields))
    if not issubclass(cls, BaseException) and cls not in (everstep.Retry, everstep.Budget, everstep.Retention):
        parts += [heading(f"{name}.{n}", signature(n, f, without=1), f, level + "#") for n, f in methods_of(cls)]
    return "\n".join(parts)


def events_page() -> str:
    """Every kind of event with its fields."""
    parts = [MADE + EVENTS_INTRODUCTION, docstring(events).split("\n\n", 1)[1] + "\n"]
    for kind, cls in events.BODIES.items():
        parts.append(f"## `{kind}`\n\n{docstring(cls)}\n")
        parts.append(
            table_of([*fields_of(cls), *(fields_of(events.Outcome) if issubclass(cls, events.Outcome) else ())])
        )
    return "\n".join(parts)


def table_of(fields: Sequence[tuple[str, str, str, str]]) -> str:
    """Return the fields of a class as a table; its last column only if any field has a text."""
    has_texts = any(text for *_, text in fields)
    rows = ["| field | type | default |" + (" |" if has_texts else ""), "| --- | --- | --- |" + " --- |" * has_texts]
    for name, annotation, default, text in fields:
        kind = "payload" if annotation == "msgspec.Raw" else f"`{cell(annotation)}`"
        value = re.sub(r"field\(default=(.*)\)", r"\1", default).replace("NO_PAYLOAD", "")
        row = f"| `{name}` | {kind} | {f'`{cell(value)}`' if value else ''} |"
        rows.append(row + (f" {cell(text)} |" if has_texts else ""))
    return "\n".join(rows) + "\n"


def errors_page() -> str:
    """Every error with its code and meaning."""
    tree = next(part for part in inspect.cleandoc(errors.__doc__ or "").split("\n\n") if "├" in part)
    parts = [
        MADE + ERRORS_INTRODUCTION,
        "```text\n" + textwrap.dedent(tree) + "\n```\n",
        "| error | code | is a | meaning |\n| --- | --- | --- | --- |",
    ]
    for node in ast.parse(inspect.getsource(errors)).body:
        cls = getattr(errors, getattr(node, "name", ""), None)
        if inspect.isclass(cls) and issubclass(cls, BaseException):
            parents = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
            parts.append(f"| `{cls.__name__}` | `{cls.code}` | {parents} | {cell(docstring(cls))} |")
    return "\n".join(parts) + "\n"


def settings_page() -> str:
    """Every setting: the environment, options, statuses, and figures that a user may want to know."""
    in_code = {name for path in PACKAGE.rglob("*.py") for name in VARIABLE.findall(path.read_text("utf-8"))}
    assert in_code == set(ENVIRONMENT), f"ENVIRONMENT and the code differ: {in_code ^ set(ENVIRONMENT)}"
    parts = [
        MADE + "# Settings\n\n## Environment\n\n| variable | meaning |\n| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items()),
        "\n## Opening a store\n\n" + heading("everstep.open", signature("everstep.open", everstep.open), everstep.open),
        OPTIONS,
        "## Statuses of a run\n\n" + ", ".join(f"`{one}`" for one in status.STATUSES) + ".\n",
        "## Figures\n\nYou cannot change these figures.\n\n| figure | value | meaning |",
        "| --- | --- | --- |",
    ]
    for module, name in FIGURES:
        value = getattr(importlib.import_module(f"everstep.{module}"), name)
        text = text_below(PACKAGE / (module.replace(".", "/") + ".py"), name)
        assert text is not None, f"{name} has no text below it"
        parts.append(f"| `{name}` | {value:,} | {cell(text)} |")
    return "\n".join(parts) + "\n"


def command_line_page() -> str:
    """Every command with its arguments and options."""
    group: Any = main_command
    context = click.Context(group, info_name="everstep")
    parts = [MADE + "# Command line\n\n" + " ".join((group.epilog or "").split()) + "\n"]
    for section, names in SECTIONS:
        parts.append(f"## {section}\n")
        for name in names:
            command = group.get_command(context, name)
            parts += command_entries(name, command)
    return "\n".join(parts)


def command_entries(name: str, command: Any) -> list[str]:
    """A command with its arguments and options; of a group, its commands."""
    usage = " ".join(["everstep", name, *command.collect_usage_pieces(click.Context(command))])
    texts = [text_of_help(one) for one in inspect.cleandoc(command.help or "").split("\n\n")]
    parts = [f"### `everstep {name}`\n\n```text\n{usage}\n```\n\n" + "\n\n".join(texts) + "\n"]
    if isinstance(command, click.Group):
        for inner, one in command.commands.items():
            parts += command_entries(f"{name} {inner}", one)
        return parts
    options = [one for one in command.params if isinstance(one, click.Option)]
    rows = [f"| {', '.join(f'`{word}`' for word in one.opts)} | {cell(option_text(one))} |" for one in options]
    parts.append("| option | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return parts


def text_of_help(paragraph: str) -> str:
    """Return a paragraph of a command's help; one that must not be wrapped becomes a block."""
    kept = paragraph.removeprefix("\b").removeprefix("\\b")
    return paragraph if kept == paragraph else "```text\n" + textwrap.dedent(kept.strip("\n")) + "\n```"


def option_text(option: click.Option) -> str:
    """Return an option's meaning, with its choices and its default if it has them."""
    parts = [option.help or ""]
    if isinstance(option.type, click.Choice):
        parts.append("One of " + ", ".join(f"`{one}`" for one in option.type.choices) + ".")
    if option.show_default and option.default is not None:
        parts.append(f"Default: `{option.default}`.")
    return " ".join(part for part in parts if part)


def index_page() -> str:
    """Return the page that leads to the others."""
    return (
        MADE + "# Reference\n\nMade from the code, so it is what the code says.\n\n"
        "- [Python](python.md): every public name.\n"
        "- [Events](events.md): what a history is made of.\n"
        "- [Errors](errors.md): every error, its code and its meaning.\n"
        "- [Command line](command-line.md): every command and option.\n"
        "- [Settings](settings.md): environment, options, figures.\n"
    )


def made_pages() -> dict[str, str]:
    """Return each page's text by its name."""
    return {
        "index.md": index_page(),
        "python.md": python_page(),
        "events.md": events_page(),
        "errors.md": errors_page(),
        "command-line.md": command_line_page(),
        "settings.md": settings_page(),
    }


def main() -> None:
    """Write the pages that are new or changed."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in made_pages().items():
        page = FOLDER / name
        if not page.exists() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")
            print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
