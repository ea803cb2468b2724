"""What each SQLSTATE of PostgreSQL says about a transaction, in one table.

Only an error that is certainly about the values of a unit may be blamed on its run. A code that says nothing about
them, and a code that is not in the table, leave an unknown commit: the store reads back, and tries again.
"""

from typing import Final, Literal

Ground = Literal["lost", "again", "value", "full", "forbidden", "unusable", "damaged"]
"""The cause of an error, which decides what is done about it.

  lost: the session is gone or useless, or leads to a server that does not write. Reconnect, read back, try again.
  again: anything that says nothing about the data, and every unknown code. Roll back, and read back and try again with
    pauses that grow: in the same session, unless it cannot be rolled back.
  value: the values of a unit. The batch is tried one by one, and the run that fails by itself is held.
  full: no room on the server's disk. Work pauses until there is.
  forbidden: the role lacks a right. Work pauses until it is granted; no run is held.
  unusable: the tables are not those of this release. Work pauses; no run is held.
  damaged: the server found its own files damaged. This process stops writing; no run is held.
"""

CLASSES: Final[dict[str, Ground]] = {
    "00": "again",  # successful completion
    "01": "again",  # warning
    "02": "again",  # no data
    "03": "again",  # statement not yet complete
    "08": "lost",  # connection exception
    "09": "again",  # triggered action exception
    "0A": "lost",  # feature not supported; also "cached plan must not change result type", which a new session mends
    "0B": "again",  # invalid transaction initiation
    "0F": "again",  # locator exception
    "0L": "forbidden",  # invalid grantor
    "0P": "forbidden",  # invalid role specification
    "0Z": "again",  # diagnostics exception
    "10": "again",  # XQuery error
    "20": "again",  # case not found
    "21": "again",  # cardinality violation
    "22": "value",  # data exception
    "23": "value",  # integrity constraint violation; in a table that is not ours: again
    "24": "again",  # invalid cursor state
    "25": "again",  # invalid transaction state
    "26": "lost",  # invalid statement name: a pooler gave the session to another client
    "27": "again",  # triggered data change violation
    "28": "forbidden",  # invalid authorization
    "2B": "forbidden",  # dependent privileges exist
    "2D": "again",  # invalid transaction termination
    "2F": "again",  # SQL routine exception
    "34": "again",  # invalid cursor name
    "38": "again",  # external routine exception
    "39": "again",  # external routine invocation exception
    "3B": "again",  # savepoint exception
    "3D": "unusable",  # invalid catalog name
    "3F": "unusable",  # invalid schema name
    "40": "again",  # transaction rollback
    "42": "unusable",  # syntax error or access rule violation
    "44": "unusable",  # a check option of a view
    "53": "again",  # insufficient resources
    "54": "value",  # program limit exceeded
    "55": "again",  # object not in prerequisite state, and locks
    "57": "again",  # operator intervention, and cancelled statements
    "58": "again",  # system error outside of PostgreSQL
    "72": "again",  # snapshot too old
    "F0": "again",  # configuration file error
    "HV": "again",  # foreign data wrapper
    "P0": "again",  # PL/pgSQL: a trigger that is not ours
    "XX": "again",  # internal error
}
"""The meaning of the first two characters of a code."""

STATES: Final[dict[str, Ground]] = {
    "25006": "lost",  # read-only: the server is a standby, or has become one
    "25P03": "lost",  # idle in a transaction for too long
    "25P04": "lost",  # a transaction for too long
    "42501": "forbidden",
    "42P05": "lost",  # a prepared statement of this name is there already: a pooler
    "53100": "full",
    "57P01": "lost",  # the server is being shut down, or the session was ended
    "57P02": "lost",
    "57P03": "lost",
    "57P04": "lost",
    "57P05": "lost",  # idle for too long
    "XX001": "damaged",
    "XX002": "damaged",
}
"""Codes that differ from the rest of their class."""

GIVE_WAY: Final = frozenset({"40001", "40P01", "55P03"})
"""The transaction gave way to another one and is certainly undone: it is repeated at once, in the same session."""

PASSING: Final = ("40", "53", "55006", "55P03", "57014")
"""Codes that say nothing about the data, even of a transaction in which a user's tables and triggers take part."""


def passes(sqlstate: str) -> bool:
    """Return True if such a transaction may be repeated: it was in conflict with others, or it was cancelled."""
    return sqlstate.startswith(PASSING)


def ground_of(sqlstate: str) -> Ground:
    """Return the cause that a SQLSTATE names. An unknown one is `again`."""
    return STATES.get(sqlstate) or CLASSES.get(sqlstate[:2], "again")
