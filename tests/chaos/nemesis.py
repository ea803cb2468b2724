"""Trials that stop and close whatever acts: a seed decides what acts where, and what is done to it.

    python -m tests.chaos.nemesis sqlite 17        repeats one trial and says what was done

A trial has a store of its own and two processes. In the first, runs are started whose bodies wait at the till. Then it
is stopped, closed in good order, opened again, its clock jumps, it gets no threads, its statements are cancelled; the
second takes over what it may. In the end all faults are ended, all bodies may act, and every run must end.
"""

import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.model.status import ENDED
from everstep.testing.checker import check, export_histories
from tests.chaos.stage import DEADLINE_SECONDS, Gone, Hang, HostProcess, Nursery, Stage, Unanswered, by_kind
from tests.chaos.stopping import CONTRACTS, KINDS

STORES = ("sqlite", "postgres")
HOUR, DAY = 3600.0, 86400.0
JUMPS = (-DAY, -HOUR, HOUR, DAY)
FORMS = ("async", "async", "blocking", "worker")
PAUSES = (0.0, 0.0, 0.05, 0.2)
PATIENCE = (0.1, 0.3, 0.8)
"""How long, in seconds, the second process may go on before the faults end."""
SOFT_SECONDS = 3.0
"""How long the runs may take to end while the first process is still there. Then it is ended as well."""
OPENINGS_MAX = 8
"""More often than faults can be in the way of opening an app."""
DISTURBING = ("stop", "close", "refuse", "cancel")

Move = tuple[Any, ...]


@dataclass
class Plan:
    """What a trial does."""

    store: str
    seed: int
    form: str
    """What the first process is: a program with apps on its own loop or on loops of theirs, or `everstep worker`."""
    orders: list[str]
    """The steps whose bodies are disturbed."""
    ahead: dict[str, float]
    """How far ahead the clocks of processes are when they begin."""
    early: list[Move]
    """What is done before the runs are started."""
    moves: list[Move]
    patience: float
    closes_in_the_end: bool
    slow: bool = False
    """Whether bodies act between a probe's question and its answer."""

    def __str__(self) -> str:
        slow = ", slow till" if self.slow else ""
        return f"{self.store} {self.seed}: {self.form}{slow}, {self.orders}, {self.ahead}, {self.early} → {self.moves}"


def plan_of(store: str, seed: int) -> Plan:
    """Return what a seed stands for."""
    chance = random.Random(f"{store} {seed}")
    form = chance.choice(FORMS)
    orders = [f"{chance.choice(KINDS)}_{chance.choice(CONTRACTS)}" for _ in range(chance.choice((1, 2, 2, 3, 4)))]
    ahead = {name: chance.choice(JUMPS) if chance.random() < 0.2 else 0.0 for name in ("first", "second")}
    cores: list[list[Move]] = [
        [("close",)],
        [("close",)],
        [("stop",)],
        [("stop",), ("wake",)],
        [("stop",), ("wake",), ("close",)],
        [("close",), ("stop",)],
        [("jump", "second", chance.choice(JUMPS))],
        [],
    ]
    if form != "worker":
        cores += [[("close",), ("reopen",)], [("sibling",), ("close",)], [("sibling",), ("close",), ("reopen",)]]
    moves = list(chance.choice(cores))
    if chance.random() < 0.9:
        moves.insert(chance.randint(0, len(moves)), ("successor",))
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        moves.insert(chance.randint(0, len(moves)), fault(chance))
    moves = [(*move, chance.choice(PAUSES)) for move in moves]
    early = [(*fault(chance, "first"), 0.0)] if chance.random() < 0.25 else []
    patience, closes = chance.choice(PATIENCE), chance.random() < 0.5
    slow = chance.random() < 0.3
    return Plan(store, seed, form, orders, ahead, early, moves, patience, closes, slow)


def fault(chance: random.Random, target: str = "") -> Move:
    """Return something that is done inside a process."""
    kind = chance.choice(("jump", "refuse", "refuse", "cancel", "cancel"))
    target = target or chance.choice(("first", "first", "second"))
    much = chance.choice(JUMPS) if kind == "jump" else chance.randint(1, 3)
    return (kind, target, much, chance.choice((0, 0, 5, 20, 80))) if kind == "cancel" else (kind, target, much)


