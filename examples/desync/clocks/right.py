"""The same agent with Everstep: what has changed is decided by content.

    python at.py 11:30 edit.py lamp "40 euros"                      # a note
    EVERSTEP_CRASH_AT=body.after:5 python at.py 12:00 right.py 1    # the first look, killed in the middle
    python at.py 12:01 right.py 1                                   # goes on by its history
    python at.py 11:40 right.py 2                                   # the next look

The clock may show what it likes.
"""

import hashlib
import sys
from pathlib import Path

import everstep
from everstep import step, workflow
from everstep.blocking import files


@step(effect="read")
def names_of_notes() -> list[str]:
    return sorted(path.name for path in Path("notes").iterdir())


@step(effect="read")
def read_note(name: str) -> str:
    return Path("notes", name).read_text()


@step(effect="read")
def ask_model(text: str) -> str:
    return f"in short: {text}"  # here you call your model


@workflow
def index(known: dict[str, str]) -> dict[str, str]:
    files.make_folder("index")
    found = {}
    for name in names_of_notes():
        text = read_note(name)
        found[name] = hashlib.sha256(text.encode()).hexdigest()
        if found[name] == known.get(name):
            print(f"{name}: no change")
            continue
        files.write(f"index/{name}", ask_model(text))
        print(f"{name}: indexed")
    return found


def main(number: int) -> None:
    known = {}
    if number > 1:  # what the look before this one found is its result
        with everstep.open() as app:
            known = app.get(f"index-{number - 1}").result()
    everstep.run(index, known, id=f"index-{number}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
