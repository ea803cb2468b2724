"""Clock, randomness and ids are parameters: only a few places ask the machine for them."""

import ast

import pytest

from tests.house.sources import Source, modules, report

# Where the machine may be asked, and why. A path that ends with a slash stands for the folder.
ALLOWED: dict[str, str] = {
    "engine/history/clock.py": "the one place where the engine's default clock and randomness are made",
    "integrations/strands/standins.py": "outside a run, Strands gets the time and the ids that it asks for",
    "stores/postgres/store.py": "the default of the clock, and a name for its connections",
    "stores/sqlite/": "the default of the clock that a store is opened with",
    "testing/ledger_process.py": "an account of its own has a clock of its own",
}

ASKED: dict[str, frozenset[str]] = {
    "time": frozenset({"time", "time_ns", "localtime", "gmtime"}),
    "datetime": frozenset({"now", "utcnow", "today"}),
    "date": frozenset({"today"}),
    "uuid": frozenset({"uuid1", "uuid4", "uuid7"}),
    "os": frozenset({"urandom"}),
    "random": frozenset(
        {
            "SystemRandom",
            "betavariate",
            "choice",
            "choices",
            "getrandbits",
            "randbytes",
            "randint",
            "random",
            "randrange",
        }
        | {"sample", "seed", "shuffle", "uniform"}
    ),
    "secrets": frozenset({"choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"}),
}


def asked(source: Source) -> list[tuple[int, str]]:
    """Return every place that asks the machine for time or chance: a call, a reference or an import."""
    found = []
    aliases = {name: name for name in ASKED}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name in ASKED}
        elif isinstance(node, ast.ImportFrom) and node.module in ASKED:
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name in ASKED}
            bad = [alias.name for alias in node.names if alias.name in ASKED[node.module]]
            found += [(node.lineno, f"{node.module}.{name}") for name in bad]
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                module = aliases.get(owner, "")
                if name in ASKED.get(module, ()):
                    found.append((node.lineno, f"{module}.{name}"))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="Random"), args=[], keywords=[]):
                if aliases.get(owner) == "random":
                    found.append((node.lineno, "random.Random() without a seed"))
    return found


def chance_violations(source: Source) -> list[str]:
    """Return what a module asks the machine for, unless it is one of the places that may."""
    if any(source.path == place or (place.endswith("/") and source.path.startswith(place)) for place in ALLOWED):
        return []
    hint = "take it as a parameter, or give the module its reason in tests/house/test_time_and_chance.py"
    return [source.at(line, f"{what}: {hint}") for line, what in asked(source)]


def test_only_a_few_places_ask_the_machine_for_time_or_chance() -> None:
    violations = [violation for source in modules() for violation in chance_violations(source)]
    assert not violations, report(violations)


def test_each_of_those_places_has_a_reason() -> None:
    assert all(ALLOWED.values())


@pytest.mark.parametrize(
    "code",
    [
        "import time\nnow = time.time()",
        "import time\ndef f(clock=time.time): ...",
        "import time as t\nt.time_ns()",
        "from time import time",
        "from datetime import datetime\ndatetime.now(UTC)",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime as dt\ndt.utcnow()",
        "import random\nrandom.random()",
        "import random\nrandom.Random()",
        "from random import shuffle",
        "import uuid\nuuid.uuid4()",
        "from uuid import uuid4",
        "import secrets\nsecrets.token_hex(16)",
        "import os\nos.urandom(16)",
    ],
)
def test_asking_the_machine_is_found(code: str) -> None:
    assert chance_violations(Source("engine/driver.py", code))
    assert not chance_violations(Source("engine/history/clock.py", code))


@pytest.mark.parametrize(
    "code",
    [
        "import random\nrandom.Random(seed)",
        "def f(randomness): return randomness.random()",
        "import time\ntime.monotonic()",
        "clock.now()",
        "from uuid import UUID",
    ],
)
def test_a_parameter_is_fine(code: str) -> None:
    assert not chance_violations(Source("engine/driver.py", code))
