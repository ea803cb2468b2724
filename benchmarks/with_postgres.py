"""The floor on PostgreSQL: bare commits of the size of ours, with nothing around them.

The same rows as in with_sqlite.py, written by the same library as Everstep uses, with prepared statements, each commit
in one round trip.
"""

import time
from pathlib import Path
from typing import Any

import psycopg
from measuring import AT_A_TIME, RUN_STEPS, RUNS, STEPS, Figures, Stopwatch, expect, main
from place import POSTGRES, SETTINGS, settings_text
from with_sqlite import DIGEST, events_of_step, percentiles

TABLES = """
CREATE TABLE runs (
    id text COLLATE "C" PRIMARY KEY, status text, head_seq bigint, head_digest bytea, updated_at bigint, step text)
    WITH (fillfactor = 70);
CREATE TABLE events (
    run text COLLATE "C", generation bigint, seq bigint, kind text, step text, at bigint, body bytea, digest bytea,
    PRIMARY KEY (run, generation, seq));
"""
EVENT_TYPES = ("text", "bigint", "text", "text", "bigint", "bytea", "bytea")
EVENTS = ", ".join(f"${place}::{kind}[]" for place, kind in enumerate(EVENT_TYPES, 6))
COMMIT = f"""
WITH new AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::bytea[], $4::bigint[], $5::text[])
    AS new (id, seq, digest, at, step)
), moved AS (
    UPDATE runs SET head_seq = new.seq, head_digest = new.digest, updated_at = new.at, step = new.step
    FROM new WHERE runs.id = new.id
)
INSERT INTO events SELECT run, 1, seq, kind, step, at, body, digest
FROM unnest({EVENTS}) AS event (run, seq, kind, step, at, body, digest)
"""


class Bare:
    """A connection that only commits."""

    def __init__(self) -> None:
        self.connection = psycopg.connect(
            POSTGRES, autocommit=True, cursor_factory=psycopg.RawCursor, options="-c enable_seqscan=off"
        )
        self.connection.execute(TABLES)

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def commit(self, runs: list[str], number: int) -> None:
        """Write a step of each of these runs."""
        count = len(runs)
        same = (2 * number + 1, DIGEST, number, f"act#{number}")
        heads: list[Any] = [runs, *([value] * count for value in same)]
        rows: list[tuple[object, ...]] = []
        for run in runs:
            both = events_of_step(run, number)
            rows += (both[:7], both[7:])
        events = [list(column) for column in zip(*rows, strict=True)]
        self.connection.execute(COMMIT, [*heads, *events], prepare=True, binary=True)

    def count(self) -> Any:
        """Return how many events there are."""
        return self.connection.execute("SELECT count(*) FROM events").fetchone()

    def settings(self) -> str:
        """Return what decides about durability, asked of this connection."""
        return settings_text(*self.connection.execute(SETTINGS).fetchone())  # type: ignore[misc]


def one_step_a_commit(folder: Path) -> Figures:
    """W1's floor: a commit for each step."""
    with Bare() as bare:
        bare.connection.execute("INSERT INTO runs VALUES ('run-1', 'running', 0, ''::bytea, 0, '')")
        latencies = []
        with Stopwatch() as watch:
            for number in range(1, STEPS + 1):
                began = time.perf_counter()
                bare.commit(["run-1"], number)
                latencies.append(time.perf_counter() - began)
        expect(bare.count(), (2 * STEPS,), "events of the floor")
        return {**watch.rate(STEPS), **percentiles(latencies), "settings": bare.settings()}


def many_steps_a_commit(folder: Path) -> Figures:
    """W2's floor: a commit for a step of each of a hundred runs."""
    with Bare() as bare:
        names = [f"run-{number}" for number in range(RUNS)]
        bare.connection.execute(
            "INSERT INTO runs SELECT id, 'running', 0, ''::bytea, 0, '' FROM unnest($1::text[]) AS new (id)", [names]
        )
        with Stopwatch() as watch:
            for first in range(0, RUNS, AT_A_TIME):
                for number in range(1, RUN_STEPS + 1):
                    bare.commit(names[first : first + AT_A_TIME], number)
        expect(bare.count(), (2 * RUNS * RUN_STEPS,), "events of the floor")
        return {**watch.rate(RUNS * RUN_STEPS), "settings": bare.settings()}


if __name__ == "__main__":
    main({"w1": one_step_a_commit, "w2": many_steps_a_commit})
