"""The reference workload: a program as a user would write it, in a process of its own, that tests kill in all ways.

    python workload.py reference FOLDER LEDGER      one run with a bit of everything
    python workload.py reads FOLDER LEDGER          twenty slow reads
    python workload.py lanes FOLDER LEDGER          twenty quick reads whose order is chance
    python workload.py refused FOLDER LEDGER        an atomic step that is refused when it is done again
    python workload.py loop FOLDER LEDGER           a loop with checkpoints
    python workload.py continued FOLDER LEDGER      a run that goes on with a fresh history, again and again
    python workload.py fleet FOLDER LEDGER COUNT    many runs; any number of these processes share them
    python workload.py saga FOLDER LEDGER           a run that fails and one that is rolled back: both are undone
    python workload.py carrying FOLDER LEDGER       the same, with fresh histories before they are undone
    python workload.py forking FOLDER LEDGER        a run, a fork of it, and a fork of that
    python workload.py held FOLDER LEDGER           one run that is held, told of by a webhook, and resolved
    python workload.py exchange FOLDER LEDGER       a run that is asked, and that writes a stream
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import apsw

import everstep
from everstep import STORE, Done, Fatal, NotDone, Retry, step, transaction, workflow
from everstep.stores.rows.keys import EffectRow
from everstep.testing.journals import ClientJournal, watch_commits
from everstep.testing.ledger import apply, ask

LEDGER = ""
"""The address of the ledger."""
ENTRIES = Path()
"""What the ledger has written down for this trial."""
WATCHED = Path()
"""A file that a run remembers."""
SHOP = Path()
"""A database of the workload's own, beside its store."""
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


@step(effect="once", probe=ask_about_remit, settle=0.05, limit="remitting")
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


def enter(connection, effect: str, argument: int) -> str:
    """Write down an effect in the database itself: what is there was applied."""
    connection.execute("CREATE TABLE IF NOT EXISTS applied (effect TEXT, key TEXT, argument INTEGER, at INTEGER)")
    now = time.time_ns() // 1000
    connection.execute("INSERT INTO applied VALUES (?, ?, ?, ?)", (effect, everstep.key(), argument, now))
    return f"{effect} {argument}"


def book(connection, number: int) -> str:
    return enter(connection, "book", number)


async def keep(connection, number: int) -> str:
    await asyncio.sleep(0)
    return enter(connection, "keep", number)


def book_once(connection, number: int) -> str:
    if everstep.current().attempt > 1:
        enter(connection, "book_once", number)
        raise Fatal("not a second time")
    return enter(connection, "book_once", number)


@workflow
async def reference_refused() -> str:
    try:
        return await asyncio.to_thread(transaction(SHOP, name="book_once")(book_once), 1)
    except Fatal:
        return "refused"


@step(key="reservation:{number}")
async def reserve(number: int) -> str:
    """Several runs ask for it. The ledger takes its time, so that the others wait."""
    return await asyncio.to_thread(apply, LEDGER, "reserve", everstep.key(), number)


@workflow
async def reference_reserving(number: int) -> str:
    return await reserve(number)


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
    reserved = await asyncio.gather(reserve(number), reference_reserving(number), reserve(number))
    remitted = await asyncio.to_thread(remit, number)
    booked = await asyncio.to_thread(transaction(SHOP, name="book", retry=PATIENT)(book), number)
    kept = await transaction(STORE, name="keep")(keep)(number)
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
        "reserved": sorted(set(reserved)),
        "remitted": remitted,
        "booked": booked,
        "kept": kept,
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


@dataclass
class LoopState:
    left: int
    done: list[str] = field(default_factory=list)
    draws: set[float] = field(default_factory=set)


@workflow
async def reference_loop(turns: int) -> list[str]:
    """Each turn does one of four things; what the code draws by chance goes on where it was, and never begins again."""
    state = LoopState(turns, [await look_up(turns)])
    while state.left:
        state = await everstep.checkpoint(state)
        number = 100 + state.left
        match state.left % 4:
            case 0:
                state.done.append(await pack(number))
            case 1:
                state.done.append(await asyncio.to_thread(remit, number))
            case 2:
                state.done.append(await reference_child(number))
            case 3:
                await asyncio.sleep(0.01)
                state.done.append(await look_up(number))
        state.draws.add(everstep.random().random())
        state.left -= 1
    everstep.publish("draws", len(state.draws))
    return state.done


async def loop(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "loop-1", app.start(reference_loop, 8, id="loop-1"))
    await note_result(app, journal, "loop-1")


