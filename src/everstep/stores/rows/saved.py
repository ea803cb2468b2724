"""What frameworks save in a store: threads of saved states, and items. The store does not interpret them.

A thread is a conversation of an agent. It has states by namespace and id, each with the results of the calls that were
made in it (writes). The values of a state are in parts that several states share: a series of parts is a value that
grows at its end, and a state names the last part that belongs to it. There are no foreign keys, because writes may
arrive before their state. A worker takes a thread before it runs it, and is fenced by its epoch, as with runs.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec


class SavedState(NamedTuple):
    """A state of a thread, in a namespace. States are ordered by their ids."""

    namespace: str
    id: str
    parent: str
    origin: str
    """The framework's own name of the run that made it, unrelated to runs in this store."""
    body: bytes
    digest: bytes
    at: int


class SavedPart(NamedTuple):
    """A part of a value. The value is the concatenation of a series' parts up to a number."""

    namespace: str
    channel: str
    series: str
    number: int
    value: bytes
    digest: bytes


class SavedWrite(NamedTuple):
    """The result of a call that was made in a state, before the next state includes it."""

    namespace: str
    state: str
    call: str
    place: int
    path: str
    channel: str
    body: bytes
    digest: bytes


class SavedItem(NamedTuple):
    """A value under a key in a namespace, independent of threads."""

    namespace: str
    key: str
    value: bytes
    created_at: int
    updated_at: int
    expires_at: int | None = None
    seconds: float | None = None
    """How long it lives after each change, and if wanted after each read."""


END: Final = "."
"""The separator that is written after each label of a namespace."""
ESCAPE: Final = "\x1b"
"""In a label, `.` is written as this and `1`; this character itself, if `0` or `1` follows it, as this and `0`."""


def namespace_of(labels: Sequence[str]) -> str:
    """Return the stored text of an item's namespace. No two namespaces have the same text."""
    written = (re.sub(f"{ESCAPE}(?=[01])", f"{ESCAPE}0", label).replace(END, f"{ESCAPE}1") for label in labels)
    return "".join(label + END for label in written)


def labels_of(stored: str) -> list[str]:
    """Return the labels that were given to `namespace_of`."""
    labels = stored.split(END)[:-1]
    if ESCAPE not in stored:
        return labels
    return [re.sub(f"{ESCAPE}([01])", lambda found: END if found[1] == "1" else ESCAPE, label) for label in labels]


class ThreadDump(msgspec.Struct):
    """All that a store has of one thread."""

    thread: str
    born: int = 0
    """When the thread was first taken. The ids of the steps in its nodes derive from it."""
    states: list[SavedState] = []
    parts: list[SavedPart] = []
    writes: list[SavedWrite] = []


class ThreadOwner(NamedTuple):
    """The worker that runs a thread, or did last."""

    owner: str | None
    epoch: int
    since: int
    born: int
    """When the thread was first taken."""


class ChangeThread(msgspec.Struct, gc=False):
    """Everything that is written to one thread at once.

    With an `epoch`, accepted only if `worker` has the thread at that epoch, else `Refused("fenced")`; without one, only
    if no other living worker has it at `at`, else `Refused("taken")`. A part that exists already with another digest is
    `Refused("key")`: the series continued differently. Repeating the operation changes nothing.
    """

    thread: str
    at: int
    worker: str = ""
    epoch: int = 0
    states: Sequence[SavedState] = ()
    """New states. They replace those with the same ids."""
    parts: Sequence[SavedPart] = ()
    writes: Sequence[SavedWrite] = ()
    """Writes to add. An existing one with the same place stays."""
    rewrites: Sequence[SavedWrite] = ()
    """Writes that replace those with the same place."""
    forgotten: Sequence[tuple[str, str]] = ()
    """States to delete with their writes, by namespace and id."""
    unneeded: Sequence[tuple[str, str, str]] = ()
    """Series of parts to delete, by namespace, channel and series."""
    everything: bool = False
    """Whether the whole content of the thread is deleted first."""
    unchanged_since: int | None = None
    """With `everything`: only if no state is from this time or later, and no worker has taken the thread since.
    Otherwise, or if the thread has no state, `Refused("changed")`: it was used after the caller had found it old.
    """
    born: int = 0
    """When the thread was first taken, if it comes from another store."""


class TakeThread(msgspec.Struct, gc=False):
    """Take the right to run a thread. Verdict: `Taken`, or `Refused("taken")` while another living worker has it."""

    thread: str
    worker: str
    at: int


class FreeThread(msgspec.Struct, gc=False):
    """Give the thread back. `Refused("fenced")` if another worker has taken it."""

    thread: str
    worker: str
    epoch: int


class ChangeItems(msgspec.Struct, gc=False):
    """Put items and delete others. An existing item keeps its time of creation."""

    items: Sequence[SavedItem] = ()
    deleted: Sequence[tuple[str, str]] = ()
    seen: Sequence[tuple[str, str, int]] = ()
    """Items, by namespace and key, whose lives are extended until a new time because they were read."""
    expired: Sequence[tuple[str, str, int]] = ()
    """Items to delete last, by namespace and key, each only if it has expired at this time: it may be new by now."""


class Taken(msgspec.Struct, frozen=True):
    """The thread is the worker's, at this epoch. `born` is when it was first taken by any worker."""

    epoch: int
    born: int


SavedOperation = ChangeThread | TakeThread | FreeThread | ChangeItems


class SavedReads(Protocol):
    """What a store answers about threads and items."""

    def state(self, thread: str, namespace: str, id: str) -> SavedState | None:
        """Return a state, or None."""
        ...

    def states(
        self, thread: str, namespace: str | None = None, before: tuple[str, str] | None = None, limit: int = 100
    ) -> list[SavedState]:
        """Return states by falling ids, then namespaces: in one namespace or all, after `before`."""
        ...

    def lineage(self, thread: str, namespace: str, id: str, limit: int = 100) -> list[SavedState]:
        """Return a state, its parent, the parent's parent and so on, as far as they exist."""
        ...

    def writes(self, thread: str, namespace: str, states: Sequence[str]) -> list[SavedWrite]:
        """Return the writes of states, by state, path, call and place."""
        ...

    def parts(self, thread: str, namespace: str, channel: str, series: str, upto: int) -> list[SavedPart]:
        """Return the parts of a series up to a number, in order."""
        ...

    def series(self, thread: str) -> list[tuple[str, str, str]]:
        """Return all series of a thread, by namespace, channel and series."""
        ...

    def threads(self, after: str = "", limit: int = 100, before: int | None = None) -> list[str]:
        """Return ids of threads after one, in order; with `before` only those whose newest state is older."""
        ...

    def of_origins(self, origins: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return the states that these origins made, by thread, namespace and id."""
        ...

    def owner(self, thread: str) -> ThreadOwner | None:
        """Return the worker that runs a thread."""
        ...

    def item(self, namespace: str, key: str, at: int) -> SavedItem | None:
        """Return an item that has not expired at a time."""
        ...

    def items(self, prefix: str, at: int, after: tuple[str, str] = ("", ""), limit: int = 100) -> list[SavedItem]:
        """Return unexpired items in namespaces with a prefix, by namespace and key, after `after`."""
        ...

    def namespaces(self, at: int, after: str = "", limit: int = 1000) -> list[str]:
        """Return the namespaces of unexpired items, after `after`."""
        ...

    def dead_items(self, at: int, limit: int = 1000) -> list[tuple[str, str]]:
        """Return expired items."""
        ...
