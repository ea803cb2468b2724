"""What a driver does when the code asks for anything but a step or its end."""

from typing import TYPE_CHECKING

import msgspec

from everstep.engine.code.checkpoints import KeptFact, TakeCheckpoint, encode_part
from everstep.engine.code.commands import CancelChild, CancelStep, ChildCall, Command, PublishValue, StartTimer
from everstep.engine.code.continue_as import STOPPING
from everstep.engine.code.generations import ContinueRun
from everstep.engine.code.requests import AnswerRequest
from everstep.engine.code.start import Origin, continued_run
from everstep.engine.code.streams import AppendEntry
from everstep.engine.history.journal import packed
from everstep.engine.history.restored import restores_in
from everstep.model import events as ev
from everstep.model.carried import Carried
from everstep.model.crash_points import crash_point
from everstep.model.digests import checkpoint_digest, derived_key
from everstep.model.untrusted import logger
from everstep.stores.protocol import CheckpointRow
from everstep.stores.rows.answers_and_streams import AnswerRow
from everstep.stores.rows.archive import CHECKPOINT_COLUMNS, ArchiveRow, archive_bytes

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.driver import Driver


def perform(driver: "Driver", command: Command) -> None:
    """Record what the code asked for, and do it when the output-commit rule allows."""
    if isinstance(command, TakeCheckpoint):
        record_checkpoint(driver, command)
        return
    if driver.budgets is not None and isinstance(command, ChildCall):
        driver.budgets.ask_for_child(command)
        return
    if isinstance(command, StartTimer):
        timer = command.timer
        # By the store's clock now: the run's own events may be ahead of it, if a wrong clock wrote them.
        timer.deadline = driver.app.clock.now() + timer.duration
        driver.deadlines.add(timer.deadline, "timer", command.call)
    elif isinstance(command, CancelStep):
        driver.attempts.forget(command.target.call)
    elif isinstance(command, ChildCall):
        driver.children.start(command)
    elif isinstance(command, PublishValue):
        driver.publish(command.name, command.payload)
    elif isinstance(command, CancelChild):
        driver.children.cancel(command.target.run)
    elif isinstance(command, AnswerRequest):
        record_answer(driver, command)
        return
    elif isinstance(command, AppendEntry):
        driver.attempts.bodies.streams_of_run().append(command)
        return
    body = command.body()
    if command.payload_field:
        body = driver.journal.pack_into(body, command.payload_field)
    seq = driver.record(command.kind, command.step, body)
    if command.crash_point:
        crash_point(command.crash_point)
    if isinstance(command, ChildCall):
        driver.writer.when_durable(seq, lambda: driver.app.adopt(command.run))
    else:
        driver.writer.save(waited_for=False)


def record_patches(driver: "Driver") -> None:
    """Record new answers to `patched`."""
    for name in driver.execution.take_new_patches():
        driver.record("patched", "", ev.Patched(name, driver.execution.patches[name]))
    driver.writer.save(waited_for=False)


def record_answer(driver: "Driver", command: AnswerRequest) -> None:
    """Record an answer. The sender finds it when it is durable, with everything that it depends on."""
    journal = driver.journal
    body = journal.pack_into(command.body(), command.field)
    seq = driver.record(command.kind, "", body)
    journal.beside_events().answers.append(AnswerRow(driver.run, command.number, journal.generation, seq))
    crash_point("request.answered")
    driver.writer.save(waited_for=True)


log = logger("everstep.run")


