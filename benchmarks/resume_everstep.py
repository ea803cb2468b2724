"""A long run of Everstep that is killed in its last step and started again: `resume_everstep.py FOLDER MARK STEPS`.

The first start and the start after the kill are the same command, as they are for a user.
"""

import asyncio
import sys
import time
from pathlib import Path

from place import url_of

import everstep

FOLDER, MARK, LAST = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])


@everstep.step
async def act(x: int) -> int:
    if x == LAST:
        MARK.write_text(str(time.time_ns()))
        await asyncio.sleep(600)
    return x + 1


@everstep.workflow
async def acting() -> int:
    x = 0
    while x <= LAST:
        x = await act(x)
    return x


if __name__ == "__main__":
    everstep.run(acting, id="killed", url=url_of(FOLDER, "everstep"))