@dataclass
class Outcome:
    """What came of a trial."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    """Each begins with its kind."""
    log: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    unaided: int = 0
    """Runs that have ended without a person."""
    cpu: float = 0.0
    """What the processes took, in seconds."""

    def told(self) -> str:
        """Return everything that is known, as text."""
        again = f"again: python -m tests.chaos.nemesis {self.plan.store} {self.plan.seed}"
        return "\n".join([*self.problems, str(self.plan), *self.log, again])


class Trial:
    """One plan, done."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self.plan = plan
        self.stage = stage
        self.outcome = Outcome(plan, log=stage.log, fired=stage.fired)
        self.journal: list[dict[str, Any]] = []
        self._names = {f"order-{number}": (step, number) for number, step in enumerate(plan.orders, 1)}
        self._apps: dict[str, list[str]] = {"first": [], "second": []}
        self._pending: list[tuple[str, asyncio.Task[Any]]] = []
        self._acknowledged: set[tuple[str, str]] = set()
        self._opened = 0
        stage.till.is_slow = plan.slow

    def blame(self, kind: str, what: str) -> None:
        """Something is wrong."""
        self.outcome.problems.append(f"{kind}: {what}")

    @property
    def first(self) -> HostProcess:
        return self.stage.hosts["first"]

    # -- what hosts are told ----------------------------------------------------------------------------------------
    async def do(self, what: str, doing: Coroutine[Any, Any, Any]) -> None:
        """Do something in a process. While a process is stopped nothing is waited for: others may wait for it."""
        task = asyncio.ensure_future(doing)
        self._pending.append((what, task))
        if any(host.is_stopped for host in self.stage.hosts.values()):
            await asyncio.wait([task], timeout=0.1)
        else:
            await asyncio.wait([task], timeout=2.0)
        self.stage.note(f"{what}{'' if task.done() else ' (under way)'}")

    async def settle_pending(self) -> None:
        """Wait for all that was begun, now that nothing is in its way any more."""
        for what, task in self._pending:
            try:
                await self.stage.within(task, what)
            except Unanswered as error:
                if isinstance(error, Hang):
                    self.blame("hang", str(error))
                elif not is_refusal(error):
                    self.blame("raw" if is_raw(error) else "error", f"{what}: {error}")
                self.stage.note(f"{what}: {error}")
        self._pending.clear()

    async def open_app(self, host: str, *, recover: bool) -> None:
        self._opened += 1
        app, form = f"app-{self._opened}", self.plan.form if host == "first" else "async"
        self._apps[host].append(app)
        doing = self._open(self.stage.hosts[host], app=app, form=form, recover=recover)
        await self.do(f"open {app} in {host}{', which recovers' if recover else ''}", doing)

    async def _open(self, host: HostProcess, **facts: Any) -> None:
        """Open an app; again, as a program does that is started again, if a fault was in the way."""
        for tries in range(OPENINGS_MAX):
            try:
                await host.ask("open", **facts)
                return
            except Unanswered as error:
                self.stage.note(f"{facts['app']} was not opened: {error}")
                if not is_refusal(error):
                    self.blame("raw" if is_raw(error) else "error", f"open: {error}")
                if tries == OPENINGS_MAX - 1 or isinstance(error, Gone):
                    raise

    async def close_app(self, host: str, place: int = 0) -> None:
        app = self._apps[host].pop(place)
        await self.do(f"close {app} in {host}", self.stage.hosts[host].ask("close", app=app, drain=0.0))

    async def _told(self, verb: str, run: str, doing: Coroutine[Any, Any, Any], **facts: Any) -> None:
        self.journal.append({"verb": verb, "run": run, "state": "asked", **facts})
        await doing
        self.journal.append({"verb": verb, "run": run, "state": "acknowledged", **facts})
        self._acknowledged.add((verb, run))

    async def start(self, host: str) -> None:
        """Start all orders, or attach to them."""
        app = self._apps[host][-1]
        for run, (step, number) in self._names.items():
            doing = self.stage.hosts[host].ask("start", app=app, run=run, name=step, number=number)
            await self.do(f"start {run} ({step}) in {host}", self._told("start", run, doing))

    async def signal(self, host: str, run: str, name: str = "word") -> None:
        facts = {"name": name, "id": f"{name} {run}"}
        app = self._apps[host][-1]
        doing = self.stage.hosts[host].ask("signal", app=app, run=run, value=f"{name} for {run}", **facts)
        await self.do(
            f"{name} to {run} in {host}", self._told("signal" if name == "word" else "poke", run, doing, **facts)
        )

    # -- the trial --------------------------------------------------------------------------------------------------
    async def perform(self) -> Outcome:
        """Do all of it, and judge."""
        try:
            await self.begin()
            for *move, pause in self.plan.moves:
                await self.move(*move)
                await asyncio.sleep(pause)
            await self.stage.wait_for(lambda: bool(self.stage.till.overlaps), self.plan.patience)
            await self.heal()
            await self.finish()
        except Unanswered as error:
            self.blame("hang" if isinstance(error, Hang) else "error", str(error))
        self.judge()
        return self.outcome

    async def begin(self) -> None:
        """Bring all bodies to the till."""
        stage, plan = self.stage, self.plan
        drain = 0.2 if plan.form == "worker" else None
        first, second = plan.ahead["first"], plan.ahead["second"]
        await asyncio.gather(stage.begin("first", ahead=first, drain=drain), stage.begin("second", ahead=second))
        for ahead in (first, second):
            stage.fired["clock jumps"] += bool(ahead)
        if plan.form == "worker":
            await self.stage.within(self._wait_for_worker(), "the worker begins")
        for *move, _ in plan.early:
            await self.move(*move)
        starter = "second" if plan.form == "worker" else "first"
        if plan.form == "worker":  # a client, which drives nothing itself
            self._apps["second"].append("client")
            await self.do("connect", stage.hosts["second"].ask("connect", app="client"))
        else:
            await self.open_app("first", recover=False)
        await self.start(starter)
        for do, facts in (("refuse", {"threads": 0}), ("cut", {"statements": 0})) if plan.early else ():
            await self.stage.within(self.first.ask(do, **facts), f"{do} no more")
        await self.settle_pending()
        if missing := self.not_started():
            stage.note(f"{missing} again, as a client does who heard no answer")
            await self.start(starter)
            await self.settle_pending()
        if missing := self.not_started():
            raise Unanswered(f"{missing} cannot be started, although no fault is left: {stage.log[-1]}")
        # One that was refused its thread may wait in a pool's queue behind one that waits for us.
        if not await stage.wait_for(self.all_begun, SOFT_SECONDS if plan.early else stage.deadline):
            if not plan.early:
                raise Hang(f"the bodies begin: this hangs, {self.statuses()}")
            stage.note(f"not all bodies have begun: {self.statuses()}")

    def not_started(self) -> list[str]:
        return [run for run in self._names if ("start", run) not in self._acknowledged]

    def all_begun(self) -> bool:
        """Whether the body of each order is, or was, at the till, or has failed before it came there."""
        begun = {body.number for body in self.stage.till.bodies}
        left = [run for run, (_, number) in self._names.items() if number not in begun]
        events = [event for run in left for event in self.stage.store.events(run, 1)]
        return sum(event.kind == "step_doubted" for event in events) >= len(left)

    async def _wait_for_worker(self) -> None:
        while self.first.pid not in [worker.pid for worker in self.stage.store.workers()]:
            await asyncio.sleep(0.02)

    async def move(self, kind: str, *facts: Any) -> None:
        """Do one of the things that a plan consists of."""
        stage = self.stage
        self.stage.till.is_disturbed |= kind in DISTURBING and facts[:1] != ("second",)
        at_the_till = [body for body in stage.till.open_bodies() if body.pid == self.first.pid]
        if kind == "stop":
            self.first.send(signal.SIGSTOP)
            stage.fired["stops"] += bool(at_the_till)
            stage.note(f"first is stopped, {len(at_the_till)} bodies at the till")
        elif kind == "wake":
            self.first.send(signal.SIGCONT)
            stage.note("first is woken")
        elif kind == "close":
            stage.fired["closes"] += bool(at_the_till)
            stage.fired.update(f"closed over {body.effect.rpartition('_')[0]}" for body in at_the_till)
            if self.plan.form == "worker":
                self.first.send(signal.SIGTERM)
                stage.note(f"first is told to end, {len(at_the_till)} bodies at the till")
            else:
                await self.close_app("first")
        elif kind == "reopen":
            await self.open_app("first", recover=False)
            await self.start("first")
        elif kind == "sibling":
            await self.open_app("first", recover=True)
        elif kind == "successor":
            await self.open_app("second", recover=True)
        else:
            await self.fault(kind, *facts)

    async def fault(self, kind: str, target: str, much: Any, after: int = 0) -> None:
        """Do something inside a process."""
        stage, host = self.stage, self.stage.hosts[target]
        if kind == "jump":
            await self.do(f"the clock of {target} jumps by {much:+.0f} s", host.ask("jump", seconds=much))
        elif kind == "refuse":
            await self.do(f"{target} is refused {much} threads", host.ask("refuse", threads=much))
        elif self.plan.store == "sqlite":
            await self.do(
                f"{much} statements of {target} are interrupted", host.ask("cut", statements=much, after=after)
            )
        else:
            cancelling = asyncio.ensure_future(asyncio.to_thread(stage.cancel_statements, host.pid))
            sender = target if self._apps[target] else "second" if target == "first" else "first"
            if self._apps[sender] and self._acknowledged and not stage.hosts[sender].is_stopped:
                # So that there are statements.
                await self.signal(sender, min(self._names), f"poke-{len(stage.log)}")
            count = await cancelling
            stage.fired["statements cancelled"] += count
            stage.note(f"{count} statements of {target} were cancelled")

    async def heal(self) -> None:
        """End all faults, let everything act, and let the second process take over what it may."""
        stage = self.stage
        for host in stage.hosts.values():
            host.send(signal.SIGCONT)
            try:
                await self.stage.within(host.ask("end"), f"{host.name} is healed")
            except Gone:
                stage.note(f"{host.name} has ended")
        stage.note("the faults have ended")
        stage.till.release()
        await self.settle_pending()
        if self.plan.closes_in_the_end:
            while self._apps["first"]:
                await self.close_app("first")
        if not [app for app in self._apps["second"] if app != "client"]:
            await self.open_app("second", recover=True)
        await self.settle_pending()
        for run in self._names:
            if ("start", run) in self._acknowledged:
                await self.signal("second", run)
        await self.settle_pending()

    async def finish(self) -> None:
        """Wait until every run has ended or is held; end the first process; then a person looks at holds."""
        stage = self.stage
        await stage.wait_for(lambda: not stage.till.open_bodies() and self.all_at_rest(), SOFT_SECONDS)
        rows = stage.rows()
        self.outcome.unaided = sum(row.status in ENDED for row in rows.values())
        await self.end_first()
        if not await stage.wait_for(self.all_at_rest, stage.deadline):
            self.blame("stuck", str(self.statuses()))
            return
        for _ in range(3):
            await self.resolve_holds()
            if not await stage.wait_for(self.all_at_rest, stage.deadline):
                self.blame("stuck", f"after a hold was resolved: {self.statuses()}")
                return
            if self.all_ended():
                return

    async def end_first(self) -> None:
        """Close what is open in the first process, and end it."""
        stage, first = self.stage, self.first
        await self.count(first)
        if not first.status.done():
            if self.plan.form == "worker":
                first.send(signal.SIGTERM)
            else:
                while self._apps["first"]:
                    await self.close_app("first")
                await self.settle_pending()
                first.hang_up()
        status = await self.stage.within(asyncio.shield(first.status), "first ends")
        stage.note(f"first ended with {status}")
        is_refused = any(move[:2] == ("refuse", "first") for move in (*self.plan.early, *self.plan.moves))
        if status and not (is_refused and self.plan.form == "worker"):  # without threads it may give up
            self.blame("died", f"the first process ended with {status}")
        await self.count(stage.hosts["second"])

    async def count(self, host: HostProcess) -> None:
        """Take the count of faults that a process has had."""
        try:
            answer = await self.stage.within(host.ask("fired"), f"{host.name} counts")
            self.stage.fired.update(answer["fired"])
            self.outcome.cpu += answer["cpu"]
        except Gone:
            pass  # it was told to end, and has

    async def resolve_holds(self) -> None:
        """Be a person who asks the till, once nothing acts any more."""
        for hold in self.stage.store.holds():
            self.stage.note(f"hold of {hold.run}: {hold.reason}, {hold.summary}")
            if hold.reason != "in-doubt":
                self.blame("hold", f"{hold.run} is held as {hold.reason}: {hold.summary}")
                continue
            self.stage.fired["holds"] += 1
            number = self._names[hold.run][1]
            await self.stage.wait_for(
                lambda number=number: not self.stage.till.open_bodies(number), self.stage.deadline
            )
            value = self.stage.till.value(number)
            resolution = "probe" if "probe" in hold.resolutions else "done" if value is not None else "not-done"
            app = self._apps["second"][-1]
            facts = {"app": app, "run": hold.run, "resolution": resolution, "value": value}
            try:
                await self.stage.within(self.stage.hosts["second"].ask("resolve", **facts), "a hold is resolved")
                self.stage.note(f"{hold.run} was resolved: {resolution}")
            except Unanswered as error:
                self.stage.note(f"{hold.run} was not resolved: {error}")

    # -- the verdict ------------------------------------------------------------------------------------------------
    def statuses(self) -> dict[str, str]:
        return {run: row.status for run, row in self.stage.rows().items()}

    def all_at_rest(self) -> bool:
        rows = self.stage.rows()
        return all(run in rows and rows[run].status in (*ENDED, "held") for run in self.wanted())

    def all_ended(self) -> bool:
        rows = self.stage.rows()
        return all(run in rows and rows[run].status in ENDED for run in self.wanted())

    def wanted(self) -> list[str]:
        return [run for run in self._names if ("start", run) in self._acknowledged]

    def judge(self) -> None:
        """Compare what the till has with what was promised."""
        stage, rows = self.stage, self.stage.rows()
        applied = Counter((e["effect"], e["arguments"]) for e in stage.till.entries if e["kind"] == "applied")
        for (effect, number), count in applied.items():
            if count > 1:
                self.blame("doubled", f"{effect}({number}) was applied {count} times")
        for run in self.wanted():
            row, (step, number) = rows.get(run), self._names[run]
            if row is None:
                self.blame("lost", f"the start of {run} was acknowledged, and it is not there")
            elif row.status == "completed":
                self.outcome.completed += 1
                for effect in (step, "stamp"):
                    if not applied[effect, number]:
                        self.blame("lost", f"{run} is completed and {effect} was never applied")
            elif row.status in ENDED:
                self.blame("ended", f"{run} ({step}) is {row.status}: {last_events(stage, run)}")
        for what in stage.till.robbed:
            self.blame("robbed", f"{what}, whose process nothing was done to but to clocks")
        histories = export_histories(stage.store)
        broken = check(histories, journal=self.journal, ledger=stage.till.entries, faults=["zombie"])
        for one in broken:
            kind = "doubled" if one.rule[0] == "D" else "lost" if one.rule[0] == "L" else "rule"
            self.blame("stuck" if "it is still" in one.what else kind, str(one))


