"""Checkpoints, as a driver records them: each in one transaction with its event; damaged ones go to the archive."""

from typing import TYPE_CHECKING

from everstep.engine.checkpoints import TakeCheckpoint, encode_part
from everstep.engine.journal import packed
from everstep.engine.restoring import restores_in
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.model.digests import checkpoint_digest
from everstep.model.untrusted import logger
from everstep.stores.archive import CHECKPOINT_COLUMNS, ArchiveRow, archive_bytes
from everstep.stores.protocol import CheckpointRow

if TYPE_CHECKING:
    from everstep.engine.driver import Driver

log = logger("everstep.run")


def record(driver: "Driver", command: TakeCheckpoint) -> None:
    """Record a checkpoint: what the code gave, what its execution remembers, and what only the driver knows."""
    journal, part = driver.journal, command.part
    seq, previous = journal.seq + 1, journal.digest
    part.first, part.first_digest = driver.first_checkpoint or (seq, b"")
    part.clock_started = driver.clock_started
    # Answers to questions that the code asked after the checkpoint are recorded before it, and would be left out.
    part.patches = driver.execution.patches
    part.published = driver.published
    part.accepted = {number: digest for number, digest in driver.accepted.items() if number <= part.first}
    # Not what the code knew when it asked: that the store was restored is noted after the replay.
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
    journal.and_more().checkpoints.append(
        CheckpointRow(driver.run, journal.generation, seq, previous, engine, state, digest, complete=1)
    )
    journal.and_more().checkpoints_kept = command.keep
    if driver.first_checkpoint is None:
        driver.first_checkpoint = (seq, journal.digest)
    crash_point("checkpoint.recorded")
    driver.saver.save(waited_for=False)


def report_damage(driver: "Driver") -> None:
    """Move the checkpoints that recovery had to pass over to the archive, with a note that says so."""
    journal = driver.journal
    for seq, why, row in driver.damaged_checkpoints:
        crash_point("checkpoint.archived")
        driver.record("checkpoint_damaged", "", ev.CheckpointDamaged(seq, why, row is not None))
        if row is not None:
            whole = archive_bytes(CHECKPOINT_COLUMNS, row)
            archived = ArchiveRow(row.run, row.generation, "checkpoint", row.seq, whole, why, journal.at)
            journal.and_more().archive.append(archived)
        log.warning("The checkpoint at event %d of run %s was passed over: %s.", seq, driver.run, why)
    driver.damaged_checkpoints = ()
    driver.saver.save(waited_for=False)
