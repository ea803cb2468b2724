"""The same migration agent with Everstep: what the plan was made for is remembered, and compared before it goes on.

    python shop.py new                                # a database with schema v4
    EVERSTEP_CRASH_AT=body.before:3 python right.py   # dies by SIGKILL when the migration is begun and not done
    python shop.py by-hand                            # somebody migrates it to v5
    python right.py                                   # it is held; `everstep holds` says why

docs/desync.md shows what a person can decide then.
"""

import sqlite3
from contextlib import closing

import everstep
from everstep import step, witness, workflow
from everstep.blocking import expect

SCHEMA = witness.sql("shop.db", "select version, unit from schema")


@step(effect="read")
def ask_model_for_a_plan(version: int) -> list[str]:
    """Here you call your model; this is its plan for v4."""
    if version >= 5:
        return []
    return ["update prices set amount = amount * 100", "update schema set version = 5, unit = 'cent'"]


@step  # "repeat": safe to do again, because it looks at the version in the same transaction
def carry_out(plan: list[str], version: int) -> str:
    with closing(sqlite3.connect("shop.db", isolation_level=None)) as database:
        database.execute("begin immediate")
        if database.execute("select version from schema").fetchone()[0] != version:
            return "nothing to do, it is not v4 any more"
        for statement in plan:
            database.execute(statement)
        database.execute("commit")
    return "migrated to v5"


@workflow
def migrate() -> str:
    version = expect(SCHEMA)[0][0]
    plan = ask_model_for_a_plan(version)
    print(f"schema v{version}: {len(plan)} statements to do")
    done = carry_out(plan, version)
    expect(SCHEMA)  # the run has changed it, so this is what it remembers from now on
    return done


if __name__ == "__main__":
    try:
        print(everstep.run(migrate, id="prices-1"))
    except everstep.errors.RunHeld:
        raise SystemExit(3) from None  # what it is held for was logged
    except everstep.errors.RunCancelled as cancelled:
        raise SystemExit(str(cancelled)) from None
