"""Schedules in a SQL database: rows to and from the table."""

from everstep.stores.rows.schedules import ScheduleRow
from everstep.stores.sql.rows import Row, text


def schedule_values(row: ScheduleRow) -> Row:
    """Return a schedule as the parameters of its statements."""
    facts = (row.name, row.workflow, row.revision, row.next_at, int(row.waits))
    return (*facts, row.definition, row.state, row.created_at)


def schedule_row(row: Row) -> ScheduleRow:
    """Return a schedule as it is stored."""
    name, workflow, revision, next_at, waits, definition, state, created_at = row
    return ScheduleRow(
        name=text(name),
        workflow=text(workflow),
        revision=revision,
        next_at=next_at,
        waits=bool(waits),
        definition=definition,
        state=state,
        created_at=created_at,
    )
