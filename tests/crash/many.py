"""A program with many runs at a time, which share their commits: python -m tests.crash.many FOLDER"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import everstep
from everstep import step, workflow
from everstep.engine.process.committer import Committer

RUNS, STEPS = 96, 6
FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()


def note(name: str, text: str) -> None:
    """Append a line that is there as soon as it is written, whatever becomes of this process.

    A kill may cut a line off where a page of the file ends. Then the next one begins on a line of its own.
    """
    file = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"\n{text} .\n".encode())
    os.close(file)


@step
async def act(run: str, number: int) -> int:
    note("acts", f"{os.getpid()} {run} {number} {everstep.key()}")
    return number + 1


@workflow
async def acting(run: str) -> int:
    number = 0
    for _ in range(STEPS):
        number = await act(run, number)
    return number


async def main() -> None:
    commit = Committer._commit_elsewhere

    def noted(committer: Committer, batch: Any) -> None:
        if len(batch) > 1:
            note("shared", str(os.getpid()))
        commit(committer, batch)

    Committer._commit_elsewhere = noted  # type: ignore[method-assign]
    async with everstep.open(f"sqlite:///{FOLDER}/everstep.db") as app:
        results = await asyncio.gather(*(app.run(acting, f"r{number}", id=f"r{number}") for number in range(RUNS)))
    assert results == [STEPS] * RUNS


if __name__ == "__main__":
    asyncio.run(main())