def record_checkpoint(driver: "Driver", command: TakeCheckpoint) -> None:
    """Record a checkpoint: the code's state, what its execution remembers, and what only the driver knows."""
    journal, part = driver.journal, command.part
    seq, previous = journal.seq + 1, journal.digest
    part.first, part.first_digest = driver.beside.first_checkpoint or (seq, b"")
    part.clock_started = driver.clock_started
    # Answers to `patched` that the code asked for after the checkpoint are recorded before it, and would be left out.
    part.patches = driver.execution.patches
    part.published = driver.published
    part.accepted = {number: digest for number, digest in driver.accepted.items() if number <= part.first}
    # Not what the code knew when it asked: a restore of the store is noted after the replay.
    part.caution, part.life = driver.execution.caution, driver.app.life
    part.restores = restores_in(part.life)
    part.unseen_workers = sorted(driver.execution.unseen_workers)
    if part.books is not None and driver.execution.books is not None:
        part.books.head = driver.execution.books.kept_head()
    saga = driver.execution.saga
    part.is_undoable, part.uncompensated = saga.needs_its_code, saga.remembered()
    engine, state = packed(encode_part(part)), packed(command.state)
    digest = checkpoint_digest(driver.run, journal.generation, seq, previous, engine, state)
    body = command.body()
    body.digest = digest.hex()
    driver.record(command.kind, "", body)
    journal.attachments().checkpoints.append(
        CheckpointRow(driver.run, journal.generation, seq, previous, engine, state, digest, complete=1)
    )
    journal.attachments().checkpoints_kept = command.keep
    driver.note_checkpoint(seq, journal.digest)
    crash_point("checkpoint.recorded")
    driver.writer.save(waited_for=False)


def report_damage(driver: "Driver") -> None:
    """Move the checkpoints that recovery could not use to the archive, with a note that says so."""
    journal = driver.journal
    for seq, why, row in driver.take_damaged_checkpoints():
        crash_point("checkpoint.archived")
        driver.record("checkpoint_damaged", "", ev.CheckpointDamaged(seq, why, row is not None))
        if row is not None:
            whole = archive_bytes(CHECKPOINT_COLUMNS, row)
            archived = ArchiveRow(row.run, row.generation, "checkpoint", row.seq, whole, why, journal.at)
            journal.attachments().archive.append(archived)
        log.warning("The checkpoint at event %d of run %s was not used: %s.", seq, driver.run, why)
    driver.writer.save(waited_for=False)


def record_continued(driver: "Driver", command: ContinueRun) -> None:
    """Record the end of this generation together with the beginning of the next one."""
    unapplied = [(kind, body) for _, _, kind, body, _ in driver.execution.unapplied]
    if any(kind in STOPPING for kind, _ in unapplied):
        return  # it was recorded before the code's end: the code sees it, and the consequences count
    crash_point("run.continue")
    execution, journal, row = driver.execution, driver.journal, driver.row
    for kind, body in unapplied:
        if kind in ("signal_received", "request_received"):
            execution.let_arrive(kind, body)
    driver.end_generation(command)
    renewal = continued_run(
        execution.workflow,
        row,
        command.arguments,
        at=journal.at,
        owner=driver.app.worker,
        randomness=driver.app.randomness,
        origin=Origin(
            driver.app.store.chain.writing,
            life=driver.app.life,
            entropy=derived_key(execution.entropy, f"#generation {row.generation + 1}"),
        ),
        budget=driver.beside.allotment,
        carried=_carried(driver),
    )
    driver.renew(renewal)


def _carried(driver: "Driver") -> Carried:
    execution = driver.execution
    carried = Carried(driver.journal.digest.hex(), driver.row.created_at, driver.clock_started)
    carried.signals = execution.receiving.unreceived()
    if execution.receiving.requests is not None:
        carried.requests = execution.receiving.requests.untaken()
    carried.facts = {
        subject: msgspec.Raw(msgspec.json.encode(KeptFact.of(taken))) for subject, taken in execution.witnesses.items()
    }
    carried.published = driver.published
    carried.caution, carried.unseen_workers = execution.caution, sorted(execution.unseen_workers)
    carried.uncompensated = execution.saga.remembered()
    carried.undoable = execution.saga.carried(execution, driver.journal.pack)
    if execution.books is not None:
        carried.accounts = execution.books.head.carried()
    return carried
