"""Markers: how a database remembers that an atomic step has happened in it.

A marker is a row of the table `everstep_markers` in the database that the step writes to. It is committed in one
transaction with everything that the step's body wrote, so both are there or neither is. Its key is the step's key, and
it holds the step's outcome: a process that finds it need not run the body any more.

A marker without an outcome is *void*: attempts up to its number have not happened and must not happen any more. It is
written when a step is settled as not done while an earlier attempt, of a process that is only suspended, could wake up
and commit.

An outcome is kept with its seal: a damaged one is detected, and with a chain key also a forged one.
"""

from typing import NamedTuple

from everstep.errors import Damaged
from everstep.model.chains import ChainKeys


class Marker(NamedTuple):
    """A row of `everstep_markers`. `at` is microseconds since 1970; without an `outcome` it is void."""

    key: str
    run: str
    step: str
    attempt: int
    outcome: bytes | None
    at: int


def seal_outcome(chain: ChainKeys, key: str, outcome: bytes) -> bytes:
    """Return an outcome as a marker stores it: its seal, a line break, and the outcome."""
    return chain.seal(outcome, key).encode() + b"\n" + outcome


def open_outcome(chain: ChainKeys, key: str, kept: bytes) -> bytes:
    """Return the outcome that a marker keeps, verified."""
    seal, _, outcome = bytes(kept).partition(b"\n")
    try:
        chain.check(outcome, seal.decode("ascii"), "The marker of an atomic step", key)
    except UnicodeDecodeError:
        raise Damaged("The marker of an atomic step does not match its digest.") from None
    return outcome
