"""The same refactoring agent with Everstep.

    EVERSTEP_CRASH_AT=body.before:9 python right.py   # dies by SIGKILL when the write of c.py is begun and not done
    python right.py                                   # goes on by its history

Work on a copy of this folder: the three files lie in it.
"""

from pathlib import Path

import everstep
from everstep import step, workflow
from everstep.blocking import files

FILES = ["a.py", "b.py", "c.py"]


@step(effect="read")
def read_source(path: str) -> str:
    return Path(path).read_text()


@step(effect="read")
def ask_model(source: str) -> str:
    return source.replace("fetch", "price_of")  # here you call your model


@workflow
def refactor(paths: list[str]) -> str:
    for path in paths:
        source = read_source(path)
        files.write(path, ask_model(source), expected=source)
        print("wrote", path)
    return " ".join(paths)


if __name__ == "__main__":
    print("done:", everstep.run(refactor, FILES, id="refactor-1"))
