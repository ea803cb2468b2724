"""Deleting ended runs part by part, and moving runs between stores: within an open transaction."""

from typing import Final

from everstep.model.events import EventRow
from everstep.model.forked import TAG
from everstep.model.ids import STEP_PREFIX
from everstep.model.status import ENDED
from everstep.stores.protocol import Accepted, CheckpointRow, Delivery, Refused, Verdict
from everstep.stores.rows.answers_and_streams import AnswerRow, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import UNSETTLED
from everstep.stores.rows.transfer import (
    Arrival,
    ClaimFamily,
    Deleted,
    DeletePart,
    ImportRuns,
    MarkerRow,
    RunDump,
    arrived,
    numbered,
)
from everstep.stores.sql.rows import (
    as_json,
    effect_row,
    effect_values,
    hold_row,
    run_row,
    run_values,
    tag_values,
)
from everstep.stores.sql.statements import Statements

LARGE: Final = ("events", "payloads", "checkpoints", "archive", "signals", "streams")
"""The tables that may have very many rows, or very large ones, for one run."""
WEIGHTS: Final = {"payloads": 10, "checkpoints": 10}
"""The cost of deleting a row of a table, relative to an ordinary row."""


class Moving:
    """A connection's operations on whole runs."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._all = statements.all
        self._run = statements.run
        self._many = statements.many

    # -- deleting -------------------------------------------------------------------------------------------------
    def claim(self, family: ClaimFamily) -> Verdict:
        """Claim a family of runs for its deletion, or refuse it and change nothing."""
        runs, epochs = self._statements.texts(list(family.epochs)), self._statements.numbers([*family.epochs.values()])
        if self._all("as_judged", runs, epochs, family.before, STEP_PREFIX)[0][0] < len(family.epochs):
            return Refused("fenced")
        if self._all("is_needed", runs, TAG)[0][0]:
            return Refused("taken")
        self._run("claim_family", runs, family.worker)
        self._run("note_deletions", runs, family.at)
        return Accepted()

    def delete(self, part: DeletePart) -> Verdict:
        """Delete a part of an ended run, or refuse it and change nothing."""
        rows = self._all("state_of_run", part.run)
        if not rows:
            return Refused("missing")
        status, epoch, generation, is_held = rows[0]
        if epoch != part.epoch or status not in ENDED or is_held:
            return Refused("fenced")
        deleted, left = 0, part.limit
        for table in LARGE:
            weight = WEIGHTS.get(table, 1)
            gone = self._run(f"delete_{table}", part.run, max(1, left // weight))
            deleted, left = deleted + gone, left - gone * weight
            if left <= 0:
                self._run("note_deletion", part.run, generation, part.at)
                return Deleted(deleted, False)
        for name in (
            "answers",
            "holds",
            "notifications",
            "followers",
            "following",
            "markers",
            "relied",
            "deletion",
            "arrival",
            "run",
        ):
            self._run(f"delete_{name}", part.run)
        return Deleted(deleted + 1, True)

    # -- moving ---------------------------------------------------------------------------------------------------
    def dump(self, run: str) -> RunDump | None:
        """Read everything of a run."""
        rows = self._all("dump_run", run)
        if not rows:
            return None
        return RunDump(
            run_row(rows[0]),
            [(row[0], EventRow(*row[1:])) for row in self._all("dump_events", run)],
            [(digest, value) for digest, value in self._all("dump_payloads", run)],
            [CheckpointRow(*row) for row in self._all("dump_checkpoints", run)],
            [Delivery(*row) for row in self._all("dump_signals", run)],
            [(follower, call) for follower, call in self._all("dump_followers", run)],
            [hold_row(row) for row in self._all("dump_holds", run)],
            [effect_row(row) for row in self._all("dump_effects", run)],
            [(key, call) for key, call in self._all("dump_waiters", run)],
            [ArchiveRow(*row) for row in self._all("dump_archive", run)],
            [MarkerRow(*row) for row in self._all("dump_markers", run)],
            [AnswerRow(*row) for row in self._all("dump_answers", run)],
            [EntryRow(*row) for row in self._all("dump_entries", run)],
            [Arrival(*row) for row in self._all("arrival", run)],
        )

    def accept(self, operation: ImportRuns) -> Verdict:
        """Insert runs of another store, or refuse them and change nothing."""
        dumps, texts = operation.dumps, self._statements.texts
        ids = texts([dump.row.id for dump in dumps])
        holds = texts([hold.id for dump in dumps for hold in dump.holds])
        markers = texts([marker.key for dump in dumps for marker in dump.markers])
        if self._all("are_taken", ids, holds, markers)[0][0]:
            return Refused("taken")
        keys = [row.key for dump in dumps for row in dump.effects if row.state in UNSETTLED]
        if self._all("are_keys_taken", texts(keys))[0][0]:
            return Refused("key")
        for dump in dumps:
            self._put(dump)
        return Accepted()

    def _put(self, dump: RunDump) -> None:
        row = arrived(dump)
        run = row.id
        self._run("put_run", *run_values(row))
        self._many("put_tag", tag_values(row))
        self._many("put_event", [(run, generation, *event) for generation, event in dump.events])
        self._many("put_payload", [(run, *one) for one in dump.payloads])
        self._many("put_checkpoint", dump.checkpoints)
        moved: dict[int, int] = {}
        for number, one in list(numbered(dump, lambda number: bool(self._all("number_taken", number)))):
            kept = (number, run, one.kind, one.name, one.id, one.value, one.at, one.state)
            ((moved[one.number],),) = self._all("put_delivery", *kept)
        self._many("put_answer", [one._replace(number=moved.get(one.number, one.number)) for one in dump.answers])
        self._many("put_entry", dump.entries)
        self._many("put_follower", [(run, *one) for one in dump.followers])
        for hold in dump.holds:
            facts = (hold.id, run, hold.reason, hold.step, hold.summary, hold.report, as_json(hold.resolutions))
            end = (hold.created_at, hold.resolved_at, hold.resolution, hold.by, hold.note)
            self._run("put_hold", *facts, *end)
        self._many("put_effect", [effect_values(one) for one in dump.effects])
        self._many("put_waiter", [(key, run, call) for key, call in dump.waits])
        self._many("put_archived", dump.archive)
        self._many("put_marker", dump.markers)
        self._many("put_arrival", dump.arrivals)