@workflow(budget=everstep.Budget(steps=1000))
async def reference_continued(left: int, done: list[str]) -> list[str]:
    """Each generation does four things, and receives one of the signals that were sent to the first."""
    everstep.publish("left", left)
    done.append(await pack(200 + left))
    done.append(await asyncio.to_thread(remit, 200 + left))
    done.append(await reference_child(200 + left))
    done.append(await everstep.receive("word", str))
    if left:
        everstep.continue_as(left - 1, done)
    return done


async def continued(app: everstep.App, journal: ClientJournal, count: int) -> None:
    run = await journalled(journal, "start", "on-1", app.start(reference_continued, 2, [], id="on-1"))
    for number in range(3):
        name = f"word-{number}"
        try:
            await journalled(journal, "signal", "on-1", run.signal("word", name, id=name), id=name, name="word")
        except everstep.errors.RunEnded:
            pass  # it was sent before, and the run has ended since
    await note_result(app, journal, "on-1")


def damage_checkpoints(path: str, count: int) -> None:
    """Garble the newest checkpoints of the loop, behind everybody's back."""
    if os.path.exists(path):
        connection = apsw.Connection(path)
        connection.set_busy_timeout(60_000)
        try:
            connection.execute(
                "UPDATE checkpoints SET state = CAST(state || x'00' AS BLOB) WHERE run = 'loop-1' AND seq IN "
                "(SELECT seq FROM checkpoints WHERE run = 'loop-1' ORDER BY seq DESC LIMIT ?)",
                (count,),
            )
        finally:
            connection.close()


def ask_ledger(key: str, *arguments: object) -> Done | NotDone:
    """Ask the ledger's own account whether it has applied an effect with this key."""
    lines = [json.loads(line) for line in ENTRIES.read_bytes().splitlines()] if ENTRIES.exists() else []
    applied = [line for line in lines if line["kind"] == "applied" and line["key"] == key]
    return Done(f"{applied[0]['effect']}-{applied[0]['digest'][:12]}") if applied else NotDone()


def send(*arguments: object) -> str:
    """Ask the ledger to apply an effect that is named like the step whose body this is."""
    name = everstep.current().step.partition("#")[0]
    return apply(LEDGER, name, everstep.key(), list(arguments))


@step(retry=PATIENT)
async def free_seat(seat: str, number: int) -> str:
    return await asyncio.to_thread(send, seat, number)


@step(retry=PATIENT, compensate=free_seat)
async def take_seat(number: int) -> str:
    """The ledger loses its first answer, and that of its compensation."""
    return await asyncio.to_thread(send, number)


@step(effect="once", probe=ask_ledger, settle=0.02)
def refund(receipt: str, amount: int) -> str:
    """The ledger loses its answer, and applies whatever is sent twice once more. So it does with the payment."""
    return send(receipt, amount)


@step(effect="once", probe=ask_ledger, settle=0.02, compensate=refund)
def pay(amount: int) -> str:
    return send(amount)


@step(compensate=lambda label, number: send(label, number))
def label(number: int) -> str:
    return send(number)


@workflow
async def saga_trip(number: int, comes_back: bool) -> str:
    await asyncio.gather(take_seat(number), take_seat(number + 1))
    await asyncio.to_thread(pay, number)
    await asyncio.to_thread(label, number)
    await asyncio.sleep(0.01)
    if comes_back:
        return "home"
    raise LookupError("no car")


async def saga(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "trip-1", app.start(saga_trip, 7, False, id="trip-1"))
    await note_error(app, journal, "trip-1")
    await journalled(journal, "start", "trip-2", app.start(saga_trip, 70, True, id="trip-2"))
    try:
        if await app.get("trip-2").result(timeout=60) == "home":
            await journalled(journal, "rollback", "trip-2", app.rollback("trip-2", "changed my mind"))
    except everstep.errors.RunCancelled:
        pass  # an earlier process rolled it back
    await note_error(app, journal, "trip-2")


@workflow
async def saga_continued(left: int, comes_back: bool) -> str:
    """Each generation does three things that can be undone; the last one fails, or is rolled back later."""
    await take_seat(300 + left)
    await asyncio.to_thread(pay, 300 + left)
    await asyncio.to_thread(label, 300 + left)
    if left:
        everstep.continue_as(left - 1, comes_back)
    if comes_back:
        return "home"
    raise LookupError("no car")


async def carrying(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "far-1", app.start(saga_continued, 2, False, id="far-1"))
    await note_error(app, journal, "far-1")
    await journalled(journal, "start", "far-2", app.start(saga_continued, 1, True, id="far-2"))
    try:
        if await app.get("far-2").result(timeout=60) == "home":
            await journalled(journal, "rollback", "far-2", app.rollback("far-2", "changed my mind"))
    except everstep.errors.RunCancelled:
        pass  # an earlier process rolled it back
    await note_error(app, journal, "far-2")


