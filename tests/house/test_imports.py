"""Imports point one way: model ← codec ← stores ← effects ← engine ← worker ← graph ← view ← web, cli, integrations.

Inside of `engine/`: history ← code ← run ← process ← verbs ← app.
Inside of `stores/`: rows ← protocol ← sql ← sqlite, postgres. `opening` knows them all.

They stand at the top of a file. One below it (in a function, or under `TYPE_CHECKING`) hides an arrow, so it says why:
start-up, an optional dependency, or a real cycle. Such a cycle stays small.
"""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.house.sources import Source, modules, report

SURFACE = "the public surface"
SURFACE_MODULES = frozenset({"__init__", "adapters", "blocking", "files", "logs", "witness"})

ENGINE = ("engine.history", "engine.code", "engine.run", "engine.process", "engine.verbs", "engine.app")
STORES = ("stores.rows", "stores", "stores.sql", "stores.sqlite", "stores.postgres", "stores.opening")
CHAIN = ("errors", "model", "codec", *STORES, "effects", *ENGINE, "worker")
THROUGH = {room: frozenset(CHAIN[: CHAIN.index(room) + 1]) for room in CHAIN}
APART = {  # stores know nothing of each other
    "stores.sql": THROUGH["stores"] | {"stores.sql"},
    "stores.sqlite": THROUGH["stores"] | {"stores.sql", "stores.sqlite"},
    "stores.postgres": THROUGH["stores"] | {"stores.sql", "stores.postgres"},
}

MAY_IMPORT: dict[str, frozenset[str]] = {
    **THROUGH,
    **APART,
    SURFACE: THROUGH["worker"] | {SURFACE, "graph"},
    "graph": THROUGH["worker"] | {SURFACE, "graph"},
    "testing": THROUGH["worker"] | {SURFACE, "graph", "lint", "testing"},
    "view": THROUGH["engine.verbs"] | {"graph", "view"},
    "web": THROUGH["worker"] | {SURFACE, "graph", "view", "web"},
    "lint": frozenset({"errors", "model", "lint"}),  # it reads code and never runs it, so it needs nothing else
    "cli": THROUGH["worker"] | {SURFACE, "graph", "testing", "view", "web", "lint", "cli"},
    "integrations": frozenset({"errors", SURFACE, "graph", "testing", "integrations"}),
}

# Packages that one room alone may import, so that nobody else pays for them at start-up.
BELONGS_TO = {"click": "cli", "rich": "cli", "pytest": "testing"}

# The command line draws what `view` and `engine.verbs` say; it reads no rows and no histories by itself.
NOT_IN_CLI = ("everstep.stores.rows.", "everstep.engine.history.", "everstep.model.events.decode_body")
IN_CLI = {
    "cli/opening.py everstep.engine.history.verify": "a run that is being deleted is named, whatever the command",
    "cli/repairing.py everstep.engine.history.damage": "the type of a step that a repair could not see",
    "cli/repairing.py everstep.engine.history.restored": "the verb on a whole store that was restored",
    "cli/working.py everstep.engine.history.clock": "a worker's own clock",
    "cli/progress.py everstep.model.events.decode_body": "a line for each event as it happens",
    "cli/forking.py everstep.model.events.decode_body": "what the first event of a fork says of its origin",
}
"""What the command line imports all the same, and why."""


