"""What is measured on SQLite, and the bars that Everstep has to clear. See plan_postgres.py for PostgreSQL."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One line of a workload's table, and the process that measures it."""

    workload: str
    system: str
    variant: str
    script: str
    measurement: str
    is_once: bool = False
    """Measured in the first round only: it takes long, and no bar depends on it."""

    @property
    def key(self) -> str:
        return f"{self.script.removeprefix('with_').removesuffix('.py')} {self.measurement}"


WORKLOADS = {
    "W1": "One run of 1,000 sequential trivial steps: steps/s",
    "W2": "2,000 runs of five steps, 100 at a time, in one process: steps/s",
    "W3": "One run of 200 sequential steps that return texts of 100 KB: steps/s",
}

# The order within a workload is that of a round: the systems take turns.
ROWS = (
    Row("W1", "bare SQLite commits", "two events and a run's row in each", "with_sqlite.py", "w1"),
    Row("W1", "Everstep", "repeat, async def", "with_everstep.py", "w1-repeat"),
    Row("W1", "DBOS", "def", "with_dbos.py", "w1-def"),
    Row("W1", "LangGraph", "def", "with_langgraph.py", "w1-def"),
    Row("W1", "Everstep", "repeat, def", "with_everstep.py", "w1-repeat-def"),
    Row("W1", "DBOS", "async def", "with_dbos.py", "w1-async"),
    Row("W1", "LangGraph", "async def", "with_langgraph.py", "w1-async"),
    Row("W1", "Everstep", "read, async def", "with_everstep.py", "w1-read"),
    Row("W1", "DBOS", "def, file switched to WAL by hand", "with_dbos.py", "w1-def-wal"),
    Row("W2", "bare SQLite commits", "a hundred steps in each", "with_sqlite.py", "w2"),
    Row("W2", "Everstep", "async def", "with_everstep.py", "w2-async"),
    Row("W2", "Everstep", "def", "with_everstep.py", "w2-def"),
    Row("W2", "LangGraph", "def, on threads", "with_langgraph.py", "w2-def"),
    Row("W2", "DBOS", "def, on threads", "with_dbos.py", "w2-def"),
    Row("W2", "LangGraph", "async def", "with_langgraph.py", "w2-async"),
    Row("W2", "DBOS", "async def", "with_dbos.py", "w2-async"),
    Row("W3", "Everstep", "repeat, async def", "with_everstep.py", "w3"),
    Row("W3", "DBOS", "def", "with_dbos.py", "w3-def"),
    Row("W3", "DBOS", "async def", "with_dbos.py", "w3-async"),
)

RESUMES = {"Everstep": "resume_everstep.py", "DBOS": "resume_dbos.py", "LangGraph": "resume_langgraph.py"}
IMPORTS = {"Everstep": "everstep", "DBOS": "dbos", "LangGraph": "langgraph.graph, langgraph.checkpoint.sqlite"}
SMALL_STEPS = 5
HALVES = {
    "Everstep": ("half_everstep.py",),
    "DBOS": ("half_dbos.py",),
    "DBOS, async def": ("half_dbos.py", "async"),
}
"""W4: the scripts, with their arguments."""
HALVES_ONCE = ("DBOS, async def",)
"""Measured in the first round only: it takes the longest."""
STORED = {
    "Everstep": ("everstep w1-repeat", "everstep w3", "everstep w2-async"),
    "DBOS": ("dbos w1-def", "dbos w3-def", "dbos w2-def"),
    "LangGraph": ("langgraph w1-def", "", "langgraph w2-def"),
}
"""Whose figures tell of bytes for a small step, for a large one, and of memory."""

DBOS_W1 = ("dbos w1-def", "dbos w1-async")
DBOS_W2 = ("dbos w2-def", "dbos w2-async")
DBOS_W3 = ("dbos w3-def", "dbos w3-async")
LANGGRAPH_W1 = ("langgraph w1-def", "langgraph w1-async")
LANGGRAPH_W2 = ("langgraph w2-def", "langgraph w2-async")


@dataclass(frozen=True)
class Ratio:
    """A bar: one figure is at least so many times the best of some others, whichever way the others were called."""

    text: str
    ours: str
    theirs: tuple[str, ...]
    at_least: float


@dataclass(frozen=True)
class Limit:
    """A bar: one figure is below a limit."""

    text: str
    figure: str
    below: float
    unit: str
    scale: float = 1.0


RATIOS = (
    Ratio("W1, repeat: DBOS", "everstep w1-repeat", DBOS_W1, 3.5),
    Ratio("W1, repeat: LangGraph", "everstep w1-repeat", LANGGRAPH_W1, 1.7),
    Ratio("W1, repeat: bare SQLite commits", "everstep w1-repeat", ("sqlite w1",), 0.6),
    Ratio("W1, read: DBOS", "everstep w1-read", DBOS_W1, 20),
    Ratio("W2, async def: DBOS", "everstep w2-async", DBOS_W2, 40),
    Ratio("W2, async def: LangGraph", "everstep w2-async", LANGGRAPH_W2, 20),
    Ratio("W2, def: DBOS", "everstep w2-def", DBOS_W2, 15),
    Ratio("W3, results of 100 KB: DBOS", "everstep w3", DBOS_W3, 3),
    # Speeds of a resume (1/s), so that more is better here too.
    Ratio("W4, 1,000 runs killed half-way: DBOS", "W4 Everstep", ("W4 DBOS", "W4 DBOS, async def"), 12),
    Ratio("W5, resume after 10,000 steps: DBOS", "W5 Everstep", ("W5 DBOS",), 12),
)
LIMITS = (
    Limit("import everstep", "import Everstep", 80, "ms", 1000),
    Limit("a killed small run, from process start to the next body", "resume Everstep", 300, "ms", 1000),
    Limit("500 turns of 2 KB, each with the whole conversation as argument", "conversation", 5, "MB"),
    Limit("the whole conversation on the disk beside its first half", "conversation growth", 2.2, "×"),
    Limit("memory of an idle worker for each of 100,000 waiting runs", "idle bytes", 100, "bytes"),
    Limit("an idle worker's CPU with 100,000 waiting runs, in 10 s", "idle cpu", 0.2, "s"),
)


@dataclass(frozen=True)
class Plan:
    """Everything that is measured on one database, and how the page about it is called."""

    title: str
    command: str
    results: str
    picture: str
    rows: tuple[Row, ...]
    resumes: dict[str, str]
    halves: dict[str, tuple[str, ...]]
    halves_once: tuple[str, ...]
    stored: dict[str, tuple[str, str, str]]
    ratios: tuple[Ratio, ...]
    limits: tuple[Limit, ...]
    floors: tuple[str, ...]
    packages: tuple[str, ...]
    seconds_max: float
    """No measurement begins later than this, so that the whole ends in time also on a slow machine."""
    workloads: dict[str, str] = field(default_factory=lambda: WORKLOADS)
    notes: tuple[str, ...] = ()
    """What a reader has to know of how it was measured."""


SQLITE = Plan(
    title="Benchmarks",
    command="make bench",
    results="latest",
    picture="bench",
    rows=ROWS,
    resumes=RESUMES,
    halves=HALVES,
    halves_once=HALVES_ONCE,
    stored=STORED,
    ratios=RATIOS,
    limits=LIMITS,
    floors=("sqlite w1", "sqlite w2"),
    packages=("everstep", "dbos", "langgraph"),
    seconds_max=640.0,
)
