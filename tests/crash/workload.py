"""The reference workload: a program as a user would write it, in a process of its own, that tests kill in all ways.

    python workload.py reference FOLDER LEDGER      one run with a bit of everything
    python workload.py reads FOLDER LEDGER          twenty slow reads
    python workload.py lanes FOLDER LEDGER          twenty quick reads whose order is chance
    python workload.py fleet FOLDER LEDGER COUNT    many runs; any number of these processes share them
    python workload.py held FOLDER LEDGER           one run that is held, told of by a webhook, and resolved

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
WATCHED = Path()
"""A file that a run remembers."""
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


@step(effect="once")
async def lose_track(number: int) -> str:
    raise OSError("whether it happened is not known")


def take_it_as_it_is(remembered: object, now: object) -> str:
    return "accept"


@workflow
async def reference_held(number: int) -> str:
    await everstep.expect(everstep.witness.value("watched", WATCHED.read_text), on_drift=take_it_as_it_is)
    await everstep.receive("go", bool)
    return await lose_track(number)


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


async def held(app: everstep.App, journal: ClientJournal, count: int) -> None:
    """The outside changes while the run waits. Its hold is resolved only when somebody was told of it."""
    WATCHED.touch()
    await journalled(journal, "start", "held-1", app.start(reference_held, 7, id="held-1"))
    while "held-1" in app.drivers:
        await asyncio.sleep(0.01)
    WATCHED.write_text("changed")
    try:
        await app.signal("held-1", "go", True, id="go-1")
    except everstep.errors.RunEnded:
        pass  # an earlier process sent it
    while True:
        try:
            await note_result(app, journal, "held-1")
            return
        except everstep.errors.RunHeld:
            while app.store.notifications():
                await asyncio.sleep(0.01)
            await app.resolve("held-1", "done", value="it did", by="the workload")


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
        work = {"reference": reference, "reads": reads, "lanes": lanes, "fleet": fleet, "held": held}[kind]
        await work(app, journal, count)


def let_trace(command: list[str]) -> None:
    """Have this process traced from here on: what it imports is of no interest, and slow to trace."""
    subprocess.Popen([*command, "-p", str(os.getpid())], stdin=subprocess.DEVNULL)
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.001)


def command(arguments: list[str]) -> int:
    """Be this program. Returns its exit status."""
    global LEDGER, ENTRIES, WATCHED
    _, kind, folder, LEDGER, *rest = arguments
    WATCHED = Path(folder) / "watched"
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
