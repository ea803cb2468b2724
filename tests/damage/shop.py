"""A workflow with every contract, and a receiver with an account of its own; `reserve` honours keys, others do not."""

import asyncio
from collections import Counter
from typing import Any

import everstep
from everstep import Done, NotDone, step, workflow
from everstep.engine.app.app import App
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import APPLIED, ASKED, READS


def counts() -> Counter[str]:
    return Counter(effect for effect, _ in APPLIED)


@step(effect="read")
async def price(item: str) -> str:
    READS.append(item)
    return item * 9000  # beside the event


@step
async def reserve(item: str) -> str:
    key = everstep.key()
    if ("reserve", key) not in APPLIED:
        APPLIED.append(("reserve", key))
    return f"reserved {item}"


async def ask_about_charge(key: str, item: str) -> Done | NotDone:
    ASKED.append(key)
    return Done(f"charged {item}") if ("charge", key) in APPLIED else NotDone()


@step(effect="once", probe=ask_about_charge)
async def charge(item: str) -> str:
    APPLIED.append(("charge", everstep.key()))
    return f"charged {item}"


@step(effect="once")
async def mail(item: str) -> str:
    APPLIED.append(("mail", everstep.key()))
    return f"mailed {item}"


@workflow
async def shop_packing(item: str) -> str:
    return await reserve(f"box for {item}")


@workflow
async def shop(item: str) -> list[str]:
    found = await price(item)
    done = [str(len(found)), await reserve(item), await charge(item)]
    everstep.publish("charged", done[-1])
    done.append(await everstep.receive("go", str))
    done.append(await mail(item))
    done.append(await shop_packing(item))
    await asyncio.sleep(30)
    done.append(await reserve("a van"))
    done.append(await everstep.receive("end", str))
    return done


RESULT = [
    "9000", "reserved x", "charged x", "now", "mailed x", "reserved box for x", "reserved a van", "over",
]  # fmt: skip
EXPECTED = Counter({"reserve": 3, "charge": 1, "mail": 1})


async def left_at_the_end(machine: Machine, app: App) -> None:
    """Let a run go until it waits for its last signal."""
    await app.start(shop, "x", id="s")
    await machine.rest(app)
    await app.signal("s", "go", "now")
    await machine.until(lambda: "timer_started" in machine.kinds("s"))
    await machine.rest(app)
    await machine.advance(31)
    await machine.until(lambda: machine.kinds("s").count("signal_awaited") == 2)
    await machine.rest(app)


def answer_for(hold: Any) -> tuple[str, Any]:
    """Answer a question about a step as somebody does who has looked: it happened, or it did not."""
    effect = hold.step.partition("#")[0]
    return ("done", f"{effect}ed x") if effect in counts() else ("not-done", None)