def room_of(module: str) -> str:
    """Return the room of a module such as `everstep.engine.run.driver`, or of a name imported from the surface."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in SURFACE_MODULES:
        return SURFACE
    if parts[1] == "__main__":
        return "cli"
    if parts[1] == "engine" or ".".join(parts[1:3]) in MAY_IMPORT:
        return ".".join(parts[1:3])
    # `from everstep import step`: what is no room is a name of the surface.
    return parts[1] if parts[1] in MAY_IMPORT else SURFACE


def room_of_path(path: str) -> str:
    """Return the room that a file lies in, or its first part when the table above does not know it."""
    first, *others = path.split("/")
    if first == "engine":
        return f"engine.{others[0]}" if len(others) > 1 else ENGINE[0]
    if first == "stores":
        room = f"stores.{others[0].removesuffix('.py')}"
        return room if len(others) > 1 or room in MAY_IMPORT else first
    first = first.removesuffix(".py")
    return {"__main__": "cli"}.get(first, SURFACE if first in SURFACE_MODULES else first)


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Give every module of ours that a file imports, at its top, in its functions, or by a constant name."""
    package = ["everstep", *source.path.split("/")[:-1]]
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                yield from ((node.lineno, ".".join([*base, *filter(None, [module]), alias.name])) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def import_violations(source: Source) -> list[str]:
    """Return what a file imports against the direction."""
    room = room_of_path(source.path)
    if room not in MAY_IMPORT:
        return [source.at(1, f"{room!r} is no room of the house: give it its place in tests/house/test_imports.py")]
    found = []
    for line, name in imported(source):
        if name.split(".")[0] == "everstep" and room_of(name) not in MAY_IMPORT[room]:
            found.append(source.at(line, f"{room} must not import {room_of(name)} ({name})"))
        if BELONGS_TO.get(name.split(".")[0], room) != room:
            found.append(source.at(line, f"{room} must not import {name}: only {BELONGS_TO[name.split('.')[0]]} does"))
    return found


def unexplained_imports(source: Source) -> list[str]:
    """Return the imports of ours below the top of a file that do not say why, on their line or that of their `if`."""
    reasons = {line for line, comment in source.comments() if not re.match(r"# (noqa|type:)\S*(?!.*  # )", comment)}
    found = []

    def look(node: ast.AST, is_below: bool, is_explained: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom) and is_below and not is_explained:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            ours = getattr(node, "level", 0) or any(name.split(".")[0] == "everstep" for name in names)
            if ours and node.lineno not in reasons:
                found.append(source.at(node.lineno, f"an import below the top says why: {ast.unparse(node)}"))
        for child in ast.iter_child_nodes(node):
            explained = is_explained or (isinstance(node, ast.If) and node.lineno in reasons)
            look(child, is_below or not isinstance(node, ast.Module), explained)

    look(source.tree, is_below=False, is_explained=False)
    return found


CYCLE_MAX = 12
"""The largest cycle of imports of any kind: a driver and its parts."""


def module_name(path: str) -> str:
    """Return the name by which a file of the package is imported."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(["everstep", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def largest_cycle(sources: Iterable[Source]) -> set[str]:
    """Return the modules of the largest group of which each imports each other, by whatever way."""
    by_name = {module_name(source.path): source for source in sources}
    edges: dict[str, set[str]] = {}
    for module, source in by_name.items():
        found = {name if name in by_name else name.rpartition(".")[0] for _, name in imported(source)}
        edges[module] = (found & by_name.keys()) - {module}

    def reached_from(start: str) -> set[str]:
        seen, new = set[str](), [start]
        while new:
            for module in edges[new.pop()] - seen:
                seen.add(module)
                new.append(module)
        return seen

    reached = {module: reached_from(module) for module in edges}
    groups = ({other for other in reached[module] if module in reached[other]} for module in edges)
    return max(groups, key=len, default=set())


def domain_in_cli(source: Source) -> list[str]:
    """Return what a file of the command line reads by itself, and not through `view` or `engine.verbs`."""
    if not source.path.startswith("cli/"):
        return []
    allowed = tuple(name.partition(" ")[2] for name in IN_CLI if name.startswith(f"{source.path} "))
    return [
        source.at(line, f"cli reads {name} by itself: let `view` say it")
        for line, name in imported(source)
        if name.startswith(NOT_IN_CLI) and not name.startswith(allowed)
    ]


def test_the_command_line_only_draws() -> None:
    violations = [violation for source in modules() for violation in domain_in_cli(source)]
    assert not violations, report(violations)
    used = {(source.path, name) for source in modules() for _, name in imported(source)}
    for exception, reason in IN_CLI.items():
        path, _, module = exception.partition(" ")
        assert reason, exception
        assert any(file == path and name.startswith(module) for file, name in used), f"no more: {exception}"


def test_a_command_that_reads_rows_is_found() -> None:
    assert domain_in_cli(Source("cli/listing.py", "from everstep.stores.rows.keys import EffectRow"))
    assert domain_in_cli(Source("cli/opening.py", "from everstep.engine.history.journal import Journal"))
    assert not domain_in_cli(Source("cli/opening.py", "from everstep.engine.history.verify import refuse_deleted"))
    assert not domain_in_cli(Source("view/store.py", "from everstep.stores.rows.queues import QueueRow"))


def test_imports_point_one_way() -> None:
    violations = [violation for source in modules() for violation in import_violations(source)]
    assert not violations, report(violations)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("model/events.py", "from everstep.codec import encode"),
        ("codec/types.py", "import everstep.stores.protocol"),
        ("stores/sqlite/memory.py", "from everstep.effects.step import Step"),
        ("stores/rows/keys.py", "from everstep.stores.protocol import Append"),
        ("stores/protocol.py", "def later():\n    from everstep.stores.sql.rows import run_row"),
        ("stores/sql/keys.py", "from everstep.stores.sqlite.reads import Reader"),
        ("stores/sqlite/store.py", "from everstep.stores import opening"),
        ("stores/postgres/store.py", "from everstep.stores.sqlite.store import SqliteStore"),
        ("stores/cellar/store.py", ""),
        ("effects/step.py", "def later():\n    from everstep.engine.run.driver import drive"),
        ("engine/run/driver.py", "from ...worker import queues"),
        ("engine/run/driver.py", "from ... import worker"),
        ("engine/run/driver.py", "import everstep"),
        ("engine/run/driver.py", "from everstep import step"),
        ("engine/run/driver.py", "import importlib\nimportlib.import_module('everstep.cli')"),
        ("engine/history/verify.py", "from everstep.engine.code.loop import WorkflowLoop"),
        ("engine/run/driver.py", "def later():\n    from everstep.engine.process.host import Host"),
        ("engine/verbs/runs.py", "from everstep.engine.app.app import App"),
        ("worker/loop.py", "from everstep import cli"),
        ("web/app.py", "from everstep.cli.main import main"),
        ("blocking.py", "from everstep.testing import FakeClock"),
        ("errors.py", "from everstep.model.status import Status"),
        ("integrations/langgraph/saver.py", "from everstep.engine.run.driver import drive"),
        ("engine/run/driver.py", "from rich.console import Console"),
        ("__init__.py", "import click"),
        ("helpers/text.py", ""),
    ],
)
def test_an_import_against_the_direction_is_found(path: str, code: str) -> None:
    assert import_violations(Source(path, code))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("engine/run/driver.py", "from everstep.errors import Error\nfrom . import loop\nfrom ...model import status"),
        ("cli/main.py", "import everstep\nfrom everstep.web.app import serve\nfrom everstep.testing import crash"),
        (
            "stores/sqlite/store.py",
            "from everstep.stores.sql.store import SqlStore\nfrom everstep.stores import brief",
        ),
        ("stores/opening.py", "from everstep.stores.sqlite import SqliteStore"),
        ("effects/step.py", "from everstep.stores.rows.runs import RunRow"),
        ("cli/main.py", "import click\nfrom rich.table import Table"),
        ("__init__.py", "from everstep.engine.app.app import open"),
        ("model/status.py", "import everstepping"),
        ("integrations/langgraph/saver.py", "from everstep import step, workflow"),
    ],
)
def test_an_import_along_the_direction_is_fine(path: str, code: str) -> None:
    assert not import_violations(Source(path, code))


def test_a_violation_names_its_file_and_line() -> None:
    source = Source("model/events.py", "import re\n\nfrom everstep.codec import encode\n")
    assert import_violations(source) == ["model/events.py:3: model must not import codec (everstep.codec.encode)"]


def test_an_import_below_the_top_of_a_file_says_why() -> None:
    violations = [violation for source in modules() for violation in unexplained_imports(source)]
    assert not violations, report(violations)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def later():\n    from everstep.cli import main", 1),
        ("def later():\n    from everstep.cli import main  # noqa: PLC0415", 1),
        ("def later():\n    import everstep.cli\n    from . import main", 2),
        ("if TYPE_CHECKING:\n    from everstep.cli import main", 1),
        ("class A:\n    try:\n        from everstep.cli import main\n    except ImportError:\n        pass", 1),
        ("def later():\n    from everstep.cli import main  # start-up: most programs need none", 0),
        ("if TYPE_CHECKING:  # a real cycle: a part and its whole\n    from everstep.cli import main", 0),
        ("def later():\n    import getpass", 0),
        ("from everstep.cli import main", 0),
    ],
)
def test_it_counts_the_imports_that_do_not_say_why(code: str, count: int) -> None:
    assert len(unexplained_imports(Source("worker/serving.py", code))) == count


def test_no_cycle_of_imports_is_large() -> None:
    cycle = largest_cycle(modules())
    assert len(cycle) <= CYCLE_MAX, f"{len(cycle)} modules: {sorted(cycle)}"


def test_a_cycle_is_found_whatever_way_it_is_imported() -> None:
    sources = [
        Source("model/a.py", "from everstep.model import b"),
        Source("model/b.py", "def later():\n    from everstep.model.c import Thing"),
        Source("model/c.py", "if TYPE_CHECKING:\n    import everstep.model.a"),
        Source("model/d.py", "from everstep.model.a import something"),
    ]
    assert largest_cycle(sources) == {"everstep.model.a", "everstep.model.b", "everstep.model.c"}
