"""The shop's database, and what a person does with it by hand.

    python shop.py new        # schema v4: prices in euros
    python shop.py by-hand    # somebody migrates it to v5: prices in cents
    python shop.py back       # somebody takes that back
    python shop.py show

Each of them says what the database has then.
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

STATEMENTS = {
    "new": "create table schema (version, unit); insert into schema values (4, 'euro');"
    "create table prices (item, amount); insert into prices values ('lamp', 40), ('chair', 180);",
    "by-hand": "update prices set amount = amount * 100; update schema set version = 5, unit = 'cent';",
    "back": "update prices set amount = amount / 100; update schema set version = 4, unit = 'euro';",
    "show": "",
}

if __name__ == "__main__":
    if sys.argv[1] == "new":
        Path("shop.db").unlink(missing_ok=True)
    with closing(sqlite3.connect("shop.db")) as database:
        database.executescript(f"begin; {STATEMENTS[sys.argv[1]]} commit;")
        ((version, unit),) = database.execute("select version, unit from schema")
        prices = ", ".join(f"{item} {amount}" for item, amount in database.execute("select * from prices"))
        print(f"schema v{version}, in {unit}: {prices}")
