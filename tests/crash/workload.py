"""The reference workload: a program as a user would write it, in a process of its own, that tests kill in all ways.

    python workload.py reference FOLDER LEDGER      one run with a bit of everything
    python workload.py reads FOLDER LEDGER          twenty slow reads
    python workload.py lanes FOLDER LEDGER          twenty quick reads whose order is chance
    python workload.py fleet FOLDER LEDGER COUNT    many runs; any number of these processes share them
    python workload.py budget FOLDER LEDGER COUNT   a tree of runs that uses up its budget; 0 to 2 says what then

Started again it goes on. It leaves its results in its journal and exits with 0 when it has all of them.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import everstep
from everstep import Done, NotDone, Retry, step, workflow
from everstep.testing.journals import ClientJournal, watch_commits
from everstep.testing.ledger import apply, ask

LEDGER = ""
"""The address of the ledger."""
ENTRIES = Path()
"""What the ledger has written down for this trial."""
READS, LANES = 20, 4
PATIENT = Retry(attempts=6, first=0.005, factor=1.0, jitter=0.0)


@step(effect="read")
async def look_up(number: int) -> str:
    return await asyncio.to_thread(ask, LEDGER, "look_up", everstep.key(), number)


@step(effect="read")
def compute_large(number: int) -> str:
    """A result that does not fit into an event."""
    return f"{number:05} " * 4000


@step(retry=PATIENT)
async def charge(amount: int) -> str:
    """The ledger loses its first answer and fails the second time."""
    return await asyncio.to_thread(apply, LEDGER, "charge", everstep.key(), amount)


def ask_about_remit(key: str, amount: int) -> Done | NotDone:
    """Ask the ledger's own account whether it has applied an effect with this key."""
    lines = [json.loads(line) for line in ENTRIES.read_bytes().splitlines()] if ENTRIES.exists() else []
    applied = [line for line in lines if line["kind"] == "applied" and line["key"] == key]
    return Done(f"remit-{applied[0]['digest'][:12]}") if applied else NotDone()


@step(effect="once", probe=ask_about_remit, settle=0.05)
def remit(amount: int) -> str:
    """The ledger loses its answer, and applies whatever is sent twice once more."""
    return apply(LEDGER, "remit", everstep.key(), amount)


@step
def stamp(text: str) -> str:
    everstep.heartbeat("half-way")
    return apply(LEDGER, "stamp", everstep.key(), text)


@step
async def pack(number: int) -> str:
    return await asyncio.to_thread(apply, LEDGER, "pack", everstep.key(), number)


@workflow
async def reference_child(number: int) -> str:
    return await pack(number)


@workflow
async def reference_order(number: int) -> dict[str, str | int | list[str]]:
    found = await asyncio.gather(*(look_up(number + offset) for offset in range(3)))
    everstep.publish("found", len(found))
    large, paid = await asyncio.gather(asyncio.to_thread(compute_large, number), charge(number))
    await asyncio.sleep(0.02)
    packed = await reference_child(number)
    remitted = await asyncio.to_thread(remit, number)
    word = await everstep.receive("word", str)
    stamped = await asyncio.to_thread(stamp, word)
    try:
        async with asyncio.timeout(0.01):
            await everstep.receive("never", str)
    except TimeoutError:
        everstep.publish("waited", True)
    token = everstep.random().getrandbits(16) >= 0
    return {
        "found": found,
        "large": len(large),
        "paid": paid,
        "packed": packed,
        "remitted": remitted,
        "stamped": stamped,
        "word": word,
        "token": token,
    }


@step(effect="read")
async def slow_look(number: int) -> str:
    return await asyncio.to_thread(ask, LEDGER, "slow_look", everstep.key(), number)


@workflow
async def reference_reads() -> list[str]:
    async def lane(first: int) -> list[str]:
        return [await slow_look(number) for number in range(first, READS, LANES)]

    lanes = await asyncio.gather(*(lane(first) for first in range(LANES)))
    return sorted(value for values in lanes for value in values)


@step(effect="read")
async def quick_look(number: int) -> str:
    return await asyncio.to_thread(ask, LEDGER, "quick_look", everstep.key(), number)


@workflow
async def reference_lanes() -> list[str]:
    """Which lane comes first is chance, and so is the order in which the reads are made."""

    async def lane(first: int) -> list[str]:
        return [await quick_look(number) for number in range(first, READS, LANES)]

    lanes = await asyncio.gather(*(lane(first) for first in range(LANES)))
    return sorted(value for values in lanes for value in values)


@workflow
async def reference_fleet(number: int) -> list[str]:
    first = await look_up(number)
    await asyncio.sleep(0.05)
    paid = await charge(number)
    packed = await reference_child(number)
    return [first, paid, packed]


# -- a budget: every request to the ledger costs 30 cents, and is estimated at 50 ------------------------------------
@step(effect="read", cost={"usd": 0.50}, fallback="too dear")
async def consult(number: int) -> str:
    answer = await asyncio.to_thread(ask, LEDGER, "consult", everstep.key(), number)
    everstep.charge(usd=0.30)
    return answer


@step(effect="once", cost={"usd": 0.50}, probe=lambda key, number: ask_about("buy", key), fallback="not bought")
def buy(number: int) -> str:
    value = apply(LEDGER, "buy", everstep.key(), number)
    everstep.charge(usd=0.30)
    return value


