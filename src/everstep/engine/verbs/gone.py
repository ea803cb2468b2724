"""A worker or a host that is gone for good: a person, or a program that manages machines, declares it once.

Nothing in a store proves that a process on another machine has ended. So a `once` step that it began is held although
its probe says that it has not happened: the process might still do it. A person who knows that it cannot, because the
machine is off or the container was removed, declares it gone. That is stored, with the author and the reason. Its steps
in doubt are then settled by their probes, also those of runs that are held already.

A declared worker must not be seen alive: one that has a lease is refused. Its runs get new epochs in the same
transaction, so a worker that lives all the same writes nothing more and begins nothing more; it stops, and says why.
"""

from typing import NamedTuple

from everstep.engine.process.elsewhere import on_a_thread
from everstep.engine.process.host import Host
from everstep.engine.process.leases import wait_for_lapse
from everstep.engine.run.acting import host_of, is_on_host
from everstep.engine.run.holds import report_of
from everstep.engine.verbs.runs import resolve
from everstep.errors import HoldConflict, Misuse, RunActive, WorkerAlive
from everstep.model.untrusted import logger
from everstep.stores.processes import is_of_this_machine, worker_has_ended
from everstep.stores.protocol import HoldRow, Store, WorkerRow
from everstep.stores.rows.workers import GoneKind, GoneRow

log = logger("everstep.worker")


class Gone(NamedTuple):
    """The effects of a declaration."""

    kind: GoneKind
    name: str
    workers: list[str]
    """Workers of that name or host that had a row or runs, and are fenced now."""
    asked: list[str]
    """Runs that were held because of it: their probes are asked again."""


async def declare(app: Host, kind: GoneKind, name: str, *, note: str, by: str, never_seen: bool = False) -> Gone:
    """Declare a worker or a host gone. Raises `WorkerAlive` if it is seen alive, and `Misuse` for an unknown one."""
    if not name or not note:
        raise Misuse("Say which worker or host is gone, and in `note` how you know: that is kept.")
    await _refuse_living(app, kind, name)
    everyone = {row.id for row in await app.read(app.store.workers)}.union(await app.read(app.store.owners))
    workers = sorted(worker for worker in everyone if _is_meant(kind, name, worker))
    if not workers and not never_seen:
        await app.read(_refuse_unknown, app.store, kind, name)
    gone = GoneRow(kind, name, app.clock.now(), by, note)
    await on_a_thread(app.store.declare_gone, gone, workers)
    log.warning("%s %s was declared gone%s: %s", kind.capitalize(), name, f" by {by}" if by else "", note)
    asked = await _ask_probes(app, gone)
    app.pump.nudge()
    return Gone(kind, name, workers, asked)


async def _refuse_living(app: Host, kind: GoneKind, name: str) -> None:
    """Raise `WorkerAlive` for a worker with a lease, and for one whose process the kernel of this machine knows."""
    for row in await app.read(app.store.workers):
        if _is_meant(kind, name, row.id, row):
            await wait_for_lapse(app, row.id)
    for row in await app.read(app.store.workers):
        if not _is_meant(kind, name, row.id, row):
            continue
        process = f"Worker {row.id} (process {row.pid} on {row.host})"
        if row.has_lease:
            seconds = max(0, row.lease_until - await app.read(app.store.now)) / 1e6
            raise WorkerAlive(
                f"{process} is not gone: its lease lasts {seconds:.0f} s more. Stop it, and say so again when that is "
                "over. Nothing was noted."
            )
        if is_of_this_machine(row.id) and not await app.read(worker_has_ended, row.id):
            raise WorkerAlive(f"{process} exists on this machine, stopped perhaps. Kill it. Nothing was noted.")


def _refuse_unknown(store: Store, kind: GoneKind, name: str) -> None:
    """Raise `Misuse` unless a worker, a step in doubt or an earlier declaration has this name."""
    workers = store.workers()
    in_doubt = {str(report_of(hold).get("worker", "")) for hold in store.holds()} - {""}
    if kind == "worker":
        known, more = in_doubt.union(row.id for row in workers), ""
    else:
        hosts = {host_of(worker) for worker in in_doubt.union(store.owners())} - {""}
        known = hosts.union((row.host for row in workers), (row.name for row in store.gone("host")))
        more = " If something was begun there all the same, insist: never_seen=True, or --never-seen."
    if name in known or store.gone(kind, name) or any(_is_meant(kind, name, worker) for worker in in_doubt):
        return
    there = ", ".join(sorted(known)) or "none"
    raise Misuse(f"{store.url} has never seen a {kind} {name!r}. Known: {there}. Nothing was noted.{more}")


def _is_meant(kind: GoneKind, name: str, worker: str, row: WorkerRow | None = None) -> bool:
    if kind == "worker":
        return worker == name
    return (row is not None and row.host == name) or is_on_host(worker, name)


def _holds_of(store: Store, kind: GoneKind, name: str, at: int) -> list[HoldRow]:
    """Return the open holds of steps in doubt that a worker or host began, and whose probe can be asked."""
    found = []
    for hold in store.holds():
        facts = report_of(hold)
        is_theirs = _is_meant(kind, name, str(facts.get("worker", ""))) and facts.get("began_at", 0) <= at
        if is_theirs and hold.reason == "in-doubt" and "probe" in hold.resolutions:
            found.append(hold)
    return found


async def _ask_probes(app: Host, gone: GoneRow) -> list[str]:
    """Continue held runs by asking their probes. Those that are held meanwhile are found in the next round."""
    asked: dict[str, None] = {}
    note = f"{gone.kind} {gone.name} was declared gone: {gone.note}"
    while True:
        holds = await app.read(_holds_of, app.store, gone.kind, gone.name, gone.at)
        new = [hold for hold in holds if hold.id not in asked]
        if not new:
            break
        for hold in new:
            asked[hold.id] = None
            try:
                await resolve(app, hold.run, "probe", hold=hold.id, value=None, note=note, by=gone.by)
            except (HoldConflict, RunActive):
                continue  # another decision came first
    holds = await app.read(app.store.holds, open_only=False)
    return list(dict.fromkeys(hold.run for hold in holds if hold.id in asked))
