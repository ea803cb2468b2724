"""What frameworks save in a store: threads of saved states, and items. What they mean it does not know.

A thread is a conversation of an agent. It has states by namespace and id, each with what became of the calls that were
made in it (writes). The values of a state are in parts that several states share: a series of parts is a value that
grows at its end, and a state names the last part that is its own. Nothing refers to anything by a foreign key, for
writes may arrive before their state. Whoever runs a thread takes it first, and is fenced by its epoch, as with runs.
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
    """What the framework calls the run that made it; nothing to do with runs of ours."""
    body: bytes
    digest: bytes
    at: int


class SavedPart(NamedTuple):
    """A part of a value: the parts of a series up to a number, one behind the other, are the value."""

    namespace: str
    channel: str
    series: str
    number: int
    value: bytes
    digest: bytes


class SavedWrite(NamedTuple):
    """What a call that was made in a state came to, before the next state has it."""

    namespace: str
    state: str
    call: str
    place: int
    path: str
    channel: str
    body: bytes
    digest: bytes


class SavedItem(NamedTuple):
    """A value under a key in a namespace, apart from all threads."""

    namespace: str
    key: str
    value: bytes
    created_at: int
    updated_at: int
    expires_at: int | None = None
    seconds: float | None = None
    """For how long it lives from each change on, and if wanted from each look at it."""


END: Final = "."
"""What is written behind each label of a namespace."""
ESCAPE: Final = "\x1b"
"""In a label `.` is written as this and `1`, and this itself, where a `0` or `1` follows it, as this and `0`."""


def namespace_of(labels: Sequence[str]) -> str:
    """Return the namespace of an item as it is stored: no two have the same text."""
    written = (re.sub(f"{ESCAPE}(?=[01])", f"{ESCAPE}0", label).replace(END, f"{ESCAPE}1") for label in labels)
    return "".join(label + END for label in written)


def labels_of(stored: str) -> list[str]:
    """Return the labels that `namespace_of` was given."""
    labels = stored.split(END)[:-1]
    if ESCAPE not in stored:
        return labels
    return [re.sub(f"{ESCAPE}([01])", lambda found: END if found[1] == "1" else ESCAPE, label) for label in labels]


class ThreadDump(msgspec.Struct):
    """All that a store has of one thread."""

    thread: str
    born: int = 0
    """When it was first taken: the places of the steps in its nodes derive from it."""
    states: list[SavedState] = []
    parts: list[SavedPart] = []
    writes: list[SavedWrite] = []


class ThreadOwner(NamedTuple):
    """Who runs a thread, or did last."""

    owner: str | None
    epoch: int
    since: int
    born: int
    """When it was first taken."""


class ChangeThread(msgspec.Struct, gc=False):
    """Everything that is written to one thread at once.

    Accepted only from whoever may: with an `epoch`, if `worker` has the thread at that epoch, else `Refused("fenced")`;
    without one, if no other living worker has it at `at`, else `Refused("taken")`. A part that is there already with
    another digest is `Refused("key")`: the series went on otherwise. Done twice it changes nothing the second time.
    """

    thread: str
    at: int
    worker: str = ""
    epoch: int = 0
    states: Sequence[SavedState] = ()
    """New ones, or others in the place of those with the same ids."""
    parts: Sequence[SavedPart] = ()
    writes: Sequence[SavedWrite] = ()
    """Of those with the same place the first one stays."""
    rewrites: Sequence[SavedWrite] = ()
    """Of those with the same place the last one stays."""
    forgotten: Sequence[tuple[str, str]] = ()
    """States, by namespace and id, that go with their writes."""
    unneeded: Sequence[tuple[str, str, str]] = ()
    """Series of parts, by namespace, channel and series, that go."""
    everything: bool = False
    """Whether all that the thread has goes first."""
    unchanged_since: int | None = None
    """With `everything`: only if no state is from this time or later, and no worker has taken the thread since.

    Otherwise, or if the thread has no state, `Refused("changed")`: it was used after the caller had found it old.
    """
    born: int = 0
    """When it was first taken, if it comes from another store."""


class TakeThread(msgspec.Struct, gc=False):
    """Take the right to run a thread. Verdict: `Taken`, or `Refused("taken")` while another living worker has it."""

    thread: str
    worker: str
    at: int


class FreeThread(msgspec.Struct, gc=False):
    """Give it back. `Refused("fenced")` if it is another's by now."""

    thread: str
    worker: str
    epoch: int


class ChangeItems(msgspec.Struct, gc=False):
    """Put items and delete others. When one was created stays as it was."""

    items: Sequence[SavedItem] = ()
    deleted: Sequence[tuple[str, str]] = ()
    seen: Sequence[tuple[str, str, int]] = ()
    """Items by namespace and key that live on until a new time, because somebody looked at them."""
    expired: Sequence[tuple[str, str, int]] = ()
    """Items by namespace and key that are deleted last, each if its time is over at this time: it may be new by now."""


class Taken(msgspec.Struct, frozen=True):
    """The thread is the worker's, at this epoch. `born` is when it was first taken by anybody."""

    epoch: int
    born: int


SavedOperation = ChangeThread | TakeThread | FreeThread | ChangeItems


class SavedReads(Protocol):
    """What a store tells about threads and items."""

    def state(self, thread: str, namespace: str, id: str) -> SavedState | None:
        """Return a state."""
        ...

    def states(
        self, thread: str, namespace: str | None = None, before: tuple[str, str] | None = None, limit: int = 100
    ) -> list[SavedState]:
        """Return states by falling ids, then namespaces: in one namespace or all, after one of the page before."""
        ...

    def lineage(self, thread: str, namespace: str, id: str, limit: int = 100) -> list[SavedState]:
        """Return a state, its parent, the parent's parent and so on, as far as they are there."""
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
        """Return threads by their ids, after one; those only whose newest state is from before a time."""
        ...

    def of_origins(self, origins: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return the states of origins, by thread, namespace and id."""
        ...

    def owner(self, thread: str) -> ThreadOwner | None:
        """Return who runs a thread."""
        ...

    def item(self, namespace: str, key: str, at: int) -> SavedItem | None:
        """Return an item that is alive at a time."""
        ...

    def items(self, prefix: str, at: int, after: tuple[str, str] = ("", ""), limit: int = 100) -> list[SavedItem]:
        """Return living items in namespaces with a prefix, by namespace and key, after one of the page before."""
        ...

    def namespaces(self, at: int, after: str = "", limit: int = 1000) -> list[str]:
        """Return the namespaces of living items, after one."""
        ...

    def dead_items(self, at: int, limit: int = 1000) -> list[tuple[str, str]]:
        """Return items whose time is over."""
        ...
