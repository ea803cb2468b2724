"""The same agent with Everstep: what the model said is the outcome of a step, so it is said once.

    EVERSTEP_CRASH_AT=body.after:7 python right.py   # dies by SIGKILL in the middle
    python right.py                                  # goes on by its history

Work on a copy of this folder: the letters lie in it.
"""

from pathlib import Path

from model import ask_model_where

import everstep
from everstep import step, workflow
from everstep.blocking import files

ask_where = step(ask_model_where, name="ask_model_where", effect="read")


@step(effect="read")
def letters_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@workflow
def sort_letters() -> int:
    plan = ask_where(letters_in("inbox"))
    for name, folder in plan.items():
        files.make_folder(folder)
        files.move(f"inbox/{name}", f"{folder}/{name}")
        print(f"{name} -> {folder}")
    return len(plan)


if __name__ == "__main__":
    everstep.run(sort_letters, id="letters-1")