@step(effect="read", cost={"usd": 0.50}, fallback="too dear")
async def consult_at_length(number: int) -> str:
    """Costs more than it was estimated at, which is written down while it still runs."""
    everstep.charge(usd=0.55)
    answer = await asyncio.to_thread(ask, LEDGER, "consult_at_length", everstep.key(), number)
    await asyncio.sleep(0.15)
    return answer


def ask_about(effect: str, key: str) -> Done | NotDone:
    lines = [json.loads(line) for line in ENTRIES.read_bytes().splitlines()] if ENTRIES.exists() else []
    applied = [line for line in lines if line["kind"] == "applied" and line["key"] == key]
    return Done(f"{effect}-{applied[0]['digest'][:12]}") if applied else NotDone()


@workflow
async def reference_consulting(number: int) -> list[str]:
    return [await consult(number), await asyncio.to_thread(buy, number)]


async def consult_all() -> list[str]:
    async def part(number: int) -> list[str]:
        with everstep.budget(usd=0.90):
            return await reference_consulting(number)

    everstep.charge(usd=0.10)
    asked = [*(consult(number) for number in range(20)), consult_at_length(0)]
    told = await asyncio.gather(*asked, return_exceptions=True)
    told += await asyncio.gather(part(100), part(101), return_exceptions=True)
    return [type(one).__name__ if isinstance(one, Exception) else str(one) for one in told]


@workflow(budget=everstep.Budget(usd=7.00, then="fallback"))
async def reference_budget_fallback() -> list[str]:
    return await consult_all()


@workflow(budget=everstep.Budget(usd=7.00, then="fail"))
async def reference_budget_fail() -> list[str]:
    return await consult_all()


@workflow(budget=everstep.Budget(usd=7.00, then="hold"))
async def reference_budget_hold() -> list[str]:
    return await consult_all()


async def budget(app: everstep.App, journal: ClientJournal, count: int) -> None:
    """A person grants whatever is asked for."""
    flow = (reference_budget_fallback, reference_budget_fail, reference_budget_hold)[count]
    run = await journalled(journal, "start", "budget-1", app.start(flow, id="budget-1"))
    while True:
        try:
            await run.result(timeout=0.3)
        except (TimeoutError, everstep.errors.RunHeld):
            for hold in await app.holds():
                await app.resolve(hold.run, "accept", by="ann")
        else:
            return await note_result(app, journal, "budget-1")


async def reference(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "order-1", app.start(reference_order, 7, id="order-1"))
    try:
        sent = app.signal("order-1", "word", "tides", id="word-1")
        await journalled(journal, "signal", "order-1", sent, id="word-1", name="word")
    except everstep.errors.RunEnded:
        pass  # an earlier process sent it
    await note_result(app, journal, "order-1")


async def reads(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "reads-1", app.start(reference_reads, id="reads-1"))
    await note_result(app, journal, "reads-1")


async def lanes(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "lanes-1", app.start(reference_lanes, id="lanes-1"))
    await note_result(app, journal, "lanes-1")


async def fleet(app: everstep.App, journal: ClientJournal, count: int) -> None:
    async def one(number: int) -> None:
        run = f"fleet-{number}"
        await journalled(journal, "start", run, app.start(reference_fleet, number, id=run))
        await note_result(app, journal, run)

    await asyncio.gather(*(one(number) for number in range(count)))


async def journalled(journal: ClientJournal, verb: str, run: str, asked, **facts):
    journal.note(verb, run, "asked", **facts)
    try:
        answer = await asked
    except everstep.Error as error:
        journal.note(verb, run, "refused", error=type(error).__name__, **facts)
        raise
    journal.note(verb, run, "acknowledged", **facts)
    return answer


async def note_result(app: everstep.App, journal: ClientJournal, run: str) -> None:
    value = await app.get(run).result(timeout=60)
    published = await app.get(run).published()
    journal.note("result", run, "acknowledged", value=value, published=published)


async def main(kind: str, folder: str, count: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    lease = float(os.environ.get("WORKLOAD_LEASE", "30"))
    recover = kind == "fleet"
    journal = ClientJournal(os.path.join(folder, "journal.jsonl"))
    async with everstep.open(os.path.join(folder, "store.db"), recover=recover, lease=lease) as app:
        watch_commits(app.store, journal)
        work = {"reference": reference, "reads": reads, "lanes": lanes, "fleet": fleet, "budget": budget}[kind]
        await work(app, journal, count)


def let_trace(command: list[str]) -> None:
    """Have this process traced from here on: what it imports is of no interest, and slow to trace."""
    subprocess.Popen([*command, "-p", str(os.getpid())], stdin=subprocess.DEVNULL)
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.001)


def command(arguments: list[str]) -> int:
    """Be this program. Returns its exit status."""
    global LEDGER, ENTRIES
    _, kind, folder, LEDGER, *rest = arguments
    ENTRIES = Path(folder).parent / "ledger" / Path(folder).name / "ledger.jsonl"
    if "WORKLOAD_TRACED_BY" in os.environ:
        let_trace(json.loads(os.environ["WORKLOAD_TRACED_BY"]))
    try:
        asyncio.run(main(kind, folder, int(rest[0]) if rest else 0))
    except asyncio.CancelledError:
        return 143
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv))
