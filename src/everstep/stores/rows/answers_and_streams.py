"""What a run writes in addition to its history: where its answers are, and the entries of its streams.

Both are written in the transaction of the append that they belong to, so a worker that lost its lease writes none.
"""

from typing import Final, NamedTuple, Protocol

import msgspec

ENTRY_COLUMNS: Final = (
    "run", "generation", "name", "position", "seq", "step", "attempt", "first", "secret", "at", "value", "digest",
)  # fmt: skip


class AnswerRow(NamedTuple):
    """Which event of the history holds the answer to a request. `number` is the request's in the inbox."""

    run: str
    number: int
    generation: int
    seq: int


class EntryRow(NamedTuple):
    """An entry of a stream as it is stored. The reader verifies it.

    Positions are dense, from 1, in the order of writing. The digest covers the entry before it.
    """

    run: str
    generation: int
    name: str
    position: int
    seq: int
    """The newest event of the run when it was written; its own event's number if workflow code wrote it."""
    step: str
    """The step whose body wrote it; empty if workflow code did."""
    attempt: int
    first: int
    """Whether it is the first one that its attempt wrote to this stream."""
    secret: int
    at: int
    value: bytes
    digest: bytes


class Beside(msgspec.Struct, gc=False):
    """What an append writes in addition to its events. Existing rows stay as they are."""

    answers: list[AnswerRow] = []
    entries: list[EntryRow] = []


class ApprovalStore(Protocol):
    """What a store offers for lists of approvals."""

    def asking(self) -> list[str]:
        """Return ids of the unfinished runs whose newest history asks for an approval, answered or not."""
        ...
