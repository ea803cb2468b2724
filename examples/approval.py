"""An approval: a program that waits for a person, for days if need be, and loses neither the wait nor the answer.

Try it in an empty folder, with two terminals:

    python approval.py           # asks, and waits; kill it and start it again: it still waits
    python approval.py yes       # in the other terminal: the answer (or: no)

Answer while the first one is dead: the answer is kept, and taken up at its next start. Do not answer for long enough
(PATIENCE below) and the request is declined. A restart does not begin that time anew.
"""

import asyncio
import os
import sys
from pathlib import Path

import everstep
from everstep import step, workflow

# Seconds. It is part of what the run asked for, so another value for a run under way would be a change of its code.
PATIENCE = float(os.environ.get("PATIENCE", 7 * 86400))
RUN = "expense-17"


@step(effect="read")
async def look_up_price(item: str) -> int:
    await asyncio.sleep(0.1)
    return {"chair": 180, "desk": 420}.get(item, 99)


@step
async def buy(item: str, price: int) -> str:
    # The key is the same in every attempt at this step. A shop that knows it will not sell twice.
    order = f"order-{everstep.key()[:8]}"
    Path(f"{order}.txt").write_text(f"{item} for {price}\n")
    return order


@workflow
async def expense(item: str) -> str:
    price = await look_up_price(item)
    everstep.publish("question", f"May we buy a {item} for {price}?")
    try:
        # The run waits in the store, not in memory. It needs no process while it waits.
        approved = await everstep.receive("approved", bool, timeout=PATIENCE)
    except TimeoutError:
        return "declined: nobody answered"
    if not approved:
        return "declined"
    return f"bought: {await buy(item, price)}"


async def ask() -> None:
    async with everstep.open() as app:
        run = await app.start(expense, "chair", id=RUN)
        while await run.status() in ("queued", "running"):
            await asyncio.sleep(0.02)
        if await run.status() == "waiting":
            print((await run.published())["question"], "Answer with: python approval.py yes", flush=True)
        print(await run.result())


async def answer(approved: bool) -> None:
    async with everstep.open() as app:
        # With an id, sending the same answer again delivers it once.
        await app.signal(RUN, "approved", approved, id="answer")
        print("sent")


if __name__ == "__main__":
    asyncio.run(answer(sys.argv[1] == "yes") if len(sys.argv) > 1 else ask())