@workflow
async def reference_forked(number: int) -> list[str]:
    done = [await look_up(number)]
    done.append(await pack(number))
    done.append(await asyncio.to_thread(remit, number))
    everstep.publish("done", len(done))
    return done


async def forking(app: everstep.App, journal: ClientJournal, count: int) -> None:
    """A run, a fork of it before its effects, and a fork of that fork after one."""
    await journalled(journal, "start", "fork-0", app.start(reference_forked, 400, id="fork-0"))
    await note_result(app, journal, "fork-0")
    for number, name in enumerate(("look_up", "pack")):
        source, id = f"fork-{number}", f"fork-{number + 1}"
        at = next(
            one.seq for one in await app.get(source).history() if (one.step, one.kind) == (name, "step_completed")
        )
        fork = app.fork(source, at=at, id=id, allow_effects=["pack", "remit"])
        await journalled(journal, "start", id, fork)
        await note_result(app, journal, id)


async def note_error(app: everstep.App, journal: ClientJournal, run: str) -> None:
    try:
        value = await app.get(run).result(timeout=60)
    except (LookupError, everstep.errors.RunCancelled) as error:
        undone = " ".join(getattr(error, "__notes__", [])).replace(".", "").replace(",", "").split()
        value = [type(error).__name__, str(error), *sorted(undone)]  # which seat was taken first is chance
    journal.note("result", run, "acknowledged", value=value, published={})


# -- a budget: every request to the ledger costs 30 cents, and is estimated at 50 ------------------------------------
@step(effect="read", cost={"usd": 0.50}, fallback="too dear")
async def consult(number: int) -> str:
    answer = await asyncio.to_thread(ask, LEDGER, "consult", everstep.key(), number)
    everstep.charge(usd=0.30)
    return answer


@step(effect="once", cost={"usd": 0.50}, probe=ask_ledger, fallback="not bought")
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


async def exchange(app: everstep.App, journal: ClientJournal, count: int) -> None:
    import exchange as part

    part.LEDGER[0] = LEDGER
    await part.exchange(app, journal, SHOP.parent, journalled)


async def reference(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "order-1", app.start(reference_order, 7, id="order-1"))
    try:
        sent = app.signal("order-1", "word", "tides", id="word-1")
        await journalled(journal, "signal", "order-1", sent, id="word-1", name="word")
    except everstep.errors.RunEnded:
        pass  # an earlier process sent it
    await note_result(app, journal, "order-1")
    for database in (SHOP, STORE):
        await app.forget_markers(database, older_than=0)


async def refused(app: everstep.App, journal: ClientJournal, count: int) -> None:
    await journalled(journal, "start", "refused-1", app.start(reference_refused, id="refused-1"))
    await note_result(app, journal, "refused-1")


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


def look_away(app: everstep.App) -> None:
    """See each key as free at first, as if somebody else were quicker between the look and the claim."""
    looks: Counter[str] = Counter()
    real = app.store.effect

    def effect(key: str) -> EffectRow | None:
        looks[key] += 1
        return None if looks[key] <= 3 else real(key)

    app.store.effect = effect  # type: ignore[method-assign]


async def main(kind: str, folder: str, count: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    lease = float(os.environ.get("WORKLOAD_LEASE", "30"))
    recover = kind == "fleet"
    journal = ClientJournal(os.path.join(folder, "journal.jsonl"))
    if damages := int(os.environ.get("WORKLOAD_DAMAGE", "0")):
        damage_checkpoints(os.path.join(folder, "store.db"), damages)
    async with everstep.open(os.path.join(folder, "store.db"), recover=recover, lease=lease) as app:
        watch_commits(app.store, journal)
        look_away(app)
        works = {
            "reference": reference,
            "refused": refused,
            "reads": reads,
            "lanes": lanes,
            "loop": loop,
            "continued": continued,
            "fleet": fleet,
            "saga": saga,
            "carrying": carrying,
            "forking": forking,
            "held": held,
            "budget": budget,
            "exchange": exchange,
        }
        work = works[kind]
        await work(app, journal, count)


def let_trace(command: list[str]) -> None:
    """Have this process traced from here on: what it imports is of no interest, and slow to trace."""
    subprocess.Popen([*command, "-p", str(os.getpid())], stdin=subprocess.DEVNULL)
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.001)


def command(arguments: list[str]) -> int:
    """Be this program. Returns its exit status."""
    global LEDGER, ENTRIES, SHOP, WATCHED
    _, kind, folder, LEDGER, *rest = arguments
    SHOP = Path(folder) / "shop.db"
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
