"""How long a run of many steps takes to go on, from its newest checkpoint and without: `long_loop.py [STEPS]`.

One run, one file: it is taken up again and again, from a closed file to the moment at which its code stands where it
stood. Only whether the checkpoints are there differs.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import apsw

import everstep
from everstep.codec import Codec
from everstep.engine.code import asyncio_parts
from everstep.engine.code.recovery_point import load_past
from everstep.engine.code.workflow import DECLARED
from everstep.engine.run.resume import replay
from everstep.stores.sqlite import SqliteStore

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
TIMES = 7


@everstep.step
async def act(x: int) -> int:
    return x + 1


@everstep.workflow
async def acting(last: int) -> int:
    x = 0
    while x < last:
        x = await everstep.checkpoint(x, every=100)
        x = await act(x)
    await everstep.receive("go")
    return x


async def make(path: Path) -> None:
    """Let a run come to its end, almost."""
    async with everstep.open(f"sqlite:///{path}", durability="process") as app:
        run = await app.start(acting, STEPS, id="long")
        while await run.status() != "waiting":
            await asyncio.sleep(0.05)


def resume(path: Path) -> tuple[float, int]:
    """Return the milliseconds of one resume, and how many events it read."""
    began = time.perf_counter()
    store = SqliteStore(path, create=False)
    row = store.run("long")
    assert row is not None
    past = load_past(store, row)
    replayed = replay(store, Codec(), row, DECLARED.named("acting"), past.events, past.checkpoint, quiet=True)
    took = (time.perf_counter() - began) * 1000
    assert not replayed.differences
    replayed.execution.evict()
    store.close()
    return took, len(past.events)


def main() -> None:
    """Measure, and print a line for each way."""
    asyncio_parts.install()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "everstep.db"
        asyncio.run(make(path))
        for name in ("from the newest checkpoint", "from the beginning"):
            found = [resume(path) for _ in range(TIMES)]
            milliseconds = median(took for took, _ in found)
            print(f"{STEPS:,} steps, {name}: {milliseconds:.1f} ms, {found[0][1]:,} events read")
            connection = apsw.Connection(str(path))
            connection.execute("DELETE FROM checkpoints")
            connection.close()


if __name__ == "__main__":
    main()
