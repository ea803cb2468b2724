"""A migration agent: it looks at the schema, has a plan made, and carries it out. Its record is `record.json`.

    python shop.py new                 # a database with schema v4
    CRASH_AT=planned python wrong.py   # dies by SIGKILL when the plan is made
    python shop.py by-hand             # somebody migrates it to v5
    python wrong.py                    # goes on by its record

Why it goes wrong stands in docs/desync.md.
"""

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

RECORD = Path("record.json")


def crash(place: str) -> None:
    """Die here, as by a power cut, if the environment says so."""
    if os.environ.get("CRASH_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def save(record: dict) -> None:
    beside = Path("record.tmp")
    beside.write_text(json.dumps(record))
    os.replace(beside, RECORD)


def schema_version() -> int:
    with closing(sqlite3.connect("shop.db")) as database:
        return database.execute("select version from schema").fetchone()[0]


def ask_model_for_a_plan(version: int) -> list[str]:
    """Here you call your model; this is its plan for v4."""
    if version >= 5:
        return []
    return ["update prices set amount = amount * 100", "update schema set version = 5, unit = 'cent'"]


def migrate() -> None:
    if RECORD.exists():
        record = json.loads(RECORD.read_text())
    else:
        version = schema_version()
        record = {"schema": version, "plan": ask_model_for_a_plan(version)}
        save(record)
    print(f"schema v{record['schema']}: {len(record['plan'])} statements to do")
    crash("planned")
    with closing(sqlite3.connect("shop.db")) as database, database:  # all of them in one transaction
        for statement in record["plan"]:
            database.execute(statement)
    RECORD.unlink()
    print("migrated to v5")


if __name__ == "__main__":
    migrate()
