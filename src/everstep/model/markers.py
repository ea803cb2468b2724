"""Markers: how a database remembers that an atomic step has happened in it.

A marker is a row of the table `everstep_markers` in the database that the step writes to. It is committed in one
transaction with everything that the step's body wrote, so both are there or neither is. Its key is the step's key, and
it holds the step's outcome: whoever finds it need not run the body any more.

A marker without an outcome is *void*: attempts up to its number have not happened and must not happen any more. It is
written when a step is settled as not done while an earlier attempt, of a process that merely stands still, could wake
up and commit.
"""

from typing import NamedTuple


class Marker(NamedTuple):
    """A row of `everstep_markers`. `at` is microseconds since 1970; without an `outcome` it is void."""

    key: str
    run: str
    step: str
    attempt: int
    outcome: bytes | None
    at: int