def last_events(stage: Stage, run: str) -> str:
    """Return what happened last in a run."""
    row = stage.rows()[run]
    events = stage.store.events(run, row.generation)
    return "; ".join(f"{event.kind} {event.step} {event.body!r}" for event in events[-3:])[:600]


def is_refusal(error: Unanswered) -> bool:
    """Tell whether an error is one that a caller may get while faults last: then it asks again."""
    kind = str(error).partition(":")[0]
    return isinstance(error, Gone) or kind in ("StoreError", "StoreBusy", "RuntimeError", "RunEnded", "KeyError")


def is_raw(error: Unanswered) -> bool:
    """Tell whether an error is one of a database's driver, that no caller of ours can know."""
    return str(error).partition(":")[0] in ("InterruptError", "QueryCanceled", "OperationalError", "AssertionError")


# -- many of them -----------------------------------------------------------------------------------------------------
async def one_trial(plan: Plan, nursery: Nursery, *, mutant: str = "", deadline: float = DEADLINE_SECONDS) -> Outcome:
    """Do one trial in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="everstep-stop-") as folder:
        async with Stage(plan.store, Path(folder), nursery, mutant, deadline) as stage:
            outcome = await Trial(plan, stage).perform()
            if outcome.problems:
                for said in sorted(Path(folder).glob("*.txt")):
                    outcome.log += [f"--- {said.name}", *said.read_text(errors="replace").splitlines()[-60:]]
            return outcome


async def many_trials(plans: Iterable[Plan], *, together: int) -> list[Outcome]:
    """Do these trials, several at a time."""
    nursery, room = Nursery(), asyncio.Semaphore(together)

    async def one(plan: Plan) -> Outcome:
        async with room:
            return await one_trial(plan, nursery)

    try:
        return list(await asyncio.gather(*map(one, plans)))
    finally:
        nursery.close()


def main(store: str, first: int, count: int = 1, together: int = 4) -> None:
    """Do some trials and say what came of them."""
    outcomes = asyncio.run(many_trials((plan_of(store, first + number) for number in range(count)), together=together))
    kinds: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.problems or count == 1:
            print(outcome.told(), end="\n\n")
        kinds.update(by_kind(outcome.problems).keys())
    fired = sum((outcome.fired for outcome in outcomes), Counter())
    print(f"trials {len(outcomes)}, failed {sum(bool(one.problems) for one in outcomes)}: {dict(kinds)}")
    print(dict(fired))
    print(f"CPU of the processes {sum(one.cpu for one in outcomes):.1f} s")
    completed, unaided = sum(one.completed for one in outcomes), sum(one.unaided for one in outcomes)
    print(f"completed {completed} of {sum(len(one.plan.orders) for one in outcomes)}, without a person {unaided}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
