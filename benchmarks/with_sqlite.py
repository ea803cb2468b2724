"""The floor: bare SQLite commits of the size of ours, with nothing around them.

A sequential step of Everstep is one commit: two events and an update of the run's row. Here are the same three rows in
tables of the same shape, written by the same library with the same settings.
"""

import time
from pathlib import Path

import apsw
from measuring import AT_A_TIME, RUN_STEPS, RUNS, STEPS, Figures, Stopwatch, expect, main

TABLES = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY, status TEXT, head_seq INTEGER, head_digest BLOB, updated_at INTEGER, step TEXT) STRICT;
CREATE TABLE events (
    run TEXT, generation INTEGER, seq INTEGER, kind TEXT, step TEXT, at INTEGER, body BLOB, digest BLOB,
    PRIMARY KEY (run, generation, seq)) STRICT, WITHOUT ROWID;
"""
EVENT = "(?,1,?,?,?,?,?,?)"
INSERT = "INSERT INTO events VALUES "
UPDATE = "UPDATE runs SET head_seq = ?, head_digest = ?, updated_at = ?, step = ? WHERE id = ?"
STARTED = (
    b'{"call":%d,"arguments":"0123456789abcdef0123456789abcdef","preview":"[12]",'
    b'"source":"workflow.py:12: x = await act(x)"}'
)
COMPLETED = b'{"call":%d,"value":[%d],"seconds":0.0}'
DIGEST = b"0123456789abcdef"


def open_file(folder: Path) -> apsw.Connection:
    """Open a new file as Everstep does with `durability="power"`."""
    connection = apsw.Connection(str(folder / "floor.db"))
    connection.pragma("journal_mode", "WAL")
    connection.pragma("synchronous", "FULL")
    connection.execute(TABLES)
    return connection


def events_of_step(run: str, number: int) -> tuple[object, ...]:
    """Return the two events of a step, as parameters."""
    at = 1_700_000_000_000_000 + number
    started = (run, 2 * number, "step_started", f"act#{number}", at, STARTED % number, DIGEST)
    return (*started, run, 2 * number + 1, "step_completed", f"act#{number}", at, COMPLETED % (number, number), DIGEST)


def one_step_a_commit(folder: Path) -> Figures:
    """W1's floor: a commit for each step."""
    connection = open_file(folder)
    connection.execute("INSERT INTO runs VALUES ('run-1', 'running', 0, ?, 0, '')", (DIGEST,))
    statement = INSERT + ",".join([EVENT] * 2)
    execute = connection.cursor().execute
    latencies = []
    with Stopwatch() as watch:
        for number in range(1, STEPS + 1):
            began = time.perf_counter()
            execute("BEGIN IMMEDIATE")
            execute(UPDATE, (2 * number + 1, DIGEST, number, f"act#{number}", "run-1"))
            execute(statement, events_of_step("run-1", number))
            execute("COMMIT")
            latencies.append(time.perf_counter() - began)
    expect(connection.execute("SELECT count(*) FROM events").get, 2 * STEPS, "events of the floor")
    return {**watch.rate(STEPS), **percentiles(latencies), "settings": settings(connection)}


def many_steps_a_commit(folder: Path) -> Figures:
    """W2's floor: a commit for a step of each of a hundred runs."""
    connection = open_file(folder)
    names = [f"run-{number}" for number in range(RUNS)]
    with connection:
        connection.executemany("INSERT INTO runs VALUES (?, 'running', 0, x'00', 0, '')", ((name,) for name in names))
    statement = INSERT + ",".join([EVENT] * 2 * AT_A_TIME)
    with Stopwatch() as watch:
        for first in range(0, RUNS, AT_A_TIME):
            together = names[first : first + AT_A_TIME]
            for number in range(1, RUN_STEPS + 1):
                connection.execute("BEGIN IMMEDIATE")
                heads = ((2 * number + 1, DIGEST, number, f"act#{number}", name) for name in together)
                connection.executemany(UPDATE, heads)
                connection.execute(statement, [one for name in together for one in events_of_step(name, number)])
                connection.execute("COMMIT")
    expect(connection.execute("SELECT count(*) FROM events").get, 2 * RUNS * RUN_STEPS, "events of the floor")
    return {**watch.rate(RUNS * RUN_STEPS), "settings": settings(connection)}


def percentiles(seconds: list[float]) -> Figures:
    """Return a latency's median and tail, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_milliseconds": 1000 * ordered[len(ordered) // 2],
        "p99_milliseconds": 1000 * ordered[len(ordered) * 99 // 100],
    }


def settings(connection: apsw.Connection) -> str:
    """Return what decides about durability, asked of the connection that was measured."""
    return durability_text(
        connection.pragma("journal_mode"), connection.pragma("synchronous"), apsw.sqlite_lib_version()
    )


def durability_text(journal_mode: object, synchronous: object, version: str) -> str:
    """Return settings of SQLite as a person reads them."""
    level = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}[int(str(synchronous))]
    return f"SQLite {version}, journal_mode={journal_mode}, synchronous={level}"


if __name__ == "__main__":
    main({"w1": one_step_a_commit, "w2": many_steps_a_commit})
